"""Warnings: the line of the caller that each names, and of which module there was one already.

A warning is made in the thread of the caller or of a replica, behind frames of torch and of this library whose number
differs between versions of both. So the caller is the nearest frame of another package. Torch is not imported here.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any
from weakref import ReferenceType, ref

__all__: list[str] = []

# Torch and this library, and what of the standard library is between them or begins a thread.
_BETWEEN = frozenset((__name__.partition(".")[0], "torch", "contextlib", "functools", "threading"))


def warn(text: str) -> None:
    """Issue a `UserWarning` that names the line where code outside of both has called torch or this library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


class ModuleSet:
    """A set of modules, each together with all its replicas.

    Every forward has new replicas, and nothing may be stored on the user's module. A module and all its replicas have
    the same dictionary of forward hooks, which no deep copy or pickle has.
    """

    def __init__(self) -> None:
        self._found: dict[int, ReferenceType[Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, module: Any) -> bool:
        return id(module._forward_hooks) in self._found

    def add(self, module: Any) -> bool:
        """Add `module`; return whether it was not there, to one caller alone."""
        key = id(module._forward_hooks)
        seen = ref(module._forward_hooks, lambda _: self._found.pop(key, None))
        return self._found.setdefault(key, seen) is seen
