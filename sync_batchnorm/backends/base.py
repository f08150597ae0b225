"""Batch normalization on any device, in differentiable operators of torch.

This file computes. It knows nothing of threads or modules. ``C`` is the number of channels, dimension 1 of every input
``(N, C, +)``. Vectors are ``(C,)``. A count is a number of elements per channel.

`Backend` has the operations of one exchange, in the order in which they run:

    forward pass     statistics (each replica) --> merge --> normalize (all replicas)
    backward pass    gradients (all replicas)

To make a kind of device faster, add a file with a subclass of `Backend` to this folder, and a row to `BACKENDS` in
`__init__.py`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .workspaces import Lease, Pair, Workspace, move_pair

__all__: list[str] = []

Counts = Sequence[int] | Tensor  # elements per channel: a list by replica, or a tensor ``(W,)`` by process
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input, weight and bias of one replica


@functools.cache
def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of inputs of `dtype`: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector  # (C,) -> (C, 1, ...)


def reduced_dims(input: Tensor) -> list[int]:
    """Return all dimensions of `input` except the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def format_of(input: Tensor) -> torch.memory_format:
    """Return the memory format for the output and the gradient of `input`: channels_last as `input`, or contiguous."""
    if input.is_contiguous():
        return torch.contiguous_format
    channels_last = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    # This ignores the strides of size-1 dimensions, and is False for other numbers of dimensions than four and five.
    return channels_last if input.is_contiguous(memory_format=channels_last) else torch.contiguous_format


def memory_for_output(input: Tensor) -> Tensor:
    """Allocate the output for `input`, in its memory format."""
    # The default, `torch.preserve_format`, would keep unusual strides of size-1 dimensions.
    return torch.empty_like(input, memory_format=format_of(input))


def single_value_error(shapes: Sequence[torch.Size]) -> ValueError:
    """Return torch's own error for a single value per channel. `shapes` are those of all inputs, some may be empty."""
    shape = next((shape for shape in shapes if shape.numel()), shapes[0])
    return ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")


