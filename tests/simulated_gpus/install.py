"""Load the extension before torch, and replace what the CPU build of torch leaves out of `torch.cuda`."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from types import ModuleType
from typing import Any

from simulated_gpus.build import NAME, NotPossible, built_extension

__all__ = ["NotPossible", "is_simulated", "native", "simulate"]

VARIABLE = "SIMULATED_GPUS"  # how many; the extension reads it, and so does a process that a test starts
MOST = 64  # torch has an index of 7 bits for a device, and keeps a thread for each


def is_simulated() -> bool:
    """Return whether this process has simulated GPUs."""
    return NAME in sys.modules


def native() -> Any:
    """Return the extension module."""
    if not is_simulated():
        raise RuntimeError("there are no simulated GPUs in this process; call simulate(), or use --simulated-gpus")
    return sys.modules[NAME]


def simulate(number: int) -> None:
    """Give torch, which must not have been imported yet, a number of simulated GPUs.

    Raises NotPossible, with one sentence that says why, without a compiler or with a torch that this does not fit.
    """
    if not 1 <= number <= MOST:
        raise NotPossible(f"expected between 1 and {MOST} simulated GPUs, but got {number}")
    if is_simulated():
        if native().num_devices() != number:
            raise NotPossible(
                f"this process has {native().num_devices()} simulated GPUs already, and cannot have {number}"
            )
        return
    if "torch" in sys.modules:
        raise NotPossible("GPUs must be simulated before torch is imported, and something has imported it already")
    os.environ[VARIABLE] = str(number)
    try:
        _load(str(built_extension()))
        _install()
    except (ImportError, AttributeError) as error:
        raise NotPossible(f"this torch does not fit the simulated GPUs: {' '.join(str(error).split())}") from error


def _load(path: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module


def _install() -> None:
    importlib.import_module("torch._dynamo")  # keeps rules for functions of torch.cuda, and must meet the originals

    from simulated_gpus import comm, devices, storages

    devices.install()
    comm.install()
    storages.install()
    _hand_over_host_order(native())
    wait_for_autograd = native().wait_for_autograd
    atexit.register(wait_for_autograd)
    # A fork has no threads of the engine, and torch starts none there if its parent had them.
    os.register_at_fork(after_in_child=lambda: atexit.unregister(wait_for_autograd))


def _hand_over_host_order(simulator: ModuleType) -> None:
    """Give a thread the clock of the thread that starts it, and its own clock to whoever joins it.

    Kernels that a thread launches start after all that its parent had waited for. Other ways in which threads meet,
    such as locks and queues, are not followed.
    """
    start, join = threading.Thread.start, threading.Thread.join

    @functools.wraps(start)
    def start_with_order(thread: Any) -> None:
        before, run = simulator.host_clock(), thread.run

        def run_with_order() -> None:
            simulator.merge_host_clock(before)
            try:
                run()
            finally:
                del thread.run
                thread._host_clock_at_end = simulator.host_clock()

        thread.run = run_with_order
        start(thread)

    @functools.wraps(join)
    def join_with_order(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            simulator.merge_host_clock(getattr(thread, "_host_clock_at_end", []))

    threading.Thread.start = start_with_order
    threading.Thread.join = join_with_order
