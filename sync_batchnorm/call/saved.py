"""What a replica keeps of one call for its backward pass.

NOTE [who saves what]: Each replica saves its own input and weight, so its saved-tensor hooks run in its own thread. The
node of the call unpacks both, and drops what is `kept` unless `retain_graph` is set: the input, or what hooks have made
of both. The node saves no tensors itself: where replicas take gradients in their forward, two threads may drop what a
node has saved at the same time, and torch 2.13 then frees it twice.
"""

from typing import Any

import torch
from torch import Tensor

from ..backends.streams import current_stream, on_streams
from ..torch_private import fast_apply, hooks_of_thread

__all__: list[str] = []

FREED = (
    "Trying to backward through the graph a second time, where a synchronized batch norm has dropped its input; pass "
    "retain_graph=True to the first backward(), and compute gradients outside the forward() of replicas"
)

InputAndWeight = tuple[Tensor, Tensor | None]


class Saved:
    """Keeps input and weight of one replica. This takes less time than to save them in an autograd node."""

    __slots__ = ("_input_version", "_weight", "_weight_version", "device", "input_node", "kept", "needs_input")

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        self.device, self.needs_input = input.device, input.requires_grad
        self.input_node = input.grad_fn  # None for an input that needs no gradient
        self._input_version = input._version
        # Never dropped, since it is only a vector. If both were, a thread could read the input before, and the weight
        # after another thread drops them.
        self._weight, self._weight_version = weight, 0 if weight is None else weight._version
        self.kept: Any = input  # None once it is dropped

    def unpack(self) -> InputAndWeight:
        """Return input and weight, unless they were dropped or have changed in place."""
        input, weight = self.kept, self._weight
        if input is None:
            raise RuntimeError(FREED)
        if input._version != self._input_version:
            raise _changed(input, self._input_version)
        if weight is not None and weight._version != self._weight_version:
            raise _changed(weight, self._weight_version)
        return input, weight


def _changed(tensor: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
    )


class SavedByHooks(Saved):
    """Saves with the saved-tensor hooks of its thread: with those of an activation checkpoint, it keeps no tensors."""

    __slots__ = ()

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        super().__init__(input, weight)
        self.kept = (_save(graph_source(), (input, weight)), current_stream(input.device))
        self._weight = None  # the hooks have it

    def unpack(self) -> InputAndWeight:
        kept = self.kept
        if kept is None:
            raise RuntimeError(FREED)
        owner, stream = kept

        def unpacked() -> InputAndWeight:
            return owner.grad_fn.saved_tensors  # type: ignore[no-any-return]

        if stream == current_stream(self.device):
            return unpacked()
        # Hooks may compute to unpack, and others use what a checkpoint has computed on this stream.
        return on_streams([stream], (), unpacked)  # type: ignore[no-any-return]


def save(input: Tensor, weight: Tensor | None) -> Saved:
    """Save what the backward pass of a replica needs: by the saved-tensor hooks of this thread, if it has any."""
    return Saved(input, weight) if hooks_of_thread(True) is None else SavedByHooks(input, weight)


class _Save(torch.autograd.Function):
    """Never runs in a backward pass: its node owns saved tensors for as long as its output is alive."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, tensors: InputAndWeight) -> Tensor:
        ctx.save_for_backward(*tensors)
        return source


_save = fast_apply(_Save)


def graph_source() -> Tensor:
    """Return a tensor that requires a gradient, so that a function of it is in the graph whatever else it takes."""
    # One for each use: in anomaly mode, two threads that use a leaf for the first time deadlock (torch 2.13).
    return torch.empty(0, device="cpu", requires_grad=True)
