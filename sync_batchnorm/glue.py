"""Small pieces between this library and Python or torch: warnings, the compiler, the profiler, derived classes."""

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd import profiler

__all__: list[str] = []

P = ParamSpec("P")
R = TypeVar("R")
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_issued: dict[str, object] = {}  # the texts of `warn_once`


def warn_once(text: str) -> None:
    """Issue a `UserWarning` once in this process, also if several threads do so at once."""
    mine = object()
    if _issued.setdefault(text, mine) is mine:
        warnings.warn(text, stacklevel=3)


REASON = (  # which the compiler shows with `fullgraph=True`
    "expected a graph to end where a synchronized batch norm exchanges with other replicas, but got fullgraph=True; "
    "leave that out, or compile the functions between these layers"
)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` as one that is never compiled: `torch.compiler.disable`, but importing no compiler for it."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]
        return (disabled or function)(*args, **kwargs)

    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)  # what `disable` sets too
    return run


def spans_of_forward() -> Callable[[str], AbstractContextManager[Any]] | None:
    """Return the function that makes the spans of a forward in the profile; None if no profiler runs, in any thread."""
    return _span if profiler._is_profiler_enabled else None


def _span(name: str) -> AbstractContextManager[Any]:
    return profiler.record_function(f"sync_batchnorm: {name}")


def _bare(cls: type[ModuleT], derive: Callable[[type[ModuleT]], type[ModuleT]] | None = None) -> ModuleT:
    """Return an object of the class ``derive(cls)``, without attributes."""
    cls = cls if derive is None else derive(cls)
    return cls.__new__(cls)


class Derived(nn.Module):
    """The base of derived classes. A pickle names the user's class, and loading derives from it again."""

    _original: type[nn.Module]
    _derive: Callable[[Any], type[nn.Module]]

    def __init_subclass__(cls) -> None:
        pass  # not the user's, which may register classes

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = tuple(super().__reduce_ex__(protocol))
        return _bare, (self._original, self._derive), *rest


def swap_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `cls` the class of `module`, also if `module.__setattr__` sets attributes of another module."""
    object.__setattr__(module, "__class__", cls)
