"""One autograd node for each call of a layer, which belongs to all replicas.

::

    replica i, in its own thread                      master                                       replica i again

    moments_i of x_i, no graph    ----------------->  merge all moments
                                                      save x_1, w_1 .. x_R, w_R
                                                      y_1 .. y_R = SyncBatchNorm(x_1, w_1, b_1, .. x_R, w_R, b_R)
                                  <-----------------  y_i, mean, invstd                 ---------> write y_i

So the exchange of the forward is part of the graph, and nothing in a backward waits for another replica: the engine
runs this node when it has the gradients of all outputs. The node makes the two sums of each replica, adds them up, and
makes all input gradients.

NOTE [memory of the outputs]: The node hands out its outputs before they are written. They are memory that each replica
has made in its thread, and writes in its thread after the exchange, so that all of them work at once.

NOTE [who saves what]: The common node saves inputs and weights of all replicas, but not those of a replica with hooks
on saved tensors: hooks belong to a thread, and activation checkpointing counts what they see. Such a replica saves its
own, in a node that never runs (`_Save`), which the common node asks. Two replicas may each call `torch.autograd.grad`
in their forward; torch frees what a node has saved after the first one. So the first backward that is not one of all
replicas gives each of them such a node (`_divide`). From then on, what a replica has saved is freed when a backward has
used it, and torch itself finds what was freed, or changed in place, as if each replica had a layer of its own.

NOTE [several backwards at once]: Those replicas do so in their threads, at the same time. Without the GIL, torch 2.12
guards neither what a node has saved nor the Python objects of its neighbors: two threads that free or make them at once
crash the process. So both are read only with the lock of the call held. Only the first backward reads what the node has
saved, and frees it at once: torch has nothing left to free, and the others ask the nodes of their replicas.

NOTE [gradients of gradients]: Beside the outputs the node returns, for each device, a pair ``(2, C)`` of mean and
invstd, which nobody else sees. With `create_graph` its gradients are formulas in ``dy_i``, ``x_i``, ``w_i`` and that
pair, which autograd records; a second backward reaches this node again through the pair. `sync_moments` is the same
node without outputs, where the pair is mean and variance, and its user sees it.

NOTE [places]: A place is a device and, on CUDA, a stream: replicas may use streams of their own. What belongs to a
replica is computed at its place, also by the master and in a backward; so memory goes back to the stream that has used
it. Tensors go from one place to another through `hand_over` alone. What a backward reads, at any place, the master has
made before it answers: a replica may differentiate while its peers still wake up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync_batchnorm import distributed, normalization
from sync_batchnorm.moments import counts_on, operators_for, per_channel, reduced_dims, statistics_dtype
from sync_batchnorm.normalization import Statistics
from sync_batchnorm.places import Place, _record, current_place, hand_over, hand_over_packed
from sync_batchnorm.recompute import without_hooks
from sync_batchnorm.torch_private import free_saved, keeps_graph, plain_tensors, will_run

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


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, saved: tuple[Tensor | None, ...]) -> Tensor:
        ctx.save_for_backward(*saved)
        return leaf


def save_for_hooks(input: Tensor, weight: Tensor | None) -> Tensor:
    """Save the tensors of one replica in a node of its own, see NOTE [who saves what].

    Returns:
        What the node returned that saves them. Up to torch 2.12, that node lives as long as this.
    """
    leaf = torch.empty(0, device="cpu", requires_grad=True)
    saved: Tensor = _Save.apply(leaf, (input, weight))  # type: ignore[no-untyped-call]
    return saved


class ReplicaTensors:
    """The part of a replica in a call: where it computes, its tensors, and whether it has saved them itself."""

    def __init__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, has_hooks: bool) -> None:
        self.place = current_place(input.device)
        self.tensors = {"input": input, "weight": weight, "bias": bias}
        self.records = torch.is_grad_enabled()
        self.has_hooks = has_hooks  # on saved tensors, in the thread of the replica
        self.saved = save_for_hooks(input, weight) if has_hooks else None


class Call:
    """One call of a layer by all replicas: what its backward needs beside what they have saved.

    Args:
        replicas: their parts; the first is that of the master.
        rule: how eps enters; None for a call that returns mean and variance, and has no outputs.
        group: the processes to exchange with.
    """

    count: int | Tensor  # elements per channel in all replicas, and in all processes of the group
    var: Tensor | None = None  # (C,), biased, if it was computed
    clamped: Tensor | None = None  # see `EpsRule`
    joined: bool = False  # whether all inputs were normalized as one batch, in float64
    one_weight: bool = True  # whether all replicas have the same weight and bias
    peers: distributed.Peers | None = None  # the other processes, if there is a group
    # See NOTE [order of a backward] in `distributed.py`.
    numbered: tuple[Any, int] | None = None  # what must live as long as the node, and the number of the node
    makes_token: bool = False

    def __init__(
        self, replicas: Sequence[ReplicaTensors], rule: EpsRule | None, group: distributed.Group | None
    ) -> None:
        self.rule, self.group = rule, group
        self.statistics: dict[Place, Statistics] = {}
        self.factors: list[Tensor] = []  # on the CPU, weight * invstd of each replica
        self.places = [replica.place for replica in replicas]
        self.home = self.places[0]  # that of the master
        self.saved: list[Any] = [replica.saved for replica in replicas]
        self.lock = Lock()  # see NOTE [several backwards at once]
        self.divided = False  # whether each replica has what it has saved in a node of its own, see `_divide`
        # One pair for each place, or for each replica where users get them.
        self.pair_places = self.places
        if rule is not None:
            self.pair_places = [self.home] if self.home.device.type == "cpu" else list(dict.fromkeys(self.places))
        self.slots: list[Slot] = []

    def record(
        self, replicas: Sequence[ReplicaTensors], outputs: Sequence[Tensor], pairs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return `outputs`, one for each replica, and `pairs`, as functions of the tensors of `replicas`."""
        tensors: list[Tensor] = []
        to_save: list[Tensor | None] = []
        for i, replica in enumerate(replicas):
            given = replica.tensors if replica.records else {}
            for name, tensor in given.items():
                if tensor is not None:
                    self.slots.append((name, i))
                    tensors.append(tensor)
            to_save += [given.get("input"), given.get("weight")] if replica.saved is None else [None, None]
        # Nothing of this belongs to a replica with hooks, so none is called; this is the thread of the master.
        order = None if self.group is None else distributed.order_of_forward()
        if order is not None and len({place.device for place in self.places}) > 1:
            self.makes_token = True
            tensors += [order.token] if order.token is not None else []
        with torch.enable_grad(), without_hooks() if replicas[0].has_hooks else nullcontext():
            results: tuple[Tensor, ...] = _SyncBatchNorm.apply(self, outputs, pairs, to_save, *tensors)  # type: ignore[no-untyped-call]
        if order is not None:
            self.numbered = order.add(results[-1].grad_fn)
            order.token = results[-1] if self.makes_token else None
        return results

    def count_at(self, place: Place) -> Tensor:
        """Return the count as a tensor ``(1,)`` in int32 at `place`, on CUDA."""
        if isinstance(self.count, int):
            return counts_on(*place, (self.count,), torch.int32)
        return hand_over(self.count.to(torch.int32)[None], self.home, place)


