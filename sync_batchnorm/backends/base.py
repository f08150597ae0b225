"""Batch normalization on any device, written in differentiable operators that are available on every device.

Nothing here knows of threads or modules. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``;
vectors are ``(C,)``; a count is a number of elements per channel. To make a kind of device faster, give it a file in
this folder, with a subclass of `Backend`, and a row in `BACKENDS` in `__init__.py`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .workspaces import Lease, Vectors, Workspace, move_pair

__all__: list[str] = []


@functools.cache
def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of inputs of `dtype`: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector


def reduced_dims(input: Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def memory_for_output(input: Tensor) -> Tensor:
    """Return memory in the format of the output for `input`."""
    # Not the default format, which would keep unusual strides of size-1 dimensions.
    return torch.empty_like(input, memory_format=format_of(input))


def single_value(shapes: Sequence[torch.Size]) -> ValueError:
    """Return torch's own error for a single value per channel, in inputs of which all but one may be empty."""
    shape = next((shape for shape in shapes if shape.numel()), shapes[0])
    return ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")


def format_of(input: Tensor) -> torch.memory_format:
    """Return the format in which the output and the gradient of `input` are: channels_last if it is, or contiguous."""
    if input.is_contiguous():
        return torch.contiguous_format
    channels_last = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    # This ignores the strides of size-1 dimensions, and is False for other numbers of dimensions than four and five.
    return channels_last if input.is_contiguous(memory_format=channels_last) else torch.contiguous_format


def _fractions(pieces: Sequence[int], counts: Sequence[int], like: Tensor) -> Tensor | None:
    """Return what each piece of each replica has of all elements, ``(P, 1)``; None if all have equally many.

    `pieces` are the numbers of equally large pieces of each replica, `counts` its elements per channel.
    """
    sizes = [(number, count / number) for number, count in zip(pieces, counts, strict=True)]
    if len(set(sizes)) == 1:
        return None
    total = sum(counts)
    return torch.cat([like.new_full((number, 1), size / total) for number, size in sizes])


