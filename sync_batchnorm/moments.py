"""The arithmetic of batch statistics: of the input of one replica, and merged over replicas.

No threads, no modules, no autograd. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``; a count
is a number of elements per channel.

NOTE [fast and exact statistics]: On the CPU one operator makes the statistics of an input in one pass. Its variance is
good to 1e-6 while ``mean^2 <= 256 * (var + eps)``, and useless where the mean is 1e4 standard deviations. So a replica
looks at what it has found, and where that is not `precise` makes the exact statistics: those of the input minus the
mean that was found, which are good to 1e-6 at any ratio. If the statistics of all replicas are precise, so are the
merged ones: the square of a mean of means is no larger than the mean of their squares, and the variances count fully.
Nothing is remembered: the statistics of a batch depend on the batch and eps alone, also in a run that is resumed. On
the CPU the merge itself is in float64, since its vectors are tiny.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

# The largest `mean^2 / (var + eps)` with fast statistics: measured on random and adversarial inputs, see numerics.md.
LARGEST_RATIO = 256.0

# The operator for channels that lie side by side adds up rows one after the other. If the input is viewed as fewer and
# wider rows, fewer digits are lost.
WIDTH = 2048

# Where torch has operators for batch statistics; elsewhere general ones do.
FUSED = ("cpu", "cuda")


class Moments(NamedTuple):
    """Means and biased variances of K equal parts of an input, ``(K, C)`` each."""

    mean: Tensor
    var: Tensor
    elements: int  # per channel, of one part


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of inputs of `dtype`: float32 at the least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operators_for(device: torch.device) -> str:
    """Return the type of `device` if torch has operators for batch statistics there, else "other"."""
    return device.type if device.type in FUSED else "other"


def channel_count(shape: torch.Size) -> int:
    """Return the number of elements per channel of an input of `shape`."""
    return shape[0] * math.prod(shape[2:])


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector ``(C,)`` so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector


def reduced_dims(input: Tensor) -> list[int]:
    """Return all dimensions but that of the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def local_moments(input: Tensor, eps: float) -> tuple[Moments, Tensor | None]:
    """Return the moments of `input`, and memory for the output.

    Args:
        input: ``(N, C, +)``.
        eps: what will be added to the variance, see NOTE [fast and exact statistics].

    Returns:
        The moments; and, if there is any, memory that is of no more use, as `normalization.memory_for_output` makes it.
    """
    dtype = statistics_dtype(input.dtype)
    if input.numel() == 0:
        nothing = input.new_zeros(1, input.shape[1], dtype=dtype)
        return Moments(nothing, nothing, 0), None
    operators, count = operators_for(input.device), channel_count(input.shape)
    if operators == "cpu":
        found, memory = fast_moments(input)
        # First each part for itself: two calls, which are enough for nearly every input.
        if not precise(found.mean, found.var, eps) and not precise(*merge_moments([found]), eps):
            found = exact_moments(input, found, memory)
        return found, memory
    if operators == "cuda":
        mean, var = torch.batch_norm_update_stats(input, None, None, 0.0)
    else:
        var, mean = torch.var_mean(input.to(dtype), reduced_dims(input), correction=0)
    return Moments(mean[None], var[None], count), None


def exact_moments(input: Tensor, found: Moments, memory: Tensor | None) -> Moments:
    """Return the exact moments of `input` on the CPU, from the fast ones and their memory, which is overwritten."""
    # What is not finite would spoil what is.
    shift = torch.nan_to_num(found.mean.mean(0), 0.0, 0.0, 0.0)
    room = memory if memory is not None and memory.dtype == shift.dtype else None
    mean, var, elements = fast_moments(torch.sub(input, per_channel(shift, input), out=room))[0]
    mean = mean.double() + shift
    overflown = ~(mean.isfinite() & var.isfinite()).all(0)
    if bool(overflown.any()):
        # As torch: the mean of what is Inf is Inf; if only squares are too large, the variance alone is.
        wide = input[:, overflown].double()
        dims, count = reduced_dims(wide), channel_count(wide.shape)
        mean[:, overflown] = wide.sum(dims) / count
        wide -= per_channel(mean[0, overflown], wide)
        var[:, overflown] = (wide.square_().sum(dims) / count).to(var.dtype)
    return Moments(mean, var, elements)


