"""`assert_matches_one_device`: whether a model computes in replicas what it computes on one device, and what differs.

What the caller sees decides. What modules return, which may differ in replicas that are right, says where it begins.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..call.processes import active_group
from ..meeting import add_note
from ..refusals import check_module, check_number, silence
from ..wrapper import Arguments, DataParallelWithCallback, Replica, tensors_in
from .explaining import Steps
from .recording import Copy, Difference, InReplica, Loss, OneDevice, random_states, restore_random_states

__all__ = ["assert_matches_one_device"]


def assert_matches_one_device(
    model: nn.Module,
    *inputs: Any,
    loss: Loss | None = None,
    replicas: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raise an error unless replicas of `model` compute what it computes on one device with the whole batch.

    Two copies of the model, in its modes, run a forward and a backward pass on the CPU, in float64 and without dropout.
    Outputs, the loss, gradients, parameters and buffers may differ by a millionth of their largest value. The model and
    all random states stay as they are. A hook that writes elsewhere also does so for the copies. Small images
    are enough, one more than replicas, so that chunks are unequal. It compares the model with itself: a loss that is
    wrong in the same way on one device passes. "What differs from one device" in docs/diagnosing.md explains the
    messages.

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))))
        >>> assert_matches_one_device(parallel, torch.randn(6, 3), loss=lambda output: output.square().mean())

    Args:
        model: the wrapper that will train, whose `scatter` and `gather` are used if its class has its own; or the model
            alone, converted or not.
        inputs, kwargs: the whole batch, in trees of tensors, which are cut into chunks as by the wrapper.
        loss: makes a scalar from the gathered output, as ``lambda output: cross_entropy(output, labels)``. None: each
            output gets a random gradient, or, where each replica returns a scalar, the mean of these.
        replicas: how many of them to compare with one device. None: as many as the wrapper has devices, or two.

    Raises:
        AssertionError: if they differ; it names the first module whose inputs agree and whose output does not, or the
            loss, the first gradient in the order of the backward pass, a parameter, a buffer, or a number, flag or
            string that `forward` binds on the model; by how much, and the probable cause. Also if only replicas raise
            an error; what the copy on one device raises gets a note.
        TypeError, ValueError: for bad arguments, and a batch of fewer than two chunks.
        RuntimeError: if the model cannot be copied, or `torch.distributed` joins this process with others.
    """
    check_module(model)
    check_number("replicas", replicas)
    if active_group(None) is not None:
        raise RuntimeError("expected a single process, as the copies would exchange with others; call it in one alone")
    wrapper = model if isinstance(model, nn.DataParallel) else None
    number = replicas or max(2, 0 if wrapper is None else len(wrapper.device_ids))
    model = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    states = random_states()
    try:
        with torch.inference_mode(False), silence():  # and with gradients
            arguments = inputs, dict(kwargs or {})
            one = Copy(model, arguments)
            one.unconvert()
            parallel = _replicas(wrapper, one.module, number)
            sizes = _checked_sizes(parallel, *one.arguments)
            text = _run(model, arguments, one, parallel, sizes, loss).first_difference()
            if text is not None:
                raise AssertionError(text)
    finally:
        restore_random_states(states)


class _CheckedWrapper(DataParallelWithCallback):
    """A wrapper of CPU replicas, each of which runs in a mode of its own."""

    overridden: tuple[str, ...] = ()  # which of `scatter` and `gather` are those of the user's wrapper
    modes: Sequence[InReplica]
    results: list[list[Tensor]]  # the tensors that each replica has returned

    def replicate(self, *args: Any, **kwargs: Any) -> list[Any]:
        replicas = super().replicate(*args, **kwargs)
        for replica, mode in zip(replicas, self.modes, strict=False):
            replica.__dict__["_sync_mode"] = mode
            object.__setattr__(replica, "__class__", _ReplicaInMode)
        return replicas

    def parallel_apply(self, *args: Any, **kwargs: Any) -> list[Any]:
        outputs = super().parallel_apply(*args, **kwargs)
        self.results = [[tensor.detach() for tensor in tensors_in(output)] for output in outputs]
        return outputs


class _ReplicaInMode(Replica):
    _sync_mode: InReplica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._sync_mode:
            return super().__call__(*args, **kwargs)


def _replicas(wrapper: nn.DataParallel[Any] | None, module: nn.Module, number: int) -> _CheckedWrapper:
    """Return a wrapper for that many CPU replicas of `module`, which scatters and gathers as the user's `wrapper`."""
    defaults = {"dim": 0, "in_dims": None, "out_dims": None}
    dims: Any = {name: getattr(wrapper, name, default) for name, default in defaults.items()}
    parallel = _CheckedWrapper(module, ["cpu"] * number, **dims)
    if wrapper is None:
        return parallel
    cls: Any = vars(type(wrapper)).get("_sync_original", type(wrapper))  # of a patched object, the user's class
    of_classes = [name for name in ("scatter", "gather") if _overrides(cls, name)]
    of_object = [name for name in ("scatter", "gather") if name in vars(wrapper)]
    if not of_classes and not of_object:
        return parallel
    bases = (_CheckedWrapper,) if issubclass(_CheckedWrapper, cls) else (cls, _CheckedWrapper)
    names: dict[str, Any] = {
        name: getattr(_CheckedWrapper, name) for name in ("forward", "replicate", "parallel_apply")
    }
    made: Any = type(cls.__name__, bases, names | {"overridden": (*of_classes, *of_object)})
    like: _CheckedWrapper = object.__new__(made)
    like.__dict__.update(vars(wrapper) | vars(parallel))
    for name in of_object:
        function = vars(wrapper)[name]
        is_bound = isinstance(function, MethodType) and function.__self__ is wrapper
        like.__dict__[name] = MethodType(function.__func__, like) if is_bound else function
    return like


