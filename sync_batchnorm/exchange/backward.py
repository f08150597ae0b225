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

from ..backends.base import GENERAL, BackwardInput, BatchStatistics
from ..backends.streams import in_order_with_engine, on_default_streams
from ..torch_private import fast_apply, graph_task_id, retains_graph, set_grad_enabled, uncompiled
from .replica_call import ReplicaCall, Saved

__all__: list[str] = []


def connect_to_graph(
    messages: Sequence[tuple[ReplicaCall, Saved | None]], outputs: Sequence[Tensor], batch: BatchStatistics
) -> Sequence[Tensor]:
    """Make one node that connects the outputs to all inputs, weights and biases, if one of these needs a gradient."""
    recorded = [i for i, (_, saved) in enumerate(messages) if saved is not None]
    layers = [(messages[i][0].input, messages[i][0].layer) for i in recorded]
    tensors = [tensor for input, layer in layers for tensor in (input, layer.weight, layer.bias)]
    if not any([tensor is not None and tensor.requires_grad for tensor in tensors]):
        return outputs
    all_saved, results = [saved for _, saved in messages if saved is not None], list(outputs)
    set_grad_enabled(True)
    try:
        in_graph = _apply(batch, all_saved, [outputs[i] for i in recorded], *tensors)
        if len(batch.mean_invstd) > 1 and any([saved.by_hooks for saved in all_saved]):
            pairs = zip(all_saved, in_graph, strict=True)
            in_graph = _unpack(None, *[_unpack(saved, output)[0] for saved, output in pairs])
    finally:
        set_grad_enabled(False)  # as in every exchange
    for i, output in zip(recorded, in_graph, strict=True):
        results[i] = output
    return results


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
        if saved is not None and saved.by_hooks and saved.is_read(grad_outputs[0]):
            saved.unpacked[graph_task_id()] = on_default_streams((saved.device,), (), saved.unpack)
        return None, *grad_outputs


_unpack = fast_apply(_Unpack)


def _gradients(
    batch: BatchStatistics, all_saved: Sequence[Saved], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of input, weight and bias of the first replica, of the second one, and so on."""
    inputs: dict[Saved, BackwardInput] = {}
    for saved, grad_output in zip(all_saved, grad_outputs, strict=True):
        if saved.is_read(grad_output):
            inputs[saved] = BackwardInput(grad_output, *saved.unpack(), saved.wants_input())
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
