"""Helpers for several files: warnings that point to the user's line of code, and checks of arguments."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

__all__: list[str] = []

_PACKAGE = __name__.removesuffix("messages")
# Maps the text of each warning that was issued to an object that stands for the call of `warn_once`.
_issued: dict[str, object] = {}
_collected: ContextVar[dict[str, None] | None] = ContextVar("sync_batchnorm_collected_warnings", default=None)


def warn(text: str) -> None:
    """Issue a `UserWarning` that points to the innermost line of code outside this library and torch."""
    if _collected.get() is not None:
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith((_PACKAGE, "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def warn_once(text: str) -> None:
    """Issue a `UserWarning` unless this process has issued the same text before.

    If several threads warn with the same text at the same time, only one warning is issued.
    """
    mine, collected = object(), _collected.get()
    if collected is not None:
        collected[text] = None
    elif _issued.setdefault(text, mine) is mine:
        warn(text)


@contextmanager
def collected_warnings() -> Iterator[dict[str, None]]:
    """Suppress this library's warnings in a `with` block. Yield a dictionary whose keys are the texts of `warn_once`.

    The warnings of replicas that are called in the `with` block are suppressed, too, because replicas run in copies of
    their caller's context. Other threads still issue warnings.
    """
    texts: dict[str, None] = {}
    token = _collected.set(texts)
    try:
        yield texts
    finally:
        _collected.reset(token)


def check_number(argument: str, number: object) -> None:
    """Raise an error unless the number of replicas is None or an int of at least 1."""
    if isinstance(number, bool) or not isinstance(number, (int, type(None))):
        raise TypeError(f"expected {argument} as a number of replicas, but got {number!r}; pass an int or None")
    if number is not None and number < 1:
        raise ValueError(f"expected {argument} of at least 1, but got {number}; pass None for all replicas")


def check_module(module: object) -> None:
    """Raise a `TypeError` unless the argument is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}; pass the model itself")


def in_transform_error(called: str) -> RuntimeError:
    """Return the error for a call inside a transform of `torch.func`, such as `vmap`.

    A transform acts on the caller's thread only. Replicas run in other threads, and would return wrong results.
    """
    return RuntimeError(
        f"expected replicas outside the transforms of torch.func, but got a call of {called} inside one, such as "
        "grad or vmap; use torch.autograd.grad, with create_graph=True for gradients of gradients, or call the wrapped "
        "module itself"
    )
