"""The part of one replica in one call of a layer, and what it keeps of the call for its backward pass.

NOTE [who saves what]: Each replica saves its own input and weight, so its saved-tensor hooks run in its own thread. The
node of the call unpacks both (see also NOTE [who unpacks what]), and drops what is `kept` unless `retain_graph` is set:
the input, or what hooks have made of both. The node saves no tensors itself: where replicas take gradients in their
forward, two threads may drop what a node has saved at the same time, and torch 2.13 then frees it twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, device

from ..backends.base import Backend, BatchStatistics, Counts, Pair, RunningStatistics
from ..backends.streams import current_stream, on_streams
from ..torch_private import fast_apply, graph_task_id, will_run
from .processes import Peers

__all__: list[str] = []


class Connection(NamedTuple):
    """What connects the layer of a replica to those of its peers; the replication callback makes it."""

    pipe: Any  # a `SyncMaster` or `SlavePipe`; None for a replica in a process of its own
    number: int  # of the replica; the buffers of the first one are those of the wrapped module
    master_device: device | None = None  # where the master merges, if that is known: statistics are sent there
    weight: Tensor | None = None  # that the replica got from its module, as the next
    bias: Tensor | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # A copy of a replica's layer is not connected.


ALONE = Connection(pipe=None, number=0)

Gathered = tuple[Sequence[Pair], Counts, int | Tensor]  # statistics and counts for `Backend.merge`, and their total


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
    # What the call has.
    input: Tensor = field(init=False)
    records: bool = field(init=False)  # whether the replica records a graph
    has_hooks: bool = field(init=False)  # whether it does so with saved-tensor hooks, such as those of a checkpoint
    saved: "Saved | None" = None  # None before `save`, and without a graph
    # What the replica measures, for the master.
    backend: Backend = field(init=False)
    kind: tuple[Any, ...] = field(init=False)  # what must be equal in all replicas
    statistics: Pair = field(init=False)  # of the input, see `Backend.statistics`
    elements: int = field(init=False)  # per channel
    memory: Tensor | None = None  # for the output, if the backend has some
    # What the master adds.
    output: Tensor = field(init=False)

    def save(self) -> None:
        """Save input and weight if the replica records a graph; a checkpoint may end its recomputation here."""
        if self.records:
            # As in torch, hooks see nothing of a layer that needs no gradient.
            tensors = self.input, self.weight, self.bias
            by_hooks = self.has_hooks and any([tensor is not None and tensor.requires_grad for tensor in tensors])
            self.saved = (SavedByHooks if by_hooks else Saved)(self.input, self.weight)


class Remembered(NamedTuple):
    """What a pipe remembers of one call of its replica, outside of the graph, for NOTE [recomputation]."""

    statistics: Pair  # of its input
    elements: int  # per channel, of its input
    batch: BatchStatistics  # the answer
    gathered: Gathered  # the statistics of all replicas, of which it was made
    is_constant: bool  # whether the replica recorded a graph, but the output still required no gradient


FREED = (
    "Trying to backward through the graph a second time, where a synchronized batch norm has dropped its input; pass "
    "retain_graph=True to the first backward(), and compute gradients outside the forward() of replicas"
)

InputAndWeight = tuple[Tensor, Tensor | None]


class Saved:
    """Keeps input and weight of one replica. This takes less time than to save them in an autograd node."""

    __slots__ = ("_input_version", "_weight", "_weight_version", "device", "input_node", "kept", "needs_input")

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        self.device, self.needs_input = input.device, input.requires_grad
        self.input_node = input.grad_fn  # None for an input that needs no gradient
        self._input_version = input._version
        # Never dropped, since it is only a vector. If both were, a thread could read the input before, and the weight
        # after another thread drops them.
        self._weight, self._weight_version = weight, 0 if weight is None else weight._version
        self.kept: Any = input  # None once it is dropped

    def wants_input(self) -> bool:
        """Return whether the running backward pass needs the gradient of the input."""
        return self.needs_input and will_run(self.input_node)

    def is_read(self, grad_output: Tensor | None) -> bool:
        """Return whether the running backward pass needs input and weight; `grad_output` is that of this replica."""
        # Gradients that are differentiated need the inputs of all replicas again.
        return grad_output is not None or self.wants_input() or torch.is_grad_enabled()

    def unpack(self) -> InputAndWeight:
        """Return input and weight, unless they were dropped or have changed in place."""
        input, weight = self.kept, self._weight
        if input is None:
            raise RuntimeError(FREED)
        for tensor, version in ((input, self._input_version), (weight, self._weight_version)):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
                )
        return input, weight


class SavedByHooks(Saved):
    """Saves with the saved-tensor hooks of its thread: with those of an activation checkpoint, it keeps no tensors."""

    __slots__ = ("unpacked",)

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        super().__init__(input, weight)
        self.unpacked: dict[int, InputAndWeight] = {}  # by the number of the backward pass that reads it
        with torch.enable_grad():
            self.kept = (_save(graph_source(), (input, weight)), current_stream(input.device))
        self._weight = None  # the hooks have it

    def unpack(self) -> InputAndWeight:
        if unpacked := self.unpacked.pop(graph_task_id(), None):
            return unpacked
        kept = self.kept
        if kept is None:
            raise RuntimeError(FREED)
        owner, stream = kept
        if stream == current_stream(self.device):
            return owner.grad_fn.saved_tensors  # type: ignore[no-any-return]
        # Hooks may compute to unpack, and others use what a checkpoint has computed on this stream.
        return on_streams([stream], (), lambda: owner.grad_fn.saved_tensors)  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    """Never runs in a backward pass: its node owns saved tensors for as long as its output is alive."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, tensors: InputAndWeight) -> Tensor:
        ctx.save_for_backward(*tensors)
        return source


_save = fast_apply(_Save)


def graph_source() -> Tensor:
    """Return a tensor that requires a gradient, so that a function of it is in the graph whatever else it takes."""
    # One for each use: in anomaly mode, two threads that use a leaf for the first time deadlock (torch 2.13).
    return torch.empty(0, device="cpu", requires_grad=True)
