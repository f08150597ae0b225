"""The backward pass of one call of a layer: a single autograd node for all replicas.

The obvious way is one node for each replica: each waits for the sums of the others. It would deadlock, because the
engine runs all nodes of a device in one thread. With a single node, the engine waits: it runs the node once it has the
gradients of all outputs. The node computes the two sums of each replica, adds them up, and computes the gradients of
all inputs:

    grad_output of replica 0 ---> sums 0 ---+           +---> grad_input of replica 0
                                            |--> total --|
    grad_output of replica 1 ---> sums 1 ---+           +---> grad_input of replica 1

It reads input and weight of each replica from the replica's `Saved`. The master makes everything else, on every
device, before it answers, because a replica may start a backward pass before the others have woken up.

NOTE [who saves]: The obvious way to save input and weight for the backward pass is `ctx.save_for_backward` in the
node of the call. It fails twice. The saved-tensor hooks of every replica would run in the thread of replica 0. And
where replicas take gradients in their forward pass, two threads may free the tensors of one node at the same time,
and torch 2.13 then frees them twice. So each replica saves its own tensors, in its own thread:

    thread of replica 0      Saved 0  <---+
                                          +---- node of the call
    thread of replica 1      Saved 1  <---+

The node unpacks them in the backward pass, and then drops their inputs unless `retain_graph` is set.

NOTE [gradients of gradients]: With `create_graph`, `Backend.gradients` computes the statistics again from the saved
inputs, in operators that autograd records. So a second backward pass does not need this node.

NOTE [who unpacks]: The engine runs the node of all replicas in the thread of the first device. If this thread unpacked
tensors of an activation checkpoint on another device, the nodes of that device could recompute the same checkpoint in
their own thread at the same time, and torch would raise an error. So with saved-tensor hooks on several devices, one
more node for each replica, on its device, unpacks first:

    outputs --> join --> one `_Unpack` for each replica --> node of all replicas --> inputs

The join makes the engine run all of them, also for replicas whose output is not in the loss.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import GENERAL, BackwardInput, BatchStatistics, LayerArguments
from ..backends.streams import current_stream, in_order_with_engine, on_default_streams, on_streams
from ..torch_private import fast_apply, graph_task_id, retains_graph, set_grad_enabled, uncompiled, will_execute
from .replica_call import ReplicaCall

__all__: list[str] = []

InputAndWeight = tuple[Tensor, Tensor | None]

FREED = (
    "Trying to backward through the graph a second time, where a synchronized batch norm has dropped its input; pass "
    "retain_graph=True to the first backward(), and compute gradients outside the forward() of replicas"
)


class Saved:
    """Input and weight of one replica, saved for the backward pass.

    This object keeps them itself: that takes less time than a node. With saved-tensor hooks, `pack` gives them to an
    autograd node, because the hooks may belong to an activation checkpoint.
    """

    __slots__ = (
        *("device", "has_hooks", "input_node", "kept", "needs_gradient", "needs_input", "stream", "unpacked"),
        *("_input_version", "_weight", "_weight_version"),
    )

    def __init__(self, input: Tensor, layer: LayerArguments, has_hooks: bool) -> None:
        weight, bias = layer.weight, layer.bias
        self.device, self.has_hooks, self.needs_input = input.device, has_hooks, input.requires_grad
        self.input_node = input.grad_fn  # None for an input that needs no gradient
        self.needs_gradient = (
            self.needs_input
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        self.kept: Any = input  # with hooks, the output of the node that owns the tensors; None once it is dropped
        # The weight is never dropped, since it is only a vector. If both were dropped, a thread could read the input
        # before another thread drops them, and the weight afterwards.
        self._weight = weight
        self._input_version, self._weight_version = input._version, 0 if weight is None else weight._version
        if has_hooks:
            self.stream = current_stream(input.device)
            self.unpacked: dict[int, InputAndWeight] = {}  # by the number of the backward pass that will read it

    def pack(self) -> None:
        """Give the tensors to the saved-tensor hooks of this thread.

        A checkpoint ends its recomputation by an exception in these hooks. As in torch, hooks see nothing of a layer
        that needs no gradient.
        """
        if self.needs_gradient:
            with torch.enable_grad():
                self.kept = _save(graph_source(), (self.kept, self._weight))
            self._weight = None  # The hooks decide whether it is kept.

    def read(self, grad_output: Tensor | None) -> BackwardInput | None:
        """Return the input of this replica's backward pass, or None if the running backward pass does not need it."""
        wants_input = self.needs_input and will_execute(self.input_node)
        # Gradients of gradients need the inputs of all replicas.
        if grad_output is None and not wants_input and not torch.is_grad_enabled():
            return None
        return BackwardInput(grad_output, *self._unpack(), wants_input)

    def _unpack(self) -> InputAndWeight:
        """Return input and weight. Raise an error if they were dropped or have changed in place."""
        if self.has_hooks and (unpacked := self.unpacked.pop(graph_task_id(), None)):
            return unpacked
        kept = self.kept
        if kept is None:
            raise RuntimeError(FREED)
        if self.has_hooks and self.needs_gradient:
            if self.stream == current_stream(self.device):
                return kept.grad_fn.saved_tensors  # type: ignore[no-any-return]
            # To unpack, hooks may compute. A checkpoint has computed on this stream, and other layers use the results.
            return on_streams([self.stream], (), lambda: kept.grad_fn.saved_tensors)  # type: ignore[no-any-return]
        weight = self._weight
        if kept._version != self._input_version:
            raise _changed_error(kept, self._input_version)
        if weight is not None and weight._version != self._weight_version:
            raise _changed_error(weight, self._weight_version)
        return kept, weight


