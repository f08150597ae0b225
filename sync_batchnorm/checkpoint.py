"""Who saves the input and weight of a replica for its backward, and what a recomputation by a checkpoint repeats.

NOTE [recomputation]: Activation checkpointing calls a layer again in the backward, one replica at a time. Such a call
does not exchange, and is not counted: it repeats an earlier call of the forward, with the answer that the pipe
remembers. If there were several, as in siamese nets, it is the one whose input had the same statistics. The repeated
output has the value of the first one, and saves the same tensors. It has no gradient: where one is taken, the
checkpoint is reentrant, and would differentiate each replica by itself.

Without replicas, in a process of its own, a recomputation exchanges again: all processes recompute in the same order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .torch_private import graph_task_id, hooks_of_thread

running_backward = graph_task_id  # in this thread, which is then inside of a recomputation; -1 if there is none

__all__: list[str] = []

REFUSED = (
    "expected the gradients of all replicas in the backward of a synchronized batch norm, but got a recomputation that "
    "differentiates each replica by itself; pass use_reentrant=False to torch.utils.checkpoint.checkpoint, and take "
    "gradients of your own through the layer outside of the checkpoint"
)


class _Save(torch.autograd.Function):
    """Has no part in any backward: its node only holds what it has saved, as long as its output lives (torch 2.8)."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, tensors: tuple[Tensor, Tensor | None]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return source


_apply: Any = super(torch.autograd.Function, _Save).apply  # without `torch.func`, whose transforms layers refuse


@functools.cache
def _source() -> Tensor:
    # No leaf: two threads that use one for the first time would wait for each other in anomaly mode (torch 2.13).
    with torch.inference_mode(False), torch.enable_grad():
        return torch.empty(0, device="cpu", requires_grad=True).clone()


class Saved:
    """Has saved two tensors as a node of torch, in less time; not in a thread with hooks on saved tensors."""

    __slots__ = ("_input", "_input_version", "_weight", "_weight_version")

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        self._input, self._input_version = input, input._version
        self._weight, self._weight_version = weight, 0 if weight is None else weight._version

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        for tensor, version in ((self._input, self._input_version), (self._weight, self._weight_version)):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
                )
        return self._input, self._weight


def save(input: Tensor, weight: Tensor | None) -> Callable[[], tuple[Tensor, Tensor | None]] | None:
    """Save `input` and `weight`; return what returns them, or None if this thread does not record a graph."""
    if not torch.is_grad_enabled():
        return None
    if hooks_of_thread(True) is None:
        return Saved(input, weight)
    output: Tensor = _apply(_source(), (input, weight))
    return lambda: output.grad_fn.saved_tensors  # type: ignore


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, constant: tuple[Tensor], source: Tensor, input: Tensor) -> Tensor:
        # It is in a tuple: autograd would return a view of a tensor argument, which could not be changed in place.
        return constant[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(REFUSED)


def refuse_gradient(constant: Tensor, input: Tensor) -> Tensor:
    """Return `constant` as a function of `input`, also if that needs no gradient; its backward raises an error."""
    with torch.enable_grad():
        return _Refuse.apply((constant,), _source(), input)  # type: ignore


class Remembered(NamedTuple):
    """What a pipe remembers of one call of its replica, outside of the graph."""

    statistics: Sequence[Any]  # `ReplicaStatistics` of its input
    pair: Sequence[Tensor]  # mean and inverse standard deviation of the batch: the answer
    is_constant: bool  # whether the replica recorded a graph, and the output required no gradient all the same


def recall(remembered: Sequence[Remembered], statistics: Sequence[Any], where: str) -> Remembered:
    """Return the call that a recomputation repeats; if there are several, that of an input with `statistics`."""
    if len(remembered) == 1:
        return remembered[0]
    same = [call for call in remembered if _are_equal(call.statistics[:2], statistics[:2])]
    if not same:
        raise RuntimeError(
            "expected the recomputation of a checkpoint to call the synchronized batch norms that its forward has "
            f"called, with the same inputs to the last bit, but got another call of {where}; call the same layers in "
            "both, and where the checkpointed function is made in a loop, bind the loop variable: "
            "lambda input, layer=layer: layer(input)"
        )
    first = same[0]
    if not all(_are_equal(call.pair, first.pair) for call in same):
        raise RuntimeError(
            f"expected one answer for the recomputed input of {where}, but got {len(same)} calls in which this replica "
            "had inputs with equal statistics, and its peers had different ones; leave one of these calls out of the "
            "checkpoint, or use a layer for each of them"
        )
    return first


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    # As numbers, since NaN is not equal to itself.
    return len(one) == len(other) and all(map(torch.equal, map(torch.nan_to_num, one), map(torch.nan_to_num, other)))
