"""`assert_matches_one_device`: whether a model computes in replicas what it computes on one device, and what differs.

What the caller sees decides. What modules return, which may differ in replicas that are right, says where it begins.
"""

import copy
import math
import pickle
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from ..call.processes import active_group
from ..layers import _convert, _SynchronizedBatchNorm
from ..meeting import add_note
from ..refusals import check_module
from ..wrapper import DataParallelWithCallback, tensors_in

__all__ = ["assert_matches_one_device"]

TOLERANCE = 1e-6  # of differences, relative to the largest value, or this; rounding makes 1e-9 of real nets

Loss = Callable[[Any], Tensor]


def assert_matches_one_device(
    model: nn.Module, *inputs: Any, loss: Loss | None = None, replicas: int = 2, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Raise an error unless replicas of `model` compute what it computes on one device with the whole batch.

    Two copies of the model, in its modes, run a forward and a backward pass on the CPU, in float64 and without dropout.
    The model and all random states stay as they are. A hook that writes elsewhere also does so for the copies.

    Example:
        >>> model = convert_model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)))
        >>> assert_matches_one_device(model, torch.randn(6, 3), loss=lambda output: output.square().mean())

    Args:
        model: the model, converted or not. Of a wrapper, its module.
        inputs, kwargs: the whole batch, in trees of tensors, which are cut into chunks as by a `DataParallel`.
        loss: makes a scalar from the gathered output, as ``lambda output: cross_entropy(output, labels)``. None: each
            output gets a random gradient, or, where each replica returns a scalar, the mean of these.
        replicas: how many of them to compare with one device.

    Raises:
        AssertionError: if they do not; it names the first module whose inputs agree and whose output does not, or the
            loss, the first gradient in the order of the backward pass, a parameter or a buffer; by how much, and the
            probable cause. Also if only replicas raise an error.
        TypeError, ValueError: for bad arguments, and a batch of fewer than two chunks.
        RuntimeError: if the model cannot be copied, or `torch.distributed` joins this process with others.
    """
    check_module(model)
    if active_group(None) is not None:
        raise RuntimeError("expected a single process, as the copies would exchange with others; call it in one alone")
    dim = getattr(model, "dim", 0) if isinstance(model, nn.DataParallel) else 0
    model = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    states = _random_states()
    try:
        with torch.inference_mode(False), warnings.catch_warnings():  # and with gradients
            warnings.filterwarnings("ignore", "Was asked to gather along dimension 0")  # the losses of replicas
            warnings.filterwarnings("ignore", r"forward\(\) of \w+ set ")  # A buffer that differs is named below.
            one, many = (_Copy(model, (inputs, dict(kwargs or {}))) for _ in range(2))
            parallel = DataParallelWithCallback(many, ["cpu"] * max(1, replicas), dim=dim)
            sizes = _rows_of_chunks(parallel, many.given)
            if len(sizes) < 2 or not sum(sizes):
                which = f"expected at least two chunks, but got chunks of {sizes} rows for replicas={replicas!r}"
                raise ValueError(f"{which}; pass a larger batch, or a larger number of replicas")
            _run(one, many, parallel, loss or partial(_random_loss, []))
            text = next(_differences(one, many, sizes), None)
            if text is not None:
                raise AssertionError(f"{text} (dropout is switched off in both copies)")
    finally:
        _restore_random_states(states)


def _rows_of_chunks(parallel: nn.DataParallel[Any], given: Any) -> list[int]:
    """Return the number of rows in each chunk that has a tensor: those of the one with the most dimensions."""
    inputs, kwargs = parallel.scatter(given[0], given[1], parallel.device_ids)
    in_chunks = [tensors for tensors in map(tensors_in, zip(inputs, kwargs, strict=True)) if tensors]
    return [max(tensors, key=Tensor.dim).shape[parallel.dim] for tensors in in_chunks]


def _run(one: "_Copy", many: "_Copy", parallel: nn.Module, loss: Loss) -> None:
    """Run a training step on one device, and one in the replicas of `parallel`, which is a wrapper of `many`."""
    try:
        one.step(one, loss)
    except Exception as error:
        add_note(error, "This is from a copy of the model on one device: on the CPU, in float64.")
        raise
    try:
        many.step(parallel, loss)
    except Exception as error:
        text = f"runs on one device, but not in replicas: {type(error).__name__}: {error}"
        raise AssertionError(text) from error


def _random_states() -> tuple[Any, Any, Any]:
    """Return the states of the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state().tolist(), random.getstate(), numpy and numpy.random.get_state()