def _overrides(cls: Any, name: str) -> bool:
    return getattr(cls, name) not in (getattr(nn.DataParallel, name), getattr(DataParallelWithCallback, name))


def _checked_sizes(parallel: _CheckedWrapper, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the number of rows in each chunk; raise an error for fewer than two chunks."""
    number = len(parallel.device_ids)
    if number < 2:
        raise ValueError(f"expected at least two replicas to compare, but got replicas={number}; pass a larger number")
    if not tensors_in((inputs, kwargs)):
        raise ValueError("expected a batch to cut into chunks, but got inputs without a tensor; pass the whole batch")
    if "scatter" in parallel.overridden:
        sizes = _sizes_of_own_scatter(parallel, inputs, kwargs)
    else:
        sizes = Arguments(parallel, inputs, kwargs, number).sizes
    if len(sizes) < 2 or not sum(sizes):
        raise ValueError(f"expected at least two chunks with rows, but got chunks of {sizes} rows; pass a larger batch")
    return sizes


def _sizes_of_own_scatter(parallel: _CheckedWrapper, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    try:
        chunks = list(zip(*parallel.scatter(inputs, kwargs, parallel.device_ids), strict=False))
    except Exception as error:
        add_note(error, f"Raised in your scatter, which got {parallel.device_ids} as device_ids.")
        raise
    sizes = [_rows(chunk, parallel.dim) for chunk in chunks if tensors_in(chunk)]
    if sum(sizes) != _rows((inputs, kwargs), parallel.dim):
        sizes = [len(args[0]) for args, _ in chunks]  # which may cut lists with one entry for each sample
    return sizes


def _rows(tree: Any, dim: int) -> int:
    """Return the number of rows of the tensor with the most dimensions."""
    return max(tensors_in(tree), key=Tensor.dim).shape[dim]


def _run(
    model: nn.Module, arguments: Any, one: Copy, parallel: _CheckedWrapper, sizes: list[int], loss: Loss | None
) -> Steps:
    """Run a training step on one device, and one in the replicas of `parallel`."""
    trace, found = OneDevice(), list[Difference]()
    loss_of = partial(_random_loss, [], parallel) if loss is None else loss
    inputs, kwargs = one.arguments
    of_inputs, of_kwargs = parallel.scatter(inputs, kwargs, parallel.device_ids[:1])
    one.arguments = of_inputs[0], of_kwargs[0]
    try:
        one.step(partial(_on_one_device, trace, one.module, parallel), loss_of)
    except Exception as error:
        add_note(error, "This is from a copy of the model on one device: on the CPU, in float64.")
        raise
    many = Copy(model, arguments)  # not before, to hold less at a time
    parallel.module = many.module
    parallel.modes = [InReplica(i, sizes, trace, found) for i in range(len(sizes))]
    try:
        many.step(parallel, loss_of)
    except Exception as error:
        text = f"runs on one device, but not in replicas: {type(error).__name__}: {error}"
        raise AssertionError(text) from error
    if len(many.outputs) != len(one.outputs):
        many.outputs = [_joined(parts, parallel.dim) for parts in zip(*parallel.results, strict=True)]
    return Steps(one, many, trace, found, sizes, parallel.results, has_loss=loss is not None)


def _on_one_device(trace: OneDevice, module: nn.Module, parallel: _CheckedWrapper, *args: Any, **kwargs: Any) -> Any:
    with trace:
        output = module(*args, **kwargs)
    return parallel.gather([output], parallel.output_device) if "gather" in parallel.overridden else output


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return what replicas have returned in one tensor; scalars become a vector, as in the `gather` of torch."""
    return torch.cat(list(parts), dim) if parts[0].dim() else torch.stack(list(parts))


def _random_loss(grads: list[Tensor], parallel: _CheckedWrapper, output: Any) -> Tensor:
    """Return a loss with a random gradient for each output, or for the mean of what each replica has returned."""
    outputs = tensors_in(output)
    if not grads:  # on one device, which comes first; replicas get the same
        generator = torch.Generator().manual_seed(0)
        grads += [torch.randn(tensor.shape, generator=generator) for tensor in outputs]
    if "gather" in parallel.overridden and len(outputs) > len(grads):  # It lists what replicas return.
        outputs = [_joined(outputs[i :: len(grads)], parallel.dim) for i in range(len(grads))]
    loss = torch.zeros(())
    for tensor, grad in zip(outputs, grads, strict=False):
        weighted = (tensor if tensor.shape == grad.shape else tensor.double().mean()) * grad
        loss = loss + weighted.sum().real
    return loss
