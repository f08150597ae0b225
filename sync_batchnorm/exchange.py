"""One call of a layer in one replica: a request with its statistics, an answer for all, and the output.

::

    request = statistics of x          in the thread of the replica
    answer  = pipe.run(request)        the master merges all requests, and makes the node of the call
    output  = normalized x             in the thread of the replica
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import backends, distributed
from .autograd import Call, record
from .backends.base import (
    GENERAL,
    Backend,
    BatchStatistics,
    Pair,
    ReplicaStatistics,
    RunningStatistics,
    memory_for_output,
    single_value,
    statistics_dtype,
)
from .backends.places import CURRENT, Place, Streams, current_place
from .checkpoint import Remembered, Saved, recall, refuse_gradient, running_backward, save

__all__: list[str] = []


class Settings(NamedTuple):
    """How the layer of a replica normalizes."""

    eps: float
    clamps: bool  # whether `eps` is a lower bound of the variance, and not added to it
    peers: distributed.Peers | None  # the processes to exchange with
    running: RunningStatistics | None  # the buffers that this replica updates, once a call
    weight_of_module: bool  # whether weight and bias are those of the wrapped module, equal in all replicas
    master_device: torch.device | None  # where the master merges, if known: statistics are sent there


class Request(NamedTuple):
    """What a replica sends to the master."""

    kind: tuple[Any, ...]  # what must be equal in all replicas
    backend: Backend
    place: Place
    statistics: ReplicaStatistics
    memory: Tensor  # of the output, see NOTE [memory of the outputs] in `autograd.py`
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    settings: Settings
    saved: Any  # what has saved input and weight; None if the replica records no graph
    made_by: Any  # the node of the input; None for one that needs no gradient


class Answer(NamedTuple):
    """What a replica gets from the master."""

    output: Tensor  # in the graph, if the replica records one; not written yet
    pair: Pair  # mean and inverse standard deviation, at the place of the replica
    batch: BatchStatistics


def sync_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, pipe: Any, settings: Settings) -> Tensor:
    """Normalize the input of one replica with the statistics of all that `pipe` connects; None for this one alone."""
    if has_torch_function((input,)):  # A subclass of `Tensor` may override this function, as those of torch.
        return handle_torch_function(sync_batch_norm, (input,), input, weight, bias, pipe, settings)
    if input.is_leaf and input.requires_grad:
        input = input[...]  # A leaf has no node to ask whether its gradient is needed.
    if input.is_inference() and torch.is_grad_enabled():
        input = input.clone()  # Torch saves no tensor that was made in inference mode.
    saved, device_type = save(input, weight), input.device.type
    recomputes = running_backward() != -1
    # Autocast would concatenate tensors in its own dtype, or refuse tensors of another dtype.
    autocast = torch.is_autocast_enabled(device_type)
    with torch.no_grad(), torch.autocast(device_type, enabled=False) if autocast else nullcontext():
        request = _request(input, weight, bias, settings, saved)
        if recomputes and pipe is not None:
            call: Remembered = recall(pipe.remembered, request.statistics, pipe.where)
            is_constant = call.is_constant or saved is None  # None under `no_grad`, as in the forward
            output = request.memory if is_constant else refuse_gradient(request.memory, input)
            pair = call.pair
        else:
            answer: Answer = pipe.run(request) if pipe is not None else merge_requests([(0, request)])[0][1]
            output, pair, batch = answer
            if pipe is not None and not isinstance(saved, Saved):  # Checkpoints have hooks, or run without a graph.
                is_constant = saved is not None and not output.requires_grad
                pipe.remembered += (Remembered(request.statistics, pair, is_constant),)
            if settings.running is not None and not recomputes:
                # Only now, so that a call whose merge fails is not counted.
                batch.update(settings.running, settings.eps)
        if input.numel():
            request.backend.normalize(input, pair, weight, bias, request.memory)
        return output


def _request(input: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, saved: Any) -> Request:
    """Compute the statistics of the input, send them to the master's device, also to recompute; allocate the output."""
    backend, place, memory = backends.BACKENDS.get(input.device.type, GENERAL), current_place(input.device), None
    if input.numel():
        adds_eps = not settings.clamps and settings.peers is None
        statistics, memory = backend.statistics(input, settings.eps, adds_eps)
        if settings.master_device is not None and settings.master_device != place.device:
            target = current_place(settings.master_device)
            statistics = statistics.sent(place, target, CURRENT)
    else:
        statistics = backend.nothing(input)
    if memory is None:
        memory = memory_for_output(input)
    inference = torch.is_inference_mode_enabled()
    kind = (backend, input.dtype, input.shape[1], input.dim(), settings.eps, settings.clamps, inference)
    return Request(kind, backend, place, statistics, memory, input, weight, bias, settings, saved, input.grad_fn)


