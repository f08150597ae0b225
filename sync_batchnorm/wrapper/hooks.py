"""Find the hooks of a model, and the attributes of the model that a hook reads.

A hook that is registered on the model runs in each replica. But the variables of the hook (its `self`, its closure and
its globals) still refer to the model, not to the replica. So a hook may read an attribute of the model, while `forward`
sets the same attribute of the replica.
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
# The search for attributes that a hook reads ends at the first bytecode instruction whose name begins with one of these
# strings, or at the first jump.
_ENDS = ("RETURN_", "RAISE_", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")


def hooks_of(model: nn.Module) -> Iterator[tuple[str, FunctionType, dict[str, Any]]]:
    """Yield (name of the module, function, values of the function's variables by name) for each hook of a model.

    Only hooks written in Python are found. Arguments and local variables of the hook have the value None, because they
    are unknown before its call. The exception is `self` of a bound method.
    """
    kinds = [kind for kind in HOOKS if torch.is_grad_enabled() or "backward" not in kind]
    for module, name in names_of_modules(model).items():
        for hook in [hook for kind in kinds for hook in vars(module).get(kind, {}).values()]:
            method = hook.func if isinstance(hook, partial) else hook
            function, owner = inspect.unwrap(getattr(method, "__func__", method)), getattr(method, "__self__", None)
            # Skip a hook if it is not written in Python, or if a variable of its closure is not set yet.
            with suppress(TypeError, ValueError):
                outside, code = inspect.getclosurevars(function), function.__code__
                local = {**dict.fromkeys((*code.co_varnames, *code.co_cellvars)), **outside.nonlocals}
                yield name, function, {**outside.globals, **local, **dict.fromkeys(code.co_varnames[:1], owner)}


def reads_of(function: FunctionType, variables: Mapping[str, Any]) -> set[tuple[nn.Module, str]]:
    """Return (module, attribute name) for each attribute that a hook certainly reads in every call.

    The search begins at modules that are values of the hook's variables. Only reads at the start of the hook's code are
    certain. So the search ends at the first branch, and at the first assignment to an attribute or an outer variable.
    It also ends at the first use of a module's method, because the method could set attributes.
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
