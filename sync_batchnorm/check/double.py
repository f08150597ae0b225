"""The mode in which copies compute: on the CPU, in one dtype, without dropout; it knows the calls that run."""

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from ..torch_private import in_transform

__all__: list[str] = []

_OF_A_BATCH = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS = {*_OF_A_BATCH, "feature_dropout", "native_dropout", "dropout_", "alpha_dropout_", "feature_dropout_"}
# Which argument of these functions is the probability of dropout.
_DROPOUT_P = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}


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
            return self._without_dropout(name, args[0] if args else kwargs["input"])
        trains = name == "batch_norm" and (args[5] if len(args) > 5 else kwargs.get("training", False))
        if trains or name == "sync_batch_norm":
            self._running[-1].norms.add(name)
        kwargs = {key: self.converted(value) for key, value in kwargs.items()}
        if name in _DROPOUT_P:
            args = self._without_probability(name, list(args), kwargs)
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

    def _without_dropout(self, name: str, input: Tensor) -> Any:
        """Return what a function of that name returns if it drops nothing."""
        self.dropped[name] = None
        output = self.converted(input).clone()
        return (output, torch.ones_like(output, dtype=torch.bool)) if "native" in name else output

    def _without_probability(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return positional arguments that make no dropout, and see to it that `kwargs` make none."""
        position = _DROPOUT_P[name]
        given = args[position] if len(args) > position else kwargs.pop("dropout_p", 0.0)
        if given:
            self.dropped[name] = None
        if len(args) > position:
            args[position] = 0.0
        elif name == "multi_head_attention_forward":  # where it has no default
            kwargs["dropout_p"] = 0.0
        return args

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
