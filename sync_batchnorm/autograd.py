"""The autograd node of one call of a layer: one node, made by the master, that has the tensors of all replicas.

So no thread waits for another replica in a backward: the engine runs this node when it has the gradients of all
outputs. It computes the two sums of each replica, adds them up, and computes all input gradients.

NOTE [who saves what]: Each replica saves its input and weight itself (`checkpoint.py`), so hooks on saved tensors run
in its thread. This node reads them, and frees them unless the graph is retained. It saves only the pairs.

NOTE [memory of the outputs]: The node returns its outputs before they are written. Each replica allocates its own, and
writes it after the exchange.

NOTE [gradients of gradients]: Beside the outputs, the node returns for each place a pair ``(2, C)`` of mean and invstd,
which users never get. With `create_graph`, autograd records how the gradients are computed from ``dy_i``, ``x_i``,
``w_i`` and this pair; a second backward reaches this node again through the pair.

NOTE [places]: A place is a device and, on CUDA, a stream: replicas may use streams of their own. What belongs to a
replica is computed at its place, also by the master and in a backward, so that memory returns to the stream that used
it. The master makes all that a backward reads, at every place, before it answers: a replica may run a backward before
its peers have woken up.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .backends.base import GENERAL, Backend, Backward, BatchStatistics, ReplicaGradients
from .backends.places import CURRENT, Place, Streams, in_order_with_engine, record_current
from .torch_private import keeps_graph, plain_tensors, will_run

__all__: list[str] = []


class Call(NamedTuple):
    """One call of a layer: what the backward of its node needs."""

    backend: Backend
    batch: BatchStatistics
    places: Sequence[Place]  # of the replicas that record a graph, which are those of the node
    saved: list[Callable[[], Any] | None]  # what returns their input and weight; None once that is freed
    made_by: Sequence[Any]  # the nodes of their inputs; None for one that needs no gradient
    pair_places: Sequence[Place]  # of mean and invstd
    own_weights: bool  # whether weights differ between replicas
    reduce: Callable[[Tensor], Tensor] | None  # adds up a tensor over all processes, if there are several
    pairs: Sequence[Tensor]  # mean and invstd at `pair_places`, outside of the graph


def record(
    call: Call, outputs: Sequence[Tensor], pairs: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Return `outputs`, one for each replica, as functions of `tensors`: its input, weight and bias, for each."""
    # This node saves the numbers of its pairs, whatever the hooks of this thread, and the call keeps the pairs: if
    # replicas take gradients in their forward, torch frees what it has saved in two threads at once. A tensor among
    # that is freed twice, also one that only a hook holds (torch 2.13).
    numbers = count()
    with torch.enable_grad(), saved_tensors_hooks(lambda _: next(numbers), call.pairs.__getitem__):
        results: tuple[Tensor, ...] = _apply(call, outputs, pairs, *tensors)
    return results[: len(outputs)]


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, outputs: Sequence[Tensor], pairs: Sequence[Tensor], *_: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*pairs)
        return *outputs, *pairs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        # Other processes may have gradients where this one has none, and wait for it.
        if call.reduce is None and not any([grad is not None for grad in grads]):
            return (None,) * len(ctx.needs_input_grad)
        master = call.batch.master
        order: AbstractContextManager[Streams] = nullcontext(CURRENT)
        if master.stream is not None:
            order = in_order_with_engine(master, [*call.places, *call.pair_places], grads)
        with plain_tensors(), order as streams:
            replicas = _replicas(ctx, call, grads, streams)
            _compute_gradients(ctx, call, grads, replicas, streams)
        made: list[Tensor | None] = [None, None, None]
        for i, replica in enumerate(replicas):
            if replica.input is not None and not keeps_graph():
                call.saved[i] = None  # only now, in order with the engine
            made += replica.grad_input, replica.grad_weight, replica.grad_bias
        return tuple([grad if i else None for grad, i in zip(made, ctx.needs_input_grad, strict=True)])


# What `_SyncBatchNorm.apply` does outside of transforms of `torch.func`, without its search for them.
_apply: Any = super(torch.autograd.Function, _SyncBatchNorm).apply


def _compute_gradients(
    ctx: Any, call: Call, grads: Sequence[Tensor | None], replicas: Sequence[ReplicaGradients], streams: Streams
) -> None:
    """Compute the gradients of all replicas from the gradients of what the node has returned."""
    batch, at, graph = call.batch, call.batch.at, torch.is_grad_enabled()
    if graph:
        at = {place: pair.unbind() for place, pair in zip(call.pair_places, ctx.saved_tensors, strict=True)}
    reached = [replica for replica in replicas if replica.input is not None]
    of_pairs = zip(grads[len(replicas) :], call.pair_places, strict=True)
    pair_grads = [(grad, place) for grad, place in of_pairs if grad is not None]
    only_pairs = bool(pair_grads) and all([replica.grad_output is None for replica in replicas])  # as of a penalty
    backend = GENERAL if graph or pair_grads else call.backend
    backend.gradients(Backward(reached, batch, at, pair_grads, streams, call.own_weights, call.reduce))
    for replica in replicas:
        if replica.wants_parameters and replica.grad_bias is None and not only_pairs:
            # Its output is not in the loss, as those of its peers are. Hooks on gradients do not expect None.
            with streams.at(replica.place):
                replica.grad_weight = replica.grad_bias = torch.zeros_like(batch.at[replica.place][0])
        if not streams.are_current:
            # The engine assumes that they were computed on the streams that are current now.
            record_current([replica.grad_input, replica.grad_weight, replica.grad_bias], replica.place)


def _replicas(ctx: Any, call: Call, grads: Sequence[Tensor | None], streams: Streams) -> list[ReplicaGradients]:
    """Return the replicas of the running backward, with what it needs of each; see NOTE [who saves what]."""
    replicas = []
    for i, place in enumerate(call.places):
        input_needed, weight_needed, bias_needed = ctx.needs_input_grad[3 + 3 * i : 6 + 3 * i]
        made_by, grad_output = call.made_by[i], grads[i]
        wants_input = input_needed and will_run(made_by)
        input = weight = None
        if grad_output is not None or wants_input:
            with streams.at(place):  # Hooks may compute to unpack.
                # If it is freed, so is the node, which then raises torch's error for a second backward.
                input, weight = (call.saved[i] or (lambda: ctx.saved_tensors))()
        replicas.append(ReplicaGradients(place, grad_output, input, weight, wants_input, weight_needed or bias_needed))
    return replicas
