"""The arithmetic of the normalization and its gradients, with the operators of torch that fit device and format.

No threads, no modules, no autograd. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``; vectors
are ``(C,)``. On CUDA and elsewhere vectors are in the dtype of the statistics. On the CPU mean and inverse standard
deviation are in float64; the factors and offsets that a pass over the input needs are rounded once, such that their
errors cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sync_batchnorm.moments import cached_constants, operators_for, per_channel, statistics_dtype

__all__: list[str] = []

batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_normalize_into = torch.ops.aten.native_batch_norm.out


class Statistics(NamedTuple):
    """What all replicas normalize with, on one device, outside of the autograd graph."""

    mean: Tensor
    invstd: Tensor


class Affine(NamedTuple):
    """On the CPU the output is ``input * slope + offset``, in the dtype of the statistics."""

    slope: Tensor
    offset: Tensor


def make_affine(statistics: Statistics, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> Affine:
    """Return the normalization of inputs of `dtype` as a multiplication and an addition.

    The offset is made from the rounded slope and the unrounded mean, so that it cancels the mean to the last digit.
    """
    mean, invstd = statistics
    dtype = statistics_dtype(dtype)
    slope = (invstd if weight is None else invstd * weight).to(dtype)
    offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
    return Affine(slope, offset.to(dtype))


def memory_for_output(input: Tensor, memory: Tensor | None = None) -> Tensor:
    """Return memory with the shape, dtype and strides that the output of `torch.nn.BatchNorm2d` has.

    `memory`, if given, is contiguous and of the size of `input`.
    """
    if not input.is_contiguous() and _looks_channels_last(input):
        return torch.empty_like(input, memory_format=_CHANNELS_LAST[input.dim()])
    return memory if memory is not None else torch.empty_like(input, memory_format=torch.contiguous_format)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _looks_channels_last(input: Tensor) -> bool:
    """Return whether torch makes a channels_last output of `input`: channels lie side by side, rows in their order."""
    if input.dim() not in _CHANNELS_LAST:
        return False
    if input.is_contiguous(memory_format=_CHANNELS_LAST[input.dim()]):  # whatever the strides of sizes of one
        return True
    strides, least = input.stride(), 1
    for dim in (1, *range(input.dim() - 1, 1, -1), 0):
        if strides[dim] < least:
            return False
        least = strides[dim] * max(input.shape[dim], 1)
    return True


@cached_constants
def _zeros_and_ones(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(length, dtype=dtype, device="cpu")
    return zeros, torch.ones_like(zeros)


def multiply_add(input: Tensor, slope: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``input * slope + offset`` on the CPU, in the dtype and memory format of `input`, in one pass.

    `out` is memory for the result, or None to take some.
    """
    if input.dtype == slope.dtype and input.stride(1) == 1 and not input.is_contiguous():
        return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input), out=out)
    zeros, ones = _zeros_and_ones(len(slope), slope.dtype)
    if out is None:
        return torch.native_batch_norm(input, slope, offset, zeros, ones, False, 0.0, 0.0)[0]
    unused = slope.new_empty(0)
    _normalize_into(input, slope, offset, zeros, ones, False, 0.0, 0.0, out=out, save_mean=unused, save_invstd=unused)
    return out