def _changed_error(tensor: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
    )


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


def connect_to_graph(
    messages: Sequence[tuple[ReplicaCall, Saved | None]], outputs: Sequence[Tensor], batch: BatchStatistics
) -> Sequence[Tensor]:
    """Make one node that connects the outputs to all inputs, weights and biases, if one of these needs a gradient."""
    recorded = [(call, saved, output) for (call, saved), output in zip(messages, outputs, strict=True) if saved]
    if not any([saved.needs_gradient for _, saved, _ in recorded]):
        return outputs
    calls, all_saved, recorded_outputs = zip(*recorded, strict=True)
    tensors: list[Tensor | None] = []
    for call in calls:
        tensors += call.input, call.layer.weight, call.layer.bias
    set_grad_enabled(True)
    try:
        in_graph = _apply(batch, all_saved, recorded_outputs, *tensors)
        if len(batch.mean_invstd) > 1 and any([saved.has_hooks for saved in all_saved]):
            pairs = zip(all_saved, in_graph, strict=True)
            in_graph = _unpack(None, *[_unpack(saved, output)[0] for saved, output in pairs])
    finally:
        set_grad_enabled(False)  # as in every exchange
    if len(recorded) == len(outputs):
        return in_graph  # type: ignore[no-any-return]
    rest = iter(in_graph)
    return [next(rest) if saved else output for (_, saved), output in zip(messages, outputs, strict=True)]


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: BatchStatistics, saved: Sequence[Saved], outputs: Sequence[Tensor], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return `outputs`, one for each replica, as functions of `tensors`: its input, weight and bias, for each."""
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.saved = batch, saved
        return tuple(outputs)

    @staticmethod
    @uncompiled  # by compiled autograd
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        batch, saved = ctx.batch, ctx.saved
        # Other processes may have gradients although this one has none, and wait for it.
        if batch.reduce is None and not any([grad_output is not None for grad_output in grad_outputs]):
            return (None,) * len(ctx.needs_input_grad)
        # All devices of the call, also of replicas that recorded no graph. The device of the node's first output comes
        # first, see `in_order_with_engine`.
        devices = list(dict.fromkeys([saved[0].device, *batch.mean_invstd]))
        with torch.DisableTorchFunctionSubclass():
            if len(devices) == 1:
                gradients = _gradients(batch, saved, grad_outputs)
            else:
                gradients = in_order_with_engine(devices, grad_outputs, _gradients, batch, saved, grad_outputs)
        results = [None, None, None, *gradients]  # The first three arguments of `forward` are no tensors.
        if not all(ctx.needs_input_grad[3:]):
            pairs = zip(results, ctx.needs_input_grad, strict=True)
            results = [gradient if is_needed else None for gradient, is_needed in pairs]
        return tuple(results)


_apply = fast_apply(_SyncBatchNorm)


class _Unpack(torch.autograd.Function):
    """The identity, in place. Its backward pass unpacks the `Saved` of one replica, see NOTE [who unpacks]."""

    @staticmethod
    def forward(ctx: Any, saved: Saved | None, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*outputs)
        ctx.saved = saved
        return outputs

    @staticmethod
    @uncompiled  # by compiled autograd
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved
        if saved is not None and saved.has_hooks:
            read = on_default_streams((saved.device,), (), saved.read, grad_outputs[0])
            if read is not None:
                saved.unpacked[graph_task_id()] = read.input, read.weight
        return None, *grad_outputs


_unpack = fast_apply(_Unpack)


def _gradients(
    batch: BatchStatistics, all_saved: Sequence[Saved], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of input, weight and bias of the first replica, of the second one, and so on."""
    inputs: dict[Saved, BackwardInput] = {}
    for saved, grad_output in zip(all_saved, grad_outputs, strict=True):
        if (read := saved.read(grad_output)) is not None:
            inputs[saved] = read
    backend = GENERAL if torch.is_grad_enabled() else batch.backend
    computed = dict(zip(inputs, backend.gradients(list(inputs.values()), batch), strict=True))
    if not retains_graph():
        for saved in inputs:
            saved.kept = None  # only now, in order with the engine
    gradients: list[Tensor | None] = []
    for saved in all_saved:
        grad_input, grad_weight, grad_bias = computed.get(saved, (None, None, None))
        if grad_bias is None:  # The output is not in the loss. Gradient hooks would otherwise be called with None.
            grad_weight = grad_bias = torch.zeros_like(batch.mean_invstd[saved.device][0])
        gradients += grad_input, grad_weight, grad_bias
    return gradients


# NOTE [tried for checkpoints]: A lock for each checkpoint, in place of the nodes that unpack, deadlocks. The thread of
# the first device holds the lock and recomputes a replica on the second device. If the checkpointed function calls
# `torch.autograd.grad`, the engine needs the thread of the second device. That thread waits for the lock.
