"""Memory for the vectors of one exchange between replicas: those of all on one device, and the result on each device.

NOTE [workspaces]: The time of a step is the number of operators, so replicas on several GPUs use a workspace again and
again, with all its views. Whoever takes one may write into it whatever kernels still read there, because all kernels
that use it run on default streams, in the order in which they were launched (NOTE [streams]). So it goes back as soon
as nobody can launch another one: with the last reference to its `Lease`. No Python code runs then, in which Ctrl-C or
an alarm would be lost: a weak reference to the lease calls `list.append`, and the next call looks into that list. Who
refers to vectors of a workspace refers to the lease: through the pair that `move_pair` returns; a backward pass while
it runs; and through the `BatchStatistics` of a forward pass, which the graph and checkpoints keep. Where this fails,
numbers are wrong: `tests/gpus/test_workspaces.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..torch_private import foreach_copy

__all__: list[str] = []


Vectors = Sequence[Tensor]  # a pair, such as mean and invstd


class WorkspacePool:
    """The workspaces of one kind: at most 1024, which no net needs. Those whose lease has ended are free."""

    def __init__(self) -> None:
        self.workspaces: dict[ref[Lease], Workspace] = {}  # by the latest lease of each
        self._ended: list[ref[Lease]] = []

    def take(self, lease: "Lease") -> "Workspace":
        """Return a workspace, which is not free before `lease` ends."""
        try:
            workspace = self.workspaces.pop(self._ended.pop())
        except IndexError:
            workspace = Workspace()
        if len(self.workspaces) < 1024:
            self.workspaces[ref(lease, self._ended.append)] = workspace
        return workspace


class WorkspacePools(dict[Any, WorkspacePool]):
    """The pools of one owner, by the devices, shape, dtype and inference mode of what may be written into them."""


_pools: WeakKeyDictionary[Any, WorkspacePools] = WeakKeyDictionary()  # by owner, and as long as it is alive


def pools_of(owner: Any) -> ref[WorkspacePools]:
    """Return the pools of an object, such as a wrapper, whose forward passes use the same workspaces again."""
    return ref(_pools.get(owner) or _pools.setdefault(owner, WorkspacePools()))


class Workspace:
    """The memory of an exchange. What is first put into it makes it; what comes later is written into it."""

    rows: Tensor | None = None  # a pair of vectors of each replica, (R, 2 * C), on the first device
    flat: Tensor | None = None  # a pair that goes to all devices, (2 * C,), on the first one

    def stack(self, pairs: Sequence[Vectors]) -> Tensor:
        """Set `rows` to these pairs, and `halves` to their first and their second vectors, ``(R, C)`` each."""
        vectors = [vector for pair in pairs for vector in pair]
        if self.rows is None or len(self.rows) != len(pairs):
            flat = torch.cat(vectors)
            rows = flat.view(len(pairs), -1)
            self._stacked, self.rows, self.halves = flat, rows, rows.chunk(2, 1)
        else:
            torch.cat(vectors, out=self._stacked)
        return self.rows

    def broadcast(self, flat: Tensor, devices: Sequence[torch.device]) -> Mapping[torch.device, Vectors]:
        """Return the pair in `flat` on each of `devices`. It is on the first one, in its place if it has one."""
        if self.flat is None:
            self._copies = [flat.to(device, non_blocking=True) for device in devices[1:]]
            there = zip(devices, (flat, *self._copies), strict=True)
            self._broadcast, self.flat = {device: copy.chunk(2) for device, copy in there}, flat
        elif len(self._copies) == 1:
            self._copies[0].copy_(flat, non_blocking=True)
        else:
            foreach_copy(self._copies, [flat] * len(self._copies), non_blocking=True)
        return self._broadcast


class Lease:
    """The right to use a workspace on some devices for vectors such as one; it ends with this object.

    The workspace comes from `pools`, and goes back there. If `pools` is None, nobody uses it again.
    """

    __slots__ = ("__weakref__", "pools", "workspace")

    def __init__(self, pools: ref[WorkspacePools] | None, devices: tuple[torch.device, ...], vector: Tensor) -> None:
        self.pools, pool = pools, None
        # On one device, not all kernels of a call run on default streams.
        alive = None if pools is None or len(devices) == 1 or devices[0].type != "cuda" else pools()
        try:
            if alive is not None and vector.data_ptr():
                # What is made in inference mode cannot be written outside.
                kind = devices, vector.shape, vector.dtype, torch.is_inference_mode_enabled()
                pool = alive.get(kind) or alive.setdefault(kind, WorkspacePool())
        except RuntimeError:
            pass  # Batched gradients have no memory, and are copied into none.
        self.workspace = Workspace() if pool is None else pool.take(self)


class LeasedPair(tuple[Tensor, ...]):
    """A pair in a workspace, which holds the right to use it."""

    lease: Lease


def broadcast_pair(pair: Vectors, devices: Sequence[torch.device], lease: Lease) -> Mapping[torch.device, Vectors]:
    """Return `pair`, which is on the first of `devices`, on each of them."""
    if len(devices) == 1:
        return {devices[0]: pair}
    return lease.workspace.broadcast(torch.cat(tuple(pair), out=lease.workspace.flat), devices)


def move_pair(pair: Vectors, device: torch.device, pools: ref[WorkspacePools] | None = None) -> Vectors:
    """Return `pair` on `device`: as it is if it is there, otherwise as a single copy of both."""
    devices = pair[0].device, device
    if devices[0] == device:
        return pair
    lease = Lease(pools, devices, pair[0])
    held = LeasedPair(broadcast_pair(pair, devices, lease)[device])
    held.lease = lease
    return held
