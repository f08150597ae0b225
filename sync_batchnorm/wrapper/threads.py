"""Replicas in threads: each has one, and those that share a device take turns.

NOTE [without the interpreter lock]: Nothing here relies on the lock of the interpreter; free-threaded Python has none.

What two threads share is guarded in one of four ways. The lock of a `Coordinator` guards all records of its forward
pass; `_lock` in `random_states.py` guards the generators. What travels in a mailbox belongs to one thread at a time: a
`Part` to its replica until it is sent, to the master until it is answered, and to its replica again; what a backward
pass reads is complete before the answers are sent. What a replica is made of, its modules and their dictionaries
included, is made by the caller, and belongs to the thread of the replica. Tables of the process (`_made`, `_issued`,
`_looks`, `_numbers`, `_have_run`, the cached functions) are changed by single operations, `setdefault` where only one
thread may win; two threads may compute the same entry, and either of the two is right.

Three things belong to the process and cannot be guarded here: the collector, which a thread only enables again if it
has disabled it itself; the numbers of hooks, which torch counts without a lock, so that dictionaries of flags are
shared by modules only where the interpreter has its lock; and the frames of other threads, which `Record.stack`
reads for the error of a timeout, and which Python 3.13 without the lock does not promise to be safe.

A free-threaded Python counts references by thread, even if it runs with the lock: an object that the caller has made
and a replica drops is freed when the caller's thread runs again, which is at most a second later (`_run_threads`).
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from ..backends.streams import current_stream
from ..messages import warn_once
from .random_states import RandomStates
from .run import Run

__all__: list[str] = []


def call_replicas(runs: Sequence[Run], inputs: Any, kwargs: Any) -> list[Any]:
    """Call each `Run` of a forward pass in a thread of its own, or a single one in this thread.

    Return the outputs in order, with None for a replica that has failed; the coordinator knows its error.
    """
    calls = [(args if isinstance(args, (list, tuple)) else (args,), kwargs[i]) for i, args in enumerate(inputs)]
    if len(runs) == 1:
        return [runs[0](*calls[0][0], **calls[0][1])]
    outputs: list[Any] = [None] * len(runs)

    def work(i: int) -> None:
        with suppress(BaseException):  # The run has told the coordinator.
            args, kwargs_of_run = calls[i]
            outputs[i] = runs[i](*args, **kwargs_of_run)

    streams = {device: current_stream(device) for device in {run._sync_device for run in runs}}
    for run in runs:
        vars(run)["_sync_stream"] = streams[run._sync_device]
    if len(streams) == len(runs):
        _run_threads(work, runs)
    else:
        _run_in_turns(work, runs)
    return outputs


def _run_threads(work: Callable[[int], None], runs: Sequence[Run]) -> None:
    """Run `work` of each place in `runs` in a thread, until all have ended, or those that have not are given up."""
    coordinator = runs[0]._sync_pass.coordinator
    # After Ctrl-C in the caller, a busy daemon thread does not block exit.
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not coordinator.has_given_up:
            thread.join(1.0)


def _run_in_turns(work: Callable[[int], None], runs: Sequence[Run]) -> None:
    """Run replicas that share devices one at a time; each draws from random states of its own."""
    forward_pass = runs[0]._sync_pass
    before = _versions(forward_pass.original)
    devices = {run._sync_number: run._sync_device for run in runs}
    forward_pass.random_states = states = RandomStates(devices)
    forward_pass.coordinator.take_turns(list(devices), states.begin_turn)
    _run_threads(work, runs)
    states.restore_caller()
    after = _versions(forward_pass.original)  # may have other names: forward() can add parameters to the module
    changed = [name for name, version in before.items() if after.get(name, version) != version]
    if changed:
        warn_once(
            f"forward() modified parameters {changed} in place; each of the {len(runs)} replicas, which share "
            "their memory, repeated the change; make it a buffer, or change it outside forward()"
        )


def _versions(module: nn.Module) -> dict[str, int]:
    """Return the version of each parameter, a number that grows with every change in place of the same memory."""
    parameters = module.named_parameters()
    return {name: 0 if parameter.is_inference() else parameter._version for name, parameter in parameters}
