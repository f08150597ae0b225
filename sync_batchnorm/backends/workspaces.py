"""Memory for the vectors of one exchange between replicas: those of all on one device, and the result on each device.

NOTE [workspaces]: The time of a step is the number of operators, so replicas on several GPUs use a workspace again and
again, with all its views. Whoever takes one may write into it whatever kernels still read there, because all kernels
that use it run on default streams, in the order in which they were launched (NOTE [streams]). So it goes back as soon
as nobody can launch another one: with the last reference to its `Lease`. Who refers to vectors of a workspace refers to
the lease: a backward pass while it runs, and the `BatchStatistics` of a forward pass, which the graph and checkpoints
keep.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..torch_private import foreach_copy

__all__: list[str] = []


class Kept(dict[Any, deque["Workspace"]]):
    """Workspaces that nobody uses, by the kind of the calls that may use them: devices, channels, dtypes and modes."""

    def of_kind(self, kind: Any) -> ref[deque["Workspace"]]:
        """Return those of one kind: at most as many as a net may have layers of one width."""
        return ref(self.setdefault(kind, deque(maxlen=1024)))


_kept: WeakKeyDictionary[Any, Kept] = WeakKeyDictionary()


def kept_by(wrapper: Any) -> ref[Kept]:
    """Return what the forward passes of `wrapper` hand on to each other, and what ends with it."""
    return ref(_kept.setdefault(wrapper, Kept()))


class Workspace:
    """The memory of an exchange. What is first put into it makes it; what comes later is written into it."""

    rows: Tensor | None = None  # a pair of vectors of each replica, (R, 2 * C), on the first device
    flat: Tensor | None = None  # what goes to all devices, (2 * C,), on the first one

    def stack(self, pairs: Sequence[Sequence[Tensor]]) -> Tensor:
        """Set `rows` to these pairs, of which each is two vectors, or a single one with both; set `halves` of them."""
        vectors = [vector for pair in pairs for vector in pair]
        if self.rows is None or len(self.rows) != len(pairs):
            flat = torch.cat(vectors)
            rows = flat.view(len(pairs), -1)
            self._stacked, self.rows, self.halves = flat, rows, rows.chunk(2, 1)  # (R, C) each
        else:
            torch.cat(vectors, out=self._stacked)
        return self.rows

    def spread(self, flat: Tensor, devices: Sequence[torch.device]) -> Mapping[torch.device, Sequence[Tensor]]:
        """Return the two vectors of `flat` on each of `devices`. It is on the first one, in its place if it has one."""
        if self.flat is None:
            self._copies = [flat.to(device, non_blocking=True) for device in devices[1:]]
            there = zip(devices, (flat, *self._copies), strict=True)
            self._spread, self.flat = {device: copy.chunk(2) for device, copy in there}, flat
        else:
            foreach_copy(self._copies, [flat] * len(self._copies), non_blocking=True)
        return self._spread


class Lease:
    """The right to use a workspace, which ends with this object."""

    __slots__ = ("free", "workspace")

    def __init__(self, free: Callable[[], deque[Workspace] | None] = lambda: None) -> None:
        """`free` returns those of one kind that are kept, while they are."""
        self.free, kept = free, free()
        try:
            self.workspace = kept.pop() if kept else Workspace()
        except IndexError:  # Another thread was faster.
            self.workspace = Workspace()

    def __del__(self) -> None:
        kept = self.free()
        if kept is not None:
            kept.append(self.workspace)
