"""The forward pass of one call of a layer in all replicas.

The obvious way: each replica sends its statistics, gets the merged ones, and normalizes its own input. Then each
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

The functions below stand in this order. Replicas wait in `connection.pipe.run`: see `meeting/coordinator.py`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..backends.base import BatchStatistics, LayerArguments, single_value_error
from ..backends.streams import on_default_streams, uses_default_streams
from ..backends.workspaces import Lease, Pair, move_pair
from ..processes import Peers
from ..torch_private import any_autocast, graph_task_id, saved_tensors_hooks, set_grad_enabled, without_modes
from .backward import connect_to_graph
from .recomputation import recompute
from .replica_call import ALONE, Answer, Connection, GatheredStatistics, RememberedCall, ReplicaCall, Saved, measure

__all__: list[str] = []

Message = tuple[ReplicaCall, Saved | None]  # of each replica; the second item is None without a graph


def sync_batch_norm(input: Tensor, layer: LayerArguments, connection: Connection, peers: Peers | None) -> Tensor:
    """Normalize the input of one replica with the batch statistics of all replicas, or of all processes.

    Args:
        input: ``(N, C, +)``.
        layer: the arguments of the layer.
        connection: connects the layer to those of the other replicas; `ALONE` if there are none.
        peers: the processes to exchange with; None for this process alone.
    """
    if has_torch_function((input,)):  # A subclass of `Tensor` may override this function, like functions of torch.
        return handle_torch_function(sync_batch_norm, (input,), input, layer, connection, peers)
    if input.is_leaf and input.requires_grad:
        input = input[...]  # `Saved.wants_input` needs a grad_fn, and a leaf has none.
    records = torch.is_grad_enabled()
    if records and input.is_inference():
        input = input.clone()  # Inference tensors cannot be saved for a backward pass.
    has_hooks = records and saved_tensors_hooks(True) is not None
    is_recomputation = graph_task_id() != -1  # inside a backward pass
    set_grad_enabled(False)  # `torch.no_grad` takes ten times as long.
    try:
        saved = None
        if records and (layer.running is None or not is_recomputation):  # see NOTE [recomputation]
            saved = Saved(input, layer, has_hooks)
        if connection.pipe is None:
            exchange = partial(_exchange_alone, input, layer, peers, saved, records, has_hooks)
        elif is_recomputation:
            exchange = partial(recompute, input, layer, connection, records, has_hooks)
        else:
            exchange = partial(_exchange_with_replicas, input, layer, connection, saved, has_hooks)
        is_on_side_stream = input.is_cuda and not uses_default_streams(input.device, connection.master_device)
        if has_hooks or any_autocast() or (is_on_side_stream and connection.pipe is not None):
            return _without_modes(exchange, input, layer, connection, has_hooks)
        return exchange()
    finally:
        set_grad_enabled(records)


def _without_modes(
    exchange: Callable[[], Tensor], input: Tensor, layer: LayerArguments, connection: Connection, has_hooks: bool
) -> Tensor:
    """Exchange on the default streams, without autocast, and without the modes of a checkpoint; see NOTE [streams].

    A selective checkpoint counts the operators of its forward pass, and expects the same operators in the
    recomputation. But a recomputation does not merge. The checkpoint would also keep the results of the operators, such
    as memory that is filled later. Autocast would concatenate tensors in its own dtype, or refuse tensors of another
    dtype.
    """
    device = input.device
    devices = () if connection.pipe is None else {device, connection.master_device or device}
    with without_modes() if has_hooks else nullcontext(), torch.autocast(device.type, enabled=False):
        return on_default_streams(devices, (input, layer.weight, layer.bias), exchange)


def _exchange_with_replicas(
    input: Tensor, layer: LayerArguments, connection: Connection, saved: Saved | None, has_hooks: bool
) -> Tensor:
    """Send the statistics of the input to the master, and wait for the output in its answer."""
    call = measure(input, layer, connection)
    message: Message = call, saved
    batch, gathered, output = connection.pipe.run(message)
    if has_hooks or saved is None:  # A checkpoint, which has hooks or runs without a graph, may repeat this call.
        is_constant = saved is not None and not output.requires_grad
        connection.remembered.append(RememberedCall(call.statistics, call.elements, batch, gathered, is_constant))
    return output  # type: ignore[no-any-return]


def _exchange_alone(
    input: Tensor, layer: LayerArguments, peers: Peers | None, saved: Saved | None, records: bool, has_hooks: bool
) -> Tensor:
    """Normalize the input of the only replica of this process with the statistics of all processes."""
    call = measure(input, layer, ALONE)
    if peers is None:
        gathered: GatheredStatistics = [call.statistics], [call.elements], call.elements
    else:
        gathered = peers.gather_statistics(call.statistics, call.elements, call.backend.merge_dtype)
    batch = _merge_statistics([call], gathered, peers)
    if records and saved is None:
        saved = Saved(input, layer, has_hooks)  # in a recomputation
    (output,) = connect_to_graph([(call, saved)], call.backend.normalize([call], batch), batch)
    return output


def merge_replicas(messages: Sequence[tuple[Hashable, Message]]) -> Sequence[tuple[Hashable, Answer]]:
    """Merge the statistics of all replicas, and answer each with its output; the callback of a layer's `SyncMaster`."""
    calls = [call for _, (call, _) in messages]
    if any([call.kind != calls[0].kind for call in calls]):
        raise _different_kinds_error(calls)
    master = calls[0].input.device
    counts = [call.elements for call in calls]
    gathered: GatheredStatistics = [move_pair(call.statistics, master) for call in calls], counts, sum(counts)
    batch = _merge_statistics(calls, gathered, None)
    normalized = batch.backend.normalize(calls, batch)
    outputs = connect_to_graph([message for _, message in messages], normalized, batch)
    return [(identifier, (batch, gathered, output)) for (identifier, _), output in zip(messages, outputs, strict=True)]


