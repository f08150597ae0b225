"""Batch normalization on any device, in operators that every device has and that autograd can differentiate.

Nothing here knows of threads or modules. ``C`` is the number of channels, dimension 1 of every input ``(N, C, +)``;
vectors are ``(C,)``; a count is a number of elements per channel. To make a kind of device faster, give it a file in
this folder, with a subclass of `Backend`, and a row in `BACKENDS` in `__init__.py`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .places import CPU, Place, Streams

__all__: list[str] = []


@functools.cache
def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of inputs of `dtype`: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=1024)
def channel_count(shape: torch.Size) -> int:
    """Return the number of elements per channel of an input of `shape`."""
    return shape[0] * math.prod(shape[2:])


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector


def reduced_dims(input: Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def memory_for_output(input: Tensor) -> Tensor:
    """Return memory in the format of the output for `input`."""
    return torch.empty_like(input, memory_format=format_of(input))


def single_value(shapes: Sequence[torch.Size]) -> ValueError:
    """Return torch's own error for a single value per channel, in inputs of which all but one may be empty."""
    shape = next((shape for shape in shapes if shape.numel()), shapes[0])
    return ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")


def format_of(input: Tensor) -> torch.memory_format:
    """Return the format in which the output and the gradient of `input` are: channels_last if it is, or contiguous."""
    if not input.is_contiguous() and input.dim() in (4, 5):
        channels_last = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
        if input.is_contiguous(memory_format=channels_last):  # whatever the strides of dimensions of size one
            return channels_last
    return torch.contiguous_format


