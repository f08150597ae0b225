"""What a replica saves of its call for the backward pass: its input and its weight.

The obvious way is `ctx.save_for_backward` in the node of the call. It fails twice. The saved-tensor hooks of every
replica would run in the thread of replica 0. And where replicas take gradients in their forward pass, two threads may
free the tensors of one node at the same time, which torch 2.13 then frees twice. So each replica saves its own tensors,
in its own thread, and the node refers to all of them:

    thread of replica 0      Saved 0  <---+
                                          |---- node of the call
    thread of replica 1      Saved 1  <---+

The node unpacks them in the backward pass, and frees their `kept` tensors unless `retain_graph` is set.
"""

from typing import Any

import torch
from torch import Tensor

from ..backends.base import LayerArguments
from ..backends.streams import current_stream, on_streams
from ..torch_private import fast_apply, graph_task_id, will_run

__all__: list[str] = []


FREED = (
    "Trying to backward through the graph a second time, where a synchronized batch norm has dropped its input; pass "
    "retain_graph=True to the first backward(), and compute gradients outside the forward() of replicas"
)

InputAndWeight = tuple[Tensor, Tensor | None]


def save(input: Tensor, layer: LayerArguments, has_hooks: bool) -> "Saved":
    """Save input and weight for the backward pass. A checkpoint may end its recomputation here, by an exception."""
    # As in torch, hooks see nothing of a layer that needs no gradient.
    tensors = (input, layer.weight, layer.bias) if has_hooks else ()
    needs_hooks = any([tensor is not None and tensor.requires_grad for tensor in tensors])
    return (SavedByHooks if needs_hooks else Saved)(input, layer.weight)


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

    def wants_input(self) -> bool:
        """Return whether the running backward pass needs the gradient of the input."""
        return self.needs_input and will_run(self.input_node)

    def is_read(self, grad_output: Tensor | None) -> bool:
        """Return whether the running backward pass needs input and weight; `grad_output` is that of this replica."""
        # Gradients that are differentiated need the inputs of all replicas again.
        return grad_output is not None or self.wants_input() or torch.is_grad_enabled()

    def unpack(self) -> InputAndWeight:
        """Return input and weight, unless they were dropped or have changed in place."""
        input, weight = self.kept, self._weight
        if input is None:
            raise RuntimeError(FREED)
        for tensor, version in ((input, self._input_version), (weight, self._weight_version)):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
                )
        return input, weight


class SavedByHooks(Saved):
    """Saves with the saved-tensor hooks of its thread: with those of an activation checkpoint, it keeps no tensors."""

    __slots__ = ("unpacked",)

    def __init__(self, input: Tensor, weight: Tensor | None) -> None:
        super().__init__(input, weight)
        self.unpacked: dict[int, InputAndWeight] = {}  # by the number of the backward pass that reads it
        with torch.enable_grad():
            self.kept = (_save(graph_source(), (input, weight)), current_stream(input.device))
        self._weight = None  # the hooks have it

    def unpack(self) -> InputAndWeight:
        if unpacked := self.unpacked.pop(graph_task_id(), None):
            return unpacked
        kept = self.kept
        if kept is None:
            raise RuntimeError(FREED)
        owner, stream = kept
        if stream == current_stream(self.device):
            return owner.grad_fn.saved_tensors  # type: ignore[no-any-return]
        # Hooks may compute to unpack, and others use what a checkpoint has computed on this stream.
        return on_streams([stream], (), lambda: owner.grad_fn.saved_tensors)  # type: ignore[no-any-return]


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
