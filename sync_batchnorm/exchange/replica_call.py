"""The objects that describe one call of a layer.

Each object is built by one thread, and then handed over to the threads that read it:

    object             built by                                      read by
    ------             --------                                      -------
    LayerArguments     the layer                                     the replica, and replica 0, the master
    ReplicaCall        the replica, as a part of its message         replica 0, the master
    Saved              the replica, as a part of its message         the backward pass (`backward.py`)
    Answer             replica 0, the master                         the replica
    RememberedCall     the replica, after it got the answer          a recomputation (`recomputation.py`)

Only replica 0 may update running statistics, because only its layer holds the buffers of the model. That layer passes
its buffers as `LayerArguments.running`. The layers of the other replicas hold copies of these buffers, and nobody
writes into the copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..backends.base import Backend, BatchStatistics, Counts, LayerArguments

__all__: list[str] = []

# Three items: the statistics of each replica before the merge; for each replica, the number of elements per channel in
# its input; and the sum of these numbers.
GatheredStatistics = tuple[Sequence[Sequence[Tensor]], Counts, int | Tensor]
# The merged statistics, and the separate statistics of each replica.
Merged = tuple[BatchStatistics, GatheredStatistics]
# The answer of replica 0 to one replica: the output of this replica, and the merged statistics. The merged statistics
# are None unless an activation checkpoint may repeat the call.
Answer = tuple[Tensor, Merged | None]


@dataclass(slots=True, eq=False)
class Connection:
    """The connection of a layer in one replica to the same layer in the other replicas, for one forward pass.

    The replication callback of a layer makes this object, in each replica, before the replicas run.
    """

    pipe: Any  # the `SyncMaster` or `SlavePipe` of the replica; None if the process runs a single replica
    number: int  # the number of the replica
    master_device: torch.device | None = None  # the device on which replica 0 merges the statistics; None if unknown
    weight: Tensor | None = None  # this replica's copy of the model's weight, as the layer got it
    bias: Tensor | None = None  # this replica's copy of the model's bias, as the layer got it
    # A weak reference to reusable memory for the vectors that replicas exchange. All forward passes of a wrapper share
    # this memory. None if memory is not reused.
    pools: ref[Any] | None = None
    # The calls of this layer that an activation checkpoint may repeat in the backward pass.
    remembered: list["RememberedCall"] = field(default_factory=list)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # A pickle or copy of a replica's layer is not connected to other replicas.


ALONE = Connection(pipe=None, number=0)


class ReplicaCall(NamedTuple):
    """One replica's call of a layer: the input, the arguments of the layer, and the statistics of the input."""

    input: Tensor
    layer: LayerArguments
    connection: Connection
    backend: Backend
    kind: tuple[Any, ...]  # properties that must be equal in all replicas, such as dtype and number of channels
    statistics: Sequence[Tensor]  # the statistics of the input, as `Backend.statistics` returns them
    elements: int  # the number of elements per channel in the input
    memory: Tensor | None  # memory for the output, if the backend has already allocated it


class RememberedCall(NamedTuple):
    """A call that an activation checkpoint may repeat, without tensors of the graph; see NOTE [recomputation]."""

    statistics: Sequence[Tensor]  # the statistics of the replica's input
    elements: int  # the number of elements per channel in the replica's input
    batch: BatchStatistics  # the merged statistics of all replicas
    gathered: GatheredStatistics  # the statistics of all replicas before the merge
    is_constant: bool  # whether the output required no gradient, although gradients were enabled
