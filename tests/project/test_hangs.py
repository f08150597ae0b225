"""The watchdog: what counts as hanging, what becomes of a test that hangs, and of the tests after it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import hangs
import pytest

TESTS = Path(__file__).parents[1]
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


@pytest.mark.parametrize(
    ("itself", "children", "seconds"),
    [
        (0.0, 0.0, 10.0),  # idle
        (0.0005, 0.0005, 10.0),
        (1.0, 0.0, 10.0),  # in an endless loop
        (0.2, 0.0, 50.0),  # on a fifth of a processor
        (0.02, 0.0, 100.0),  # neither idle nor busy
        (0.0, 0.5, 100.0),  # waiting for a child that computes
    ],
)
def test_limit_follows_the_part_of_a_processor_that_a_test_and_its_children_get(itself, children, seconds):
    watch = hangs.Watch(10.0, 1000.0, 50.0)
    times = (half_seconds / 2 for half_seconds in range(1, 1000))
    over = (t for t in times if watch.is_over(1000.0 + t, 50.0 + itself * t, lambda t=t: children * t))
    assert next(over) == seconds


def run_pytest(folder: Path, tests: str, *options: str) -> tuple[int, str]:
    """Run pytest with the watchdog alone; return its status, and what it has printed."""
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:cacheprovider -p hangs\npythonpath = {TESTS}\n")
    (folder / "test_of_its_own.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-rA", *options]
    run = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    return run.returncode, run.stdout


@pytest.mark.watchdog(60)
@pytest.mark.parametrize("has_worker", [False, True], ids=["without workers", "with workers"])
def test_hang_fails_alone_with_all_stacks_and_its_process_ends(tmp_path, has_worker):
    if has_worker:
        pytest.importorskip("xdist")
    status, output = run_pytest(tmp_path, HANGS, *(["-n1"] if has_worker else ["-p", "no:xdist"]))
    assert status == pytest.ExitCode.TESTS_FAILED
    assert f"1 failed, {1 + has_worker} passed in " in output
    hung, *went_on = (text.split()[0] for text in output.split("process ")[1:])
    assert len(went_on) == has_worker
    assert hung not in went_on
    assert "given up, as something hangs: the limit is 0.5 seconds" in output
    for thread, line in {"watched test": "    threading.Event().wait()\n", "peer": "", "MainThread": ""}.items():
        assert line in output.split(f"\n{thread}:\n  File ")[1].split("\n\n")[0]


HOLDS_THE_LOCK = """
import ctypes, pytest

@pytest.mark.watchdog(0.1)
def test_hang(): ctypes.PyDLL(None).pause()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs what only Linux has")
@pytest.mark.watchdog(60)
def test_hang_that_no_thread_can_watch_ends_the_process_with_the_stacks(tmp_path):
    status, output = run_pytest(tmp_path, HOLDS_THE_LOCK, "-p", "no:xdist")
    assert status == -signal.SIGALRM
    assert f'{tmp_path / "test_of_its_own.py"}", line ' in output.split("hread 0x", 1)[1]


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(("patience", "status"), [("1", 1), ("100", 0)])
def test_limit_is_multiplied_by_the_option(tmp_path, patience, status):
    tests = "import threading, pytest\n\n@pytest.mark.watchdog(0.1)\ndef test(): threading.Event().wait(1.0)\n"
    assert run_pytest(tmp_path, tests, "-p", "no:xdist", "--patience", patience)[0] == status
