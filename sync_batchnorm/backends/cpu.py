"""Batch normalization on the CPU.

NOTE [fast and exact statistics]: One operator of torch computes the statistics of an input in a single pass. Its
variance is accurate to 1e-6 while ``mean^2 <= 256 * (var + eps)``, and meaningless once the mean is 1e4 standard
deviations. So each replica checks whether its fast statistics are precise enough:

    fast_moments --> is_precise? -- no --> exact_moments --+
                          |                                |
                          +--------- yes ------------------+--> send (mean, variance)

If the fast statistics are not precise, exact ones are computed in two more passes over the input: subtract the fast
mean, and compute the statistics of the difference. They are accurate to 1e-6 for any mean and variance.

If ``mean^2 <= 256 * (var + eps)`` in every replica, the same is true for the merged statistics: the merged variance is
at least the mean of the replicas' variances, and the square of the merged mean is at most the mean of their squared
means.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import (
    Backend,
    BackwardInput,
    BatchStatistics,
    ForwardInput,
    Gradients,
    format_of,
    memory_for_output,
    merge_moments,
    per_channel,
    reduced_dims,
    statistics_dtype,
)

__all__: list[str] = []

# The largest ratio `mean^2 / (var + eps)` for which the fast statistics are used. This limit was measured on random and
# adversarial inputs; see the page how-it-works.md.
LARGEST_RATIO = 256.0

# The operator for statistics adds up the rows of a channels-last input one by one, and loses digits with each row. So
# the input is viewed as fewer and wider rows, each of which holds several rows of the input side by side. A wider row
# has at most this number of elements.
WIDTH = 2048

UNUSED_MOMENTUM = 0.1  # for operators that require a momentum, although they update no running statistics here

_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_normalize_into = torch.ops.aten.native_batch_norm.out


AffineArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def as_batch_norm_arguments(slope: Tensor, offset: Tensor) -> AffineArguments:
    """Return the arguments with which the batch norm operator of torch computes ``x * slope + offset``.

    The arguments are weight, bias, mean and variance, ``(C,)`` each, and an empty tensor for the statistics that the
    operator computes in a training step. Here it computes none.
    """
    return slope, offset, torch.zeros_like(slope), torch.ones_like(slope), slope.new_empty(0)


class Cpu(Backend):
    """Batch normalization on the CPU. Statistics are merged in float64.

    All replicas are on the same device, so they share one tensor of means and one tensor of inverse standard
    deviations.
    """

    merge_dtype = torch.float64

    def statistics(self, input: Tensor, eps: float) -> tuple["Moments", Tensor | None]:
        (mean, var), memory = fast_moments(input)
        # First check the statistics of each piece of the input. This takes only two operators, and nearly all inputs
        # pass. If the check fails, merge the statistics of the pieces, and check the merged statistics.
        if not is_precise(mean, var, eps) and not is_precise(*merge_moments(mean.double(), var, None), eps):
            mean, var = exact_moments(input, mean, memory)
        return (mean, var), memory

    def normalize(self, calls: Sequence[ForwardInput], batch: BatchStatistics) -> list[Tensor]:
        outputs: list[Tensor] = []
        affine: AffineArguments | None = None
        mean, invstd = batch.mean_invstd[batch.master_device]
        for call in calls:
            # All replicas use the same slope and offset, unless their weights or biases differ.
            if affine is None or batch.parameters_differ:
                weight, bias = call.layer.weight, call.layer.bias
                slope = (invstd if weight is None else invstd * weight).to(statistics_dtype(call.input.dtype))
                # The output is `input * slope + offset`, and the offset contains `-mean * slope`. Both products use the
                # same rounded slope, so they cancel to the last digit if an input value is equal to the mean.
                offset = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
                affine = as_batch_norm_arguments(slope, offset.to(slope.dtype))
            # Pass memory for the output (`out=`). Then torch raises an error if the input carries a tangent of
            # forward-mode autograd. Without `out=`, the tangent would be lost silently.
            output = memory_for_output(call.input) if call.memory is None else call.memory
            outputs.append(apply_affine(call.input, affine, output))
        return outputs

    def gradients(self, replicas: Sequence[BackwardInput], batch: BatchStatistics) -> Sequence[Gradients]:
        if not replicas:
            return []
        invstd = batch.mean_invstd[batch.master_device][1]
        dtype = statistics_dtype(replicas[0].input.dtype)
        sums = _sums(replicas, batch, dtype)
        parameter_grads = sums.to(dtype, copy=True)
        if batch.parameters_differ:
            for pair, replica in zip(sums, replicas, strict=True):
                if replica.weight is not None:
                    pair.mul_(replica.weight)
        factors: list[Tensor] = []
        for replica in replicas if batch.parameters_differ else replicas[:1]:
            factors.append((invstd if replica.weight is None else invstd * replica.weight).to(dtype))
        if any([replica.wants_input for replica in replicas]):
            common_terms = _common_terms(sums, batch, invstd if batch.parameters_differ else factors[0], dtype)
        if not batch.parameters_differ:
            factors *= len(replicas)
        results: list[Gradients] = []
        for replica, (grad_bias, grad_weight), factor in zip(replicas, parameter_grads, factors, strict=True):
            grad_input = _input_gradient(replica, common_terms, factor) if replica.wants_input else None
            results.append((grad_input, grad_weight, grad_bias))
        return results


def _sums(replicas: Sequence[BackwardInput], batch: BatchStatistics, dtype: torch.dtype) -> Tensor:
    """Compute ``sum dy`` and ``sum dy * (x - mean) * invstd`` of each replica: ``(R, 2, C)``, in float64."""
    mean, invstd = batch.mean_invstd[batch.master_device]
    rounded_mean, rounded_invstd = mean.to(dtype), invstd.to(dtype)
    vectors: list[Tensor] = []
    for replica in replicas:
        vectors += gradient_sums(replica.grad_output, replica.input, rounded_mean, rounded_invstd)
    sums = torch.stack(vectors).double().view(-1, 2, len(mean))  # (2 * R, C) -> (R, 2, C)
    # The sums were computed with a rounded mean, so all normalized values of a channel are shifted by the same small
    # amount. Correct the sums of `dy * normalized` for this shift.
    sums[:, 1].addcmul_(sums[:, 0], (rounded_mean - mean) * invstd)
    return sums


def _common_terms(sums: Tensor, batch: BatchStatistics, factor: Tensor, dtype: torch.dtype) -> AffineArguments:
    """Return the part of the input gradient that is the same linear function of the input x in all replicas.

    The function is ``-factor / N * (sum dy + (x - mean) * invstd * sum dy_normalized)``, with sums over all replicas.
    If the parameters of replicas differ, the caller multiplies dy by the weights before it adds up dy, and passes the
    inverse standard deviation as `factor`.
    """
    mean, invstd = batch.mean_invstd[batch.master_device]
    terms = batch.complete(sums.sum(0)) * factor
    offset, normalized_term = terms.div_(-batch.elements).unbind()
    # The result is `input * slope + offset`, where the offset contains `-mean * slope`. Both products use the same
    # rounded slope. So they cancel exactly if an input value is equal to the mean.
    slope = (normalized_term * invstd).to(dtype)
    offset = torch.addcmul(offset, slope, mean, value=-1).to(dtype)
    return as_batch_norm_arguments(slope, offset)


def _input_gradient(replica: BackwardInput, common_terms: AffineArguments, factor: Tensor) -> Tensor:
    """Return the gradient of the input of one replica: ``common_terms(x) + factor * dy``."""
    input, dy, dtype = replica.input, replica.grad_output, factor.dtype
    is_half = input.dtype != dtype  # Call `to` only for half precision: even a call without effect takes time.
    grad_input = apply_affine(input.to(dtype) if is_half else input, common_terms)
    if dy is not None:
        grad_input.addcmul_(dy.to(dtype) if is_half else dy, per_channel(factor, input))
    return grad_input.to(input.dtype) if is_half else grad_input


def apply_affine(input: Tensor, affine: AffineArguments, out: Tensor | None = None) -> Tensor:
    """Compute ``input * slope + offset`` in the dtype and memory format of `input`, in one pass over the input."""
    slope, offset, zeros, ones, unused = affine
    if input.dtype == slope.dtype and not input.is_contiguous():
        return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input), out=out)
    options = zeros, ones, False, UNUSED_MOMENTUM, 0.0  # running mean and variance, training, momentum, eps
    if out is None:
        # For batched gradients (`is_grads_batched=True`), use this operator. The operator that writes into `out` does
        # not work for them.
        out, _, _ = torch.native_batch_norm(input, slope, offset, *options)
    else:
        _normalize_into(input, slope, offset, *options, out=out, save_mean=unused, save_invstd=unused)
    return out


Moments = tuple[Tensor, Tensor]  # mean and biased variance of K equal pieces, ``(K, C)``


def fast_moments(input: Tensor) -> tuple[Moments, Tensor | None]:
    """Compute the mean and variance of `input` by a fast operator, which loses digits if the mean is large.

    The second item of the result is memory into which the layer may write its output, or None.
    """
    size, channels = input.shape[:2]
    half = input.dtype in (torch.float16, torch.bfloat16)
    if input.dim() == 2 or not input.is_contiguous():
        channels_last = input.movedim(1, -1)
        if channels_last.is_contiguous():
            rows = input.numel() // channels
            pieces = _number_of_pieces(rows, channels)
            view = channels_last.as_strided((rows // pieces, pieces * channels), (pieces * channels, 1))
            # For a float16 or bfloat16 input, the operator returns float32 statistics only if it also gets float32
            # running statistics. So pass float32 running statistics, and discard them afterwards.
            running_mean = torch.zeros(pieces * channels, dtype=torch.float32, device="cpu") if half else None
            running_var = None if running_mean is None else running_mean.clone()
            mean, var = torch.batch_norm_update_stats(view, running_mean, running_var, UNUSED_MOMENTUM)
            return (mean.view(pieces, channels), var.view(pieces, channels)), None
        input = input.contiguous()
    # Call group norm with as many groups as channels: it returns a mean and an inverse standard deviation for each
    # channel of each sample. For a float16 or bfloat16 input, group norm returns float32 statistics only if its weight
    # is float32, so pass a float32 weight of ones.
    length = input.numel() // (size * channels)
    weight = torch.ones(channels, dtype=torch.float32, device="cpu") if half else None
    memory, mean, invstd = torch.native_group_norm(input, weight, None, size, channels, length, channels, 0.0)
    return (mean, invstd.pow(-2)), memory


@functools.lru_cache(maxsize=1024)
def _number_of_pieces(rows: int, channels: int) -> int:
    """Return the number of equal pieces into which to cut the rows of an input. Each row has `channels` elements.

    The result is the largest number of pieces for which all pieces have the same number of rows, and
    ``pieces * channels`` is at most `WIDTH`.
    """
    return next((pieces for pieces in range(min(rows, WIDTH // channels), 1, -1) if rows % pieces == 0), 1)


def is_precise(mean: Tensor, var: Tensor, eps: float) -> bool:
    """Return whether fast statistics are precise enough, see NOTE [fast and exact statistics]."""
    if type(mean) is not Tensor:  # a stand-in without values, as in `FakeTensorMode`
        return True
    lowest, highest = torch.aminmax(torch.addcmul(var, mean, mean, value=-1 / LARGEST_RATIO))
    return lowest.item() >= -eps and highest.item() < math.inf


def exact_moments(input: Tensor, fast_mean: Tensor, memory: Tensor | None) -> Moments:
    """Compute the mean and variance of `input` precisely: first subtract `fast_mean`, its approximate mean.

    To save memory, the difference of `input` and `fast_mean` may be written into `memory`, which will later hold the
    output of the layer.
    """
    # Do not subtract a mean that is infinite or NaN: the subtraction would turn finite values into infinite values or
    # NaN.
    shift = torch.nan_to_num(fast_mean.mean(0), 0.0, 0.0, 0.0)
    out = memory if memory is not None and memory.dtype == shift.dtype else None
    (mean, var), _ = fast_moments(torch.sub(input, per_channel(shift, input), out=out))
    mean = mean.double() + shift
    overflown = ~(mean.isfinite() & var.isfinite()).all(0)
    if bool(overflown.any()):
        # In channels with an overflow, return the same results as torch: an infinite value makes the mean infinite, but
        # if only the squares of the values overflow, only the variance is infinite.
        values = input[:, overflown].double()
        dims, count = reduced_dims(values), values.numel() // values.shape[1]
        mean[:, overflown] = values.sum(dims) / count
        values -= per_channel(mean[0, overflown], values)
        var[:, overflown] = (values.square_().sum(dims) / count).to(var.dtype)
    return mean, var


def gradient_sums(grad_output: Tensor | None, input: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``sum dy`` and ``sum dy * (x - mean) * invstd`` over the input x of one replica."""
    if grad_output is None or input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if grad_output.stride() != input.stride():
        # The operator returns wrong sums if the two tensors differ in the strides of size-1 dimensions (torch 2.13.0).
        memory_format = format_of(input)
        grad_output = grad_output.contiguous(memory_format=memory_format)
        if input.is_contiguous(memory_format=memory_format):
            grad_output = grad_output.as_strided(input.shape, input.stride())
    _, dot, total = _norm_backward(grad_output, input, None, None, None, mean, invstd, True, 0.0, [False, True, True])
    return total, dot
