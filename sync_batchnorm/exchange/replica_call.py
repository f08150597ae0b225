"""The records of one call of a layer. Each is built whole by one thread, and nobody changes it afterwards.

    record             built by                      read by
    ------             --------                      -------
    LayerArguments     the layer                     the replica, the master
    ReplicaCall        the replica: its message      the master
    Saved              the replica: its message      the backward pass
    Answer             the master                    the replica
    RememberedCall     the replica                   its recomputation

Only replica 0 may update running statistics: only its layer has the buffers of the model, and the layer passes them as
`LayerArguments.running`. The other replicas have copies of the buffers. Nobody writes into these.

NOTE [who saves]: The obvious way to save input and weight for the backward pass is `ctx.save_for_backward` in the
node of the call. It fails twice. The saved-tensor hooks of every replica would run in the thread of replica 0. And
where replicas take gradients in their forward pass, two threads may free the tensors of one node at the same time,
and torch 2.13 then frees them twice. So each replica saves its own tensors, in its own thread:

    thread of replica 0      Saved 0  <---+
                                          +---- node of the call
    thread of replica 1      Saved 1  <---+

The node unpacks them in the backward pass, and then drops their inputs unless `retain_graph` is set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from .. import backends
from ..backends.base import GENERAL, Backend, BatchStatistics, Counts, LayerArguments
from ..backends.streams import current_stream, on_streams
from ..backends.workspaces import Pair, WorkspacePools, move_pair
from ..torch_private import fast_apply, graph_task_id, will_execute

__all__: list[str] = []

GatheredStatistics = tuple[Sequence[Pair], Counts, int | Tensor]  # of all replicas; their counts; the sum of these
Answer = tuple[BatchStatistics, GatheredStatistics, Tensor]  # to one replica; the last item is its output
InputAndWeight = tuple[Tensor, Tensor | None]


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


FREED = (
    "Trying to backward through the graph a second time, where a synchronized batch norm has dropped its input; pass "
    "retain_graph=True to the first backward(), and compute gradients outside the forward() of replicas"
)


class Saved:
    """Input and weight of one replica, saved for the backward pass.

    With saved-tensor hooks, they are saved by an autograd node, whose hooks may belong to an activation checkpoint.
    Without hooks, this object keeps them: that takes less time than a node.

    A checkpoint may end its recomputation while this object is made, by an exception.
    """

    __slots__ = ("_versions", "_weight", "by_hooks", "device", "input_node", "kept", "needs_input", "unpacked")

    def __init__(self, input: Tensor, layer: LayerArguments, has_hooks: bool) -> None:
        weight = layer.weight
        self.device, self.needs_input = input.device, input.requires_grad
        self.input_node = input.grad_fn  # None for an input that needs no gradient
        self._versions = input._version, 0 if weight is None else weight._version
        # The weight is never dropped, since it is only a vector. If both were dropped, a thread could read the input
        # before another thread drops them, and the weight afterwards.
        self._weight = weight
        self.kept: Any = input  # None once it is dropped
        # As in torch, hooks see nothing of a layer that needs no gradient.
        tensors = (input, weight, layer.bias) if has_hooks else ()
        self.by_hooks = any([tensor is not None and tensor.requires_grad for tensor in tensors])
        if self.by_hooks:
            self.unpacked: dict[int, InputAndWeight] = {}  # by the number of the backward pass that will read it
            with torch.enable_grad():
                self.kept = _save(graph_source(), (input, weight)), current_stream(input.device)
            self._weight = None  # The hooks decide whether it is kept.

    def wants_input(self) -> bool:
        """Return whether the running backward pass needs the gradient of the input."""
        return self.needs_input and will_execute(self.input_node)

    def is_read(self, grad_output: Tensor | None) -> bool:
        """Return whether the running backward pass needs input and weight; `grad_output` is that of this replica."""
        # Gradients of gradients need the inputs of all replicas.
        return grad_output is not None or self.wants_input() or torch.is_grad_enabled()

    def unpack(self) -> InputAndWeight:
        """Return input and weight. Raise an error if they were dropped or have changed in place."""
        if self.by_hooks and (unpacked := self.unpacked.pop(graph_task_id(), None)):
            return unpacked
        kept = self.kept
        if kept is None:
            raise RuntimeError(FREED)
        if self.by_hooks:
            owner, stream = kept
            if stream == current_stream(self.device):
                return owner.grad_fn.saved_tensors  # type: ignore[no-any-return]
            # To unpack, hooks may compute. A checkpoint has computed on this stream, and other layers use the results.
            return on_streams([stream], (), lambda: owner.grad_fn.saved_tensors)  # type: ignore[no-any-return]
        for tensor, version in zip((kept, self._weight), self._versions, strict=True):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
                )
        return kept, self._weight


class _Save(torch.autograd.Function):
    """A node that owns saved tensors for as long as its output is alive. It never runs in a backward pass."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, tensors: InputAndWeight) -> Tensor:
        ctx.save_for_backward(*tensors)
        return source


_save = fast_apply(_Save)


def graph_source() -> Tensor:
    """Return a new tensor that requires a gradient. A function of it is in the graph, whatever its other arguments."""
    # A new one for each use: in anomaly mode, two threads that use a leaf for the first time deadlock (torch 2.13).
    return torch.empty(0, device="cpu", requires_grad=True)
