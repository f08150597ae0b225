"""Synchronized batch normalization, and the moments that it needs, as functions that each replica calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from sync_batchnorm import distributed, recompute
from sync_batchnorm.autograd import Call, Message, Settings
from sync_batchnorm.backends import backend_for
from sync_batchnorm.backends.base import BatchStatistics, PartStatistics, memory_for_output, statistics_dtype
from sync_batchnorm.comm import SlavePipe, SyncMaster
from sync_batchnorm.compilation import uncompiled
from sync_batchnorm.places import Streams
from sync_batchnorm.saved import save_for_hooks
from sync_batchnorm.torch_private import dual_level, graph_task_id, has_modes, in_transform, plain_tensors

__all__ = ["merge_messages", "sync_moments"]

P = ParamSpec("P")
R = TypeVar("R")


def merge_messages(messages: list[tuple[Hashable, Message]]) -> Sequence[tuple[Hashable, Call]]:
    """Merge the statistics of all replicas and record the call in the graph; the callback for a layer's `SyncMaster`.

    Raises:
        ValueError: if the inputs differ in channels, dtype or number of dimensions, or have a single value per channel
            in all replicas together.
    """
    contents = [message for _, message in messages]
    first, count, one_weight = contents[0], 0, True
    for message in contents:
        if message.kind != first.kind:
            raise _different_inputs(messages)
        count += message.elements
        if not (message.settings.weight_of_module and first.settings.weight_of_module):
            one_weight = one_weight and _have_one_weight(first, message)
    if count == 1 and first.settings.group is None:
        raise _single_value(contents)
    call = Call(contents, one_weight)
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled() and any(message.records for message in contents):
            # The master may be in inference mode, in which it could not make what a replica records. Leaving that mode
            # turns the grad mode on.
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(call.master.device.type):
            # Autocast would concatenate tensors in its own dtype, or refuse tensors of another dtype.
            modes.enter_context(torch.autocast(call.master.device.type, enabled=False))
        _merge(call, contents, count)
    return [(replica, call) for replica, _ in messages]


def _different_inputs(messages: Sequence[tuple[Hashable, Message]]) -> ValueError:
    inputs = ", ".join(
        f"{tuple(message.input.shape)} of {message.input.dtype} in replica {replica}" for replica, message in messages
    )
    return ValueError(
        "expected inputs of one dtype, number of channels and number of dimensions in all replicas, "
        f"but got {inputs}; give every replica the same kind of input"
    )


def _single_value(messages: Sequence[Message]) -> ValueError:
    """Return torch's own error for a single value per channel."""
    single = next((message for message in messages if message.elements), messages[0]).input.shape
    return ValueError(f"Expected more than 1 value per channel when training, got input size {single}")


def _have_one_weight(one: Message, other: Message) -> bool:
    """Return whether two replicas use the same tensors as weight and bias, also in the graph."""
    return all(one.tensors[name] is other.tensors[name] for name in ("weight", "bias"))


def _merge(call: Call, messages: Sequence[Message], count: int) -> None:
    """Fill in the answers of all `messages`; without a single element to normalize, fill in none."""
    first, joined = messages[0], call.backend.joined
    answers: Sequence[Tensor] = ()
    batch: BatchStatistics | None
    inputs = [message.input for message in messages if message.part is None]  # inputs small enough to be joined
    if joined is not None and call.one_weight and len(inputs) == len(messages) and joined.takes_all(inputs):
        answers, batch = joined.normalize_all(inputs, first.weight, first.bias, cast(float, first.eps))
        batch.count, call.backend = count, joined
    else:
        batch = _merge_parts(call, messages, count)
        if batch is None:
            return
    call.batch, batch.master, batch.eps = batch, call.master, first.eps or 0.0
    pairs = _send(call, batch, first)
    if first.eps is not None and not answers:
        answers, normalizer = [], None
        for i, message in enumerate(messages):
            if i == 0 or not call.one_weight or message.place != messages[i - 1].place:
                normalizer = call.backend.normalizer(
                    batch.at[message.place], message.input.dtype, message.weight, message.bias
                )
            message.normalizer = normalizer
            answers.append(cast(Tensor, message.memory).detach())  # see NOTE [memory of the outputs]
    recorded: Sequence[Tensor] = [*answers, *pairs]
    if True in [message.needs_grad for message in messages]:
        recorded = call.record(messages, answers, pairs)
    for message, answer in zip(messages, recorded, strict=False):
        # `detach` keeps the answer of a replica that records nothing out of the graph.
        message.answer = answer if message.records else answer.detach()


