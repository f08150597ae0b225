"""The autograd node of one call of a layer: one node for all replicas.

::

    replica i, in its own thread                      master                                       replica i again

    statistics of x_i, no graph   ----------------->  merge all statistics
                                                      save x_1, w_1 .. x_R, w_R
                                                      y_1 .. y_R = SyncBatchNorm(x_1, w_1, b_1, .. x_R, w_R, b_R)
                                  <-----------------  y_i, mean, invstd                 ---------> write y_i

So the exchange of the forward is in the autograd graph, and no thread waits for another replica in a backward: the
engine runs this node when it has the gradients of all outputs. The node computes the two sums of each replica, adds
them up, and computes all input gradients. The arithmetic is that of its backend.

NOTE [memory of the outputs]: The node returns its outputs before they are written. Each replica allocates its output in
its own thread, and writes it there after the exchange, so that all replicas work in parallel.

NOTE [gradients of gradients]: Beside the outputs, the node returns for each place a pair ``(2, C)`` of mean and invstd,
which users never get. With `create_graph`, autograd records how the gradients are computed from ``dy_i``, ``x_i``,
``w_i`` and this pair; a second backward reaches this node again through the pair. `sync_moments` uses the same node
without outputs; there the pair is mean and variance, and users get it.

NOTE [places]: A place is a device and, on CUDA, a stream: replicas may use streams of their own. What belongs to a
replica is computed at its place, also by the master and in a backward, so that memory returns to the stream that used
it. Only `Streams` moves tensors between places. The master makes all that a backward reads, at every place, before it
answers: a replica may run a backward before its peers have woken up. So no replica fetches its results from the master.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sync_batchnorm import distributed
from sync_batchnorm.backends import GENERAL, backend_for
from sync_batchnorm.backends.base import (
    Backend,
    Backward,
    BatchStatistics,
    PartStatistics,
    ReplicaGradients,
    RunningStatistics,
    channel_count,
    memory_for_output,
)
from sync_batchnorm.places import Streams, current_place, in_order_with_engine, record_current
from sync_batchnorm.recompute import without_hooks
from sync_batchnorm.saved import SavedTensors
from sync_batchnorm.torch_private import apply_function, keeps_graph, plain_tensors, will_run

__all__: list[str] = []


class Settings(NamedTuple):
    """How the layer of a replica normalizes; by default, it only gets mean and variance."""

    eps: float | None = None  # how much is added to the variance
    clamps: bool = False  # whether `eps` is a lower bound of the variance instead
    group: distributed.Group | None = None  # the processes to exchange with; the master's group is used
    running: RunningStatistics | None = None  # the buffers that the master updates, once a call
    weight_of_module: bool = False  # whether weight and bias are those of the wrapped module, equal in all replicas
    master_device: torch.device | None = None  # where the master merges, if known: statistics are sent there


class Message:
    """What a replica sends to the master, which adds the answer.

    Autograd must not record what it computes: make it, exchange it and use the answer under `torch.no_grad`.

    Args:
        input: ``(N, C, +)``.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        settings: of the layer.
        records: whether the replica records a graph.
        saved: the result of `save_for_hooks`, if this thread has hooks on saved tensors; otherwise None.
    """

    # The answer is in the graph. If it is not written yet, the next two are what to normalize with, and where to write.
    answer: Tensor | None  # the output; without eps, mean and variance ``(2, C)``; None if there is no element
    normalizer: Any
    memory: Tensor | None

    __slots__ = (
        "answer",
        "backend",
        "bias",
        "elements",
        "eps",
        "input",
        "kind",
        "memory",
        "needs_grad",
        "normalizer",
        "part",
        "part_place",
        "place",
        "records",
        "saved",
        "settings",
        "takes_invstd",
        "tensors",
        "weight",
    )

    def __init__(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: Settings,
        *,
        records: bool = False,
        saved: Tensor | None = None,
    ) -> None:
        self.answer = self.normalizer = self.memory = None
        self.tensors = {"input": input, "weight": weight, "bias": bias}
        self.records = records
        self.needs_grad = records and (
            input.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        self.saved = saved
        self.input, self.weight, self.bias = input, weight, bias
        self.settings, self.eps = settings, settings.eps
        shape = input.shape
        self.kind = (shape[1], len(shape), input.dtype)
        self.elements = channel_count(shape)  # per channel
        self.place = current_place(input.device)
        self.backend = backend = backend_for(input.device)
        plain = settings.eps is not None and not settings.clamps and settings.group is None
        self.takes_invstd = plain and backend.takes_invstd
        self.part: PartStatistics | None = None
        if not (plain and backend.joined is not None and backend.joined.takes(self.input)):
            self.prepare(settings.master_device)

    def prepare(self, master_device: torch.device | None = None) -> None:
        """Compute the statistics of the input, allocate the output, and send the statistics to `master_device`."""
        input, memory, self.part_place = self.input, None, self.place
        if input.numel():
            part, memory = self.backend.part_statistics(input, self.eps or 0.0, self.takes_invstd)
            if master_device is not None and master_device != self.place.device:
                self.part_place = current_place(master_device)
                part = part.sent(self.place, self.part_place, Streams())  # Both places are current.
        else:
            part = self.backend.nothing(input)
        if self.eps is not None:
            self.memory = memory_for_output(input, memory)
        self.part = part


Slot = tuple[str, int]  # a name in `Message.tensors`, and the number of the replica


class Call:
    """One call of a layer by all replicas: what its backward needs beside the saved tensors.

    Args:
        messages: of the replicas; the first is the master's.
        one_weight: whether all replicas have the same weight and bias.
    """

    backend: Backend
    batch: BatchStatistics | None = None  # None if there was not a single element
    peers: distributed.Peers | None = None  # the other processes, if there is a group
    # See NOTE [order of a backward] in `distributed.py`.
    numbered: tuple[Any, int] | None = None  # what must live as long as the node, and the number of the node
    makes_token: bool = False

    def __init__(self, messages: Sequence[Message], one_weight: bool) -> None:
        self.backend, self.group, self.one_weight = messages[0].backend, messages[0].settings.group, one_weight
        self.has_outputs = messages[0].eps is not None
        self.places = [message.place for message in messages]
        self.master = self.places[0]
        # One pair for each place; one for each replica if users get the pairs.
        self.pair_places = list(dict.fromkeys(self.places)) if self.has_outputs else self.places
        self.saved = SavedTensors([message.saved for message in messages])
        self.slots: list[Slot] = []

    def record(
        self, messages: Sequence[Message], outputs: Sequence[Tensor], pairs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return `outputs`, one for each replica, and `pairs`, as functions of the tensors of the replicas."""
        tensors: list[Tensor] = []
        to_save: list[Tensor | None] = []
        has_hooks = messages[0].saved is not None
        for i, message in enumerate(messages):
            if message.records:
                for name, tensor in message.tensors.items():
                    if tensor is not None:
                        self.slots.append((name, i))
                        tensors.append(tensor)
            if message.records and message.saved is None:
                to_save += (message.tensors["input"], message.tensors["weight"])
            else:
                to_save += (None, None)
        # The node saves no tensors of replicas with hooks: so it does not call the hooks of this thread, the master's.
        order = None if self.group is None else distributed.order_of_forward()
        if order is not None and len({place.device for place in self.places}) > 1:
            self.makes_token = True
            tensors += [order.token] if order.token is not None else []
        with torch.enable_grad(), without_hooks() if has_hooks else nullcontext():
            results: tuple[Tensor, ...] = apply_function(_SyncBatchNorm, self, outputs, pairs, to_save, *tensors)
        if order is not None:
            self.numbered = order.add(results[-1].grad_fn)
            order.token = results[-1] if self.makes_token else None
        return results


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, outputs: Sequence[Tensor], pairs: Sequence[Tensor], to_save: Any, *_: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*pairs, *to_save)
        tokens = [torch.empty(0, device=call.master.device)] * call.makes_token
        return *outputs, *pairs, *tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        wanted = _wanted(ctx, call)
        made: list[dict[str, Tensor | None]] = [{}] * len(wanted)
        if call.makes_token:
            grads = grads[:-1]
        # If all gradients are None, other processes may have some, and wait for this one; not so if there is a token.
        if any(grad is not None for grad in grads) or (call.group is not None and not call.makes_token):
            places = [*call.places, *call.pair_places] if call.has_outputs else call.pair_places
            with plain_tensors():
                if call.master.stream is None:
                    made = _gradients(ctx, call, grads, wanted, Streams())
                else:
                    with in_order_with_engine(call.master, places, grads) as streams:
                        made = _gradients(ctx, call, grads, wanted, streams)
                    # The engine assumes that they were computed on the streams that are current now.
                    for own, place in zip(made, call.places, strict=True) if not streams.are_current else ():
                        record_current(own.values(), place)
        if not keeps_graph():
            call.numbered = None  # There will not be another backward.
        # The last gradient is for the token. If there is no token, it is one None too many, which torch ignores.
        return None, None, None, None, *[made[i].get(name) for name, i in call.slots], None


