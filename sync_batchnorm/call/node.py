"""The single autograd node that a call of a layer creates for all replicas.

So no thread waits for another replica in a backward pass: the engine runs this node once it has the gradients of all
outputs. The node computes the two sums of each replica, adds them up, and computes the gradients of all inputs. What it
reads of a replica is in its `Saved`.

NOTE [memory of the outputs]: The node returns its outputs before they are filled in. Each replica allocates its own
output, and fills it after the exchange.

NOTE [gradients of gradients]: With `create_graph`, `Backend.gradients` computes the statistics once more from the saved
inputs, in operators that autograd records. So a second backward pass needs nothing of this node.

The master makes all that a backward pass reads, on every device, before it answers: a replica may start one before its
peers have woken up.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import GENERAL, BatchStatistics, Gradients, ReplicaBackward
from ..backends.streams import in_order_with_engine
from ..torch_private import keeps_graph, uncompiled, will_run
from .part import Part
from .saved import Saved

__all__: list[str] = []


def make_node(batch: BatchStatistics, parts: Sequence[Part]) -> None:
    """Make the outputs of `parts` functions of their inputs, weights and biases, if one of these needs a gradient."""
    recorded: list[Part] = []
    saved: list[Saved] = []
    outputs: list[Tensor] = []
    tensors: list[Tensor | None] = []
    is_needed = False
    for part in parts:
        if part.saved is not None:
            recorded.append(part)
            saved.append(part.saved)
            outputs.append(part.output)
            tensors += part.input, part.weight, part.bias
            is_needed = is_needed or True in part.saved.needs
    if is_needed:
        with torch.enable_grad():
            in_graph = _apply(batch, saved, outputs, *tensors)
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
        devices = list(dict.fromkeys([entry.device for entry in saved] + [batch.master]))
        with torch.DisableTorchFunctionSubclass():
            if len(devices) == 1:
                gradients = _gradients(batch, saved, grad_outputs)
            else:
                gradients = in_order_with_engine(devices, grad_outputs, _gradients, batch, saved, grad_outputs)
        return None, None, None, *gradients  # The first three arguments are no tensors.


# The `apply` of the C++ base class. That of `torch.autograd.Function` first looks for transforms of `torch.func`, which
# layers refuse.
_apply: Any = super(torch.autograd.Function, _SyncBatchNorm).apply


def _gradients(
    batch: BatchStatistics, saved: Sequence[Saved], grad_outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias of the first replica, of the second one, and so on."""
    replicas: dict[Saved, ReplicaBackward] = {}
    for entry, grad_output in zip(saved, grad_outputs, strict=True):
        wants_input = entry.needs[0] and will_run(entry.input_node)
        # Gradients that are differentiated need the inputs of all replicas again.
        if grad_output is not None or wants_input or torch.is_grad_enabled():
            input, weight = entry.unpack()
            replicas[entry] = ReplicaBackward(
                device=entry.device, grad_output=grad_output, input=input, weight=weight, wants_input=wants_input
            )
    backend = GENERAL if torch.is_grad_enabled() else batch.backend
    computed = dict(zip(replicas, backend.gradients(list(replicas.values()), batch), strict=True))
    if not keeps_graph():
        for entry in replicas:
            entry.drop()  # only now, in order with the engine
    gradients: list[Tensor | None] = []
    for entry in saved:
        grad_input, grad_weight, grad_bias = computed.get(entry, NONE)
        if grad_bias is None:  # Its output is not in the loss. Gradient hooks would otherwise be called with None.
            grad_weight = grad_bias = torch.zeros_like(batch.mean_invstd[entry.device][0])
        for needed, gradient in zip(entry.needs, (grad_input, grad_weight, grad_bias), strict=True):
            gradients.append(gradient if needed else None)
    return tuple(gradients)


NONE: Gradients = (None, None, None)
