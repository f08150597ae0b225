"""The exchange between processes, over `torch.distributed`: batch statistics and their gradients.

One collective of one packed vector makes the statistics of all processes, and another one in the backward makes their
gradients. `torch.distributed` handles timeouts, lost processes and collectives that do not match: users see its errors,
and its timeout counts.

Collectives have no names: the first of one process is matched with the first of every other one. So all processes of a
group must make the same calls in the same order. In a backward, that is the order of the autograd engine, the reverse
of that in which the nodes of the layers were made. This file does not change it: `DistributedDataParallel` and losses
over gathered features rely on it as well. So there is one replica in each process, as replicas would make their nodes
in several threads.

All processes have the same weights, as `DistributedDataParallel` guarantees and `torch.nn.SyncBatchNorm` assumes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .backends.base import host_can_read, merge_moments

__all__: list[str] = []

ONE_PROCESS_A_DEVICE = (
    "expected one process for each device once torch.distributed has several processes, but got several replicas in "
    "this one ({}); run: torchrun --nproc-per-node=NUMBER_OF_DEVICES program.py, with DistributedDataParallel around "
    "the converted model in place of this wrapper"
)

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it


def active_group(process_group: Group | None) -> Group | None:
    """Return the group to exchange over, or None where there is no other process.

    Args:
        process_group: a group of `torch.distributed`; None for all processes.

    Raises:
        ValueError: if this process is no member of the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if process_group is None else process_group
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"expected a process_group that this process belongs to, but got one without rank {dist.get_rank()}; "
            "make every group in every process, and give each process the one that it is in"
        )
    return group if dist.get_world_size(group) > 1 else None


class Peers(NamedTuple):
    """The processes that exchange in one call of a layer."""

    group: Group
    size: int
    call: int  # the number of the call on this group


_calls: WeakKeyDictionary[Group, Iterator[int]] = WeakKeyDictionary()  # the numbers of the calls on each group


def peers_of_call(group: Group) -> Peers:
    """Count a call on `group`, and return the processes of the group."""
    return Peers(group, dist.get_world_size(group), next(_calls.setdefault(group, itertools.count())))


def merge_over_processes(mean: Tensor, var: Tensor, count: int, peers: Peers) -> tuple[Tensor, Tensor, int | Tensor]:
    """Merge mean and biased variance ``(C,)`` of `count` elements in each process into those of all.

    This takes one collective of one vector. Every process merges in the order of ranks, so the results are bitwise
    equal in all processes. The number of elements comes as a tensor, so that the host does not wait for it; as an int
    only if `count` is at most 1, since then the total may be too small.

    Raises:
        ValueError: on the CPU, if the processes differ in channels, and the collective has raised no error.
    """
    packed = torch.cat((mean.new_full((1,), len(mean)), mean.new_full((1,), count), mean, var))
    gathered = packed.new_empty(peers.size * len(packed))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(gathered, packed, group=peers.group)
    gathered = gathered.view(peers.size, -1)
    if host_can_read(mean) and bool((gathered[:, 0] != len(mean)).any()):
        raise ValueError(
            f"expected inputs of one number of channels in all processes, but got {len(mean)} in this one and "
            f"{gathered[:, 0].int().tolist()} by rank; make every process call the same layers in one order"
        )
    counts, total = gathered[:, 1:2], gathered[:, 1].sum()
    means, variances = gathered[:, 2:].reshape(peers.size, 2, -1).unbind(1)  # (W, 2 * C) -> (W, C), (W, C)
    return *merge_moments(means, variances, counts / total.clamp(min=1)), total if count > 1 else int(total)


def all_reduced(tensor: Tensor, peers: Peers) -> Tensor:
    """Return the sum of `tensor` over all processes.

    The number of the call is added up as well: otherwise, tensors of different calls could be mixed unnoticed. If the
    numbers differ, the result is NaN on a device for which the host would have to wait.

    Raises:
        RuntimeError: on the CPU, if the processes are not in the same call.
    """
    call = peers.call % 4096  # exact in float32, also the sum over 4,096 processes
    packed = torch.cat((tensor.flatten(), tensor.new_full((1,), call)))
    dist.all_reduce(packed, group=peers.group)
    total, calls = packed[:-1].view(tensor.shape), packed[-1]
    if not host_can_read(tensor):
        return torch.where(calls == call * peers.size, total, torch.nan)
    if float(calls) != call * peers.size:
        raise RuntimeError(
            f"expected all processes to be in the backward of call {call} of their synchronized layers, but got "
            "another call in some of them; make every process call the same layers in the same order, and take the "
            "same gradients"
        )
    return total


class _AllReduce(torch.autograd.Function):
    """The sum over all processes. The tensor of each process enters the losses of all, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return all_reduced(tensor, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.peers), None  # type: ignore[no-untyped-call]


def all_reduced_in_graph(tensor: Tensor, peers: Peers) -> Tensor:
    """Return the result of `all_reduced`, recorded in the graph if one is recorded."""
    return _AllReduce.apply(tensor, peers)  # type: ignore


class SharedGroup:
    """A process group inside of the state of a layer: copies of the layer share it, and a pickle cannot hold it."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> SharedGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if dist.is_available() and dist.is_initialized() and self.group is dist.group.WORLD:
            return type(None), ()
        raise TypeError(
            "expected a layer without a process_group to pickle, but got one with a group, which exists in running "
            "processes only; save the state_dict, or set layer.process_group = None first"
        )
