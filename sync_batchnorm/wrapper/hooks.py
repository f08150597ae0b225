"""The attributes of modules that hooks read or set, as far as their bytecode is certain.

A hook of the model runs in each replica, while its `self`, closure and globals refer to the model. An access counts if
the code takes the attribute directly of such a variable, or of a submodule of it; in methods that the hook calls, too.
"""

import dis
import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..torch_private import HOOKS, names_of_modules

__all__: list[str] = []

Access = tuple[nn.Module, str]  # a module, and the name of its attribute
_DEPTH = 3  # of methods that call each other. Arbitrary.
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def hooks_of(model: nn.Module) -> Iterator[tuple[str, Any, set[Access], set[Access]]]:
    """Yield the name of a module, each of its hooks, what every call of the hook reads, and what it may read or set."""
    kinds = [kind for kind in HOOKS if torch.is_grad_enabled() or "backward" not in kind]
    for module, name in names_of_modules(model).items():
        for hook in [hook for kind in kinds for hook in vars(module).get(kind, {}).values()]:
            yield name, hook, *_accesses(hook, _DEPTH)


def _accesses(function: Any, depth: int) -> tuple[set[Access], set[Access]]:
    """Return the attributes that each call of a function reads before it sets them, and all that it may read or set."""
    reads, some, reads_from = set[Access](), set[Access](), dict[int, set[Access]]()
    steps, variables = _code_of(function) if depth else ([], {})
    for i, step in reversed([*enumerate(steps)]):
        name, owner = step.argval, _loaded(steps, i - 1, variables)
        called = _loaded(steps, i - 2, variables) if step.opname == "LOAD_CONST" else None
        kind = "LOAD_ATTR" if called is getattr else "STORE_ATTR" if called is setattr else step.opname
        if step.opname.startswith("RETURN_"):
            reads = set()
        elif step.opcode in _JUMPS and name in reads_from:  # All others jump back, to a loop, which ends at last.
            reads = reads_from[name] if step.opname == "JUMP_FORWARD" else reads & reads_from[name]
        elif kind in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and isinstance(owner, nn.Module):
            method = None if name in vars(owner) else inspect.getattr_static(type(owner), name, None)
            inside = _accesses(MethodType(method, owner) if isinstance(method, FunctionType) else None, depth - 1)
            reads = (reads - {(owner, name)} if kind == "STORE_ATTR" else reads | {(owner, name)}) | inside[0]
            some |= {(owner, name)} | inside[1]
        reads_from[step.offset] = reads
    return reads, some


def _code_of(function: Any) -> tuple[list[dis.Instruction], dict[str, Any]]:
    """Return the instructions of a function, and the values of its variables; None for an argument of its calls."""
    bound, function = (function.args, function.func) if isinstance(function, partial) else ((), function)
    bound = (function.__self__, *bound) if isinstance(function, MethodType) else bound
    function = inspect.unwrap(function)
    with suppress(TypeError, ValueError):  # It is not written in Python, or a variable of its closure is not set yet.
        closure, code = inspect.getclosurevars(function), function.__code__
        arguments = dict(zip(code.co_varnames[: code.co_argcount], bound, strict=False))
        local = {**dict.fromkeys((*code.co_varnames, *code.co_cellvars)), **arguments, **closure.nonlocals}
        return [*dis.get_instructions(code)], {**closure.builtins, **closure.globals, **local}
    return [], {}


def _loaded(steps: Sequence[dis.Instruction], i: int, variables: dict[str, Any]) -> Any:
    """Return the object that an instruction loads for the next one; None if that is not certain."""
    step = steps[i]
    name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    if i >= 0 and step.opname == "LOAD_ATTR" and not steps[i + 1].is_jump_target:
        owner = _loaded(steps, i - 1, variables)
        return (owner._modules if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})).get(name)
    is_variable = step.opname.startswith(("LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF"))
    return variables.get(name) if is_variable and not steps[i + 1].is_jump_target else None
