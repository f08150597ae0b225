"""The watchdog, a plugin of pytest: a test that hangs fails with all stacks and ends its process.

NOTE [what counts as hanging]: a loaded machine makes every test slow, and a limit on the wall clock would then fail
tests that are right. So a test that has a limit of N seconds is given up

- once nothing of it has run for N seconds: neither its process nor the children of that got a hundredth of this time on
  a processor, as where threads wait for each other. A test that gets so little of a processor only because of others
  would take a hundred times as long as alone.
- once N seconds have passed, and its process has computed for N seconds, as in a loop that does not end
- at the latest after 10 N seconds: whoever looks again and again whether something has come is neither idle nor busy.

NOTE [a test that is given up ends its process]: its threads cannot be stopped, and would draw random numbers in the
tests after it. pytest-xdist replaces a worker whose process ends. Without it the session ends.

NOTE [a hang that holds the GIL]: where no other thread can run Python, an alarm of the system prints all stacks and
ends the process, after 11 N seconds; a fixture that hangs ends like this, too. Windows has no such alarm.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SECONDS = 10.0  # what most tests have; those that take seconds by themselves have a mark
LATEST = 10.0  # times the limit: ten times as slow as alone is slower than any load that a suite is worth running under
PROGRESS = 0.01  # of the limit; a thread that runs gets more, even if there are a hundred for each processor
LOOKS = 10  # at the clocks, in the time of one limit

WATCHED = "watched test"  # the name of the thread in which a test runs
_given_up = pytest.StashKey[bool]()


class Watch:
    """Says when a test is to be given up, from what the clocks show now and have shown before; see the first NOTE."""

    def __init__(self, limit: float, now: float, own: float) -> None:
        self.limit, self.start, self.own_at_start = limit, now, own
        self.active_at, self.own, self.children = now, own, math.nan

    def is_over(self, now: float, own: float, read_children: Callable[[], float]) -> bool:
        """Return whether the test hangs.

        `now` is the wall clock, `own` the processor time of the process, and `read_children` returns that of the
        processes that it has started; all in seconds, since any moment. Children are looked at only once the process
        itself has been idle for half of the limit: to look takes files and memory, which some tests count.
        """
        progress = PROGRESS * self.limit
        if own - self.own >= progress:
            self.active_at, self.own = now, own
        elif now - self.active_at >= self.limit / 2:
            before, self.children = self.children, read_children()
            if abs(self.children - before) >= progress:  # It falls if a child ends before its own children.
                self.active_at = now
            elif not math.isnan(before):
                self.children = before
        is_idle = now - self.active_at >= self.limit
        is_busy = min(now - self.start, own - self.own_at_start) >= self.limit
        return is_idle or is_busy or now - self.start >= LATEST * self.limit


def own_seconds() -> float:
    """Return the processor time of this process, but for the thread that calls this."""
    return time.process_time() - time.thread_time()


def seconds_of_children() -> float:
    """Return the processor time of the processes below this one, those that have ended included.

    Only Linux tells it of processes that still run; elsewhere, a test that waits for one counts as idle meanwhile.
    """
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has ended.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            seconds[int(stat.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    ended = os.times()
    total, below = ended.children_user + ended.children_system, [os.getpid()]
    for process in below:
        children = [child for child, parent in parents.items() if parent == process]
        total += sum(seconds[child] for child in children)
        below += children
    return total


def ends_in_time(thread: threading.Thread, limit: float) -> bool:
    """Wait until `thread` has ended, and return True; or False once it is to be given up."""
    watch = Watch(limit, time.monotonic(), own_seconds())
    while True:
        thread.join(min(limit / LOOKS, threading.TIMEOUT_MAX))
        if not thread.is_alive():
            return True
        if watch.is_over(time.monotonic(), own_seconds(), seconds_of_children):
            return False


def stacks() -> str:
    """Return the stacks of all threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)


class Watchdog:
    """Runs each test in a thread and gives it up if it hangs; in processes that run tests or hand them to others."""

    def __init__(self, config: pytest.Config) -> None:
        self.patience: float = config.option.patience
        self.is_worker = hasattr(config, "workerinput")
        self.is_alone = not self.is_worker and not config.getoption("tx", None)
        self.must_end = False
        self.reported: set[str] = set()
        self.has_alarm = hasattr(signal, "SIGALRM") and not config.option.usepdb  # whose user may take any time
        if self.has_alarm:
            # The descriptor is copied, as pytest captures what is written to the usual one.
            self.stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, self.stderr, all_threads=True, chain=True)

    def limit_of(self, item: pytest.Item) -> float:
        """Return the seconds after which a test counts as hanging."""
        marker = item.get_closest_marker("watchdog")
        return self.patience * (marker.args[0] if marker else SECONDS)

    def set_alarm(self, seconds: float) -> None:
        if self.has_alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds if seconds < 1e9 else 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.set_alarm((LATEST + 1) * self.limit_of(item))
        try:
            return (yield)
        finally:
            self.set_alarm(0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        """Run the test in a thread of its own, which this one watches."""
        function = pyfuncitem.obj
        pyfuncitem.obj = lambda *args, **kwargs: self.within_limit(pyfuncitem, lambda: function(*args, **kwargs))
        try:
            return (yield)
        finally:
            pyfuncitem.obj = function

    def within_limit(self, item: pytest.Item, body: Callable[[], Any]) -> Any:
        """Return what `body` returns; fail with all stacks if it hangs."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((True, body()))
            except BaseException as error:
                outcome.append((False, error))

        thread = threading.Thread(target=run, daemon=True, name=WATCHED)
        thread.start()
        limit = self.limit_of(item)
        if not ends_in_time(thread, limit):
            item.stash[_given_up] = True
            text = f"given up, as something hangs: the limit is {limit:g} seconds, see tests/hangs.py and --patience"
            pytest.fail(f"{text}\n{stacks()}", pytrace=False)
        succeeded, value = outcome.pop()
        if not succeeded:
            raise value
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        report.is_given_up = report.when == "call" and item.stash.get(_given_up, False)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """End a worker once its report is on its way, and without its fixtures: these may hang as well."""
        if not getattr(report, "is_given_up", False):
            return
        if self.is_worker:
            os._exit(pytest.ExitCode.TESTS_FAILED)
        self.must_end = self.is_alone
        self.reported.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.must_end:
            item.session.shouldfail = f"{item.nodeid} was given up, and its threads still run"
            self.set_alarm(self.limit_of(item))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Take the end of a worker for that of its test, if this has been reported with the stacks."""
        if crashitem in self.reported:
            report.when, report.outcome, report.longrepr = "teardown", "passed", None

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End a process in which threads may hang: Python itself would wait for them."""
        if self.must_end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(pytest.ExitCode.TESTS_FAILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("watchdog").addoption(
        "--patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply the time after which a test counts as hanging (docs/contributing.md)",
    )


def pytest_configure(config: pytest.Config) -> None:
    mark = f"watchdog(seconds): another limit than the usual {SECONDS:g} seconds before a test counts as hanging"
    config.addinivalue_line("markers", mark)
    config.pluginmanager.register(Watchdog(config))
