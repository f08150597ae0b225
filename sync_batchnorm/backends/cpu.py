"""Batch normalization on the CPU.

NOTE [fast and exact statistics]: One operator computes the statistics of an input in one pass. Its variance is accurate
to 1e-6 while ``mean^2 <= 256 * (var + eps)``, and useless where the mean is 1e4 standard deviations. So a replica
checks whether these fast statistics are `precise`. If not, it computes the exact ones, from the input minus the fast
mean, which are accurate to 1e-6 at any ratio. If the statistics of all replicas are precise, so are the merged ones:
the square of a mean of means is at most the mean of their squares, and the variances count fully.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .base import (
    Backend,
    Backward,
    Pair,
    ReplicaGradients,
    ReplicaStatistics,
    channel_count,
    format_of,
    merge_moments,
    per_channel,
    reduced_dims,
    statistics_dtype,
)

__all__: list[str] = []

# The largest `mean^2 / (var + eps)` with fast statistics, measured on random and adversarial inputs: how-it-works.md.
LARGEST_RATIO = 256.0

# The operator for inputs with innermost channels adds up the rows one after the other. It loses fewer digits if the
# input is viewed as fewer and wider rows, of at most this many elements.
WIDTH = 2048

batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_normalize_into = torch.ops.aten.native_batch_norm.out


class Affine(NamedTuple):
    """A function of an input, ``input * slope + offset``, in the dtype of the statistics."""

    slope: Tensor
    offset: Tensor

    def of(self, input: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the function of `input`, in its dtype and memory format, in one pass, in memory `out` if given."""
        slope, offset = self
        if input.dtype == slope.dtype and input.stride(1) == 1 and not input.is_contiguous():
            return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input), out=out)
        zeros, ones = torch.zeros_like(slope), torch.ones_like(slope)
        if out is None:  # Batched gradients have no rule for the operator below.
            return torch.native_batch_norm(input, slope, offset, zeros, ones, False, 0.0, 0.0)[0]
        unused = slope.new_empty(0)
        _normalize_into(
            input, slope, offset, zeros, ones, False, 0.0, 0.0, out=out, save_mean=unused, save_invstd=unused
        )
        return out


class CommonTerms(NamedTuple):
    """What the gradient of an input is computed from in every replica, beside the gradient of its output."""

    linear: Affine
    factor: Tensor | None  # weight * invstd, if it is the same in all replicas


