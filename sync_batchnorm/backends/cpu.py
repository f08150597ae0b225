"""Batch normalization on the CPU.

NOTE [fast and exact statistics]: One operator of torch computes the statistics of an input in one pass. Its variance is
accurate to 1e-6 while ``mean^2 <= 256 * (var + eps)``, and meaningless once the mean is 1e4 standard deviations. So
each replica checks whether its fast statistics are precise:

    fast_moments --> is_precise? -- yes --> send them
                          |
                          no ----> exact_moments --> send those

The exact statistics are those of the input minus its fast mean. They are accurate to 1e-6 at any ratio, and take two
more passes over the input.

If the statistics of all replicas are precise, so are the merged ones: the square of a mean of means is at most the mean
of their squares, and the merged variance is at least the mean of the variances.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import (
    Backend,
    BackwardInput,
    BatchStatistics,
    ForwardInput,
    Gradients,
    format_of,
    memory_for_output,
    merge_moments,
    per_channel,
    reduced_dims,
    statistics_dtype,
)

__all__: list[str] = []

# The largest `mean^2 / (var + eps)` with fast statistics, measured on random and adversarial inputs: how-it-works.md.
LARGEST_RATIO = 256.0

# For channels-last inputs the operator sums row by row. It loses fewer digits if the input is viewed as fewer and wider
# rows, of at most this many elements.
WIDTH = 2048

UNUSED_MOMENTUM = 0.1  # for operators that take a momentum also without running statistics

_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_normalize_into = torch.ops.aten.native_batch_norm.out


AffineArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def as_batch_norm_arguments(slope: Tensor, offset: Tensor) -> AffineArguments:
    """Return weight, bias, mean and variance, ``(C,)`` each, with which torch's batch norm is ``x * slope + offset``.

    The last item is an empty tensor, for the statistics of a training step, which the operator leaves out.
    """
    return slope, offset, torch.zeros_like(slope), torch.ones_like(slope), slope.new_empty(0)


class Cpu(Backend):
    """Statistics are merged in float64. All replicas are on one device, so they read the same mean and invstd."""

    merge_dtype = torch.float64

    def statistics(self, input: Tensor, eps: float) -> tuple["Moments", Tensor | None]:
        (mean, var), memory = fast_moments(input)
        # First check each piece by itself: this takes two operators, and is enough for nearly every input.
        if not is_precise(mean, var, eps) and not is_precise(*merge_moments(mean.double(), var, None), eps):
            mean, var = exact_moments(input, mean, memory)
        return (mean, var), memory

    def normalize(self, calls: Sequence[ForwardInput], batch: BatchStatistics) -> list[Tensor]:
        outputs: list[Tensor] = []
        affine: AffineArguments | None = None
        mean, invstd = batch.mean_invstd[batch.master_device]
        for call in calls:
            if affine is None or batch.parameters_differ:  # Otherwise all replicas share slope and offset.
                weight, bias = call.layer.weight, call.layer.bias
                slope = (invstd if weight is None else invstd * weight).to(statistics_dtype(call.input.dtype))
                # From the rounded slope and the unrounded mean: so mean * slope cancels to the last digit.
                offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
                affine = as_batch_norm_arguments(slope, offset.to(slope.dtype))
            # Into given memory: torch then refuses tangents of forward mode, which would otherwise be lost.
            output = memory_for_output(call.input) if call.memory is None else call.memory
            outputs.append(apply_affine(call.input, affine, output))
        return outputs

    def gradients(self, replicas: Sequence[BackwardInput], batch: BatchStatistics) -> Sequence[Gradients]:
        if not replicas:
            return []
        invstd = batch.mean_invstd[batch.master_device][1]
        dtype = statistics_dtype(replicas[0].input.dtype)
        sums = _sums(replicas, batch, dtype)
        parameter_grads = sums.to(dtype, copy=True)
        if batch.parameters_differ:
            for pair, replica in zip(sums, replicas, strict=True):
                if replica.weight is not None:
                    pair.mul_(replica.weight)
        factors: list[Tensor] = []
        for replica in replicas if batch.parameters_differ else replicas[:1]:
            factors.append((invstd if replica.weight is None else invstd * replica.weight).to(dtype))
        if any([replica.wants_input for replica in replicas]):
            common_terms = _common_terms(sums, batch, invstd if batch.parameters_differ else factors[0], dtype)
        if not batch.parameters_differ:
            factors *= len(replicas)
        results: list[Gradients] = []
        for replica, (grad_bias, grad_weight), factor in zip(replicas, parameter_grads, factors, strict=True):
            grad_input = _input_gradient(replica, common_terms, factor) if replica.wants_input else None
            results.append((grad_input, grad_weight, grad_bias))
        return results


def _sums(replicas: Sequence[BackwardInput], batch: BatchStatistics, dtype: torch.dtype) -> Tensor:
    """Compute ``sum dy`` and ``sum dy * (x - mean) * invstd`` of each replica: ``(R, 2, C)``, in float64."""
    mean, invstd = batch.mean_invstd[batch.master_device]
    rounded_mean, rounded_invstd = mean.to(dtype), invstd.to(dtype)
    vectors: list[Tensor] = []
    for replica in replicas:
        vectors += gradient_sums(replica.grad_output, replica.input, rounded_mean, rounded_invstd)
    sums = torch.stack(vectors).double().view(-1, 2, len(mean))  # (2 * R, C) -> (R, 2, C)
    # Correct the second sums for the rounding of the mean, which shifts all normalized values.
    sums[:, 1].addcmul_(sums[:, 0], (rounded_mean - mean) * invstd)
    return sums


def _common_terms(sums: Tensor, batch: BatchStatistics, factor: Tensor, dtype: torch.dtype) -> AffineArguments:
    """Return the terms that the gradients of all inputs have in common, as a function of the input x.

    It is ``-factor / N * (sum dy + (x - mean) * invstd * sum dy_normalized)``, with the sums of all replicas. If the
    parameters of replicas differ, dy in `sums` has been multiplied by the weights, and `factor` is invstd.
    """
    mean, invstd = batch.mean_invstd[batch.master_device]
    terms = batch.complete(sums.sum(0)) * factor
    offset, normalized_term = terms.div_(-batch.elements).unbind()
    # The slope is rounded before the offset is computed, so that mean * slope cancels to the last digit.
    slope = (normalized_term * invstd).to(dtype)
    offset = torch.addcmul(offset, slope, mean, value=-1).to(dtype)
    return as_batch_norm_arguments(slope, offset)


def _input_gradient(replica: BackwardInput, common_terms: AffineArguments, factor: Tensor) -> Tensor:
    """Return the gradient of the input of one replica: ``common_terms(x) + factor * dy``."""
    input, dy, dtype = replica.input, replica.grad_output, factor.dtype
    is_half = input.dtype != dtype  # Even a `to` that does nothing takes time.
    grad_input = apply_affine(input.to(dtype) if is_half else input, common_terms)
    if dy is not None:
        grad_input.addcmul_(dy.to(dtype) if is_half else dy, per_channel(factor, input))
    return grad_input.to(input.dtype) if is_half else grad_input


def apply_affine(input: Tensor, affine: AffineArguments, out: Tensor | None = None) -> Tensor:
    """Compute ``input * slope + offset`` in the dtype and memory format of `input`, in one pass."""
    slope, offset, zeros, ones, unused = affine
    if input.dtype == slope.dtype and not input.is_contiguous():
        return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input), out=out)
    options = zeros, ones, False, UNUSED_MOMENTUM, 0.0  # running mean and variance, training, momentum, eps
    if out is None:  # Batched gradients have no rule for the operator below.
        out, _, _ = torch.native_batch_norm(input, slope, offset, *options)
    else:
        _normalize_into(input, slope, offset, *options, out=out, save_mean=unused, save_invstd=unused)
    return out


Moments = tuple[Tensor, Tensor]  # mean and biased variance of K equal pieces, ``(K, C)``


def fast_moments(input: Tensor) -> tuple[Moments, Tensor | None]:
    """Compute the fast moments of `input`; return them, and memory for the output or None."""
    size, channels = input.shape[:2]
    half = input.dtype in (torch.float16, torch.bfloat16)
    if input.dim() == 2 or not input.is_contiguous():
        channels_last = input.movedim(1, -1)
        if channels_last.is_contiguous():
            rows = input.numel() // channels
            pieces = _number_of_pieces(rows, channels)
            view = channels_last.as_strided((rows // pieces, pieces * channels), (pieces * channels, 1))
            # Half inputs get float32 statistics only if the running statistics are float32. These are discarded.
            running_mean = torch.zeros(pieces * channels, dtype=torch.float32, device="cpu") if half else None
            running_var = None if running_mean is None else running_mean.clone()
            mean, var = torch.batch_norm_update_stats(view, running_mean, running_var, UNUSED_MOMENTUM)
            return (mean.view(pieces, channels), var.view(pieces, channels)), None
        input = input.contiguous()
    # Each channel of each sample is a group. Half inputs get float32 statistics only if the weight is float32.
    length = input.numel() // (size * channels)
    weight = torch.ones(channels, dtype=torch.float32, device="cpu") if half else None
    memory, mean, invstd = torch.native_group_norm(input, weight, None, size, channels, length, channels, 0.0)
    return (mean, invstd.pow(-2)), memory


@functools.lru_cache(maxsize=1024)
def _number_of_pieces(rows: int, channels: int) -> int:
    """Return into how many equal pieces to cut `rows` of `channels`: as many as fit side by side into `WIDTH`."""
    return next((pieces for pieces in range(min(rows, WIDTH // channels), 1, -1) if rows % pieces == 0), 1)


def is_precise(mean: Tensor, var: Tensor, eps: float) -> bool:
    """Return whether fast statistics are precise enough, see NOTE [fast and exact statistics]."""
    if type(mean) is not Tensor:  # a stand-in without values, as in `FakeTensorMode`
        return True
    lowest, highest = torch.aminmax(torch.addcmul(var, mean, mean, value=-1 / LARGEST_RATIO))
    return lowest.item() >= -eps and highest.item() < math.inf


def exact_moments(input: Tensor, fast_mean: Tensor, memory: Tensor | None) -> Moments:
    """Compute the exact moments of `input`, from its fast means; `memory` for the output is overwritten."""
    # A mean that is not finite is not subtracted, since it would make finite values non-finite.
    shift = torch.nan_to_num(fast_mean.mean(0), 0.0, 0.0, 0.0)
    out = memory if memory is not None and memory.dtype == shift.dtype else None
    (mean, var), _ = fast_moments(torch.sub(input, per_channel(shift, input), out=out))
    mean = mean.double() + shift
    overflown = ~(mean.isfinite() & var.isfinite()).all(0)
    if bool(overflown.any()):
        # As in torch: the mean is Inf if a value is; if only the squares overflow, only the variance is Inf.
        values = input[:, overflown].double()
        dims, count = reduced_dims(values), values.numel() // values.shape[1]
        mean[:, overflown] = values.sum(dims) / count
        values -= per_channel(mean[0, overflown], values)
        var[:, overflown] = (values.square_().sum(dims) / count).to(var.dtype)
    return mean, var


def gradient_sums(grad_output: Tensor | None, input: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``sum dy`` and ``sum dy * (x - mean) * invstd`` over the elements of one replica."""
    if grad_output is None or input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if grad_output.stride() != input.stride():
        # The operator makes wrong sums if formats differ in the strides of dimensions of size one (torch 2.13.0).
        memory_format = format_of(input)
        grad_output = grad_output.contiguous(memory_format=memory_format)
        if input.is_contiguous(memory_format=memory_format):
            grad_output = grad_output.as_strided(input.shape, input.stride())
    _, dot, total = _norm_backward(grad_output, input, None, None, None, mean, invstd, True, 0.0, [False, True, True])
    return total, dot
