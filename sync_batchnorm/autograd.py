"""The single autograd node that a call of a layer creates for all replicas.

So no thread waits for another replica in a backward pass: the engine runs this node once it has the gradients of all
outputs. The node computes the two sums of each replica, adds them up, and computes the gradients of all inputs.

NOTE [who saves what]: Each replica saves its own input and weight (`Saved`), so its saved-tensor hooks run in
its own thread. This node unpacks them, and drops them unless `retain_graph` is set. It saves no tensors itself: where
replicas take gradients in their forward, two threads may drop what a node has saved at once, and torch 2.13 then frees
it twice.

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

from .backends.base import GENERAL, BatchStatistics, ReplicaBackward
from .backends.streams import current_stream, in_order_with_engine, on_streams
from .torch_private import keeps_graph, uncompiled, will_run

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


_save: Any = super(torch.autograd.Function, _Save).apply  # without `torch.func`, whose transforms layers refuse


def _source() -> Tensor:
    # One for each use: in anomaly mode, two threads that use a leaf for the first time deadlock (torch 2.13).
    return torch.empty(0, device="cpu", requires_grad=True)


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
        self._output: Tensor | None = _save(_source(), (input, weight))
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


def make_node(
    batch: BatchStatistics, saved: Sequence[Saved], outputs: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Return `outputs`, one for each replica, as functions of `tensors`: its input, weight and bias, for each."""
    with torch.enable_grad():
        results: Sequence[Tensor] = _apply(batch, saved, outputs, *tensors)
    return results


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: BatchStatistics, saved: Sequence[Saved], outputs: Sequence[Tensor], *_: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.saved = batch, saved
        return tuple(outputs)

    @staticmethod
    @uncompiled  # by compiled autograd
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        batch, saved, needed = ctx.batch, ctx.saved, ctx.needs_input_grad
        # Other processes may have gradients where this one has none, and wait for it.
        if batch.reduce is None and not any([grad is not None for grad in grads]):
            return (None,) * len(needed)
        devices = list(dict.fromkeys([own.device for own in saved] + [batch.master]))
        with torch.DisableTorchFunctionSubclass():
            if len(devices) == 1:
                return _gradients(batch, saved, grads, needed)
            results: tuple[Tensor | None, ...] = in_order_with_engine(
                devices, grads, _gradients, batch, saved, grads, needed
            )
        return results


# What `_SyncBatchNorm.apply` does outside of transforms of `torch.func`, without its search for them.
_apply: Any = super(torch.autograd.Function, _SyncBatchNorm).apply


def _gradients(
    batch: BatchStatistics, saved: Sequence[Saved], grads: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of the node."""
    replicas = _replicas(saved, grads, needed[3::3])
    backend = GENERAL if torch.is_grad_enabled() else batch.backend
    computed = iter(backend.gradients(list(replicas.values()), batch))
    frees = not keeps_graph()
    results: list[Tensor | None] = [None, None, None]
    for i, own in enumerate(saved):
        input_needed, weight_needed, bias_needed = needed[3 + 3 * i : 6 + 3 * i]
        grad_input, grad_weight, grad_bias = next(computed) if i in replicas else (None, None, None)
        if grad_bias is None:  # Its output is not in the loss. Gradient hooks would otherwise be called with None.
            grad_weight = grad_bias = torch.zeros_like(batch.mean_invstd[own.device][0])
        if frees and i in replicas:
            own.drop()  # only now, in order with the engine
        results.append(grad_input if input_needed else None)
        results.append(grad_weight if weight_needed else None)
        results.append(grad_bias if bias_needed else None)
    return tuple(results)


def _replicas(
    saved: Sequence[Saved], grads: Sequence[Tensor | None], inputs_needed: Sequence[bool]
) -> dict[int, ReplicaBackward]:
    """Return, by number, the replicas of which the running backward pass needs something."""
    replicas: dict[int, ReplicaBackward] = {}
    for i, own in enumerate(saved):
        wants_input = inputs_needed[i] and will_run(own.input_node)
        if grads[i] is not None or wants_input or torch.is_grad_enabled():  # which needs all inputs again
            input, weight = own.unpack()
            replicas[i] = ReplicaBackward(own.device, grads[i], input, weight, wants_input)
    return replicas