def _wanted(ctx: Any, call: Call) -> list[set[str]]:
    """Return, for each replica, the names of the tensors whose gradients the running backward needs."""
    wanted: list[set[str]] = [set() for _ in call.places]
    with call.saved.lock:  # see NOTE [several backwards at once] in `saved.py`
        edges, node = ctx.next_functions, None
        for (name, i), needed, (node, _) in zip(call.slots, ctx.needs_input_grad[4:], edges, strict=False):
            if needed and will_run(node):  # The edges may have one more, for a token.
                wanted[i].add(name)
        del edges, node  # They refer to the Python objects of neighboring nodes.
    return wanted


def _gradients(
    ctx: Any, call: Call, grads: Sequence[Tensor | None], wanted: Sequence[set[str]], streams: Streams
) -> list[dict[str, Tensor | None]]:
    """Return the gradients of each replica in a backward: those in `wanted`, and maybe others."""
    number, batch = len(wanted), cast(BatchStatistics, call.batch)
    outputs: Sequence[Tensor | None] = grads[:number] if call.has_outputs else [None] * number
    of_pairs = zip(grads[len(grads) - len(call.pair_places) :], call.pair_places, strict=True)
    pair_grads = [(grad, place) for grad, place in of_pairs if grad is not None]
    used = [i for i in range(number) if outputs[i] is not None or "input" in wanted[i]]
    pairs, saved = call.saved.unpack(ctx, len(call.pair_places), len(used) == number)
    replicas: list[ReplicaGradients] = []
    made: list[dict[str, Tensor | None]] = [{} for _ in wanted]
    for i in used:
        place = call.places[i]
        input, weight = call.saved.of_replica(i, saved, place)
        if input is not None:
            replica = ReplicaGradients(place, outputs[i], input, weight, wanted[i])
            replicas.append(replica)
            made[i] = replica.grads
    at, reduce = batch.at, _unchanged
    graph = torch.is_grad_enabled()
    if graph:
        at = {place: cast(Any, pair.unbind()) for place, pair in zip(call.pair_places, pairs, strict=True)}
    if call.peers is not None:
        reduce = partial(distributed.all_reduced_in_graph if graph else distributed.all_reduced, peers=call.peers)
    backend = GENERAL if graph or pair_grads else call.backend
    backend.gradients(
        Backward(
            replicas,
            pair_grads,
            batch,
            at,
            streams,
            has_eps=call.has_outputs,
            own_weights=call.group is not None or not call.one_weight,
            of_all=len(replicas) == number,
            reduce=reduce,
        )
    )
    for i in used:
        call.saved.free(i)
    if any(replica.grad_output is not None for replica in replicas):
        for i, names in enumerate(wanted):
            for name in names:
                if name != "input" and made[i].get(name) is None:  # Hooks on gradients do not expect None.
                    with streams.at(call.places[i]):
                        made[i][name] = torch.zeros_like(batch.at[call.places[i]][0])
    return made


def _unchanged(totals: Tensor) -> Tensor:
    return totals
