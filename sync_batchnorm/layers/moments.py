"""The function `sync_moments`: mean and variance over all replicas, for users who write their own norm layers.

The replicas send their mean, variance and count to each other through the public pipes (`SyncMaster` and `SlavePipe`).
All arithmetic is done by differentiable operators of torch, so that autograd computes gradients, and gradients of
gradients.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import processes
from ..backends.base import merge_moments, reduced_dims, single_value_error, statistics_dtype
from ..backends.streams import on_default_streams
from ..meeting import SlavePipe, SyncMaster
from ..torch_private import graph_task_id, uncompiled

__all__ = ["merge_messages", "sync_moments"]

# (mean, biased variance, number of elements per channel); mean and variance have the shape ``(C,)``.
Moments = tuple[Tensor, Tensor, int]
# The message of a replica: (mean and variance in one tensor ``(2, C)``, number of elements per channel, input shape).
Message = tuple[Tensor, int, torch.Size]


@uncompiled
def sync_moments(input: Tensor, pipe: SyncMaster | SlavePipe | None, *, process_group: Any = None) -> Moments:
    """Return mean, biased variance and count of each channel over the replicas of `pipe`, or over all processes.

    The call blocks its thread until all replicas have called the function. Mean and variance can be differentiated any
    number of times. See "Norms of your own" on the page "Extending".

    Example:
        >>> mean, var, count = sync_moments(torch.randn(4, 3, 5, 5), pipe=None)
        >>> mean.shape, count
        (torch.Size([3]), 100)

    Args:
        input: ``(N, C, +)``; N and ``+`` may differ between replicas.
        pipe: the `SyncMaster` or `SlavePipe` of this replica; None for the only replica of a process.
        process_group: the `torch.distributed` group to synchronize; None: all processes.

    Returns:
        mean and variance, ``(C,)``, in float32 (float64 for float64 inputs), and the elements per channel, an int.

    Raises:
        TypeError: if `input` is no tensor.
        ValueError: if `input` has less than two dimensions, or all replicas together a single value per channel.
        RuntimeError: if channels differ. With several replicas, also if `torch.distributed` joins processes, or during
            a recomputation by activation checkpointing. A `ReplicaSyncError` if replicas cannot exchange.
    """
    if not isinstance(input, Tensor):
        raise TypeError(
            f"expected an input tensor (N, C, +), but got {type(input).__name__}; pass a tensor, for example of "
            "torch.as_tensor"
        )
    if input.dim() < 2:
        raise ValueError(f"expected an input (N, C, +), but got {input.dim()} dimensions; add one, as in input[None]")
    group = processes.active_group(process_group)
    if pipe is not None and not (isinstance(pipe, SyncMaster) and pipe.nr_slaves == 0):
        if group is not None:
            raise RuntimeError(processes.ONE_PROCESS_A_DEVICE.format(pipe.where))
        if graph_task_id() != -1:
            raise RuntimeError(
                f"expected sync_moments outside checkpoints, but got a recomputation in a backward pass ({pipe.where})"
                "; leave the norm out of the checkpointed function"
            )
    devices = () if pipe is None else (input.device,)
    return on_default_streams(devices, (input,), _exchange_moments, input, pipe, group)


def _exchange_moments(input: Tensor, pipe: SyncMaster | SlavePipe | None, group: Any) -> Moments:
    """Merge the mean and variance of `input` with those of other processes.

    If `group` is None, merge the mean and variance with those of the other replicas instead.
    """
    values, dims = input.to(statistics_dtype(input.dtype)), reduced_dims(input)
    count = input.shape[0] * math.prod(input.shape[2:])
    var, mean = torch.var_mean(values, dims, correction=0) if count else (values.sum(dims), values.sum(dims))
    # Merge the values of all processes by operators that autograd can differentiate.
    if group is not None:
        peers = processes.Peers(group, "sync_moments")
        sums = peers.all_reduce(torch.cat((mean * count, mean.new_full((1,), count))))
        total = sums[-1].clamp(min=1)
        deviations = mean - sums[:-1] / total
        squares = peers.all_reduce((var + deviations * deviations) * count)
        mean, var, count = sums[:-1] / total, squares / total, int(sums[-1])
    message = torch.stack((mean, var)), count, input.shape
    if pipe is None:
        ((_, moments),) = _merge_and_answer([(None, message)])
    else:
        moments = pipe.run(message)
    mean, var, count = moments
    return mean.clone(), var.clone(), count  # The user may change the returned tensors in place, so return copies.


def merge_messages(messages: list[tuple[Hashable, Message]]) -> Sequence[tuple[Hashable, Moments]]:
    """Merge the moments of all replicas; the callback of a `SyncMaster` for `sync_moments`."""
    devices = dict.fromkeys([mean_var.device for _, (mean_var, _, _) in messages])
    return on_default_streams(devices, (), _merge_and_answer, messages)


def _merge_and_answer(messages: list[tuple[Hashable, Message]]) -> Sequence[tuple[Hashable, Moments]]:
    """Merge the moments of all messages on the first device, and move the result to the device of each message."""
    mean_vars = [mean_var for _, (mean_var, _, _) in messages]
    counts = [elements for _, (_, elements, _) in messages]
    count = sum(counts)
    if count == 1:
        raise single_value_error([shape for _, (_, _, shape) in messages])
    device = mean_vars[0].device
    with torch.enable_grad():
        moved = [mean_var.to(device, non_blocking=True) for mean_var in mean_vars]
        means, variances = torch.stack(moved, 1)  # (2, R, C)
        fractions = torch.cat([means.new_full((1, 1), elements / max(count, 1)) for elements in counts])
        merged = torch.stack(merge_moments(means, variances, fractions))
        answers = [merged.to(mean_var.device, non_blocking=True).unbind() for mean_var in mean_vars]
    return [(identifier, (mean, var, count)) for (identifier, _), (mean, var) in zip(messages, answers, strict=True)]
