"""The forward pass of one call of a synchronized batch norm layer, in all replicas.

The obvious way: each replica sends its statistics, gets the merged statistics, and normalizes its own input. Then each
replica has an autograd node of its own, and the backward pass deadlocks (`backward.py`). So the replicas only measure
their inputs, each in its own thread. Replica 0 is the master: it merges the statistics, normalizes all inputs, makes
one autograd node, and answers each replica with its output:

    replica 0, the master                       replica 1
    ---------------------                       ---------
    measure its input                           measure its input
    wait for all calls   <---- ReplicaCall ---- send
    merge_replicas
      merge statistics, and move the running statistics
      normalize the inputs of all replicas
      make one node with the outputs of all replicas
    return its output    ------- Answer ------> return its output
    ---------------------------------------------------------------

The functions below stand in this order. Replicas wait in `connection.pipe.run`: see `meeting/coordinator.py`.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .. import backends
from ..backends.base import GENERAL, BatchStatistics, Counts, LayerArguments, single_value_error
from ..backends.streams import on_default_streams, uses_default_streams
from ..backends.workspaces import Lease, Pair, move_pair
from ..processes import Peers
from ..torch_private import any_autocast, graph_task_id, saved_tensors_hooks, set_grad_enabled, without_modes
from .backward import Saved, connect_to_graph
from .recomputation import recompute
from .replica_call import Answer, Connection, RememberedCall, ReplicaCall

__all__: list[str] = []

# The message of one replica to replica 0: (call, saved tensors). The second item is None if the replica records no
# autograd graph.
Message = tuple[ReplicaCall, Saved | None]


def sync_batch_norm(input: Tensor, layer: LayerArguments, connection: Connection, peers: Peers | None) -> Tensor:
    """Normalize the input of one replica with the batch statistics of all replicas, or of all processes.

    Args:
        input: the input of this replica, ``(N, C, +)``.
        layer: the arguments of the layer in this replica.
        connection: the connection to the same layer in the other replicas; `ALONE` if there are no other replicas.
        peers: the processes with which this process exchanges; None if there are no other processes.
    """
    # A subclass of `Tensor` may override this function by its `__torch_function__`, like any function of torch.
    if has_torch_function((input,)):
        return handle_torch_function(sync_batch_norm, (input,), input, layer, connection, peers)
    records, saved, has_hooks = torch.is_grad_enabled(), None, False
    if records:
        if input.is_inference():
            input = input.clone()  # A tensor from inference mode cannot be saved for a backward pass, but its copy can.
        elif input.is_leaf and input.requires_grad:
            # The input is a leaf, and does not have a `grad_fn`. Take a view, because `Saved.read` needs a
            # `grad_fn`.
            input = input[...]
        has_hooks = saved_tensors_hooks(True) is not None
        saved = Saved(input, layer, has_hooks)
    set_grad_enabled(False)  # `torch.no_grad` takes ten times as long.
    try:
        if has_hooks or any_autocast():
            return _exchange_without_modes(input, layer, connection, saved, peers)
        if input.is_cuda and connection.pipe and not uses_default_streams(input.device, connection.master_device):
            return _exchange_without_modes(input, layer, connection, saved, peers)
        return _exchange(input, layer, connection, saved, peers)
    finally:
        set_grad_enabled(records)


def _exchange_without_modes(
    input: Tensor, layer: LayerArguments, connection: Connection, saved: Saved | None, peers: Peers | None
) -> Tensor:
    """Exchange on the default streams, without autocast, and without the modes of a checkpoint; see NOTE [streams].

    The dispatch modes of a selective checkpoint record the operators of the forward pass, and expect the same operators
    in the recomputation. But a recomputation of this layer does not exchange, so it runs fewer operators. The modes
    would also save tensors that the exchange fills only later. So the exchange runs without these modes.

    The exchange runs without autocast, which would change the dtype when statistics are concatenated, or refuse tensors
    of different dtypes.
    """
    device, has_hooks = input.device, saved is not None and saved.has_hooks
    devices = () if connection.pipe is None else {device, connection.master_device or device}
    with without_modes() if has_hooks else nullcontext(), torch.autocast(device.type, enabled=False):
        tensors = input, layer.weight, layer.bias
        return on_default_streams(devices, tensors, _exchange, input, layer, connection, saved, peers)


def _exchange(
    input: Tensor, layer: LayerArguments, connection: Connection, saved: Saved | None, peers: Peers | None
) -> Tensor:
    """Compute the statistics of one replica's input, exchange them, and return the output of this replica.

    Replica 0 computes the outputs of all replicas, and sends them to the other replicas.
    """
    device, channels, elements, memory = input.device, input.shape[1], 0, None
    master_device = connection.master_device or device
    backend = backends.BACKENDS.get(device.type, GENERAL)
    kind = device.type, input.dtype, channels, input.dim(), layer.eps, layer.clamps, torch.is_inference_mode_enabled()
    if input.numel():
        elements = input.numel() // channels
        statistics, memory = backend.statistics(input, layer.eps)
    else:
        statistics = backend.empty_statistics(input)
    if master_device != device:
        statistics = move_pair(statistics, master_device, connection.pools)
    call = ReplicaCall(input, layer, connection, backend, kind, statistics, elements, memory)
    if connection.pipe is None:
        ((_, (output, _)),) = merge_replicas([(0, (call, saved))], peers)
        return output
    if graph_task_id() != -1:  # In a backward pass, an activation checkpoint repeats an earlier call.
        return recompute(call, saved)
    if saved is not None and saved.has_hooks:
        saved.pack()
    output, merged = connection.pipe.run((call, saved))
    # An activation checkpoint may repeat this call in the backward pass, so remember the answer.
    if merged is not None:
        is_constant, (batch, gathered) = saved is not None and not output.requires_grad, merged
        connection.remembered.append(RememberedCall(statistics, elements, batch, gathered, is_constant))
    return output  # type: ignore[no-any-return]


def merge_replicas(
    messages: Sequence[tuple[Hashable, Message]], peers: Peers | None = None
) -> Sequence[tuple[Hashable, Answer]]:
    """Merge the statistics of all replicas, normalize all inputs, and return an answer for each replica.

    This function is the callback of a layer's `SyncMaster`, and gets the messages of all replicas. A process with a
    single replica has no `SyncMaster`, so there the layer calls this function itself. `peers` stands for the other
    processes; None if there are none.
    """
    identifiers, sent = zip(*messages, strict=True)
    calls: Sequence[ReplicaCall] = [call for call, _ in sent]
    first, master = calls[0], calls[0].input.device
    if any([call.kind != first.kind for call in calls]):
        raise _different_kinds_error(calls)
    if peers is None:
        counts: Counts = [call.elements for call in calls]
        statistics: Sequence[Pair] = [
            call.statistics if call.statistics[0].device == master else move_pair(call.statistics, master)
            for call in calls
        ]
        total: int | Tensor = sum(counts)
    else:
        statistics, counts, total = peers.gather_statistics(first.statistics, first.elements, first.backend.merge_dtype)
    if isinstance(total, int) and total == 1:
        raise single_value_error([call.input.shape for call in calls])

    devices = tuple(dict.fromkeys([call.input.device for call in calls]))
    lease = Lease(first.connection.pools, devices, statistics[0][0])
    *pair, clamped = first.backend.merge(statistics, counts, total, first.layer, lease.workspace)
    mean_invstd: Mapping[torch.device, Pair] = {master: pair}
    if len(devices) > 1:
        mean_invstd = lease.workspace.broadcast(torch.cat(pair, out=lease.workspace.flat), devices)
    # Parameters that replicas got from the model are equal in all replicas. But a module may also compute a weight or a
    # bias in its `forward`, and a computed parameter may differ between replicas.
    got_from_module = [
        call.layer.weight is call.connection.weight and call.layer.bias is call.connection.bias for call in calls
    ]
    parameters_differ = len(calls) > 1 and not all(got_from_module)
    reduce = None if peers is None else peers.all_reduce
    batch = BatchStatistics(first.backend, master, mean_invstd, total, clamped, parameters_differ, reduce, lease)

    saved_of_first = sent[0][1]
    if first.connection.pipe is None and saved_of_first is not None and saved_of_first.has_hooks:
        # Pass the tensors of a single replica to the saved-tensor hooks. Several replicas have passed their tensors to
        # the hooks before they sent their messages, each in its own thread.
        saved_of_first.pack()
    normalized = first.backend.normalize(calls, batch)
    merged = batch, (statistics, counts, total)
    # Only an activation checkpoint needs the merged statistics in the answer, to repeat the call in the backward pass.
    # A checkpoint sets saved-tensor hooks, or records no graph. In all other cases, leave them out, because they keep
    # the messages of all replicas in memory.
    may_repeat = [saved is None or saved.has_hooks for _, saved in sent]
    outputs = connect_to_graph(sent, normalized, batch)
    answers = [(output, merged if repeats else None) for output, repeats in zip(outputs, may_repeat, strict=True)]
    return list(zip(identifiers, answers, strict=True))


def _different_kinds_error(calls: Sequence[ReplicaCall]) -> ValueError:
    texts = []
    for call in calls:
        shape, (*_, eps, clamps, is_inference) = tuple(call.input.shape), call.kind
        modes = (", clamp" if clamps else "") + (", in inference mode" if is_inference else "")
        where = f"on {call.input.device} in replica {call.connection.number}"
        texts.append(f"{shape} of {call.input.dtype} (eps={eps}{modes}) {where}")
    return ValueError(
        "all replicas must get inputs with the same dtype, device type, number of channels and of dimensions, in "
        f"layers with the same eps and eps_mode, but got {', '.join(texts)}; give every replica the same kind of input "
        "and the same layer"
    )


# NOTE [tried in a call]: Changes, with their gain in the processor time of a training step of ResNet-50 on one core.
#
# - Each replica normalizes its own input, into memory that the node has returned before it was filled: 1 % slower, by
#   one more operator for each replica. On the CPU, replicas could no longer share slope and offset.
# - The last replica that arrives merges, not the master: 1 % faster on two GPUs, but an error of the merge would then
#   be raised in any replica.
# - A replica wakes up without the interpreter lock, by a file descriptor: 2 % faster on two GPUs and 4 % on four, if
#   all threads share a core, because the kernel then switches threads twice in place of six times. It needs descriptors
#   for each replica, outside the lock of the coordinator, and Linux.
# - Another scheduling policy for the threads of replicas: 2 % faster, but on Linux only, and threads that `forward`
#   starts inherit it.
# - A plan of a replica that is kept from one step to the next: 1 ms of 90 on eight GPUs. Shells of modules that are
#   kept: nothing.
# - Operators without the autograd keys of the dispatcher: nothing on two and four GPUs, 1 % faster on eight. Tangents
#   of forward mode would be lost; now operators refuse them.
