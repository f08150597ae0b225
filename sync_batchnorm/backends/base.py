"""Batch normalization on any device, in differentiable operators of torch.

This file only computes, and knows nothing of threads or modules. ``C`` is the number of channels, which are dimension 1
of every input ``(N, C, +)``. A vector is a tensor ``(C,)``. A count is the number of elements per channel in an input.

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

# The number of elements per channel in each replica, as a list; or in each of W processes, as a tensor ``(W,)``.
Counts = Sequence[int] | Tensor
# The gradients of the input, the weight and the bias of one replica.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@functools.cache
def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of inputs of `dtype`: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector  # (C,) -> (C, 1, ...)


def reduced_dims(input: Tensor) -> list[int]:
    """Return the dimensions over which statistics are computed: all dimensions of `input` except the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def format_of(input: Tensor) -> torch.memory_format:
    """Return the memory format for the output and the gradient of `input`.

    The memory format is channels_last if `input` is channels_last, and contiguous for all other inputs.
    """
    if input.is_contiguous():
        return torch.contiguous_format
    channels_last = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    # With channels_last formats, `is_contiguous` ignores the strides of size-1 dimensions, and is False for tensors
    # that are neither 4-d nor 5-d.
    return channels_last if input.is_contiguous(memory_format=channels_last) else torch.contiguous_format


def memory_for_output(input: Tensor) -> Tensor:
    """Allocate memory for the output of a batch norm, in the memory format of its input."""
    # By default, `torch.empty_like` would copy unusual strides of size-1 dimensions from `input`.
    return torch.empty_like(input, memory_format=format_of(input))


def single_value_error(shapes: Sequence[torch.Size]) -> ValueError:
    """Return the error that torch raises for a single value per channel.

    `shapes` contains the shape of each replica's input. Some of these inputs may be empty.
    """
    shape = next((shape for shape in shapes if shape.numel()), shapes[0])
    return ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")