def merge_moments(mean: Tensor, var: Tensor, fractions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances of K pieces of the data.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979;
    here for any number of pieces.

    Args:
        mean, var: ``(K, C)`` each.
        fractions: share of each piece in all elements, ``(K, 1)``. None if all pieces have equally many elements.

    Returns:
        mean and biased variance of the whole data, ``(C,)`` each.
    """
    if fractions is None:
        merged = mean.mean(0)
        deviations = mean - merged
        return merged, torch.addcmul(var, deviations, deviations).mean(0)
    merged = (mean * fractions).sum(0)
    deviations = mean - merged
    return merged, (torch.addcmul(var, deviations, deviations) * fractions).sum(0)


class RunningStatistics(NamedTuple):
    """The buffers of a layer, and its momentum."""

    mean: Any  # a tensor; None without running statistics
    var: Any
    num_batches_tracked: Tensor | None
    momentum: float | None  # None for a cumulative average

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Count the call, and move the buffers towards `mean` and the unbiased variance; `var` is the biased one."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)  # In torch, too, this changes the version counter.
        if self.mean is None or (isinstance(count, int) and count == 0):
            return
        # In place through `data`: like the kernel of torch, this leaves the version counter as it is. An earlier
        # forward pass in eval mode may have saved these buffers, and its backward pass must still run.
        for buffer, value in ((self.mean, mean), (self.var, var * (count / (count - 1)))):
            step: Tensor | float = self.momentum or 0.0
            if self.momentum is None and self.num_batches_tracked is not None:
                # The step stays a tensor, so that the host does not wait for the counter.
                step = self.num_batches_tracked.to(buffer.dtype).reciprocal()
            # The formula of torch. With momentum 1, `lerp_` would turn an infinite variance into NaN.
            buffer.data.mul_(1 - step).add_((value * step).to(buffer.dtype))


class BatchStatistics(NamedTuple):
    """Everything that the replicas share in one call of a layer, outside the autograd graph."""

    backend: "Backend"
    master_device: torch.device  # on which the sums of all replicas are added up
    mean_invstd: Mapping[torch.device, Pair]  # mean and inverse standard deviation, ``(C,)``, on each device
    elements: int | Tensor  # per channel; a tensor if processes have added them up, so that no host waits
    clamped: Tensor | None  # channels where eps replaces a smaller variance; None if eps is added
    parameters_differ: bool  # between replicas
    reduce: Callable[[Tensor], Tensor] | None  # adds up a tensor over all processes; None without other processes
    lease: Lease  # of the workspace in which `mean_invstd` may lie

    @property
    def divisor(self) -> int | Tensor:
        """The number by which totals are divided to get means: the elements per channel, at least one."""
        return self.elements if isinstance(self.elements, Tensor) else max(self.elements, 1)

    def totals(self, sums: Sequence[Pair], workspace: Workspace) -> Tensor:
        """Add up the pairs of sums of all replicas and processes, the second vectors after the first: ``(2 * C,)``."""
        rows = workspace.stack(sums or [tuple(map(torch.zeros_like, self.mean_invstd[self.master_device]))])
        return self.complete(torch.sum(rows, 0, out=workspace.flat))

    def complete(self, total: Tensor) -> Tensor:
        """Add up the totals of all processes, then zero the second vector in the clamped channels.

        The second vector is the gradient through the variance. There is none where `eps` replaces the variance.
        """
        total = total if self.reduce is None else self.reduce(total)
        if self.clamped is not None:
            total.view(2, -1)[1].masked_fill_(self.clamped, 0)
        return total


class LayerArguments(NamedTuple):
    """The arguments of a layer for one call, besides the input."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    clamps: bool  # True: `eps` is the lower bound of the variance. False: `eps` is added to the variance
    running: RunningStatistics | None  # to be updated. None in eval mode, and in all replicas except replica 0


class ForwardInput(Protocol):
    """The input of one replica in a forward pass."""

    @property
    def input(self) -> Tensor: ...
    @property
    def layer(self) -> LayerArguments: ...
    @property
    def memory(self) -> Tensor | None:
        """Memory for the output, if `Backend.statistics` has returned some."""


class BackwardInput(NamedTuple):
    """The input of one replica in a backward pass, besides the statistics of the batch."""

    grad_output: Tensor | None  # None if the output does not enter the loss
    input: Tensor
    weight: Tensor | None
    wants_input: bool  # whether the gradient of the input is wanted


class Backend:
    """The operations of batch normalization on any device. Gradients of gradients use these on every device."""

    merge_dtype: torch.dtype | None = None  # of the merge, mean and invstd; None for the dtype of the statistics

    def statistics(self, input: Tensor, eps: float) -> tuple[Pair, Tensor | None]:
        """Compute the statistics of an input that is not empty.

        Returns:
            mean and biased variance of K equally large pieces of the input, ``(K, C)`` each; and memory for the output
            in its memory format, or None. A backend may return another second vector if its `merge` expects that. It
            may use `eps` for it.
        """
        var, mean = torch.var_mean(input.to(statistics_dtype(input.dtype)), reduced_dims(input), correction=0)
        return (mean[None], var[None]), None

    def empty_statistics(self, input: Tensor) -> Pair:
        """Return the statistics of an input without elements: zeros."""
        zeros = input.new_zeros(1, input.shape[1], dtype=statistics_dtype(input.dtype))
        return zeros, zeros

    def merge(
        self,
        statistics: Sequence[Pair],
        counts: Counts,
        total: int | Tensor,
        layer: LayerArguments,
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Merge the statistics of all replicas, which are on one device, and update the running statistics.

        Args:
            statistics: a pair for each replica; for processes, a single pair of ``(W, C)``.
            counts: elements per channel of each replica; for processes, a tensor ``(W,)``.
            total: the sum of `counts`.
            layer: the arguments of the layer in replica 0.
            workspace: memory for the vectors.

        Returns:
            mean and inverse standard deviation, ``(C,)``; and the channels where `eps` replaces a smaller variance,
            or None if `eps` is added.
        """
        means = torch.cat([mean for mean, _ in statistics]).to(dtype=self.merge_dtype)  # (K, C), of all pieces
        variances = torch.cat([var for _, var in statistics]).to(dtype=self.merge_dtype)
        fractions: Tensor | None = None
        if isinstance(counts, Tensor):
            fractions = (counts / counts.sum().clamp(min=1))[:, None]
        else:
            sizes = [(len(mean), count / len(mean)) for (mean, _), count in zip(statistics, counts, strict=True)]
            if len(set(sizes)) > 1:
                elements = sum(counts)
                fractions = torch.cat([means.new_full((pieces, 1), size / elements) for pieces, size in sizes])
        mean, var = merge_moments(means, variances, fractions)
        if layer.running is not None:
            layer.running.update(mean, var, total)
        if layer.clamps:
            return mean, var.clamp(min=layer.eps).rsqrt(), var < layer.eps
        return mean, (var + layer.eps).rsqrt(), None

    def normalize(self, calls: Sequence[ForwardInput], batch: BatchStatistics) -> list[Tensor]:
        """Return the output of each replica: ``(input - mean) * invstd * weight + bias``."""
        outputs: list[Tensor] = []
        for call in calls:
            input, weight, bias = call.input, call.layer.weight, call.layer.bias
            mean, invstd = batch.mean_invstd[input.device]
            output = memory_for_output(input) if call.memory is None else call.memory
            factor = per_channel(invstd if weight is None else invstd * weight, input)
            centered = input - per_channel(mean, input)
            if bias is None:
                torch.mul(centered, factor, out=output)
            else:
                torch.addcmul(per_channel(bias, input), centered, factor, out=output)
            outputs.append(output)
        return outputs

    def gradients(self, replicas: Sequence[BackwardInput], batch: BatchStatistics) -> Sequence[Gradients]:
        """Return the gradients of each replica.

        The gradient of an input is None unless it is wanted. The gradients of weight and bias may be None, for zeros,
        if the output does not enter the loss or has no elements.
        """
        mean_invstd = _statistics_in_graph(replicas, batch) if torch.is_grad_enabled() else batch.mean_invstd
        sums: list[Pair] = []
        parameter_grads: list[tuple[Tensor | None, Tensor | None]] = []
        all_normalized: list[Tensor] = []
        for replica in replicas:
            mean, invstd = mean_invstd[replica.input.device]
            x = replica.input.to(mean.dtype)
            normalized = (x - per_channel(mean, x)) * per_channel(invstd, x)
            grad_weight = grad_bias = None
            if replica.grad_output is not None:
                dy, dims, weight = replica.grad_output.to(mean.dtype), reduced_dims(x), replica.weight
                grad_bias, grad_weight = dy.sum(dims), (dy * normalized).sum(dims)
                pair = (grad_bias, grad_weight) if weight is None else (grad_bias * weight, grad_weight * weight)
                sums.append(move_pair(pair, batch.master_device))
            parameter_grads.append((grad_weight, grad_bias))
            all_normalized.append(normalized)
        means = batch.totals(sums, Workspace()) / batch.divisor
        results: list[Gradients] = []
        for replica, grads, normalized in zip(replicas, parameter_grads, all_normalized, strict=True):
            grad_input = None
            if replica.wants_input:
                grad_input = _input_gradient(replica, normalized, mean_invstd[replica.input.device][1], means)
            results.append((grad_input, *grads))
        return results


def _input_gradient(replica: BackwardInput, normalized: Tensor, invstd: Tensor, means: Tensor) -> Tensor:
    """Return the gradient of the input of one replica.

    It is ``invstd * (dy - mean_dy - normalized * mean_dy_normalized)``. `normalized` is the normalized input of this
    replica, dy its `grad_output` times `weight`. `means`, ``(2 * C,)``, are the two means over all replicas.
    """
    mean_dy, mean_dy_normalized = means.to(replica.input.device, non_blocking=True).chunk(2)
    # The first operand determines the memory format, so it is as large as the input.
    grad_input = normalized * -per_channel(mean_dy_normalized, normalized) - per_channel(mean_dy, normalized)
    if replica.grad_output is not None:
        dy = replica.grad_output.to(normalized.dtype)
        grad_input = grad_input + (dy if replica.weight is None else dy * per_channel(replica.weight, dy))
    return (grad_input * per_channel(invstd, normalized)).to(replica.input.dtype)


def _statistics_in_graph(replicas: Sequence[BackwardInput], batch: BatchStatistics) -> dict[torch.device, Pair]:
    """Compute mean and invstd of the batch on each device, as functions of the inputs of all `replicas`.

    The values equal those of the forward pass. Replicas that recorded no graph are missing here: their inputs are
    constants.
    """
    sums: list[Pair] = []
    for replica in replicas:
        mean = batch.mean_invstd[replica.input.device][0]
        x = replica.input.to(mean.dtype)
        deviations = x - per_channel(mean, x)
        pair = deviations.sum(reduced_dims(x)), deviations.square().sum(reduced_dims(x))
        sums.append(move_pair(pair, batch.master_device))
    moments = batch.totals(sums, Workspace()) / batch.divisor
    # Moments about a constant, the mean of the forward pass. So mean and variance have exact derivatives of any order.
    first, second = (moments - moments.detach()).chunk(2)  # zeros, in the graph
    mean, invstd = batch.mean_invstd[batch.master_device]
    var_change = second - first.square()
    if batch.clamped is not None:
        var_change = var_change.masked_fill(batch.clamped, 0)
    pair = mean + first, (invstd.pow(-2) + var_change).rsqrt()
    return {device: move_pair(pair, device) for device in batch.mean_invstd}


GENERAL = Backend()
