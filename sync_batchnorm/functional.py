"""Synchronized batch normalization, and the building block of it, as functions that one replica calls."""

from __future__ import annotations

from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sync_batchnorm import distributed, normalization, recompute
from sync_batchnorm.autograd import BatchStatistics, Call, EpsRule, Replica
from sync_batchnorm.comm import SlavePipe, SyncMaster
from sync_batchnorm.compilation import in_transform, uncompiled
from sync_batchnorm.messages import Message, merge_messages
from sync_batchnorm.normalization import Affine, Statistics, memory_for_output
from sync_batchnorm.running import RunningStatistics

__all__ = ["merge_messages", "sync_moments"]

Pipe = SyncMaster | SlavePipe

RECOMPUTED = (
    "expected the gradients of all replicas in the backward of a synchronized batch norm, but got a recomputation that "
    "differentiates each replica by itself; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
)


def _has_tangent(tensor: Tensor | None) -> bool:
    # The level is private to torch: without it, every tensor is asked for a tangent.
    if tensor is None or getattr(forward_ad, "_current_level", 0) < 0:
        return False
    tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


class LayerSet:
    """A set of layers, each together with all its replicas.

    Every forward has new replicas, and nothing may be stored on the user's module. What a module and all its replicas
    have in common is the dictionary of its forward hooks, which no copy or pickle shares.
    """

    def __init__(self) -> None:
        self._found: dict[int, ReferenceType[Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, layer: nn.Module) -> bool:
        return id(layer._forward_hooks) in self._found

    def add(self, layer: nn.Module) -> bool:
        """Add `layer`; return whether it was not there, to one caller alone."""
        key = id(layer._forward_hooks)
        seen = ref(layer._forward_hooks, lambda _: self._found.pop(key, None))
        return self._found.setdefault(key, seen) is seen


_needs_exact = LayerSet()  # the layers for which fast statistics were not good enough


def _exchange(pipe: Pipe | None, message: Message) -> Call:
    if pipe is None:
        answer = merge_messages([(0, message)])[0][1]
    else:
        answer = pipe.run_master(message) if isinstance(pipe, SyncMaster) else pipe.run_slave(message)
    call: Call = answer
    return call


def _refuse_transforms(pipe: Pipe | None, owner: nn.Module | None, *tensors: Tensor | None) -> None:
    """Refuse what cannot be differentiated: a peer may be in another transform, and knows no tangents of this replica.

    Raises:
        RuntimeError: inside of a transform of `torch.func`, and for tensors with a tangent.
    """
    if in_transform():
        found = "a call inside of a transform of torch.func, such as grad or vmap"
    elif any(map(_has_tangent, tensors)):
        found = "a tensor with a tangent, of forward-mode differentiation"
    else:
        return
    where = pipe.where if pipe is not None else "sync_moments" if owner is None else type(owner).__name__
    raise RuntimeError(
        f"expected a synchronized batch norm to be differentiated backward, by torch.autograd, but got {found} "
        f"({where}); use torch.autograd.grad, with create_graph=True for gradients of gradients, or "
        "put the layer into eval mode"
    )


def _is_recomputed(pipe: Pipe | None) -> bool:
    """Return whether a call without others to meet runs in a backward, where it is not counted.

    Raises:
        RuntimeError: if there are others to meet.
    """
    if not recompute.in_backward():
        return False
    if pipe is not None:
        raise RuntimeError(RECOMPUTED)
    return True


class _Kept(NamedTuple):
    """What a call leaves to its recomputation, outside of the graph."""

    statistics: Statistics | None  # None if there was not a single element
    affine: Affine | None
    answer_requires_grad: bool
    elements: int = 0  # per channel, for mean and variance

    def repeated(self, constant: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return `constant` as what the call returned, having saved what it saved: a function of `input`."""
        Replica(input, weight, bias)
        if self.answer_requires_grad and torch.is_grad_enabled():
            return recompute.refuse_gradient(constant, input)
        return constant


def _recall(pipe: Pipe | None, owner: object) -> _Kept | None:
    """Return what the call has left that this one repeats, in a recomputation."""
    kept: _Kept | None = recompute.recall(pipe or owner) if recompute.has_hooks() else None
    return kept


def _normalize_nothing(input: Tensor, weight: Tensor | None, bias: Tensor | None, rule: EpsRule) -> Tensor:
    """Return the output of a call without a single element in all replicas."""
    return torch.batch_norm(input, weight, bias, None, None, True, 0.0, rule.eps, False)


@recompute.unseen_by_policies
def sync_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    pipe: Pipe | None,
    rule: EpsRule,
    group: distributed.Group | None = None,
    owner: nn.Module | None = None,
    running: RunningStatistics | None = None,
    common: bool = False,
    missed: list[BatchStatistics] | None = None,
) -> Tensor:
    """Normalize the input of one replica with the batch statistics of all that `pipe` connects.

    Blocks the calling thread until all of them have called.

    Args:
        input: ``(N, C, +)``, with its own N and sizes in each replica; may be empty.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        pipe: the connection of this replica; None if it is the only one of its process.
        rule: how eps enters.
        group: the processes to exchange with, as `distributed.peers` finds them; None for this one alone.
        owner: the layer, which remembers whether fast statistics will do, and by which a recomputation without a pipe
            finds the call that it repeats.
        running: the buffers that the master updates, once a call, and not in a recomputation.
        common: whether weight and bias are those that all replicas have.
        missed: where to leave what buffers that are not updated miss, once a call.

    Returns:
        The output, as `input` in shape, dtype and memory format.

    Raises:
        ValueError: see `merge_messages`.
        ReplicaSyncError: if the replicas cannot meet.
        RuntimeError: in a recomputation by reentrant activation checkpointing; inside of a transform of `torch.func`,
            and for tensors with a tangent.
    """
    _refuse_transforms(pipe, owner, input, weight, bias)
    kept = _recall(pipe, owner)
    if kept is not None:
        if kept.statistics is None:
            Replica(input, weight, bias)  # which saves what the call has saved
            return _normalize_nothing(input, weight, bias, rule)
        with torch.no_grad():
            memory = memory_for_output(input)
            normalization.normalize(input.detach(), kept.statistics, kept.affine, weight, bias, memory)
        return kept.repeated(memory, input, weight, bias)
    if _is_recomputed(pipe):
        running = None
    exact = owner is not None and owner in _needs_exact
    message = Message(input, weight, bias, rule, group, running, common=common, exact=exact)
    call = _exchange(pipe, message)
    if message.running is not None:  # Only now: a call that broke while it was merged is not counted.
        call.batch_statistics(call.home).move(message.running)
    if missed is not None:
        missed.append(call.batch_statistics(message.place))
    if call.exact and owner is not None:
        _needs_exact.add(owner)
    if message.memory is not None and message.statistics is not None:
        with torch.no_grad():
            normalization.normalize(message.input, message.statistics, message.affine, weight, bias, message.memory)
    output = message.answer
    if output is None:
        output = _normalize_nothing(input, weight, bias, rule)
    requires_grad = output.requires_grad
    recompute.keep(pipe or owner, lambda: _Kept(message.statistics, message.affine, requires_grad))
    return output


@uncompiled
@recompute.unseen_by_policies
def sync_moments(input: Tensor, pipe: Pipe | None, *, process_group: Any = None) -> tuple[Tensor, Tensor, int]:
    """Return mean, biased variance and count of each channel over all replicas that `pipe` connects.

    For normalizations of one's own. Connect the replicas in `__data_parallel_replicate__`: the first makes a
    ``SyncMaster(merge_messages)``, the others register with it. Blocks the calling thread until all of them have called
    it. In a module that runs on one device, pass None.

    Args:
        input: ``(N, C, +)``, with its own N and sizes in each replica.
        pipe: the `SyncMaster` or `SlavePipe` of this replica; None if it is the only one
            of its process.
        process_group: the `torch.distributed` group over which processes synchronize; None: all processes.

    Returns:
        mean and variance, ``(C,)``, in float32 (float64 for float64 inputs) on the device of `input`, and the number
        of elements per channel over all replicas.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have one value per channel in
            all; if this process is no member of the group.
        ReplicaSyncError: if the replicas cannot meet.
        RuntimeError: in a recomputation by reentrant activation checkpointing; inside of a transform of `torch.func`,
            and for tensors with a tangent.
    """
    _refuse_transforms(pipe, None, input)
    kept = _recall(pipe, None)
    if kept is not None and kept.statistics is not None:
        pair = kept.repeated(torch.stack(kept.statistics), input, None, None)
        return pair[0].clone(), pair[1].clone(), kept.elements
    _is_recomputed(pipe)
    message = Message(input, group=distributed.peers(process_group))
    call = _exchange(pipe, message)
    pair, count = cast(Tensor, message.answer), int(call.count)
    requires_grad = pair.requires_grad
    recompute.keep(pipe, lambda: _Kept(message.statistics, None, requires_grad, count))
    return pair[0].clone(), pair[1].clone(), count  # for their users alone, who may change them in place
