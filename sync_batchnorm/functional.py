"""Synchronized batch normalization, and the building block of it, as functions that one replica calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from sync_batchnorm import distributed, moments, normalization, recompute
from sync_batchnorm.autograd import (
    Call,
    EpsRule,
    ReplicaTensors,
    save_for_hooks,
)
from sync_batchnorm.comm import SlavePipe, SyncMaster
from sync_batchnorm.compilation import uncompiled
from sync_batchnorm.moments import Moments, channel_count, counts_on, operators_for, statistics_dtype
from sync_batchnorm.normalization import Affine, Statistics, memory_for_output
from sync_batchnorm.places import Place, hand_over, hand_over_packed
from sync_batchnorm.torch_private import dual_level, in_transform, plain_tensors

__all__ = ["merge_messages", "sync_moments"]

P = ParamSpec("P")
R = TypeVar("R")


class RunningStatistics(NamedTuple):
    """The buffers of a layer, for the master to update: right after an exchange, while its peers wake up."""

    mean: Tensor | None
    var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None

    def count_call(self) -> float:
        """Count a call; return the momentum, which is zero for a cumulative average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return self.momentum or 0.0

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Count a call, and move towards its statistics in place.

        Args:
            mean: of the batch, ``(C,)``.
            var: of the batch, biased, ``(C,)``; the running variance moves towards the unbiased one.
            count: elements per channel.
        """
        momentum = self.count_call()
        if self.mean is None or self.var is None:
            return
        # Through `data`, which counts no new version, as the kernel of torch counts none: the backward of an earlier
        # forward in eval mode, which has saved these buffers, must not refuse to run.
        for buffer, value in ((self.mean, mean), (self.var, var * (count / (count - 1)))):
            step: Tensor | float = momentum
            if self.momentum is None and self.num_batches_tracked is not None:
                # A tensor: so the host does not wait for the counter.
                step = self.num_batches_tracked.to(buffer.dtype).reciprocal()
            # As torch does it. Not by `lerp_`, which makes NaN of an infinite variance if the momentum is one.
            buffer.data.mul_(1 - step).add_(value.to(buffer.dtype) * step)


class BatchStatistics(NamedTuple):
    """The statistics of a call, towards which the running statistics of a replica move."""

    statistics: Statistics | None  # at `place`; None if there was not a single element
    var: Tensor | None  # at `home`, see `Call`
    home: Place
    place: Place
    eps: float
    elements: int | Tensor  # per channel

    def move(self, running: RunningStatistics) -> None:
        """Move `running` towards these statistics."""
        if self.statistics is None:
            running.count_call()
            return
        mean, invstd = self.statistics
        if self.var is None:
            var = (invstd.pow(-2) - self.eps).clamp_(min=0)
        else:
            var = hand_over(self.var, self.home, self.place)
        count = self.elements
        running.update(mean, var, count if isinstance(count, int) else hand_over(count, self.home, self.place))


def _batch_statistics(call: Call, place: Place) -> BatchStatistics:
    """Return the statistics of `call` at `place`, without what the graph holds."""
    statistics = None if isinstance(call.count, int) and call.count == 0 else call.statistics[place]
    eps = 0.0 if call.rule is None else call.rule.eps
    return BatchStatistics(statistics, call.var, call.home, place, eps, call.count)


# On the CPU, with small inputs, calls of operators cost more than what they compute; even more so in several threads,
# since each call releases the GIL and takes it back. Up to this number of elements in a replica, the master makes the
# calls for all, on the joined batch in float64, with one operator of torch. Measured on two cores, torch 2.13.0.
JOINED = 32768


class Message(ReplicaTensors):
    """What a replica sends to the master, which answers by filling in the rest.

    Args:
        input: ``(N, C, +)``.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        rule: how eps enters; None to get mean and variance instead of an output.
        group: the processes to exchange with; that of the master counts.
        running: the buffers to update; only in the message of the master.
        common: whether weight and bias are those of the wrapped module, and so those of all replicas.
        has_hooks: whether this thread has hooks on saved tensors.
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
        has_hooks: bool = False,
    ) -> None:
        super().__init__(input, weight, bias, has_hooks)
        self.input, self.weight, self.bias = input.detach(), weight, bias
        self.elements = channel_count(input.shape)  # per channel
        self.rule, self.group, self.running, self.common = rule, group, running, common
        operators = operators_for(input.device)
        usual = rule is not None and rule.mode == "plus" and group is None
        self.fused = usual and operators == "cuda"  # torch has an operator that merges and moves the running statistics
        self.small = usual and operators == "cpu" and 0 < input.numel() <= JOINED
        self.moments: Moments | None = None
        self.mean_and_invstd: tuple[Tensor, Tensor] | None = None
        if not self.small:
            self.prepare()

    def prepare(self) -> None:
        """Make the statistics of the input, and memory for the output."""
        memory = None
        with torch.no_grad():
            if not self.fused:
                eps = 0.0 if self.rule is None else self.rule.eps
                self.moments, memory = moments.local_moments(self.input, eps)
            elif self.input.numel() and self.rule is not None:
                self.mean_and_invstd = torch.batch_norm_stats(self.input, self.rule.eps)
            if self.rule is not None:
                self.memory = memory_for_output(self.input, memory)


