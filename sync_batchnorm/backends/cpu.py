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
    BatchStatistics,
    Gradients,
    Pair,
    ReplicaBackward,
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

# For channels-last inputs the operator sums row by row. It loses fewer digits if the input is viewed as fewer and wider
# rows, of at most this many elements.
WIDTH = 2048

ANY = 0.1  # a momentum, where there are no running statistics, or none that are kept

batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_normalize_into = torch.ops.aten.native_batch_norm.out


class Cpu(Backend):
    merge_dtype = torch.float64

    def statistics(self, input: Tensor, eps: float) -> tuple[Pair, Tensor | None]:
        moments, memory = fast_moments(input)
        # First check each part by itself: this takes two operators, and is enough for nearly every input.
        mean, var = moments
        if not is_precise(mean, var, eps) and not is_precise(*merge_moments(mean.double(), var, None), eps):
            mean, var = exact_moments(input, mean, memory)
        return (mean, var), memory

    def normalize(
        self, input: Tensor, mean_invstd: Pair, weight: Tensor | None, bias: Tensor | None, out: Tensor
    ) -> None:
        # The offset is made from the rounded slope and the unrounded mean: so mean * slope cancels to the last digit.
        mean, invstd = mean_invstd
        slope = _factor(invstd, weight, statistics_dtype(input.dtype))
        offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
        affine(input, slope, offset.to(slope.dtype), out)

    def gradients(self, replicas: Sequence[ReplicaBackward], batch: BatchStatistics) -> Sequence[Gradients]:
        if not replicas:
            return []
        mean, invstd = batch.mean_invstd[batch.master]
        dtype = statistics_dtype(replicas[0].input.dtype)
        rounded, scale = mean.to(dtype), invstd.to(dtype)
        # The two sums of each replica: of dy, and of dy * (x - mean) * invstd.
        vectors: list[Tensor] = []
        for replica in replicas:
            if replica.grad_output is not None:
                vectors += gradient_sums(replica.grad_output, replica.input, rounded, scale)
        sums, of_parameters = [], iter(())
        if vectors:
            stacked = torch.stack(vectors).double()  # (2 * R, C)
            # Correct the sums for the rounding of the mean, which has shifted all normalized values.
            stacked[1::2].addcmul_(stacked[::2], (rounded - mean) * invstd)
            of_parameters = iter(stacked.to(dtype, copy=True).view(-1, 2, len(mean)))
            sums = [stacked]
            if batch.weights_differ:
                weights = [replica.weight for replica in replicas if replica.grad_output is not None]
                for own, weight in zip(stacked.view(-1, 2, len(mean)), weights, strict=True):
                    if weight is not None:
                        own.mul_(weight)

        wanted = any([replica.wants_input for replica in replicas])
        if wanted:
            # All replicas add ``-factor / N * (sum_dy + (x - mean) * invstd * sum_dy_normalized)`` to their gradient.
            factor = None if batch.weights_differ else _factor(invstd, replicas[0].weight, dtype)
            terms = batch.totals(sums) * (invstd if factor is None else factor)
            offset, second = terms.div_(-batch.elements).unbind()
            # The slope is rounded before the offset is computed, so that mean * slope cancels to the last digit.
            slope = (second * invstd).to(dtype)
            offset = torch.addcmul(offset, slope, mean, value=-1).to(dtype)
        results: list[Gradients] = []
        for replica in replicas:
            input, grad_output, grad_input = replica.input, replica.grad_output, None
            grad_bias, grad_weight = (None, None) if grad_output is None else next(of_parameters)
            if replica.wants_input:
                grad_input = affine(input.to(dtype), slope, offset)
                if grad_output is not None:
                    own_factor = _factor(invstd, replica.weight, dtype) if factor is None else factor
                    grad_input.addcmul_(grad_output.to(dtype), per_channel(own_factor, input))
                grad_input = grad_input.to(input.dtype)
            results.append((grad_input, grad_weight, grad_bias))
        return results


def affine(input: Tensor, slope: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``input * slope + offset``, vectors ``(C,)``, in the dtype and memory format of `input`, in one pass."""
    if input.dtype == slope.dtype and not input.is_contiguous():
        return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input), out=out)
    zeros, ones = torch.zeros_like(slope), torch.ones_like(slope)
    if out is None:  # Batched gradients have no rule for the operator below.
        out, _, _ = torch.native_batch_norm(input, slope, offset, zeros, ones, False, ANY, 0.0)
    else:
        none = slope.new_empty(0)
        _normalize_into(input, slope, offset, zeros, ones, False, ANY, 0.0, out=out, save_mean=none, save_invstd=none)
    return out


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
    """Return into how many equal parts to cut `rows` of `channels`: as many as fit side by side in `WIDTH`."""
    return next((parts for parts in range(min(rows, WIDTH // channels), 1, -1) if rows % parts == 0), 1)


def is_precise(mean: Tensor, var: Tensor, eps: float) -> bool:
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
