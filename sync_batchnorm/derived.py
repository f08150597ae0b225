"""Derive picklable classes at run time. Each class has two bases: a user's class and a class of this library.

A pickle stores the class of an object by name, and loading the pickle imports this name. Classes derived at run time
cannot be imported by name. So the pickle of an object of a derived class stores the names of the two bases, and a call
of `derive_again`. When the pickle is loaded, `derive_again` derives the class from the two bases again.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__: list[str] = []


class DynamicSubclass(nn.Module):
    """The base of all classes that this library derives at run time, such as the class of a patched object.

    The pickle of an object of such a class names the user's class and the function `derive_again`. It does not name the
    derived class, because Python could not import this class.
    """

    _sync_original: type[nn.Module]  # the user's class
    _sync_base: type[nn.Module]  # the class of this library

    def __init_subclass__(cls) -> None:
        pass  # Do not call `__init_subclass__` of the user's class: it may register each subclass by name.

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = tuple(super().__reduce_ex__(protocol))  # (function, its arguments), and maybe the state
        call = [self._sync_original if item is type(self) else item for item in (reduced[0], *reduced[1])]
        return derive_again, (self._sync_original, self._sync_base, *call), *reduced[2:]


def derive_again(original: Any, base: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Rebuild a pickled module whose class was derived at run time, and return the module.

    The pickle stores `function` and its arguments, which rebuild the module in the user's class, `original`. Then the
    class of the module is replaced by `derived_class(original, base)`. Pickles refer to `derive_again` by name, so do
    not rename it.
    """
    module = function(*args)
    if type(module) is original:
        object.__setattr__(module, "__class__", derived_class(original, base))  # type: ignore[arg-type]
    return module


@functools.lru_cache(maxsize=256)
def derived_class(original: Any, base: Any) -> Any:
    """Return a new class with two base classes: `base`, a class of this library, and `original`, the user's class.

    The derived class keeps the constructor of `original`.
    """

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return derive_again(original, base, super(DynamicSubclass, self).__deepcopy__, memo)

    names = {name: getattr(original, name) for name in ("__module__", "__doc__", "__init__")}
    if hasattr(original, "__deepcopy__"):
        names["__deepcopy__"] = __deepcopy__
    name = original.__name__ if issubclass(base, nn.DataParallel) else f"Synchronized{original.__name__}"
    bases = (DynamicSubclass, base, original, *getattr(base, "_sync_behind", ()))
    return type(name, bases, {**names, "_sync_original": original, "_sync_base": base})
