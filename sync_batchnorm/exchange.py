"""One call of a layer in one replica: a request with its statistics, an answer for all, and the output.

::

    request = statistics of x          in the thread of the replica
    answer  = pipe.run(request)        the master merges all requests, and makes the node of the call
    output  = normalized x             in the thread of the replica
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import backends, distributed
from .autograd import Saved, SavedByHooks, make_node, refuse_gradient
from .backends.base import (
    GENERAL,
    Backend,
    BatchStatistics,
    Pair,
    RunningStatistics,
    channel_count,
    memory_for_output,
    sent,
    single_value,
)
from .backends.streams import on_default_streams
from .checkpoint import Remembered, recall
from .torch_private import graph_task_id, hooks_of_thread, without_modes

__all__: list[str] = []


class Settings(NamedTuple):
    """How the layer of a replica normalizes."""

    eps: float
    clamps: bool  # whether `eps` is a lower bound of the variance, and not added to it
    peers: distributed.Peers | None  # the processes to exchange with
    running: RunningStatistics | None  # the buffers that this replica updates, once a call
    weight_of_module: bool  # whether the weight is that of the wrapped module, equal in all replicas
    master_device: torch.device  # where the master merges, if that is known: statistics are sent there


class Request(NamedTuple):
    """What a replica sends to the master."""

    signature: tuple[Any, ...]  # what must be equal in all replicas; its first item is the backend
    statistics: Pair  # of the input, see `Backend.statistics`
    elements: int  # per channel
    out: Tensor  # memory of the output, see NOTE [memory of the outputs] in `autograd.py`
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    settings: Settings
    saved: Saved | None  # None if the replica records no graph


# The output, in the graph if the replica records one and not filled in yet; mean and invstd.
Answer = tuple[Tensor, Pair]


def sync_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, pipe: Any, settings: Settings) -> Tensor:
    """Normalize the input of one replica with the statistics of all that `pipe` connects; None for this one alone."""
    if has_torch_function((input,)):  # A subclass of `Tensor` may override this function, as those of torch.
        return handle_torch_function(sync_batch_norm, (input,), input, weight, bias, pipe, settings)
    if input.is_leaf and input.requires_grad:
        input = input[...]  # A leaf has no grad_fn that could tell whether its gradient is needed.
    saved: Saved | None = None  # without a graph
    if torch.is_grad_enabled():
        if input.is_inference():
            input = input.clone()  # Inference tensors cannot be saved for a backward pass.
        saved = Saved(input, weight) if hooks_of_thread(True) is None else SavedByHooks(input, weight)
    # A selective checkpoint counts the operators of its forward, and expects the same ones in the recomputation, which
    # merges nothing. It would also keep what they return, such as memory that is filled in later.
    with without_modes() if isinstance(saved, SavedByHooks) else nullcontext():
        args = (input, weight, bias, pipe, settings, saved)
        if pipe is None or not input.is_cuda:
            return _exchanged(*args)
        output: Tensor = on_default_streams({input.device, settings.master_device}, _exchanged, *args)
        return output


def _exchanged(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    pipe: Any,
    settings: Settings,
    saved: Saved | None,
) -> Tensor:
    device_type, recomputes = input.device.type, graph_task_id() != -1  # inside of a backward
    # Autocast would concatenate tensors in its own dtype, or refuse tensors of another dtype.
    autocast = torch.is_autocast_enabled(device_type)
    with torch.no_grad(), torch.autocast(device_type, enabled=False) if autocast else nullcontext():
        if recomputes:
            settings = settings._replace(running=None)  # The forward has counted this call.
        request = _request(input, weight, bias, settings, saved)
        if recomputes and pipe is not None:
            call: Remembered = recall(pipe.remembered, request.statistics, pipe.where)
            is_constant = call.is_constant or saved is None  # None under `no_grad`, as in the forward
            output = request.out if is_constant else refuse_gradient(request.out, input)
            mean_invstd = call.mean_invstd
        else:
            answer: Answer = pipe.run(request) if pipe is not None else _answers([(None, request)])[0][1]
            output, mean_invstd = answer
            if pipe is not None and type(saved) is not Saved:  # Checkpoints have hooks, or run without a graph.
                is_constant = saved is not None and not output.requires_grad
                pipe.remembered += (Remembered(request.statistics, mean_invstd, is_constant),)
        if input.numel():
            request.signature[0].normalize(input, mean_invstd, weight, bias, request.out)
        return output


def _request(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, saved: Saved | None
) -> Request:
    """Compute the statistics of the input, and send them to the master's device; allocate the output."""
    backend, elements, out = backends.BACKENDS.get(input.device.type, GENERAL), 0, None
    if input.numel():
        elements = channel_count(input.shape)
        statistics, out = backend.statistics(input, settings.eps)
    else:
        statistics = backend.empty_statistics(input)
    inference = torch.is_inference_mode_enabled()
    signature = (backend, input.dtype, input.shape[1], input.dim(), settings.eps, settings.clamps, inference)
    out = memory_for_output(input) if out is None else out
    if settings.master_device != input.device:
        statistics = sent(statistics, settings.master_device)
    return Request(signature, statistics, elements, out, input, weight, bias, settings, saved)


