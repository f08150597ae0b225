"""Keeps calls that exchange with other replicas out of `torch.compile` and the transforms of `torch.func`.

NOTE [compiled callers]: `torch.compiler.disable` breaks the graph of a compiled caller and runs the function
uncompiled. But it imports the compiler, which takes a second. So it is applied in the first call after the compiler was
imported. Before that, an attribute that is private to torch has the same effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from sync_batchnorm.torch_private import compiler_is_imported, mark_uncompiled

__all__: list[str] = []

P = ParamSpec("P")
R = TypeVar("R")

# The compiler shows this text with `fullgraph=True`, the only case in which a user has to know.
REASON = (
    "expected a graph to end where a synchronized batch norm exchanges with other replicas, but got fullgraph=True; "
    "leave that out, or compile the functions between these layers"
)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` as one that is never compiled, whoever calls it."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None and compiler_is_imported():
            disabled = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]
        return (disabled or function)(*args, **kwargs)

    mark_uncompiled(run, REASON)
    return run