def _merge_parts(call: Call, messages: Sequence[Message], count: int) -> BatchStatistics | None:
    """Merge the statistics of each replica, and of each process, into those of all.

    Returns None if there is not a single element to normalize. Without eps, mean and variance are zero then.
    """
    first, master = messages[0], call.master
    parts = []
    for message in messages:
        if message.part is None or (message.eps, message.takes_invstd) != (first.eps, first.takes_invstd):
            # Its input is small enough to be joined, but cannot be; or it differs in eps or `takes_invstd`.
            message.eps, message.takes_invstd = first.eps, first.takes_invstd
            with Streams((message.place,)).at(message.place):
                message.prepare()
        part, place = cast(PartStatistics, message.part), message.part_place
        parts.append(part if place == master else part.sent(place, master, Streams((place, master))))
    batch = call.backend.merge(parts, first.eps or 0.0, first.settings.running)
    batch.count = count
    if call.group is not None:
        call.peers = distributed.peers_of_call(call.group)
        batch.mean, batch.var, batch.count = distributed.merge_over_processes(
            batch.mean, cast(Tensor, batch.var), count, call.peers
        )
        if isinstance(batch.count, int) and batch.count == 1:
            raise _single_value(messages)
    if first.eps is None:
        return batch
    if isinstance(batch.count, int) and batch.count == 0:
        return None
    if batch.invstd is None:
        var = cast(Tensor, batch.var)
        if first.settings.clamps:
            batch.clamped = var < first.eps
        batch.invstd = (var.clamp(min=first.eps) if first.settings.clamps else var + first.eps).rsqrt()
    return batch


def _send(call: Call, batch: BatchStatistics, first: Message) -> list[Tensor]:
    """Return the pairs, one for each place, which the node returns beside its outputs; also put them into `batch`."""
    pair = torch.stack((batch.mean, cast(Tensor, batch.var if first.eps is None else batch.invstd)))
    if first.eps is None or call.backend.pair_dtype is None:
        pair = pair.to(statistics_dtype(first.input.dtype))
    pairs = [pair]
    batch.at[call.master] = cast(Any, pair.detach().unbind())
    if len(call.pair_places) > 1:
        streams = Streams(call.pair_places)
        for place in call.pair_places[1:]:
            here: Tensor = streams.to_place(pair, call.master, place)
            if here is pair:  # another stream of this device, or another replica whose user gets a pair
                with streams.at(place):
                    here = here.clone()
            pairs.append(here)
            if place not in batch.at:
                batch.at[place] = cast(Any, here.detach().unbind())
    return pairs


Pipe = SyncMaster | SlavePipe

RECOMPUTED = (
    "expected the gradients of all replicas in the backward of a synchronized batch norm, but got a recomputation that "
    "differentiates each replica by itself; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
)


def _has_tangent(tensor: Tensor | None) -> bool:
    if tensor is None:
        return False
    tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def _exchange(pipe: Pipe | None, message: Message) -> Call:
    call: Call
    if pipe is None:
        call = merge_messages([(0, message)])[0][1]
    else:
        call = pipe.run_master(message) if isinstance(pipe, SyncMaster) else pipe.run_slave(message)
    if call.numbered is not None:
        distributed.count_up_to(call.numbered[1])  # before this thread makes further nodes
    return call


def _where(pipe: Pipe | None, owner: nn.Module | None) -> str:
    """Return as text which layer calls, and in which replica."""
    return pipe.where if pipe is not None else "sync_moments" if owner is None else type(owner).__name__


