"""The exchange between processes, over `torch.distributed`: batch statistics and their gradients.

One collective of one packed vector makes the statistics of all processes, and another one in the backward makes their
gradients. Timeouts and lost processes are left to `torch.distributed`.

All processes of a group must have the same weights, and make the same calls in the same order; in a backward pass, that
is the order of the autograd engine. `DistributedDataParallel` guarantees the former, and relies on the latter as well.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..backends.base import Pair, Statistics, as_pair, merge_moments

__all__: list[str] = []

ONE_PROCESS_A_DEVICE = (
    "with torch.distributed, use one process per device, but this process has several replicas ({}); run: torchrun "
    "--nproc-per-node=NUMBER_OF_DEVICES program.py, with DistributedDataParallel around the converted model in place "
    "of this wrapper"
)

ITSELF = "the module itself"  # the name of a layer that is the whole model
_HEAD = 4  # numbers in front of the statistics that travel

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it

# Not on the layers: a copy or pickle of a layer is another layer.
_numbers: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()
_next_number = itertools.count(1)
_history = 0  # a checksum of how all layers of this process were made, in order

_inherited: list[Group] = []  # the default group at each fork that led to this process: a child must not use it

if hasattr(os, "register_at_fork"):  # which Windows does not have
    os.register_at_fork(after_in_child=lambda: _inherited.append(dist.is_available() and dist.group.WORLD))


class Peers(NamedTuple):
    """The processes that a layer exchanges with, and which of the layers of its model and of its process it is."""

    group: Group
    position: int  # among the layers of its model
    names: Sequence[str]  # of these layers
    number: int = 0  # among all layers of this process

    @property
    def name(self) -> str:
        """The name of the layer."""
        return self.names[self.position] if self.position < len(self.names) else "a layer without a name"

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

    def all_reduced(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all processes, recorded in the graph if one is recorded."""
        return _AllReduce.apply(tensor, self)  # type: ignore


def number_layer(layer: nn.Module, how: str) -> int:
    """Give a layer the next number of this process, by which processes tell layers apart; return it.

    `how` says how the layer was made.
    """
    global _history
    number = _numbers[layer] = next(_next_number)
    kind = f"{how} {type(layer).__name__} {getattr(layer, 'num_features', None)}"
    _history = crc32(kind.encode(), _history)  # which the float64 of the CPU holds exactly
    return number


def number_of(layer: nn.Module) -> int:
    """Return the number of a layer; one that was made without its constructor has none, and gets the next."""
    return _numbers.get(layer) or number_layer(layer, "called")


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
    """Gather the statistics of all processes; return a list with one pair ``(W, C)``, the counts ``(W,)``, their sum.

    `count` is the number of elements per channel in this process. The statistics travel in `dtype`, or in their own.
    The sum is a tensor, so that the host does not wait for it. It is an int only if `count` is at most 1: then the
    caller has to check that it is more than 1.
    """
    first, second = (tensor.to(dtype=dtype) for tensor in as_pair(statistics))
    if first.dim() > 1:  # in pieces
        first, second = merge_moments(first, second, None)
    size = dist.get_world_size(peers.group)
    packed = torch.cat((*_head(first, count, peers), first.flatten(), second.flatten()))
    gathered = packed.new_empty(size * len(packed))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    peers.call(gather, gathered, packed)
    gathered = gathered.view(size, -1)
    if gathered.device.type == "cpu":  # elsewhere the host would have to wait
        _check_same_layer(gathered[:, 1:_HEAD].tolist(), peers)
    counts, total = gathered[:, 0], gathered[:, 0].sum()
    return [gathered[:, _HEAD:].chunk(2, 1)], counts, total if count > 1 else int(total)


def _head(like: Tensor, count: int, peers: Peers) -> Sequence[Tensor]:
    """Return what travels in front of statistics: their count, and what `_check_same_layer` compares."""
    if like.device.type == "cpu":
        return [like.new_full((1,), number) for number in (count, peers.position, peers.number, _history)]
    # Two launches in place of four: the position also fills the places of number and checksum. Only a process on the
    # CPU compares; it then finds different checksums, and compares positions only.
    return like.new_full((1,), count), like.new_full((_HEAD - 1,), peers.position)


def _check_same_layer(called: Sequence[Sequence[float]], peers: Peers) -> None:
    """Raise an error unless all processes have called one layer: `called` has position, number and history of each.

    Numbers tell layers apart if all processes have made the same layers in the same way. One that has made others
    besides, such as a copy of the model to evaluate, or has unpickled its model, has other numbers for the same layers.
    """
    positions, numbers, histories = map(set, zip(*called, strict=True))
    if len(positions) == 1 and (len(numbers) == 1 or len(histories) > 1):
        return
    layers = {number: layer for layer, number in _numbers.items()} if len(histories) == 1 else {}
    names = []
    for position, number, _ in called:
        layer = layers.get(int(number))
        names.append(peers._replace(position=int(position)).name if layer is None else _name_of(layer, int(number)))
    if len(set(names)) == 1:  # of several models
        names = [f"{name} (number {number:.0f})" for name, (_, number, _) in zip(names, called, strict=True)]
    found = [f"{name} in rank {rank}" for rank, name in enumerate(names)]
    raise RuntimeError(
        f"expected all processes to call the same synchronized batch norm, but got {', '.join(found)}; make every "
        "process call the same layers in the same order"
    )


def _name_of(layer: Any, number: int) -> str:
    """Return the name of a layer in its model, or what tells one that was made by itself from others."""
    position, names = layer._sync_layer
    has_name = names and names != (ITSELF,)
    return names[position] if has_name else f"{type(layer).__name__} number {number}"


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
