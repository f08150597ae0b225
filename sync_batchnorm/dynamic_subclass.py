"""Subclasses of the user's classes that are made while a program runs: by patching a wrapper, by converting a layer."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__: list[str] = []

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Derive = Callable[[Any], type[nn.Module]]


class DynamicSubclass(nn.Module):
    """The base of these classes. A pickle names the user's class, and loading derives from it again."""

    _original: type[nn.Module]
    _derive: Derive

    def __init_subclass__(cls) -> None:
        pass  # not the user's, which may register classes

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, args, *rest = tuple(super().__reduce_ex__(protocol))
        function, *args = (self._original if item is type(self) else item for item in (function, *args))
        return _rebuild, (self._original, self._derive, function, *args), *rest


def _rebuild(original: type[nn.Module], derive: Derive, function: Callable[..., ModuleT], *args: Any) -> ModuleT:
    return _derived(function(*args), original, derive)


def _derived(module: ModuleT, original: type[nn.Module], derive: Derive) -> ModuleT:
    """Return `module`, and let its class be derived again if it is the original one."""
    if type(module) is original:
        swap_class(module, derive(original))
    return module


def _copy(self: Any, memo: dict[int, Any]) -> Any:
    """Return what the `__deepcopy__` of the user's class returns, synchronized."""
    return _derived(super(DynamicSubclass, self).__deepcopy__(memo), self._original, self._derive)


def make_subclass(name: str, base: type[nn.Module], original: Any, derive: Derive, **attributes: Any) -> Any:
    """Return a class that is derived from `base` and `original`, as ``derive(original)`` does."""
    attributes |= {"__module__": original.__module__, "_original": original, "_derive": staticmethod(derive)}
    if hasattr(original, "__deepcopy__"):
        attributes["__deepcopy__"] = _copy
    return type(name, (DynamicSubclass, base, original), attributes)


def swap_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `cls` the class of `module`, even if `module.__setattr__` sets attributes of another module."""
    object.__setattr__(module, "__class__", cls)
