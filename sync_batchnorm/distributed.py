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

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sync_batchnorm import moments, normalization

__all__: list[str] = []

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it


def peers(process_group: Group | None) -> Group | None:
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


def merge_moments(mean: Tensor, var: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor, int]:
    """Merge mean and biased variance ``(C,)`` of `count` elements in each process of `group` into those of all.

    One collective. Every process merges in the order of ranks, so the result is the same in all of them, bit by bit.
    It is zero where no process has an element. On CUDA the host waits for the counts.

    Raises:
        ValueError: if the processes differ in channels, and the backend has let that pass.
    """
    packed = torch.cat((mean.new_tensor([len(mean), count]), mean, var))
    gathered = packed.new_empty(dist.get_world_size(group), len(packed))
    dist.all_gather(list(gathered.unbind()), packed, group=group)
    heads = gathered[:, :2].tolist()
    if any(channels != len(mean) for channels, _ in heads):
        raise ValueError(
            f"expected inputs of one number of channels in all processes, but got {len(mean)} in this one and "
            f"{[int(channels) for channels, _ in heads]} by rank; make every process call the same layers in one order"
        )
    counts = [int(number) for _, number in heads]
    if not any(counts):
        return torch.zeros_like(mean), torch.zeros_like(var), 0
    parts = gathered[:, 2:].reshape(len(counts), 2, -1)  # (W, 2 * C) -> (W, 2, C)
    mean, var = moments.merge_moments(list(parts.unbind()), counts)
    return mean, var, sum(counts)


def total_gradients(grad: Tensor | None, sums: Tensor | None, group: Group) -> tuple[Tensor | None, Tensor | None]:
    """Add up over all processes the gradient of the statistics and the `normalization.gradient_sums`, ``(2, C)`` each.

    One collective. What nobody sends is None; a process that sends only sums and one that sends more do not fit
    together, and differ in the length of the vector.
    """
    if grad is None:
        return None, None if sums is None else _all_reduced(sums, group)
    total_grad, total_sums = _all_reduced(torch.stack((grad, torch.zeros_like(grad) if sums is None else sums)), group)
    return total_grad, None if sums is None else total_sums


def merge_gradients(
    grad: Tensor, parts: Sequence[Tensor], counts: Sequence[int], mean: Tensor, count: int, group: Group
) -> list[Tensor]:
    """Return the gradients of the merge of all processes by the `parts` of this one, as `moments.merge_gradients` does.

    Args:
        grad: the gradient of mean and variance, ``(2, C)``: of all processes, or with `create_graph` of this one.
        parts: the moments of the replicas of this process, ``(2, C)`` each.
        counts: of the parts.
        mean: of all processes, ``(C,)``.
        count: of all processes.
        group: the processes.
    """
    if torch.is_grad_enabled():
        # Both are functions of what the other processes have, so the collective is a node of the graph as well.
        share = torch.stack([part[0] * (n / count) for part, n in zip(parts, counts, strict=True)]).sum(0)
        grad_mean, grad_var, mean = _AllReduce.apply(torch.cat((grad, share[None])), group)  # type: ignore[no-untyped-call]
    else:
        grad_mean, grad_var = grad
    # See `moments.merge_gradients`.
    return [
        torch.stack((grad_mean + 2 * grad_var * (part[0] - mean), grad_var)) * (n / count)
        for part, n in zip(parts, counts, strict=True)
    ]


def unweighted(affine: normalization.Affine) -> normalization.Affine:
    """Return what `normalization.gradient_coefficients` needs for sums of gradients that each process has weighed."""
    return normalization.Affine(affine.mean, affine.invstd, None, None if affine.slope is None else affine.invstd)


def _all_reduced(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _AllReduce(torch.autograd.Function):
    """The sum over all processes. Each of them reaches the losses of all through it, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_reduced(tensor, group)

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