def merge_moments(mean: Tensor, var: Tensor, fractions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances of K pieces, ``(K, C)`` each, into those of the whole, ``(C,)`` each.

    `fractions`, ``(K, 1)``, are those of all elements that each piece has; None if all have equally many. Chan, Golub,
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for any number of them.
    """
    if fractions is None:
        merged = mean.mean(0)
        deviations = mean - merged
        return merged, torch.addcmul(var, deviations, deviations).mean(0)
    merged = (mean * fractions).sum(0)
    deviations = mean - merged
    return merged, (torch.addcmul(var, deviations, deviations) * fractions).sum(0)


Pair = Vectors  # two tensors of one shape, such as mean and invstd
Counts = Sequence[int] | Tensor  # elements per channel: of each replica, or ``(W,)`` of processes


class RunningStatistics(NamedTuple):
    """The buffers of a layer, and the momentum with which a call updates them."""

    mean: Any  # a tensor; None without running statistics
    var: Any
    num_batches_tracked: Tensor | None
    momentum: float | None

    def suits(self, dtype: torch.dtype) -> bool:
        """Return whether a kernel of torch can update them: it needs a momentum, and statistics in their dtype."""
        return self.momentum is not None and self.mean is not None and self.mean.dtype == dtype

    def count_call(self) -> float:
        """Count a call; return the momentum, or zero for a cumulative average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)  # as torch does it, which changes the version
        return self.momentum or 0.0

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Count a call, and move the buffers towards its mean and the unbiased variance; `var` is the biased one."""
        momentum = self.count_call()
        if self.mean is None or (isinstance(count, int) and count == 0):
            return
        # Updates go through `data`, which does not change the version counter, as the kernel of torch does not: an
        # earlier forward in eval mode may have saved these buffers, and its backward must still run.
        for buffer, value in ((self.mean, mean), (self.var, var * (count / (count - 1)))):
            step: Tensor | float = momentum
            if self.momentum is None and self.num_batches_tracked is not None:
                # The step stays a tensor, so that the host does not wait for the counter.
                step = self.num_batches_tracked.to(buffer.dtype).reciprocal()
            # As torch computes it. `lerp_` would make NaN of an infinite variance if the momentum is one.
            buffer.data.mul_(1 - step).add_((value * step).to(buffer.dtype))


class BatchStatistics(NamedTuple):
    """The statistics of the batch in one call of a layer, outside the graph, and what else all replicas share."""

    backend: "Backend"
    master: torch.device  # on which the sums of all replicas are added up
    mean_invstd: Mapping[torch.device, Pair]  # mean and inverse standard deviation, ``(C,)``, on each device
    elements: int | Tensor  # per channel; a tensor if processes have added them up, so that no host waits
    clamped: Tensor | None  # where eps has replaced a smaller variance; None if eps is added
    parameters_differ: bool  # between replicas
    reduce: Callable[[Tensor], Tensor] | None  # adds up a tensor over all processes, if there are several
    lease: Lease  # of the workspace in which `mean_invstd` may lie

    @property
    def divisor(self) -> int | Tensor:
        """What totals are divided by to get means: the elements per channel, or one if there are none."""
        return self.elements if isinstance(self.elements, Tensor) else max(self.elements, 1)

    def totals(self, sums: Sequence[Pair], workspace: Workspace) -> Tensor:
        """Add up the pairs of sums of all replicas and processes, the second vectors after the first: ``(2 * C,)``."""
        rows = workspace.stack(sums or [tuple(map(torch.zeros_like, self.mean_invstd[self.master]))])
        return self.completed(torch.sum(rows, 0, out=workspace.flat))

    def completed(self, total: Tensor) -> Tensor:
        """Add up the totals of all processes; the second one, of what depends on the variance, is zero where eps is."""
        total = total if self.reduce is None else self.reduce(total)
        if self.clamped is not None:
            total.view(2, -1)[1].masked_fill_(self.clamped, 0)
        return total


class LayerArguments(NamedTuple):
    """The arguments of a layer for one call, besides the input."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    clamps: bool  # whether `eps` is a lower bound of the variance, and not added to it
    running: RunningStatistics | None  # to be updated; None for all replicas but the first, and in eval mode


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
    """What the gradients of one replica are made of, besides the statistics of the batch."""

    grad_output: Tensor | None  # None if the output does not enter the loss
    input: Tensor
    weight: Tensor | None
    wants_input: bool  # whether the gradient of the input is wanted


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input, weight and bias of one replica


