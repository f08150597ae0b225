"""The exchange between processes, over `torch.distributed`: batch statistics and their gradients.

A process merges its own replicas first. One collective of one packed vector then makes the statistics of all processes,
and another one in the backward makes their gradients. `torch.distributed` handles timeouts, lost processes and
collectives that do not match: users see its errors, and its timeout counts.

Collectives have no names: the first of one process is matched with the first of every other one. So all processes of a
group must make the same calls in the same order. In a forward, that is the order of the layers: all replicas of a
process exchange in each layer, and only the master calls the collective. There it blocks for other processes only,
never for a replica of its own process.

NOTE [order of a backward]: In a backward, the order must be the reverse, whatever the number of replicas. Of all nodes
that are ready, the engine runs the one with the highest sequence number. Each thread numbers the nodes that it makes,
from zero on. If one thread calls all layers, a node thus has a lower number than all nodes that lead to it in a
backward, and nodes run in the order of their numbers. But replicas number their nodes in several threads. So the nodes
of layers get the numbers of their calls, counted over all forwards whose graphs are alive, and the nodes that a replica
makes after a call get higher numbers than that call (`count_up_to`). Then all nodes that lead to a later call, in any
replica, run before the node of an earlier one.

The nodes of several devices run in several threads of the engine, each of which orders only its own nodes. There the
node of each call also takes a token, a tensor without elements, from the node of the call before it. Through a token,
the engine may reach a node whose outputs do not enter the loss. Such a node has no gradients, and does not exchange: in
a process with one device, it does not even run.

`DistributedDataParallel` uses the same group, and starts a collective as soon as the gradients of some parameters are
complete. The nodes of layers have lower numbers than all other nodes: each thread reserves numbers for the calls that
may follow (`_CALLS_AHEAD`). Otherwise, a branch that begins early would have lower numbers than later calls in a new
thread, and higher ones in an old thread. So the engine runs the node of a layer when no other node is ready: then all
gradients that can be complete are complete, with replicas and without. On several GPUs, torch replicates all parameters
in one node, which comes after all layers.

A recomputation by activation checkpointing runs inside of the backward, and reuses what its first call kept, see NOTE
[recomputation] in `recompute.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from sync_batchnorm.backends.base import merge_moments
from sync_batchnorm.places import host_can_read
from sync_batchnorm.torch_private import next_sequence_number, set_sequence_number

__all__: list[str] = []

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


_calls: WeakKeyDictionary[Group, int] = WeakKeyDictionary()  # the number of calls on each group
_lock = Lock()


def peers_of_call(group: Group) -> Peers:
    """Count a call on `group`, and return the processes of the group."""
    with _lock:
        _calls[group] = _calls.get(group, 0) + 1
        return Peers(group, dist.get_world_size(group), _calls[group])


class _Forward:
    """The nodes of the layers in one forward. It exists as long as the graph may have another backward."""

    def __init__(self) -> None:
        self.nodes: list[ReferenceType[Any]] = []
        with _lock:
            self.last = _last_number()
            _forwards[next(_numbers)] = self


_forwards: WeakValueDictionary[int, _Forward] = WeakValueDictionary()  # in the order in which they began
_numbers = itertools.count()


def _last_number() -> int:
    """Return the number of the last node; first number all nodes anew, so that numbers do not grow forever."""
    number = 0
    for forward in list(_forwards.values()):
        for node in [node for reference in forward.nodes if (node := reference()) is not None]:
            number += 1
            set_sequence_number(node, number)
        forward.last = number
    return number


# The most calls of layers that may follow a node, in its own forward and in others: arbitrary. On the CPU, the first
# forward in a new thread takes about a microsecond for each of them.
_CALLS_AHEAD = 1024


def count_up_to(number: int) -> None:
    """Give nodes that this thread makes from now on numbers above `number`, with room for calls that may follow."""
    number += _CALLS_AHEAD
    if next_sequence_number() <= number:
        with torch.inference_mode(False), torch.enable_grad():
            while (missing := number + 1 - next_sequence_number()) > 0:
                torch.empty(missing, device="cpu", requires_grad=True).tensor_split(missing)  # a node for each piece


class BackwardOrder:
    """Keeps the nodes of one forward of a replica in order, see NOTE [order of a backward].

    It must not outlive the forward, since its token would keep the graph alive.
    """

    def __init__(self) -> None:
        self._forward: _Forward | None = None
        self.token: Tensor | None = None  # of the last call, where there are several devices

    def add(self, node: Any) -> tuple[_Forward, int]:
        """Give `node` the next number; return an object that must live as long as the node, and the number."""
        if self._forward is None:
            self._forward = _Forward()
        self._forward.nodes.append(ref(node))
        self._forward.last += 1
        set_sequence_number(node, self._forward.last)
        return self._forward, self._forward.last


_order: ContextVar[BackwardOrder | None] = ContextVar("sync_batchnorm_order", default=None)


def order_of_forward() -> BackwardOrder:
    """Return the order for nodes that this thread makes; outside of a replica, a new one for each call."""
    return _order.get() or BackwardOrder()


def has_peers() -> bool:
    """Return whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def count_all_calls() -> None:
    """Number later nodes of this thread above all calls so far: before a forward begins, and after it has ended."""
    if has_peers():
        with _lock:
            last = _last_number()
        count_up_to(last)


