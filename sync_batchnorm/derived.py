"""Classes that are derived from a user's class and one of this library at run time, and that can be pickled."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__: list[str] = []


class DynamicSubclass(nn.Module):
    """The base of classes derived from a user's class at run time; a pickle names that class, to derive again."""

    _sync_original: type[nn.Module]
    _sync_base: type[nn.Module]

    def __init_subclass__(cls) -> None:
        pass  # not the user's, which may register classes

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = tuple(super().__reduce_ex__(protocol))  # a function, its arguments, and the state, if there is one
        call = [self._sync_original if item is type(self) else item for item in (reduced[0], *reduced[1])]
        return derive_again, (self._sync_original, self._sync_base, *call), *reduced[2:]


def derive_again(original: Any, base: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return the module that `function` makes, and let its class be derived again if it is the original one."""
    module = function(*args)
    if type(module) is original:
        object.__setattr__(module, "__class__", derived_class(original, base))  # type: ignore[arg-type]
    return module


@functools.lru_cache(maxsize=256)
def derived_class(original: Any, base: Any) -> Any:
    """Return a class that is derived from `base` and `original`, and takes the arguments of `original`."""

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return derive_again(original, base, super(DynamicSubclass, self).__deepcopy__, memo)

    names = {name: getattr(original, name) for name in ("__module__", "__doc__", "__init__")}
    if hasattr(original, "__deepcopy__"):
        names["__deepcopy__"] = __deepcopy__
    name = original.__name__ if issubclass(base, nn.DataParallel) else f"Synchronized{original.__name__}"
    bases = (DynamicSubclass, base, original, *getattr(base, "_sync_behind", ()))
    return type(name, bases, {**names, "_sync_original": original, "_sync_base": base})
