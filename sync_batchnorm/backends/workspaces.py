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

    pairs: Tensor | None = None  # of all replicas, (R, 2, C), on the first device
    packed: Tensor | None = None  # a single pair, (2, C), on the first device
    flat: Tensor | None = None  # its view, (2 * C,)

    def stack(self, pairs: Sequence[Sequence[Tensor]]) -> Tensor:
        """Set `pairs` to these on the first device, and `halves` to their first and their second vectors, ``(R, C)``.

        Each of them is two vectors, or a single one with both.
        """
        vectors = [vector for pair in pairs for vector in pair]
        if self.pairs is None or len(self.pairs) != len(pairs):
            flat = torch.cat(vectors)
            stacked = flat.view(len(pairs), 2, -1)
            self._flat, self.pairs, self.halves = flat, stacked, stacked.unbind(1)
        else:
            torch.cat(vectors, out=self._flat)
        return self.pairs

    def spread(self, packed: Tensor, devices: Sequence[torch.device]) -> Mapping[torch.device, Sequence[Tensor]]:
        """Return the two vectors of `packed` on each of `devices`. It is on the first, in its place if it has one."""
        if self.packed is None:
            self._copies = [packed.to(device, non_blocking=True) for device in devices[1:]]
            there = zip(devices, (packed, *self._copies), strict=True)
            self._spread = {device: copy.view(2, -1).unbind() for device, copy in there}
            self.packed, self.flat = packed.view(2, -1), packed.view(-1)
            self._copies = [copy.view(-1) for copy in self._copies]
        elif len(self._copies) == 1:
            self._copies[0].copy_(self.flat, non_blocking=True)
        else:
            foreach_copy(self._copies, [self.flat] * len(self._copies), non_blocking=True)
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
