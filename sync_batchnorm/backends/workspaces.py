"""Memory for the vectors of one exchange between replicas: those of all on one device, and the result on each device.

NOTE [workspaces]: The time of a step is the number of operators, so replicas on several GPUs use a workspace again and
again, with all its views. Whoever takes one may write into it whatever kernels still read there, because all kernels
that use it run on default streams, in the order in which they were launched (NOTE [streams]). So it goes back as soon
as nobody can launch another one: with the last reference to its `Lease`. Who refers to vectors of a workspace refers to
the lease: a backward pass while it runs, and the `BatchStatistics` of a forward pass, which the graph and checkpoints
keep.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..torch_private import foreach_copy

__all__: list[str] = []

Free = deque["Workspace"]  # the workspaces of one kind that nobody uses
Kept = dict[Any, Free]  # by kind

NONE: Free = deque(maxlen=0)  # keeps nothing
_MOST = 1024  # of one kind that are kept: more than a net has layers of one width

_kept: WeakKeyDictionary[Any, Kept] = WeakKeyDictionary()


def kept_by(wrapper: Any) -> Kept:
    """Return the workspaces that the forward passes of `wrapper` hand on to each other, and that end with it."""
    return _kept.setdefault(wrapper, {})


def free_of(kept: Kept | None, kind: Any) -> Free:
    """Return the free workspaces of one kind: calls of one kind have the same devices, channels, dtype and modes."""
    return NONE if kept is None else kept.setdefault(kind, deque(maxlen=_MOST))


class Stack(NamedTuple):
    """Pairs of vectors, one after the other."""

    flat: Tensor  # (R * 2 * C,)
    pairs: Tensor  # (R, 2, C)
    firsts: Tensor  # (R, C)
    seconds: Tensor


class Workspace:
    """The memory of an exchange. The first use makes it, and later ones write into it."""

    def __init__(self) -> None:
        self.packed: Tensor | None = None  # (2, C), on the first device
        self._copies: list[Tensor] = []  # of it, on the others
        self._pairs: dict[torch.device, Sequence[Tensor]] = {}  # its vectors on each device
        self._stacks: dict[int, Stack] = {}  # on the first device, by the number of pairs

    def stacked(self, vectors: Sequence[Tensor], number: int) -> Stack:
        """Return a `number` of pairs that lie one after the other in `vectors`, which are on the first device."""
        stack = self._stacks.get(number)
        if stack is None:
            flat = torch.cat(vectors)  # type: ignore[arg-type]
            pairs = flat.view(number, 2, -1)
            self._stacks[number] = stack = Stack(flat, pairs, *pairs.unbind(1))
        else:
            torch.cat(vectors, out=stack.flat)  # type: ignore[call-overload]
        return stack

    def spread(self, packed: Tensor, devices: Sequence[torch.device]) -> dict[torch.device, Sequence[Tensor]]:
        """Return the two vectors of `packed`, ``(2, C)`` on the first of `devices`, on each of them."""
        if self.packed is None:
            there = [packed, *[packed.to(device, non_blocking=True) for device in devices[1:]]]
            self._pairs = {device: copy.unbind() for device, copy in zip(devices, there, strict=True)}
            self.packed, *self._copies = there
            return self._pairs
        if packed is not self.packed:
            self.packed.copy_(packed)
        if self._copies:
            foreach_copy(self._copies, [packed] * len(self._copies), non_blocking=True)
        return self._pairs


class Lease:
    """The right to use a workspace, which ends with this object."""

    __slots__ = ("_free", "workspace")

    def __init__(self, free: Free) -> None:
        self._free = free
        try:
            self.workspace = free.pop()
        except IndexError:
            self.workspace = Workspace()

    def __del__(self) -> None:
        self._free.append(self.workspace)

    def another(self) -> "Lease":
        """Return the right to use another workspace of the same kind."""
        return Lease(self._free)
