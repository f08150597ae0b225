"""What replicas and their master send each other, and what the master makes of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from sync_batchnorm import distributed, moments, normalization
from sync_batchnorm.autograd import Call, EpsRule, Replica, bring, hand_over
from sync_batchnorm.moments import Moments, channel_count, counts_on, operators_for, statistics_dtype
from sync_batchnorm.normalization import Affine, Statistics, memory_for_output
from sync_batchnorm.running import RunningStatistics

__all__: list[str] = []

# On the CPU it is calls that cost, not what they compute, while inputs are small; and more so where several threads
# make them, since each call releases the GIL and takes it back. Up to this number of elements in a replica, the master
# makes the calls for all, on the joined batch in float64, with one operator of torch. Measured on two cores, torch
# 2.13.0.
JOINED = 16384


class Message(Replica):
    """What a replica sends to the master, which answers by filling in the rest.

    Args:
        input: ``(N, C, +)``.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        rule: how eps enters; None to get mean and variance instead of an output.
        group: the processes to exchange with; that of the master counts.
        running: the buffers to update; only in the message of the master.
        common: whether weight and bias are those of the wrapped module, and so those of all replicas.
        exact: whether to make exact statistics at once, see NOTE [fast and exact statistics].
    """

    # The answer, in the graph, and what to normalize with: None if there is not a single element in all replicas. An
    # output is still to be written, to `memory`, if there is some.
    answer: Tensor | None = None  # the output, or without a rule mean and variance, ``(2, C)``
    statistics: Statistics | None = None
    affine: Affine | None = None
    memory: Tensor | None = None

    def __init__(
        self,
        input: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        rule: EpsRule | None = None,
        group: distributed.Group | None = None,
        running: RunningStatistics | None = None,
        *,
        common: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__(input, weight, bias)
        self.input, self.weight, self.bias = input.detach(), weight, bias
        self.rule, self.group, self.running, self.common, self.exact = rule, group, running, common, exact
        kind = operators_for(input.device)
        usual = rule is not None and rule.mode == "plus" and group is None
        self.fused = usual and kind == "cuda"  # torch has an operator that merges, and moves the running statistics
        self.small = usual and kind == "cpu" and 0 < input.numel() <= JOINED
        self.moments: Moments | None = None
        self.mean_and_invstd: tuple[Tensor, Tensor] | None = None
        if not self.small:
            self.prepare()

    def prepare(self) -> None:
        """Make the statistics of the input, and memory for the output."""
        memory = None
        with torch.no_grad():
            if not self.fused:
                self.moments, memory = moments.local_moments(self.input, self.exact)
            elif self.input.numel() and self.rule is not None:
                self.mean_and_invstd = torch.batch_norm_stats(self.input, self.rule.eps)
            if self.rule is not None:
                self.memory = memory_for_output(self.input, memory)


def merge_messages(messages: list[tuple[Hashable, Message]]) -> Sequence[tuple[Hashable, Call]]:
    """Merge what the replicas know of their inputs: the callback of the `SyncMaster` of a synchronized layer.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have one value per channel in
            all.
    """
    contents = [message for _, message in messages]
    if len({(message.input.shape[1], message.input.dim(), message.input.dtype) for message in contents}) > 1:
        inputs = ", ".join(
            f"{tuple(message.input.shape)} of {message.input.dtype} in replica {replica}"
            for replica, message in messages
        )
        raise ValueError(
            "expected inputs of one dtype, number of channels and number of dimensions in all replicas, "
            f"but got {inputs}; give every replica the same kind of input"
        )
    call = Call(contents, contents[0].rule, contents[0].group)
    call.one_weight = _have_one_weight(contents)
    call.count = sum(channel_count(message.input.shape) for message in contents)
    if call.group is None:
        _refuse_one(call, contents)
    with _out_of_inference_mode(contents), torch.no_grad(), call.home.entered(), _without_autocast(call.home.device):
        _merge(call, contents)
    return [(replica, call) for replica, _ in messages]


def _have_one_weight(messages: Sequence[Message]) -> bool:
    """Return whether weight and bias have the same values in all replicas, as far as that is certain."""
    first = messages[0]
    return all(
        (message.common and first.common)
        or (_is_same(message.weight, first.weight) and _is_same(message.bias, first.bias))
        for message in messages[1:]
    )


def _is_same(tensor: Tensor | None, other: Tensor | None) -> bool:
    if tensor is None or other is None:
        return tensor is other
    return tensor.data_ptr() == other.data_ptr() and tensor.device == other.device


def _out_of_inference_mode(messages: Sequence[Message]) -> AbstractContextManager[Any]:
    """What a replica records must not be made in the inference mode that the master may be in."""
    outside = torch.is_inference_mode_enabled() and any(message.records for message in messages)
    return torch.inference_mode(False) if outside else nullcontext()


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would join tensors in its own dtype, or refuse those of another one."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _refuse_one(call: Call, messages: Sequence[Message]) -> None:
    if isinstance(call.count, int) and call.count == 1:
        sizes = [message.input.shape for message in messages]
        single = next((size for size in sizes if channel_count(size)), sizes[0])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {single}")


def _merge(call: Call, messages: Sequence[Message]) -> None:
    """Answer all `messages`; only count, if there is not a single element."""
    first, rule = messages[0], call.rule
    call.joined = _can_be_joined(call, messages)
    if first.fused:
        pair = _merge_on_cuda(call, messages) if any(m.mean_and_invstd for m in messages) else None
    elif call.joined:
        pair = _normalize_joined(call, messages)
    else:
        mean, var = _merge_moments(call, messages)
        if call.group is not None:
            mean, var, call.count = distributed.merge_moments(mean, var, int(call.count), call.group)
            _refuse_one(call, messages)
        call.var = var
        second = var if rule is None else rule.invstd(var)
        call.clamped = None if rule is None else rule.clamped(var)
        call.statistics[call.home] = Statistics(mean, second)
        pair = torch.stack((mean, second))
        if rule is None or operators_for(call.home.device) != "cpu":
            pair = pair.to(statistics_dtype(first.input.dtype))
            call.statistics[call.home] = Statistics(*pair.detach().unbind())
    if pair is None or (isinstance(call.count, int) and call.count == 0 and rule is not None):
        call.count = 0
        return
    pairs = []
    for k, place in enumerate(call.pair_places):
        here = hand_over(pair, call.home, place)
        with place.entered():
            pairs.append(here.clone() if k and here is pair else here)
            if place not in call.statistics:
                call.statistics[place] = Statistics(*pairs[-1].detach().unbind())
    for message in messages:
        message.statistics = call.statistics[message.place]
    if rule is not None and not call.joined and operators_for(call.home.device) == "cpu":
        affine = None
        for message in messages:
            if affine is None or not call.one_weight:
                affine = normalization.make_affine(
                    call.statistics[call.home], message.input.dtype, message.weight, message.bias
                )
            message.affine = affine
            call.factors.append(affine.slope)
    _record(call, messages, pairs)


def _merge_moments(call: Call, messages: Sequence[Message]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of all replicas; exact ones where fast ones are not precise."""
    home, eps = call.home, call.rule.eps if call.rule is not None else 0.0
    for message in messages:
        if message.moments is None:  # of an input that was small enough to be joined, but cannot be
            message.prepare()

    def merged() -> tuple[Tensor, Tensor]:
        parts = []
        for message in messages:
            mean, var, elements = cast(Moments, message.moments)
            mean, var = bring((mean, var), message.place, home)
            parts.append(Moments(mean, var, elements))
        return moments.merge_moments(parts)

    mean, var = merged()
    inexact = [message for message in messages if not message.exact]
    unknown = operators_for(home.device) == "cpu" and call.count and mean.numel() and inexact
    if unknown and not moments.precise(mean, var, eps):
        call.exact = True
        for message in inexact:
            message.exact = True
            message.prepare()
        mean, var = merged()
    return mean, var


