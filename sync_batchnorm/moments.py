"""The arithmetic of batch statistics and their gradients, with the operators of torch that fit device and format.

No threads, no modules, no autograd nodes. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``;
``count`` is the number of elements of one channel. Vectors of length C that are merged are in float64 on the CPU and on
CUDA: they are tiny, and a mean that is large against the deviation needs the digits.

A scale is the quantity under the root of the inverse standard deviation, ``var + eps`` or ``max(var, eps)``: the
operators of torch for the CPU take it as their variance, with an eps of zero.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

# Up to this many elements a float64 copy of the input costs less than the calls that avoid it; the kernel for channels
# that lie side by side is the faster one. Measured on two cores, torch 2.13.0.
SMALL, SMALL_CHANNELS_LAST = 32768, 131072

# Elements that are centered at a time: what fits into the second-level cache of a core.
CHUNK = 262144

_backward = torch.ops.aten.native_batch_norm_backward.default


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean, scale and gradient sums for inputs of `dtype`: float32 at the least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Where torch has operators for batch statistics; elsewhere general ones do.
FUSED = ("cpu", "cuda")


def _kind(device: torch.device) -> str:
    return device.type if device.type in FUSED else "other"


def _merge_dtype(input: Tensor) -> torch.dtype:
    return statistics_dtype(input.dtype) if _kind(input.device) == "other" else torch.float64


def channel_count(shape: torch.Size) -> int:
    """Return the number of elements of one channel of an input of `shape`."""
    return shape[:1].numel() * shape[2:].numel()


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector ``(C,)`` so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector


def reduced_dims(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def local_moments(input: Tensor) -> Tensor:
    """Return mean and biased variance of each channel, ``(2, C)``; zeros for an input without elements."""
    dtype = _merge_dtype(input)
    if input.numel() == 0:
        return torch.zeros(2, input.shape[1], dtype=dtype, device=input.device)
    if _kind(input.device) == "cuda":
        return torch.stack(torch.batch_norm_update_stats(input, None, None, 0.0)).to(dtype)
    if _kind(input.device) != "cpu":
        var, mean = torch.var_mean(input.to(dtype), reduced_dims(input), correction=0)
        return torch.stack((mean, var))
    small = SMALL_CHANNELS_LAST if input.stride(1) == 1 else SMALL
    if input.numel() <= small or input.dtype == torch.float64:
        return torch.stack(torch.batch_norm_update_stats(input.double(), None, None, 0.0))
    return _shifted_moments(input)


def _shifted_moments(input: Tensor) -> Tensor:
    """Return the moments from sums about a shift close to the mean, where squares do not cancel.

    The shift is the mean of the first sample, or of enough samples to have 64 elements. With m of n elements, its
    squared distance from the mean is at most n / m times the variance, whatever the data: the cancellation is bounded.
    """
    dims = reduced_dims(input)
    sample = input[: 1 + 63 // input.shape[2:].numel()]
    shift = sample.to(torch.float32).mean(dims)
    sums = []
    for part in torch.split(input, max(1, CHUNK // input[0].numel())):
        centered = part - per_channel(shift, input)
        sums += [centered.sum(dims), centered.mul_(centered).sum(dims)]
    total = torch.stack(sums).double().view(-1, 2, input.shape[1]).sum(0)
    mean, mean_square = total.div_(channel_count(input.shape)).unbind()
    return torch.stack((mean + shift, (mean_square - mean * mean).clamp_(min=0)))


@functools.lru_cache(maxsize=256)
def _weights(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the share of each of `counts` in their sum, ``(R, 1)``."""
    with torch.inference_mode(False):
        return torch.tensor(counts, dtype=dtype, device=device)[:, None] / sum(counts)


