"""Batch normalization on CUDA, with the operators that `torch.nn.SyncBatchNorm` uses."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .base import (
    Backend,
    Backward,
    BatchStatistics,
    Pair,
    ReplicaGradients,
    ReplicaStatistics,
    RunningStatistics,
    channel_count,
    format_of,
    per_channel,
)
from .places import Place, current_place

__all__: list[str] = []


class Cuda(Backend):
    merge_dtype = torch.float64

    def statistics(self, input: Tensor, eps: float, adds_eps: bool) -> tuple[ReplicaStatistics, Tensor | None]:
        count = channel_count(input.shape)
        if adds_eps:
            mean, invstd = torch.batch_norm_stats(input, eps)
            return ReplicaStatistics(mean, invstd, True, count), None
        mean, var = torch.batch_norm_update_stats(input, None, None, 0.0)
        return ReplicaStatistics(mean[None], var[None], False, count), None

    def merge(
        self, replicas: Sequence[ReplicaStatistics], eps: float, running: RunningStatistics | None
    ) -> BatchStatistics:
        """Merge and update the running statistics with one operator, if there are inverse standard deviations."""
        vectors: list[Tensor] = []
        counts: tuple[int, ...] = ()
        for replica in replicas:
            if replica.is_invstd:
                vectors += (replica.mean, replica.second) if replica.place is None else (replica.mean,)
                counts += (replica.elements,)
        if not vectors:
            return super().merge(replicas, eps, running)
        stacked = torch.cat(vectors).view(2 * len(counts), -1)
        means, invstds = stacked.view(len(counts), 2, -1).unbind(1)
        momentum, buffers, updated = 0.0, (None, None), running is not None and running.suits(stacked.dtype)
        if running is not None and updated:
            momentum, buffers = running.count_call(), (running.mean.data, running.var.data)
        on_device = _counts(current_place(stacked.device), counts, stacked.dtype)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            stacked, means, invstds, *buffers, momentum, eps, on_device
        )
        return BatchStatistics(mean, None, invstd, updated)

    def normalize(self, input: Tensor, pair: Pair, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
        mean, invstd = pair
        torch.batch_norm_elemt(input, weight, bias, mean, invstd, 0.0, out=out)

    def gradient_sums(self, replica: ReplicaGradients, backward: Backward) -> tuple[Tensor, Tensor]:
        mean, invstd = backward.at[replica.place]
        input, weight, grad_output = replica.input, replica.weight, cast(Tensor, replica.grad_output)
        if input.numel() == 0:
            replica.grad_weight = replica.grad_bias = nothing = torch.zeros_like(mean)
            return nothing, nothing
        sum_dy, sum_dy_xmu, replica.grad_weight, _ = torch.batch_norm_backward_reduce(
            grad_output, input, mean, invstd, weight, True, weight is not None, False
        )
        replica.grad_bias = sum_dy
        if backward.own_weights and weight is not None:
            return sum_dy * weight, sum_dy_xmu * weight
        return sum_dy, sum_dy_xmu

    def common_terms(self, totals: Tensor, backward: Backward) -> Tensor:
        """Return the totals; if the count is a tensor, divided by it, and `input_gradient` passes a count of one."""
        count, totals = backward.batch.count, backward.without_clamped(totals)
        return totals / count if isinstance(count, Tensor) else totals

    def input_gradient(self, replica: ReplicaGradients, terms: Tensor, backward: Backward) -> Tensor:
        input, grad_output, weight = replica.input, replica.grad_output, replica.weight
        if input.numel() == 0:
            return torch.zeros_like(input)
        if grad_output is None:
            grad_output = torch.zeros_like(input)
        elif backward.own_weights and weight is not None:
            grad_output = (grad_output * per_channel(weight, input)).to(input.dtype)
        if not input.is_contiguous():  # or the gradient of a channels_last input would be contiguous
            grad_output = grad_output.contiguous(memory_format=format_of(input))
        mean, invstd = backward.at[replica.place]
        if backward.own_weights:
            weight = None
        elif weight is not None and weight.dtype != mean.dtype:  # contiguous inputs need one dtype
            weight = weight.to(mean.dtype)
        count = backward.batch.count if isinstance(backward.batch.count, int) else 1
        counts = _counts(replica.place, (count,), torch.int32)
        return torch.batch_norm_backward_elemt(grad_output, input, mean, invstd, weight, terms[0], terms[1], counts)


_made: dict[tuple[Place, tuple[int, ...], torch.dtype], Tensor] = {}


def _counts(place: Place, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `counts` as a vector on the device of `place`, for use on its stream alone."""
    vector = _made.get((place, counts, dtype))
    if vector is None:
        # Kernels fill it: to copy a list to the device, the host would have to wait.
        with torch.inference_mode(False):
            vector = torch.cat([torch.full((1,), count, dtype=dtype, device=place.device) for count in counts])
        if len(_made) >= 1024:
            _made.clear()
        # A CUDA graph fills its tensors only when it is replayed, and `FakeTensorMode` never does.
        if type(vector) is Tensor and not torch.cuda.is_current_stream_capturing():
            _made[place, counts, dtype] = vector
    return vector
