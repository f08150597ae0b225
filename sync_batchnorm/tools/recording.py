"""A training step of a copy of a model, recorded at the borders of its modules.

One device comes first and keeps what goes into its modules and comes out. Replicas keep nothing: each of their calls is
compared with that of one device as it ends. What all replicas have been compared with is dropped.
"""

import copy
import math
import random
import sys
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from ..layers import _SynchronizedBatchNorm
from ..torch_private import HOOKS
from ..wrapper import leaves_of, tensors_in
from .comparing import Rows, gap, largest
from .probing import Probe

__all__: list[str] = []

_SCALARS = (bool, int, float, str)

Loss = Callable[[Any], Tensor]
Key = tuple[str, int]  # of a call: the name of the module, and which of its calls it is


def random_states() -> tuple[Any, Any, Any]:
    """Return the states of the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()


def restore_random_states(states: tuple[Any, Any, Any]) -> None:
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _differ(states: tuple[Any, Any, Any], others: tuple[Any, Any, Any]) -> bool:
    """Return whether random numbers were drawn between two states."""
    (of_torch, of_python, of_numpy), (torch_then, python_then, numpy_then) = states, others
    return not torch.equal(of_torch, torch_then) or of_python != python_then or repr(of_numpy) != repr(numpy_then)


def _double(value: Any) -> Any:
    """Return a tensor on the CPU, in double precision unless it has integers."""
    if not isinstance(value, Tensor):
        return value
    has_integers = not value.is_floating_point() and not value.is_complex()
    return value.to("cpu", value.dtype if has_integers else torch.promote_types(value.dtype, torch.float64))


# As a function of torch that modes can override, it reaches the mode of the thread in which it is called.
@wrap_torch_function(lambda name, *_: (name,))
def _border(name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
    """Tell the mode of this thread that a call of a module begins or ends; other threads have none."""


def has_hooks_of_others(module: nn.Module) -> bool:
    """Return whether a module of a copy has forward hooks, besides those that make its calls known."""
    hooks = [hook for name in HOOKS if "forward" in name for hook in vars(module)[name].values()]
    return any(getattr(hook, "func", None) is not _border for hook in hooks)


# Which argument of these functions is the probability of dropout.
_DROPOUT_P = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}


class InDouble(TorchFunctionMode):
    """A mode in which torch computes on the CPU, in float64 and without dropout."""

    has_dropout = False  # whether it was switched off anywhere

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is _border:
            return self._pass_border(*args)
        if "dropout" in name:
            return self._without_dropout(name, args[0] if args else kwargs["input"])
        if name != "__get__":  # which reads an attribute of a tensor
            self._count(name)
        kwargs = {key: _double(value) for key, value in kwargs.items()}
        if name in _DROPOUT_P:
            args = self._without_probability(_DROPOUT_P[name], list(args), kwargs)
        # What works in place gets the tensors themselves.
        return _double(func(*args, **kwargs) if name.endswith("_") else func(*map(_double, args), **kwargs))

    def _without_dropout(self, name: str, input: Tensor) -> Any:
        """Return what a function of that name returns if it drops nothing."""
        self.has_dropout = True
        output = _double(input).clone()
        return (output, torch.ones_like(output, dtype=torch.bool)) if "native" in name else output

    def _without_probability(self, position: int, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return positional arguments that make no dropout, and see to it that `kwargs` make none."""
        if len(args) > position:
            self.has_dropout |= args[position] > 0
            args[position] = 0.0
        elif "dropout_p" in kwargs:
            self.has_dropout |= kwargs["dropout_p"] > 0
            kwargs["dropout_p"] = 0.0
        return args

    def _pass_border(self, name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        """Take note that a call begins or ends."""

    def _count(self, name: str) -> None:
        """Take note that a function is called."""


class _Copying(InDouble):
    """The mode in which a model is copied, also its tensors that are no leaves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return _double(args[0]).detach().clone().requires_grad_(args[0].requires_grad)
        return super().__torch_function__(func, types, args, kwargs)


class Kept(NamedTuple):
    """A copy of a tensor, with a number of its own."""

    number: int
    tensor: Tensor


class Call(NamedTuple):
    """One call of a module on one device."""

    position: int  # among all calls, by their ends
    module: Any
    inputs: list[Kept]
    outputs: list[Kept]
    called: Counter[str]  # the modules and functions that it calls, and how often
    draws: bool  # random numbers


class Difference(NamedTuple):
    """A call in a replica whose inputs agree with those on one device, and whose output does not."""

    position: int  # of the call on one device
    replica: int
    key: Key
    gap: float
    called: Counter[str]  # in the replica
    probe: Probe | None  # None where the call cannot be repeated


class _Running(NamedTuple):
    """A call that has begun and not ended yet."""

    module: Any
    key: Key
    called: Counter[str]
    arguments: Any  # its arguments
    begun: Any  # what `_begin` has returned


class Trace(InDouble):
    """The mode of one device or one replica, which knows the calls of modules that run."""

    def __init__(self) -> None:
        self._running = [_Running(None, ("", 0), Counter(), None, None)]
        self._begun: Counter[str] = Counter()  # calls, by the name of the module
        self._seen: dict[int, tuple[Any, ...]] = {}  # by the id of a tensor: it, its version, and what is known of it

    def _pass_border(self, name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        tensors = tensors_in(output or (args, kwargs))
        if output:
            # A hook may have raised before its module's call began here, or an exception may have ended a call.
            while any(call.module is module for call in self._running):
                call = self._running.pop()
                if call.module is module:
                    self._count(name)
                    self._end(call, tensors)
                    break
        else:
            key = name, self._begun[name]
            self._begun[name] += 1
            self._running.append(_Running(module, key, Counter(), (args, kwargs), self._begin(key, tensors)))

    def _count(self, name: str) -> None:
        self._running[-1].called[name] += 1

    def _once(self, tensor: Tensor, know: Callable[[], Any]) -> Any:
        """Return what `know` returns, asked once for a tensor until that is changed in place."""
        version = None if tensor.is_inference() else tensor._version
        reference, version_then, known = self._seen.get(id(tensor), (lambda: None, None, None))
        if reference() is not tensor or version is None or version != version_then:
            known = know()
            self._seen[id(tensor)] = weakref.ref(tensor), version, known
        return known

    @abstractmethod
    def _begin(self, key: Key, inputs: list[Tensor]) -> Any: ...

    @abstractmethod
    def _end(self, call: _Running, outputs: list[Tensor]) -> None: ...


class OneDevice(Trace):
    """Keeps what goes into each call and comes out, until all replicas have been compared with it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Key, Call] = {}
        self._numbers = count()  # of tensors that were copied
        self._compared: Counter[Key] = Counter()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._seen.clear()

    def _begin(self, key: Key, inputs: list[Tensor]) -> Any:
        return self._keep(inputs), random_states()

    def _end(self, call: _Running, outputs: list[Tensor]) -> None:
        inputs, states = call.begun
        draws = _differ(states, random_states())
        self.calls[call.key] = Call(len(self.calls), call.module, inputs, self._keep(outputs), call.called, draws)

    def _keep(self, tensors: list[Tensor]) -> list[Kept]:
        return [self._once(tensor, partial(self._copy, tensor)) for tensor in tensors]

    def _copy(self, tensor: Tensor) -> Kept:
        return Kept(next(self._numbers), tensor.detach().clone())

    def drop(self, key: Key, replicas: int) -> None:
        """Drop the tensors of a call once this was asked for by so many replicas."""
        self._compared[key] += 1
        if self._compared[key] == replicas:
            self.calls[key].inputs.clear()
            self.calls[key].outputs.clear()