def _restore_random_states(states: tuple[Any, Any, Any]) -> None:
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(torch.tensor(of_torch, dtype=torch.uint8))
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _double(value: Any) -> Any:
    """Return a tensor on the CPU, in double precision unless it has integers."""
    if not isinstance(value, Tensor):
        return value
    has_integers = not value.is_floating_point() and not value.is_complex()
    return value.to("cpu", value.dtype if has_integers else torch.promote_types(value.dtype, torch.float64))


# As a function of torch that modes can override, it reaches the mode of the thread in which it is called.
@wrap_torch_function(lambda name, *_: (name,))
def _event(name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
    """Tell the trace of this replica, the mode of its thread, that a call begins or ends; other threads have none."""


class _Call(NamedTuple):
    """One call of a module in one replica."""

    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]
    called: Counter[str]  # the modules and functions that it calls, and how often
    draws: bool  # random numbers


class _Trace(TorchFunctionMode):
    """The calls of modules in one replica; a mode, in which torch computes in float64 and without dropout."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], _Call] = {}  # by the name of the module, and which of its calls it is
        self._running: list[tuple[list[Tensor], Counter[str], bytes]] = [([], Counter(), b"")]
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def _record(self, name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        tensors = [self._copy_of(tensor) for tensor in tensors_in(output or (args, kwargs))]
        states = pickle.dumps(_random_states())
        if not output:
            self._running.append((tensors, Counter(), states))
            return
        inputs, called, before = self._running.pop()
        number = sum(other == name for other, _ in self.calls)
        self.calls[name, number] = _Call(module, inputs, tensors, called, states != before)
        self._running[-1][1][name] += 1

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, the same until it is changed in place."""
        key = id(tensor), tensor.is_inference() or tensor._version
        if key not in self._copies:
            self._copies[key] = tensor, tensor.detach().clone()  # while the tensor is kept, no other gets its id
        _, copied = self._copies[key]
        return copied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is _event:
            return self._record(*args)
        if func is Tensor.__deepcopy__ and len(self._running) == 1:  # of the model, also of what is no leaf
            return _double(args[0]).detach().clone().requires_grad_(args[0].requires_grad)
        if "dropout" in name:
            return args[0]
        if name != "__get__":  # which reads an attribute of a tensor
            self._running[-1][1][name] += 1
        # `scaled_dot_product_attention` has `dropout_p`; what works in place gets the tensors themselves.
        kwargs = {key: 0.0 if key == "dropout_p" else _double(value) for key, value in (kwargs or {}).items()}
        return _double(func(*args, **kwargs) if name.endswith("_") else func(*map(_double, args), **kwargs))