def _check_surroundings(
    pipe: Pipe | None, owner: nn.Module | None, has_hooks: bool, tensors: Sequence[Tensor | None]
) -> bool:
    """Raise an error for a call that cannot be differentiated or recomputed.

    In a transform, a peer may be in another transform, and does not know the tangents of this replica. A call in a
    backward that repeats no earlier call comes from a reentrant checkpoint, which recomputes replicas one by one.

    Returns:
        whether the call may update the buffers: not if it runs in a backward.

    Raises:
        RuntimeError: inside of a transform of `torch.func`, and for tensors with a tangent; in a backward, if there is
            a pipe; if the recomputation of a checkpoint makes a call that its forward has not made.
    """
    context = None
    if in_transform():
        context = "a call inside of a transform of torch.func, such as grad or vmap"
    elif dual_level() >= 0 and any(map(_has_tangent, tensors)):
        context = "a tensor with a tangent, of forward-mode differentiation"
    if context is not None:
        where = _where(pipe, owner)
        raise RuntimeError(
            f"expected a synchronized batch norm to be differentiated backward, by torch.autograd, but got {context} "
            f"({where}); use torch.autograd.grad, with create_graph=True for gradients of gradients, or "
            "put the layer into eval mode"
        )
    if has_hooks and recompute.is_recomputing():
        where = _where(pipe, owner)
        raise RuntimeError(
            "expected the recomputation of a checkpoint to call the synchronized batch norms that its forward has "
            f"called, but got a call more of {where}; call the same layers in both, and where the "
            "checkpointed function is made in a loop, bind the loop variable: lambda input, layer=layer: layer(input)"
        )
    in_backward = graph_task_id() != -1
    if in_backward and pipe is not None:
        raise RuntimeError(RECOMPUTED)
    return not in_backward


class _Kept(NamedTuple):
    """What a call keeps for its recomputation, outside of the graph."""

    answer_requires_grad: bool
    normalizer: Any = None  # None if there was not a single element
    pair: Tensor | None = None  # mean and variance of a call of `sync_moments`, which also has elements per channel
    elements: int = 0

    def repeated(self, constant: Tensor, input: Tensor, weight: Tensor | None) -> Tensor:
        """Save what the first call saved; return `constant` as the result, in the graph if the first result was."""
        save_for_hooks(input, weight)
        if self.answer_requires_grad:
            return recompute.refuse_gradient(constant, input)
        return constant


def _opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Hide the operators of `function` from subclasses of `Tensor`, which see its call, and from selective checkpoints.

    The class of the first argument can override `function`, as it can override functions of torch. Operators on a
    subclass would return views, which could not be changed in place, and replicas may have different classes. For
    checkpoints see NOTE [selective checkpoints] in `recompute.py`.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_torch_function(args[:1]):
            return handle_torch_function(run, args[:1], *args, **kwargs)
        with plain_tensors():
            if not has_modes():
                return function(*args, **kwargs)
            with recompute.without_policies():
                return function(*args, **kwargs)

    return run


