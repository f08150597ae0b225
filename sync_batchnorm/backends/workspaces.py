"""Memory for the vectors of one exchange between replicas on several GPUs.

NOTE [workspaces]: The obvious way is to allocate the vectors in each exchange. But the time of a step is the number of
operators, and each vector needs a few of them: an allocation, views, a copy to each device. So replicas on several GPUs
use the same memory again, with all its views.

A workspace may be overwritten while earlier kernels still read it: all its kernels run on the default streams, in
launch order (NOTE [streams]). So it is free as soon as nobody can launch another kernel that reads it. A `Lease` tells
when that is. Every owner of vectors in a workspace refers to its lease:

    the pair that `move_pair` returns   ---+
    a running backward pass             ---+---> Lease ---> Workspace
    `BatchStatistics`, in the graph     ---+       ^
    and in checkpoints                             | weak reference
                                             WorkspacePool

When the last reference to the lease ends, the weak reference calls `list.append`, and the next exchange looks into that
list. A finalizer in Python would not do: Ctrl-C or an alarm in it would be lost.

Where this fails, numbers are wrong: `tests/backends/test_workspaces.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..torch_private import foreach_copy

__all__: list[str] = []


Pair = Sequence[Tensor]  # two tensors of one shape, such as mean and invstd


class WorkspacePool:
    """The workspaces of one kind: at most 1024, more than any net needs. Workspaces whose lease has ended are free."""

    def __init__(self) -> None:
        self.workspaces: dict[ref[Lease], Workspace] = {}  # by the latest lease of each
        self._ended: list[ref[Lease]] = []

    def take(self, lease: "Lease") -> "Workspace":
        """Return a free workspace, or a new one. It is not free again before `lease` ends."""
        try:
            workspace = self.workspaces.pop(self._ended.pop())
        except IndexError:
            workspace = Workspace()
        if len(self.workspaces) < 1024:
            self.workspaces[ref(lease, self._ended.append)] = workspace
        return workspace


class WorkspacePools(dict[Any, WorkspacePool]):
    """The pools of one owner, by devices, shape, dtype and inference mode of the vectors."""


_pools: WeakKeyDictionary[Any, WorkspacePools] = WeakKeyDictionary()  # by owner, and as long as it is alive


def pools_of(owner: Any) -> ref[WorkspacePools]:
    """Return the pools of an object, such as a wrapper, whose forward passes share workspaces."""
    return ref(_pools.get(owner) or _pools.setdefault(owner, WorkspacePools()))


class Workspace:
    """Buffers of one exchange: allocated on first use, overwritten afterwards."""

    rows: Tensor | None = None  # a pair of vectors of each replica, (R, 2 * C), on the first device
    flat: Tensor | None = None  # the pair to broadcast, (2 * C,), on the first device

    def stack(self, pairs: Sequence[Pair]) -> Tensor:
        """Fill `rows` with these pairs; set `halves` to their first and their second vectors, ``(R, C)`` each."""
        vectors = [vector for pair in pairs for vector in pair]
        if self.rows is None or len(self.rows) != len(pairs):
            self._flat_rows = torch.cat(vectors)
            self.rows = self._flat_rows.view(len(pairs), -1)
            self.halves = self.rows.chunk(2, 1)
        else:
            torch.cat(vectors, out=self._flat_rows)
        return self.rows

    def broadcast(self, flat: Tensor, devices: Sequence[torch.device]) -> Mapping[torch.device, Pair]:
        """Copy the pair in `flat`, which is on the first of `devices`, to the others.

        The first call keeps `flat` as `self.flat`. Later calls expect their pair in that memory.
        """
        if self.flat is None:
            self._copies = [flat.to(device, non_blocking=True) for device in devices[1:]]
            on_devices = zip(devices, (flat, *self._copies), strict=True)
            self._broadcast, self.flat = {device: copy.chunk(2) for device, copy in on_devices}, flat
        elif len(self._copies) == 1:
            self._copies[0].copy_(flat, non_blocking=True)
        else:
            foreach_copy(self._copies, [flat] * len(self._copies), non_blocking=True)
        return self._broadcast


class Lease:
    """The right to use a workspace on some devices, for vectors like `vector`. It ends with this object.

    The workspace comes from `pools` and returns to them. If `pools` is None, nobody uses it again.
    """

    __slots__ = ("__weakref__", "pools", "workspace")

    def __init__(self, pools: ref[WorkspacePools] | None, devices: tuple[torch.device, ...], vector: Tensor) -> None:
        self.pools, pool = pools, None
        # On one device, not all kernels of a call run on default streams.
        by_kind = None if pools is None or len(devices) == 1 or devices[0].type != "cuda" else pools()
        try:
            if by_kind is not None and vector.data_ptr():
                # Tensors of inference mode cannot be overwritten outside of it.
                kind = devices, vector.shape, vector.dtype, torch.is_inference_mode_enabled()
                pool = by_kind.get(kind) or by_kind.setdefault(kind, WorkspacePool())
        except RuntimeError:
            pass  # Batched gradients have no memory, and cannot be copied into a buffer.
        self.workspace = Workspace() if pool is None else pool.take(self)


class LeasedPair(tuple[Tensor, ...]):
    """A pair in a workspace. It holds the lease."""

    lease: Lease


def move_pair(pair: Pair, device: torch.device, pools: ref[WorkspacePools] | None = None) -> Pair:
    """Move a pair to `device`, with a single copy for both vectors. A pair that is there already stays as it is."""
    devices = pair[0].device, device
    if devices[0] == device:
        return pair
    lease = Lease(pools, devices, pair[0])
    flat = torch.cat(tuple(pair), out=lease.workspace.flat)
    moved = LeasedPair(lease.workspace.broadcast(flat, devices)[device])
    moved.lease = lease
    return moved
