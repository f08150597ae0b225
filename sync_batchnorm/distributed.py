"""The same exchange between processes: batch statistics and their gradients over `torch.distributed`.

A process merges its own replicas first. One collective of one packed vector then makes the statistics of all processes,
and another one in the backward makes their gradients. Who waits too long, who left, and what differs between processes
is the business of `torch.distributed`: its errors and its timeout are the ones that a user sees.

NOTE [collectives]: Collectives have no names: the first of one process meets the first of every other one. So all
processes of a group must make the same calls in the same order. In a forward that is the order of the layers, since all
replicas of a process meet in each of them, and only the master speaks for them. In a backward it is the order in which
the engine runs one graph, which is the same graph in every process, and one thread for all CPU nodes, or for all nodes
of the device of the master. Blocking there waits for another process only, never for a replica of this one.

A recomputation by activation checkpointing runs inside of the backward, and reuses what its first call left, see NOTE
[recomputation].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__: list[str] = []

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it


def active_group(process_group: Group | None) -> Group | None:
    """Return the group to exchange over, or None where there is nobody to exchange with.

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


def merge_over_processes(mean: Tensor, var: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor, int | Tensor]:
    """Merge mean and biased variance ``(C,)`` of `count` elements in each process of `group` into those of all.

    One collective of one vector. Every process merges in the order of ranks, so the result is the same in all of them,
    bit by bit. It is zero where no process has an element.

    Returns:
        mean, variance, and the number of elements: as a tensor, so that the host does not wait for it, unless it might
        be one, which has no variance, or none.

    Raises:
        ValueError: on the CPU, if the processes differ in channels, and the backend has let that pass.
    """
    packed = torch.cat((mean.new_full((1,), len(mean)), mean.new_full((1,), count), mean, var))
    gathered = packed.new_empty(dist.get_world_size(group), len(packed))
    dist.all_gather(list(gathered.unbind()), packed, group=group)
    if mean.device.type == "cpu" and bool((gathered[:, 0] != len(mean)).any()):
        raise ValueError(
            f"expected inputs of one number of channels in all processes, but got {len(mean)} in this one and "
            f"{gathered[:, 0].int().tolist()} by rank; make every process call the same layers in one order"
        )
    counts = gathered[:, 1:2]  # (W, 1)
    means, variances = gathered[:, 2:].reshape(len(counts), 2, -1).unbind(1)  # (W, 2 * C) -> (W, C), (W, C)
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    mean = (means * shares).sum(0)
    deviations = means - mean
    var = (torch.addcmul(variances, deviations, deviations) * shares).sum(0)
    return mean, var, total if count > 1 else int(total)


def all_reduced(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum of `tensor` over all processes."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_reduced_in_graph(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum of `tensor` over all processes, as a function of that of each process."""
    total: Tensor = _AllReduce.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


class _AllReduce(torch.autograd.Function):
    """The sum over all processes. Each of them reaches the losses of all through it, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


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