def _normalize_nothing(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:
    """Return the output of a call without a single element in all replicas."""
    return torch.batch_norm(input, weight, bias, None, None, True, 0.0, cast(float, eps), False)


@_opaque
def sync_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    pipe: Pipe | None,
    settings: Settings,
    owner: nn.Module | None = None,
    pending: list[BatchStatistics | None] | None = None,
) -> Tensor:
    """Normalize the input of one replica with the batch statistics of all replicas that `pipe` connects.

    Blocks the calling thread until all of them have called.

    Args:
        input: ``(N, C, +)``, with its own N and sizes in each replica; may be empty.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        pipe: the connection of this replica; None if it is the only one of its process.
        settings: of the layer, with `eps`. A recomputation does not update the running statistics.
        owner: the layer; without a pipe, a recomputation uses it to find the call that it repeats.
        pending: a list to which the statistics of the call are appended, or None: for buffers of this replica that the
            master does not update.

    Returns:
        The output, with the shape, dtype and memory format of `input`.

    Raises:
        ValueError: see `merge_messages`.
        ReplicaSyncError: if the replicas cannot exchange.
        RuntimeError: in a recomputation by reentrant activation checkpointing, or in one that makes a call which the
            forward has not made; inside of a transform of `torch.func`, and for tensors with a tangent.
    """
    has_hooks = recompute.has_hooks()
    kept: _Kept | None = recompute.recall(pipe or owner) if has_hooks else None
    if kept is not None:
        return _repeat(kept, input, weight, bias, settings.eps)
    if not _check_surroundings(pipe, owner, has_hooks, (input, weight, bias)):
        settings = settings._replace(running=None)
    records = torch.is_grad_enabled()
    saved = save_for_hooks(input, weight) if has_hooks else None
    with torch.no_grad():
        message = Message(input, weight, bias, settings, records=records, saved=saved)
        call = _exchange(pipe, message)
        batch, output, running = call.batch, message.answer, settings.running
        if running is not None:  # Only now, so that a call whose merge fails is not counted.
            if batch is None:
                running.count_call()
            elif not batch.updated:
                batch.update(running, call.master)
        if pending is not None:
            pending.append(batch)
        if message.memory is not None and message.answer is not None and input.numel():
            message.backend.normalize(input, message.normalizer, weight, bias, message.memory)
    if output is None:
        output = _normalize_nothing(input, weight, bias, settings.eps)
    if not records and output.is_inference() != torch.is_inference_mode_enabled():
        output = output.clone()  # The master made it, maybe in another mode.
    if has_hooks:
        requires_grad, normalizer = output.requires_grad, message.normalizer
        if batch is not None and normalizer is None:  # The inputs were joined.
            with torch.no_grad():
                normalizer = message.backend.normalizer(batch.at[message.place], input.dtype, weight, bias)
        recompute.keep(pipe or owner, lambda: _Kept(requires_grad, normalizer))
    return output


def _repeat(kept: _Kept, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:
    """Return the output of a call that is recomputed."""
    if kept.normalizer is None:
        save_for_hooks(input, weight)
        return _normalize_nothing(input, weight, bias, eps)
    with torch.no_grad():
        memory = memory_for_output(input)
        if input.numel():
            backend_for(input.device).normalize(input, kept.normalizer, weight, bias, memory)
    return kept.repeated(memory, input, weight)


@uncompiled
@_opaque
def sync_moments(input: Tensor, pipe: Pipe | None, *, process_group: Any = None) -> tuple[Tensor, Tensor, int]:
    """Return mean, biased variance and count of each channel over all replicas that `pipe` connects.

    Use it for a normalization of your own. Connect the replicas in `__data_parallel_replicate__`: the first makes a
    ``SyncMaster(merge_messages)``, the others register with it. Blocks the calling thread until all of them have called
    this function. In a module that runs on one device, pass None.

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
        ReplicaSyncError: if the replicas cannot exchange.
        RuntimeError: in a recomputation by reentrant activation checkpointing, or in one that makes a call which the
            forward has not made; inside of a transform of `torch.func`, and for tensors with a tangent.
    """
    has_hooks = recompute.has_hooks()
    kept: _Kept | None = recompute.recall(pipe) if has_hooks else None
    if kept is not None and kept.pair is not None:
        pair = kept.repeated(kept.pair.clone(), input, None)
        return pair[0].clone(), pair[1].clone(), kept.elements
    _check_surroundings(pipe, None, has_hooks, (input,))
    settings, records = Settings(group=distributed.active_group(process_group)), torch.is_grad_enabled()
    saved = save_for_hooks(input, None) if has_hooks else None
    with torch.no_grad():
        message = Message(input, None, None, settings, records=records, saved=saved)
        call = _exchange(pipe, message)
    pair, count = cast(Tensor, message.answer), int(cast(BatchStatistics, call.batch).count)
    if has_hooks:
        requires_grad = pair.requires_grad
        recompute.keep(pipe, lambda: _Kept(requires_grad, pair=pair.detach(), elements=count))
    return pair[0].clone(), pair[1].clone(), count  # copies, which users may change in place
