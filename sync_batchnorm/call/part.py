"""The part of one replica in one call of a layer: what it brings, what the master adds, and the output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, device

from ..backends.base import Backend, Pair, RunningStatistics, Statistics, memory_for_output
from .processes import Peers
from .saved import Saved

__all__: list[str] = []


class Connection(NamedTuple):
    """What connects the layer of a replica to those of its peers; the replication callback makes it."""

    pipe: Any  # a `SyncMaster` or `SlavePipe`; None for a replica in a process of its own
    number: int  # of the replica; the buffers of the first one are those of the wrapped module
    master_device: device | None = None  # where the master merges, if that is known
    weight: Tensor | None = None  # that the replica got from its module, as the next
    bias: Tensor | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # A copy of a replica's layer is not connected.


ALONE = Connection(pipe=None, number=0)


@dataclass(slots=True, eq=False)
class Part:
    """The part of one replica in one call of a layer."""

    # What the layer has, besides the input.
    connection: Connection
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    clamps: bool  # whether `eps` is a lower bound of the variance, and not added to it
    peers: Peers | None  # the processes to exchange with
    running: RunningStatistics | None  # the buffers that this call of the replica updates
    master_device: device  # where the master merges, if that is known: statistics are sent there
    # What the call has.
    input: Tensor = field(init=False)
    saved: Saved | None = None  # None if the replica records no graph
    # What the replica measures, for the master.
    backend: Backend = field(init=False)
    kind: tuple[Any, ...] = field(init=False)  # what must be equal in all replicas
    statistics: Statistics = field(init=False)  # of the input, see `Backend.statistics`
    elements: int = field(init=False)  # per channel
    memory: Tensor | None = None  # for the output, if the backend has some
    # What the master adds: mean and inverse standard deviation of the batch, on the device of the replica; the output.
    mean_invstd: Pair = field(init=False)
    output: Tensor = field(init=False)


def weights_differ(parts: Sequence[Part]) -> bool:
    """Return whether replicas may have unequal weights: a module may compute one in its forward."""
    weight = parts[0].weight
    is_of_module = weight is parts[0].connection.weight
    for part in parts:
        if part.weight is not weight and not (is_of_module and part.weight is part.connection.weight):
            return True
    return False


def normalize(parts: Sequence[Part]) -> None:
    """Add the outputs of parts, which have mean and inverse standard deviation of the batch."""
    with_elements: list[Part] = []
    parameters_differ = False
    for part in parts:
        if part.elements:
            with_elements.append(part)
            if part.weight is not part.connection.weight or part.bias is not part.connection.bias:
                parameters_differ = True
        else:
            part.output = memory_for_output(part.input)
    outputs = parts[0].backend.normalize(with_elements, parameters_differ)
    for part, output in zip(with_elements, outputs, strict=True):
        part.output = output
