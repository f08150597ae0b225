"""The three autograd nodes of synchronized batch normalization, and what flows between them in a backward.

::

    x_i --LocalMoments--> moments_i --\\                      /--> Normalize --> y_i
                                       >-- MergeMoments --<
    x_j --LocalMoments--> moments_j --/                      \\--> Normalize --> y_j

The master runs `_MergeMoments` once for all replicas, so the exchange of the forward is also an edge of the graph, and
the engine itself brings the gradients of all replicas together: nothing in a backward waits for another replica.

NOTE [carriers]: The gradient of the input is one elementwise pass, and the last node, `_LocalMoments`, makes it. What
it needs reaches it through the graph, along edges of their own that no other operation can see: `_LocalMoments` also
hands out its input, twice, and a carrier beside its moments; `_MergeMoments` takes the carriers and hands out one
beside its result; `_Normalize` takes all of these. In a backward, `_Normalize` sends the upstream gradient, the input
(which is saved once and unpacked once) and the sums of its replica along them. Since they flow through the graph, a
replica that takes no part in the loss, `retain_graph` and partial backwards need no care, and nothing outlives the
backward.

With `create_graph=True` the nodes send true gradients instead, made by operations that can be differentiated again. In
the second backward both meet: true gradients, of what the first backward read, and carriers. Hence the separate edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sync_batchnorm import distributed, moments, normalization

__all__: list[str] = []

RECOMPUTED = (
    "expected the gradients of all replicas in the backward of a synchronized batch norm, but got a recomputation that "
    "differentiates each replica by itself; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
)


class ScaleRule(NamedTuple):
    """How eps enters: ``var + eps`` (mode "plus", torch's own) or ``max(var, eps)`` (mode "clamp")."""

    eps: float
    mode: str

    def scale(self, var: Tensor) -> Tensor:
        return var + self.eps if self.mode == "plus" else var.clamp(min=self.eps)

    def without_gradient(self, var: Tensor) -> Tensor | None:
        """Return where the scale does not depend on the variance, if anywhere."""
        return None if self.mode == "plus" else var < self.eps


class Record:
    """What the two nodes of a replica share: known only after the exchange, and detached, so that no cycle closes."""

    def __init__(self) -> None:
        self.output: Tensor | None = None  # memory, between the two forwards
        self.normalizer: Tensor | None = None
        self.affine: normalization.Affine | None = None


class _LocalMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, record: Record | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input)
        ctx.record = record
        if record is None:
            parts = moments.local_moments(input)
        elif record.affine is None:
            record.output = normalization.memory_for_output(input)
            parts = moments.local_moments(input, record.output)
        else:
            parts = input.new_empty(0)
        # Detached, since autograd makes a view of an input that is returned, and that view has other strides where a
        # dimension has size one.
        return parts, parts.detach(), input.detach(), input.detach()

    @staticmethod
    def backward(
        ctx: Any,
        grad_moments: Tensor | None,
        coefficients: Tensor | None,
        grad_output: Tensor | None,
        input: Tensor | None,
    ) -> tuple[Tensor | None, None]:
        if input is None:
            (input,) = ctx.saved_tensors
        grad_input = grad_output  # With `create_graph` it is the true gradient, and so all there is to do.
        if not torch.is_grad_enabled() and not (coefficients is None and grad_output is None):
            record: Record = ctx.record
            if coefficients is None or record.normalizer is None or record.affine is None:
                raise RuntimeError(RECOMPUTED)
            grad_input = normalization.input_gradient(
                grad_output, input, record.normalizer, record.affine, coefficients
            )
        if grad_moments is not None:
            through_moments = moments.moments_gradient(grad_moments, input)
            grad_input = through_moments if grad_input is None else grad_input + through_moments
        return grad_input, None


class Merge:
    """One call of `_MergeMoments`: what it is told, and the statistics that it leaves beside the graph."""

    mean: Tensor
    var: Tensor
    constants: list[Tensor]
    affine: normalization.Affine | None = None

    def __init__(
        self,
        counts: Sequence[int],
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        rule: ScaleRule | None,
        weight: Tensor | None,
        bias: Tensor | None,
        group: distributed.Group | None = None,
    ) -> None:
        self.counts = counts
        self.count = sum(counts)  # with a group, after the merge, over all of its processes
        self.device = devices[0]
        self.devices = list(dict.fromkeys(devices))
        self.dtype = moments.statistics_dtype(dtype)
        self.rule = rule
        self.weight, self.bias = weight, bias
        self.group = group


