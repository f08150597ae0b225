"""One call of a layer, read downwards.

Each replica measures its input, in its own thread; the master merges what all have measured, normalizes all inputs, and
makes the node of the call. What travels is the `Part` of each replica.

NOTE [tried in a call]: Shares of the processor time of a training step of ResNet-50, on one core.

- Each replica normalizes its own input, into memory that the node has returned before it was filled: 1 % more, since
  this takes one operator more for each replica. On the CPU, replicas cannot share slope and offset.
- The last replica that arrives merges, not the master: 1 % less on two GPUs, and errors of all in any replica.
- A replica wakes up without the interpreter lock, by a file descriptor: 2 % less on two GPUs and 4 % on four, where all
  threads share a core, because the kernel then switches threads twice in place of six times. It needs descriptors for
  each replica, outside of the lock of the coordinator, and Linux.
- Operators without the autograd keys of the dispatcher: nothing on two and four GPUs, 1 % less on eight. Tangents of
  forward mode, which operators refuse, would be lost.
"""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .. import backends
from ..backends.base import (
    GENERAL,
    BatchStatistics,
    Pair,
    Statistics,
    on_devices,
    sent_to,
    single_value,
)
from ..backends.streams import are_default, on_default_streams
from ..torch_private import any_autocast, graph_task_id, set_grad_enabled, without_modes
from .node import make_node
from .part import Kind, Part, normalize
from .processes import gather_statistics
from .recomputation import remember, repeat
from .saved import Saved, SavedByHooks, save

__all__: list[str] = []

Messages = Sequence[tuple[Hashable, Part]]  # by the identifier of the replica


def sync_batch_norm(input: Tensor, part: Part, pipe: Any) -> Tensor:
    """Normalize the input of one replica with the statistics of all that `pipe` connects; None for this one alone.

    The caller has made `part`, with what belongs to the layer; this adds the rest.
    """
    if has_torch_function((input,)):  # A subclass of `Tensor` may override this function, as those of torch.
        return handle_torch_function(sync_batch_norm, (input,), input, part, pipe)
    if input.is_leaf and input.requires_grad:
        input = input[...]  # A leaf has no grad_fn that could tell whether its gradient is needed.
    records = torch.is_grad_enabled()
    if records:
        if input.is_inference():
            input = input.clone()  # Inference tensors cannot be saved for a backward pass.
        part.saved = save(input, part.weight)
    part.input = input
    set_grad_enabled(False)  # not a context, which takes ten times as long
    try:
        if type(part.saved) is SavedByHooks or any_autocast():
            return _exchange_without_modes(part, pipe)
        return _exchange_on_default_streams(part, pipe)
    finally:
        set_grad_enabled(records)


def _exchange_without_modes(part: Part, pipe: Any) -> Tensor:
    """Exchange without the modes of a checkpoint, and without autocast."""
    # A selective checkpoint counts the operators of its forward, and expects the same ones in the recomputation, which
    # merges nothing. It would also keep what they return, such as memory that is filled in later.
    has_hooks = type(part.saved) is SavedByHooks
    # Autocast would concatenate tensors in its own dtype, or refuse tensors of another dtype.
    with without_modes() if has_hooks else nullcontext(), torch.autocast(part.input.device.type, enabled=False):
        return _exchange_on_default_streams(part, pipe)


def _exchange_on_default_streams(part: Part, pipe: Any) -> Tensor:
    """Exchange on the default streams, see NOTE [streams]."""
    here, master = part.input.device, part.master_device
    if pipe is None or not part.input.is_cuda or are_default(here, master):
        return _exchange(part, pipe)
    used = (part.input, part.weight, part.bias)
    output: Tensor = on_default_streams({here, master}, used, _exchange, part, pipe)
    return output


