"""The part of one replica in one call of a layer: what it brings, what the master adds, and the output.

::

    part = Part(weight=..., ...)     in the thread of the replica
    part.measure()                   statistics of the input, and memory for the output
    ...                              the master adds mean and invstd of the whole batch
    part.normalize()                 fills in the output
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends.base import (
    GENERAL,
    Backend,
    Pair,
    RunningStatistics,
    Statistics,
    channel_count,
    memory_for_output,
    sent,
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

    # What the layer has, beside the input.
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    clamps: bool  # whether `eps` is a lower bound of the variance, and not added to it
    peers: Peers | None  # the processes to exchange with
    running: RunningStatistics | None  # the buffers that this call of the replica updates
    weight_of_module: bool  # whether the weight is that of the wrapped module, equal in all replicas
    master_device: torch.device  # where the master merges, if that is known: statistics are sent there
    # What the call has.
    input: Tensor = field(init=False)
    saved: Saved | None = None  # None if the replica records no graph
    # What `measure` adds, for the master.
    kind: Kind = field(init=False)
    statistics: Statistics = field(init=False)  # of the input, see `Backend.statistics`
    elements: int = field(init=False)  # per channel
    output: Tensor = field(init=False)  # see NOTE [memory of the outputs] in `node.py`
    # What the master adds: mean and inverse standard deviation of the batch, on the device of the replica.
    mean_invstd: Pair = field(init=False)

    def measure(self) -> None:
        """Compute the statistics of the input, and send them to the master's device; allocate the output."""
        input, memory = self.input, None
        device = input.device
        backend = backends.BACKENDS.get(device.type, GENERAL)
        if input.numel():
            self.elements = channel_count(input.shape)
            statistics, memory = backend.statistics(input, self.eps)
        else:
            self.elements = 0
            statistics = backend.empty_statistics(input)
        self.output = memory_for_output(input) if memory is None else memory
        self.statistics = statistics if device == self.master_device else sent(statistics, self.master_device)
        self.kind = Kind(
            backend=backend,
            dtype=input.dtype,
            channels=input.shape[1],
            dims=input.dim(),
            eps=self.eps,
            clamps=self.clamps,
            is_inference=torch.is_inference_mode_enabled(),
        )

    def normalize(self) -> Tensor:
        """Fill in the output, and return it."""
        if self.input.numel():
            self.kind.backend.normalize(self.input, self.mean_invstd, self.weight, self.bias, self.output)
        return self.output