def merge_requests(messages: list[tuple[Hashable, Request]]) -> Sequence[tuple[Hashable, Answer]]:
    """Merge the statistics of all replicas and make the node of the call; the callback of a layer's `SyncMaster`."""
    first = messages[0][1]
    for _, request in messages:
        if request.signature != first.signature:
            raise _different(messages)
    return _answers(messages)


def _answers(messages: list[tuple[Hashable, Request]]) -> Sequence[tuple[Hashable, Answer]]:
    requests: list[Request] = []
    saved: list[Saved] = []
    outputs: list[Tensor] = []
    tensors: list[Tensor | None] = []
    for _, request in messages:
        requests.append(request)
        if request.saved is not None:
            saved.append(request.saved)
            outputs.append(request.out.detach())
            tensors += request.input, request.weight, request.bias
    batch = _merge(requests)
    in_graph: Iterator[Tensor] = iter(())
    if any([tensor is not None and tensor.requires_grad for tensor in tensors]):
        in_graph = iter(make_node(batch, saved, outputs, tensors))
    answers = []
    for replica, request in messages:
        output = next(in_graph, request.out) if request.saved is not None else request.out
        answers.append((replica, (output, batch.mean_invstd[request.input.device])))
    return answers


def _different(messages: Sequence[tuple[Hashable, Request]]) -> ValueError:
    texts = []
    for replica, request in messages:
        _, dtype, _, _, eps, clamps, inference = request.signature
        modes = ", clamp" * clamps + ", in inference mode" * inference
        shape, device = tuple(request.input.shape), request.input.device
        texts.append(f"{shape} of {dtype} (eps={eps}{modes}) on {device} in replica {replica}")
    return ValueError(
        "all replicas must get inputs with the same dtype, device type, number of channels and of dimensions, in "
        f"layers with the same eps and eps_mode, but got {', '.join(texts)}; give every replica the same kind of input "
        "and the same layer"
    )


def _merge(requests: Sequence[Request]) -> BatchStatistics:
    """Merge the statistics of all replicas, and of all processes; update the running statistics."""
    first = requests[0]
    backend: Backend = first.signature[0]
    master, settings, peers = first.input.device, first.settings, first.settings.peers
    statistics: list[Pair] = []
    elements: list[int] = []
    devices: dict[torch.device, None] = {}
    weights_differ = False
    for request in requests:
        own = request.statistics
        statistics.append(own if own[0].device == master else sent(own, master))
        elements.append(request.elements)
        devices[request.input.device] = None
        if not (request.settings.weight_of_module and settings.weight_of_module):
            weights_differ = weights_differ or request.weight is not first.weight
    total: int | Tensor = sum(elements)
    counts: Sequence[int] | Tensor = elements
    merged: Sequence[Pair] = statistics
    if peers is not None:
        merged, counts, total = distributed.gather_statistics(statistics[0], elements[0], peers, backend.merge_dtype)
    if isinstance(total, int) and total == 1:
        raise single_value([request.input.shape for request in requests])
    mean, invstd, clamped = backend.merge(merged, counts, total, settings.eps, settings.clamps, settings.running)
    mean_invstd: dict[torch.device, Pair] = {master: (mean, invstd)}
    if len(devices) > 1:
        packed = torch.stack((mean, invstd))
        others = {device: packed.to(device, non_blocking=True).unbind() for device in devices if device != master}
        mean_invstd.update(others)
    reduce = None if peers is None else peers.all_reduced
    return BatchStatistics(backend, master, mean_invstd, total, clamped, weights_differ, reduce)
