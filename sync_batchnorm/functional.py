"""Synchronized batch normalization, and the building block of it, as functions that one replica calls."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sync_batchnorm import moments
from sync_batchnorm.comm import SlavePipe, SyncMaster
from sync_batchnorm.nodes import RECOMPUTED, Merge, Record, ScaleRule, local_moments, merge_moments, normalize

__all__ = ["sync_moments"]

Pipe = SyncMaster | SlavePipe


class Message(NamedTuple):
    """What a replica sends to the master about its input."""

    moments: Tensor  # (2, C): mean and biased variance
    carrier: Tensor  # as `moments`, see NOTE [carriers]
    shape: torch.Size
    dtype: torch.dtype
    rule: ScaleRule | None  # None: the scale is the variance itself


@dataclass(frozen=True)
class Statistics:
    """What the master sends back: the batch statistics of all replicas."""

    normalizer: Tensor  # (2, C): mean and scale, on the device of the replica, part of the graph
    carrier: Tensor  # as `normalizer`, see NOTE [carriers]
    mean: Tensor  # (C,), on the device of the master, not part of the graph
    var: Tensor  # (C,), biased, as `mean`
    count: int


class _Call(NamedTuple):
    """One synchronized call of a layer by a replica, kept on the pipe of that forward for a recomputation."""

    moments: Tensor
    statistics: Statistics
    grad_enabled: bool


def merge_messages(messages: list[tuple[Hashable, Message]]) -> list[tuple[Hashable, Statistics]]:
    """Merge the moments of all replicas: the callback of the `SyncMaster` of a synchronized layer.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have one value a channel in all.
    """
    contents = [message for _, message in messages]
    if len({(message.shape[1], len(message.shape), message.dtype) for message in contents}) > 1:
        inputs = ", ".join(
            f"{tuple(message.shape)} of {message.dtype} in replica {replica}"
            for replica, message in enumerate(contents)
        )
        raise ValueError(
            "expected inputs of one dtype, number of channels and number of dimensions in all replicas, "
            f"but got {inputs}; give every replica the same kind of input"
        )
    counts = [moments.channel_count(message.shape) for message in contents]
    if sum(counts) == 1:
        single = contents[counts.index(1)]
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {single.shape}")
    if sum(counts) == 0:
        mean, var = contents[0].moments.unbind()
        return [(replica, Statistics(m.moments, m.carrier, mean, var, 0)) for replica, m in messages]
    merge = Merge(counts, [message.moments.device for message in contents], contents[0].dtype, contents[0].rule)
    merged = merge_moments(merge, [message.moments for message in contents], [message.carrier for message in contents])
    on_device = {
        device: Statistics(normalizer, carrier, merge.mean, merge.var, merge.count)
        for device, (normalizer, carrier) in merged.items()
    }
    return [(replica, on_device[message.moments.device]) for replica, message in messages]


def _exchange(pipe: Pipe, message: Message) -> Statistics:
    statistics: Statistics = pipe.run_master(message) if isinstance(pipe, SyncMaster) else pipe.run_slave(message)
    # Detached, the history keeps neither graph nor input alive.
    constant = statistics.normalizer.detach()
    kept = replace(statistics, normalizer=constant, carrier=constant)
    pipe.history.append(_Call(message.moments.detach(), kept, torch.is_grad_enabled()))
    return statistics


# NOTE [recomputation]: Activation checkpointing calls a layer again in the backward, one replica at a time. There is
# nobody to meet then, and nothing to count: the call repeats an earlier one and reuses its statistics. It is recognized
# by the running backward, through a private function of torch, without which there is still the fact that the replica
# has left its forward; that fails only for a backward inside of a forward. Which earlier call is repeated is told by
# the input: the one with the nearest moments, whatever the order in which segments are recomputed.
_graph_task_id = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _recall(pipe: Pipe, input: Tensor) -> Statistics | None:
    """Return the statistics of the earlier call that this one recomputes; None if it is not a recomputation."""
    if not pipe.history or (_graph_task_id() == -1 and not pipe.has_left):
        return None
    calls: list[_Call] = pipe.history
    if len(calls) > 1:
        with torch.no_grad():
            here = moments.local_moments(input)
        calls = sorted(calls, key=lambda call: float((call.moments - here).abs().sum()))
    if not calls[0].grad_enabled and torch.is_grad_enabled():
        raise RuntimeError(RECOMPUTED)
    return calls[0].statistics


def sync_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, pipe: Pipe, rule: ScaleRule
) -> tuple[Tensor, Statistics | None]:
    """Normalize the input of one replica with the batch statistics of all that `pipe` connects.

    Blocks the calling thread until all of them have called.

    Args:
        input: ``(N, C, +)``, with its own N and sizes in each replica; may be empty.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        pipe: the connection of this replica.
        rule: how eps enters.

    Returns:
        The output, as `input` in shape, dtype and memory format, and the statistics of this call; None instead of them
        in a recomputation, which must not be counted twice.

    Raises:
        ValueError: see `merge_messages`.
        ReplicaSyncError: if the replicas cannot meet.
        RuntimeError: in a recomputation by reentrant activation checkpointing.
    """
    record = Record(weight)
    recalled = _recall(pipe, input)
    if recalled is not None:
        record.count = recalled.count
    parts, carrier, *inputs = local_moments(input, record)
    statistics = recalled or _exchange(pipe, Message(parts, carrier, input.shape, input.dtype, rule))
    record.normalizer, record.count = statistics.normalizer.detach(), statistics.count
    if statistics.count == 0:
        output = torch.batch_norm(input, weight, bias, None, None, True, 0.0, rule.eps, False)
    else:
        output = normalize((inputs[0], inputs[1]), statistics.normalizer, statistics.carrier, weight, bias)
    return output, None if recalled is not None else statistics


def sync_moments(input: Tensor, pipe: Pipe) -> tuple[Tensor, Tensor, int]:
    """Return mean, biased variance and count of each channel over the inputs of all replicas; differentiable.

    The building block for normalizations of your own, inside a module with `__data_parallel_replicate__`. Blocks the
    calling thread until all replicas have called. May be differentiated any number of times, and recomputed under
    activation checkpointing without reentrant autograd.

    Args:
        input: ``(N, C, +)``, with its own N and sizes in each replica; may be empty.
        pipe: the `SyncMaster` (made with `merge_messages`) or `SlavePipe` of this replica.

    Returns:
        mean and variance, ``(C,)``, in float32 (float64 for float64 inputs) on the device of `input`, and the number
        of elements a channel over all replicas.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have one value a channel in all.
        ReplicaSyncError: if the replicas cannot meet.
    """
    parts, carrier, *_ = local_moments(input, None)
    statistics = _recall(pipe, input) or _exchange(pipe, Message(parts, carrier, input.shape, input.dtype, None))
    mean, var = statistics.normalizer.unbind()
    return mean, var, statistics.count
