"""The exchange between processes, over `torch.distributed`: batch statistics and their gradients.

One collective of one packed vector makes the statistics of all processes, and another one in the backward pass makes
their gradients. Timeouts, lost processes, and vectors of different lengths are left to `torch.distributed`.

All processes of a group must have the same weights, and make the same calls in the same order; in a backward pass, that
is the order of the autograd engine. `DistributedDataParallel` guarantees the former, and relies on the latter as well.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .backends.base import merge_moments
from .backends.workspaces import Pair

__all__: list[str] = []

ONE_PROCESS_A_DEVICE = (
    "with torch.distributed, use one process per device, but this process has several replicas ({}); run: torchrun "
    "--nproc-per-node=NUMBER_OF_DEVICES program.py, with DistributedDataParallel around the converted model in place "
    "of this wrapper"
)

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it

# For each group, the layers that have exchanged in it on the CPU, with their numbers. A number is not stored on its
# layer, because a copy of the layer must have none. A group that was destroyed and made anew is another object,
# and begins at 1; ranks that are threads have groups of their own. Only the thread that exchanges in a group uses its
# numbers.
_numbers: WeakKeyDictionary[Group, WeakKeyDictionary[nn.Module, float]] = WeakKeyDictionary()

_inherited: list[Group] = []  # the default group at each fork that led to this process: a child must not use it

if hasattr(os, "register_at_fork"):  # which Windows does not have
    os.register_at_fork(after_in_child=lambda: _inherited.append(dist.is_available() and dist.group.WORLD))


class Peers(NamedTuple):
    """The processes that a layer exchanges with, and which layer that is."""

    group: Group
    name: str  # of the layer in its model
    # A weak reference, since the graph of a call has this object, and would keep the model alive. None: `sync_moments`.
    layer: Any = None

    def call(self, collective: Callable[..., Any], *tensors: Tensor) -> None:
        """Call a function of `torch.distributed`; an error of it gets a note that names the layer."""
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

    def gathered_statistics(
        self, statistics: Pair, count: int, dtype: torch.dtype | None
    ) -> tuple[Sequence[Pair], Tensor, int | Tensor]:
        """Gather the statistics of all processes; return a list with one pair ``(W, C)``, counts ``(W,)``, their sum.

        `count` is the number of elements per channel in this process. The statistics travel in `dtype`, or in their
        own. The sum is a tensor, so that the host does not wait for it. It is an int only if `count` is at most 1: then
        the caller has to check that it is more than 1.
        """
        first, second = (tensor.to(dtype=dtype) for tensor in statistics)
        if first.dim() > 1:  # in pieces
            first, second = merge_moments(first, second, None)
        head = [count, _number_of(self)] if first.is_cpu else [count]  # Elsewhere, the host would have to wait.
        gathered = self._gathered(torch.cat([*[first.new_full((1,), value) for value in head], first, second]))
        if first.is_cpu:
            _agree(gathered[:, 1].tolist(), self)
        counts, total = gathered[:, 0], gathered[:, 0].sum()
        return [gathered[:, len(head) :].chunk(2, 1)], counts, total if count > 1 else int(total)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the vectors of all processes, one a row."""
        size = dist.get_world_size(self.group)
        result = tensor.new_empty(size * len(tensor))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        self.call(gather, result, tensor)
        return result.view(size, -1)

    def all_reduced(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all processes, recorded in the graph if one is recorded."""
        return _AllReduce.apply(tensor, self)  # type: ignore


def check_group(process_group: Any) -> None:
    """Raise an error for what is no process group."""
    if process_group is None or not dist.is_available():
        return
    # `torch.distributed.new_group` returns this number in processes that the group does not have.
    is_of_others = isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(process_group, dist.ProcessGroup) and not is_of_others:
        raise TypeError(
            f"process_group must be a group of torch.distributed, got {process_group!r}; pass the result of "
            "torch.distributed.new_group(ranks), the get_group() of a DeviceMesh, or None for all processes"
        )


def active_group(process_group: Group | None) -> Group | None:
    """Return the group to exchange over, by default of all processes; None where there is no other process."""
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


def _number_of(peers: Peers) -> float:
    """Return the number of a layer; of one without a number, as a negative one, the next that this process has free."""
    numbers = _numbers.setdefault(peers.group, WeakKeyDictionary())
    return numbers.get(peers.layer()) or -1 - max(numbers.values(), default=0)


def _agree(numbers: Sequence[float], peers: Peers) -> None:
    """Let the layer have the number that all processes send, or raise an error in all of them if they send several.

    A layer without a number takes the number of the other processes, so one process may go on with a copy of its model
    that has not exchanged yet. If no process has a number, all take the largest proposal, which is free everywhere.
    """
    known = {number for number in numbers if number > 0}
    if len(known) > 1:
        raise _different_layers(numbers, peers)
    _numbers[peers.group][peers.layer()] = known.pop() if known else -min(numbers)


def _different_layers(numbers: Sequence[float], peers: Peers) -> RuntimeError:
    """Return the error for processes that call different layers. It names the layer of this process only.

    Another process may have given a number to another layer: nobody notices if the first calls already differ.
    """
    layers = []
    for rank, number in zip(dist.get_process_group_ranks(peers.group), numbers, strict=True):
        name = peers.name if rank == dist.get_rank() else "a layer"
        layers.append(f"{name} ({f'number {number:.0f}' if number > 0 else 'not yet numbered'}) in rank {rank}")
    return RuntimeError(
        f"expected all processes to call the same synchronized batch norm, but got {', '.join(layers)}; make every "
        "process call the same layers in the same order: the error of each rank names its own layer"
    )


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
