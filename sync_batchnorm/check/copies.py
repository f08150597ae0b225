"""Copies of a model, and the mode in which they compute: on the CPU, in one dtype, without dropout.

The mode knows which calls of modules run. Parameters are moved, so that they hide nothing.
"""

import copy
import math
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from ..layers import _SynchronizedBatchNorm
from ..torch_private import HOOKS, in_transform

__all__: list[str] = []

_OF_A_BATCH = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS = {*_OF_A_BATCH, "feature_dropout", "native_dropout", "dropout_", "alpha_dropout_", "feature_dropout_"}


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the states of the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    numpy = sys.modules.get("numpy")
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def seed(number: int) -> None:
    """Seed the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


# As a function of torch that modes can override, it reaches the mode of the thread in which it is called.
@wrap_torch_function(lambda name, *_: (name,))
def border(name: str, module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
    """Tell the mode of this thread that a call of a module begins or ends; other threads have none."""


CallKey = tuple[str, int]  # the name of the module, and which of its calls it is


@dataclass
class Call:
    """A call of a module, on one device or in a replica."""

    module: Any
    key: CallKey
    norms: set[str] = field(default_factory=set)  # the names of the functions that it calls itself to normalize a batch
    arguments: Any = None  # on one device, a copy; in a replica, kept while it is a suspect
    output: Any = None  # on one device, a copy
    in_replicas: "list[Call]" = field(default_factory=list)  # the same call, compared with that on one device
    replica: int = 0
    agrees: bool = False  # whether it gets in its replica what it gets on one device
    gap: float = 0.0  # of what it returns there
    where: list[int] = field(default_factory=list)  # which rows of its output differ


class InDouble(TorchFunctionMode):
    """A mode in which torch computes on the CPU, in float64 or another `dtype`, and without dropout."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.dropped = dict[str, None]()  # the functions in which dropout was switched off
        self.failed: tuple[str, Call] | None = None  # the first function that has raised an error, and who called it
        self._running = [Call(None, ("", -1))]
        self._begun: Counter[str] = Counter()  # calls, by the name of the module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is border:
            return self._pass_border(*args)
        if name in _DROPOUTS and _drops(name, args, kwargs):
            self.dropped[name] = None
            output = self.converted(args[0] if args else kwargs["input"]).clone()
            return (output, torch.ones_like(output, dtype=torch.bool)) if "native" in name else output
        trains = name == "batch_norm" and (args[5] if len(args) > 5 else kwargs.get("training", False))
        if trains or name == "sync_batch_norm":
            self._running[-1].norms.add(name)
        kwargs = {key: self.converted(value) for key, value in kwargs.items()}
        if name == "scaled_dot_product_attention":
            if any([*args[4:5], kwargs.pop("dropout_p", 0.0)]):
                self.dropped[name] = None
            args = (*args[:4], *[0.0 for _ in args[4:5]], *args[5:])
        if not name.endswith("_"):  # What works in place gets the tensors themselves.
            args = tuple(map(self.converted, args))
        try:
            return self.converted(func(*args, **kwargs))
        except Exception:
            self.failed = self.failed or (name, self._running[-1])
            raise

    def converted(self, value: Any) -> Any:
        """Return a tensor on the CPU, in the dtype unless it has integers or floats of 8 bits."""
        if not isinstance(value, Tensor):
            return value
        if value.is_complex():
            return value.to("cpu", self.dtype.to_complex())
        has_numbers = value.is_floating_point() and value.element_size() > 1
        return value.to("cpu", self.dtype if has_numbers else value.dtype)

    def _pass_border(self, name: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        if in_transform():  # What is inside of torch.vmap is no tensor of a batch.
            return None
        if not output:
            call = Call(module, (name, self._begun[name]))
            self._begun[name] += 1
            self.begin(call, (args, kwargs))
            self._running.append(call)
            return None
        # A hook may have raised before its module's call began here, or an exception may have ended a call.
        while any(call.module is module for call in self._running):
            call = self._running.pop()
            if call.module is module:
                return self.end(call, *output)
        return None

    def begin(self, call: Call, arguments: Any) -> None:
        """Take note that a call begins."""

    def end(self, call: Call, output: Any) -> Any:
        """Take note that a call ends; return another output, if it shall have one."""


def _drops(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a call of a dropout function drops anything."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    default = kwargs.get("train", "alpha" not in name)
    return bool(p and (args[2] if len(args) > 2 else kwargs.get("training", default)))


# Attributes that are the probability of dropout or of stochastic depth, in any class and in classes of torchvision.
_PROBABILITIES = ("dropout", "layerdrop", "drop_prob", "drop_path_prob", "drop_path_rate", "drop_connect_rate")
_DROPOUT_CLASSES = ("StochasticDepth", "DropBlock2d", "DropBlock3d")


class _Copying(InDouble):
    """The mode in which a model is copied, also its tensors that are no leaves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self.converted(args[0]).detach().clone().requires_grad_(args[0].requires_grad)
        return super().__torch_function__(func, types, args, kwargs)


def copied(tree: Any, dtype: torch.dtype) -> Any:
    """Return a copy of modules or arguments, with tensors in a dtype on the CPU."""
    with torch.no_grad(), _Copying(dtype):  # With gradients, copies of scripted modules would be no leaves.
        return copy.deepcopy(tree)


class Copy:
    """A copy of a model and of its arguments."""

    def __init__(self, model: nn.Module, arguments: Any, dtype: torch.dtype) -> None:
        self.dropped = dict[str, None]()  # attributes with a probability of dropout that was switched off
        self.order = dict[str, None]()  # the names of parameters, as they get gradients in a backward pass
        try:
            self.module, self.arguments = copied((model, arguments), dtype)
            with torch.no_grad(), _Copying(dtype):
                self.module.cpu().to(dtype)
            self._take_over_attributes(model)
        except Exception as error:
            raise RuntimeError(f"{type(model).__name__} cannot be copied to the CPU in {dtype}: {error}") from error
        copies = dict(zip(map(id, model.modules()), self.module.modules(), strict=True))
        for name, module in self.module.named_modules():
            self._prepare(name, module, copies)
            if not isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
                # Before hooks of the user, which may raise.
                module.register_forward_pre_hook(partial(border, name), with_kwargs=True, prepend=True)
                module.register_forward_hook(partial(border, name), with_kwargs=True, always_call=True)

    def _take_over_attributes(self, model: nn.Module) -> None:
        """Give parameters and buffers what the user has set on them, and parameters a hook that notes their order."""
        originals: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in self.module.named_parameters():
            if originals[name].requires_grad:  # which copies of scripted modules do not say
                # It notes the name and not the gradient, which would be a copy.
                parameter.requires_grad_().register_hook(lambda _, name=name: self.order.setdefault(name))
        originals |= dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            vars(tensor).update(vars(originals[name]))

    def unconvert(self) -> None:
        """Give layers that a class of `convert_model(classes=)` has replaced their own class: it says what is right."""
        for module in self.module.modules():
            if isinstance(module, _SynchronizedBatchNorm) and module._former_class is not None:
                object.__setattr__(module, "__class__", module._former_class)

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint has; but a class of the user's own may not count the calls of a norm."""
        names = [name for name in self.module.state_dict(keep_vars=True) if not name.endswith("num_batches_tracked")]
        return {name: buffer for name, buffer in self.module.named_buffers() if name in names}

    def restore(self, buffers: Mapping[str, Tensor]) -> None:
        """Give buffers the values that they had after the forward pass."""
        for name, buffer in self.saved_buffers().items():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.data.copy_(buffers[name])  # On one device, a recomputation updates statistics once more.

    def _prepare(self, name: str, module: nn.Module, copies: Mapping[int, nn.Module]) -> None:
        """Switch off what is a rule and no fault; let hooks that refer to the user's model refer to the copy."""
        self._switch_off_dropout(name, module)
        if isinstance(module, _SynchronizedBatchNorm):
            module.__dict__["eps_mode"] = "plus"  # the rule of one device, where replicas exchange nothing
        if isinstance(module, nn.DataParallel):
            module.device_ids = []  # It runs its module.
        for hooks in [vars(module)[hooks] for hooks in HOOKS if hooks in vars(module)]:
            for number, hook in hooks.items():
                hooks[number] = _rebound(hook, copies)

    def _switch_off_dropout(self, name: str, module: nn.Module) -> None:
        """Switch off dropout and stochastic depth that a module does by an attribute of its own."""
        names = (*_PROBABILITIES, "p") if type(module).__name__ in _DROPOUT_CLASSES else _PROBABILITIES
        for attribute in [*names, *[f"_{name}" for name in names]]:
            if type(vars(module).get(attribute)) is float and vars(module)[attribute]:
                module.__dict__[attribute] = 0.0
                self.dropped[f"{name}.{attribute}".strip(".")] = None

    @torch.no_grad()
    def move_constants(self) -> None:
        """Move parameters that are all equal upwards, as zeros and ones: they may hide what stands before them."""
        for name, parameter in self.module.named_parameters():
            if _trains(parameter) and bool(parameter.eq(first := parameter.flatten()[0]).all()):
                size = (0.1 * first.abs()).clamp(min=0.02) * (0.5 + _numbers_like(parameter, name).abs())
                parameter.add_(-size if first < 0 else size)  # Zeros move upwards: a root of them stays a number.

    @torch.no_grad()
    def move(self, number: int, by: float = 0.01) -> None:
        """Move all parameters that train by about this much of each value, in each pass otherwise."""
        for name, parameter in self.module.named_parameters():
            if _trains(parameter) and by:
                parameter.addcmul_(_numbers_like(parameter, f"{number} {name}"), parameter.abs(), value=by)


def _trains(parameter: Tensor) -> bool:
    is_plain = parameter.layout == torch.strided and parameter.is_floating_point()
    return parameter.requires_grad and is_plain and parameter.numel() > 0


def _numbers_like(parameter: Tensor, name: str) -> Tensor:
    """Return random numbers that follow from a name; they repeat, which takes less time."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    numbers = torch.randn(min(parameter.numel(), 1021), generator=generator, dtype=torch.float64)
    times = math.ceil(parameter.numel() / len(numbers))
    return numbers.to(parameter.dtype).repeat(times)[: parameter.numel()].reshape(parameter.shape)


def _rebound(hook: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Return a hook that refers in its closure to modules of a copy, where it has referred to those of the user."""
    if not modules_in_closure(hook):
        return hook
    cells = [CellType(copies.get(id(cell.cell_contents), cell.cell_contents)) for cell in hook.__closure__]
    made = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, tuple(cells))
    made.__kwdefaults__ = hook.__kwdefaults__
    made.__dict__.update(vars(hook))
    return made


def modules_in_closure(hook: Any) -> list[nn.Module]:
    """Return the modules that a function refers to by its closure; all its variables have values then."""
    cells = hook.__closure__ or () if isinstance(hook, FunctionType) else ()
    with suppress(ValueError):  # of a variable that is not set yet
        return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, nn.Module)]
    return []
