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
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from .call.processes import active_group
from .conversion import _convert
from .layers import _SynchronizedBatchNorm
from .parallel.scatter_gather import tensors_in
from .refusals import check_module
from .replicate import DataParallelWithCallback

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
    loss, states = loss or partial(_random_loss, []), _random_states()
    try:
        with torch.inference_mode(False), warnings.catch_warnings():  # and with gradients
            warnings.filterwarnings("ignore", "Was asked to gather along dimension 0")  # the losses of replicas
            one, many = (_Copy(model, (inputs, dict(kwargs or {}))) for _ in range(2))
            parallel = DataParallelWithCallback(many, ["cpu"] * max(1, replicas), dim=dim)
            chunks = parallel.scatter(many.given, {}, parallel.device_ids)[0]
            sizes = [max(own, key=Tensor.dim).shape[dim] for own in map(tensors_in, chunks) if own]
            if len(sizes) < 2 or not sum(sizes):
                which = f"expected at least two chunks, but got chunks of {sizes} rows for replicas={replicas!r}"
                raise ValueError(f"{which}; pass a larger batch, or a larger number of replicas")
            for run, net in (one, one), (many, parallel):
                try:
                    run.step(net, loss)
                except Exception as error:
                    if run is many:
                        text = f"runs on one device, but not in replicas: {type(error).__name__}: {error}"
                        raise AssertionError(text) from error
                    error.add_note("This is from a copy of the model on one device: on the CPU, in float64.")
                    raise
            for text in _differences(one, many, sizes):
                raise AssertionError(f"{text} (dropout is switched off in both copies)")
    finally:
        torch.set_rng_state(torch.tensor(states[0], dtype=torch.uint8))
        random.setstate(states[1])
        if states[2] is not None:
            sys.modules["numpy"].random.set_state(states[2])


