"""The hooks of a model, the objects that their variables refer to, and the attributes of modules that they read.

A hook of the model runs in each replica, while its `self`, closure and globals refer to the model.
"""

import dis
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from ..torch_private import HOOKS, names_of_modules

__all__: list[str] = []

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ENDS = ("RETURN_", "RAISE_", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")  # how names of instructions begin


def hooks_of(model: nn.Module) -> Iterator[tuple[str, FunctionType, dict[str, Any]]]:
    """Yield for each hook in Python the name of its module, its function, and the values of the function's variables.

    Variables of the call are None, except for `self`.
    """
    kinds = [kind for kind in HOOKS if torch.is_grad_enabled() or "backward" not in kind]
    for module, name in names_of_modules(model).items():
        for hook in [hook for kind in kinds for hook in vars(module).get(kind, {}).values()]:
            method = hook.func if isinstance(hook, partial) else hook
            function, owner = inspect.unwrap(getattr(method, "__func__", method)), getattr(method, "__self__", None)
            with suppress(TypeError, ValueError):  # No Python, or a variable of its closure is not set yet.
                outside, code = inspect.getclosurevars(function), function.__code__
                local = {**dict.fromkeys((*code.co_varnames, *code.co_cellvars)), **outside.nonlocals}
                yield name, function, {**outside.globals, **local, **dict.fromkeys(code.co_varnames[:1], owner)}


def reads_of(function: FunctionType, variables: Mapping[str, Any]) -> set[tuple[nn.Module, str]]:
    """Return modules and names of their attributes that each call of a hook certainly reads from the hook's variables.

    Those are the reads before the first branch, and before the hook sets an attribute or a variable outside of it, or
    uses a method of a module, which could do so.
    """
    reads, owner = set[tuple[nn.Module, str]](), cast(Any, None)
    for step in dis.get_instructions(function):
        name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        is_read = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(owner, nn.Module)
        ends = step.opcode in _JUMPS or step.opname.startswith(_ENDS) or name == "setattr"
        if ends or (is_read and hasattr(type(owner), name)):
            break
        reads |= {(owner, name)} if is_read else set()
        is_variable = "LOAD_FAST" in step.opname or step.opname in ("LOAD_GLOBAL", "LOAD_DEREF")
        owner = owner._modules.get(name) if is_read else variables.get(name) if is_variable else None
    return reads
