"""The exchange between processes, over `torch.distributed`: batch statistics and their gradients.

One collective of one packed vector makes the statistics of all processes, and another one in the backward makes their
gradients. Timeouts and lost processes are left to `torch.distributed`.

The first collective of one process is matched with the first of every other one. So all processes of a group must make
the same calls in the same order. In a backward, that is the order of the autograd engine, on which
`DistributedDataParallel` relies as well: several replicas in one process would make their nodes in several threads.

All processes have the same weights, as `DistributedDataParallel` guarantees and `torch.nn.SyncBatchNorm` assumes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .backends.base import merge_moments

__all__: list[str] = []

ONE_PROCESS_A_DEVICE = (
    "expected one process for each device once torch.distributed has several processes, but got several replicas in "
    "this one ({}); run: torchrun --nproc-per-node=NUMBER_OF_DEVICES program.py, with DistributedDataParallel around "
    "the converted model in place of this wrapper"
)

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it


def active_group(process_group: Group | None) -> Group | None:
    """Return the group to exchange over, by default of all processes; None where there is no other process."""
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
    """Merge mean and biased variance ``(C,)`` of `count` elements in each process into those of all, bitwise equal.

    The number of elements comes as a tensor, so that the host does not wait for it; as an int only if `count` is at
    most 1, since then the total may be too small.
    """
    size = dist.get_world_size(group)
    packed = torch.cat((mean.new_full((1,), count), mean, var))
    gathered = packed.new_empty(size * len(packed))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(gathered, packed, group=group)
    gathered = gathered.view(size, -1)
    counts, total = gathered[:, :1], gathered[:, 0].sum()
    means, variances = gathered[:, 1:].reshape(size, 2, -1).unbind(1)  # (W, 2 * C) -> (W, C), (W, C)
    return *merge_moments(means, variances, counts / total.clamp(min=1)), total if count > 1 else int(total)


class _AllReduce(torch.autograd.Function):
    """The sum over all processes. The tensor of each process enters the losses of all, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


def all_reduced(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum of `tensor` over all processes, recorded in the graph if one is recorded."""
    return _AllReduce.apply(tensor, group)  # type: ignore
