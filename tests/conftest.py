"""What every test runs under: no thread left behind, seeds, a torchvision that imports without its kernels."""

import faulthandler
import gc
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
from common import import_torchvision
from scripted import WRAPPERS

CUDA_COUNT = torch.cuda.device_count()
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # a Python that can run without the lock
HAS_ALARM = hasattr(signal, "SIGALRM")


# Otherwise the compiler of a torch that has Triton starts a pool of processes, and a thread that stays.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Each replica is a thread: with a pool of its own for every one of them, small tensors would wait for cores.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use several processes if pytest-xdist is there; not in `addopts`, since pytest alone has no such options."""
    if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput"):
        if config.option.numprocesses is None:
            config.option.numprocesses = "auto"
        if config.option.dist == "no":
            config.option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Spread the suite over at most four cores, as each process imports torch; run files that are named in this one."""
    named = config.args_source == pytest.Config.ArgsSource.ARGS
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if named or cores == 1 else min(cores, 4)


def pytest_configure(config: pytest.Config) -> None:
    """Import torchvision, in a process that runs tests: one that hands them to others starts without it."""
    if HAS_ALARM:  # which prints all stacks and ends the process, to a copy of what pytest captures
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, os.fdopen(os.dup(2), "w"), chain=True)
    if hasattr(config, "workerinput") or not config.getoption("tx", None):
        with suppress(ImportError):  # the tests that need it skip by themselves
            import_torchvision()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> bool | None:
    """Let a test that hangs end its process with all stacks, even if it holds the GIL or is in a worker.

    Its threads cannot be stopped, and would draw random numbers in the tests after it. An exception in the test, as of
    pytest-timeout alone, would wait for the replicas; the timer of faulthandler is that of the self-check.
    """
    return _set_alarm(settings.timeout)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> bool | None:
    return _set_alarm(0.0)


def _set_alarm(seconds: float) -> bool | None:
    if HAS_ALARM:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    return HAS_ALARM or None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run each test in a context of its own: what runs in a replica sets variables."""
    function, pyfuncitem.obj = pyfuncitem.obj, partial(copy_context().run, pyfuncitem.obj)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function


def pytest_collection_finish() -> None:
    """Keep what exists before the first test out of garbage collections, of which several tests run some."""
    gc.collect()
    gc.freeze()


def busy_threads() -> set[threading.Thread]:
    """Return the threads of Python that run: not those that autograd and replicas keep for each GPU."""
    frames = sys._current_frames()
    idle = {ident for ident, frame in frames.items() if frame.f_code.co_name == "_work_and_stay"}
    threads = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return {thread for thread in threads if thread.ident not in idle}


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = busy_threads()
    yield
    end = time.monotonic() + 60.0
    while (left := busy_threads() - before) and time.monotonic() < end:
        time.sleep(0.001)
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync_batchnorm.messages._issued", {})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # The function of torch takes a millisecond where there is no GPU, to note down for whom it would seed one.
    (torch if CUDA_COUNT else torch.default_generator).manual_seed(0)
    random.seed(0)


KERNELS = {
    "fast": {},  # the fast statistics of the CPU, which are precise enough for the inputs of most tests
    "exact": {"backends.cpu.LARGEST_RATIO": 1e-30},  # those of the input minus its mean
    "general": {"backends.BACKENDS": {}},  # the operators for devices other than CPU and CUDA
}


def slow(*values: Any) -> list[Any]:
    """Return values of a parameter that only the whole suite runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def first_in_smoke(values: Iterable[Any]) -> list[Any]:
    """Return values of a parameter, of which only the first is run in the smoke suite."""
    first, *others = values
    return [pytest.param(first, marks=pytest.mark.smoke), *others]


@pytest.fixture(autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one way to compute the statistics, which otherwise follows from the size of the input."""
    name = getattr(request, "param", "fast")
    for patched, value in KERNELS[name].items():
        monkeypatch.setattr(f"sync_batchnorm.{patched}", value)
    return name


every_kernel = pytest.mark.parametrize("kernel", KERNELS, indirect=True)  # for tests of numbers
usual_kernels = pytest.mark.parametrize("kernel", ["fast", *slow("exact", "general")], indirect=True)  # for all others


def device_lists(*sizes: int, slow: Sequence[int] = ()) -> list[Any]:
    """Device lists of the given sizes, those in `slow` for the whole suite only: CPU replicas, one GPU, distinct GPUs.

    The largest list of distinct GPUs also in another order: the first one merges, and need not have the lowest index.
    """
    marks = {n: [pytest.mark.slow] if n in slow else [] for n in (*sizes, *slow)}
    lists = [pytest.param(["cpu"] * n, id=f"cpu-{n}", marks=marks[n]) for n in marks]
    if not CUDA_COUNT:
        return lists
    distinct = [n for n in marks if 1 < n <= CUDA_COUNT]
    on_gpus = [(f"cuda0-{n}", [0] * n) for n in marks] + [(f"cuda-{n}", list(range(n))) for n in distinct]
    on_gpus += [(f"cuda-{n}-rotated", [n - 1, *range(n - 1)]) for n in distinct[-1:]]
    return lists + [pytest.param(ns, id=name, marks=[pytest.mark.cuda, *marks[len(ns)]]) for name, ns in on_gpus]


def needs_two_gpus(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of two GPUs."""
    return pytest.mark.cuda(pytest.mark.skipif(CUDA_COUNT < 2, reason="needs two GPUs")(test))


INTERLEAVED = [pytest.param([0, 1, 0, 1], id="cuda-0101", marks=pytest.mark.cuda)] if CUDA_COUNT > 1 else []


@pytest.fixture(params=device_lists(1, 2, 3, 4))
def devs(request: pytest.FixtureRequest) -> list[str] | list[int]:
    """The devices of one to four replicas."""
    return request.param


@pytest.fixture(params=device_lists(2))
def devices(request: pytest.FixtureRequest) -> list[str] | list[int]:
    """The devices of two replicas; a test that needs other numbers lists them by `parametrize`."""
    return request.param


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Let threads give up the interpreter lock as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(params=list(WRAPPERS))
def wrap(request: pytest.FixtureRequest) -> Callable[..., torch.nn.DataParallel]:
    """Every way to run replicas; what must be told must be told in all of them, and without the timeout."""
    return WRAPPERS[request.param]
