"""The part of one replica in one call of a layer: what it brings, what the master adds, and the output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import (
    Backend,
    ForwardPart,
    Pair,
    RunningStatistics,
    Statistics,
    memory_for_output,
)
from .processes import Peers
from .saved import Saved

__all__: list[str] = []


class Kind(NamedTuple):
    """What must be equal in all replicas."""

    backend: Backend
    dtype: torch.dtype
    channels: int
    dims: int
    eps: float
    clamps: bool
    is_inference: bool


@dataclass(slots=True, eq=False)
class Part:
    """The part of one replica in one call of a layer."""

    # What the layer has, besides the input.
    number: int  # of the replica, for messages
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    clamps: bool  # whether `eps` is a lower bound of the variance, and not added to it
    peers: Peers | None  # the processes to exchange with
    running: RunningStatistics | None  # the buffers that this call of the replica updates
    weight_of_module: bool  # whether the weight is that of the wrapped module, equal in all replicas
    bias_of_module: bool
    master_device: torch.device  # where the master merges, if that is known: statistics are sent there
    # What the call has.
    input: Tensor = field(init=False)
    saved: Saved | None = None  # None if the replica records no graph
    # What the replica measures, for the master.
    kind: Kind = field(init=False)
    statistics: Statistics = field(init=False)  # of the input, see `Backend.statistics`
    elements: int = field(init=False)  # per channel
    memory: Tensor | None = None  # for the output, if the backend has some
    # What the master adds: mean and inverse standard deviation of the batch, on the device of the replica; the output.
    mean_invstd: Pair = field(init=False)
    output: Tensor = field(init=False)


def normalize(parts: Sequence[Part]) -> None:
    """Add the outputs of parts, which have mean and inverse standard deviation of the batch."""
    with_elements: list[ForwardPart] = []
    differ = False
    for part in parts:
        if part.elements:
            with_elements.append(ForwardPart(part.input, part.mean_invstd, part.weight, part.bias, part.memory))
            differ = differ or not (part.weight_of_module and part.bias_of_module)
    outputs = iter(parts[0].kind.backend.normalize(with_elements, differ))
    for part in parts:
        part.output = next(outputs) if part.elements else memory_for_output(part.input)