class Backend:
    """The operations of batch normalization on any device; gradients of gradients use these on every device."""

    merge_dtype: torch.dtype | None = None  # of the merge, mean and invstd; None for the dtype of the statistics

    def statistics(self, input: Tensor, eps: float) -> tuple[Pair, Tensor | None]:
        """Return the statistics of `input`, which has elements, and memory for the output in its format, or None.

        They are mean and biased variance of K equally large pieces, ``(K, C)`` each. A backend may take another second
        vector, which its `merge` knows, and may use `eps` for it.
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
            statistics: a pair for each replica; for processes, one pair of ``(W, C)``.
            counts: elements per channel of each replica; for processes, a tensor ``(W,)``.
            total: the sum of `counts`.
            layer: the arguments of the layer in replica 0.
            workspace: memory for the vectors.

        Returns:
            mean and inverse standard deviation, ``(C,)``; and the channels in which `eps` has replaced a smaller
            variance, or None if `eps` is added.
        """
        of_means, of_variances = zip(*statistics, strict=True)
        means = torch.cat(of_means).to(dtype=self.merge_dtype)  # (P, C)
        variances = torch.cat(of_variances).to(dtype=self.merge_dtype)
        if isinstance(counts, Tensor):
            fractions: Tensor | None = (counts / counts.sum().clamp(min=1))[:, None]
        else:
            fractions = _fractions(list(map(len, of_means)), counts, means)
        mean, var = merge_moments(means, variances, fractions)
        if layer.running is not None:
            layer.running.update(mean, var, total)
        return mean, *invstd_of(var, layer.eps, layer.clamps)

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

    def gradients(self, parts: Sequence[BackwardInput], batch: BatchStatistics) -> Sequence[Gradients]:
        """Return the gradients of each replica.

        That of an input is None if it is not wanted; those of weight and bias may be None, for zeros, if the output
        does not enter the loss, or has no elements.
        """
        mean_invstd = _statistics_in_graph(parts, batch) if torch.is_grad_enabled() else batch.mean_invstd
        sums: list[Pair] = []
        of_parameters: list[tuple[Tensor | None, Tensor | None]] = []
        all_normalized: list[Tensor] = []
        for part in parts:
            mean, invstd = mean_invstd[part.input.device]
            x = part.input.to(mean.dtype)
            normalized = (x - per_channel(mean, x)) * per_channel(invstd, x)
            grad_weight = grad_bias = None
            if part.grad_output is not None:
                dy, dims, weight = part.grad_output.to(mean.dtype), reduced_dims(x), part.weight
                grad_bias, grad_weight = dy.sum(dims), (dy * normalized).sum(dims)
                pair = (grad_bias, grad_weight) if weight is None else (grad_bias * weight, grad_weight * weight)
                sums.append(move_pair(pair, batch.master))
            of_parameters.append((grad_weight, grad_bias))
            all_normalized.append(normalized)
        terms = batch.totals(sums, Workspace()) / batch.divisor
        results: list[Gradients] = []
        for part, (grad_weight, grad_bias), normalized in zip(parts, of_parameters, all_normalized, strict=True):
            grad_input = None
            if part.wants_input:
                grad_input = _input_gradient(part, normalized, mean_invstd[part.input.device][1], terms)
            results.append((grad_input, grad_weight, grad_bias))
        return results


def _input_gradient(part: BackwardInput, normalized: Tensor, invstd: Tensor, terms: Tensor) -> Tensor:
    """Return the gradient of the input of one replica, from its normalized input, and the `terms` of all replicas."""
    of_bias, of_weight = terms.to(part.input.device, non_blocking=True).chunk(2)
    # The first operand determines the memory format: that of the input.
    grad_input = normalized * -per_channel(of_weight, normalized) - per_channel(of_bias, normalized)
    if part.grad_output is not None:
        dy = part.grad_output.to(normalized.dtype)
        grad_input = grad_input + (dy if part.weight is None else dy * per_channel(part.weight, dy))
    return (grad_input * per_channel(invstd, normalized)).to(part.input.dtype)


def invstd_of(var: Tensor, eps: float, clamps: bool) -> tuple[Tensor, Tensor | None]:
    """Return the inverse standard deviation, and where `eps` has replaced a smaller variance, if it `clamps`."""
    if clamps:
        return var.clamp(min=eps).rsqrt(), var < eps
    return (var + eps).rsqrt(), None


def _statistics_in_graph(parts: Sequence[BackwardInput], batch: BatchStatistics) -> dict[torch.device, Pair]:
    """Return mean and invstd of the batch on each device, as functions of the inputs of all `parts`.

    Their values are those of the forward. Replicas that recorded no graph, and are not here, have constant inputs.
    """
    sums: list[Pair] = []
    for part in parts:
        mean = batch.mean_invstd[part.input.device][0]
        x = part.input.to(mean.dtype)
        deviations = x - per_channel(mean, x)
        pair = deviations.sum(reduced_dims(x)), deviations.square().sum(reduced_dims(x))
        sums.append(move_pair(pair, batch.master))
    moments = batch.totals(sums, Workspace()) / batch.divisor
    # About a constant, the mean of the forward: so mean and variance are exact in derivatives of any order.
    first, second = (moments - moments.detach()).chunk(2)  # zeros, in the graph
    mean, invstd = batch.mean_invstd[batch.master]
    change = second - first.square()  # of the variance
    if batch.clamped is not None:
        change = change.masked_fill(batch.clamped, 0)
    pair = mean + first, (invstd.pow(-2) + change).rsqrt()
    return {device: move_pair(pair, device) for device in batch.mean_invstd}


GENERAL = Backend()