def fast_moments(input: Tensor) -> tuple[Moments, Tensor | None]:
    """Return the fast moments of `input` on the CPU, and memory for the output."""
    size, channels = len(input), input.shape[1]
    half = input.dtype in (torch.float16, torch.bfloat16)
    if input.dim() == 2 or not input.is_contiguous():
        side_by_side = input.movedim(1, -1)
        if side_by_side.is_contiguous():
            rows = input.numel() // channels
            split = _split(rows, channels)
            view = side_by_side.as_strided((rows // split, split * channels), (split * channels, 1))
            # Half inputs get statistics in float32 where the running ones are: these are thrown away.
            unused = torch.zeros(split * channels, dtype=torch.float32, device="cpu") if half else None
            mean, var = torch.batch_norm_update_stats(view, unused, None if unused is None else unused.clone(), 0.0)
            return Moments(mean.view(split, channels), var.view(split, channels), rows // split), None
        input = input.contiguous()
    # Each channel of each sample is a group. Half inputs get statistics in float32 where weight and bias are.
    length = input.numel() // (size * channels)
    weight = torch.ones(channels, dtype=torch.float32, device="cpu") if half else None
    bias = torch.zeros_like(weight) if weight is not None else None
    memory, mean, invstd = torch.native_group_norm(input, weight, bias, size, channels, length, channels, 0.0)
    return Moments(mean, invstd.pow(-2), length), memory


def cached_constants(make: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Keep the small constant tensors that `make` returns for its arguments, as long as they are not too many.

    Not those of a mode that makes tensors of another kind, as `FakeTensorMode` does: they would end up in later calls.
    """
    found: dict[Any, tuple[Tensor, ...]] = {}

    def get(*key: Any) -> tuple[Tensor, ...]:
        tensors = found.get(key)
        if tensors is None:
            with torch.inference_mode(False):
                tensors = make(*key)
            if len(found) >= 1024:
                found.clear()
            if all(type(tensor) is Tensor for tensor in tensors):
                found[key] = tensors
        return tensors

    return get


@cached_constants
def _counts(device: torch.device, _: Any, counts: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    # Filled by kernels: from a list, the host would have to copy it, and wait.
    if len(set(counts)) == 1:
        return (torch.full((len(counts),), counts[0], dtype=dtype, device=device),)
    return (torch.cat([torch.full((1,), count, dtype=dtype, device=device) for count in counts]),)


def counts_on(
    device: torch.device, stream: torch.cuda.Stream | None, counts: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return `counts` as a vector on `device`, for use in `stream`, the current one, alone."""
    return _counts(device, stream, counts, dtype)[0]


@functools.lru_cache(maxsize=1024)
def _split(rows: int, channels: int) -> int:
    """Return in how many equal parts to cut `rows` of `channels`: as many as fit beside each other."""
    return next((parts for parts in range(min(rows, WIDTH // channels), 1, -1) if rows % parts == 0), 1)


def merge_moments(moments: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances of all parts into those of the whole, ``(C,)`` each.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for any
    number of parts at once. In float64 on the CPU and on CUDA. The order of summation is that of the arguments.
    """
    parts = [part for part in moments if part.elements] or moments[:1]
    first = parts[0].mean
    dtype = torch.float64 if operators_for(first.device) != "other" else first.dtype
    mean = torch.cat([part.mean for part in parts]).to(dtype)
    var = torch.cat([part.var for part in parts]).to(dtype)
    if len({part.elements for part in parts}) == 1:
        merged = mean.mean(0)
        deviations = mean - merged
        return merged, torch.addcmul(var, deviations, deviations).mean(0)
    total = sum(part.elements * len(part.mean) for part in parts)
    shares = torch.cat([mean.new_full((len(part.mean), 1), part.elements / total) for part in parts])
    merged = (mean * shares).sum(0)
    deviations = mean - merged
    return merged, (torch.addcmul(var, deviations, deviations) * shares).sum(0)


def precise(mean: Tensor, var: Tensor, eps: float) -> bool:
    """Return whether fast statistics are good enough, see NOTE [fast and exact statistics]."""
    if type(mean) is not Tensor:  # a stand-in without values, as in `FakeTensorMode`
        return True
    lowest, highest = torch.aminmax(torch.addcmul(var, mean, mean, value=-1 / LARGEST_RATIO))
    return lowest.item() >= -eps and highest.item() < math.inf