Slot = tuple[str, int]  # a name in `ReplicaTensors.tensors`, and the number of the replica
Gradients = dict[Slot, Tensor | None]


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, outputs: Sequence[Tensor], pairs: Sequence[Tensor], to_save: Any, *_: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*pairs, *to_save)
        tokens = [torch.empty(0, device=call.home.device)] * call.makes_token
        return *outputs, *pairs, *tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        wanted = _wanted(ctx, call)
        found: Gradients = {}
        if call.makes_token:
            grads = grads[:-1]
        # Where all gradients are None, other processes may have some, and wait. But not if there is a token.
        if any(grad is not None for grad in grads) or (call.group is not None and not call.makes_token):
            in_order = nullcontext() if call.home.stream is None else _in_order(call, grads)
            with plain_tensors(), in_order:
                found = _Backward(ctx, call, grads, wanted).run()
        if not keeps_graph():
            call.numbered = None  # There will not be another backward.
        # The last one is that of a token. Where there is none, torch leaves it out: it may be None.
        return None, None, None, None, *[found.get(slot) for slot in call.slots], None


def _wanted(ctx: Any, call: Call) -> set[Slot]:
    """Return whose gradients the running backward asks for."""
    with call.lock:  # see NOTE [several backwards at once]
        edges = zip(call.slots, ctx.needs_input_grad[4:], ctx.next_functions, strict=False)  # There may be a token.
        wanted = {slot for slot, needed, (node, _) in edges if needed and will_run(node)}
        del edges  # and with it the objects of the neighbors
    return wanted


