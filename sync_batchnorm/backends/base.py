"""The interface that each kind of device implements for batch normalization, and the arithmetic of all kinds.

Nothing here knows of threads, modules or the graph. ``C`` is the number of channels, dimension 1 of every input
``(N, C, +)``; vectors are ``(C,)``; a count is a number of elements per channel. A new kind of device is a new file in
this folder, with a subclass of `Backend`, and a row in `BACKENDS` in `__init__.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from sync_batchnorm.places import Place, Streams

if TYPE_CHECKING:
    from sync_batchnorm.backends.joined import Joined

__all__: list[str] = []


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of inputs of `dtype`: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def channel_count(shape: torch.Size) -> int:
    """Return the number of elements per channel of an input of `shape`."""
    return shape[0] * math.prod(shape[2:])


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a vector ``(C,)`` so that it broadcasts over ``(N, C, +)``."""
    return vector.view(-1, *[1] * (like.dim() - 2)) if like.dim() > 2 else vector


def reduced_dims(input: Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def memory_for_output(input: Tensor, memory: Tensor | None = None) -> Tensor:
    """Return memory with the shape, dtype and strides that the output of `torch.nn.BatchNorm2d` has for `input`.

    `memory`, if given, is contiguous, has the size of `input`, and is returned if its strides are right.
    """
    if input.is_contiguous():
        return torch.empty_like(input, memory_format=torch.contiguous_format) if memory is None else memory
    if looks_channels_last(input):
        return torch.empty_like(input, memory_format=CHANNELS_LAST[input.dim()])
    return memory if memory is not None else torch.empty_like(input, memory_format=torch.contiguous_format)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def looks_channels_last(input: Tensor) -> bool:
    """Return whether torch's output for `input` is channels_last: channels are innermost in memory, rows in order."""
    if input.dim() not in CHANNELS_LAST:
        return False
    if input.is_contiguous(memory_format=CHANNELS_LAST[input.dim()]):  # strides of size-1 dimensions do not count
        return True
    strides, least = input.stride(), 1
    for dim in (1, *range(input.dim() - 1, 1, -1), 0):
        if strides[dim] < least:
            return False
        least = strides[dim] * max(input.shape[dim], 1)
    return True


def cached_constants(make: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Cache the small constant tensors that `make` returns for its arguments; clear the cache when it is full.

    Tensors of another class, as `FakeTensorMode` makes them, are not cached: later calls would get them.
    """
    cache: dict[Any, tuple[Tensor, ...]] = {}

    def get(*key: Any) -> tuple[Tensor, ...]:
        tensors = cache.get(key)
        if tensors is None:
            with torch.inference_mode(False):
                tensors = make(*key)
            if len(cache) >= 1024:
                cache.clear()
            if all(type(tensor) is Tensor for tensor in tensors):
                cache[key] = tensors
        return tensors

    return get


def merge_moments(mean: Tensor, var: Tensor, fractions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge means and biased variances of K parts, ``(K, C)`` each, into those of the whole, ``(C,)`` each.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for any
    number of parts at once. The parts are summed in their order.

    Args:
        mean, var: of the parts.
        fractions: ``(K, 1)``, the fraction of all elements that each part has; None if all have equally many.
    """
    if fractions is None:
        merged = mean.mean(0)
        deviations = mean - merged
        return merged, torch.addcmul(var, deviations, deviations).mean(0)
    merged = (mean * fractions).sum(0)
    deviations = mean - merged
    return merged, (torch.addcmul(var, deviations, deviations) * fractions).sum(0)


class PartStatistics(NamedTuple):
    """The statistics of the input of one replica, in K parts of equal size. K is 1 except on the CPU."""

    mean: Tensor  # (K, C); after `sent`, (2 * K, C): also the variances, or `invstd`
    var: Tensor | None  # (K, C), biased; None if there is `invstd`
    invstd: Tensor | None  # (K, C), if the backend merges inverse standard deviations
    elements: int  # per channel, in each of the K parts
    is_packed: bool = False  # whether it was `sent`

    def sent(self, source: Place, target: Place, streams: Streams) -> PartStatistics:
        """Return these statistics, which are ready at `source`, for use at `target`.

        The master unpacks them: in the threads of replicas, every call of an operator waits for the GIL.
        """
        packed = self.mean
        if not self.is_packed:
            with streams.at(source):
                packed = torch.cat((self.mean, cast(Tensor, self.var if self.invstd is None else self.invstd)))
        return PartStatistics(streams.to_place(packed, source, target), self.var, self.invstd, self.elements, True)

    def unpacked(self) -> PartStatistics:
        """Return these statistics as they were before they were `sent`."""
        if not self.is_packed:
            return self
        mean, second = self.mean.chunk(2)
        is_invstd = self.invstd is not None
        return PartStatistics(mean, None if is_invstd else second, second if is_invstd else None, self.elements)


class RunningStatistics(NamedTuple):
    """The buffers of a layer, and the momentum with which a call updates them."""

    mean: Tensor | None
    var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None

    def count_call(self) -> float:
        """Count a call; return the momentum, or zero for a cumulative average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.data.add_(1)
        return self.momentum or 0.0

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Count a call, and update the buffers in place with its statistics.

        Args:
            mean: of the batch, ``(C,)``.
            var: of the batch, biased, ``(C,)``; the running variance moves towards the unbiased one.
            count: elements per channel.
        """
        momentum = self.count_call()
        if self.mean is None or self.var is None:
            return
        # Updates go through `data`, which does not change the version counter, as the kernel of torch does not: an
        # earlier forward in eval mode may have saved these buffers, and its backward must still run.
        for buffer, value in ((self.mean, mean), (self.var, var * (count / (count - 1)))):
            step: Tensor | float = momentum
            if self.momentum is None and self.num_batches_tracked is not None:
                # The step stays a tensor, so that the host does not wait for the counter.
                step = self.num_batches_tracked.to(buffer.dtype).reciprocal()
            # As torch computes it. `lerp_` would make NaN of an infinite variance if the momentum is one.
            buffer.data.mul_(1 - step).add_(value.to(buffer.dtype) * step)


class BatchStatistics:
    """The batch statistics of all replicas and processes, outside of the graph.

    The backend makes them; the master sets its place, the count and eps, and fills `at`. The count is an int, or a
    tensor if several processes have added up their counts: then the host does not wait for it.

    Args:
        mean: ``(C,)``, at the place of the master, like all the other vectors.
        var: biased; None if the backend made only the inverse standard deviation.
        invstd: None if there is no eps, or if it is not computed yet.
        updated: whether the backend has updated the running statistics already.
    """

    master: Place
    count: int | Tensor  # elements per channel
    eps: float  # as used in `invstd`
    clamped: Tensor | None = None  # where eps has replaced a smaller variance; None if eps is added

    def __init__(self, mean: Tensor, var: Tensor | None, invstd: Tensor | None, updated: bool = False) -> None:
        self.mean, self.var, self.invstd, self.updated = mean, var, invstd, updated
        # The pair that the node returns for each place: mean and inverse standard deviation; without eps, mean and
        # variance.
        self.at: dict[Place, tuple[Tensor, Tensor]] = {}

    def update(self, running: RunningStatistics, place: Place) -> None:
        """Update `running`, whose buffers are at `place`, with these statistics."""
        # A replica may use its buffers on another stream than the one that was current in its call.
        source = place if place in self.at else next(other for other in self.at if other.device == place.device)
        mean, invstd = self.at[source]
        if source != place:
            mean, invstd = Streams((source, place)).to_place_joined((mean, invstd), source, place)
        var, count = self.var, self.count
        if var is None:
            var = (invstd.pow(-2) - self.eps).clamp_(min=0)
        elif place != self.master:
            var = Streams((self.master, place)).to_place(var, self.master, place)
        if isinstance(count, Tensor) and place != self.master:
            count = Streams((self.master, place)).to_place(count, self.master, place)
        running.update(mean, cast(Tensor, var), count)


class ReplicaGradients:
    """One replica in a backward: its tensors, and the gradients that are computed for it.

    Args:
        place: where it computes.
        grad_output: the gradient of its output; None if the output does not enter the loss.
        input: ``(N, C, +)``.
        weight: ``(C,)`` or None.
        wanted: the names of the tensors whose gradients are needed: "input", "weight", "bias".
    """

    __slots__ = ("grad_output", "grads", "input", "kept", "place", "wanted", "weight")

    def __init__(
        self, place: Place, grad_output: Tensor | None, input: Tensor, weight: Tensor | None, wanted: set[str]
    ) -> None:
        self.place, self.grad_output, self.input, self.weight, self.wanted = place, grad_output, input, weight, wanted
        self.grads: dict[str, Tensor | None] = {}  # may also hold gradients that are not wanted
        self.kept: Any = None  # what a backend keeps from `gradient_sums` for `input_gradient`


class Backward(NamedTuple):
    """One backward of a call."""

    replicas: Sequence[ReplicaGradients]  # those that this backward reaches
    pair_grads: Sequence[tuple[Tensor, Place]]  # the gradients of the pairs that the node has returned, ``(2, C)``
    batch: BatchStatistics
    at: dict[Place, tuple[Tensor, Tensor]]  # like `batch.at`; in the graph, if one is recorded
    streams: Streams
    has_eps: bool  # whether the second vector of each pair is the inverse standard deviation
    own_weights: bool  # whether weights may differ between replicas, also of other processes
    of_all: bool  # whether `replicas` are all replicas of the call
    reduce: Callable[[Tensor], Tensor]  # adds up a tensor over all processes

    def scaled_by_weight(self, vector: Tensor, weight: Tensor | None) -> Tensor:
        """Return `vector`, a sum over one replica, multiplied by its weight if replicas may have different weights."""
        return vector * weight if self.own_weights and weight is not None else vector

    def without_clamped(self, totals: Tensor) -> Tensor:
        """Return the totals ``(2, C)``, with zero for the gradient of invstd where eps has replaced the variance."""
        if self.batch.clamped is None:
            return totals
        return torch.stack((totals[0], totals[1].masked_fill(self.batch.clamped, 0)))


class Backend:
    """The operations of batch normalization on one kind of device.

    A backend must implement the methods that have no body here. All methods run at the place of their tensors.
    """

    merge_dtype: torch.dtype | None = None  # of the merge; None for the dtype of the statistics
    pair_dtype: torch.dtype | None = None  # of mean and invstd; None for the dtype of the statistics
    takes_invstd = False  # whether `part_statistics` can return invstd instead of the variance, if eps is added
    joined: Joined | None = None  # normalizes small inputs of all replicas as one batch; None if no backend does

    def part_statistics(self, input: Tensor, eps: float, takes_invstd: bool) -> tuple[PartStatistics, Tensor | None]:
        """Return the statistics of `input`.

        Args:
            input: ``(N, C, +)``, with elements.
            eps: added to the variance later.
            takes_invstd: whether to make ``1 / sqrt(var + eps)`` instead of the variance.

        Returns:
            The statistics; and memory that can be reused for the output, see `memory_for_output`, or None.
        """
        raise NotImplementedError

    def nothing(self, input: Tensor) -> PartStatistics:
        """Return the statistics of an input without elements: zeros, with a count of zero."""
        zeros = input.new_zeros(1, input.shape[1], dtype=statistics_dtype(input.dtype))
        return PartStatistics(zeros, zeros, None, 0)

    def merge(self, parts: Sequence[PartStatistics], eps: float, running: RunningStatistics | None) -> BatchStatistics:
        """Merge the statistics of all `parts`, in their order. They are on one device; some may have no elements.

        Args:
            parts: at least one.
            eps: added to the variance by a backend that `takes_invstd`.
            running: such a backend may update it, and then says so by `updated` in the result.
        """
        parts = [part.unpacked() for part in parts if part.elements] or parts[:1]
        means, variances, _, elements, _ = zip(*parts, strict=True)
        mean, var, fractions = torch.cat(means), torch.cat(variances), None
        if self.merge_dtype is not None:
            mean, var = mean.to(self.merge_dtype), var.to(self.merge_dtype)
        if len(set(elements)) > 1:
            total = sum(part.elements * part.mean.shape[0] for part in parts)
            fractions = torch.cat([mean.new_full((part.mean.shape[0], 1), part.elements / total) for part in parts])
        return BatchStatistics(*merge_moments(mean, var, fractions), None)

    def normalizer(
        self, statistics: tuple[Tensor, Tensor], dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None
    ) -> Any:
        """Return the `normalizer` for `normalize` and inputs of `dtype`; the master makes it from mean and invstd."""
        return statistics

    def normalize(
        self, input: Tensor, normalizer: Any, weight: Tensor | None, bias: Tensor | None, out: Tensor
    ) -> None:
        """Write ``(input - mean) * invstd * weight + bias`` into `out`. The input has elements."""
        raise NotImplementedError

    def gradients(self, backward: Backward) -> None:
        """Compute the gradients that `backward` asks for, and put them into the `grads` of its replicas."""
        totals = self.sums(backward)
        if not any("input" in replica.wanted for replica in backward.replicas):
            return
        batch, streams = backward.batch, backward.streams
        if totals is None:
            totals = torch.zeros_like(torch.stack(backward.at[batch.master]))
        rest = self.rest(backward.reduce(totals), backward)
        rest_at: dict[Place, Any] = {}
        for replica in backward.replicas:
            if "input" in replica.wanted:
                place = replica.place
                with streams.at(place):
                    if place in rest_at:
                        rest_at[place] = self.again(rest_at[place])
                    else:
                        rest = self.again(rest)
                        rest_at[place] = self.again(streams.to_place(rest, batch.master, place))
                    replica.grads["input"] = self.input_gradient(replica, rest_at[place], backward)

    def sums(self, backward: Backward) -> Tensor | None:
        """Compute the gradients of weights and biases; return the sums over the elements of all replicas.

        Each replica gets its own gradients: its hooks see them, and `torch.autograd.grad` may ask for them.

        Returns:
            ``(2, C)``, as `gradient_sums` makes them, at the place of the master; None if nothing was summed.
        """
        vectors: list[Tensor] = []
        master, streams = backward.batch.master, backward.streams
        for replica in backward.replicas:
            if replica.grad_output is not None:
                with streams.at(replica.place):
                    pair = self.gradient_sums(replica, backward)
                vectors += streams.to_place_joined(pair, replica.place, master)
        for grad, place in backward.pair_grads:
            vectors.append(streams.to_place(grad, place, master).flatten())
        return torch.cat(vectors).view(-1, 2, backward.batch.mean.shape[0]).sum(0) if vectors else None

    def gradient_sums(self, replica: ReplicaGradients, backward: Backward) -> tuple[Tensor, Tensor]:
        """Compute the gradients of weight and bias of one replica, whose output has a gradient; return its two sums.

        `rest` takes the totals of these sums over all replicas. Unless a backend says otherwise, they are those of
        ``dy`` and ``dy * (x - mean)``, multiplied by the weight if replicas may have different weights.
        """
        raise NotImplementedError

    def rest(self, totals: Tensor, backward: Backward) -> Any:
        """Return what `input_gradient` takes, from the `totals` of all replicas and processes."""
        raise NotImplementedError

    def again(self, rest: Any) -> Any:
        """Return `rest` for one more use: a view of it if gradients are differentiated again, see `general.py`."""
        return rest

    def input_gradient(self, replica: ReplicaGradients, rest: Any, backward: Backward) -> Tensor:
        """Return the gradient of the input of one replica."""
        raise NotImplementedError