class _MergeMoments(torch.autograd.Function):
    """Runs in the thread of the master. The parts stay out of `save_for_backward`: hooks on saved tensors, and with
    them the count of an activation checkpoint, belong to one replica, and these vectors to all."""

    @staticmethod
    def forward(ctx: Any, merge: Merge, *parts_and_carriers: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        parts = parts_and_carriers[: len(merge.counts)]
        ctx.merge, ctx.parts = merge, parts
        if merge.count:
            mean, var = moments.merge_moments([part.to(merge.device) for part in parts], merge.counts)
        else:
            mean, var = parts[0].unbind()
        if merge.group is not None:
            mean, var, merge.count = distributed.merge_moments(mean, var, merge.count, merge.group)
        scale = var if merge.rule is None else merge.rule.scale(var)
        normalizer = torch.stack((mean, scale)).to(merge.dtype)
        merge.mean, merge.var = mean, var
        if merge.rule is not None:
            merge.affine = normalization.make_affine(mean, scale, merge.dtype, merge.weight, merge.bias)
        results = [normalizer.to(device, copy=i > 0) for i, device in enumerate(merge.devices)]
        merge.constants = [result.detach() for result in results]
        return *results, *[result.detach() for result in results]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        merge: Merge = ctx.merge
        parts: tuple[Tensor, ...] = ctx.parts
        num_devices = len(merge.devices)
        grad = _total(grads[:num_devices], parts[0])
        sums = _total(grads[num_devices:], parts[0])
        constant = None if merge.rule is None else merge.rule.without_gradient(merge.var)
        if constant is not None:
            grad = None if grad is None else torch.stack((grad[0], grad[1].masked_fill(constant, 0)))
            sums = None if sums is None else torch.stack((sums[0], sums[1].masked_fill(constant, 0)))
        affine = merge.affine
        if merge.group is not None:
            # Each process weighs its sums, and then not the total: all of them need not have the same weight.
            if sums is not None and merge.weight is not None and affine is not None and affine.slope is not None:
                sums = sums * merge.weight  # without a slope each replica has done so
            affine = None if affine is None else distributed.unweighted(affine)
            if not torch.is_grad_enabled():
                grad, sums = distributed.total_gradients(grad, sums, merge.group)
        grad_parts: list[Tensor | None] = [None for _ in parts]
        if grad is not None:
            local = [part.to(merge.device) for part in parts]
            if merge.group is None:
                of_parts = moments.merge_gradients(grad, local, merge.counts)
            else:
                of_parts = distributed.merge_gradients(grad, local, merge.counts, merge.mean, merge.count, merge.group)
            grad_parts = [g.to(part.device) for g, part in zip(of_parts, parts, strict=True)]
        if sums is None or affine is None:
            return None, *grad_parts, *[None for _ in parts]
        coefficients = normalization.gradient_coefficients(sums, merge.count, affine)
        return None, *grad_parts, *[coefficients.to(part.device) for part in parts]


def used_here(tensor: Tensor) -> Tensor:
    """Keep the memory of `tensor`, made on another stream, until what this thread does with it on its device is done.

    A copy to another device runs on the stream that this thread has on the device of the source.
    """
    if tensor.is_cuda:
        with suppress(RuntimeError):  # which batched gradients raise
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _total(grads: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """Add up what came from the devices, in the dtype and on the device of `like`."""
    arrived = [used_here(grad).to(like.device, like.dtype) for grad in grads if grad is not None]
    if len(arrived) > 1:
        return torch.stack(arrived).sum(0)
    return arrived[0] if arrived else None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        same_input: Tensor,
        normalizer: Tensor,
        carrier: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        record: Record,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        # The input is saved by `_LocalMoments`, unless that has nothing to differentiate.
        ctx.local_moments = input.grad_fn if input.requires_grad else None
        ctx.save_for_backward(input if ctx.local_moments is None else None, weight)
        ctx.normalizer, ctx.affine = normalizer, cast(normalization.Affine, record.affine)
        memory, record.output = record.output, None
        return normalization.normalize(input, normalizer, ctx.affine, bias, memory)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 7
        input, weight = ctx.saved_tensors
        if input is None:
            (input,) = ctx.local_moments.saved_tensors
        needs_input, _, needs_normalizer, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_normalizer = sums = None
        if torch.is_grad_enabled():
            gradients = normalization.normalize_gradients(grad_output, input, ctx.normalizer, weight)
            grad_input, grad_normalizer, grad_weight, grad_bias = gradients
        else:
            grad_input = grad_output
            grad_bias, grad_weight = normalization.gradient_sums(grad_output, input, ctx.normalizer, ctx.affine)
            if needs_normalizer:
                sums = normalization.weigh_sums(torch.stack((grad_bias, grad_weight)), ctx.affine)
        return (
            grad_input if needs_input else None,
            input if needs_input else None,
            grad_normalizer if needs_normalizer else None,
            sums,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            None,
        )


def local_moments(input: Tensor, record: Record | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the moments of `input` ``(2, C)``, their carrier, and `input` twice; all of it part of the graph."""
    parts: tuple[Tensor, Tensor, Tensor, Tensor] = _LocalMoments.apply(input, record)  # type: ignore[no-untyped-call]
    return parts


def merge_moments(
    merge: Merge, parts: Sequence[Tensor], carriers: Sequence[Tensor]
) -> dict[torch.device, list[Tensor]]:
    """Return mean and scale of all parts ``(2, C)``, and their carrier, for each device; fill in `merge`."""
    merged = _MergeMoments.apply(merge, *parts, *carriers)  # type: ignore[no-untyped-call]
    num_devices = len(merge.devices)
    return {device: [merged[i], merged[num_devices + i]] for i, device in enumerate(merge.devices)}


def normalize(
    inputs: Sequence[Tensor],
    normalizer: Tensor,
    carrier: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    record: Record,
) -> Tensor:
    """Return the normalized input; `inputs` are the two that `local_moments` hands out."""
    same, again = inputs
    output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
        same, again, normalizer, carrier, weight, bias, record
    )
    return output