class _Copy(nn.Module):
    """A copy of the model, and what the caller sees of its training step; each replica has a trace of its own."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        super().__init__()
        self.trace, self.traces, self.grads = _Trace(), list[_Trace](), dict[str, Tensor]()
        try:
            with torch.no_grad(), _Trace():  # without gradients, as copies of scripted modules are no leaves
                self.module, self.given = copy.deepcopy((model, given))
                self.module.cpu().double()
            self.initial = dict(self.module.named_parameters())
            for name, parameter in self.initial.items():
                if parameter.requires_grad:
                    parameter.register_hook(partial(self.grads.__setitem__, name))  # type: ignore[no-untyped-call]
        except Exception as error:
            raise RuntimeError(f"{type(model).__name__} cannot be copied to the CPU in float64: {error}") from error
        for name, module in self.module.named_modules():
            if isinstance(getattr(module, "dropout", None), float):  # as of `nn.LSTM` and `nn.MultiheadAttention`
                module.dropout = 0.0
            if isinstance(module, nn.DataParallel):
                module.device_ids = []  # It runs its module.
            if not isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
                module.register_forward_pre_hook(partial(_event, name), with_kwargs=True)
                module.register_forward_hook(partial(_event, name), with_kwargs=True, always_call=True)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.trace = _Trace()
        self.traces.append(self.trace)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.trace:
            return self.module(*inputs, **kwargs)

    def step(self, net: nn.Module, loss: Loss) -> None:
        """Run a forward and a backward pass of `net`, this or a wrapper of it."""
        inputs, kwargs = self.given
        output = net(*inputs, **kwargs)
        self.outputs = tensors_in(output)
        state = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}  # before a recomputation
        with _Trace():  # also while checkpoints are recomputed
            value = loss(output)
            if value.requires_grad:  # A backward pass from a tensor would leave the mode.
                torch.autograd.backward(torch.autograd.graph.get_gradient_edge(value))
            self.loss = value.detach().reshape(())
        grads = {name: self.initial[name].grad for name in self.grads | self.initial}  # in the order of their hooks
        self.grads = {
            name: torch.zeros_like(self.initial[name]) if grad is None else grad.to_dense()
            for name, grad in grads.items()
        }


def _random_loss(grads: list[Tensor], output: Any) -> Tensor:
    """Return a loss with a random gradient for each output, or for the mean of what each replica has returned."""
    outputs = tensors_in(output)
    if not grads:  # on one device, which comes first; replicas get the same
        generator = torch.Generator().manual_seed(0)
        grads += [torch.randn(tensor.shape, generator=generator) for tensor in outputs]
    loss = torch.zeros(())
    for tensor, grad in zip(outputs, grads, strict=False):
        weighted = (tensor if tensor.shape == grad.shape else tensor.double().mean()) * grad
        loss = loss + weighted.sum().real
    return loss


def _differences(one: _Copy, many: _Copy, sizes: list[int]) -> Iterator[str]:
    """Yield what differs for the caller, in the order of the training step."""
    yield from _different_outputs_and_loss(one, many, sizes)
    yield from _different_gradients(one, many)
    yield from _different_state(one, many)


def _different_outputs_and_loss(one: _Copy, many: _Copy, sizes: list[int]) -> Iterator[str]:
    shapes, found = ([tuple(tensor.shape) for tensor in run.outputs] for run in (one, many))
    pairs = zip(many.outputs, one.outputs, strict=False)
    gaps = [_gap(actual, expected) for actual, expected in pairs if expected.numel() != 1]
    has_scalars = any(output.numel() == 1 for output in one.outputs)  # one from each replica
    gap = max(gaps, default=0.0) if len(shapes) == len(found) else math.inf
    loss_gap = _gap(many.loss, one.loss, TOLERANCE * _largest(*one.outputs))
    if 0.0 < gap < math.inf or (loss_gap and has_scalars):
        yield from _modules(one, many, sizes)
    if gap:
        sizes_differ = f"have shapes {shapes} on one device, {found} in replicas; return a row for each sample"
        yield f"outputs {sizes_differ if gap == math.inf else f'differ, by {gap:.1e} of their largest value'}"
    if loss_gap:
        ratio = float(many.loss / one.loss)
        cause = _cause_in_loss(ratio, has_scalars, sizes)
        what = "outputs agree, the loss does not" if gaps else "the loss differs"
        yield f"{what}: {one.loss:.6g} on one device, {many.loss:.6g} in replicas (ratio {ratio:.3}): {cause}"


def _cause_in_loss(ratio: float, has_scalars: bool, sizes: list[int]) -> str:
    """Return the probable cause of a loss that differs, by its ratio to the one on one device."""
    if not has_scalars:
        return "`loss` depends on more than the output, as on random numbers"
    if math.isclose(ratio, len(sizes), rel_tol=TOLERANCE):
        return "each replica returns a mean, and `loss` adds them up; take their mean"
    if math.isclose(ratio * len(sizes), 1.0, rel_tol=TOLERANCE):
        return "each replica returns a sum, and `loss` takes their mean; add them up"
    return (
        f"each replica returns a mean over its own chunk, of {sizes} rows; weight them by these, unless it is "
        "something else than a mean: take the loss of the gathered outputs"
    )


def _different_gradients(one: _Copy, many: _Copy) -> Iterator[str]:
    floor = TOLERANCE * _largest(*one.grads.values())
    for name, expected in one.grads.items():
        if _gap(many.grads[name], expected, floor):
            ratio = float(many.grads[name].norm() / expected.norm())
            cause = "they drop a part of it, or add up what should be a mean" if ratio else "only replicas drop it"
            yield (
                "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that "
                f"of {name} (ratio of norms {ratio:.3}): {cause}; look for detach, no_grad or a branch on the size of "
                "the batch, and in functions with a backward pass of their own"
            )


def _different_state(one: _Copy, many: _Copy) -> Iterator[str]:
    for name, expected in one.state.items():
        gap = _gap(many.state.get(name, expected[..., None]), expected)
        if gap:
            yield (
                f"outputs, loss and gradients agree; {name} differs after the forward pass, by {gap:.1e} of its "
                "largest value: only what replica 0 writes into it stays, which is from its own chunk; update it "
                "outside the forward pass"
            )


def _modules(one: _Copy, many: _Copy, sizes: list[int]) -> Iterator[str]:
    """Yield which modules have inputs that agree, and outputs that do not."""
    for (name, number), call in one.trace.calls.items():
        for i, trace in enumerate(many.traces):
            in_replica = trace.calls.get((name, number))
            if in_replica is None:
                continue
            gap_of = partial(_gap, rows=(sum(sizes[:i]), sizes[i], sum(sizes)))
            input_pairs = zip(in_replica.inputs, call.inputs, strict=False)
            inputs_differ = any(gap_of(actual, expected) for actual, expected in input_pairs)
            output_pairs = zip(in_replica.outputs, call.outputs, strict=False)
            gaps = [gap_of(actual, expected) for actual, expected in output_pairs if expected.numel() != 1]
            gap = max((gap for gap in gaps if gap < math.inf), default=0.0)
            if gap and not inputs_differ and len(in_replica.inputs) == len(call.inputs):
                kind = f"{type(call.module).__name__}{f', call {number + 1}' if number else ''}"
                where = f"output of {name or 'the model itself'} ({kind}), in replica {i}"
                cause = _cause(call, in_replica.called)
                yield f"first difference: {where}, by {gap:.1e} of its largest value: {cause}"


def _cause(call: _Call, called_in_replica: Counter[str]) -> str:
    """Return the probable cause of a difference in a module, from its call on one device and what it calls there."""
    module, called = call.module, call.called
    if call.draws:
        return "it draws random numbers, which differ in replicas; switch that off to compare the rest"
    if isinstance(module, _SynchronizedBatchNorm):
        return f"group_size={module.group_size} and eps_mode={module.eps_mode!r} make it differ in replicas"
    reason = _convert(module, {}, {})
    if reason is not None:
        return f"a batch norm that convert_model has left alone, because it {reason.partition(' ')[2]}"
    if isinstance(module, _SynchronizedBatchNorm):
        return "a batch norm that is not synchronized; call convert_model(model)"
    if called_in_replica["batch_norm"]:
        return "it calls F.batch_norm, or a batch norm that is no submodule of it"
    # Names of modules come first.
    differing = (called - called_in_replica) | (called_in_replica - called)
    if differing:
        what = min(differing, key=lambda name: (hasattr(Tensor, name), name))
        return (
            f"it calls {what} {called[what]} times on one device, {called_in_replica[what]} times there; look for a "
            "branch, a loop or a cache that depends on the batch or its size"
        )
    return "it mixes samples, as x.mean(0) does, or depends on the size of the batch or a sample's place in it"


def _gap(actual: Tensor, expected: Tensor, floor: float = TOLERANCE, rows: tuple[int, int, int] = (0, 1, 1)) -> float:
    """Return the largest difference, relative to the largest value or `floor`: 0.0 if small, infinite for other shapes.

    Two NaN agree. `rows`: the first row and the number of rows that `actual` has, of how many in `expected`.
    """
    first, number, total = rows
    for dim, (size, whole_size) in enumerate(zip(actual.shape, expected.shape, strict=False)):
        if size * total == number * whole_size:  # as in both dimensions of a similarity matrix
            expected = expected.narrow(dim, first * whole_size // total, size)
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = (tensor.detach().to_dense().to(torch.complex128) for tensor in (actual, expected))
    equal = actual.isclose(expected, rtol=0.0, atol=0.0, equal_nan=True)
    gaps = (actual - expected).abs().nan_to_num(1e99, 1e99).masked_fill(equal, 0.0)
    gap = _largest(gaps) / (max(floor, _largest(expected)) or 1.0)
    return gap if gap > TOLERANCE else 0.0


def _largest(*tensors: Tensor) -> float:
    """Return the largest finite value."""
    absolutes = [tensor.detach().to_dense().to(torch.complex128).abs() for tensor in tensors]
    finite = [values[values.isfinite()] for values in absolutes]
    return max((float(values.max()) for values in finite if values.numel()), default=0.0)
