"""The backward pass of one call of a layer: a single autograd node for all replicas.

The obvious way is an autograd node for each replica. Each node would wait, in its backward pass, for the sums of the
other replicas. This deadlocks, because the autograd engine runs all nodes of a device in one thread. With a single node
for all replicas, no thread has to wait: the engine runs the node once the gradients of all outputs are ready. The node
computes two sums for each replica, adds up the sums of all replicas, and computes the gradients of all inputs:

    grad_output of replica 0 ---> sums 0 ---+           +---> grad_input of replica 0
                                            |--> total --|
    grad_output of replica 1 ---> sums 1 ---+           +---> grad_input of replica 1

The node reads each replica's input and weight from a `Saved` object. Replica 0 prepares all other data for the backward
pass, on every device, before it sends its answers. A replica that got its answer may start a backward pass at once,
even if the threads of the other replicas have not continued yet.

NOTE [who saves]: The obvious way to save input and weight for the backward pass is `ctx.save_for_backward` in the node
of the call. This fails in two ways. First, the saved-tensor hooks of every replica would run in the thread of replica
0. Second, if replicas take gradients in their forward pass, two threads may free the tensors of one node at the same
time, and torch 2.13 then frees them twice. So each replica saves its own tensors, in its own thread:

    thread of replica 0      Saved 0  <---+
                                          +---- node of the call
    thread of replica 1      Saved 1  <---+

In the backward pass, one autograd node for all replicas reads their tensors from their `Saved` objects. Afterwards it
drops the saved inputs, unless the backward pass retains the graph.

NOTE [gradients of gradients]: With `create_graph=True`, autograd must be able to differentiate the backward pass
itself. So `Backend.gradients` computes the batch statistics again from the saved inputs, in operators that autograd
records. A second backward pass differentiates these operators.

NOTE [who unpacks]: The engine runs the node of all replicas in the thread of the first device. If this thread unpacked
tensors of an activation checkpoint on another device, the nodes of that device could recompute the same checkpoint in
their own thread at the same time, and torch would raise an error. So with saved-tensor hooks on several devices, each
replica gets another node, `_Unpack`, on its own device. This node unpacks the tensors of the replica first:

    loss --> outputs --> join --> one `_Unpack` for each replica --> node of all replicas --> inputs
    ----- order in which the engine runs the nodes in the backward pass ------------------------>

The join is an autograd node behind the outputs of all replicas. Even if the loss uses only one of these outputs, the
engine runs the join, and then the `_Unpack` nodes of all replicas.
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
    """The input and the weight of one replica, saved for the backward pass of a batch norm.

    Without saved-tensor hooks, this object holds input and weight itself, because this takes less time than an autograd
    node. With saved-tensor hooks, such as those of an activation checkpoint, `pack` moves both into an autograd node,
    which calls the hooks.
    """

    __slots__ = (
        *("device", "has_hooks", "input_node", "kept", "needs_gradient", "needs_input", "stream", "unpacked"),
        *("_input_version", "_weight", "_weight_version"),
    )

    def __init__(self, input: Tensor, layer: LayerArguments, has_hooks: bool) -> None:
        weight, bias = layer.weight, layer.bias
        self.device, self.has_hooks, self.needs_input = input.device, has_hooks, input.requires_grad
        # The autograd node that computed the input; None if the input requires no gradient.
        self.input_node = input.grad_fn
        self.needs_gradient = (
            self.needs_input
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        # The saved input; None after a backward pass without `retain_graph`. With saved-tensor hooks, the input is
        # saved in an autograd node, and this attribute holds the output of the node.
        self.kept: Any = input
        # A backward pass drops the saved input, but keeps the saved weight, which takes little memory. If it dropped
        # both, a backward pass in another thread could get the input just before, and then find no weight.
        self._weight = weight
        self._input_version, self._weight_version = input._version, 0 if weight is None else weight._version
        if has_hooks:
            self.stream = current_stream(input.device)
            # Maps the number of a backward pass to the input and weight that were unpacked for this pass.
            self.unpacked: dict[int, InputAndWeight] = {}

    def pack(self) -> None:
        """Give the saved input and weight to the saved-tensor hooks that are set in this thread.

        If the input, weight and bias of a layer require no gradient, the hooks get no tensors, as in torch. A hook may
        raise an exception; a checkpoint does so to end a recomputation early.
        """
        if self.needs_gradient:
            with torch.enable_grad():
                self.kept = _save(new_leaf(), (self.kept, self._weight))
            self._weight = None  # Now the saved-tensor hooks decide whether the weight stays in memory.

    def read(self, grad_output: Tensor | None) -> BackwardInput | None:
        """Return the data of this replica for the running backward pass, or None if the pass needs none of it.

        `grad_output` is the gradient of this replica's output, or None if the output is not in the loss.
        """
        wants_input = self.needs_input and will_execute(self.input_node)
        # For gradients of gradients, the backward pass reads the inputs of all replicas.
        if grad_output is None and not wants_input and not torch.is_grad_enabled():
            return None
        return BackwardInput(grad_output, *self.unpack(), wants_input)

    def unpack(self) -> InputAndWeight:
        """Return the saved input and weight. Raise an error if they were dropped, or were changed in place."""
        if self.has_hooks and (unpacked := self.unpacked.pop(graph_task_id(), None)):
            return unpacked
        kept = self.kept
        if kept is None:
            raise RuntimeError(FREED)
        if self.has_hooks and self.needs_gradient:
            if self.stream == current_stream(self.device):
                return kept.grad_fn.saved_tensors  # type: ignore[no-any-return]
            # To unpack a tensor, the hooks of a checkpoint run the checkpointed function again. Run these hooks on the
            # stream of the forward pass, because other layers use the recomputed tensors on that stream.
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
    """An autograd node that owns saved tensors for as long as its output is alive. No backward pass ever runs it."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, tensors: InputAndWeight) -> Tensor:
        ctx.save_for_backward(*tensors)
        return source


