"""The exchange between processes, over `torch.distributed`: batch statistics and their gradients.

One collective of one packed vector makes the statistics of all processes, and another one in the backward makes their
gradients. Timeouts and lost processes are left to `torch.distributed`.

All processes of a group must make the same calls in the same order; in a backward, that is the order of the autograd
engine. All have the same weights. `DistributedDataParallel` guarantees the one and relies on the other.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.base import Pair, Statistics, as_pair, merge_moments

__all__: list[str] = []

ONE_PROCESS_A_DEVICE = (
    "with torch.distributed, use one process per device, but this process has several replicas ({}); run: torchrun "
    "--nproc-per-node=NUMBER_OF_DEVICES program.py, with DistributedDataParallel around the converted model in place "
    "of this wrapper"
)

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it

_inherited: list[Group] = []  # groups of all processes from before this process was forked from one of them

if hasattr(os, "register_at_fork"):  # which Windows does not have
    os.register_at_fork(after_in_child=lambda: _inherited.append(dist.is_available() and dist.group.WORLD))


class Peers(NamedTuple):
    """The processes that a layer exchanges with, and which of the layers of its model it is."""

    group: Group
    number: int
    names: Sequence[str]  # of the layers, by number

    def name(self, number: int) -> str:
        """Return the name of the layer with a number."""
        return self.names[number] if number < len(self.names) else "a layer without a name"

    def call(self, collective: Callable[..., Any], *tensors: Tensor) -> None:
        """Call a function of `torch.distributed`; an error of it gets a note that names the layer."""
        if type(tensors[-1]) is not Tensor:
            raise RuntimeError(
                f"expected a tensor of this process, but got a {type(tensors[-1]).__name__} in the exchange of "
                f"{self.name(self.number)}; pass the to_local() of a DTensor, and export or trace in eval mode"
            )
        try:
            collective(*tensors, group=self.group)
        except Exception as error:
            error.add_note(f"Raised in the exchange of {self.name(self.number)} between processes.")
            raise

    def all_reduced(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all processes, recorded in the graph if one is recorded."""
        return _AllReduce.apply(tensor, self)  # type: ignore


def active_group(process_group: Group | None) -> Group | None:
    """Return the group to exchange over, by default of all processes; None where there is no other process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if process_group is None else process_group
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"expected a process_group that this process belongs to, but got one without rank {dist.get_rank()}; "
            "create every group in every process, and pass each process the group that it belongs to"
        )
    if dist.get_world_size(group) == 1:
        return None
    if dist.group.WORLD in _inherited:
        raise RuntimeError(
            "expected a synchronized batch norm in the process that trains, but got a call in training mode in a "
            "process that was forked from it, such as a DataLoader worker, which no other process would answer; call "
            "eval() of the model there"
        )
    return group


def gather_statistics(
    statistics: Statistics, count: int, peers: Peers, dtype: torch.dtype | None
) -> tuple[Sequence[Pair], Tensor, int | Tensor]:
    """Gather the statistics of `count` elements per channel in each process: a pair ``(W, C)``, the counts, their sum.

    The statistics travel in `dtype`, or their own. The sum is a tensor, so that the host does not wait; an int if
    `count` is at most 1: it may be too small.
    """
    first, second = as_pair(statistics)
    if dtype is not None:
        first, second = first.to(dtype), second.to(dtype)
    if first.dim() > 1 and len(first) > 1:  # several parts of one input
        first, second = merge_moments(first, second, None)
    size = dist.get_world_size(peers.group)
    packed = torch.cat(
        (first.new_full((1,), count), first.new_full((1,), peers.number), first.flatten(), second.flatten())
    )
    gathered = packed.new_empty(size * len(packed))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    peers.call(gather, gathered, packed)
    gathered = gathered.view(size, -1)
    numbers = gathered[:, 1].tolist() if gathered.device.type == "cpu" else []  # elsewhere the host would have to wait
    if len(set(numbers)) > 1:
        called = [f"{peers.name(int(number))} in rank {rank}" for rank, number in enumerate(numbers)]
        raise RuntimeError(
            f"expected all processes to call the same synchronized batch norm, but got {', '.join(called)}; make every "
            "process call the same layers in the same order"
        )
    counts, total = gathered[:, 0], gathered[:, 0].sum()
    return [gathered[:, 2:].chunk(2, 1)], counts, total if count > 1 else int(total)


class _AllReduce(torch.autograd.Function):
    """The sum over all processes. The tensor of each process enters the losses of all, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        total = tensor.clone(memory_format=torch.contiguous_format)
        peers.call(dist.all_reduce, total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.peers), None  # type: ignore[no-untyped-call]