@functools.lru_cache(maxsize=256)
def _constants(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return zeros and ones, which the operators want as mean and variance of what is normalized already."""
    with torch.inference_mode(False):
        return torch.zeros(length, dtype=dtype), torch.ones(length, dtype=dtype)


def merge_moments(moments: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances ``(2, C)`` of parts with `counts` elements into those of the whole, ``(C,)``.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for any
    number of parts at once. Differentiable. The order of summation is that of the arguments.
    """
    parts = [part for part, count in zip(moments, counts, strict=True) if count]
    weights = _weights(tuple(count for count in counts if count), parts[0].dtype, parts[0].device)
    means, variances = torch.stack(parts).unbind(1)  # (R, 2, C) -> (R, C), (R, C)
    # No matrix products: under autocast those of float32 would be in half precision.
    mean = (weights * means).sum(0)
    deviations = means - mean
    return mean, (weights * torch.addcmul(variances, deviations, deviations)).sum(0)


def merge_gradients(grad: Tensor, moments: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return the gradients of `merge_moments` by each of `moments`, for `grad` ``(2, C)``; differentiable."""
    mean, _ = merge_moments(moments, counts)
    grad_mean, grad_var = grad
    # mean = sum w_i mean_i and var = sum w_i (var_i + (mean_i - mean)^2) with w_i = n_i / N.
    return [
        torch.stack((grad_mean + 2 * grad_var * (part[0] - mean), grad_var)) * (count / sum(counts))
        for part, count in zip(moments, counts, strict=True)
    ]


def moments_gradient(grad: Tensor, input: Tensor) -> Tensor:
    """Return the gradient of `local_moments` by its input, for `grad` ``(2, C)``; differentiable."""
    if input.numel() == 0:  # nothing, but a function of `grad`: processes with elements go backward through it
        return (input * per_channel(grad[0] + grad[1], input)).to(input.dtype)
    # d mean / dx = 1 / n and d var / dx = 2 (x - mean) / n.
    wide = input.to(grad.dtype)
    grad_mean, grad_var = grad / channel_count(input.shape)
    centered = wide - per_channel(wide.mean(reduced_dims(input)), input)
    return (per_channel(grad_mean, input) + 2 * per_channel(grad_var, input) * centered).to(input.dtype)


class Affine(NamedTuple):
    """What the replicas of one device need to normalize and to finish their input gradients, beside their own input."""

    mean: Tensor  # (C,), float64 on the CPU and on CUDA, as `scale`
    scale: Tensor
    weight: Tensor | None
    slope: Tensor | None = None  # on the CPU the output is input * slope + offset, in the dtype of the statistics
    offset: Tensor | None = None


def make_affine(mean: Tensor, scale: Tensor, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> Affine:
    """Prepare the normalization by `mean` and `scale`, with statistics of `dtype`, for all replicas of a device.

    The offset is made from the rounded slope and the unrounded mean, so that it cancels the mean to the last digit.
    """
    if _kind(mean.device) != "cpu":
        return Affine(mean, scale, weight)
    invstd = scale.rsqrt()
    slope = (invstd if weight is None else invstd * weight).to(dtype)
    offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
    return Affine(mean, scale, None, slope, offset.to(dtype))


def _multiply_add(input: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Return ``input * slope + offset`` on the CPU, in the dtype and memory format of `input`, in one pass."""
    if input.dtype == slope.dtype and input.stride(1) == 1:
        return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input))
    zero, one = _constants(len(slope), slope.dtype)
    return torch.native_batch_norm(input, slope, offset, zero, one, False, 0.0, 0.0)[0]


def normalize(input: Tensor, normalizer: Tensor, affine: Affine, bias: Tensor | None) -> Tensor:
    """Return ``(input - mean) / sqrt(scale) * weight + bias`` in the dtype and memory format of `input`."""
    if input.numel() == 0:
        return torch.empty_like(input)
    if affine.slope is not None and affine.offset is not None:
        return _multiply_add(input, affine.slope, affine.offset)
    mean, scale = normalizer.unbind()
    weight = affine.weight if affine.weight is None else affine.weight.to(mean.dtype)
    if _kind(input.device) == "cuda":
        bias = bias if bias is None else bias.to(mean.dtype)
        return torch.batch_norm_elemt(input, weight, bias, mean, scale.rsqrt(), 0.0)
    return differentiable_normalize(input, normalizer, weight, bias)


