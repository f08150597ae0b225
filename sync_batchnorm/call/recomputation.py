"""What a recomputation by an activation checkpoint repeats.

NOTE [recomputation]: Activation checkpointing calls a layer again in the backward, one replica at a time. Such a call
does not exchange: it repeats an earlier call of the forward, with the answer that the pipe remembers. If there were
several, as in siamese nets, it is the one whose input had the same statistics. Its output has the same values again,
and the same tensors are saved. The output has no gradient (`_refuse_gradient`): where one is taken, the checkpoint is
reentrant, and would differentiate each replica by itself.

On one device, the recomputation updates running statistics once more. That of replica 0 does so, too: it merges the
statistics of all replicas again, which the pipe remembers. It updates before it saves, as batch norm of torch does,
because a checkpoint ends the recomputation when the last tensor is saved.

Without replicas, in a process of its own, a recomputation exchanges again: all processes recompute in the same order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.workspaces import Workspace
from .part import Part, Remembered, graph_source

__all__: list[str] = []

FUNCTIONS = (
    "Functions that recompute in their backward, as reversible blocks and odeint_adjoint do, differentiate each "
    "replica alone, too: keep such layers out of them, or use what records a graph, as odeint does"
)


def repeat(part: Part) -> None:
    """Normalize the input of a part with the answer that its pipe remembers."""
    pipe = part.connection.pipe
    call = _recall(pipe.remembered, part, pipe.where)
    if part.running is not None:
        part.backend.merge(*call.gathered, part, Workspace())
        part.save()
    part.backend.normalize([part], call.batch)
    if part.records and not call.is_constant:
        part.output = _refuse_gradient(part.output, part.input)


def _recall(remembered: Sequence[Remembered], part: Part, where: str) -> Remembered:
    """Return the call that a recomputation repeats; if there are several, that of an input with its statistics."""
    if len(remembered) == 1:
        return remembered[0]
    as_large = [call for call in remembered if call.elements == part.elements]
    same = [call for call in as_large if _have_equal_values(call.statistics, part.statistics)]
    answers = [call.batch.mean_invstd[part.input.device] for call in same]
    if not same or not all(_have_equal_values(answer, answers[0]) for answer in answers):
        raise RuntimeError(
            "expected the recomputation of a checkpoint to call the same synchronized batch norms as its forward pass, "
            f"with bitwise equal inputs, but got {len(same)} calls of {where} that this may repeat; call the same "
            "layers in both, and a separate layer for each input. If the checkpointed function is made in a loop, bind "
            f"the loop variable: lambda input, layer=layer: layer(input). {FUNCTIONS}"
        )
    return same[0]


def _have_equal_values(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    # As numbers, since NaN is not equal to itself.
    return all(map(torch.equal, map(torch.nan_to_num, tensors), map(torch.nan_to_num, others)))


def _refuse_gradient(constant: Tensor, input: Tensor) -> Tensor:
    """Return `constant` as a function of `input`, also if that needs no gradient; its backward raises an error."""
    with torch.enable_grad():
        return _Refuse.apply((constant,), graph_source(), input)  # type: ignore


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, constant: tuple[Tensor], source: Tensor, input: Tensor) -> Tensor:
        # Passed in a tuple: autograd would return a view of a tensor argument, which could not be changed in place.
        return constant[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "expected the gradients of all replicas in the backward pass of a synchronized batch norm, but got a "
            "recomputation that differentiates each replica alone; pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint. If you call torch.autograd.grad through the layer yourself, do it "
            f"outside the checkpoint. {FUNCTIONS}"
        )