class Cpu(Backend):
    merge_dtype = pair_dtype = torch.float64

    def statistics(self, input: Tensor, eps: float, adds_eps: bool) -> tuple[ReplicaStatistics, Tensor | None]:
        moments, memory = fast_moments(input)
        # First check each part by itself: this takes two operators, and is enough for nearly every input.
        mean, var = moments
        if not precise(mean, var, eps) and not precise(*merge_moments(mean.double(), var, None), eps):
            mean, var = exact_moments(input, mean, memory)
        return ReplicaStatistics(mean, var, False, channel_count(input.shape)), memory

    def normalize(self, input: Tensor, pair: Pair, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
        # The offset is made from the rounded slope and the unrounded mean: so mean * slope cancels to the last digit.
        mean, invstd = pair
        slope = _factor(invstd, weight, statistics_dtype(input.dtype))
        offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
        Affine(slope, offset.to(slope.dtype)).of(input, out)

    def sums(self, backward: Backward) -> Tensor | None:
        """Do this for all replicas in fewer operators; the second sum is that of ``dy * (x - mean) * invstd``."""
        replicas = [replica for replica in backward.replicas if replica.grad_output is not None]
        if not replicas:
            return None
        mean, invstd = backward.at[backward.batch.master]
        dtype = statistics_dtype(replicas[0].input.dtype)
        rounded, scale = mean.to(dtype), invstd.to(dtype)
        vectors: list[Tensor] = []
        for replica in replicas:
            vectors += gradient_sums(replica.grad_output, replica.input, rounded, scale)  # type: ignore[arg-type]
        sums = torch.stack(vectors).double()  # (2 * R, C)
        # Correct the sums for the rounding of the mean, which has shifted all normalized values.
        sums[1::2].addcmul_(sums[::2], (rounded - mean) * invstd)
        sums = sums.view(len(replicas), 2, -1)
        for replica, (grad_bias, grad_weight) in zip(replicas, sums.to(dtype, copy=True), strict=True):
            replica.grad_bias, replica.grad_weight = grad_bias, grad_weight
        if backward.own_weights:
            for own, replica in zip(sums, replicas, strict=True):
                if replica.weight is not None:
                    own.mul_(replica.weight)
        return sums.sum(0)

    def common_terms(self, totals: Tensor, backward: Backward) -> CommonTerms:
        """Return ``-factor / N * (sum_dy + (input - mean) * invstd * sum_dy_normalized)``, and the factor."""
        first, (mean, invstd) = backward.replicas[0], backward.at[backward.batch.master]
        dtype = statistics_dtype(first.input.dtype)
        factor = None if backward.own_weights else _factor(invstd, first.weight, dtype)
        scaled = backward.without_clamped(totals) * (invstd if factor is None else factor)
        offset, second = scaled.div_(-backward.batch.count).unbind()
        # The slope is rounded before the offset is computed, so that mean * slope cancels to the last digit.
        slope = (second * invstd).to(dtype)
        return CommonTerms(Affine(slope, torch.addcmul(offset, slope, mean, value=-1).to(dtype)), factor)

    def input_gradient(self, replica: ReplicaGradients, terms: CommonTerms, backward: Backward) -> Tensor:
        input, grad_output = replica.input, replica.grad_output
        linear, factor = terms
        dtype = linear.slope.dtype
        grad_input = linear.of(input if input.dtype == dtype else input.to(dtype))
        if grad_output is not None:
            if factor is None:
                factor = _factor(backward.at[replica.place][1], replica.weight, dtype)
            grad_input.addcmul_(grad_output.to(dtype), per_channel(factor, input))
        return grad_input.to(input.dtype)


def _factor(invstd: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (invstd if weight is None else invstd * weight).to(dtype)


Moments = tuple[Tensor, Tensor]  # mean and biased variance of K equal parts, ``(K, C)``


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
        dims, count = reduced_dims(values), channel_count(values.shape)
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
            mean, var = torch.batch_norm_update_stats(view, unused, None if unused is None else unused.clone(), 0.0)
            return (mean.view(split, channels), var.view(split, channels)), None
        input = input.contiguous()
    # Each channel of each sample is a group. Half inputs get float32 statistics if weight and bias are float32.
    length = input.numel() // (size * channels)
    weight = torch.ones(channels, dtype=torch.float32, device="cpu") if half else None
    bias = torch.zeros_like(weight) if weight is not None else None
    memory, mean, invstd = torch.native_group_norm(input, weight, bias, size, channels, length, channels, 0.0)
    return (mean, invstd.pow(-2)), memory


@functools.lru_cache(maxsize=1024)
def _split(rows: int, channels: int) -> int:
    """Return into how many equal parts to cut `rows` of `channels`: as many as fit side by side in `WIDTH`."""
    return next((parts for parts in range(min(rows, WIDTH // channels), 1, -1) if rows % parts == 0), 1)


def precise(mean: Tensor, var: Tensor, eps: float) -> bool:
    """Return whether fast statistics are good enough, see NOTE [fast and exact statistics]."""
    if type(mean) is not Tensor:  # a stand-in without values, as in `FakeTensorMode`
        return True
    lowest, highest = torch.aminmax(torch.addcmul(var, mean, mean, value=-1 / LARGEST_RATIO))
    return lowest.item() >= -eps and highest.item() < math.inf


def gradient_sums(grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over the elements of one replica of ``dy`` and of ``dy * (x - mean) * invstd``."""
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if grad_output.stride() != input.stride():
        # The operator makes wrong sums if formats differ in the strides of dimensions of size one (torch 2.13.0).
        memory_format = format_of(input)
        grad_output = grad_output.contiguous(memory_format=memory_format)
        if input.is_contiguous(memory_format=memory_format):
            grad_output = grad_output.as_strided(input.shape, input.stride())
    _, dot, total = batch_norm_backward(
        grad_output, input, None, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return total, dot
