"""Batch normalization on the CPU.

NOTE [fast and exact statistics]: One operator computes the statistics of an input in one pass. Its variance is accurate
to 1e-6 while ``mean^2 <= 256 * (var + eps)``, and meaningless once the mean is 1e4 standard deviations. So a replica
checks whether these fast statistics are precise. If not, it computes the exact ones, from the input minus the fast
mean, which are accurate to 1e-6 at any ratio. If the statistics of all replicas are precise, so are the merged ones:
the square of a mean of means is at most the mean of their squares, and the variances count fully.
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
    Pair,
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

ANY = 0.1  # a momentum, where there are no running statistics, or none that are kept

_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_normalize_into = torch.ops.aten.native_batch_norm.out


Affine = tuple[Tensor, ...]  # what `as_batch_norm_args` returns


def as_batch_norm_args(slope: Tensor, offset: Tensor) -> Affine:
    """Return what makes a batch norm of the function ``x * slope + offset`` of each channel, for all replicas.

    These are slope and offset, in the places of weight and bias, a mean of zeros and a variance of ones, ``(C,)`` each;
    and a tensor without elements, into which the operator returns what it has not computed.
    """
    return slope, offset, torch.zeros_like(slope), torch.ones_like(slope), slope.new_empty(0)


class Cpu(Backend):
    merge_dtype = torch.float64

    def statistics(self, input: Tensor, eps: float) -> tuple[Pair, Tensor | None]:
        moments, memory = fast_moments(input)
        # First check each part by itself: this takes two operators, and is enough for nearly every input.
        mean, var = moments
        if not is_precise(mean, var, eps) and not is_precise(*merge_moments(mean.double(), var, None), eps):
            mean, var = exact_moments(input, mean, memory)
        return (mean, var), memory

    def normalize(self, calls: Sequence[ForwardInput], batch: BatchStatistics) -> list[Tensor]:
        outputs: list[Tensor] = []
        line: Affine | None = None
        mean, invstd = batch.mean_invstd[batch.master]
        for call in calls:
            if line is None or batch.parameters_differ:  # Otherwise slope and offset are those of the replica before.
                weight, bias = call.layer.weight, call.layer.bias
                slope = _factor(invstd, weight, statistics_dtype(call.input.dtype))
                # Made from the rounded slope and the unrounded mean: so mean * slope cancels to the last digit.
                offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
                line = as_batch_norm_args(slope, offset.to(slope.dtype))
            # Into memory, since torch then refuses tangents of forward mode, which would be lost.
            output = memory_for_output(call.input) if call.memory is None else call.memory
            outputs.append(affine(call.input, line, output))
        return outputs

    def gradients(self, parts: Sequence[BackwardInput], batch: BatchStatistics) -> Sequence[Gradients]:
        if not parts:
            return []
        invstd = batch.mean_invstd[batch.master][1]
        dtype = statistics_dtype(parts[0].input.dtype)
        sums = _sums(parts, batch, dtype)
        of_parameters = sums.to(dtype, copy=True)
        if batch.parameters_differ:
            for pair, part in zip(sums, parts, strict=True):
                if part.weight is not None:
                    pair.mul_(part.weight)
        common_factor = None if batch.parameters_differ else _factor(invstd, parts[0].weight, dtype)
        if any([part.wants_input for part in parts]):
            line = _common_terms(sums, batch, common_factor, dtype)
        results: list[Gradients] = []
        for part, (grad_bias, grad_weight) in zip(parts, of_parameters, strict=True):
            grad_input = None
            if part.wants_input:
                factor = _factor(invstd, part.weight, dtype) if common_factor is None else common_factor
                grad_input = _input_gradient(part, line, factor)
            results.append((grad_input, grad_weight, grad_bias))
        return results


def _sums(parts: Sequence[BackwardInput], batch: BatchStatistics, dtype: torch.dtype) -> Tensor:
    """Return the sums of each replica, of dy and of dy * (x - mean) * invstd: ``(R, 2, C)``, in float64."""
    mean, invstd = batch.mean_invstd[batch.master]
    rounded, scale = mean.to(dtype), invstd.to(dtype)
    vectors: list[Tensor] = []
    for part in parts:
        vectors += gradient_sums(part.grad_output, part.input, rounded, scale)
    sums = torch.stack(vectors).double().view(-1, 2, len(mean))
    # Correct the sums for the rounding of the mean, which has shifted all normalized values.
    sums[:, 1].addcmul_(sums[:, 0], (rounded - mean) * invstd)
    return sums


def _common_terms(sums: Tensor, batch: BatchStatistics, factor: Tensor | None, dtype: torch.dtype) -> Affine:
    """Return ``-factor / N * (sum_dy + (x - mean) * invstd * sum_dy_normalized)``.

    All replicas add this function of their inputs x to their gradients. A `factor` of None stands for `invstd`.
    """
    mean, invstd = batch.mean_invstd[batch.master]
    terms = batch.completed(sums.sum(0)) * (invstd if factor is None else factor)
    offset, of_normalized = terms.div_(-batch.elements).unbind()
    # The slope is rounded before the offset is computed, so that mean * slope cancels to the last digit.
    slope = (of_normalized * invstd).to(dtype)
    return as_batch_norm_args(slope, torch.addcmul(offset, slope, mean, value=-1).to(dtype))


def _input_gradient(part: BackwardInput, line: Affine, factor: Tensor) -> Tensor:
    """Return the gradient of the input of one replica: the common terms, and `factor` times that of its output."""
    input, dy, dtype = part.input, part.grad_output, factor.dtype
    is_half = input.dtype != dtype  # Even a `to` that does nothing takes time.
    grad_input = affine(input.to(dtype) if is_half else input, line)
    if dy is not None:
        grad_input.addcmul_(dy.to(dtype) if is_half else dy, per_channel(factor, input))
    return grad_input.to(input.dtype) if is_half else grad_input


def affine(input: Tensor, line: Affine, out: Tensor | None = None) -> Tensor:
    """Return ``input * slope + offset`` in the dtype and memory format of `input`, in one pass."""
    slope, offset, zeros, ones, none = line
    if input.dtype == slope.dtype and not input.is_contiguous():
        return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input), out=out)
    if out is None:  # Batched gradients have no rule for the operator below.
        out, _, _ = torch.native_batch_norm(input, slope, offset, zeros, ones, False, ANY, 0.0)
    else:
        _normalize_into(input, slope, offset, zeros, ones, False, ANY, 0.0, out=out, save_mean=none, save_invstd=none)
    return out


def _factor(invstd: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (invstd if weight is None else invstd * weight).to(dtype)


Moments = tuple[Tensor, Tensor]  # mean and biased variance of K equal pieces, ``(K, C)``


def exact_moments(input: Tensor, mean: Tensor, memory: Tensor | None) -> Moments:
    """Return the exact moments of `input`, given its fast means and their memory, which is overwritten."""
    # A mean that is not finite is not subtracted, since it would make finite values non-finite.
    shift = torch.nan_to_num(mean.mean(0), 0.0, 0.0, 0.0)
    room = memory if memory is not None and memory.dtype == shift.dtype else None
    mean, var = fast_moments(torch.sub(input, per_channel(shift, input), out=room))[0]
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


def fast_moments(input: Tensor) -> tuple[Moments, Tensor | None]:
    """Return the fast moments of `input`, and memory for the output, or None."""
    size, channels = input.shape[:2]
    half = input.dtype in (torch.float16, torch.bfloat16)
    if input.dim() == 2 or not input.is_contiguous():
        side_by_side = input.movedim(1, -1)
        if side_by_side.is_contiguous():
            rows = input.numel() // channels
            split = _split(rows, channels)
            view = side_by_side.as_strided((rows // split, split * channels), (split * channels, 1))
            # Half inputs get float32 statistics if the running ones are float32; these are discarded.
            unused = torch.zeros(split * channels, dtype=torch.float32, device="cpu") if half else None
            mean, var = torch.batch_norm_update_stats(view, unused, None if unused is None else unused.clone(), ANY)
            return (mean.view(split, channels), var.view(split, channels)), None
        input = input.contiguous()
    # Each channel of each sample is a group. Half inputs get float32 statistics if the weight is float32.
    length = input.numel() // (size * channels)
    weight = torch.ones(channels, dtype=torch.float32, device="cpu") if half else None
    memory, mean, invstd = torch.native_group_norm(input, weight, None, size, channels, length, channels, 0.0)
    return (mean, invstd.pow(-2)), memory


@functools.lru_cache(maxsize=1024)
def _split(rows: int, channels: int) -> int:
    """Return into how many equal pieces to cut `rows` of `channels`: as many as fit side by side in `WIDTH`."""
    return next((pieces for pieces in range(min(rows, WIDTH // channels), 1, -1) if rows % pieces == 0), 1)


def is_precise(mean: Tensor, var: Tensor, eps: float) -> bool:
    """Return whether fast statistics are good enough, see NOTE [fast and exact statistics]."""
    if type(mean) is not Tensor:  # a stand-in without values, as in `FakeTensorMode`
        return True
    lowest, highest = torch.aminmax(torch.addcmul(var, mean, mean, value=-1 / LARGEST_RATIO))
    return lowest.item() >= -eps and highest.item() < math.inf


def gradient_sums(grad_output: Tensor | None, input: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over the elements of one replica of ``dy`` and of ``dy * (x - mean) * invstd``."""
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
