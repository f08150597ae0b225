"""Recompute a layer's call in one replica, in the backward pass through an activation checkpoint.

NOTE [recomputation]: A checkpoint calls the layer a second time, in the backward pass, to compute tensors that it did
not keep. The obvious way is another exchange between the replicas. This deadlocks: the engine runs all nodes of a
device in one thread, so the other replicas cannot come to this exchange. Instead, the repeated call uses the answer
that the replica got in the forward pass. The connection of the replica remembers this answer:

    forward pass     measure --> send --> answer --> normalize        (remember the input's statistics, and the answer)
    backward pass    measure --> find the remembered answer --> normalize        (with the same statistics of the batch)

If the forward pass called the layer several times, as in a siamese net, the recomputation looks for the call whose
input had the same statistics.

The repeated call returns the same values as the call in the forward pass, and saves the same tensors. But a backward
pass through its output, as in a reentrant checkpoint, would compute the gradients of one replica alone, without the
sums of the other replicas. So `_refuse_gradient` makes such a backward pass raise an error.

Torch's batch norm updates the running statistics again in a recomputation. To do the same, the recomputation in replica
0 merges the remembered statistics of all replicas again. The update comes before the tensors are saved: once the last
tensor is saved, a checkpoint ends the recomputation.

If each process has a single replica, a recomputation exchanges between the processes again. This cannot deadlock,
because all processes recompute the same layers in the same order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backward import Saved, new_leaf
from .replica_call import RememberedCall, ReplicaCall

__all__: list[str] = []

FUNCTIONS = (
    "Reversible blocks and odeint_adjoint recompute, too: keep such layers out of them, or use a function that records "
    "a graph, as odeint does"
)


def recompute(call: ReplicaCall, saved: Saved | None) -> Tensor:
    """Recompute a call: normalize with the statistics from the forward pass, and save the tensors again."""
    if call.layer.running is not None:
        call.backend.merge(*_find_repeated(call).gathered, call.layer)
    if saved is not None and saved.has_hooks:
        saved.pack()
    repeated = _find_repeated(call)
    (output,) = call.backend.normalize([call], repeated.batch)
    return _refuse_gradient(output, call.input) if saved is not None and not repeated.is_constant else output


def _find_repeated(call: ReplicaCall) -> RememberedCall:
    """Return the remembered data of the earlier call that is repeated as `call`.

    If the layer was called several times, choose the call whose input had the same statistics as the input of `call`.
    """
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
    # Replace NaN by numbers, because `torch.equal` treats NaN as different from NaN.
    return all(map(torch.equal, map(torch.nan_to_num, tensors), map(torch.nan_to_num, others)))


def _refuse_gradient(constant: Tensor, input: Tensor) -> Tensor:
    """Return `constant`, made to depend on `input` in the autograd graph; its backward pass raises an error."""
    with torch.enable_grad():
        return _Refuse.apply((constant,), new_leaf(), input)  # type: ignore


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, constant: tuple[Tensor], source: Tensor, input: Tensor) -> Tensor:
        # Autograd does not take a tensor in a tuple for an input. If the tensor were an input, `forward` would return a
        # view of an input, which users could not change in place.
        return constant[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "expected a backward pass through a synchronized batch norm in all replicas, but got a recomputation that "
            "differentiates one replica alone; pass use_reentrant=False to torch.utils.checkpoint.checkpoint, and call "
            f"torch.autograd.grad through the layer outside checkpoints. {FUNCTIONS}"
        )