def _merge_statistics(
    calls: Sequence[ReplicaCall], gathered: GatheredStatistics, peers: Peers | None
) -> BatchStatistics:
    """Merge the gathered statistics, update the running statistics of replica 0, and broadcast mean and invstd."""
    first, (statistics, counts, total) = calls[0], gathered
    if isinstance(total, int) and total == 1:
        raise single_value_error([call.input.shape for call in calls])
    devices = tuple(dict.fromkeys([call.input.device for call in calls]))
    lease = Lease(first.connection.pools, devices, statistics[0][0])
    *pair, clamped = first.backend.merge(statistics, counts, total, first.layer, lease.workspace)
    mean_invstd: Mapping[torch.device, Pair] = {devices[0]: pair}
    if len(devices) > 1:
        mean_invstd = lease.workspace.broadcast(torch.cat(pair, out=lease.workspace.flat), devices)
    # A module may compute a parameter in its forward. Parameters that replicas got from it are equal, on all devices.
    have_parameters_of_module = [
        call.layer.weight is call.connection.weight and call.layer.bias is call.connection.bias for call in calls
    ]
    parameters_differ = len(calls) > 1 and not all(have_parameters_of_module)
    reduce = None if peers is None else peers.all_reduce
    return BatchStatistics(first.backend, devices[0], mean_invstd, total, clamped, parameters_differ, reduce, lease)


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
# - The last replica that arrives merges, not the master: 1 % faster on two GPUs, but errors of all in any replica.
# - A replica wakes up without the interpreter lock, by a file descriptor: 2 % faster on two GPUs and 4 % on four, if
#   all threads share a core, because the kernel then switches threads twice in place of six times. It needs descriptors
#   for each replica, outside the lock of the coordinator, and Linux.
# - Another scheduling policy for the threads of replicas: 2 % faster, but on Linux only, and threads that `forward`
#   starts inherit it.
# - A plan of a replica that is kept from one step to the next: 1 ms of 90 on eight GPUs. Shells of modules that are
#   kept: nothing.
# - Operators without the autograd keys of the dispatcher: nothing on two and four GPUs, 1 % faster on eight. Tangents
#   of forward mode would be lost; now operators refuse them.