def merge_moments(mean: Tensor, var: Tensor, fractions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances of K parts, ``(K, C)`` each, into those of the whole, ``(C,)`` each.

    `fractions`, ``(K, 1)``, are those of all elements that each part has; None if all have equally many. Chan, Golub,
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for any number of parts.
    """
    if fractions is None:
        merged = mean.mean(0)
        deviations = mean - merged
        return merged, torch.addcmul(var, deviations, deviations).mean(0)
    merged = (mean * fractions).sum(0)
    deviations = mean - merged
    return merged, (torch.addcmul(var, deviations, deviations) * fractions).sum(0)


Pair = Sequence[Tensor]  # mean and inverse standard deviation of the batch, ``(C,)`` each, at some place


class ReplicaStatistics(NamedTuple):
    """The statistics of the input of one replica, in K parts of equal size. K is 1 except on the CPU."""

    mean: Tensor  # (K, C); once `sent`, (2 * K, C): `second` follows the means
    second: Tensor  # (K, C): biased variances, or inverse standard deviations
    is_invstd: bool  # whether `second` has those; on CUDA, where both are (C,) then
    elements: int  # per channel, in all parts together
    place: Place | None = None  # where they were `sent`; None if they are where the replica computes

    def sent(self, source: Place, target: Place, streams: Streams) -> "ReplicaStatistics":
        """Return these statistics, which are ready at `source`, for use at `target`."""
        packed = self.mean
        if self.place is None:
            with streams.at(source):
                packed = torch.cat((self.mean, self.second))
        mean = streams.to_place(packed, source, target)
        return ReplicaStatistics(mean, self.second, self.is_invstd, self.elements, target)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Return the means, and the variances or inverse standard deviations; only the master needs to ask."""
        if self.place is None:
            return self.mean, self.second
        mean, second = self.mean.chunk(2)
        return mean, second


class RunningStatistics(NamedTuple):
    """The buffers of a layer, and the momentum with which a call updates them."""

    mean: Any  # a tensor; None without running statistics
    var: Any
    num_batches_tracked: Tensor | None
    momentum: float | None

    def suits(self, dtype: torch.dtype) -> bool:
        """Return whether torch's kernel can update them: it has no cumulative average, and counts in their dtype."""
        return self.momentum is not None and self.mean is not None and self.mean.dtype == dtype

    def count_call(self) -> float:
        """Count a call; return the momentum, or zero for a cumulative average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.data.add_(1)
        return self.momentum or 0.0

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Count a call, and move the buffers towards its mean and the unbiased variance; `var` is the biased one."""
        momentum = self.count_call()
        if self.mean is None:
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


@dataclass(slots=True)
class BatchStatistics:
    """The batch statistics of all replicas and processes, outside of the graph; vectors are at the master's place."""

    mean: Tensor
    var: Tensor | None  # biased; None if the backend made only the inverse standard deviation, with eps added
    invstd: Tensor | None = None  # None if it is not computed yet
    updated: bool = False  # whether the backend has updated the running statistics already
    count: int | Tensor = 0  # elements per channel; a tensor if processes have added them up, so that no host waits
    clamped: Tensor | None = None  # where eps has replaced a smaller variance; None if eps is added
    master: Place = CPU
    at: dict[Place, Pair] = field(default_factory=dict)

    def update(self, running: RunningStatistics, eps: float) -> None:
        """Update the buffers of the master's replica, unless the backend has done so; `eps` is that of `invstd`."""
        if isinstance(self.count, int) and self.count == 0:
            running.count_call()
        elif not self.updated:
            mean, invstd = self.at[self.master]
            var = (invstd.pow(-2) - eps).clamp_(min=0) if self.var is None else self.var
            running.update(mean, var, self.count)


@dataclass(slots=True)
class ReplicaGradients:
    """One replica in a backward: its tensors, and the gradients that are computed for it."""

    place: Place
    grad_output: Tensor | None  # None if the output does not enter the loss
    input: Any  # a tensor; None if nothing is computed from it
    weight: Tensor | None
    wants_input: bool
    wants_parameters: bool
    grad_input: Tensor | None = None
    grad_weight: Tensor | None = None  # also made if it is not wanted, like that of the bias
    grad_bias: Tensor | None = None
    kept: Any = None  # what a backend keeps from `gradient_sums` for `input_gradient`


class Backward(NamedTuple):
    """One backward of a call."""

    replicas: Sequence[ReplicaGradients]  # those that this backward reaches
    batch: BatchStatistics
    at: dict[Place, Pair]  # like `batch.at`; in the graph, if one is recorded
    pair_grads: Sequence[tuple[Tensor, Place]]  # the gradients of mean and invstd, ``(2, C)``, in a second backward
    streams: Streams
    own_weights: bool  # whether weights differ between replicas
    reduce: Callable[[Tensor], Tensor] | None  # adds up a tensor over all processes, if there are several

    def without_clamped(self, totals: Tensor) -> Tensor:
        """Return the totals ``(2, C)``, with zero for the gradient of invstd where eps has replaced the variance."""
        if self.batch.clamped is None:
            return totals
        return torch.stack((totals[0], totals[1].masked_fill(self.batch.clamped, 0)))


class Backend:
    """The operations of batch normalization on any device.

    Gradients that are differentiated again use these on every device. Then the threads of several devices add up the
    gradients of one tensor in any order. So each further use of a tensor takes a view, see `again`: at most two
    gradients arrive at a tensor, in either order the same sum.
    """

    merge_dtype: torch.dtype | None = None  # of the merge; None for the dtype of the statistics
    pair_dtype: torch.dtype | None = None  # of mean and invstd; None for the dtype of the statistics

    def statistics(self, input: Tensor, eps: float, adds_eps: bool) -> tuple[ReplicaStatistics, Tensor | None]:
        """Return the statistics of `input`, which has elements, and memory for the output in its format, or None.

        With `adds_eps`, they may hold ``1 / sqrt(var + eps)`` in place of the variance.
        """
        var, mean = torch.var_mean(input.to(statistics_dtype(input.dtype)), reduced_dims(input), correction=0)
        return ReplicaStatistics(mean[None], var[None], False, channel_count(input.shape)), None

    def nothing(self, input: Tensor) -> ReplicaStatistics:
        """Return the statistics of an input without elements: zeros, with a count of zero."""
        zeros = input.new_zeros(1, input.shape[1], dtype=statistics_dtype(input.dtype))
        return ReplicaStatistics(zeros, zeros, False, 0)

    def merge(
        self, replicas: Sequence[ReplicaStatistics], eps: float, running: RunningStatistics | None
    ) -> BatchStatistics:
        """Merge the statistics of all replicas, sent to one device; a backend may use `eps`, and update `running`."""
        means, variances = zip(*[replica.unpacked() for replica in replicas], strict=True)
        mean, var, fractions = torch.cat(means), torch.cat(variances), None
        if self.merge_dtype is not None:
            mean, var = mean.to(self.merge_dtype), var.to(self.merge_dtype)
        parts = [(len(own), replica.elements / len(own)) for own, replica in zip(means, replicas, strict=True)]
        if len(set(parts)) > 1:
            total = sum([number * count for number, count in parts])
            fractions = torch.cat([mean.new_full((number, 1), count / total) for number, count in parts])
        return BatchStatistics(*merge_moments(mean, var, fractions), None)

    def normalize(self, input: Tensor, pair: Pair, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
        """Write ``(input - mean) * invstd * weight + bias`` into `out`. The input has elements."""
        mean, invstd = pair
        factor = per_channel(invstd if weight is None else invstd * weight, input)
        centered = input - per_channel(mean, input)
        if bias is None:
            torch.mul(centered, factor, out=out)
        else:
            torch.addcmul(per_channel(bias, input), centered, factor, out=out)

    def gradients(self, backward: Backward) -> None:
        """Compute the gradients that `backward` asks for, and put them into its replicas."""
        totals = self.sums(backward)
        wanting = [replica for replica in backward.replicas if replica.wants_input]
        if not wanting:
            return
        batch, streams = backward.batch, backward.streams
        if totals is None:
            totals = torch.zeros_like(torch.stack(list(backward.at[batch.master])))
        if backward.reduce is not None:
            totals = backward.reduce(totals)
        terms = self.common_terms(totals, backward)
        at = {batch.master: terms}
        for replica in wanting:
            place = replica.place
            with streams.at(place):
                if place not in at:
                    terms = again(terms)
                    at[place] = streams.to_place(terms, batch.master, place)
                at[place] = again(at[place])
                replica.grad_input = self.input_gradient(replica, at[place], backward)

    def sums(self, backward: Backward) -> Tensor | None:
        """Return the totals of `gradient_sums`, ``(2, C)``, at the place of the master; None if nothing was summed."""
        vectors: list[Tensor] = []
        master, streams = backward.batch.master, backward.streams
        for replica in backward.replicas:
            if replica.grad_output is not None:
                with streams.at(replica.place):
                    pair: Sequence[Tensor] = self.gradient_sums(replica, backward)
                    if replica.place != master:
                        pair = (streams.to_place(torch.cat(tuple(pair)), replica.place, master),)
                vectors += pair
        for grad, place in backward.pair_grads:
            vectors.append(streams.to_place(grad, place, master).reshape(-1))
        return torch.cat(vectors).view(-1, 2, backward.batch.mean.shape[0]).sum(0) if vectors else None

    def gradient_sums(self, replica: ReplicaGradients, backward: Backward) -> tuple[Tensor, Tensor]:
        """Compute the gradients of weight and bias of one replica, whose output has a gradient; return its two sums.

        Here they are its parts of the gradients of mean and invstd; `common_terms` gets the totals of all replicas.
        """
        mean, invstd = backward.at[replica.place]
        input, weight, grad_output = replica.input, replica.weight, cast(Tensor, replica.grad_output)
        centered = input.to(mean.dtype) - per_channel(mean, input)
        dy, invstd, dims = grad_output.to(mean.dtype), again(invstd), reduced_dims(input)
        summed = again(dy)
        sum_dy, sum_dy_xmu = summed.sum(dims), (summed * centered).sum(dims)
        factor = invstd if weight is None else invstd * weight
        replica.grad_weight, replica.grad_bias = sum_dy_xmu * invstd, sum_dy
        replica.kept = centered, dy * per_channel(factor, input)
        return -sum_dy * factor, sum_dy_xmu if weight is None else sum_dy_xmu * weight

    def common_terms(self, totals: Tensor, backward: Backward) -> Any:
        """Return what `input_gradient` takes; here ``(a, b)``: the statistics add ``a + b * (x - mean)`` to it."""
        grad_mean, grad_invstd = backward.without_clamped(totals)
        grad_var = grad_invstd * -0.5 * backward.at[backward.batch.master][1] ** 3
        count = backward.batch.count
        return torch.stack((grad_mean, 2 * grad_var)) / (count if isinstance(count, Tensor) else max(count, 1))

    def input_gradient(self, replica: ReplicaGradients, terms: Any, backward: Backward) -> Tensor:
        """Return the gradient of the input of one replica."""
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


def again(terms: Any) -> Any:
    """Return `terms` for one more use: a view of them if gradients are differentiated again, see `Backend`."""
    return terms.view_as(terms) if torch.is_grad_enabled() else terms


GENERAL = Backend()
