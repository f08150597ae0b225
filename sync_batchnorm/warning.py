"""Warnings that name the line of the caller, and the set of modules that were warned of already.

A warning is issued in the thread of the caller or of a replica, inside of calls of torch and of this library whose
number differs between versions. So the caller is the nearest frame of another package. Torch is not imported here.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any
from weakref import ReferenceType, ref

__all__: list[str] = []

# The packages whose frames are skipped: also what of the standard library is between them, or starts a thread.
_BETWEEN = frozenset((__name__.partition(".")[0], "torch", "contextlib", "functools", "threading"))


def warn(text: str) -> None:
    """Issue a `UserWarning` that names the line outside of torch and this library that has called one of them."""
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
        """Add `module`; return whether it was new. If several threads add it at once, only one gets True."""
        key = id(module._forward_hooks)
        seen = ref(module._forward_hooks, lambda _: self._found.pop(key, None))
        return self._found.setdefault(key, seen) is seen