def merge_moments(mean: Tensor, var: Tensor, fractions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge the means and biased variances of K pieces of the data into the mean and variance of the whole data.

    The formula is from Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979. This function applies the formula to any number of pieces.

    Args:
        mean, var: the mean and the biased variance of each piece, ``(K, C)`` each.
        fractions: the number of elements in each piece, divided by the number in the whole data, ``(K, 1)``. None if
            all pieces have equally many elements.

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
    """The running statistics of a layer, which are its buffers, and the momentum for their updates."""

    mean: Any  # the running mean, a tensor; None if the layer keeps no running statistics
    var: Any  # the running variance, a tensor; None if the layer keeps no running statistics
    num_batches_tracked: Tensor | None
    momentum: float | None  # the momentum of the layer; None for a cumulative average

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Count this call of the layer, and move the running statistics towards the statistics of its batch.

        `mean` and `var` are the mean and the biased variance of the batch. `count` is the number of elements per
        channel. The running variance moves towards the unbiased variance.
        """
        if self.num_batches_tracked is not None:
            # An addition in place increases the version counter of the buffer, as torch's batch norm does.
            self.num_batches_tracked.add_(1)
        if self.mean is None or (isinstance(count, int) and count == 0):
            return
        # Write into the buffers through `data`, so that their version counters stay as they are, as in torch's own
        # kernel. An earlier forward pass in eval mode may have saved these buffers, and its backward pass must still
        # run.
        for buffer, value in ((self.mean, mean), (self.var, var * (count / (count - 1)))):
            step: Tensor | float = self.momentum or 0.0
            if self.momentum is None and self.num_batches_tracked is not None:
                # Keep the step as a tensor, so that the host does not wait for the value of `num_batches_tracked`.
                step = self.num_batches_tracked.to(buffer.dtype).reciprocal()
            # This is the formula of torch. With momentum 1, `lerp_` would turn an infinite variance into NaN.
            buffer.data.mul_(1 - step).add_((value * step).to(buffer.dtype))


class BatchStatistics(NamedTuple):
    """The merged statistics of one call of a layer, and everything else about this call that all replicas share.

    The tensors in this tuple are not in the autograd graph.
    """

    backend: "Backend"
    master_device: torch.device  # the device of replica 0, which adds up the sums of all replicas
    # Maps each device of the call to the mean and the inverse standard deviation of the whole batch, ``(C,)`` each.
    mean_invstd: Mapping[torch.device, Pair]
    # The number of elements per channel in the whole batch. The number is a tensor if several processes computed it
    # together, so that the host does not wait for its value.
    elements: int | Tensor
    # A mask of the channels in which eps replaces a smaller variance. It is None if eps is added to the variance.
    clamped: Tensor | None
    parameters_differ: bool  # whether replicas may use different weights or biases in this call
    # A function that adds up a tensor over all processes; None if there are no other processes.
    reduce: Callable[[Tensor], Tensor] | None
    # Keeps the memory of `mean_invstd` in use; without it, a later exchange may overwrite the memory.
    lease: Lease

    @property
    def divisor(self) -> int | Tensor:
        """The divisor that turns a sum over the batch into a mean: the number of elements per channel, at least 1."""
        return self.elements if isinstance(self.elements, Tensor) else max(self.elements, 1)

    def totals(self, sums: Sequence[Pair], workspace: Workspace) -> Tensor:
        """Add up the sums of the backward pass over all replicas and processes.

        Each pair in `sums` contains the two vectors of one replica.

        Return a tensor ``(2 * C,)``: the total of all first vectors, followed by the total of all second vectors.
        """
        rows = workspace.stack(sums or [tuple(map(torch.zeros_like, self.mean_invstd[self.master_device]))])
        return self.complete(torch.sum(rows, 0, out=workspace.flat))

    def complete(self, total: Tensor) -> Tensor:
        """Add up two vectors over all processes. Set the second vector to zero in channels whose variance was clamped
        to `eps`.

        If the variance of a channel is below `eps`, and `eps` replaces it, the output does not depend on the variance.
        So the gradient through the variance, the second vector, is zero in this channel.
        """
        total = total if self.reduce is None else self.reduce(total)
        if self.clamped is not None:
            total.view(2, -1)[1].masked_fill_(self.clamped, 0)
        return total


class LayerArguments(NamedTuple):
    """The parameters and settings of a batch norm layer for one call."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    clamps: bool  # True if `eps` is the lower bound of the variance; False if `eps` is added to the variance
    # The running statistics that this call updates. None in eval mode, and in all replicas except replica 0.
    running: RunningStatistics | None


class ForwardInput(Protocol):
    """The data of one replica for the forward pass of a batch norm: its input, and the arguments of its layer."""

    @property
    def input(self) -> Tensor: ...
    @property
    def layer(self) -> LayerArguments: ...
    @property
    def memory(self) -> Tensor | None:
        """Memory for the output of this replica, if `Backend.statistics` allocated some."""


class BackwardInput(NamedTuple):
    """The data of one replica for the backward pass of a batch norm, without the statistics that all replicas share."""

    grad_output: Tensor | None  # the gradient of the replica's output; None if the output is not in the loss
    input: Tensor
    weight: Tensor | None
    wants_input: bool  # whether the backward pass needs the gradient of the replica's input


class Backend:
    """The operations of batch normalization on any device. A subclass is faster on one type of device.

    Gradients of gradients use this class on every device, because autograd can differentiate its operators.
    """

    # The dtype in which statistics are merged; None to merge them in their own dtype.
    merge_dtype: torch.dtype | None = None

    def statistics(self, input: Tensor, eps: float) -> tuple[Pair, Tensor | None]:
        """Compute the statistics of one replica's input, which must not be empty.

        Returns:
            mean and biased variance of K equally large pieces of the input, ``(K, C)`` each; and memory for the output
            in the memory format of the output, or None. Instead of the variance, a backend may return another vector
            that its `merge` expects. The backend may use `eps` to compute this vector.
        """
        var, mean = torch.var_mean(input.to(statistics_dtype(input.dtype)), reduced_dims(input), correction=0)
        return (mean[None], var[None]), None

    def empty_statistics(self, input: Tensor) -> Pair:
        """Return the statistics of an input without elements: a mean and a variance of zero in each channel."""
        zeros = input.new_zeros(1, input.shape[1], dtype=statistics_dtype(input.dtype))
        return zeros, zeros

    def merge(
        self,
        statistics: Sequence[Pair],
        counts: Counts,
        total: int | Tensor,
        layer: LayerArguments,
        workspace: Workspace | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Merge the statistics of all replicas, and update the running statistics of the layer.

        All statistics must be on the same device.

        Args:
            statistics: for each replica, a pair of tensors ``(K, C)``, as the method `statistics` returns it. If W
                processes exchange: a single pair of tensors ``(W, C)``.
            counts: for each replica, the number of elements per channel in its input. If W processes exchange: a tensor
                ``(W,)``.
            total: the sum of `counts`.
            layer: the arguments of the layer in replica 0.
            workspace: reusable memory for the vectors; None to allocate new memory.

        Returns:
            mean and inverse standard deviation of the whole batch, ``(C,)`` each; and a mask of the channels in which
            `eps` replaces a smaller variance, or None if `eps` is added to the variance.
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
        """Return the gradients of each replica's input, weight and bias.

        The gradient of an input is None if the backward pass does not need it. If the output of a replica is empty or
        not in the loss, the gradients of its weight and bias are zero, and may be returned as None.
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
    """Return the gradient of one replica's input, ``invstd * (dy - mean_dy - normalized * mean_dy_normalized)``.

    dy is the gradient of the replica's output, multiplied by the replica's weight. `normalized` is the replica's
    normalized input. `means`, ``(2 * C,)``, holds the means of dy and of ``dy * normalized`` over the inputs of all
    replicas.
    """
    mean_dy, mean_dy_normalized = means.to(replica.input.device, non_blocking=True).chunk(2)
    # Torch gives the result of an expression the memory format of the first operand. A vector has no such format, so
    # the first operand must be as large as the input.
    grad_input = normalized * -per_channel(mean_dy_normalized, normalized) - per_channel(mean_dy, normalized)
    if replica.grad_output is not None:
        dy = replica.grad_output.to(normalized.dtype)
        grad_input = grad_input + (dy if replica.weight is None else dy * per_channel(replica.weight, dy))
    return (grad_input * per_channel(invstd, normalized)).to(replica.input.dtype)


def _statistics_in_graph(replicas: Sequence[BackwardInput], batch: BatchStatistics) -> dict[torch.device, Pair]:
    """Compute mean and invstd of the batch on each device, as functions of the inputs of all `replicas`.

    The values are the same as in the forward pass. The inputs of replicas that recorded no graph count as constants:
    these replicas are missing in `replicas`.
    """
    sums: list[Pair] = []
    for replica in replicas:
        mean = batch.mean_invstd[replica.input.device][0]
        x = replica.input.to(mean.dtype)
        deviations = x - per_channel(mean, x)
        pair = deviations.sum(reduced_dims(x)), deviations.square().sum(reduced_dims(x))
        sums.append(move_pair(pair, batch.master_device))
    moments = batch.totals(sums, Workspace()) / batch.divisor
    # `moments` holds the means of ``x - mean`` and of ``(x - mean) ** 2`` over the whole batch, where `mean` comes from
    # the forward pass and is a constant for autograd. Subtract their values, but keep their derivatives: `first` and
    # `second` are zeros that autograd can differentiate by the inputs. So the mean and the variance below keep their
    # values, and have exact derivatives of any order.
    first, second = (moments - moments.detach()).chunk(2)
    mean, invstd = batch.mean_invstd[batch.master_device]
    var_change = second - first.square()
    if batch.clamped is not None:
        var_change = var_change.masked_fill(batch.clamped, 0)
    pair = mean + first, (invstd.pow(-2) + var_change).rsqrt()
    return {device: move_pair(pair, device) for device in batch.mean_invstd}


GENERAL = Backend()
