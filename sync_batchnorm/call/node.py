"""The single autograd node that a call of a layer creates for all replicas.

So no thread waits for another replica in a backward pass: the engine runs this node once it has the gradients of all
outputs. The node computes the two sums of each replica, adds them up, and computes the gradients of all inputs. What it
reads of a replica is in its `Saved`.

NOTE [gradients of gradients]: With `create_graph`, `Backend.gradients` computes the statistics once more from the saved
inputs, in operators that autograd records. So a second backward pass needs nothing of this node.

The master makes all that a backward pass reads, on every device, before it answers: a replica may start one before its
peers have woken up.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import GENERAL, BackwardPart, BatchStatistics
from ..backends.streams import in_order_with_engine
from ..torch_private import fast_apply, keeps_graph, set_grad_enabled, uncompiled, will_run
from .part import Part, Saved

__all__: list[str] = []


def make_node(batch: BatchStatistics, parts: Sequence[Part]) -> None:
    """Make the outputs of `parts` functions of their inputs, weights and biases, if one of these needs a gradient."""
    recorded = [part for part in parts if part.saved is not None]
    tensors = [tensor for part in recorded for tensor in (part.input, part.weight, part.bias)]
    if any([tensor is not None and tensor.requires_grad for tensor in tensors]):
        saved, outputs = [part.saved for part in recorded], [part.output for part in recorded]
        set_grad_enabled(True)
        try:
            in_graph = _apply(batch, saved, outputs, *tensors)
        finally:
            set_grad_enabled(False)  # as in every exchange
        for part, output in zip(recorded, in_graph, strict=True):
            part.output = output


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
        # Other processes may have gradients where this one has none, and wait for it.
        if batch.reduce is None and not any([grad_output is not None for grad_output in grad_outputs]):
            return (None,) * len(ctx.needs_input_grad)
        # All devices of the call, even those of replicas that recorded no graph. The device of the node's first output
        # comes first, see `in_order_with_engine`.
        devices = list(dict.fromkeys([saved[0].device, *batch.mean_invstd]))
        with torch.DisableTorchFunctionSubclass():
            if len(devices) == 1:
                gradients = _gradients(batch, saved, grad_outputs)
            else:
                gradients = in_order_with_engine(devices, grad_outputs, _gradients, batch, saved, grad_outputs)
        # Those of the arguments that are no tensors come first.
        results = [None, None, None, *gradients]
        if not all(ctx.needs_input_grad[3:]):
            pairs = zip(results, ctx.needs_input_grad, strict=True)
            results = [gradient if is_needed else None for gradient, is_needed in pairs]
        return tuple(results)


_apply = fast_apply(_SyncBatchNorm)


def _gradients(
    batch: BatchStatistics, saved: Sequence[Saved], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of input, weight and bias of the first replica, of the second one, and so on."""
    is_differentiated = torch.is_grad_enabled()
    backward_parts: dict[Saved, BackwardPart] = {}
    for entry, grad_output in zip(saved, grad_outputs, strict=True):
        wants_input = entry.needs_input and will_run(entry.input_node)
        # Gradients that are differentiated need the inputs of all replicas again.
        if grad_output is not None or wants_input or is_differentiated:
            input, weight = entry.unpack()
            backward_parts[entry] = BackwardPart(grad_output, input, weight, wants_input)
    backend = GENERAL if is_differentiated else batch.backend
    computed = dict(zip(backward_parts, backend.gradients(list(backward_parts.values()), batch), strict=True))
    if not keeps_graph():
        for entry in backward_parts:
            entry.kept = None  # only now, in order with the engine
    gradients: list[Tensor | None] = []
    for entry in saved:
        grad_input, grad_weight, grad_bias = computed.get(entry, (None, None, None))
        if grad_bias is None:  # Its output is not in the loss. Gradient hooks would otherwise be called with None.
            grad_weight = grad_bias = torch.zeros_like(batch.mean_invstd[entry.device][0])
        gradients += grad_input, grad_weight, grad_bias
    return gradients