def normalize(
    input: Tensor,
    statistics: Statistics,
    affine: Affine | None,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Write ``(input - mean) * invstd * weight + bias`` into `out`."""
    if input.numel() == 0:
        return
    operators = operators_for(input.device)
    if operators == "cpu":
        affine = affine or make_affine(statistics, input.dtype, weight, bias)
        multiply_add(input, *affine, out=out)
    elif operators == "cuda":
        torch.batch_norm_elemt(input, weight, bias, *statistics, 0.0, out=out)
    else:
        mean, scale = statistics if weight is None else (statistics.mean, statistics.invstd * weight)
        centered = input - per_channel(mean, input)
        if bias is None:
            torch.mul(centered, per_channel(scale, input), out=out)
        else:
            torch.addcmul(per_channel(bias, input), centered, per_channel(scale, input), out=out)


def gradient_sums(grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over the elements of one replica of ``dy`` and of ``dy * (x - mean) * invstd``; on the CPU.

    Mean and invstd, and the sums, are in the dtype of the statistics.
    """
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if grad_output.stride() != input.stride():
        # Of two formats that differ in the strides of sizes of one, the operator makes wrong sums (torch 2.13.0).
        usual = input.is_contiguous() or not _looks_channels_last(input)
        memory_format = torch.contiguous_format if usual else _CHANNELS_LAST[input.dim()]
        grad_output = grad_output.contiguous(memory_format=memory_format)
    _, dot, total = batch_norm_backward(
        grad_output, input, None, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return total, dot


def linear_gradient(
    statistics: Statistics, totals: Tensor, factor: Tensor, count: int | Tensor, dtype: torch.dtype
) -> Affine:
    """Return the part of the input gradient that is linear in the input; on the CPU.

    It is ``-factor / N * (sum_dy + (input - mean) * invstd * sum_dy_normalized)``.

    Args:
        statistics: of the forward.
        totals: ``sum_dy`` and ``sum_dy_normalized`` of all replicas, ``(2, C)``.
        factor: ``weight * invstd``; or ``invstd``, if each replica has weighted its sums already.
        count: N, elements per channel in all replicas.
        dtype: of the inputs.
    """
    first, second = (totals * factor).div_(-count).unbind()
    # Rounded as it will be used, so that the offset cancels the mean to the last digit.
    slope = (second * statistics.invstd).to(statistics_dtype(dtype))
    return Affine(slope, torch.addcmul(first, slope, statistics.mean, value=-1).to(slope.dtype))


def input_gradient(grad_output: Tensor | None, input: Tensor, factor: Tensor, linear: Affine) -> Tensor:
    """Return the gradient of the synchronized normalization by the input of one replica; on the CPU.

    Args:
        grad_output: the gradient of its output; None if it takes no part in the loss.
        input: ``(N, C, +)``.
        factor: ``weight * invstd`` of this replica.
        linear: from `linear_gradient`.
    """
    if input.numel() == 0:
        return torch.zeros_like(input)
    dtype = statistics_dtype(input.dtype)
    wide = input if input.dtype == dtype else input.to(dtype)
    slope, offset = linear
    grad_input = multiply_add(wide, slope, offset)
    if grad_output is not None:
        grad_input.addcmul_(grad_output.to(dtype), per_channel(factor, input))
    return grad_input.to(input.dtype)


def fused_gradient_sums(
    grad_output: Tensor,
    input: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the sums of ``dy`` and ``dy * (x - mean)``, and the gradients of weight and bias, if wanted; on CUDA."""
    if input.numel() == 0:
        nothing = torch.zeros_like(statistics.mean)
        return (nothing,) * 4
    # Without a weight, the operator does not know the dtype of these gradients.
    wants = [wants_weight and weight is not None, wants_bias and weight is not None]
    mean, invstd = statistics
    sums = torch.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, True, *wants)
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = sums
    return sum_dy, sum_dy_xmu, grad_weight, grad_bias if weight is not None else sum_dy


def fused_input_gradient(
    grad_output: Tensor | None,
    input: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    totals: Tensor,
    count: Tensor,
    weighted: bool,
) -> Tensor:
    """Return what `input_gradient` returns, on CUDA.

    Args:
        grad_output, input: as there.
        statistics: of the forward.
        weight: of this replica.
        totals: ``sum_dy`` and ``sum_dy_xmu`` of all replicas, ``(2, C)``, on the device of the input.
        count: elements per channel in all replicas, ``(1,)`` in int32.
        weighted: whether the totals are sums of what each replica has multiplied with its own weight.
    """
    if input.numel() == 0:
        return torch.zeros_like(input)
    if grad_output is None:
        grad_output = torch.zeros_like(input)
    elif weighted and weight is not None:
        grad_output = (grad_output * per_channel(weight, input)).to(input.dtype)
    if not input.is_contiguous() and _looks_channels_last(input):  # or the operator returns a contiguous gradient
        grad_output = grad_output.contiguous(memory_format=_CHANNELS_LAST[input.dim()])
    if weighted or weight is None:
        weight = None
    elif weight.dtype != statistics.mean.dtype:  # which this operator wants for contiguous inputs
        weight = weight.to(statistics.mean.dtype)
    mean, invstd = statistics
    return torch.batch_norm_backward_elemt(grad_output, input, mean, invstd, weight, totals[0], totals[1], count)
