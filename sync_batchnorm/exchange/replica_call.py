"""The records of one call of a layer. Each is built whole by one thread, and nobody changes it afterwards.

    record             built by                      read by
    ------             --------                      -------
    LayerArguments     the layer                     the replica, the master (`backends/base.py`)
    ReplicaCall        the replica: its message      the master
    Saved              the replica: its message      the backward pass (`saved.py`)
    Answer             the master                    the replica
    RememberedCall     the replica                   its recomputation

Only replica 0 may update running statistics: only its layer has the buffers of the model, and the layer passes them as
`LayerArguments.running`. The other replicas have copies of the buffers, which nobody writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from .. import backends
from ..backends.base import GENERAL, Backend, BatchStatistics, Counts, LayerArguments, Pair
from ..backends.workspaces import WorkspacePools, move_pair

__all__: list[str] = []

GatheredStatistics = tuple[
    Sequence[Pair], Counts, int | Tensor
]  # the statistics of all replicas, their counts, and the total
Answer = tuple[BatchStatistics, GatheredStatistics, Tensor]  # for one replica: the last one is its output


@dataclass(slots=True, eq=False)
class Connection:
    """The connection of a replica's layer to its peers, for one forward pass; the replication callback makes it."""

    pipe: Any  # a `SyncMaster` or `SlavePipe`; None for a replica in a process of its own
    number: int  # of the replica
    master_device: torch.device | None = None  # statistics are sent there; None if it is unknown
    weight: Tensor | None = None  # the parameters that the replica got from its module
    bias: Tensor | None = None
    pools: ref[WorkspacePools] | None = None  # that the forward passes of a wrapper share; None: nothing is kept
    remembered: list["RememberedCall"] = field(default_factory=list)  # calls that a checkpoint may repeat

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # A copy of a replica's layer is not connected.


ALONE = Connection(pipe=None, number=0)


class ReplicaCall(NamedTuple):
    """One replica's call of a layer: its input, and the statistics of its input."""

    input: Tensor
    layer: LayerArguments
    connection: Connection
    backend: Backend
    kind: tuple[Any, ...]  # must be equal in all replicas
    statistics: Pair  # see `Backend.statistics`
    elements: int  # per channel
    memory: Tensor | None  # for the output, if the backend has allocated some


class RememberedCall(NamedTuple):
    """A call that a checkpoint may repeat, outside of the graph; see NOTE [recomputation]."""

    statistics: Pair  # of the replica's input
    elements: int  # of the replica's input, per channel
    batch: BatchStatistics
    gathered: GatheredStatistics  # from which `batch` was computed
    is_constant: bool  # whether the output required no gradient, although the replica recorded a graph


def measure(input: Tensor, layer: LayerArguments, connection: Connection) -> ReplicaCall:
    """Compute the statistics of a replica's input, and send them to the device of the master."""
    device, channels = input.device, input.shape[1]
    backend = backends.BACKENDS.get(device.type, GENERAL)
    kind = device.type, input.dtype, channels, input.dim(), layer.eps, layer.clamps, torch.is_inference_mode_enabled()
    elements, memory = input.numel() // max(channels, 1), None
    if elements:
        statistics, memory = backend.statistics(input, layer.eps)
    else:
        statistics = backend.empty_statistics(input)
    statistics = move_pair(statistics, connection.master_device or device, connection.pools)
    return ReplicaCall(input, layer, connection, backend, kind, statistics, elements, memory)
