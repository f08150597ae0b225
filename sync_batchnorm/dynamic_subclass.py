"""Subclasses of the user's classes that are made while a program runs: by patching a wrapper, by converting a layer."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__: list[str] = []

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _bare(cls: type[ModuleT], derive: Callable[[type[ModuleT]], type[ModuleT]]) -> ModuleT:
    """Return an object of the class ``derive(cls)``, without attributes."""
    cls = derive(cls)
    return cls.__new__(cls)


class DynamicSubclass(nn.Module):
    """The base of these classes. A pickle names the user's class, and loading derives from it again."""

    _original: type[nn.Module]
    _derive: Callable[[Any], type[nn.Module]]

    def __init_subclass__(cls) -> None:
        pass  # not the user's, which may register classes

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = tuple(super().__reduce_ex__(protocol))
        return _bare, (self._original, self._derive), *rest


def swap_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `cls` the class of `module`, even if `module.__setattr__` sets attributes of another module."""
    object.__setattr__(module, "__class__", cls)
