"""Batch normalization on any device, in operators that every device has and that autograd can differentiate.

Every device uses these gradients if a backward will be differentiated again, see NOTE [gradients of gradients] in
`autograd.py`. In a second backward, the threads of several devices add up the gradients of one tensor in any order. So
each further use of a tensor takes a view: then at most two gradients arrive at a tensor, in either order the same sum.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .base import (
    Backend,
    Backward,
    Pair,
    ReplicaGradients,
    ReplicaStatistics,
    channel_count,
    per_channel,
    reduced_dims,
    statistics_dtype,
)

__all__: list[str] = []


class General(Backend):
    def statistics(self, input: Tensor, eps: float, adds_eps: bool) -> tuple[ReplicaStatistics, Tensor | None]:
        var, mean = torch.var_mean(input.to(statistics_dtype(input.dtype)), reduced_dims(input), correction=0)
        return ReplicaStatistics(mean[None], var[None], False, channel_count(input.shape)), None

    def normalize(
        self, input: Tensor, normalizer: Pair, weight: Tensor | None, bias: Tensor | None, out: Tensor
    ) -> None:
        mean, invstd = normalizer
        factor = per_channel(invstd if weight is None else invstd * weight, input)
        centered = input - per_channel(mean, input)
        if bias is None:
            torch.mul(centered, factor, out=out)
        else:
            torch.addcmul(per_channel(bias, input), centered, factor, out=out)

    def gradient_sums(self, replica: ReplicaGradients, backward: Backward) -> tuple[Tensor, Tensor]:
        """Return what this replica adds to the gradients of mean and inverse standard deviation."""
        mean, invstd = backward.at[replica.place]
        input, weight, grad_output = replica.input, replica.weight, cast(Tensor, replica.grad_output)
        centered = input.to(mean.dtype) - per_channel(mean, input)
        dy, invstd, dims = grad_output.to(mean.dtype), invstd.view_as(invstd), reduced_dims(input)
        summed = dy.view_as(dy)
        sum_dy, sum_dy_xmu = summed.sum(dims), (summed * centered).sum(dims)
        factor = invstd if weight is None else invstd * weight
        replica.grad_weight, replica.grad_bias = sum_dy_xmu * invstd, sum_dy
        replica.kept = centered, dy * per_channel(factor, input)
        return -sum_dy * factor, sum_dy_xmu if weight is None else sum_dy_xmu * weight

    def common_terms(self, totals: Tensor, backward: Backward) -> Tensor:
        """Return ``(a, b)``: the statistics add ``a + b * (x - mean)`` to the gradient of every element ``x``."""
        grad_mean, grad_invstd = totals
        batch = backward.batch
        grad_var = grad_invstd * -0.5 * backward.at[batch.master][1] ** 3
        if batch.clamped is not None:
            grad_var = grad_var.masked_fill(batch.clamped, 0)
        count = batch.count if isinstance(batch.count, Tensor) else max(batch.count, 1)
        return torch.stack((grad_mean, 2 * grad_var)) / count

    def again(self, terms: Tensor) -> Tensor:
        return terms.view_as(terms)

    def input_gradient(self, replica: ReplicaGradients, terms: Tensor, backward: Backward) -> Tensor:
        input, direct = replica.input, None
        if replica.kept is None:
            mean = backward.at[replica.place][0]
            centered = input.to(mean.dtype) - per_channel(mean, input)
        else:
            centered, direct = replica.kept
        grad_mean, grad_var = terms
        # The first operand determines the memory format: that of the input.
        grad_input: Tensor = centered * per_channel(grad_var, input) + per_channel(grad_mean, input)
        return (grad_input if direct is None else grad_input + direct).to(input.dtype)