class InReplica(Trace):
    """Compares each call with that on one device; `found` gets what differs."""

    def __init__(self, replica: int, sizes: list[int], one: OneDevice, found: list[Difference]) -> None:
        super().__init__()
        self._replica, self._replicas, self._one, self._found = replica, len(sizes), one, found
        self._rows = Rows(sum(sizes[:replica]), sizes[replica], sum(sizes))

    def _begin(self, key: Key, inputs: list[Tensor]) -> bool:
        """Return whether the inputs agree."""
        call = self._one.calls.get(key)
        if call is None or len(inputs) != len(call.inputs):
            return False
        return not any([self._gap(tensor, kept) for tensor, kept in zip(inputs, call.inputs, strict=True)])

    def _end(self, call: _Running, outputs: list[Tensor]) -> None:
        on_one = self._one.calls.get(call.key)
        if on_one is None:
            return
        if call.begun:
            pairs = zip(outputs, on_one.outputs, strict=False)
            gaps = [self._gap(tensor, kept) for tensor, kept in pairs if kept.tensor.numel() != 1]
            largest_gap = max((gap for gap in gaps if gap < math.inf), default=0.0)
            if largest_gap:
                probe = self._probe(call.arguments, on_one)
                found = Difference(on_one.position, self._replica, call.key, largest_gap, call.called, probe)
                self._found.append(found)
        self._one.drop(call.key, self._replicas)

    def _probe(self, arguments: Any, on_one: Call) -> Probe | None:
        with suppress(Exception):
            return Probe(arguments, [kept.tensor for kept in on_one.inputs], self._rows)
        return None

    def _gap(self, tensor: Tensor, kept: Kept) -> float:
        number, value = self._once(tensor, lambda: (kept.number, gap(tensor, kept.tensor, rows=self._rows)))
        # A tensor that goes into several modules may be several tensors on one device.
        return float(value) if number == kept.number else gap(tensor, kept.tensor, rows=self._rows)


