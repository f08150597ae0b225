"""Exchange batch statistics and their gradients between processes, over `torch.distributed`.

Processes share no memory, so they cannot use a `SyncMaster`: only collectives connect them. In a forward pass, each
process packs the statistics of a layer into one vector, gathers the vectors of all processes, and merges the gathered
rows itself. In a backward pass, a collective adds up one vector of sums over all processes.

    rank 0   [count, number, statistics] ---+                 +---> rows of all ranks, (W, 2 + 2 * C) ---> merge(rows)
                                            +--- all_gather --+
    rank 1   [count, number, statistics] ---+                 +---> rows of all ranks, (W, 2 + 2 * C) ---> merge(rows)

A collective does not check that all ranks call the same layer: it would mix the statistics of two layers without an
error. So on the CPU, each vector also contains the number of the layer, and all ranks compare the gathered numbers
(`_agree_on_number`). On GPUs, the host would have to wait for the gathered numbers, so the vectors do not contain any.

All processes of a group must have the same weights, and call the same layers in the same order. In a backward pass, the
autograd engine determines this order. `DistributedDataParallel` keeps the weights equal, and relies on the same order
itself. Timeouts, lost processes and layers with different numbers of channels are left to `torch.distributed`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .backends.base import merge_moments

__all__: list[str] = []

ONE_PROCESS_A_DEVICE = (
    "with torch.distributed, use one process per device, but this process has several replicas ({}); run: torchrun "
    "--nproc-per-node=NUMBER_OF_DEVICES program.py, with DistributedDataParallel around the converted model in place "
    "of this wrapper"
)

# A `torch.distributed.ProcessGroup`. The type is Any, because some builds of torch do not contain this class.
Group = Any

# Maps each process group to a dict from layers to the numbers of these layers. Layers get a number when they exchange
# statistics on the CPU. The number is not stored on the layer, because a copy of the layer must not get the same
# number. The numbers of a new group start at 1, even if the group replaces a destroyed group. Only one thread uses the
# dict of a group: if ranks are threads of one process, each rank has a group of its own.
_numbers: WeakKeyDictionary[Group, WeakKeyDictionary[nn.Module, float]] = WeakKeyDictionary()

# If this process was forked: the default process groups of its parent processes. A forked process must not use them.
_inherited: list[Group] = []

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _inherited.append(dist.is_available() and dist.group.WORLD))


class Peers(NamedTuple):
    """One layer of this process, and the group of processes with which it exchanges statistics."""

    group: Group
    name: str  # the name of the layer in its model
    # A weak reference to the layer: the autograd graph holds this `Peers` object, but must not keep the model alive.
    # The function `sync_moments` does not belong to a layer, and leaves None here.
    layer: Any = None

    def call(self, collective: Callable[..., Any], *tensors: Tensor) -> None:
        """Call a collective of `torch.distributed` with these tensors. If it fails, add a note that names the layer."""
        if type(tensors[-1]) is not Tensor:
            raise RuntimeError(
                f"expected a tensor of this process, but got a {type(tensors[-1]).__name__} in the exchange of "
                f"{self.name}; pass the to_local() of a DTensor, and export or trace in eval mode"
            )
        try:
            collective(*tensors, group=self.group)
        except Exception as error:
            error.add_note(f"Raised in the exchange of {self.name} between processes.")
            raise

    def gather_statistics(
        self, statistics: Sequence[Tensor], count: int, dtype: torch.dtype | None
    ) -> tuple[Sequence[Sequence[Tensor]], Tensor, int | Tensor]:
        """Gather the statistics and the element counts of all W processes.

        Return three values: two tensors ``(W, C)`` of statistics, with a row for each process and C channels; a tensor
        ``(W,)`` with the count of each process; and the sum of these counts.

        `count` is the number of elements per channel in this process. The statistics are sent in `dtype`, or in their
        own dtype if `dtype` is None. The sum is a tensor, so that the host does not wait for its value. If `count` is
        at most 1, the sum is an int instead, because the caller must then check whether the whole sum is 1.
        """
        # Some backends send another vector instead of the variance, for example ``1 / sqrt(var + eps)``.
        mean, var = (tensor.to(dtype=dtype) for tensor in statistics)
        if mean.dim() > 1:  # (K, C), from K pieces of the input -> (C,)
            mean, var = merge_moments(mean, var, None)
        header = [count, _number_or_proposal(self)] if mean.is_cpu else [count]
        vector = torch.cat([*[mean.new_full((1,), value) for value in header], mean, var])
        size = dist.get_world_size(self.group)
        result = vector.new_empty(size * len(vector))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        self.call(gather, result, vector)
        gathered = result.view(size, -1)  # (W, len(header) + 2 * C)
        if mean.is_cpu:
            _agree_on_number(gathered[:, 1].tolist(), self)
        counts, total = gathered[:, 0], gathered[:, 0].sum()
        return [gathered[:, len(header) :].chunk(2, 1)], counts, total if count > 1 else int(total)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all processes. Autograd can differentiate this sum."""
        return _AllReduce.apply(tensor, self)  # type: ignore