def merge_messages(messages: list[tuple[Hashable, Message]]) -> Sequence[tuple[Hashable, Call]]:
    """Merge the statistics of all replicas and record the call in the graph: the callback for a layer's `SyncMaster`.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have a single value per channel
            in all replicas together.
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
    call.count = sum(message.elements for message in contents)
    if call.group is None:
        _refuse_one(call, contents)
    with _out_of_inference_mode(contents), torch.no_grad(), call.home.ordered(), _without_autocast(call.home.device):
        _merge(call, contents)
    return [(replica, call) for replica, _ in messages]


def _have_one_weight(messages: Sequence[Message]) -> bool:
    """Return whether weight and bias of all replicas are the same, also to autograd."""
    first = messages[0]
    return all(
        (message.common and first.common) or (message.weight is first.weight and message.bias is first.bias)
        for message in messages[1:]
    )


def _out_of_inference_mode(messages: Sequence[Message]) -> AbstractContextManager[Any]:
    """What a replica records must not be made in the inference mode that the master may be in."""
    outside = torch.is_inference_mode_enabled() and any(message.records for message in messages)
    return torch.inference_mode(False) if outside else nullcontext()


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would join tensors in its own dtype, or refuse those of another one."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _refuse_one(call: Call, messages: Sequence[Message]) -> None:
    if isinstance(call.count, int) and call.count == 1:
        single = next((message for message in messages if message.elements), messages[0]).input.shape
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {single}")


def _merge(call: Call, messages: Sequence[Message]) -> None:
    """Answer all `messages`; where a layer has not a single element to normalize, only set the count."""
    call.joined = _can_be_joined(call, messages)
    merge = _merge_on_cuda if messages[0].fused else _normalize_joined if call.joined else _merge_anywhere
    pair = merge(call, messages)
    if pair is None:
        call.count = 0
        return
    pairs = [pair]
    for place in call.pair_places[1:]:
        here = hand_over(pair, call.home, place)
        with place.ordered():
            pairs.append(here.clone() if here is pair else here)
            if place not in call.statistics:
                call.statistics[place] = Statistics(*pairs[-1].detach().unbind())
    for message in messages:
        message.statistics = call.statistics[message.place]
    if call.rule is not None and not call.joined and operators_for(call.home.device) == "cpu":
        affine = None
        for message in messages:
            if affine is None or not call.one_weight:
                affine = normalization.make_affine(
                    call.statistics[call.home], message.input.dtype, message.weight, message.bias
                )
            message.affine = affine
            call.factors.append(affine.slope)
    _record(call, messages, pairs)


def _merge_anywhere(call: Call, messages: Sequence[Message]) -> Tensor | None:
    """Return mean and inverse standard deviation, or without a rule the variance, of all replicas and processes.

    None if there is a rule, and not a single element.
    """
    mean, var = _merge_local_moments(call.home, messages)
    if call.group is not None:
        call.peers = distributed.peers_of_call(call.group)
        mean, var, call.count = distributed.merge_over_processes(mean, var, int(call.count), call.peers)
        _refuse_one(call, messages)
    if call.rule is not None and isinstance(call.count, int) and call.count == 0:
        return None
    call.var = var
    second = var if call.rule is None else call.rule.invstd(var)
    call.clamped = None if call.rule is None else call.rule.clamped(var)
    call.statistics[call.home] = Statistics(mean, second)
    pair = torch.stack((mean, second))
    if call.rule is None or operators_for(call.home.device) != "cpu":
        pair = pair.to(statistics_dtype(messages[0].input.dtype))
        call.statistics[call.home] = Statistics(*pair.detach().unbind())
    return pair


def _merge_local_moments(home: Place, messages: Sequence[Message]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of all replicas."""
    parts = []
    for message in messages:
        if message.moments is None:  # of an input that was small enough to be joined, but cannot be
            message.prepare()
        mean, var, elements = cast(Moments, message.moments)
        mean, var = hand_over_packed((mean, var), message.place, home)
        parts.append(Moments(mean, var, elements))
    return moments.merge_moments(parts)


