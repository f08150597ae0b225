"""Copies of a model on the CPU, for the check: without dropout, and with parameters that hide nothing."""

import copy
import math
import zlib
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm
from ..torch_private import HOOKS
from .double import InDouble, border

__all__: list[str] = []

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
        self.uncounted: set[str] = set()  # buffers that the user's own class need not change
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
                parameter.requires_grad_().register_hook(partial(self._note, name))
        originals |= dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            vars(tensor).update(vars(originals[name]))

    def _note(self, name: str, grad: Tensor) -> None:
        self.order[name] = None  # and not the gradient, which would be a copy

    def unconvert(self) -> None:
        """Give layers that a class of `convert_model(classes=)` has replaced their own class: it says what is right."""
        for name, module in self.module.named_modules():
            if isinstance(module, _SynchronizedBatchNorm) and module._former_class is not None:
                object.__setattr__(module, "__class__", module._former_class)
                self.uncounted.add(f"{name}.num_batches_tracked".strip("."))

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint has, and that the user's own class would have."""
        names = self.module.state_dict(keep_vars=True).keys() - self.uncounted
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
        if isinstance(module, torch.jit.ScriptModule):
            if "Dropout" in module.original_name and module.training:
                module.eval()
                self.dropped[name] = None
            return
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
    if not isinstance(hook, FunctionType) or not hook.__closure__:
        return []
    try:
        return [cell.cell_contents for cell in hook.__closure__ if isinstance(cell.cell_contents, nn.Module)]
    except ValueError:  # of a variable that is not set yet
        return []
