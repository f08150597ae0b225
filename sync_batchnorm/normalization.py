"""The arithmetic of the normalization and its gradients, with the operators of torch that fit device and format.

No threads, no modules, no autograd nodes. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``.

A scale is the quantity under the root of the inverse standard deviation, ``var + eps`` or ``max(var, eps)``: the
operators of torch for the CPU take it as their variance, with an eps of zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sync_batchnorm import moments
from sync_batchnorm.moments import kind, per_channel, reduced_dims

__all__: list[str] = []

_backward = torch.ops.aten.native_batch_norm_backward.default
_normalize_into = torch.ops.aten.native_batch_norm.out


@dataclass(frozen=True)
class Affine:
    """What the replicas of one device need to normalize and to finish their input gradients, beside their own input."""

    mean: Tensor  # (C,), float64 on the CPU and on CUDA, as `invstd`
    invstd: Tensor  # 1 / sqrt(scale)
    weight: Tensor | None = None
    slope: Tensor | None = None  # on the CPU the output is input * slope + offset, in the dtype of the statistics
    offset: Tensor | None = None

    @functools.cached_property
    def rounded_off(self) -> Tensor | None:
        """By how much the rounding of the mean moves all normalized values of a channel, ``(C,)``; None if it is exact.

        Needed in a backward alone, and there by all replicas.
        """
        if self.slope is None or self.slope.dtype == self.mean.dtype:
            return None
        return ((self.mean.to(self.slope.dtype) - self.mean) * self.invstd).to(self.slope.dtype)


def make_affine(mean: Tensor, scale: Tensor, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> Affine:
    """Prepare the normalization by `mean` and `scale`, with statistics of `dtype`, for all replicas of a device.

    The offset is made from the rounded slope and the unrounded mean, so that it cancels the mean to the last digit.
    """
    invstd = scale.rsqrt()
    if kind(mean.device) != "cpu":
        return Affine(mean, invstd, weight)
    slope = (invstd if weight is None else invstd * weight).to(dtype)
    offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
    return Affine(mean, invstd, None, slope, offset.to(dtype))


def memory_for_output(input: Tensor) -> Tensor | None:
    """Return the memory for the normalized `input`, if `local_moments` has a use for it before; else None.

    The output of torch has the format of the input where that is contiguous or channels_last; of others, not always.
    """
    usual = input.is_contiguous() or input.stride(1) == 1
    if usual and kind(input.device) == "cpu" and input.dtype == torch.float32 and not moments.is_small(input):
        return torch.empty_like(input)
    return None


@functools.lru_cache(maxsize=256)
def _constants(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return zeros and ones, which the operators want as mean and variance of what is normalized already."""
    with torch.inference_mode(False):
        return torch.zeros(length, dtype=dtype), torch.ones(length, dtype=dtype)


def multiply_add(input: Tensor, slope: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``input * slope + offset`` on the CPU, in the dtype and memory format of `input`, in one pass.

    Args:
        input: ``(N, C, +)``.
        slope: ``(C,)``, in the dtype of the statistics.
        offset: as `slope`.
        out: memory for the result, as `input`; None to take some.
    """
    if input.dtype == slope.dtype and input.stride(1) == 1:
        return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input), out=out)
    constants = _constants if moments.is_real(slope) else _constants.__wrapped__
    zero, one = constants(len(slope), slope.dtype)
    if out is None:
        return torch.native_batch_norm(input, slope, offset, zero, one, False, 0.0, 0.0)[0]
    unused = slope.new_empty(0)
    _normalize_into(input, slope, offset, zero, one, False, 0.0, 0.0, out=out, save_mean=unused, save_invstd=unused)
    return out


def normalize(
    input: Tensor, normalizer: Tensor, affine: Affine, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Return ``(input - mean) / sqrt(scale) * weight + bias`` in the dtype and memory format of `input`.

    `out` is the memory for it, as `input`, or None to take some.
    """
    if input.numel() == 0:
        return torch.empty_like(input)
    if affine.slope is not None and affine.offset is not None:
        return multiply_add(input, affine.slope, affine.offset, out)
    mean, scale = normalizer.unbind()
    weight = affine.weight if affine.weight is None else affine.weight.to(mean.dtype)
    if kind(input.device) == "cuda":
        bias = bias if bias is None else bias.to(mean.dtype)
        return torch.batch_norm_elemt(input, weight, bias, mean, scale.rsqrt(), 0.0)
    return differentiable_normalize(input, normalizer, weight, bias)


def differentiable_normalize(input: Tensor, normalizer: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return what `normalize` does, in operations that autograd can differentiate any number of times."""
    mean, invstd = normalizer[0], normalizer[1].rsqrt()
    normalized = (input - per_channel(mean, input)) * per_channel(invstd, input)
    return weigh(normalized, weight, bias).to(input.dtype)


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
    if kind(input.device) == "cpu":
        _, dot, total = _backward(grad_output, input, None, mean, scale, None, None, False, 0.0, [False, True, True])
        return total, dot if affine.rounded_off is None else dot.addcmul_(total, affine.rounded_off)
    dims = reduced_dims(input)
    if kind(input.device) == "cuda":
        invstd = scale.rsqrt()
        total, dot, _, _ = torch.batch_norm_backward_reduce(grad_output, input, mean, invstd, None, True, False, False)
        return total, dot * invstd
    normalized = differentiable_normalize(input.to(mean.dtype), normalizer, None, None)
    return grad_output.sum(dims, dtype=mean.dtype), (grad_output * normalized).sum(dims)


def weigh_sums(sums: Tensor, affine: Affine) -> Tensor:
    """Return the `gradient_sums` of a replica as `gradient_coefficients` wants to add them up.

    Multiplied by the weight of the replica, which on another device may have other values. On the CPU the replicas of
    one `Affine` share the weight, and their total is multiplied once.
    """
    return sums if affine.weight is None else sums * affine.weight


def gradient_coefficients(sums: Tensor, count: int, affine: Affine) -> Tensor:
    """Return what `input_gradient` needs of the `gradient_sums` over all replicas, ``(2, C)``.

    The input gradient is ``weight / sqrt(scale) * (dy - mean_dy - (input - mean) / sqrt(scale) * mean_dy_normalized)``.
    On the CPU, these are the slope and the offset of the part that is linear in the input. Elsewhere they are the two
    means, of sums that went through `weigh_sums`.
    """
    means = sums / count
    if affine.slope is None:
        return means
    mean_dy, mean_dy_normalized = (means * -affine.slope).unbind()
    slope = mean_dy_normalized * affine.invstd
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
        grad_input = multiply_add(wide, slope, offset)
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