def _random_states() -> tuple[Any, ...]:
    """Return the states of the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state().tolist(), random.getstate(), numpy and numpy.random.get_state()


def _double(value: Any) -> Any:
    """Return a tensor on the CPU, in double precision unless it has integers."""
    if not isinstance(value, Tensor):
        return value
    has_integers = not value.is_floating_point() and not value.is_complex()
    return value.to("cpu", value.dtype if has_integers else torch.promote_types(value.dtype, torch.float64))


@wrap_torch_function(lambda name, *_: (name,))
def _event(name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
    """Tell the trace of this replica, the mode of its thread, that a call begins or ends; other threads have none."""


class _Trace(TorchFunctionMode):
    """The calls of modules in one replica; a mode, in which torch computes in float64 and without dropout."""

    def __init__(self) -> None:
        # Of each call: its module, inputs, outputs, what it calls how often, and whether it draws random numbers.
        self.calls: dict[tuple[str, int], tuple[nn.Module, list[Tensor], list[Tensor], Counter[str], bool]] = {}
        self._running: list[tuple[list[Tensor], Counter[str], bytes]] = [([], Counter(), b"")]
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def _record(self, name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        # Copies of tensors, of each the same copy until it is changed in place.
        keys = [(id(t), t.is_inference() or t._version, t) for t in tensors_in(output or (args, kwargs))]
        tensors = [self._copies.setdefault((i, version), (t, t.detach().clone()))[1] for i, version, t in keys]
        states = pickle.dumps(_random_states())
        if not output:
            self._running.append((tensors, Counter(), states))
            return
        inputs, called, before = self._running.pop()
        number = sum(other == name for other, _ in self.calls)
        self.calls[name, number] = module, inputs, tensors, called, states != before
        self._running[-1][1][name] += 1

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
        output = net(*self.given[0], **self.given[1])
        self.outputs = tensors_in(output)
        state = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}  # before a recomputation
        with _Trace():  # also while checkpoints are recomputed
            value = loss(output)
            if value.requires_grad:  # A backward pass from a tensor would leave the mode.
                torch.autograd.backward(torch.autograd.graph.get_gradient_edge(value))
            self.loss = value.detach().reshape(())
        grads = {name: self.initial[name].grad for name in self.grads | self.initial}
        self.grads = {
            name: torch.zeros_like(self.initial[name]) if own is None else own.to_dense() for name, own in grads.items()
        }


def _random_loss(grads: list[Tensor], output: Any) -> Tensor:
    """Return a loss with a random gradient for each output, or for the mean of what each replica has returned."""
    generator, outputs = torch.Generator().manual_seed(0), tensors_in(output)
    grads += [] if grads else [torch.randn(own.shape, generator=generator) for own in outputs]  # on one device
    pairs = zip(outputs, grads, strict=False)
    products = [(own if own.shape == grad.shape else own.double().mean()) * grad for own, grad in pairs]
    return sum([product.sum().real for product in products], torch.zeros(()))


def _differences(one: _Copy, many: _Copy, sizes: list[int]) -> Iterator[str]:
    """Yield what differs for the caller, in the order of the training step."""
    shapes, found = ([tuple(tensor.shape) for tensor in run.outputs] for run in (one, many))
    pairs = [(a, e) for a, e in zip(many.outputs, one.outputs, strict=False) if e.numel() != 1]
    has_scalars = any(own.numel() == 1 for own in one.outputs)  # one from each replica
    gap = max((_gap(*pair) for pair in pairs), default=0.0) if len(shapes) == len(found) else math.inf
    loss_gap = _gap(many.loss, one.loss, TOLERANCE * _largest(*one.outputs))
    if 0.0 < gap < math.inf or (loss_gap and has_scalars):
        yield from _modules(one, many, sizes)
    if gap:
        sizes_differ = f"have shapes {shapes} on one device, {found} in replicas; return a row for each sample"
        yield f"outputs {sizes_differ if gap == math.inf else f'differ, by {gap:.1e} of their largest value'}"
    if loss_gap:
        ratio, cause = float(many.loss / one.loss), "`loss` depends on more than the output, as on random numbers"
        if has_scalars:
            cause = f"each replica returns a mean over its own chunk, of {sizes} rows; weight them by these"
            cause += ", unless it is something else than a mean: take the loss of the gathered outputs"
            if math.isclose(ratio, len(sizes), rel_tol=TOLERANCE):
                cause = "each replica returns a mean, and `loss` adds them up; take their mean"
            elif math.isclose(ratio * len(sizes), 1.0, rel_tol=TOLERANCE):
                cause = "each replica returns a sum, and `loss` takes their mean; add them up"
        what = "outputs agree, the loss does not" if pairs else "the loss differs"
        yield f"{what}: {one.loss:.6g} on one device, {many.loss:.6g} in replicas (ratio {ratio:.3}): {cause}"
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
    for (name, number), (module, inputs, outputs, called, draws) in one.trace.calls.items():
        for i, trace in enumerate(many.traces):
            _, own_inputs, own_outputs, own_called, _ = trace.calls.get((name, number), (None, [], [], called, None))
            gap_of = partial(_gap, rows=(sum(sizes[:i]), sizes[i], sum(sizes)))
            differ = any(gap_of(*pair) for pair in zip(own_inputs, inputs, strict=False))
            gaps = [gap_of(*pair) for pair in zip(own_outputs, outputs, strict=False) if pair[1].numel() != 1]
            gap = max((gap for gap in gaps if gap < math.inf), default=0.0)
            if gap and not differ and len(own_inputs) == len(inputs):
                kind = f"{type(module).__name__}{f', call {number + 1}' if number else ''}"
                where = f"output of {name or 'the model itself'} ({kind}), in replica {i}"
                cause = _cause(module, called, own_called, draws)
                yield f"first difference: {where}, by {gap:.1e} of its largest value: {cause}"


def _cause(module: nn.Module, called: Counter[str], own_called: Counter[str], draws: bool) -> str:
    """Return the probable cause of a difference in a module, from what it calls on one device and in a replica."""
    if draws:
        return "it draws random numbers, which differ in replicas; switch that off to compare the rest"
    if isinstance(module, _SynchronizedBatchNorm):
        return f"group_size={module.group_size} and eps_mode={module.eps_mode!r} make it differ in replicas"
    reason = _convert(module, {}, {})
    if reason is not None:
        return f"a batch norm that convert_model has left alone, because it {reason.partition(' ')[2]}"
    if isinstance(module, _SynchronizedBatchNorm):
        return "a batch norm that is not synchronized; call convert_model(model)"
    if own_called["batch_norm"]:
        return "it calls F.batch_norm, or a batch norm that is no submodule of it"
    # Names of modules come first.
    for what in sorted((called - own_called) | (own_called - called), key=lambda what: (hasattr(Tensor, what), what)):
        counts = f"it calls {what} {called[what]} times on one device, {own_called[what]} times there"
        return f"{counts}; look for a branch, a loop or a cache that depends on the batch or its size"
    return "it mixes samples, as x.mean(0) does, or depends on the size of the batch or a sample's place in it"


def _gap(actual: Tensor, expected: Tensor, floor: float = TOLERANCE, rows: tuple[int, int, int] = (0, 1, 1)) -> float:
    """Return the largest difference, relative to the largest value or `floor`: 0.0 if small, infinite for other shapes.

    Two NaN agree. `rows`: the first row and the number of rows that `actual` has, of how many in `expected`.
    """
    first, size, total = rows
    for dim, (own, length) in enumerate(zip(actual.shape, expected.shape, strict=False)):
        if own * total == size * length:  # as in both dimensions of a similarity matrix
            expected = expected.narrow(dim, first * length // total, own)
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = (tensor.detach().to_dense().to(torch.complex128) for tensor in (actual, expected))
    equal = actual.isclose(expected, rtol=0.0, atol=0.0, equal_nan=True)
    gaps = (actual - expected).abs().nan_to_num(1e99, 1e99).masked_fill(equal, 0.0)
    gap = _largest(gaps) / (max(floor, _largest(expected)) or 1.0)
    return gap if gap > TOLERANCE else 0.0


def _largest(*tensors: Tensor) -> float:
    """Return the largest finite value."""
    sizes = [tensor.detach().to_dense().to(torch.complex128).abs() for tensor in tensors]
    finite = [own[own.isfinite()] for own in sizes]
    return max((float(own.max()) for own in finite if own.numel()), default=0.0)
