"""What `torch.compile` and the transforms of `torch.func` cannot contain: calls that exchange with other replicas.

NOTE [compiled callers]: `torch.compiler.disable` breaks the graph of a caller, runs the function, and goes on. But it
imports the compiler, which takes a second. So a function is only disabled when it is called after the compiler was
imported. Before that, attributes that are private to torch tell the compiler the same; without them it breaks the graph
somewhat later, and explains less.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__: list[str] = []

# Whether this thread is inside of a transform of `torch.func`. Private to torch: without it, torch refuses the nodes of
# this library in its own words.
in_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)

P = ParamSpec("P")
R = TypeVar("R")

# What the compiler says with `fullgraph=True`, which is the one case in which anybody has to know.
REASON = (
    "expected a graph to end where a synchronized batch norm meets the other replicas, but got fullgraph=True; "
    "leave that out, or compile the parts between these layers"
)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` as one that is never compiled, whoever calls it."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]
        return (disabled or function)(*args, **kwargs)

    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    return run