def _exchange(part: Part, pipe: Any) -> Tensor:
    """Measure, and get the answer of the master, or of the call that is repeated."""
    _measure(part)
    if pipe is None:
        _answer([part])
    elif graph_task_id() != -1:  # inside a backward pass
        repeat(part, pipe)
    else:
        pipe.run(part)
        if type(part.saved) is not Saved:  # Checkpoints have hooks, or run without a graph.
            remember(part, pipe)
    return part.output


def _measure(part: Part) -> None:
    """Compute the statistics of the input, and send them to the master's device."""
    input = part.input
    device, channels = input.device, input.shape[1]
    backend = backends.BACKENDS.get(device.type, GENERAL)
    part.elements = input.numel() // max(channels, 1)
    if part.elements:
        statistics, part.memory = backend.statistics(input, part.eps)
    else:
        statistics = backend.empty_statistics(input)
    part.statistics = sent_to(statistics, part.master_device)
    part.kind = Kind(
        backend=backend,
        dtype=input.dtype,
        channels=channels,
        dims=input.dim(),
        eps=part.eps,
        clamps=part.clamps,
        is_inference=torch.is_inference_mode_enabled(),
    )


def merge_parts(messages: Messages) -> Messages:
    """Answer the parts of all replicas; the callback of a layer's `SyncMaster`."""
    parts = [part for _, part in messages]
    for part in parts:
        if part.kind != parts[0].kind:
            raise _different(parts)
    _answer(parts)
    return messages


def _answer(parts: Sequence[Part]) -> None:
    """Add mean and inverse standard deviation of the batch to all parts, and the outputs, of the node of the call."""
    batch = _merge(parts)
    for part in parts:
        part.mean_invstd = batch.mean_invstd[part.input.device]
    normalize(parts)
    make_node(batch, parts)


def _merge(parts: Sequence[Part]) -> BatchStatistics:
    """Merge the statistics of all replicas, and of all processes; update the running statistics."""
    first = parts[0]
    backend, master = first.kind.backend, first.input.device
    devices = list(dict.fromkeys([part.input.device for part in parts]))
    statistics: list[Statistics] = []
    elements: list[int] = []
    weights_differ = False
    for part in parts:
        statistics.append(sent_to(part.statistics, master))
        elements.append(part.elements)
        if part.weight is not first.weight and not (part.weight_of_module and first.weight_of_module):
            weights_differ = True
    merged: Sequence[Statistics] = statistics
    counts: Sequence[int] | Tensor = elements
    total: int | Tensor = sum(elements)
    if first.peers is not None:
        merged, counts, total = gather_statistics(statistics[0], elements[0], first.peers, backend.merge_dtype)
    if isinstance(total, int) and total == 1:
        raise single_value([part.input.shape for part in parts])
    # A checkpoint that calls a layer inside a backward pass repeats a call that was counted.
    running = first.running if graph_task_id() == -1 else None
    mean, invstd, clamped = backend.merge(merged, counts, total, first.eps, first.clamps, running)
    mean_invstd: dict[torch.device, Pair] = {master: (mean, invstd)}
    if len(devices) > 1:
        mean_invstd |= on_devices(torch.stack((mean, invstd)), devices[1:])
    return BatchStatistics(
        backend=backend,
        master=master,
        mean_invstd=mean_invstd,
        elements=total,
        clamped=clamped,
        weights_differ=weights_differ,
        reduce=None if first.peers is None else first.peers.all_reduced,
    )


def _different(parts: Sequence[Part]) -> ValueError:
    texts = []
    for part in parts:
        kind, shape = part.kind, tuple(part.input.shape)
        modes = (", clamp" if kind.clamps else "") + (", in inference mode" if kind.is_inference else "")
        where = f"on {part.input.device} in replica {part.number}"
        texts.append(f"{shape} of {kind.dtype} (eps={kind.eps}{modes}) {where}")
    return ValueError(
        "all replicas must get inputs with the same dtype, device type, number of channels and of dimensions, in "
        f"layers with the same eps and eps_mode, but got {', '.join(texts)}; give every replica the same kind of input "
        "and the same layer"
    )
