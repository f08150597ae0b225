"""The watchdog: what counts as hanging, what becomes of a test that hangs, and of the tests after it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hangs
import pytest

TESTS = Path(__file__).parents[1]
only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs what only Linux has")
HANGS = """
import os, threading, pytest

def test_before(): pass

@pytest.mark.watchdog(0.5)
def test_hang():
    print(f"process {os.getpid()}")
    threading.Thread(target=threading.Event().wait, name="peer").start()
    threading.Event().wait()

def test_after(): print(f"process {os.getpid()}")
"""


def given_up_at(own: float, children: float = 0.0) -> float:
    """Return when a test with a limit of ten seconds is given up that gets so much of a processor, all the time."""
    watch = hangs.Watch(10.0, 1000.0, 50.0)
    times = (half_seconds / 2 for half_seconds in range(1, 1000))
    return next(t for t in times if watch.is_over(1000.0 + t, 50.0 + own * t, lambda t=t: children * t))


@pytest.mark.parametrize("own", [0.0, 0.0005])
def test_test_that_gets_no_processor_is_given_up_after_its_limit(own):
    assert given_up_at(own) == 10.0


@pytest.mark.parametrize("own", [1.0, 4.0])
def test_test_that_computes_is_given_up_after_its_limit(own):
    assert given_up_at(own) == 10.0


def test_test_that_gets_a_fifth_of_a_processor_has_five_times_as_long():
    assert given_up_at(0.2) == 50.0


def test_test_that_is_neither_idle_nor_busy_is_given_up_at_the_latest_after_ten_times_its_limit():
    assert given_up_at(0.02) == 100.0


@pytest.mark.parametrize(("children", "seconds"), [(0.5, 100.0), (0.0005, 10.0)])
def test_test_whose_child_computes_is_not_idle(children, seconds):
    assert given_up_at(0.0, children) == seconds


def test_children_are_looked_at_only_while_the_process_is_idle():
    watch, looks = hangs.Watch(10.0, 0.0, 0.0), []
    for now in range(1, 30):
        watch.is_over(float(now), min(now, 10.0) / 5, lambda now=now: looks.append(now) or 0.0)
    assert looks == list(range(15, 30))


def test_test_is_given_up_after_its_limit_without_progress_and_not_after_all_its_idle_times():
    watch = hangs.Watch(10.0, 0.0, 0.0)
    readings = [(9.0, 0.0), (9.5, 1.0), (19.0, 1.0), (19.5, 1.0)]
    assert [watch.is_over(now, own, float) for now, own in readings] == [False, False, False, True]


def test_own_seconds_are_those_of_other_threads():
    def spin() -> None:
        while time.thread_time() < end:
            pass

    before, end = hangs.own_seconds(), time.thread_time() + 0.2
    spin()
    between, end = hangs.own_seconds(), 0.2
    other = threading.Thread(target=spin)
    other.start()
    other.join()
    assert between - before < 0.1
    assert hangs.own_seconds() - between > 0.1


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    program = "import time\nwhile time.process_time() < 60: pass"  # which ends, if nobody is left to end it
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@only_linux
def test_seconds_of_children_are_those_of_running_and_of_ended_ones():
    before = hangs.seconds_of_children()
    with busy_processes(1):
        while hangs.seconds_of_children() - before < 0.2:
            pass
    assert hangs.seconds_of_children() - before > 0.1  # Far from 0.2, which it can miss by a rounding error.


def run_pytest(folder: Path, tests: str, *options: str) -> tuple[int, str]:
    """Run pytest with the watchdog alone; return its status, and what it has printed."""
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:cacheprovider -p hangs\npythonpath = {TESTS}\n")
    (folder / "test_of_its_own.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-rA", *options]
    run = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    return run.returncode, run.stdout


@pytest.fixture(scope="module", params=[("-p", "no:xdist"), ("-n1",)], ids=["without workers", "with workers"])
def hang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, int, str]:
    """Whether there was a worker, the status, and what was printed, of a session in which a test hangs."""
    has_worker = request.param == ("-n1",)
    if has_worker:
        pytest.importorskip("xdist")
    return has_worker, *run_pytest(tmp_path_factory.mktemp("hang"), HANGS, *request.param)


def test_hang_is_the_one_failure_of_its_session(hang):
    has_worker, status, output = hang
    assert status == pytest.ExitCode.TESTS_FAILED
    assert f"1 failed, {1 + has_worker} passed in " in output


def test_hang_ends_its_process_and_another_worker_goes_on(hang):
    has_worker, _, output = hang
    hung, *went_on = (text.split()[0] for text in output.split("process ")[1:])
    assert len(went_on) == has_worker
    assert hung not in went_on


def test_hang_is_reported_with_the_stacks_of_all_threads(hang):
    *_, output = hang
    assert "given up, as something hangs: the limit is 0.5 seconds" in output
    for thread, line in {"watched test": "    threading.Event().wait()\n", "peer": "", "MainThread": ""}.items():
        assert line in output.split(f"\n{thread}:\n  File ")[1].split("\n\n")[0]


UNWATCHED = {
    "test that keeps the GIL": """
import ctypes, pytest

@pytest.mark.watchdog(0.1)
def test_hang(): ctypes.PyDLL(None).pause()
""",
    "fixture": """
import threading, pytest

@pytest.fixture
def hangs(): threading.Event().wait()

@pytest.mark.watchdog(0.1)
def test_hang(hangs): pass
""",
}


@only_linux
@pytest.mark.watchdog(60)
@pytest.mark.parametrize("what", UNWATCHED)
def test_hang_that_no_thread_can_watch_ends_the_process_with_the_stacks(tmp_path, what):
    status, output = run_pytest(tmp_path, UNWATCHED[what], "-p", "no:xdist")
    assert status == -signal.SIGALRM
    assert f'{tmp_path / "test_of_its_own.py"}", line ' in output.split("hread 0x", 1)[1]


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(("patience", "status"), [("1", 1), ("100", 0)])
def test_limit_is_multiplied_by_the_option(tmp_path, patience, status):
    tests = "import threading, pytest\n\n@pytest.mark.watchdog(0.1)\ndef test(): threading.Event().wait(1.0)\n"
    assert run_pytest(tmp_path, tests, "-p", "no:xdist", "--patience", patience)[0] == status


@pytest.mark.parametrize("patience", ["0", "-1", "nan", "much"])
def test_patience_that_is_no_positive_number_is_refused(patience):
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a positive number, but got '{patience}'"):
        hangs.positive(patience)


@only_linux
@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_slow_test_on_a_loaded_processor_is_not_given_up(tmp_path):
    """It shares one processor with four other processes, and takes longer than its limit of two seconds."""
    tests = """
import time, pytest

@pytest.mark.watchdog(2)
def test():
    start = time.monotonic()
    while time.thread_time() < 0.6:
        pass
    print(time.monotonic() - start, "seconds")
"""
    processors = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(processors)})  # which children inherit
        with busy_processes(4):
            status, output = run_pytest(tmp_path, tests, "-p", "no:xdist")
    finally:
        os.sched_setaffinity(0, processors)
    assert status == pytest.ExitCode.OK, output
    assert float(output.split(" seconds\n")[0].split()[-1]) > 2.0
