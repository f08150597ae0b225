"""Calls that an activation checkpoint repeats in the backward pass, one replica at a time.

NOTE [recomputation]: A checkpoint calls the layer a second time, in the backward pass, to get the tensors that it has
not kept. The obvious way is another exchange. It would deadlock: the engine runs all nodes of a device in one thread,
so the peers of this replica cannot come. Instead, the repeated call takes the answer of the forward pass. The
connection of the replica remembers it:

    forward pass     measure --> send --> answer --> normalize        remembered: (statistics of the input, answer)
    backward pass    measure --> find that answer --> normalize

If the layer was called several times, as in a siamese net, the statistics of the input tell which call is repeated.

The output has the same values again, and the same tensors are saved. The output refuses a gradient
(`_refuse_gradient`): only a reentrant checkpoint asks for one, and would differentiate each replica by itself.

On one device, a recomputation moves running statistics a second time. So does the recomputation of replica 0: it merges
the remembered statistics of all replicas again. It does this before it saves, as torch's batch norm does, because a
checkpoint ends the recomputation when the last tensor is saved.

In a process with a single replica, a recomputation exchanges again: all processes recompute in the same order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.workspaces import Workspace
from .backward import Saved, graph_source
from .replica_call import RememberedCall, ReplicaCall

__all__: list[str] = []

FUNCTIONS = (
    "Functions that recompute in their backward, as reversible blocks and odeint_adjoint do, differentiate each "
    "replica alone, too: keep such layers out of them, or use what records a graph, as odeint does"
)


def recompute(call: ReplicaCall, saved: Saved | None) -> Tensor:
    """Normalize the input with the remembered answer of the call that this one repeats, and save its tensors again."""
    if call.layer.running is not None:
        call.backend.merge(*_find_repeated(call).gathered, call.layer, Workspace())
    if saved is not None and saved.has_hooks:
        saved.pack()
    repeated = _find_repeated(call)
    (output,) = call.backend.normalize([call], repeated.batch)
    return _refuse_gradient(output, call.input) if saved is not None and not repeated.is_constant else output


def _find_repeated(call: ReplicaCall) -> RememberedCall:
    """Return the call of the forward pass whose input had the statistics of `call`, or the only call."""
    remembered, where = call.connection.remembered, call.connection.pipe.where
    if len(remembered) == 1:
        return remembered[0]
    as_large = [other for other in remembered if other.elements == call.elements]
    equal = [other for other in as_large if _have_equal_values(other.statistics, call.statistics)]
    answers = [other.batch.mean_invstd[call.input.device] for other in equal]
    if not equal or not all(_have_equal_values(answer, answers[0]) for answer in answers):
        raise RuntimeError(
            "expected the recomputation of a checkpoint to call the same synchronized batch norms as its forward pass, "
            f"with bitwise equal inputs, but got {len(equal)} calls of {where} that this may repeat; call the "
            "same layers in both, and a separate layer for each input. If the checkpointed function is made in a loop, "
            f"bind the loop variable: lambda input, layer=layer: layer(input). {FUNCTIONS}"
        )
    return equal[0]


def _have_equal_values(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    # For `torch.equal`, NaN differs from NaN.
    return all(map(torch.equal, map(torch.nan_to_num, tensors), map(torch.nan_to_num, others)))


def _refuse_gradient(constant: Tensor, input: Tensor) -> Tensor:
    """Connect `constant` to the graph, as a function of `input`, by a node that raises an error in a backward pass."""
    with torch.enable_grad():
        return _Refuse.apply((constant,), graph_source(), input)  # type: ignore


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, constant: tuple[Tensor], source: Tensor, input: Tensor) -> Tensor:
        # In a tuple: autograd would return a view of a tensor argument, and a view could not be changed in place.
        return constant[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "expected the gradients of all replicas in the backward pass of a synchronized batch norm, but got a "
            "recomputation that differentiates each replica alone; pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint. If you call torch.autograd.grad through the layer yourself, do it "
            f"outside the checkpoint. {FUNCTIONS}"
        )