def merge_requests(messages: list[tuple[Hashable, Request]]) -> Sequence[tuple[Hashable, Answer]]:
    """Merge the statistics of all replicas and record the call in the graph; the callback of a layer's `SyncMaster`."""
    first = messages[0][1]
    own_weights = False
    recording: list[Request] = []
    tensors: list[Tensor | None] = []  # of those that record
    for _, request in messages:
        if request.kind != first.kind:
            raise _different(messages)
        weight, bias = request.weight, request.bias
        if not (request.settings.weight_of_module and first.settings.weight_of_module):
            own_weights = own_weights or weight is not first.weight
        if request.saved is not None:
            recording.append(request)
            tensors += request.input, weight, bias
    batch = _merge([request for _, request in messages])
    pair_places = list(dict.fromkeys([request.place for _, request in messages]))
    pairs, kept = _pairs(batch, pair_places, first.backend.pair_dtype or statistics_dtype(first.input.dtype))
    outputs: Iterator[Tensor] = iter(())
    if any([tensor is not None and tensor.requires_grad for tensor in tensors]):
        places = [request.place for request in recording]
        saved = [request.saved for request in recording]
        made_by = [request.made_by for request in recording]
        reduce = None if first.settings.peers is None else first.settings.peers.all_reduced
        call = Call(first.backend, batch, places, saved, made_by, pair_places, own_weights, reduce, kept)
        outputs = iter(record(call, [request.memory.detach() for request in recording], pairs, tensors))
    answers = []
    for replica, request in messages:
        output = next(outputs, request.memory) if request.saved is not None else request.memory
        answers.append((replica, Answer(output, batch.at[request.place], batch)))
    return answers


def _different(messages: Sequence[tuple[Hashable, Request]]) -> ValueError:
    texts = []
    for replica, request in messages:
        _, dtype, _, _, eps, clamps, inference = request.kind
        modes = ", clamp" * clamps + ", in inference mode" * inference
        shape, device = tuple(request.input.shape), request.place.device
        texts.append(f"{shape} of {dtype} (eps={eps}{modes}) on {device} in replica {replica}")
    return ValueError(
        "expected inputs of one dtype, kind of device, number of channels and of dimensions, and layers of one eps and "
        f"eps_mode, but got {', '.join(texts)}; give every replica the same kind of input and the same layer"
    )


def _merge(requests: Sequence[Request]) -> BatchStatistics:
    """Merge the statistics of each replica, and of each process, into those of all."""
    first = requests[0]
    master, settings = first.place, first.settings
    statistics, count = [], 0
    for request in requests:
        own, source = request.statistics, request.statistics.place or request.place
        count += own.elements
        statistics.append(own if source == master else own.sent(source, master, Streams((source, master))))
    if count == 1 and settings.peers is None:
        raise single_value([request.input.shape for request in requests])
    batch = first.backend.merge(statistics, settings.eps, settings.running)
    batch.master, batch.count = master, count
    if settings.peers is not None:
        var = cast(Tensor, batch.var)
        batch.mean, batch.var, batch.count = distributed.merge_over_processes(batch.mean, var, count, settings.peers)
        if isinstance(batch.count, int) and batch.count == 1:
            raise single_value([request.input.shape for request in requests])
    if batch.invstd is None:
        var, eps = cast(Tensor, batch.var), settings.eps
        if settings.clamps:
            batch.clamped = var < eps
        batch.invstd = (var.clamp(min=eps) if settings.clamps else var + eps).rsqrt()
    return batch


def _pairs(
    batch: BatchStatistics, places: Sequence[Place], dtype: torch.dtype
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return mean and inverse standard deviation, ``(2, C)``, at each place, and aliases; put these into `batch`."""
    pair = torch.stack((batch.mean, cast(Tensor, batch.invstd))).to(dtype)
    pairs = [pair]
    if len(places) > 1:
        streams = Streams(places)
        for place in places[1:]:
            here: Tensor = streams.to_place(pair, batch.master, place)
            if here is pair:  # another stream of this device
                with streams.at(place):
                    here = here.clone()
            pairs.append(here)
    aliases = [pair.detach() for pair in pairs]
    for place, alias in zip(places, aliases, strict=True):
        batch.at[place] = alias.unbind()
    return pairs, aliases