def _attributes_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return numbers, flags and strings of all modules, by the names of module and attribute."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, _SCALARS) and attribute != "training"  # which a forward may set for its time
    }


class Copy:
    """A copy of a model and its inputs on the CPU, and what the caller sees of its training step."""

    has_dropout = False  # that was switched off
    draws: bool  # whether the forward pass draws random numbers
    outputs: list[Tensor]
    values: list[Any]  # the numbers, flags and strings among the outputs
    loss: Tensor
    slack: float  # how far the loss moves, at most, if each output moves by its largest value
    parameters: dict[str, Tensor]  # after the forward pass
    buffers: dict[str, Tensor]
    grads: dict[str, Tensor | None]  # in the order of the backward pass
    attributes: dict[tuple[str, str], Any]  # numbers, flags and strings, by the names of module and attribute

    def __init__(self, model: nn.Module, arguments: Any) -> None:
        try:
            with torch.no_grad(), _Copying():  # With gradients, copies of scripted modules would be no leaves.
                self.module, self.arguments = copy.deepcopy((model, arguments))
                self.module.cpu().double()
            self.uncounted: set[str] = set()  # buffers that the user's own class need not change
            self._order: dict[str, None] = {}  # of gradients
            originals = dict(model.named_parameters(remove_duplicate=False))
            for name, parameter in self.module.named_parameters():
                if originals[name].requires_grad:  # which copies of scripted modules do not say
                    parameter.requires_grad_().register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
        except Exception as error:
            raise RuntimeError(f"{type(model).__name__} cannot be copied to the CPU in float64: {error}") from error
        for name, module in self.module.named_modules():
            self._prepare(name, module)

    def unconvert(self) -> None:
        """Give layers that a class of `convert_model(classes=)` has replaced their own class: it says what is right."""
        for name, module in self.module.named_modules():
            if isinstance(module, _SynchronizedBatchNorm) and module._former_class is not None:
                object.__setattr__(module, "__class__", module._former_class)
                self.uncounted.add(f"{name}.num_batches_tracked".strip("."))

    def _note(self, name: str, grad: Tensor) -> None:
        self._order[name] = None  # and not the gradient, which would be a copy

    def _add_slack(self, largest_value: float, grad: Tensor) -> None:
        self.slack += largest_value * float(grad.to_dense().abs().sum())

    def _prepare(self, name: str, module: nn.Module) -> None:
        """Switch off what is a rule and no fault, and make the calls of a module known."""
        self._switch_off_dropout(module)
        if isinstance(module, _SynchronizedBatchNorm):
            module.__dict__["eps_mode"] = "plus"  # the rule of one device, where replicas exchange nothing
        if isinstance(module, nn.DataParallel):
            module.device_ids = []  # It runs its module.
        if not isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
            # Before hooks of the user, which may raise.
            module.register_forward_pre_hook(partial(_border, name), with_kwargs=True, prepend=True)
            module.register_forward_hook(partial(_border, name), with_kwargs=True, always_call=True)

    def _switch_off_dropout(self, module: nn.Module) -> None:
        """Switch off dropout and stochastic depth that a module does by an attribute of its own."""
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule) and "Dropout" in module.original_name:
            module.eval()
        for attribute, value in vars(module).items():  # such as `dropout` of `nn.LSTM`, `drop_prob` of timm
            is_dropout = "drop" in attribute or (attribute == "p" and ("Drop" in kind or kind == "StochasticDepth"))
            if is_dropout and type(value) is float and value:
                module.__dict__[attribute] = 0.0
                self.has_dropout = True

    def step(self, run: Callable[..., Any], loss: Loss) -> None:
        """Run a forward and a backward pass: `run` is the module, or a wrapper of it."""
        inputs, kwargs = self.arguments
        initial = dict(self.module.named_parameters())
        states = random_states()
        output = run(*inputs, **kwargs)
        self.draws = _differ(states, random_states())
        self.outputs = [tensor.detach() for tensor in tensors_in(output)]
        self.values = [leaf for leaf in leaves_of(output) if isinstance(leaf, _SCALARS)]
        self.parameters = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        # Copies, as a recomputation may change them.
        self.buffers = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        self.attributes = _attributes_of(self.module)
        self.slack = 0.0
        with InDouble():  # also while checkpoints are recomputed
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._add_slack, largest(tensor)))  # type: ignore[no-untyped-call]
            value = loss(output)
            if value.requires_grad:  # A backward pass from a tensor would leave the mode.
                torch.autograd.backward(torch.autograd.graph.get_gradient_edge(value))
            self.loss = value.detach().reshape(())
        self.grads = {name: initial[name].grad for name in self._order | initial}
        for i, tensor in enumerate(tensors_in(self.arguments)):
            if tensor.is_leaf:  # as opposed to what a `scatter` of the user's own has computed
                self.grads[f"input {i}"] = tensor.grad
