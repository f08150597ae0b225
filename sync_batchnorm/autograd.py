"""One autograd node for each call of a layer, which belongs to all replicas.

::

    replica i, in its own thread                      master                                       replica i again

    save x_i, w_i
    moments_i of x_i, no graph    ----------------->  merge all moments
                                                      y_1 .. y_R = SyncBatchNorm(x_1, w_1, b_1, .. x_R, w_R, b_R)
                                  <-----------------  y_i, mean, invstd                 ---------> write y_i

So the exchange of the forward is part of the graph, and nothing in a backward waits for another replica: the engine
runs this node when it has the gradients of all outputs. The node makes the two sums of each replica, adds them up, and
makes all input gradients.

NOTE [memory of the outputs]: The node hands out its outputs before they are written. They are memory that each replica
has made in its thread, and writes in its thread after the meeting, so that all of them work at once.

NOTE [who saves what]: Each replica saves its own input and weight, in a node that hands a tensor through (`_Save`), and
the common node asks these nodes for them. So hooks on saved tensors, which belong to a thread, see what belongs to its
replica, as activation checkpointing wants it; and of two replicas that call `torch.autograd.grad` in their forward,
neither frees what the other one needs.

NOTE [gradients of gradients]: Beside the outputs the node returns, for each device, a pair ``(2, C)`` of mean and
invstd, which nobody else sees. With `create_graph` its gradients are formulas in ``dy_i``, ``x_i``, ``w_i`` and that
pair, which autograd records; a second backward reaches this node again through the pair. `sync_moments` is the same
node without outputs, where the pair is mean and variance, and its user sees it.

NOTE [places]: A place is a device and, on CUDA, a stream: replicas may use streams of their own. What belongs to a
replica is computed at its place, also by the master and in a backward; so memory goes back to the stream that has used
it. Tensors go from one place to another through `hand_over` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync_batchnorm import distributed, normalization
from sync_batchnorm.moments import counts_on, operators_for, per_channel, reduced_dims, statistics_dtype
from sync_batchnorm.normalization import Statistics
from sync_batchnorm.recompute import has_hooks, without_hooks
from sync_batchnorm.running import RunningStatistics

__all__: list[str] = []


class EpsRule(NamedTuple):
    """How eps enters: ``1 / sqrt(var + eps)`` (mode "plus", torch's own) or ``1 / sqrt(max(var, eps))`` ("clamp")."""

    eps: float
    mode: str

    def invstd(self, var: Tensor) -> Tensor:
        return (var + self.eps if self.mode == "plus" else var.clamp(min=self.eps)).rsqrt()

    def clamped(self, var: Tensor) -> Tensor | None:
        """Return where the inverse standard deviation does not depend on the variance, if anywhere."""
        return None if self.mode == "plus" else var < self.eps


class Place(NamedTuple):
    """Where a replica computes, see NOTE [places]."""

    device: torch.device
    stream: torch.cuda.Stream | None  # None where there are none

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which this stream, and with it its device, is the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


_CPU = Place(torch.device("cpu"), None)


def place_of(tensor: Tensor) -> Place:
    """Return the device of `tensor`, and the stream there that this thread uses."""
    if tensor.is_cpu:
        return _CPU
    return Place(tensor.device, torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None)


def hand_over(tensor: Tensor, source: Place, target: Place) -> Tensor:
    """Return `tensor`, which is ready at `source`, for use at `target`: itself on one device, else a copy."""
    if source.device == target.device:
        if target.stream is not None and source.stream is not None and target.stream != source.stream:
            target.stream.wait_stream(source.stream)
            _record(tensor, target.stream)
        return tensor
    with source.entered(), target.entered():  # torch orders a copy after one stream, and the other after it
        return tensor.to(target.device, non_blocking=True)


def _record(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    with suppress(RuntimeError):  # of batched gradients, which have no memory of their own
        tensor.record_stream(stream)


def bring(vectors: Sequence[Tensor], source: Place, target: Place) -> list[Tensor]:
    """Hand over several tensors of one shape; from one device to another as one copy."""
    if source.device == target.device:
        return [hand_over(vector, source, target) for vector in vectors]
    with source.entered():
        packed = torch.stack(list(vectors))
    return list(hand_over(packed, source, target).unbind())


class Replica:
    """The part of a replica in a call: where it computes, its tensors in the graph, and the node that has saved them."""

    def __init__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.place = place_of(input)
        self.tensors = {"input": input, "weight": weight, "bias": bias}
        self.saved: Any = None
        self.records = torch.is_grad_enabled()
        self.requires_grad = False
        if self.records:
            name = next((name for name, tensor in self.tensors.items() if tensor is not None and tensor.requires_grad), "")
            self.requires_grad = bool(name)
            # Without any, the output may still depend on the inputs of the others, and so its gradient on this one.
            through = self.tensors[name] if name else input.new_empty(0, dtype=torch.float32).requires_grad_()
            kept: Tensor = _Save.apply(through, (input, weight))  # type: ignore[no-untyped-call]
            self.tensors[name], self.saved = kept, kept.grad_fn


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, through: Tensor, saved: tuple[Tensor | None, ...]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return through

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


class Left(NamedTuple):
    """What a call leaves to the running statistics of a replica."""

    statistics: Statistics | None  # at `place`; None if there was not a single element
    var: Tensor | None  # at `home`, see `Call`
    home: Place
    place: Place
    eps: float
    elements: int | Tensor  # per channel

    def move(self, running: RunningStatistics) -> None:
        """Move `running` towards these statistics."""
        if self.statistics is None:
            running.count()
            return
        mean, invstd = self.statistics
        if self.var is None:
            var = (invstd.pow(-2) - self.eps).clamp_(min=0)
        else:
            var = hand_over(self.var, self.home, self.place)
        count = self.elements
        running.update(mean, var, count if isinstance(count, int) else hand_over(count, self.home, self.place))


class Call:
    """One call of a layer by all replicas: what its backward needs beside what they have saved.

    Args:
        replicas: their parts; the first is that of the master.
        rule: how eps enters; None for a call that returns mean and variance, and has no outputs.
        group: the processes to exchange with.
    """

    count: int | Tensor  # elements per channel in all replicas, and in all processes of the group
    var: Tensor | None = None  # (C,), biased, if it was computed
    exact: bool = False  # whether fast statistics were not good enough
    clamped: Tensor | None = None  # see `EpsRule`
    joined: torch.dtype | None = None  # of the statistics, where the inputs of all replicas were joined
    one_weight: bool = True  # whether all replicas have the same weight and bias

    def __init__(self, replicas: Sequence[Replica], rule: EpsRule | None, group: distributed.Group | None) -> None:
        self.rule, self.group = rule, group
        self.statistics: dict[Place, Statistics] = {}
        self.factors: list[Tensor] = []  # on the CPU, weight * invstd of each replica
        self.places = [replica.place for replica in replicas]
        self.saved = [replica.saved for replica in replicas]
        # One pair for each place, or for each replica where users get them.
        self.pair_places = self.places if rule is None else list(dict.fromkeys(self.places))
        self.slots = [(name, i) for i, r in enumerate(replicas) for name, t in r.tensors.items() if t is not None]

    @property
    def home(self) -> Place:
        """The place of the master."""
        return self.places[0]

    def left(self, place: Place) -> Left:
        """Return what is left to the running statistics at `place`, without what the graph holds."""
        statistics = None if isinstance(self.count, int) and self.count == 0 else self.statistics[place]
        eps = 0.0 if self.rule is None else self.rule.eps
        return Left(statistics, self.var, self.home, place, eps, self.count)

    def record(
        self, replicas: Sequence[Replica], outputs: Sequence[Tensor], pairs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return `outputs`, one for each replica, and `pairs`, as functions of the tensors of `replicas`.

        No hook on saved tensors is called.
        """
        tensors = [(replicas[i].records, replicas[i].tensors[name]) for name, i in self.slots]
        results: tuple[Tensor, ...]
        with torch.enable_grad(), without_hooks() if has_hooks() else nullcontext():
            results = _SyncBatchNorm.apply(  # type: ignore[no-untyped-call]
                self, outputs, pairs, *[tensor if records else tensor.detach() for records, tensor in tensors]
            )
        return results

    def count_at(self, place: Place) -> Tensor:
        """Return the count as a tensor ``(1,)`` in int32 at `place`, on CUDA."""
        if isinstance(self.count, int):
            return counts_on(*place, (self.count,), torch.int32)
        return hand_over(self.count.to(torch.int32)[None], self.home, place)


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, outputs: Sequence[Tensor], pairs: Sequence[Tensor], *_: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*pairs)
        return *outputs, *pairs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        pair_grads = grads[len(grads) - len(call.pair_places) :]
        grad_outputs = grads[: len(grads) - len(pair_grads)] or (None,) * len(call.places)
        edges = zip(call.slots, ctx.needs_input_grad[3:], ctx.next_functions, strict=True)
        wanted = {slot for slot, needed, (node, _) in edges if needed and _will_run(node)}
        found: Gradients = {}
        if any(grad is not None for grad in grads):
            with nullcontext() if call.home.stream is None else _in_order(call, grads):
                backward = _Backward(call, grad_outputs, wanted)
                if torch.is_grad_enabled() or any(grad is not None for grad in pair_grads):
                    backward.differentiable(pair_grads, ctx.saved_tensors)
                elif call.joined is not None and backward.has_all_inputs():
                    backward.joined(call.joined)
                else:
                    backward.fused()
                found = backward.found
        return None, None, None, *[found.get(slot) for slot in call.slots]


Slot = tuple[str, int]  # a name in `Replica.tensors`, and the number of the replica
Gradients = dict[Slot, Tensor | None]


def _will_run(node: Any) -> bool:
    """Return whether the running backward goes on to `node`, as far as torch tells."""
    # Private: without it, gradients that nobody has asked for are computed, and dropped.
    will_run = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return node is not None and (will_run is None or will_run(node))
    except RuntimeError:  # A leaf, in `torch.autograd.grad`: torch does not tell.
        return True


@contextmanager
def _in_order(call: Call, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Run the body at the place of the master, in order with the streams that the engine has chosen; on CUDA."""
    here = torch.cuda.current_stream(call.home.device)
    order = []
    for place in dict.fromkeys(call.places):
        stream, there = place.stream, torch.cuda.current_stream(place.device)
        order += [(stream, other) for other in dict.fromkeys((here, there)) if other != stream]
    for stream, engine in order:
        stream.wait_stream(engine)
    for grad, place in zip(grads, (*call.places, *call.pair_places), strict=False):
        if grad is not None and place.stream is not None:
            _record(grad, place.stream)
    with call.home.entered():
        yield
    for stream, engine in order:
        engine.wait_stream(stream)


class _Backward:
    """The gradients of one backward of a call, in one of three ways.

    Args:
        call: the call.
        grad_outputs: of each replica; None where the output takes no part in the loss.
        wanted: what to compute.
    """

    def __init__(self, call: Call, grad_outputs: Sequence[Tensor | None], wanted: set[Slot]) -> None:
        self.call, self.grad_outputs, self.wanted = call, grad_outputs, wanted
        self.found: Gradients = {}
        self.wants_inputs = any(name == "input" for name, _ in wanted)
        self.inputs: list[Tensor | None] = []
        self.weights: list[Tensor | None] = []
        for i, (saved, grad) in enumerate(zip(call.saved, grad_outputs, strict=True)):
            input = weight = None
            if saved is not None and (grad is not None or ("input", i) in wanted):
                with call.places[i].entered():  # Hooks may compute what was saved.
                    input, weight = saved.saved_tensors
            self.inputs.append(input)
            self.weights.append(weight)

    def has_all_inputs(self) -> bool:
        """Return whether the inputs of all replicas take part, and so can be joined."""
        return all(input is not None for input in self.inputs)

    def fused(self) -> None:
        """Compute what is not differentiated again, each replica at its place, with the operators of torch."""
        call = self.call
        weighted = call.group is not None or not call.one_weight
        rows: list[Tensor] = []
        for i, place in enumerate(call.places):
            grad, input, weight = self.grad_outputs[i], self.inputs[i], self.weights[i]
            if grad is None or input is None:
                continue
            with place.entered():
                needs = ("weight", i) in self.wanted, ("bias", i) in self.wanted
                sums = normalization.gradient_sums(grad, input, call.statistics[place], weight, needs)
                self.found["weight", i], self.found["bias", i] = sums.grad_weight, sums.grad_bias
                if not self.wants_inputs:
                    continue
                vectors = [sums.sum_dy, sums.sum_dy_normalized]
                if weighted and weight is not None:
                    vectors = [vector * weight for vector in vectors]
                rows += bring(vectors, place, call.home)
        if self.wants_inputs:
            self._fused_inputs(self._totals(rows), weighted)

    def _totals(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the sums over all replicas and processes, ``(2, C)``, at the place of the master."""
        call = self.call
        dtype = torch.float64 if operators_for(call.home.device) == "cpu" else rows[0].dtype
        stacked = torch.stack(list(rows))  # (2 * R, C)
        totals = stacked.view(-1, 2, stacked.shape[1]).sum(0, dtype=dtype)
        if call.clamped is not None:
            totals[1].masked_fill_(call.clamped, 0)
        return totals if call.group is None else distributed.all_reduced(totals, call.group)

    def _fused_inputs(self, totals: Tensor, weighted: bool) -> None:
        call = self.call
        at: dict[Place, Any] = {}
        for i, place in enumerate(call.places):
            input, weight, statistics = self.inputs[i], self.weights[i], call.statistics[place]
            if ("input", i) not in self.wanted or input is None:
                continue
            with place.entered():
                if operators_for(place.device) == "cuda":
                    if place not in at:
                        at[place] = hand_over(totals, call.home, place), call.count_at(place)
                    self.found["input", i] = normalization.fused_input_gradient(
                        self.grad_outputs[i], input, statistics, weight, *at[place], weighted
                    )
                    continue
                if call.factors:
                    factor = call.factors[i]
                else:
                    factor = statistics.invstd if weight is None else statistics.invstd * weight
                    factor = factor.to(statistics_dtype(input.dtype))
                if place not in at:
                    here, by = hand_over(totals, call.home, place), statistics.invstd if weighted else factor
                    at[place] = normalization.linear_gradient(statistics, here, by, call.count, input.dtype)
                self.found["input", i] = normalization.input_gradient(self.grad_outputs[i], input, factor, at[place])

    def joined(self, dtype: torch.dtype) -> None:
        """Compute what is not differentiated again on the joined batch, with the operator of torch."""
        call, inputs = self.call, [input for input in self.inputs if input is not None]
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, self.grad_outputs, strict=True)]
        grad, input = torch.cat(grads).to(dtype), torch.cat(inputs).to(dtype)
        mean, invstd = call.statistics[call.home]
        if dtype != mean.dtype:  # What is large and rounded is taken off before; what was rounded off is the mean then.
            rounded = mean.to(dtype)
            input -= per_channel(rounded, input)
            mean = (mean - rounded).to(dtype)
        weight = self.weights[0]
        weight = weight if weight is None else weight.to(dtype)
        needs = [self.wants_inputs, *[any(wanted == name for wanted, _ in self.wanted) for name in ("weight", "bias")]]
        # Without eps, which is part of invstd already.
        grad_input, self.found["weight", 0], self.found["bias", 0] = normalization.batch_norm_backward(
            grad, input, weight, None, None, mean, invstd.to(dtype), True, 0.0, needs
        )
        if self.wants_inputs:
            parts = torch.split_with_sizes(grad_input.to(inputs[0].dtype), [len(input) for input in inputs])
            self.found |= {("input", i): part for i, part in enumerate(parts)}

    def differentiable(self, pair_grads: Sequence[Tensor | None], pairs: Sequence[Tensor]) -> None:
        """Compute gradients in operations that autograd can differentiate, see NOTE [gradients of gradients]."""
        call, home = self.call, self.call.home
        at = dict(zip(call.pair_places, pairs, strict=True))
        dtype = pairs[0].dtype
        arrived = [hand_over(grad, p, home) for grad, p in zip(pair_grads, call.pair_places, strict=True) if grad is not None]
        centered: dict[int, Tensor] = {}
        for i, place in enumerate(call.places):
            grad, input, weight = self.grad_outputs[i], self.inputs[i], self.weights[i]
            if input is None:
                continue
            with place.entered():
                mean, second = at[place]
                centered[i] = input.to(dtype) - per_channel(mean, input)
                if grad is None:
                    continue
                dims, wide = reduced_dims(input), grad.to(dtype)
                sum_dy, sum_dy_xmu = wide.sum(dims), (wide * centered[i]).sum(dims)
                factor = second if weight is None else second * weight
                parameter = input.dtype if weight is None else weight.dtype
                self.found["weight", i] = (sum_dy_xmu * second).to(parameter)
                self.found["bias", i] = sum_dy.to(parameter)
                if ("input", i) in self.wanted:
                    self.found["input", i] = wide * per_channel(factor, input)
                weighted = sum_dy_xmu if weight is None else sum_dy_xmu * weight
                arrived.append(hand_over(torch.stack((-sum_dy * factor, weighted)), place, home))
        if not self.wants_inputs:
            return
        total = torch.stack(arrived).sum(0)
        if call.group is not None:
            total = distributed.all_reduced_in_graph(total, call.group)
        grad_mean, grad_second = total
        if call.rule is not None:  # From the inverse standard deviation to the variance.
            grad_second = grad_second * -0.5 * at[home][1] ** 3
        if call.clamped is not None:
            grad_second = grad_second.masked_fill(call.clamped, 0)
        through = torch.stack((grad_mean, 2 * grad_second)) / (call.count or 1)
        for i, input in enumerate(self.inputs):
            if ("input", i) in self.wanted and input is not None:
                place = call.places[i]
                with place.entered():
                    through_mean, through_second = hand_over(through, home, place)
                    rest = per_channel(through_mean, input) + per_channel(through_second, input) * centered[i]
                    direct = self.found.get(("input", i))
                    self.found["input", i] = (rest if direct is None else direct + rest).to(input.dtype)
