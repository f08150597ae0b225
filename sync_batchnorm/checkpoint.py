"""Who saves the input and weight of a replica for its backward, and what a recomputation by a checkpoint repeats.

NOTE [recomputation]: Activation checkpointing calls a layer again in the backward, one replica at a time. Such a call
does not exchange, and is not counted: it repeats an earlier call of the forward, with the answer that the pipe
remembers. If there were several, as in siamese nets, it is the one whose input had the same statistics. The repeated
output has the value of the first one, and saves the same tensors. It has no gradient: where one is taken, the
checkpoint is reentrant, and would differentiate each replica by itself.

Without replicas, in a process of its own, a recomputation exchanges again: all processes recompute in the same order.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.streams import current_stream, on_streams
from .torch_private import graph_task_id

running_backward = graph_task_id  # in this thread, which is then inside of a recomputation; -1 if there is none

__all__: list[str] = []

REFUSED = (
    "expected the gradients of all replicas in the backward pass of a synchronized batch norm, but got a recomputation "
    "that differentiates each replica alone; pass use_reentrant=False to torch.utils.checkpoint.checkpoint. If you "
    "call torch.autograd.grad through the layer yourself, do it outside the checkpoint"
)

FREED = (
    "Trying to backward through the graph a second time, where a synchronized batch norm has dropped its input; pass "
    "retain_graph=True to the first backward(), and compute gradients outside the forward() of replicas"
)


class _Save(torch.autograd.Function):
    """Never runs in a backward pass: its node owns saved tensors for as long as its output is alive."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, tensors: tuple[Tensor, Tensor | None]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return source


_apply: Any = super(torch.autograd.Function, _Save).apply  # without `torch.func`, whose transforms layers refuse


@functools.cache
def _source() -> Tensor:
    # Not a leaf: in anomaly mode, two threads that use a leaf for the first time deadlock (torch 2.13).
    with torch.inference_mode(False), torch.enable_grad():
        return torch.empty(0, device="cpu", requires_grad=True).clone()


class Saved:
    """The input and weight that one replica has saved: cheaper than by an autograd node, and without hooks."""

    __slots__ = ("_input", "_input_version", "_weight", "_weight_version", "device", "input_node")

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        self.device, self.input_node = input.device, input.grad_fn  # None for an input that needs no gradient
        self._input: Tensor | None = input
        self._weight, self._input_version = weight, input._version
        self._weight_version = 0 if weight is None else weight._version

    def unpack(self) -> Sequence[Any]:
        """Return input and weight, unless they were dropped or have changed in place."""
        input, weight = self._input, self._weight
        if input is None:
            raise RuntimeError(FREED)
        for tensor, version in ((input, self._input_version), (weight, self._weight_version)):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
                )
        return input, weight

    def drop(self) -> None:
        """Let go of the tensors."""
        self._input = self._weight = None


class SavedByHooks(Saved):
    """Saves with the saved-tensor hooks of its thread: with those of an activation checkpoint, it keeps no tensors."""

    __slots__ = ("_output", "_stream")

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        self.device, self.input_node = input.device, input.grad_fn
        self._output: Tensor | None = _apply(_source(), (input, weight))
        self._stream = current_stream(input.device)

    def unpack(self) -> Sequence[Any]:
        output = self._output
        if output is None:
            raise RuntimeError(FREED)

        def unpacked() -> Any:
            return output.grad_fn.saved_tensors  # type: ignore[union-attr]

        if self._stream == current_stream(self.device):
            return unpacked()  # type: ignore[no-any-return]
        # Hooks may compute to unpack, and others use what a checkpoint has computed on this stream.
        return on_streams([self._stream], unpacked)  # type: ignore[no-any-return]

    def drop(self) -> None:
        self._output = None


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, constant: tuple[Tensor], source: Tensor, input: Tensor) -> Tensor:
        # Passed in a tuple: autograd would return a view of a tensor argument, which could not be changed in place.
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

    statistics: Sequence[Tensor]  # of its input
    mean_invstd: Sequence[Tensor]  # mean and inverse standard deviation of the batch: the answer
    is_constant: bool  # whether the replica recorded a graph, but the output still required no gradient


def recall(remembered: Sequence[Remembered], statistics: Sequence[Tensor], where: str) -> Remembered:
    """Return the call that a recomputation repeats; if there are several, that of an input with `statistics`."""
    if len(remembered) == 1:
        return remembered[0]
    same = [call for call in remembered if _are_equal(call.statistics, statistics)]
    if not same:
        raise RuntimeError(
            "expected the recomputation of a checkpoint to call the same synchronized batch norms as its forward pass, "
            f"with bitwise equal inputs, but got another call of {where}; call the same layers in both. If the "
            "checkpointed function is made in a loop, bind the loop variable: lambda input, layer=layer: layer(input)"
        )
    first = same[0]
    if not all(_are_equal(call.mean_invstd, first.mean_invstd) for call in same):
        raise RuntimeError(
            f"expected one answer for the recomputed input of {where}, but got {len(same)} calls whose inputs had the "
            "same statistics in this replica and different ones in its peers; leave one of these calls out of the "
            "checkpoint, or use a separate layer for each"
        )
    return first


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    # As numbers, since NaN is not equal to itself.
    return len(one) == len(other) and all(map(torch.equal, map(torch.nan_to_num, one), map(torch.nan_to_num, other)))
