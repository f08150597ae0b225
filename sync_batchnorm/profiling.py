"""Spans in the profile of torch: which replica waits in which layer, and what the master merges there.

`torch.profiler` records the thread that starts it, and the backward. The only way to record the threads of replicas
too, which on GPUs are those of `torch.nn.parallel`, is `profile_all_threads=True` of its experimental configuration
(torch 2.8 and later): it records every thread of the process. (Tried on torch 2.13.0: the C++ function
`enableProfilerInChildThread` keeps one handle for all threads; the operators of the thread that started the profiler
are then counted once more in each later profile.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd.profiler import record_function

from sync_batchnorm.coordinator import no_span
from sync_batchnorm.torch_private import profiler_of_thread, profiler_runs

__all__: list[str] = []


def spans_of_forward() -> Callable[[str], AbstractContextManager[Any]]:
    """Return the function that makes the spans of a forward; without a profiler, they do nothing."""
    return _span if profiler_runs() else no_span


def recorded_in_part() -> AbstractContextManager[Any]:
    """Return a context to run replicas in: a span whose name says that the profiler does not record all threads."""
    if profiler_runs() and profiler_of_thread() == "KINETO":
        return _span("replicas, in threads that are recorded with profile_all_threads=True only")
    return no_span("")


def _span(name: str) -> AbstractContextManager[Any]:
    return record_function(f"sync_batchnorm: {name}")