def check_group(process_group: Any) -> None:
    """Raise a `TypeError` unless the argument is a process group or None."""
    if process_group is None or not dist.is_available():
        return
    # In a process outside the new group, `torch.distributed.new_group` returns the integer `NON_GROUP_MEMBER`.
    is_non_member = isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(process_group, dist.ProcessGroup) and not is_non_member:
        raise TypeError(
            f"process_group must be a group of torch.distributed, got {process_group!r}; pass the result of "
            "torch.distributed.new_group(ranks), the get_group() of a DeviceMesh, or None for all processes"
        )


def active_group(process_group: Group | None) -> Group | None:
    """Return the process group over which layers synchronize, or None if it contains only this process.

    If `process_group` is None, use the group of all processes.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    check_group(process_group)
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


def _number_or_proposal(peers: Peers) -> float:
    """Return the number that identifies the layer in its process group.

    If the layer has no number yet, return a proposal: the next unused number, marked by a minus sign.
    """
    numbers = _numbers.setdefault(peers.group, WeakKeyDictionary())
    return numbers.get(peers.layer()) or -1 - max(numbers.values(), default=0)


def _agree_on_number(numbers: Sequence[float], peers: Peers) -> None:
    """Compare the layer's number with its number in the other processes. A new layer gets its number here.

    Different numbers mean that processes called different layers. Then each process raises an error, which names only
    the layer of its own process: in another process, the number may belong to another layer.

    A layer that is new in this process takes its number from the other processes, for example if one process continues
    with a new copy of its model. A layer that is new in every process gets the largest number that was proposed, which
    no process uses yet.

    One mistake is not detected: if a process calls two layers in the wrong order, from its first forward pass on, the
    two layers get each other's numbers.
    """
    known = {number for number in numbers if number > 0}
    if len(known) > 1:
        layers = []
        for rank, number in zip(dist.get_process_group_ranks(peers.group), numbers, strict=True):
            name = peers.name if rank == dist.get_rank() else "a layer"
            layers.append(f"{name} ({f'number {number:.0f}' if number > 0 else 'not yet numbered'}) in rank {rank}")
        raise RuntimeError(
            f"expected all processes to call the same synchronized batch norm, but got {', '.join(layers)}; make every "
            "process call the same layers in the same order: the error of each rank names its own layer"
        )
    _numbers[peers.group][peers.layer()] = known.pop() if known else -min(numbers)


class _AllReduce(torch.autograd.Function):
    """Add up a tensor over all processes.

    The tensor of each process contributes to the losses of all processes. So its gradient must be summed over all
    processes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        total = tensor.clone(memory_format=torch.contiguous_format)
        peers.call(dist.all_reduce, total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.peers), None  # type: ignore[no-untyped-call]
