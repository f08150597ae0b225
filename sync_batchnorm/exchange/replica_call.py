"""The records of one call of a layer. Each is built whole by one thread, and nobody changes it afterwards.

    record             built by                      read by
    ------             --------                      -------
    LayerArguments     the layer                     the replica, the master
    ReplicaCall        the replica: its message      the master
    Saved              the replica: its message      the backward pass, in `backward.py`
    Answer             the master                    the replica
    RememberedCall     the replica                   its recomputation

Only replica 0 may update running statistics: only its layer has the buffers of the model, and the layer passes them as
`LayerArguments.running`. The other replicas have copies of the buffers. Nobody writes into these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..backends.base import Backend, BatchStatistics, Counts, LayerArguments
from ..backends.workspaces import Pair, WorkspacePools

__all__: list[str] = []

GatheredStatistics = tuple[Sequence[Pair], Counts, int | Tensor]  # of all replicas; their counts; the sum of these
Merged = tuple[BatchStatistics, GatheredStatistics]  # the batch statistics, and the statistics they are computed from
Answer = tuple[Tensor, Merged | None]  # the output of one replica; the merged statistics if a checkpoint may need them


@dataclass(slots=True, eq=False)
class Connection:
    """The connection of a replica's layer to its peers, for one forward pass. The replication callback makes it."""

    pipe: Any  # a `SyncMaster` or `SlavePipe`; None for the only replica of a process
    number: int  # of the replica
    master_device: torch.device | None = None  # to which statistics are sent; None if it is unknown
    weight: Tensor | None = None  # the parameters that the replica got from its module
    bias: Tensor | None = None
    pools: ref[WorkspacePools] | None = None  # shared by the forward passes of a wrapper; None: no memory is kept
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
    """A call that a checkpoint may repeat, outside the autograd graph; see NOTE [recomputation]."""

    statistics: Pair  # of the replica's input
    elements: int  # of the replica's input, per channel
    batch: BatchStatistics
    gathered: GatheredStatistics  # from which `batch` was computed
    is_constant: bool  # whether the output required no gradient, although the replica recorded a graph