def _unpack(ctx: Any, call: Call, of_all: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Return the pairs, if a graph is recorded; and inputs and weights in turn, unless the replicas have them.

    See NOTE [who saves what].

    Args:
        of_all: whether the running backward uses what all replicas have saved.
    """
    number = len(call.pair_places)
    with call.lock:
        pairs = ctx.saved_tensors[:number] if torch.is_grad_enabled() else ()
        if not of_all and not call.divided:
            _divide(call, ctx.saved_tensors[number:])
            free_saved(ctx)
        return pairs, () if call.divided else ctx.saved_tensors[number:]


def _divide(call: Call, saved: Sequence[Any]) -> None:
    """Give each replica a node of its own for what the common node has saved for it."""
    with torch.enable_grad(), without_hooks():  # The hooks of this thread are for what the caller computes.
        for i, before in enumerate(call.saved):
            if before is None:
                call.saved[i] = save_for_hooks(*saved[2 * i : 2 * i + 2])
    call.divided = True


@contextmanager
def _in_order(call: Call, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Run the body at the place of the master, in order with the streams that the engine has chosen; on CUDA."""
    here = torch.cuda.current_stream(call.home.device)
    ready: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # one event for all who wait for a stream
    order = []
    for device, stream in dict.fromkeys(call.places):
        there = here if device == call.home.device else torch.cuda.current_stream(device)
        order += [(stream, other) for other in dict.fromkeys((here, there)) if stream is not None and other != stream]
    for stream, engine in order:
        if engine not in ready:
            ready[engine] = engine.record_event()
        stream.wait_event(ready[engine])
    for grad, place in zip(grads, (*call.places, *call.pair_places), strict=False):
        if grad is not None and place.stream is not None:
            _record(grad, place.stream)
    with call.home.ordered():
        yield
    for stream, engine in order:
        engine.wait_stream(stream)


class _Backward:
    """The gradients of one backward of a call."""

    def __init__(self, ctx: Any, call: Call, grads: Sequence[Tensor | None], wanted: set[Slot]) -> None:
        self.call, self.wanted = call, wanted
        self.pair_grads = grads[len(grads) - len(call.pair_places) :]
        self.wants_inputs = any(name == "input" for name, _ in wanted)
        self.found: Gradients = {}
        # The replicas that take part: number, place, upstream gradient, input, weight.
        self.parts: list[tuple[int, Place, Tensor | None, Tensor, Tensor | None]] = []
        outputs = grads[: len(call.places)] if call.rule is not None else [None] * len(call.places)
        used = [i for i, grad in enumerate(outputs) if grad is not None or ("input", i) in wanted]
        self.pairs, common = _unpack(ctx, call, len(used) == len(outputs))
        for i in used:
            if call.saved[i] is None:
                input, weight = common[2 * i : 2 * i + 2]
            else:
                with call.places[i].entered():  # Hooks may compute what was saved.
                    input, weight = call.saved[i].grad_fn.saved_tensors
            if input is not None:
                self.parts.append((i, call.places[i], outputs[i], input, weight))
        self.statistics_dtype = statistics_dtype(self.parts[0][3].dtype) if self.parts else torch.float64

    def run(self) -> Gradients:
        call, operators = self.call, operators_for(self.call.home.device)
        if torch.is_grad_enabled() or operators == "other" or any(grad is not None for grad in self.pair_grads):
            self.differentiable()
        elif operators == "cuda":
            self.on_cuda()
        elif call.joined and len(self.parts) == len(call.places):
            self.joined()
        else:
            self.on_cpu()
        for i, *_ in self.parts:
            if call.saved[i] is not None:
                free_saved(call.saved[i].grad_fn)  # That node never runs, so torch does not.
        if any(grad is not None for _, _, grad, *_ in self.parts):
            for name, i in self.wanted:
                if name != "input" and self.found.get((name, i)) is None:  # Hooks do not expect None.
                    with call.places[i].ordered():
                        self.found[name, i] = torch.zeros_like(call.statistics[call.places[i]].mean)
        return self.found

    def joined(self) -> None:
        """Compute on the joined batch in float64, with the operator of torch."""
        numbers, _, grads, inputs, weights = zip(*self.parts, strict=True)
        grad = torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)])
        wide, input, sizes = grad.double(), torch.cat(inputs).double(), [len(input) for input in inputs]
        mean, invstd = self.call.statistics[self.call.home]
        if any(name != "input" for name, _ in self.wanted):
            parts = zip(grads, wide.split_with_sizes(sizes), input.split_with_sizes(sizes), strict=True)
            pairs = [(dy, x) for grad, dy, x in parts if grad is not None]
            rows = [vector for pair in pairs for vector in normalization.gradient_sums(*pair, mean, invstd)]
            self.find_parameters(torch.stack(rows).to(self.statistics_dtype))
        if self.wants_inputs:
            weight = None if weights[0] is None else weights[0].double()
            # Without eps, which is part of invstd already.
            grad_input, _, _ = normalization.batch_norm_backward(
                wide, input, weight, None, None, mean, invstd, True, 0.0, [True, False, False]
            )
            found = grad_input.to(grad.dtype).split_with_sizes(sizes)
            self.found |= {("input", i): part for i, part in zip(numbers, found, strict=True)}

    def find_parameters(self, sums: Tensor) -> None:
        """Take the rows of `sums` as the gradients of bias and weight of each replica that has one of its output.

        Each replica gets its own: hooks on its parameters see it, and `torch.autograd.grad` may be asked for it.
        """
        slots = [(name, i) for i, _, grad, *_ in self.parts if grad is not None for name in ("bias", "weight")]
        self.found |= zip(slots, sums.unbind(), strict=True)

    def on_cpu(self) -> None:
        """Compute the sums of each replica, add them up, and make the gradients of the inputs."""
        call, statistics, dtype = self.call, self.call.statistics[self.call.home], self.statistics_dtype
        mean, invstd = (vector.to(dtype) for vector in statistics)
        moved = (mean - statistics.mean) * statistics.invstd  # all normalized values, by the rounding of the mean
        pairs = [(grad, input) for _, _, grad, input, _ in self.parts if grad is not None]
        rows = [vector for pair in pairs for vector in normalization.gradient_sums(*pair, mean, invstd)]
        sums = torch.stack(rows).double() if rows else mean.new_zeros(0, len(mean), dtype=torch.float64)  # (2 * R, C)
        sums[1::2].addcmul_(sums[::2], moved)
        self.find_parameters(sums.to(dtype, copy=True))
        if not self.wants_inputs:
            return
        sums = sums.view(len(pairs), 2, len(mean))
        weighted = call.group is not None or not call.one_weight
        if weighted:
            weights = [weight for *_, grad, _, weight in self.parts if grad is not None]
            for own, weight in zip(sums, weights, strict=True):
                if weight is not None:
                    own.mul_(weight)
        totals = self._reduced(sums.sum(0))
        first, *_, weight = self.parts[0]
        factor = statistics.invstd if weighted else self._factor(first, weight)
        linear = normalization.linear_gradient(statistics, totals, factor, call.count, dtype)
        for i, _, grad, input, weight in self.parts:
            if ("input", i) in self.wanted:
                self.found["input", i] = normalization.input_gradient(grad, input, self._factor(i, weight), linear)

    def _factor(self, i: int, weight: Tensor | None) -> Tensor:
        """Return ``weight * invstd`` of a replica, on the CPU."""
        if self.call.factors:
            return self.call.factors[i]
        invstd = self.call.statistics[self.call.home].invstd
        return (invstd if weight is None else invstd * weight).to(self.statistics_dtype)

    def _reduced(self, totals: Tensor) -> Tensor:
        """Return the `totals` of all processes, without what has no effect on the inputs."""
        call = self.call
        if call.clamped is not None:
            totals = torch.stack((totals[0], totals[1].masked_fill(call.clamped, 0)))
        return totals if call.peers is None else distributed.all_reduced(totals, call.peers)

    def on_cuda(self) -> None:
        """Do what `on_cpu` does, each replica at its place."""
        call, rows = self.call, []
        weighted = call.group is not None or not call.one_weight
        for i, place, grad, input, weight in self.parts:
            if grad is not None:
                with place.ordered():
                    *sums, self.found["weight", i], self.found["bias", i] = normalization.fused_gradient_sums(
                        grad,
                        input,
                        call.statistics[place],
                        weight,
                        ("weight", i) in self.wanted,
                        ("bias", i) in self.wanted,
                    )
                    if weighted and weight is not None:
                        sums = [vector * weight for vector in sums]
                    rows += hand_over_packed(sums, place, call.home)
        if not self.wants_inputs:
            return
        if not rows:
            rows = [torch.zeros_like(call.statistics[call.home].mean)] * 2
        totals = self._reduced(torch.stack(rows).view(-1, 2, len(rows[0])).sum(0))
        at: dict[Place, Any] = {}
        for i, place, grad, input, weight in self.parts:
            if ("input", i) in self.wanted:
                with place.ordered():
                    if place not in at:
                        at[place] = hand_over(totals, call.home, place), call.count_at(place)
                    self.found["input", i] = normalization.fused_input_gradient(
                        grad, input, call.statistics[place], weight, at[place][0], at[place][1], weighted
                    )

    def differentiable(self) -> None:
        """Compute in operations that autograd can differentiate, see NOTE [gradients of gradients].

        In a second backward, the threads of several devices add up the gradients of one tensor in any order. With views
        of it, no more than two gradients arrive at any tensor: then the order changes no digit.
        """
        call, home = self.call, self.call.home
        at: dict[Place, Any] = call.statistics  # the pairs, or the same outside of the graph
        if torch.is_grad_enabled():
            at = dict(zip(call.pair_places, (pair.unbind() for pair in self.pairs), strict=True))
        dtype = at[home][0].dtype
        given = zip(self.pair_grads, call.pair_places, strict=True)
        arrived = [hand_over(grad, place, home) for grad, place in given if grad is not None]
        centered: dict[int, Tensor] = {}
        for i, place, grad, input, weight in self.parts:
            with place.ordered():
                mean, second = at[place]
                centered[i] = input.to(dtype) - per_channel(mean, input)
                if grad is None:
                    continue
                wide, second, dims = grad.to(dtype), second.view_as(second), reduced_dims(input)
                summed = wide.view_as(wide)
                sum_dy, sum_dy_xmu = summed.sum(dims), (summed * centered[i]).sum(dims)
                factor = second if weight is None else second * weight
                self.found["weight", i], self.found["bias", i] = sum_dy_xmu * second, sum_dy
                self.found["input", i] = wide * per_channel(factor, input)
                sum_dy_xmu = sum_dy_xmu if weight is None else sum_dy_xmu * weight
                arrived.append(hand_over(torch.stack((-sum_dy * factor, sum_dy_xmu)), place, home))
        if not self.wants_inputs:
            return
        total = torch.stack(arrived).sum(0) if arrived else torch.zeros_like(torch.stack(tuple(at[home])))
        if call.peers is not None:
            total = distributed.all_reduced_in_graph(total, call.peers)
        grad_mean, grad_second = total
        if call.rule is not None:  # from the inverse standard deviation to the variance
            grad_second = grad_second * -0.5 * at[home][1] ** 3
        if call.clamped is not None:
            grad_second = grad_second.masked_fill(call.clamped, 0)
        through = torch.stack((grad_mean, 2 * grad_second)) / (
            call.count if isinstance(call.count, Tensor) else max(call.count, 1)
        )
        for i, place, _, input, _ in self.parts:
            if ("input", i) in self.wanted:
                with place.ordered():
                    through = through.view_as(through)
                    grad_mean, grad_var = hand_over(through, home, place)
                    # The first operand decides on the memory format: that of the input.
                    rest = centered[i] * per_channel(grad_var, input) + per_channel(grad_mean, input)
                    direct = self.found.get(("input", i))
                    self.found["input", i] = (rest if direct is None else rest + direct).to(input.dtype)
