"""The exchange between processes, over `torch.distributed`: batch statistics and their gradients.

One collective of one packed vector makes the statistics of all processes, and another one in the backward pass makes
their gradients; `_gather_checked` says when there are two in the forward pass. Timeouts and lost processes are left to
`torch.distributed`.

All processes of a group must have the same weights, and make the same calls in the same order; in a backward pass, that
is the order of the autograd engine. `DistributedDataParallel` guarantees the former, and relies on the latter as well.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.base import Pair, Statistics, as_pair, merge_moments

__all__: list[str] = []

ONE_PROCESS_A_DEVICE = (
    "with torch.distributed, use one process per device, but this process has several replicas ({}); run: torchrun "
    "--nproc-per-node=NUMBER_OF_DEVICES program.py, with DistributedDataParallel around the converted model in place "
    "of this wrapper"
)

_HEAD = 4  # numbers in front of the statistics, see `_head`
_ROOM = _HEAD + 1 + 2 * 2048  # numbers in the first gather, see `_gather_checked`: enough for 2048 channels
_TEXT = 512  # bytes that describe a layer

Group = Any  # a `torch.distributed.ProcessGroup`, a class that is missing where torch is built without it


class _Numbers(WeakKeyDictionary[nn.Module, int]):
    """The layers that have exchanged in a group, with their numbers: the order of their first exchanges.

    These are equal in all processes that call the same layers in the same order, regardless of how and when each
    process has made its layers. They are not stored on the layers, because a copy of a layer is another layer.
    """

    last = 0  # also counts layers that are gone


# A group that was destroyed and made anew is another object, and begins at 1; ranks that are threads have groups of
# their own. Only the thread that exchanges in a group uses its numbers.
_numbers: WeakKeyDictionary[Group, _Numbers] = WeakKeyDictionary()

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
        self.check(tensors[-1])
        try:
            collective(*tensors, group=self.group)
        except Exception as error:
            error.add_note(f"Raised in the exchange of {self.name} between processes.")
            raise

    def check(self, tensor: Tensor) -> None:
        """Raise an error for a tensor that no process has, or not one alone."""
        if type(tensor) is not Tensor:
            raise RuntimeError(
                f"expected a tensor of this process, but got a {type(tensor).__name__} in the exchange of {self.name}; "
                "pass the to_local() of a DTensor, and export or trace in eval mode"
            )

    def gathered(self, tensor: Tensor) -> Tensor:
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
    """Raise an error for what is no process group, or for one that was destroyed."""
    if process_group is None or not dist.is_available():
        return
    is_group = isinstance(process_group, dist.ProcessGroup)
    if not is_group and not _is_of_others(process_group):
        raise TypeError(
            f"process_group must be a group of torch.distributed, got {process_group!r}; pass the result of "
            "torch.distributed.new_group(ranks), the get_group() of a DeviceMesh, or None for all processes"
        )
    if is_group and dist.is_initialized():
        try:
            dist.get_rank(process_group)
        except ValueError as error:
            raise ValueError(
                "process_group must be a group that exists, got one that torch.distributed does not know, such as "
                "one that was destroyed; pass the result of torch.distributed.new_group(ranks) of this program"
            ) from error


def _is_of_others(process_group: Any) -> bool:
    """Return whether this is what `torch.distributed.new_group` returns in processes that the group does not have."""
    return isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER


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
    packed = torch.cat((first.new_full((1,), count), first.flatten(), second.flatten()))
    gathered = _gather_checked(packed, peers)
    counts, total = gathered[:, 0], gathered[:, 0].sum()
    return [gathered[:, 1:].chunk(2, 1)], counts, total if count > 1 else int(total)


def _gather_checked(packed: Tensor, peers: Peers) -> Tensor:
    """Gather a vector of all processes, after a check that all call one layer, on one kind of device.

    The check is a gather of its own, because vectors of different lengths, or on a CPU and on a GPU, cannot be gathered
    at all. It has the same length for every layer, and takes the vector along where that fits and is on the CPU.
    Elsewhere the host has to wait for the check, so only the first exchange of a layer in its group has one.
    """
    peers.check(packed)
    numbers, layer = _numbers.setdefault(peers.group, _Numbers()), peers.layer()
    if packed.device.type != "cpu" and layer in numbers:
        return peers.gathered(packed)
    device = _device_of_checks(packed, peers)
    number = numbers.get(layer, numbers.last + 1)
    head = _head(number, packed)
    message = torch.tensor(head, dtype=torch.float64, device=device)
    takes_along = packed.device.type == device.type == "cpu" and _HEAD + len(packed) <= _ROOM
    if takes_along:
        message = torch.cat((message, packed))
    gathered = peers.gathered(F.pad(message, (0, _ROOM - len(message))))
    if any([other != head for other in gathered[:, :_HEAD].tolist()]):
        raise _different_layers(number, packed, device, peers)
    # A new layer keeps its number only now, after an exchange that agreed.
    numbers[layer], numbers.last = number, max(numbers.last, number)
    return gathered[:, _HEAD : len(message)] if takes_along else peers.gathered(packed)


def _device_of_checks(packed: Tensor, peers: Peers) -> torch.device:
    """Return where all processes of a group can exchange, even if some have their vectors on a CPU, some on a GPU."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(peers.group).split(",")]  # "cpu:gloo,cuda:nccl"
    if "cpu" in kinds:
        return torch.device("cpu")
    return packed.device if packed.device.type in kinds else torch.device(kinds[0])


def _head(number: int, packed: Tensor) -> list[int]:
    """Return what must be equal in all processes: the layer, and the length, dtype and kind of device of its vector."""
    letters = packed.device.type[:6].encode()  # as many as float64 holds
    return [number, len(packed), packed.element_size(), int.from_bytes(letters)]


def _different_layers(number: int, packed: Tensor, device: Any, peers: Peers) -> RuntimeError:
    """Return the error that names the layers of all processes, which each process gets from the others."""
    text = (
        f"{peers.name} (number {number}, {len(packed) // 2} channels, {packed.dtype} statistics on {packed.device}) "
        f"in rank {dist.get_rank()}"
    )
    written = torch.tensor(list(text.encode()[:_TEXT].ljust(_TEXT)), dtype=torch.uint8, device=device)
    texts = [bytes(row).decode(errors="replace").strip() for row in peers.gathered(written).tolist()]
    return RuntimeError(
        f"expected all processes to call the same synchronized batch norm, but got {', '.join(texts)}; make every "
        "process call the same layers in the same order, on the same kind of device (a copy of a layer is another "
        "layer: copy a model in all processes)"
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
