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
- Another scheduling policy for the threads of replicas: 2 % less, on Linux only, and threads that `forward` starts
  inherit it.
- A plan of a replica that is kept from one step to the next: 1 ms of 90 on eight GPUs. Kept shells of modules: nothing.
- Operators without the autograd keys of the dispatcher: nothing on two and four GPUs, 1 % less on eight. Tangents of
  forward mode, which operators refuse, would be lost.
"""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, is_inference_mode_enabled
from torch.overrides import handle_torch_function, has_torch_function

from .. import backends
from ..backends.base import GENERAL, BatchStatistics, Counts, Pair, single_value
from ..backends.streams import are_default, on_default_streams
from ..backends.workspaces import Lease, on_devices, sent_to
from ..torch_private import any_autocast, graph_task_id, hooks_of_thread, set_grad_enabled, without_modes
from .node import make_node
from .part import Gathered, Part, Remembered
from .recomputation import repeat

__all__: list[str] = []

Answer = tuple[BatchStatistics, Gathered]  # of the master to each replica


def sync_batch_norm(input: Tensor, part: Part) -> Tensor:
    """Normalize the input of one replica with the statistics of all that are connected to it.

    The caller has made `part`, with what belongs to the layer; this adds the rest.
    """
    if has_torch_function((input,)):  # A subclass of `Tensor` may override this function, as those of torch.
        return handle_torch_function(sync_batch_norm, (input,), input, part)
    if input.is_leaf and input.requires_grad:
        input = input[...]  # A leaf has no grad_fn that could tell whether its gradient is needed.
    records = torch.is_grad_enabled()
    if records and input.is_inference():
        input = input.clone()  # Inference tensors cannot be saved for a backward pass.
    part.input, part.records, part.has_hooks = input, records, records and hooks_of_thread(True) is not None
    connection = part.connection
    set_grad_enabled(False)  # not a context, which takes ten times as long
    try:
        if part.running is None or graph_task_id() == -1:  # see NOTE [recomputation]
            part.save()
        if input.is_cuda and connection.pipe is not None and not are_default(input.device, connection.master_device):
            return _exchange_apart(part)  # see NOTE [streams]
        if part.has_hooks or any_autocast():
            return _exchange_apart(part)
        return _exchange(part)
    finally:
        set_grad_enabled(records)


def _exchange_apart(part: Part) -> Tensor:
    """Exchange on the default streams, without autocast, and without the modes of a checkpoint."""
    # A selective checkpoint counts the operators of its forward, and expects the same ones in the recomputation, which
    # merges nothing. It would also keep what they return, such as memory that is filled in later.
    here, connection = part.input.device, part.connection
    devices = () if connection.pipe is None else {here, connection.master_device or here}
    # Autocast would concatenate tensors in its own dtype, or refuse tensors of another dtype.
    with without_modes() if part.has_hooks else nullcontext(), torch.autocast(here.type, enabled=False):
        return on_default_streams(devices, (part.input, part.weight, part.bias), _exchange, part)


def _exchange(part: Part) -> Tensor:
    """Measure the input, send that to the master, and get its answer, or that of the call that is repeated."""
    input, connection = part.input, part.connection
    device, channels = input.device, input.shape[1]
    part.backend = backends.BACKENDS.get(device.type, GENERAL)
    part.kind = device.type, input.dtype, channels, input.dim(), part.eps, part.clamps, is_inference_mode_enabled()
    part.elements = input.numel() // max(channels, 1)
    if part.elements:
        statistics, part.memory = part.backend.statistics(input, part.eps)
    else:
        statistics = part.backend.empty_statistics(input)
    part.statistics = sent_to(statistics, connection.master_device or device, getattr(connection.pipe, "owner", None))
    if connection.pipe is None:
        _merge([part])
    elif graph_task_id() != -1:  # inside a backward pass
        repeat(part)
    else:
        answer: Answer = connection.pipe.run(part)
        if part.has_hooks or not part.records:  # Checkpoints have hooks, or run without a graph: they may repeat it.
            is_constant = part.records and not part.output.requires_grad
            connection.pipe.remembered += (Remembered(part.statistics, part.elements, *answer, is_constant),)
    return part.output


def merge_parts(messages: Sequence[tuple[Hashable, Part]]) -> Sequence[tuple[Hashable, Answer]]:
    """Merge the parts of all replicas, by identifier; the callback of a layer's `SyncMaster`."""
    parts = [part for _, part in messages]
    if any([part.kind != parts[0].kind for part in parts]):
        raise _different(parts)
    answer = _merge(parts)
    return [(identifier, answer) for identifier, _ in messages]


def _merge(parts: Sequence[Part]) -> Answer:
    """Merge what all replicas have measured, and make their outputs."""
    batch, gathered = _statistics(parts)
    if parts[0].saved is None:
        parts[0].save()  # in a recomputation without replicas
    batch.backend.normalize(parts, batch)
    make_node(batch, parts)
    return batch, gathered


def _statistics(parts: Sequence[Part]) -> Answer:
    """Merge the statistics of all replicas, and of all processes; update the running statistics."""
    first, backend, master = parts[0], parts[0].backend, parts[0].input.device
    statistics: Sequence[Pair] = [sent_to(part.statistics, master) for part in parts]
    counts: Counts = [part.elements for part in parts]
    total: int | Tensor = sum(counts)
    if first.peers is not None:
        statistics, counts, total = first.peers.gathered_statistics(statistics[0], first.elements, backend.merge_dtype)
    if isinstance(total, int) and total == 1:
        raise single_value([part.input.shape for part in parts])
    devices = tuple(dict.fromkeys([part.input.device for part in parts]))
    lease = Lease(getattr(first.connection.pipe, "owner", None), devices, statistics[0][0])
    *pair, clamped = backend.merge(statistics, counts, total, first, lease.workspace)
    mean_invstd = on_devices(pair, devices, lease)
    # A module may compute a parameter in its forward. Those that replicas got from it are equal, on all devices.
    of_module = [part.weight is part.connection.weight and part.bias is part.connection.bias for part in parts]
    parameters_differ = len(parts) > 1 and not all(of_module)
    reduce = None if first.peers is None else first.peers.all_reduced
    batch = BatchStatistics(backend, master, mean_invstd, total, clamped, parameters_differ, reduce, lease)
    return batch, (statistics, counts, total)


def _different(parts: Sequence[Part]) -> ValueError:
    texts = []
    for part in parts:
        shape, (*_, eps, clamps, is_inference) = tuple(part.input.shape), part.kind
        modes = (", clamp" if clamps else "") + (", in inference mode" if is_inference else "")
        where = f"on {part.input.device} in replica {part.connection.number}"
        texts.append(f"{shape} of {part.input.dtype} (eps={eps}{modes}) {where}")
    return ValueError(
        "all replicas must get inputs with the same dtype, device type, number of channels and of dimensions, in "
        f"layers with the same eps and eps_mode, but got {', '.join(texts)}; give every replica the same kind of input "
        "and the same layer"
    )
