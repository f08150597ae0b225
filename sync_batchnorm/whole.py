"""Inputs on the CPU that are not large: the master normalizes the whole batch, in one autograd node.

Below some size it is calls that cost, not what they compute, and more so where several threads make them: each call of
torch gives up the lock of the interpreter and takes it back. So replicas with such inputs do not compute a part each.
They hand them to the master, which joins them and does what `torch.nn.BatchNorm2d` does, with more digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sync_batchnorm import moments, normalization

__all__: list[str] = []

# Up to so many elements in a replica, and up to so many with one operator in float64, which has digits to spare: there
# may be two values a channel. Measured on two cores, torch 2.13.0.
SMALL, TINY = 131072, 4096

_backward = torch.ops.aten.native_batch_norm_backward.default


def is_small(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Tell whether a replica hands over this input, instead of its moments."""
    return (
        input.device.type == "cpu"
        and 0 < input.numel() <= SMALL
        and all(tensor is None or tensor.dtype == input.dtype for tensor in (weight, bias))
    )


def fit_together(inputs: Sequence[Tensor]) -> bool:
    """Tell whether the inputs of all replicas can be joined along the batch, and cut apart again."""
    first = inputs[0]
    return all(
        input.shape[1:] == first.shape[1:] and input.stride()[1:] == first.stride()[1:] for input in inputs
    ) and (len(inputs) > 1 or moments.channel_count(first.shape) > 1)


class _NormalizeWhole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, found: list[Tensor], eps: float, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, *inputs)
        ctx.eps = eps
        joined = _join(inputs)
        if inputs[0].numel() <= TINY:
            ctx.dtype = torch.float64
            output, mean, ctx.invstd = torch.native_batch_norm(
                joined.double(), _to(weight, ctx.dtype), _to(bias, ctx.dtype), None, None, True, 0.0, eps
            )
            output = output.to(joined.dtype)
            var = (ctx.invstd.pow(-2) - eps).clamp_(min=0)
        else:
            ctx.dtype = moments.statistics_dtype(joined.dtype)
            memory = normalization.memory_for_output(joined)
            mean, var = moments.local_moments(joined, memory).unbind()
            affine = normalization.make_affine(mean, var + eps, ctx.dtype, weight, bias)
            ctx.invstd = affine.invstd
            output = normalization.multiply_add(joined, cast(Tensor, affine.slope), cast(Tensor, affine.offset), memory)
        ctx.mean = mean
        found += [mean, var]
        # Not views of one tensor: these could not be changed in place.
        return torch.unsafe_split_with_sizes(output, [len(input) for input in inputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        grad = _join([torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)])
        _, _, needs_weight, needs_bias, *needs_inputs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return None, None, *_true_gradients(grad, weight, inputs, ctx.eps, needs_bias)
        needs = [any(needs_inputs), needs_weight, needs_bias]
        joined, dtype = _join(inputs).to(ctx.dtype), ctx.dtype
        mean = ctx.mean
        if dtype != mean.dtype:  # What is large and rounded is taken off before; what was rounded off is the mean then.
            rounded = mean.to(dtype)
            joined -= moments.per_channel(rounded, joined)
            mean = (mean - rounded).to(dtype)
        invstd = ctx.invstd.to(dtype)
        grad_input, grad_weight, grad_bias = _backward(
            grad.to(dtype), joined, _to(weight, dtype), None, None, mean, invstd, True, ctx.eps, needs
        )
        if not needs[0]:
            return None, None, grad_weight, grad_bias, *[None for _ in inputs]
        grad_inputs = torch.split_with_sizes(grad_input.to(inputs[0].dtype), [len(input) for input in inputs])
        return None, None, grad_weight, grad_bias, *grad_inputs


def _true_gradients(
    grad: Tensor, weight: Tensor | None, inputs: Sequence[Tensor], eps: float, needs_bias: bool
) -> list[Tensor | None]:
    """Return the gradients by weight, bias and inputs as functions that can be differentiated again."""
    joined = _join(inputs).double()
    # Not `F.batch_norm`: with torch 2.13.0 its third derivatives are not those of its formula.
    var, mean = torch.var_mean(joined, moments.reduced_dims(joined), correction=0)
    normalizer = torch.stack((mean, var + eps))
    output = normalization.differentiable_normalize(joined, normalizer, _to(weight, torch.float64), None)
    wanted = [tensor for tensor in (weight, *inputs) if tensor is not None and tensor.requires_grad]
    found = torch.autograd.grad(output, wanted, grad.double(), create_graph=True) if wanted else ()
    by_tensor = dict(zip(map(id, wanted), found, strict=True))
    grad_bias = grad.sum(moments.reduced_dims(grad)) if needs_bias else None
    return [by_tensor.get(id(weight)), grad_bias, *[by_tensor.get(id(input)) for input in inputs]]


def _join(tensors: Sequence[Tensor]) -> Tensor:
    if not torch.is_autocast_enabled("cpu"):
        return torch.cat(list(tensors))
    # Autocast would join them in its own dtype, or refuse those of another one.
    with torch.autocast("cpu", enabled=False):
        return torch.cat(list(tensors))


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def normalize_whole(
    inputs: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    """Return the output of each replica, and mean and biased variance of the whole batch, ``(C,)`` in float64."""
    found: list[Tensor] = []
    outputs: tuple[Tensor, ...] = _NormalizeWhole.apply(  # type: ignore[no-untyped-call]
        found, eps, weight, bias, *inputs
    )
    mean, var = found
    return outputs, mean, var
