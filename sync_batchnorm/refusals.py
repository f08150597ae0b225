"""How this library warns, and what several files check and refuse. It knows no batch norms except those of torch."""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from .torch_private import BatchNormBase, compiled_module_type, in_transform, modules_of

__all__: list[str] = []

_PACKAGE = __name__.removesuffix("refusals")
_issued: dict[str, object] = {}  # the texts of `warn_once`


def warn(text: str) -> None:
    """Issue a `UserWarning` that names the first line outside this library and torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith((_PACKAGE, "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def warn_once(text: str) -> None:
    """Issue a `UserWarning` once in this process, even if several threads do so at once."""
    mine = object()
    if _issued.setdefault(text, mine) is mine:
        warn(text)


@contextmanager
def silence() -> Iterator[list[str]]:
    """Let nobody warn in this context; yield a list that gets, at the end, what `warn_once` would have said in it."""
    issued, texts = dict(_issued), list[str]()
    _issued.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield texts
    finally:
        texts += _issued
        _issued.clear()
        _issued.update(issued)


def check_number(argument: str, number: object) -> None:
    """Raise an error for a number of replicas that is neither None nor an int of at least 1."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"expected {argument} as a number of replicas, but got {number!r}; pass an int or None")
    if number < 1:
        raise ValueError(f"expected {argument} of at least 1, but got {number}; pass None for all replicas")


def checked_timeout(timeout: float) -> float:
    """Return a number of seconds, or raise an error for what is none, or out of range."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}; pass for example 300.0")
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout must be more than 0 and at most {threading.TIMEOUT_MAX:g} seconds, got {timeout!r}; pass for "
            "example 300.0"
        )
    return float(timeout)


def check_module(module: object) -> None:
    """Raise a `TypeError` for what is not a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}; pass the model itself")


def in_transform_error(what: str) -> RuntimeError:
    """Return the error for a call of `what` inside a transform of `torch.func`, which other threads do not know."""
    return RuntimeError(
        f"expected replicas outside the transforms of torch.func, but got a call of {what} inside one, such as "
        "grad or vmap; use torch.autograd.grad, with create_graph=True for gradients of gradients, or call the wrapped "
        "module itself"
    )


def tracing_error(wrapper: DataParallel[Any]) -> RuntimeError:
    """Return the error for a call that is traced: the graph would hold the outputs of replicas as constants."""
    return RuntimeError(
        "expected replicas outside torch.jit.trace, which does not see what their threads run, but got a call of "
        f"{type(wrapper).__name__} inside, as add_graph of TensorBoard makes; trace parallel.module instead"
    )


def unused_dims_error(wrapper: DataParallel[Any], step: str) -> RuntimeError:
    """Return the error for dimensions that a `scatter` or `gather` of the user's own ignores."""
    dims = "in_dims" if step == "scatter" else "out_dims"
    return RuntimeError(
        f"{dims} of a {type(wrapper).__name__} would be ignored, as its own {step} does not call that of "
        f"DataParallelWithCallback; call super().{step}, or leave out {dims}"
    )


def mixed_packages_error(layer: str) -> RuntimeError:
    """Return the error for a layer of another package, which knows nothing of turns, in replicas that take turns."""
    return RuntimeError(
        f"expected layers and wrapper of one package, but got {layer} in a wrapper of {_PACKAGE.rstrip('.')}, whose "
        "replicas on one device run one at a time, so that one which waits in that layer would keep the others from "
        "running; import both from the same package"
    )


def refuse_older_hook(module: nn.Module, *args: Any) -> None:
    """Raise an error in place of a backward hook of the older kind, in the backward pass of a replica."""
    raise RuntimeError(
        f"expected full backward hooks in replicas, but got {type(module).__name__} with those of "
        "register_backward_hook, which PyTorch calls with a replica that has ended; call register_full_backward_hook "
        "instead"
    )


def check_replicable(wrapper: DataParallel[Any], module: nn.Module) -> None:
    """Raise an error inside a transform or `FakeTensorMode`, or for the first submodule that is from torch.compile."""
    if in_transform():
        raise in_transform_error(type(wrapper).__name__)
    if type(torch.empty(0)).__name__ == "FakeTensor":
        raise RuntimeError(
            "expected replicas outside torch.export and FakeTensorMode, which their threads do not know, but got a "
            f"call of {type(wrapper).__name__} inside; use its module, in eval mode"
        )
    compiled_type = compiled_module_type()
    if compiled_type and any([isinstance(child, compiled_type) for child in modules_of(module)]):
        # A replica of it would share its dictionary, and both would lose their submodules (torch 2.13).
        name = next(name for name, child in module.named_modules() if isinstance(child, compiled_type))
        raise RuntimeError(
            f"expected modules that can be replicated, but got {name or 'the module itself'!r} from torch.compile; "
            "put the original module, its attribute _orig_mod, back in its place, and compile functions that its "
            "forward calls"
        )


def warn_of_plain_layers(wrapper: nn.Module, module: nn.Module) -> None:
    """Warn if a module that has nothing that could synchronize trains batch norms."""
    plain = [name for name, child in module.named_modules() if isinstance(child, BatchNormBase) and child.training]
    if plain:
        layers, do = ("layer", "does") if len(plain) == 1 else ("layers", "do")
        warn_once(
            f"{len(plain)} BatchNorm {layers} in training mode (first: {plain[0] or 'the module itself'!r}) {do} not "
            f"synchronize in a {type(wrapper).__name__}: each replica normalizes with its own chunk of the batch. Call "
            "convert_model(model), or filter this warning if that is intended"
        )
