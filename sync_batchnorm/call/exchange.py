"""One call of a layer: each replica measures its part, the master merges them all, each replica normalizes its own."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..backends.base import BatchStatistics, Pair, Statistics, sent, single_value
from ..backends.streams import on_default_streams
from ..torch_private import graph_task_id, without_modes
from .node import make_node
from .part import Part, Settings
from .processes import gather_statistics
from .recomputation import remember, repeat
from .saved import Saved, SavedByHooks, save

__all__: list[str] = []

Messages = Sequence[tuple[Hashable, Part]]  # by the identifier of the replica


def sync_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, pipe: Any, settings: Settings) -> Tensor:
    """Normalize the input of one replica with the statistics of all that `pipe` connects; None for this one alone."""
    if has_torch_function((input,)):  # A subclass of `Tensor` may override this function, as those of torch.
        return handle_torch_function(sync_batch_norm, (input,), input, weight, bias, pipe, settings)
    if input.is_leaf and input.requires_grad:
        input = input[...]  # A leaf has no grad_fn that could tell whether its gradient is needed.
    saved = None  # without a graph
    if torch.is_grad_enabled():
        if input.is_inference():
            input = input.clone()  # Inference tensors cannot be saved for a backward pass.
        saved = save(input, weight, bias)
    part = Part(input, weight, bias, settings, saved)
    # A selective checkpoint counts the operators of its forward, and expects the same ones in the recomputation, which
    # merges nothing. It would also keep what they return, such as memory that is filled in later.
    with without_modes() if isinstance(saved, SavedByHooks) else nullcontext():
        if pipe is None or not input.is_cuda:
            return _exchanged(part, pipe)
        devices = {input.device, settings.master_device}
        output: Tensor = on_default_streams(devices, (input, weight, bias), _exchanged, part, pipe)
        return output


def _exchanged(part: Part, pipe: Any) -> Tensor:
    device_type = part.input.device.type
    # Autocast would concatenate tensors in its own dtype, or refuse tensors of another dtype.
    autocast = torch.is_autocast_enabled(device_type)
    with torch.no_grad(), torch.autocast(device_type, enabled=False) if autocast else nullcontext():
        part.measure()
        if pipe is None:
            _answer([part])
        elif graph_task_id() != -1:  # inside a backward pass
            repeat(part, pipe)
        else:
            pipe.run(part)
            if type(part.saved) is not Saved:  # Checkpoints have hooks, or run without a graph.
                remember(part, pipe)
        return part.normalize()


def merge_parts(messages: Messages) -> Messages:
    """Answer the parts of all replicas; the callback of a layer's `SyncMaster`."""
    parts = [part for _, part in messages]
    for part in parts:
        if part.kind != parts[0].kind:
            raise _different(messages)
    _answer(parts)
    return messages


def _answer(parts: Sequence[Part]) -> None:
    """Add mean and inverse standard deviation of the batch to all parts, and make the node of the call."""
    batch = _merge(parts)
    for part in parts:
        part.mean_invstd = batch.mean_invstd[part.input.device]
    make_node(batch, parts)


def _merge(parts: Sequence[Part]) -> BatchStatistics:
    """Merge the statistics of all replicas, and of all processes; update the running statistics."""
    first = parts[0]
    backend, settings, master = first.kind.backend, first.settings, first.input.device
    statistics: list[Statistics] = []
    elements: list[int] = []
    for part in parts:
        statistics.append(part.statistics if part.statistics[0].device == master else sent(part.statistics, master))
        elements.append(part.elements)
    merged: Sequence[Statistics] = statistics
    counts: Sequence[int] | Tensor = elements
    total: int | Tensor = sum(elements)
    if settings.peers is not None:
        merged, counts, total = gather_statistics(statistics[0], elements[0], settings.peers, backend.merge_dtype)
    if isinstance(total, int) and total == 1:
        raise single_value([part.input.shape for part in parts])
    # A checkpoint that calls a layer inside a backward pass repeats a call that was counted.
    running = settings.running if graph_task_id() == -1 else None
    mean, invstd, clamped = backend.merge(merged, counts, total, settings.eps, settings.clamps, running)
    return BatchStatistics(
        backend=backend,
        master=master,
        mean_invstd=_on_all_devices(mean, invstd, parts),
        elements=total,
        clamped=clamped,
        weights_differ=_weights_differ(parts),
        reduce=None if settings.peers is None else settings.peers.all_reduced,
    )


def _weights_differ(parts: Sequence[Part]) -> bool:
    """Return whether the weights of the replicas may have different values."""
    first = parts[0]
    for part in parts:
        are_copies = part.settings.weight_of_module and first.settings.weight_of_module
        if part.weight is not first.weight and not are_copies:
            return True
    return False


def _on_all_devices(mean: Tensor, invstd: Tensor, parts: Sequence[Part]) -> dict[torch.device, Pair]:
    """Return mean and inverse standard deviation on the device of each replica, that of the master first."""
    pairs: dict[torch.device, Pair] = {mean.device: (mean, invstd)}
    devices = dict.fromkeys([part.input.device for part in parts])
    if len(devices) > 1:
        both = torch.cat((mean, invstd))
        for device in devices:
            if device not in pairs:
                pairs[device] = both.to(device, non_blocking=True).chunk(2)
    return pairs


def _different(messages: Messages) -> ValueError:
    texts = []
    for replica, part in messages:
        kind, shape = part.kind, tuple(part.input.shape)
        modes = ", clamp" * kind.clamps + ", in inference mode" * kind.is_inference
        texts.append(f"{shape} of {kind.dtype} (eps={kind.eps}{modes}) on {part.input.device} in replica {replica}")
    return ValueError(
        "all replicas must get inputs with the same dtype, device type, number of channels and of dimensions, in "
        f"layers with the same eps and eps_mode, but got {', '.join(texts)}; give every replica the same kind of input "
        "and the same layer"
    )