@contextmanager
def in_order() -> Iterator[None]:
    """Run the body, the forward of a replica, such that the nodes of its layers run in order in a backward."""
    count_all_calls()
    token = _order.set(BackwardOrder() if has_peers() else None)
    try:
        yield
    finally:
        _order.reset(token)


def merge_over_processes(mean: Tensor, var: Tensor, count: int, peers: Peers) -> tuple[Tensor, Tensor, int | Tensor]:
    """Merge mean and biased variance ``(C,)`` of `count` elements in each process into those of all.

    This takes one collective of one vector. Every process merges in the order of ranks, so the results are bitwise
    equal in all processes. Mean and variance are zero if no process has an element.

    Returns:
        mean, variance, and the number of elements: as a tensor, so that the host does not wait for it; as an int if
            `count` is at most 1, since then the total may be too small.

    Raises:
        ValueError: on the CPU, if the processes differ in channels, and the collective has raised no error.
    """
    packed = torch.cat((mean.new_full((1,), len(mean)), mean.new_full((1,), count), mean, var))
    gathered = packed.new_empty(peers.size, len(packed))
    dist.all_gather(list(gathered.unbind()), packed, group=peers.group)
    if host_can_read(mean) and bool((gathered[:, 0] != len(mean)).any()):
        raise ValueError(
            f"expected inputs of one number of channels in all processes, but got {len(mean)} in this one and "
            f"{gathered[:, 0].int().tolist()} by rank; make every process call the same layers in one order"
        )
    counts = gathered[:, 1:2]  # (W, 1)
    means, variances = gathered[:, 2:].reshape(len(counts), 2, -1).unbind(1)  # (W, 2 * C) -> (W, C), (W, C)
    total = counts.sum()
    return *merge_moments(means, variances, counts / total.clamp(min=1)), total if count > 1 else int(total)


def all_reduced(tensor: Tensor, peers: Peers) -> Tensor:
    """Return the sum of `tensor` over all processes.

    The processes also exchange the number of the call: otherwise, tensors of different calls could be added up
    unnoticed. If the numbers differ, the result is NaN on a device for which the host would have to wait.

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


def all_reduced_in_graph(tensor: Tensor, peers: Peers) -> Tensor:
    """Return the result of `all_reduced`, recorded in the graph."""
    total: Tensor = _AllReduce.apply(tensor, peers)  # type: ignore[no-untyped-call]
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