def _merge_on_cuda(call: Call, messages: Sequence[Message]) -> Tensor:
    """Return mean and inverse standard deviation of all replicas; move the running statistics."""
    parts = [message for message in messages if message.mean_and_invstd is not None]
    vectors = [v for m in parts for v in bring(cast(Any, m.mean_and_invstd), m.place, call.home)]
    stacked = torch.stack(vectors)  # (2 * R, C)
    means, invstds = stacked.view(len(parts), 2, -1).unbind(1)
    eps = cast(EpsRule, call.rule).eps
    counts = counts_on(*call.home, tuple(channel_count(m.input.shape) for m in parts), stacked.dtype)
    running, momentum = messages[0].running, 0.0
    buffers: list[Tensor | None] = [None, None]
    # The operator takes the counts in the dtype of the buffers, where half precision has no room for them.
    known = running is not None and running.momentum is not None
    if running is not None and known and (running.mean is None or running.mean.dtype == stacked.dtype):
        momentum = running.count_call()
        # Through `data`, see `RunningStatistics.update`.
        buffers = [None if buffer is None else buffer.data for buffer in (running.mean, running.var)]
        messages[0].running = None
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        stacked, means, invstds, buffers[0], buffers[1], momentum, eps, counts
    )
    call.statistics[call.home] = Statistics(mean, invstd)
    return torch.stack((mean, invstd))


def _can_be_joined(call: Call, messages: Sequence[Message]) -> bool:
    first = messages[0]
    shape, strides, dtype = first.input.shape[1:], first.input.stride()[1:], first.input.dtype
    return (
        len(messages) > 1
        and call.one_weight
        and all(tensor is None or tensor.dtype == dtype for tensor in (first.weight, first.bias))
        and all(
            m.small and m.records == first.records and m.input.shape[1:] == shape and m.input.stride()[1:] == strides
            for m in messages
        )
    )


def _normalize_joined(call: Call, messages: Sequence[Message]) -> Tensor:
    """Normalize the inputs of all replicas as one batch; return mean and inverse standard deviation."""
    first, eps = messages[0], cast(EpsRule, call.rule).eps
    joined = torch.cat([message.input for message in messages])
    weight, bias = (None if tensor is None else tensor.double() for tensor in (first.weight, first.bias))
    output, mean, invstd = torch.native_batch_norm(joined.double(), weight, bias, None, None, True, 0.0, eps)
    call.statistics[call.home] = Statistics(mean, invstd)
    # Not views of one tensor: those could not be changed in place.
    parts = torch.unsafe_split_with_sizes(output.to(joined.dtype), [len(message.input) for message in messages])
    for message, part in zip(messages, parts, strict=True):
        message.answer = part
    return torch.stack((mean, invstd))


def _record(call: Call, messages: Sequence[Message], pairs: Sequence[Tensor]) -> None:
    """Give each replica its output, or its pair, in the graph if it records one, see NOTE [memory of the outputs]."""
    answers = []
    if call.rule is not None:
        answers = [cast(Tensor, m.answer if m.memory is None else m.memory.detach()) for m in messages]
    recorded: Sequence[Tensor] = [*answers, *pairs]
    if any(m.records and any(t is not None and t.requires_grad for t in m.tensors.values()) for m in messages):
        recorded = call.record(messages, answers, pairs)
    for message, answer in zip(messages, recorded, strict=False):
        # Without `detach`, that of a replica that records nothing would be in the graph.
        message.answer = answer if message.records else answer.detach()
