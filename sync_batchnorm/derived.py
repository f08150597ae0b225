"""Derive picklable classes at run time, each from a user's class and a class of this library.

A pickle stores the name of a class, and imports the class by that name. A class derived at run time has no such name.
So a pickle of its instance stores the names of the two bases and calls `derive_again`, which derives the class once
more.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__: list[str] = []


class DynamicSubclass(nn.Module):
    """Base of all classes derived at run time. A pickle names the user's class and `derive_again`."""

    _sync_original: type[nn.Module]  # the user's class
    _sync_base: type[nn.Module]  # the class of this library

    def __init_subclass__(cls) -> None:
        pass  # The method of the user's class may register subclasses.

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = tuple(super().__reduce_ex__(protocol))  # (function, its arguments), and maybe the state
        call = [self._sync_original if item is type(self) else item for item in (reduced[0], *reduced[1])]
        return derive_again, (self._sync_original, self._sync_base, *call), *reduced[2:]


def derive_again(original: Any, base: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Rebuild a module from a pickle: call `function`, and derive the class again if it returned the original class.

    Pickles hold this function by its name.
    """
    module = function(*args)
    if type(module) is original:
        object.__setattr__(module, "__class__", derived_class(original, base))  # type: ignore[arg-type]
    return module


@functools.lru_cache(maxsize=256)
def derived_class(original: Any, base: Any) -> Any:
    """Derive a class from `base` and `original`, with the constructor of `original`; return it."""

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return derive_again(original, base, super(DynamicSubclass, self).__deepcopy__, memo)

    names = {name: getattr(original, name) for name in ("__module__", "__doc__", "__init__")}
    if hasattr(original, "__deepcopy__"):
        names["__deepcopy__"] = __deepcopy__
    name = original.__name__ if issubclass(base, nn.DataParallel) else f"Synchronized{original.__name__}"
    bases = (DynamicSubclass, base, original, *getattr(base, "_sync_behind", ()))
    return type(name, bases, {**names, "_sync_original": original, "_sync_base": base})
