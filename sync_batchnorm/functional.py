"""Synchronized batch normalization, and the building block of it, as functions that one replica calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync_batchnorm import distributed, moments, recompute, whole
from sync_batchnorm.comm import SlavePipe, SyncMaster
from sync_batchnorm.nodes import RECOMPUTED, Merge, Record, ScaleRule, local_moments, merge_moments, normalize
from sync_batchnorm.running import RunningStatistics

__all__ = ["sync_moments"]

Pipe = SyncMaster | SlavePipe


class Message(NamedTuple):
    """What a replica sends to the master about its input."""

    moments: Tensor  # (2, C): mean and biased variance
    carrier: Tensor  # as `moments`, see NOTE [carriers]
    shape: torch.Size
    dtype: torch.dtype
    rule: ScaleRule | None  # None: the scale is the variance itself
    weight: Tensor | None = None
    bias: Tensor | None = None
    group: distributed.Group | None = None  # the processes to exchange with; that of the master counts
    running: RunningStatistics | None = None  # what the master updates
    ready: torch.cuda.Event | None = None  # when the moments are there

    @property
    def device(self) -> torch.device:
        return self.moments.device


class Whole(NamedTuple):
    """What a replica with a small input sends instead: the input itself."""

    input: Tensor
    shape: torch.Size
    dtype: torch.dtype
    weight: Tensor | None
    bias: Tensor | None
    rule: ScaleRule
    running: RunningStatistics | None

    @property
    def device(self) -> torch.device:
        return self.input.device


class Normalized(NamedTuple):
    """What the master sends back to a replica that has sent its input."""

    output: Tensor


@dataclass(frozen=True)
class Merged:
    """What the master sends back to a replica that has sent its moments."""

    mean: Tensor  # (C,), on the device of the master, not part of the graph
    var: Tensor  # (C,), biased, as `mean`
    count: int
    normalizer: Tensor  # (2, C): mean and scale, on the device of the replica, part of the graph
    carrier: Tensor  # as `normalizer`, see NOTE [carriers]
    constant: Tensor  # as `normalizer`, not part of the graph
    affine: moments.Affine | None = None
    weighted: bool = False  # whether `affine` holds the weight and bias of all replicas
    ready: torch.cuda.Event | None = None  # when all of it is there


def merge_messages(
    messages: list[tuple[Hashable, Message | Whole]],
) -> Sequence[tuple[Hashable, Merged | Normalized | None]]:
    """Merge what the replicas know of their inputs: the callback of the `SyncMaster` of a synchronized layer.

    The running statistics are updated here, by the master while the others wait: afterwards, when all of them go on,
    each call of torch would take several times as long.

    All get None if some have sent their inputs, and these cannot be joined: then each sends its moments.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have one value a channel in all.
    """
    if len({(message.shape[1], len(message.shape), message.dtype) for _, message in messages}) > 1:
        inputs = ", ".join(
            f"{tuple(message.shape)} of {message.dtype} in replica {replica}"
            for replica, (_, message) in enumerate(messages)
        )
        raise ValueError(
            "expected inputs of one dtype, number of channels and number of dimensions in all replicas, "
            f"but got {inputs}; give every replica the same kind of input"
        )
    sent = [(replica, message) for replica, message in messages if isinstance(message, Message)]
    if len(sent) == len(messages):
        return _merge(sent)
    handed = [message for _, message in messages if isinstance(message, Whole)]
    if sent or not whole.fit_together([message.input for message in handed]) or not _share_parameters(handed):
        return [(replica, None) for replica, _ in messages]
    weight, bias, rule = handed[0].weight, handed[0].bias, handed[0].rule
    outputs, mean, var = whole.normalize_whole([message.input for message in handed], weight, bias, rule.eps)
    count = sum(moments.channel_count(message.shape) for message in handed)
    if handed[0].running is not None:
        handed[0].running.update(mean, var, count)
    return [(replica, Normalized(output)) for (replica, _), output in zip(messages, outputs, strict=True)]


def _merge(messages: list[tuple[Hashable, Message]]) -> list[tuple[Hashable, Merged]]:
    contents = [message for _, message in messages]
    counts = [moments.channel_count(message.shape) for message in contents]
    group = contents[0].group
    if group is None and sum(counts) < 2:
        return _without_variance(messages, sum(counts))
    for message in contents:
        moments.wait_for(message.ready, contents[0].device)
    weighted = _share_parameters(contents)
    merge = Merge(
        counts,
        [message.moments.device for message in contents],
        contents[0].dtype,
        contents[0].rule,
        contents[0].weight if weighted else None,
        contents[0].bias if weighted else None,
        group,
    )
    merged = merge_moments(merge, [message.moments for message in contents], [message.carrier for message in contents])
    if merge.count < 2:  # as only the group can tell
        return _without_variance(messages, merge.count)
    ready = moments.ready(merge.mean)
    on_device = {
        device: Merged(merge.mean, merge.var, merge.count, normalizer, carrier, constant, merge.affine, weighted, ready)
        for (device, (normalizer, carrier)), constant in zip(merged.items(), merge.constants, strict=True)
    }
    if contents[0].running is not None:
        contents[0].running.update(merge.mean, merge.var, merge.count)
    return [(replica, on_device[message.moments.device]) for replica, message in messages]


def _without_variance(messages: list[tuple[Hashable, Message]], count: int) -> list[tuple[Hashable, Merged]]:
    if count:
        sizes = [message.shape for _, message in messages]
        single = next((size for size in sizes if moments.channel_count(size)), sizes[0])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {single}")
    first = messages[0][1]
    mean, var = first.moments.unbind()
    if first.running is not None:
        first.running.update(mean, var, 0)
    return [(replica, Merged(mean, var, 0, m.moments, m.carrier, m.moments)) for replica, m in messages]


def _share_parameters(messages: Sequence[Message | Whole]) -> bool:
    """Tell whether the replicas of each device have weight and bias over the same storage, as replicas usually have.

    Then what depends on them is computed once, by the master. They differ if the module computes them in its forward.
    """

    def storage(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    devices = {message.device for message in messages}
    return len({(m.device, storage(m.weight), storage(m.bias)) for m in messages}) == len(devices)


def _meet(pipe: Pipe, message: Message | Whole) -> Any:
    return pipe.run_master(message) if isinstance(pipe, SyncMaster) else pipe.run_slave(message)


def _exchange(pipe: Pipe | None, owner: object, message: Message) -> Merged:
    # The answer None means that others have sent their inputs, and that now all of them send their moments.
    merged = _merge([(0, message)])[0][1] if pipe is None else _meet(pipe, message) or _meet(pipe, message)
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
    if pipe is None and recompute.in_backward():
        running = None
    if recalled is not None:
        record.affine = recalled.affine
    elif pipe is not None and _hands_over(input, weight, bias, rule, group):
        normalized: Normalized | None = _meet(pipe, Whole(input, input.shape, input.dtype, weight, bias, rule, running))
        if normalized is not None:
            return normalized.output
    parts, carrier, *inputs = local_moments(input, record)
    message = Message(
        parts, carrier, input.shape, input.dtype, rule, weight, bias, group, running, moments.ready(parts)
    )
    statistics = recalled or _exchange(pipe, owner, message)
    moments.wait_for(statistics.ready, input.device)
    affine = statistics.affine
    if affine is None:  # There is not a single element in all replicas.
        return torch.batch_norm(input, weight, bias, None, None, True, 0.0, rule.eps, False)
    record.normalizer, record.affine = statistics.constant, affine
    if statistics.weighted:
        if affine.slope is None:
            affine = record.affine = affine._replace(weight=weight)  # on the device of this replica
        return normalize(inputs, statistics.normalizer, statistics.carrier, weight, bias, affine)
    output = normalize(inputs, statistics.normalizer, statistics.carrier, None, None, affine)
    return moments.weigh(output, weight, bias)


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
    message = Message(parts, carrier, input.shape, input.dtype, None, group=group, ready=moments.ready(parts))
    statistics = _recall(pipe, None, input) or _exchange(pipe, None, message)
    moments.wait_for(statistics.ready, input.device)
    mean, var = statistics.normalizer.unbind()
    return mean, var, statistics.count
