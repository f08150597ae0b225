"""What the simulated GPUs have seen: races, unsafe reuse of memory, and what ran between two points of a test."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from simulated_gpus.install import native

__all__ = ["Entry", "Recording", "clear", "recording", "reports", "settle"]


class Entry(NamedTuple):
    """One line of the log, in the order of the host."""

    kind: str  # "launch", "host sync", "event", "wait" or "allocation"
    name: str  # of the operator, or why the host waited
    stream: str  # "cuda:1", or "cuda:1 stream 5"
    details: str  # dtypes and shapes that a launch reads and writes
    bytes: int  # of a copy from, to or between devices, or of an allocation

    def __str__(self) -> str:
        amount = f"{self.bytes} bytes" if self.bytes else ""
        return "  ".join(
            part for part in (f"{self.stream:18} {self.kind:10} {self.name}", self.details, amount) if part
        )


@dataclass
class Recording:
    """What ran in the body of `recording`, in all threads. The counts are there when the body has ended."""

    launches: int = 0  # kernels and copies
    host_syncs: int = 0
    events: int = 0
    waits: int = 0
    copies_between_devices: int = 0
    bytes_between_devices: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    allocations: int = 0
    bytes_allocated: int = 0
    log: list[Entry] = field(default_factory=list)

    def by_operator(self) -> Counter[str]:
        """Return how often each kernel and each copy was launched."""
        return Counter(entry.name for entry in self.log if entry.kind == "launch")

    def by_stream(self) -> Counter[str]:
        """Return how many kernels and copies were launched on each stream."""
        return Counter(entry.stream for entry in self.log if entry.kind == "launch")

    def __str__(self) -> str:
        names = [name for name in self.__dataclass_fields__ if name != "log"]
        return "\n".join([*(f"{name}: {getattr(self, name)}" for name in names), *map(str, self.log)])


_open_recordings = 0


@contextmanager
def recording() -> Iterator[Recording]:
    """Count and log what the devices are given in the body. Recordings may be nested.

    with recording() as ran:
        layer(input)
    print(ran)
    assert ran.host_syncs == 0
    """
    global _open_recordings
    simulator = native()
    result = Recording()
    before, first = Counter(simulator.counts()), simulator.log_length()
    _open_recordings += 1
    simulator.set_logging(True)
    try:
        yield result
    finally:
        _open_recordings -= 1
        simulator.set_logging(_open_recordings > 0)
        for name, count in simulator.counts().items():
            setattr(result, name, count - before[name])
        result.log = [Entry(*line) for line in simulator.log(first)]


def reports() -> list[str]:
    """Return all races and all unsafe reuse of memory since the last `clear`, each once."""
    simulator = native()
    return list(dict.fromkeys([*simulator.races(), *simulator.hazards()]))


def clear() -> None:
    """Forget all reports, counts and lines of the log."""
    native().clear()


def settle() -> None:
    """Free what nobody refers to, declare all that was launched finished, and forget the reports.

    Called after each test, so that no test is blamed for what another one has left behind.
    """
    gc.collect()
    native().settle()
    clear()
