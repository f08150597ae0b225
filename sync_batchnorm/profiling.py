"""Spans in the profile of torch: which replica waits in which layer, and what the master merges there.

NOTE [threads of a profile]: `torch.profiler` records the thread that starts it, and the backward. The only way to
record the threads of replicas too, which on GPUs are those of `torch.nn.parallel`, is `profile_all_threads=True` of its
experimental configuration (torch 2.8 and later): it records every thread of the process. (Tried on torch 2.13.0: the
C++ function `enableProfilerInChildThread` keeps one handle for all threads; the operators of the thread that started
the profiler are then counted once more in each later profile.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from sync_batchnorm.coordinator import Coordinator, MasterCallback, SyncGroup
from sync_batchnorm.torch_private import profiler_of_thread, profiler_runs

__all__: list[str] = []


def coordinator_of_forward(devices: Sequence[str], timeout: float) -> Coordinator:
    """Return a `Coordinator` for a forward that begins: one that makes spans, if a profiler runs."""
    return ProfiledCoordinator(devices, timeout) if profiler_runs() else Coordinator(devices, timeout)


def recorded_in_part() -> AbstractContextManager[Any]:
    """Return a context for the time of the replicas: a span that says so, if the profiler leaves out their threads."""
    if profiler_runs() and profiler_of_thread() == "KINETO":
        return _span("replicas, in threads that are recorded with profile_all_threads=True only")
    return nullcontext()


def _span(name: str) -> AbstractContextManager[Any]:
    return record_function(f"sync_batchnorm: {name}")


class ProfiledCoordinator(Coordinator):
    """A coordinator with spans: the forward of each replica, its wait in each exchange, and the merge of the master.

    The wait of a replica begins when it arrives. That of a slave ends with its result, that of the master when all
    others have arrived.
    """

    @contextmanager
    def forward_of(self, replica_id: int) -> Iterator[None]:
        with _span(self.who(replica_id)), super().forward_of(replica_id):
            yield

    def exchange(
        self, sync_group: SyncGroup, identifier: Hashable, message: Any, callback: MasterCallback | None
    ) -> Any:
        with ExitStack() as waiting:
            waiting.enter_context(_span(f"{sync_group.name}, waiting"))
            if callback is None:
                return super().exchange(sync_group, identifier, message, None)

            def merge(messages: list[tuple[Hashable, Any]]) -> Sequence[tuple[Hashable, Any]]:
                waiting.close()
                with _span(f"{sync_group.name}, merging"):
                    return callback(messages)

            return super().exchange(sync_group, identifier, message, merge)