_save = fast_apply(_Save)


def new_leaf() -> Tensor:
    """Return a new tensor that requires a gradient. It serves as an extra argument of autograd functions.

    If an autograd function gets this tensor, its outputs are in the graph, even if no other argument requires a
    gradient.
    """
    # Each use gets a new tensor: in anomaly mode, two threads that use a leaf for the first time deadlock (torch 2.13).
    return torch.empty(0, device="cpu", requires_grad=True)


def connect_to_graph(
    messages: Sequence[tuple[ReplicaCall, Saved | None]], outputs: Sequence[Tensor], batch: BatchStatistics
) -> Sequence[Tensor]:
    """Connect the outputs of all replicas to their inputs, weights and biases, by a single autograd node.

    If no input, weight or bias requires a gradient, return the outputs as they are.
    """
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
        set_grad_enabled(False)  # Every exchange runs without recording.
    if len(recorded) == len(outputs):
        return in_graph  # type: ignore[no-any-return]
    rest = iter(in_graph)
    return [next(rest) if saved else output for (_, saved), output in zip(messages, outputs, strict=True)]


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: BatchStatistics, saved: Sequence[Saved], outputs: Sequence[Tensor], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Connect the outputs of all replicas to their inputs, weights and biases in the autograd graph, and return
        them.

        `tensors` are the input, weight and bias of the first replica, then of the second replica, and so on.
        """
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.saved = batch, saved
        return tuple(outputs)

    @staticmethod
    @uncompiled  # Compiled autograd must not trace it.
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        batch, saved = ctx.batch, ctx.saved
        # If there are other processes, continue even if this process got no gradients: the other processes may have
        # gradients, and would wait for the sums of this process.
        if batch.reduce is None and not any([grad_output is not None for grad_output in grad_outputs]):
            return (None,) * len(ctx.needs_input_grad)
        # All devices of the call, including those of replicas that recorded no graph. The device of the node's first
        # output must come first, see `in_order_with_engine`.
        devices = list(dict.fromkeys([saved[0].device, *batch.mean_invstd]))
        with torch.DisableTorchFunctionSubclass():
            if len(devices) == 1:
                gradients = _gradients(batch, saved, grad_outputs)
            else:
                gradients = in_order_with_engine(devices, grad_outputs, _gradients, batch, saved, grad_outputs)
        # The first three arguments of `forward` get no gradients: `batch`, `saved` and `outputs`.
        results = [None, None, None, *gradients]
        if not all(ctx.needs_input_grad[3:]):
            pairs = zip(results, ctx.needs_input_grad, strict=True)
            results = [gradient if is_needed else None for gradient, is_needed in pairs]
        return tuple(results)


_apply = fast_apply(_SyncBatchNorm)


class _Unpack(torch.autograd.Function):
    """Return the outputs unchanged. The backward pass unpacks the `Saved` of one replica, see NOTE [who unpacks]."""

    @staticmethod
    def forward(ctx: Any, saved: Saved | None, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*outputs)
        ctx.saved = saved
        return outputs

    @staticmethod
    @uncompiled  # Compiled autograd must not trace it.
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
    """Return the gradients for the inputs, weights and biases of all replicas, in one flat list.

    The list begins with the three gradients for the first replica's input, weight and bias. The three gradients for the
    second replica follow, and so on.
    """
    inputs: dict[Saved, BackwardInput] = {}
    for saved, grad_output in zip(all_saved, grad_outputs, strict=True):
        if (read := saved.read(grad_output)) is not None:
            inputs[saved] = read
    backend = GENERAL if torch.is_grad_enabled() else batch.backend
    computed = dict(zip(inputs, backend.gradients(list(inputs.values()), batch), strict=True))
    if not retains_graph():
        for saved in inputs:
            # This was the last use of the saved input in this backward pass. Drop it here, while the streams of all
            # devices are in order with the stream of the autograd engine; see `in_order_with_engine`.
            saved.kept = None
    gradients: list[Tensor | None] = []
    for saved in all_saved:
        grad_input, grad_weight, grad_bias = computed.get(saved, (None, None, None))
        if grad_bias is None:
            # The output of this replica is not in the loss. Return zeros as gradients for its weight and bias. If they
            # were None, autograd would call the gradient hooks of these parameters with None.
            grad_weight = grad_bias = torch.zeros_like(batch.mean_invstd[saved.device][0])
        gradients += grad_input, grad_weight, grad_bias
    return gradients


# NOTE [tried for checkpoints]: A lock for each activation checkpoint, instead of the `_Unpack` nodes, can deadlock. The
# engine has a thread for each device. Its first thread takes the lock, and recomputes a replica of the second device.
# If the checkpointed function calls `torch.autograd.grad`, this recomputation needs the second thread of the engine.
# But the second thread is waiting for the lock.
