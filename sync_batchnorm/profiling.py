"""Spans in the profile of torch: which replica waits in which layer, and what the master merges there.

NOTE [threads of a profile]: `torch.profiler` records the thread that starts it, and the backward. It has no way to take
in the threads of replicas, which are those of `torch.nn.parallel` on GPUs, but one: `profile_all_threads=True` of its
experimental configuration (torch 2.8 and later), which records every thread of the process. (Tried on torch 2.13.0: the
C++ function `enableProfilerInChildThread` keeps one handle for all threads; the operators of the thread that started
the profiler are then counted once more in each later profile.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.autograd.profiler
from torch.autograd.profiler import record_function

from sync_batchnorm.circle import Circle, Meeting
from sync_batchnorm.roster import MasterCallback, Roster

__all__: list[str] = []


def roster_of_forward(devices: Sequence[str], timeout: float) -> Roster:
    """Return a `Roster` for a forward that begins: one that makes spans, if a profiler runs."""
    # The flag is private to torch, which sets it for all threads. Without it there are no spans.
    recorded = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return RecordedRoster(devices, timeout) if recorded else Roster(devices, timeout)


def recorded_in_part() -> AbstractContextManager[Any]:
    """Return a context for the time of the replicas: a span that says so, if the profiler leaves out their threads."""
    # Private to torch: what records this thread alone. Without it nothing is said.
    profiler_type: Any = getattr(torch._C._autograd, "_profiler_type", None)
    if profiler_type is None or profiler_type().name != "KINETO":
        return nullcontext()
    return _span("replicas, in threads that are recorded with profile_all_threads=True only")


def _span(name: str) -> AbstractContextManager[Any]:
    return record_function(f"sync_batchnorm: {name}")


class RecordedRoster(Roster):
    """A roster with a span for the forward of each replica, for each wait, and for what the master merges."""

    @contextmanager
    def seat(self, replica_id: int) -> Iterator[None]:
        with _span(self.who(replica_id)), super().seat(replica_id):
            yield

    def meet(self, circle: Circle, identifier: Hashable, message: Any, callback: MasterCallback | None) -> Any:
        if callback is None:
            return super().meet(circle, identifier, message, None)

        def merge(messages: list[tuple[Hashable, Any]]) -> Sequence[tuple[Hashable, Any]]:
            with _span(f"{circle.name}, merging"):
                return callback(messages)

        return super().meet(circle, identifier, message, merge)

    def _wait(self, replica_id: int, meeting: Meeting) -> Any:
        with _span(f"{meeting.name}, waiting"):
            return super()._wait(replica_id, meeting)
