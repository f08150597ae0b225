"""Synchronized batch normalization, and the building block of it, as functions that one replica calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sync_batchnorm import distributed, normalization, recompute, whole
from sync_batchnorm.comm import SlavePipe, SyncMaster
from sync_batchnorm.messages import Merged, Message, Normalized, Whole, merge_messages, ready_event, receive
from sync_batchnorm.nodes import RECOMPUTED, Record, ScaleRule, local_moments, normalize
from sync_batchnorm.running import RunningStatistics

__all__ = ["merge_messages", "sync_moments"]

Pipe = SyncMaster | SlavePipe


def _meet(pipe: Pipe, message: Message | Whole) -> Any:
    return pipe.run_master(message) if isinstance(pipe, SyncMaster) else pipe.run_slave(message)


def _exchange(pipe: Pipe | None, owner: object, message: Message) -> Merged:
    # The answer None means that others have sent their inputs, and that now all of them send their moments.
    answer = merge_messages([(0, message)])[0][1] if pipe is None else _meet(pipe, message) or _meet(pipe, message)
    merged: Merged = answer  # type: ignore[assignment]
    recompute.keep(pipe or owner, lambda: _Call(merged))
    return merged


def _hands_over(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, rule: ScaleRule, group: distributed.Group | None
) -> bool:
    """Tell whether a replica sends its input itself; not where hooks on saved tensors want to see what it saves."""
    plain = group is None and rule.mode == "plus"
    return plain and whole.is_small(input, weight, bias) and not recompute.has_hooks()


class _Call:
    """What a call leaves to its recomputation: its statistics, without the graph."""

    def __init__(self, statistics: Merged) -> None:
        self._requires_grad = statistics.normalizer.requires_grad
        self._statistics = replace(statistics, normalizer=statistics.constant, carrier=statistics.constant)

    def statistics(self, input: Tensor) -> Merged:
        """Return the statistics; where autograd records, it must save with them what it saved in the call."""
        if not self._requires_grad or not torch.is_grad_enabled():
            return self._statistics
        constant = recompute.refuse_gradient(self._statistics.constant, input)
        return replace(self._statistics, normalizer=constant, carrier=constant)


def _recall(pipe: Pipe | None, owner: object, input: Tensor) -> Merged | None:
    """Return the statistics of the earlier call that this one recomputes; None if it is not a recomputation.

    Raises:
        RuntimeError: in a recomputation that cannot be served.
    """
    call: _Call | None = recompute.recall(pipe or owner) if recompute.has_hooks() else None
    if call is not None:
        return call.statistics(input)
    if pipe is not None and recompute.in_backward():
        raise RuntimeError(RECOMPUTED)
    return None


def sync_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    pipe: Pipe | None,
    rule: ScaleRule,
    group: distributed.Group | None = None,
    owner: object = None,
    running: RunningStatistics | None = None,
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
        owner: the layer, by which a recomputation without a pipe finds the call that it repeats.
        running: the buffers that the master updates, once a call, and not in a recomputation.

    Returns:
        The output, as `input` in shape, dtype and memory format.

    Raises:
        ValueError: see `merge_messages`.
        ReplicaSyncError: if the replicas cannot meet.
        RuntimeError: in a recomputation by reentrant activation checkpointing.
    """
    record = Record()
    recalled = _recall(pipe, owner, input)
    if recalled is not None or (pipe is None and recompute.in_backward()):
        running = None
    if recalled is not None:
        record.affine = recalled.affine
    elif pipe is not None and _hands_over(input, weight, bias, rule, group):
        normalized: Normalized | None = _meet(
            pipe, Whole(input, input.shape, input.dtype, weight, bias, rule, torch.is_grad_enabled())
        )
        if normalized is not None:
            if running is not None:
                running.update(normalized.mean, normalized.var, normalized.count)
            return normalized.output
    parts, carrier, *inputs = local_moments(input, record)
    message = Message(parts, carrier, input.shape, input.dtype, rule, weight, bias, group, ready_event(parts))
    statistics = recalled or _exchange(pipe, owner, message)
    receive(statistics.normalizer, statistics.ready, input.device)
    if running is not None:
        running.update(statistics.mean, statistics.var, statistics.count)
    affine = statistics.affine
    if affine is None:  # There is not a single element in all replicas.
        return torch.batch_norm(input, weight, bias, None, None, True, 0.0, rule.eps, False)
    record.normalizer, record.affine = statistics.constant, affine
    if statistics.weighted:
        if affine.slope is None:
            record.affine = replace(affine, weight=weight)  # on the device of this replica
        return normalize(inputs, statistics.normalizer, statistics.carrier, weight, bias, record)
    output = normalize(inputs, statistics.normalizer, statistics.carrier, None, None, record)
    return normalization.weigh(output, weight, bias)


def sync_moments(input: Tensor, pipe: Pipe | None, *, process_group: Any = None) -> tuple[Tensor, Tensor, int]:
    """Return mean, biased variance and count of each channel over the inputs of all replicas; differentiable.

    The building block for normalizations of your own, inside a module with `__data_parallel_replicate__`. Blocks the
    calling thread until all replicas have called. May be differentiated any number of times, and recomputed under
    activation checkpointing without reentrant autograd.

    Args:
        input: ``(N, C, +)``, with its own N and sizes in each replica; may be empty.
        pipe: the `SyncMaster` (made with `merge_messages`) or `SlavePipe` of this replica; None if it is the only one
            of its process.
        process_group: the `torch.distributed` group over which processes synchronize; None: all processes.

    Returns:
        mean and variance, ``(C,)``, in float32 (float64 for float64 inputs) on the device of `input`, and the number
        of elements a channel over all replicas.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have one value a channel in all;
            if this process is no member of the group.
        ReplicaSyncError: if the replicas cannot meet.
    """
    group = distributed.peers(process_group)
    parts, carrier, *_ = local_moments(input, None)
    message = Message(parts, carrier, input.shape, input.dtype, None, group=group, ready=ready_event(parts))
    statistics = _recall(pipe, None, input) or _exchange(pipe, None, message)
    receive(statistics.normalizer, statistics.ready, input.device)
    mean, var = statistics.normalizer.unbind()
    return mean, var, statistics.count