def differentiable_normalize(input: Tensor, normalizer: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return what `normalize` does, in operations that autograd can differentiate any number of times."""
    mean, scale = normalizer.unbind()
    return weigh((input - per_channel(mean, input)) * per_channel(scale.rsqrt(), input), weight, bias).to(input.dtype)


def weigh(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``input * weight + bias`` with vectors ``(C,)``, in the dtype of `input`; differentiable."""
    output = input if weight is None else input * per_channel(weight, input)
    output = output if bias is None else output + per_channel(bias, input)
    return output.to(input.dtype)


def normalize_gradients(
    grad_output: Tensor, input: Tensor, normalizer: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of `normalize` by input, ``(mean, scale)``, weight and bias; differentiable themselves."""
    dims = reduced_dims(input)
    mean, scale = normalizer.unbind()
    grad = grad_output.to(mean.dtype)
    centered = input - per_channel(mean, input)
    invstd = scale.rsqrt()
    sum_dy, sum_dy_xmu = grad.sum(dims), (grad * centered).sum(dims)
    factor = invstd if weight is None else invstd * weight
    grad_normalizer = torch.stack((-sum_dy * factor, -0.5 * sum_dy_xmu * factor / scale))
    grad_input = (grad * per_channel(factor, input)).to(input.dtype)
    if weight is None:
        return grad_input, grad_normalizer, None, sum_dy
    return grad_input, grad_normalizer, (sum_dy_xmu * invstd).to(weight.dtype), sum_dy.to(weight.dtype)


def gradient_sums(grad_output: Tensor, input: Tensor, normalizer: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """Return ``sum_dy`` and ``sum_dy_xmu / sqrt(scale)`` of each channel, ``(C,)`` each, in the dtype of `normalizer`.

    They are the gradients of bias and weight, and all that the input gradient needs of the other elements.
    """
    mean, scale = normalizer.unbind()
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if _kind(input.device) == "cpu":
        _, dot, total = _backward(grad_output, input, None, mean, scale, None, None, False, 0.0, [False, True, True])
        if mean.dtype != affine.mean.dtype:  # Rounding the mean moved all normalized values by the same amount.
            dot += total * ((mean - affine.mean) * affine.scale.rsqrt()).to(mean.dtype)
        return total, dot
    dims = reduced_dims(input)
    if _kind(input.device) == "cuda":
        invstd = scale.rsqrt()
        total, dot, _, _ = torch.batch_norm_backward_reduce(grad_output, input, mean, invstd, None, True, False, False)
        return total, dot * invstd
    normalized = differentiable_normalize(input.to(mean.dtype), normalizer, None, None)
    return grad_output.sum(dims, dtype=mean.dtype), (grad_output * normalized).sum(dims)


def gradient_coefficients(sums: Tensor, count: int, affine: Affine) -> Tensor:
    """Return what `input_gradient` needs of the `gradient_sums` over all replicas, ``(2, C)``.

    The input gradient is ``weight / sqrt(scale) * (dy - mean_dy - (input - mean) / sqrt(scale) * mean_dy_normalized)``.
    On the CPU, these are the slope and the offset of the part that is linear in the input; elsewhere the two means.
    """
    means = sums / count
    if affine.slope is None:
        return means if affine.weight is None else means * affine.weight
    mean_dy, mean_dy_normalized = (means * -affine.slope).unbind()
    slope = mean_dy_normalized * affine.scale.rsqrt()
    # Rounded as it will be used: see `make_affine`, where the offset cancels the mean in the same way.
    slope = slope.to(affine.slope.dtype).to(slope.dtype)
    return torch.stack((slope, torch.addcmul(mean_dy, slope, affine.mean, value=-1)))


def input_gradient(
    grad_output: Tensor | None, input: Tensor, normalizer: Tensor, affine: Affine, coefficients: Tensor
) -> Tensor:
    """Return the gradient of the synchronized normalization by the input of one replica.

    Args:
        grad_output: the gradient of this part of the output; None if it takes no part in the loss.
        input: ``(N, C, +)``.
        normalizer: mean and scale, ``(2, C)``.
        affine: of the forward.
        coefficients: from `gradient_coefficients`.
    """
    if input.numel() == 0:
        return torch.zeros_like(input)
    dtype = normalizer.dtype
    wide = input if input.dtype == dtype else input.to(dtype)
    first, second = coefficients.to(dtype).unbind()
    if affine.slope is not None:
        factor, slope, offset = affine.slope, first, second
        grad_input = _multiply_add(wide, slope, offset)
    else:
        mean, scale = normalizer.unbind()
        invstd = scale.rsqrt()
        factor = invstd if affine.weight is None else affine.weight.to(dtype) * invstd
        slope = -invstd * invstd * second
        offset = -invstd * first - slope * mean
        grad_input = torch.addcmul(per_channel(offset, input), wide, per_channel(slope, input))
    if grad_output is not None:
        grad_input.addcmul_(grad_output.to(dtype), per_channel(factor, input))
    return grad_input.to(input.dtype)
