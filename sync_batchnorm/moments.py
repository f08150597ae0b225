"""The arithmetic of batch statistics: of one input, merged, and their gradients.

No threads, no modules, no autograd nodes. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``;
``count`` is the number of elements of one channel. Vectors of length C that are merged are in float64 on the CPU and on
CUDA: they are tiny, and a mean that is large against the deviation needs the digits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__: list[str] = []

# Up to this many elements a float64 copy of the input costs less than the calls that avoid it; the kernel for channels
# that lie side by side is the faster one. Measured on two cores, torch 2.13.0.
SMALL, SMALL_CHANNELS_LAST = 32768, 131072

# Elements at a time where there is no memory to center all of the input in.
CHUNK = 262144


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean, scale and gradient sums for inputs of `dtype`: float32 at the least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Where torch has operators for batch statistics; elsewhere general ones do.
FUSED = ("cpu", "cuda")


def kind(device: torch.device) -> str:
    """Return the type of `device` if torch has operators for batch statistics there, else "other"."""
    return device.type if device.type in FUSED else "other"


def _merge_dtype(input: Tensor) -> torch.dtype:
    return statistics_dtype(input.dtype) if kind(input.device) == "other" else torch.float64


def channel_count(shape: torch.Size) -> int:
    """Return the number of elements of one channel of an input of `shape`."""
    return shape[:1].numel() * shape[2:].numel()


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector ``(C,)`` so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector


def reduced_dims(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def is_small(input: Tensor) -> bool:
    """Tell whether `local_moments` of `input` on the CPU are those of a copy in float64."""
    return input.numel() <= (SMALL_CHANNELS_LAST if input.stride(1) == 1 else SMALL)


def local_moments(input: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return mean and biased variance of each channel, ``(2, C)``; zeros for an input without elements.

    Args:
        input: ``(N, C, +)``.
        scratch: as `input`, in float32, to overwrite; None to take the little memory that parts of the input need.
    """
    dtype = _merge_dtype(input)
    if input.numel() == 0:
        return torch.zeros(2, input.shape[1], dtype=dtype, device=input.device)
    if kind(input.device) == "cuda":
        return torch.stack(torch.batch_norm_update_stats(input, None, None, 0.0)).to(dtype)
    if kind(input.device) != "cpu":
        var, mean = torch.var_mean(input.to(dtype), reduced_dims(input), correction=0)
        return torch.stack((mean, var))
    if is_small(input) or input.dtype == torch.float64:
        return torch.stack(torch.batch_norm_update_stats(input.double(), None, None, 0.0))
    if scratch is not None:
        return _shifted_moments(input, scratch)
    parts = torch.split(input, max(1, CHUNK // input[0].numel()))
    counts = [channel_count(part.shape) for part in parts]
    return torch.stack(merge_moments([_shifted_moments(part.float()) for part in parts], counts))


def _shifted_moments(input: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return the moments of float32 numbers from sums about their mean, as float32 has it.

    The sum of what is left about that mean then corrects both.
    """
    dims = reduced_dims(input)
    shift = input.mean(dims)
    centered = torch.sub(input, per_channel(shift, input), out=scratch)
    sums = torch.stack((centered.sum(dims), centered.mul_(centered).sum(dims))).double()
    mean, var = sums.div_(channel_count(input.shape)).unbind()
    var.addcmul_(mean, mean, value=-1).clamp_(min=0)
    mean += shift
    return sums


def is_real(tensor: Tensor) -> bool:
    """Tell whether what is computed from `tensor` may be kept: not of tensors without memory, and the like."""
    return type(tensor) is Tensor


def _weights(counts: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the share of each of `counts` in their sum, ``(R, 1)``, of the dtype and on the device of `like`."""
    make = _weights_of_stream if is_real(like) else _weights_of_stream.__wrapped__
    stream = torch.cuda.current_stream(like.device).stream_id if like.is_cuda else 0
    return make(counts, like.dtype, like.device, stream)


@functools.lru_cache(maxsize=256)
def _weights_of_stream(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    # One tensor for each stream, since another one would have to wait for it. Filled and not copied: for a copy from
    # its own memory the host waits.
    with torch.inference_mode(False):
        shares = [torch.full((1, 1), count / sum(counts), dtype=dtype, device=device) for count in counts]
        return torch.cat(shares)


def merge_moments(moments: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances ``(2, C)`` of parts with `counts` elements into those of the whole, ``(C,)``.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for any
    number of parts at once. Differentiable. The order of summation is that of the arguments.
    """
    parts = [part for part, count in zip(moments, counts, strict=True) if count]
    weights = _weights(tuple(count for count in counts if count), parts[0])
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
