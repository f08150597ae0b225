"""Reusable memory for the vectors that replicas on several GPUs exchange in a call of a layer.

NOTE [workspaces]: The obvious way is to allocate new vectors in each exchange. But the time of a training step depends
on the number of operators, and each vector costs several operators: an allocation, views, and a copy to each device. So
replicas on several GPUs write into the vectors of an earlier exchange, and use the old views of these vectors again.

A workspace is a set of such vectors. New kernels may overwrite a workspace while earlier kernels still have to read it,
because all kernels run on the default streams, in launch order (NOTE [streams]). So a workspace is free as soon as
nobody can launch another kernel that reads the old vectors. A `Lease` object marks this time: the workspace is free
once no references to its lease are left. Every owner of vectors in a workspace refers to the lease:

                                             WorkspacePool
                                                   | weak reference
    the pair that `move_pair` returns   ---+       v
    a running backward pass             ---+---> Lease ---> Workspace
    `BatchStatistics`, in the graph     ---+
    and in checkpoints                  ---+

How does the pool learn that a lease is gone? It keeps a weak reference to each lease, with the `append` method of a
list as callback. When a lease is deleted, Python adds the weak reference to this list. The next exchange takes a
workspace from the list. A finalizer in Python code would lose an exception that Ctrl-C or an alarm raises inside it.

A mistake in this file makes wrong numbers, without an error: see `tests/backends/test_workspaces.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..torch_private import foreach_copy

__all__: list[str] = []


Pair = Sequence[Tensor]  # two tensors of the same shape, such as mean and inverse standard deviation


class WorkspacePool:
    """A pool of at most 1024 workspaces (reusable memory), all for vectors of the same devices, shape and dtype.

    A workspace can be used again once its latest lease was deleted.
    """

    def __init__(self) -> None:
        # the workspaces of the pool; each key is the latest lease on the workspace
        self.workspaces: dict[ref[Lease], Workspace] = {}
        self._ended: list[ref[Lease]] = []

    def take(self, lease: "Lease") -> "Workspace":
        """Return a free or new workspace, which stays in use until `lease` is deleted."""
        try:
            workspace = self.workspaces.pop(self._ended.pop())
        except IndexError:
            workspace = Workspace()
        if len(self.workspaces) < 1024:
            self.workspaces[ref(lease, self._ended.append)] = workspace
        return workspace


class WorkspacePools(dict[Any, WorkspacePool]):
    """The pools of one owner, such as a wrapper: a `WorkspacePool` for each kind (devices, shape, dtype) of vectors."""


# Maps each owner, such as a wrapper, to its pools of workspaces (reusable memory). The pools live as long as their
# owner.
_pools: WeakKeyDictionary[Any, WorkspacePools] = WeakKeyDictionary()


def pools_of(owner: Any) -> ref[WorkspacePools]:
    """Return a weak reference to the workspace pools of `owner`, such as a wrapper; make them if necessary."""
    return ref(_pools.get(owner) or _pools.setdefault(owner, WorkspacePools()))


class Workspace:
    """Memory for the vectors of an exchange between replicas: allocated on first use, overwritten afterwards."""

    rows: Tensor | None = None  # a tensor (R, 2 * C) on the first device; each row holds the two vectors of one replica
    # A tensor (2 * C,) on the first device: the two vectors that are copied to the other devices.
    flat: Tensor | None = None

    def stack(self, pairs: Sequence[Pair]) -> Tensor:
        """Copy these pairs of vectors into `rows`, one pair into each row, and return `rows`.

        Also set `halves`, two views of `rows`, ``(R, C)`` each. A row of `rows` holds one pair: its first vector is a
        row of the first view, and its second vector is a row of the second view.
        """
        vectors = [vector for pair in pairs for vector in pair]
        if self.rows is None or len(self.rows) != len(pairs):
            self._flat_rows = torch.cat(vectors)
            self.rows = self._flat_rows.view(len(pairs), -1)
            self.halves = self.rows.chunk(2, 1)
        else:
            torch.cat(vectors, out=self._flat_rows)
        return self.rows

    def broadcast(self, flat: Tensor, devices: Sequence[torch.device]) -> Mapping[torch.device, Pair]:
        """Copy a pair of vectors to several devices, and return the pair on each device.

        `flat` is a tensor on the first device that holds both vectors of the pair, one after the other. The first call
        stores this tensor in `self.flat`. Later calls must pass the stored tensor, with new values in it.
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
    """The right to use a workspace (memory for vectors) until this object is deleted.

    `devices` are the devices of the workspace, and `vector` is an example of the vectors in it. The workspace is taken
    from `pools`, and returns to `pools` when the lease is deleted. If `pools` is None, the workspace is new, and is not
    used again.
    """

    __slots__ = ("__weakref__", "pools", "workspace")

    def __init__(self, pools: ref[WorkspacePools] | None, devices: tuple[torch.device, ...], vector: Tensor) -> None:
        self.pools, pool = pools, None
        # Reuse memory only on several GPUs: there, all kernels of an exchange run on the default streams, one after the
        # other. On a single GPU, layers may run on any stream, and a kernel on another stream may still read the
        # memory.
        by_kind = None if pools is None or len(devices) == 1 or devices[0].type != "cuda" else pools()
        try:
            if by_kind is not None and vector.data_ptr():
                # A tensor that was made in inference mode cannot be overwritten outside of inference mode. So calls in
                # inference mode use pools of their own.
                kind = devices, vector.shape, vector.dtype, torch.is_inference_mode_enabled()
                pool = by_kind.get(kind) or by_kind.setdefault(kind, WorkspacePool())
        except RuntimeError:
            # For batched gradients, which have no memory of their own, `data_ptr` raises an error. Use a new workspace
            # for them.
            pass
        self.workspace = Workspace() if pool is None else pool.take(self)


class LeasedPair(tuple[Tensor, ...]):
    """A pair of tensors in a workspace (reusable memory). The pair holds the lease, so the workspace stays in use.

    The pair keeps the lease of its workspace alive, so no exchange can reuse the memory as long as the pair exists.
    """

    lease: Lease


def move_pair(pair: Pair, device: torch.device, pools: ref[WorkspacePools] | None = None) -> Pair:
    """Move a pair of vectors to `device`, by a single copy. If the pair is already on `device`, return it unchanged."""
    devices = pair[0].device, device
    if devices[0] == device:
        return pair
    lease = Lease(pools, devices, pair[0])
    flat = torch.cat(tuple(pair), out=lease.workspace.flat)
    moved = LeasedPair(lease.workspace.broadcast(flat, devices)[device])
    moved.lease = lease
    return moved