def _merge_on_cuda(call: Call, messages: Sequence[Message]) -> Tensor | None:
    """Return mean and inverse standard deviation of all replicas, if there are elements; move the running ones."""
    parts = [message for message in messages if message.mean_and_invstd is not None]
    if not parts:
        return None
    vectors = [v for m in parts for v in hand_over_packed(cast(Any, m.mean_and_invstd), m.place, call.home)]
    stacked = torch.stack(vectors)  # (2 * R, C)
    means, invstds = stacked.view(len(parts), 2, -1).unbind(1)
    eps = cast(EpsRule, call.rule).eps
    counts = counts_on(*call.home, tuple(m.elements for m in parts), stacked.dtype)
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
    shape, strides = first.input.shape[1:], first.input.stride()[1:]
    return call.one_weight and all(
        m.small and m.input.shape[1:] == shape and m.input.stride()[1:] == strides for m in messages
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


Pipe = SyncMaster | SlavePipe

RECOMPUTED = (
    "expected the gradients of all replicas in the backward of a synchronized batch norm, but got a recomputation that "
    "differentiates each replica by itself; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
)


def _has_tangent(tensor: Tensor | None) -> bool:
    if tensor is None or dual_level() < 0:
        return False
    tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def _exchange(pipe: Pipe | None, message: Message) -> Call:
    if pipe is None:
        answer = merge_messages([(0, message)])[0][1]
    else:
        answer = pipe.run_master(message) if isinstance(pipe, SyncMaster) else pipe.run_slave(message)
    call: Call = answer
    distributed.count_call(call.numbered)
    return call


def _where(pipe: Pipe | None, owner: nn.Module | None) -> str:
    """Return as text which layer calls, and in which replica."""
    return pipe.where if pipe is not None else "sync_moments" if owner is None else type(owner).__name__


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
    where = _where(pipe, owner)
    raise RuntimeError(
        f"expected a synchronized batch norm to be differentiated backward, by torch.autograd, but got {found} "
        f"({where}); use torch.autograd.grad, with create_graph=True for gradients of gradients, or "
        "put the layer into eval mode"
    )


def _is_recomputed(pipe: Pipe | None, owner: nn.Module | None, has_hooks: bool) -> bool:
    """Return whether a call without a pipe, which repeats none, runs in a backward: then it is not counted.

    Raises:
        RuntimeError: if a call with a pipe runs in a backward, where replicas are recomputed one by one; if the
            recomputation of a checkpoint calls what its forward has not called.
    """
    if has_hooks and recompute.is_recomputing():
        where = _where(pipe, owner)
        raise RuntimeError(
            "expected the recomputation of a checkpoint to call the synchronized batch norms that its forward has "
            f"called, but got a call more of {where}; call the same layers in both, and where the "
            "checkpointed function is made in a loop, bind the loop variable: lambda input, layer=layer: layer(input)"
        )
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

    def repeated(self, constant: Tensor, input: Tensor, weight: Tensor | None) -> Tensor:
        """Save what the first call saved, and return `constant` as its result: in the graph, if that one was."""
        save_for_hooks(input, weight)
        if self.answer_requires_grad:
            return recompute.refuse_gradient(constant, input)
        return constant


def _overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` as one that a subclass of `Tensor`, as its first argument, can override as those of torch.

    The class sees the call and its result as a whole, and nothing of the tensors inside: what an operator returns for a
    subclass is a view, so outputs could not be changed in place, and replicas may have different classes.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_torch_function(args[:1]):
            return handle_torch_function(run, args[:1], *args, **kwargs)
        with plain_tensors():
            return function(*args, **kwargs)

    return run


def _normalize_nothing(input: Tensor, weight: Tensor | None, bias: Tensor | None, rule: EpsRule) -> Tensor:
    """Return the output of a call without a single element in all replicas."""
    return torch.batch_norm(input, weight, bias, None, None, True, 0.0, rule.eps, False)


@_overridable
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
        group: the processes to exchange with, as `distributed.active_group` finds them; None for this one alone.
        owner: the layer, by which a recomputation without a pipe finds the call that it repeats.
        running: the buffers that the master updates, once a call, and not in a recomputation.
        common: whether weight and bias are those that all replicas have.
        missed: a list that gets the statistics of each call, or None: for buffers of this replica that the master does
            not update.

    Returns:
        The output, as `input` in shape, dtype and memory format.

    Raises:
        ValueError: see `merge_messages`.
        ReplicaSyncError: if the replicas cannot meet.
        RuntimeError: in a recomputation by reentrant activation checkpointing, or one that calls what the checkpointed
            forward has not called; inside of a transform of `torch.func`, and for tensors with a tangent.
    """
    _refuse_transforms(pipe, owner, input, weight, bias)
    has_hooks = recompute.has_hooks()
    kept: _Kept | None = recompute.recall(pipe or owner) if has_hooks else None
    if kept is not None:
        if kept.statistics is None:
            save_for_hooks(input, weight)
            return _normalize_nothing(input, weight, bias, rule)
        with torch.no_grad():
            memory = memory_for_output(input)
            normalization.normalize(input.detach(), kept.statistics, kept.affine, weight, bias, memory)
        return kept.repeated(memory, input, weight)
    if _is_recomputed(pipe, owner, has_hooks):
        running = None
    message = Message(input, weight, bias, rule, group, running, common=common, has_hooks=has_hooks)
    call = _exchange(pipe, message)
    if message.running is not None:  # Only now: a call that broke while it was merged is not counted.
        _batch_statistics(call, call.home).move(message.running)
    if missed is not None:
        missed.append(_batch_statistics(call, message.place))
    if message.memory is not None and message.statistics is not None:
        with torch.no_grad():
            normalization.normalize(message.input, message.statistics, message.affine, weight, bias, message.memory)
    output = message.answer
    if output is None:
        output = _normalize_nothing(input, weight, bias, rule)
    if output.is_inference() != torch.is_inference_mode_enabled():  # The master has made it, in its own mode.
        output = output.clone()
    requires_grad = output.requires_grad
    if has_hooks:
        recompute.keep(pipe or owner, lambda: _Kept(message.statistics, message.affine, requires_grad))
    return output


@uncompiled
@_overridable
@recompute.unseen_by_policies
def sync_moments(input: Tensor, pipe: Pipe | None, *, process_group: Any = None) -> tuple[Tensor, Tensor, int]:
    """Return mean, biased variance and count of each channel over all replicas that `pipe` connects.

    For normalizations of one's own. Connect the replicas in `__data_parallel_replicate__`: the first makes a
    ``SyncMaster(merge_messages)``, the others register with it. Blocks the calling thread until all of them have called
    it. In a module that runs on one device, pass None.

    Args:
        input: ``(N, C, +)``, with its own N and sizes in each replica.
        pipe: the `SyncMaster` or `SlavePipe` of this replica; None if it is the only one of its process.
        process_group: the `torch.distributed` group over which processes synchronize; None: all processes.

    Returns:
        mean and variance, ``(C,)``, in float32 (float64 for float64 inputs) on the device of `input`, and the number
        of elements per channel over all replicas.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have a single value per channel
            in all replicas together; if this process is no member of the group.
        ReplicaSyncError: if the replicas cannot meet.
        RuntimeError: in a recomputation by reentrant activation checkpointing, or one that calls what the checkpointed
            forward has not called; inside of a transform of `torch.func`, and for tensors with a tangent.
    """
    _refuse_transforms(pipe, None, input)
    has_hooks = recompute.has_hooks()
    kept: _Kept | None = recompute.recall(pipe) if has_hooks else None
    if kept is not None and kept.statistics is not None:
        pair = kept.repeated(torch.stack(kept.statistics), input, None)
        return pair[0].clone(), pair[1].clone(), kept.elements
    _is_recomputed(pipe, None, has_hooks)
    message = Message(input, group=distributed.active_group(process_group), has_hooks=has_hooks)
    call = _exchange(pipe, message)
    pair, count = cast(Tensor, message.answer), int(call.count)
    requires_grad = pair.requires_grad
    if has_hooks:
        recompute.keep(pipe, lambda: _Kept(message.statistics, None, requires_grad, count))
    return pair[0].clone(), pair[1].clone(), count  # for their users alone, who may change them in place
