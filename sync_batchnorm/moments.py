"""The arithmetic of batch statistics and their gradients, with the operators of torch that fit device and format.

No threads, no modules, no autograd nodes. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``;
``count`` is the number of elements of one channel. Vectors of length C that are merged are in float64 on the CPU and on
CUDA: they are tiny, and a mean that is large against the deviation needs the digits.

A scale is the quantity under the root of the inverse standard deviation, ``var + eps`` or ``max(var, eps)``: the
operators of torch for the CPU take it as their variance, with an eps of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__: list[str] = []

# Below this many elements a float64 copy of the input is cheaper than the calls that avoid it. Measured on two threads.
SMALL = 16384

_backward = torch.ops.aten.native_batch_norm_backward.default


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean, scale and gradient sums for inputs of `dtype`: float32 at the least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _merge_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


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
    dtype = _merge_dtype(input.device)
    if input.numel() == 0:
        return torch.zeros(2, input.shape[1], dtype=dtype, device=input.device)
    if input.device.type == "cuda":
        return torch.stack(torch.batch_norm_update_stats(input, None, None, 0.0)).to(dtype)
    if input.device.type != "cpu":
        var, mean = torch.var_mean(input.to(dtype), reduced_dims(input), correction=0)
        return torch.stack((mean, var))
    if input.numel() <= SMALL or input.dtype == torch.float64:
        return torch.stack(torch.batch_norm_update_stats(input.double(), None, None, 0.0))
    return _shifted_moments(input)


def _shifted_moments(input: Tensor) -> Tensor:
    """Return the moments from sums about a shift close to the mean, where squares do not cancel."""
    count = channel_count(input.shape)
    shift = input[0].float().mean(list(range(1, input.dim() - 1))) if input.dim() > 2 else input[:64].float().mean(0)
    centered = input - per_channel(shift, input)
    zero, one = torch.zeros_like(shift), torch.ones_like(shift)
    # One pass over `centered` gives the sum of its squares and its sum.
    _, squares, sums = _backward(centered, centered, None, zero, one, None, None, False, 0.0, [False, True, True])
    mean, mean_square = torch.stack((sums, squares)).double().div_(count).unbind()
    return torch.stack((mean + shift, (mean_square - mean * mean).clamp_(min=0)))


def merge_moments(moments: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances ``(2, C)`` of parts with `counts` elements into those of the whole, ``(C,)``.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for any
    number of parts at once. Differentiable. The order of summation is that of the arguments.
    """
    total = sum(counts)
    parts = [(part, count / total) for part, count in zip(moments, counts, strict=True) if count]
    weights = torch.tensor([weight for _, weight in parts], dtype=parts[0][0].dtype, device=parts[0][0].device)
    means, variances = torch.stack([part for part, _ in parts]).unbind(1)  # (R, 2, C) -> (R, C), (R, C)
    mean = weights @ means
    deviations = means - mean
    return mean, weights @ torch.addcmul(variances, deviations, deviations)


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
    if input.numel() == 0:
        return torch.zeros_like(input)
    # d mean / dx = 1 / n and d var / dx = 2 (x - mean) / n.
    wide = input.to(grad.dtype)
    grad_mean, grad_var = grad / channel_count(input.shape)
    centered = wide - per_channel(wide.mean(reduced_dims(input)), input)
    return (per_channel(grad_mean, input) + 2 * per_channel(grad_var, input) * centered).to(input.dtype)


def normalize(input: Tensor, normalizer: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``(input - mean) / sqrt(scale) * weight + bias`` in the dtype and memory format of `input`."""
    if input.numel() == 0:
        return torch.empty_like(input)
    mean, scale = normalizer.unbind()
    weight = weight if weight is None else weight.to(mean.dtype)
    bias = bias if bias is None else bias.to(mean.dtype)
    if input.device.type == "cpu":
        return torch.native_batch_norm(input, weight, bias, mean, scale, False, 0.0, 0.0)[0]
    if input.device.type == "cuda":
        return torch.batch_norm_elemt(input, weight, bias, mean, scale.rsqrt(), 0.0)
    return differentiable_normalize(input, normalizer, weight, bias)


def differentiable_normalize(input: Tensor, normalizer: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return what `normalize` does, in operations that autograd can differentiate any number of times."""
    mean, scale = normalizer.unbind()
    output = (input - per_channel(mean, input)) * per_channel(scale.rsqrt(), input)
    output = output if weight is None else output * per_channel(weight, input)
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


def gradient_sums(grad_output: Tensor, input: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sum_dy`` and ``sum_dy_xmu / sqrt(scale)`` of each channel, ``(C,)`` each, in the dtype of `normalizer`.

    They are the gradients of bias and weight, and all that the input gradient needs of the other elements.
    """
    mean, scale = normalizer.unbind()
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if input.device.type == "cpu":
        _, dot, total = _backward(grad_output, input, None, mean, scale, None, None, False, 0.0, [False, True, True])
        return total, dot
    dims = reduced_dims(input)
    if input.device.type == "cuda":
        invstd = scale.rsqrt()
        total, dot, _, _ = torch.batch_norm_backward_reduce(grad_output, input, mean, invstd, None, True, False, False)
        return total, dot * invstd
    normalized = differentiable_normalize(input.to(mean.dtype), normalizer, None, None)
    return grad_output.sum(dims, dtype=mean.dtype), (grad_output * normalized).sum(dims)


def input_gradient(
    grad_output: Tensor | None, input: Tensor, normalizer: Tensor, weight: Tensor | None, means: Tensor
) -> Tensor:
    """Return ``weight / sqrt(scale) * (dy - mean_dy - normalized input * mean_dy_normalized)``.

    Args:
        grad_output: the gradient of this part of the output; None if it takes no part in the loss.
        input: ``(N, C, +)``.
        normalizer: mean and scale, ``(2, C)``.
        weight: ``(C,)`` or None.
        means: the two `gradient_sums` over all replicas, divided by their common count, ``(2, C)``.
    """
    invstd = normalizer[1].rsqrt()
    factor = invstd if weight is None else weight * invstd
    offset, slope = (means * -factor).unbind()
    wide = input if input.dtype == normalizer.dtype else input.to(normalizer.dtype)
    grad_input = normalize(wide, normalizer, slope, offset)
    if grad_output is not None:
        grad_input.addcmul_(grad_output.to(normalizer.dtype), per_channel(factor, input))
    return grad_input.to(input.dtype)
