"""Turn the layers of a model into synchronized ones and back, by their class, and nothing else of them.

NOTE [conversion by class]: A layer keeps its identity; all that changes is ``layer.__class__``. So everything that
holds on to the layer, or to its parameters and buffers, stays right: optimizers, hooks, other parents, plain lists. The
class alone tells the way back, and the options are attributes that are there only if they were given. A class that
computes something of its own cannot be swapped for another one: such a layer is left as it is, and named in a warning.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from sync_batchnorm.batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    _SynchronizedBatchNorm,
    check_sync_options,
)
from sync_batchnorm.local_parallel import as_device, is_local
from sync_batchnorm.replicate import DataParallelWithCallback, _Callbacks, patch_replication_callback, swap_class

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_SYNCHRONIZED: dict[type[_BatchNorm], type[_SynchronizedBatchNorm]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNorm,
}
_PLAIN: dict[type[nn.Module], type[_BatchNorm]] = {ours: plain for plain, ours in _SYNCHRONIZED.items()}

# What a synchronized layer has beyond a plain one. On an instance, it is an option or the state of a replica.
_RESERVED = frozenset(name for name in vars(_SynchronizedBatchNorm) if not hasattr(_BatchNorm, name))
_FORMER_GROUP = "_former_process_group"  # of an `nn.SyncBatchNorm` for which `convert_model` was given another one
# What a synchronized layer replaces, and calls no other version of.
_COMPUTES = ("forward", "__call__", "__getstate__", "__reduce__", "__reduce_ex__")


def convert_model(
    module: ModuleT, *, eps_mode: str | None = None, group_size: int | None = None, process_group: Any = None
) -> ModuleT:
    """Make every BatchNorm layer of `module` synchronized, in place, and return `module`.

    `torch.nn.BatchNorm1d/2d/3d` become `SynchronizedBatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` becomes
    `SynchronizedBatchNorm`, a subclass that keeps the forward of torch becomes a synchronized subclass of itself, and
    `torch.nn.DataParallel` becomes `DataParallelWithCallback`. Only classes change: modules, parameters, buffers,
    hooks, flags and attributes are the same objects as before, so it may be called before or after an optimizer is
    built, on a part of a model or all of it, and on the module inside of a `DistributedDataParallel`. Synchronized
    layers that are already there are left alone, their options included. `revert_model` is the way back.

    Args:
        module: the model, or a single layer.
        eps_mode: for the converted layers, see `SynchronizedBatchNorm`. So are the other two.
        group_size: see there.
        process_group: see there. None keeps the group that a `torch.nn.SyncBatchNorm` has.

    Raises:
        TypeError, ValueError: for bad options, before anything is changed.

    Warns:
        UserWarning: one warning that names every layer which was left as it is, why, and what to do about it: layers
            with a forward of their own, lazy layers without an input so far, parametrized and scripted layers.
    """
    modules = _named_modules(module)
    check_sync_options(eps_mode, group_size, process_group)
    left: dict[str, list[str]] = {}
    for name, child in modules:
        if isinstance(child, nn.DataParallel):
            patch_replication_callback(child)
        elif _is_scripted(child):
            why = f"{child.original_name} is compiled by TorchScript; convert the model that was compiled instead"
            left.setdefault(why, []).append(name)
        elif isinstance(child, _BatchNorm) and not isinstance(child, _SynchronizedBatchNorm):
            reason = _synchronize(child, eps_mode, group_size, process_group)
            if reason:
                left.setdefault(f"{type(child).__name__} {reason}", []).append(name)
    _warn_of(left, "convert_model left BatchNorm layers as they are, which do not synchronize")
    return module


def revert_model(module: ModuleT) -> ModuleT:
    """Undo `convert_model` in place and return `module`: nothing in it refers to this library any more.

    Layers get back the class that they had, and lose the options. What never had another class becomes what it
    corresponds to: `SynchronizedBatchNorm1d/2d/3d` the `torch.nn.BatchNorm1d/2d/3d`, `SynchronizedBatchNorm` the
    `torch.nn.SyncBatchNorm`, `DataParallelWithCallback` the `torch.nn.DataParallel`. A `DataParallel` cannot run
    replicas on the CPU or several on one device: one that has such `device_ids` gets each accelerator once instead, or
    none for the CPU, where it then runs its module directly.

    Warns:
        UserWarning: one warning that names every module of a class that somebody derived from those of this library. It
            is left as it is, since there is no class to go back to.
    """
    left: dict[str, list[str]] = {}
    for name, child in _named_modules(module):
        if isinstance(child, _Callbacks):
            reverted = _revert_parallel(child)
        elif isinstance(child, _SynchronizedBatchNorm):
            reverted = _revert_layer(child)
        else:
            continue
        if not reverted:
            reason = "is derived from a class of sync_batchnorm; give it the class that you want, by hand"
            if is_parametrized(child):
                reason = "is parametrized; remove its parametrizations first"
            left.setdefault(f"{type(child).__name__} {reason}", []).append(name)
    _warn_of(left, "revert_model left modules as they are, which need sync_batchnorm")
    return module


def _named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}; pass the model itself")
    return list(module.named_modules())


def _warn_of(left: dict[str, list[str]], what: str) -> None:
    if left:
        lines = [
            f"- {', '.join(name or '(the module itself)' for name in names)}: {why}" for why, names in left.items()
        ]
        warnings.warn(f"{what}, {sum(map(len, left.values()))} in all:\n" + "\n".join(lines), stacklevel=3)


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in module.original_name


def _synchronize(layer: _BatchNorm, eps_mode: str | None, group_size: int | None, process_group: Any) -> str | None:
    """Convert one layer, or return why it is left."""
    reason = _reason_to_leave(layer)
    if reason:
        return reason
    if isinstance(layer, LazyModuleMixin):
        # NOTE [lazy layers with parameters]: Loading a state dict gives a lazy layer its parameters, but only its first
        # forward makes it an ordinary one. This is what that forward calls (torch 1.8 to 2.13); it makes no parameters.
        layer._infer_parameters(layer, (torch.empty(0),))
    cls = type(layer)
    try:
        layer.__class__ = _SYNCHRONIZED.get(cls) or _mixed(cls)  # type: ignore[arg-type]
    except Exception as error:  # whatever a metaclass or `__init_subclass__` of the user's own may raise
        return f"does not take a synchronized subclass ({error}); derive its class from a synchronized one"
    if process_group is not None and cls is nn.SyncBatchNorm:
        layer.__dict__[_FORMER_GROUP] = layer.process_group
    layer._set_sync_options(eps_mode, group_size, process_group)  # type: ignore[operator]
    return None


def _reason_to_leave(layer: _BatchNorm) -> str | None:
    cls = type(layer)
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return "is lazy and has seen no input; run one batch through the model, then convert it"
    if is_parametrized(layer):
        return "is parametrized; convert the model before its layers are parametrized"
    if cls is not nn.SyncBatchNorm and isinstance(layer, nn.SyncBatchNorm):
        return "is a subclass of torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"
    own = [name for name in _COMPUTES if name in vars(layer) or getattr(cls, name, None) is not _of_torch(cls, name)]
    if own:
        nearest = next((_SYNCHRONIZED[base].__name__ for base in cls.__mro__ if base in _SYNCHRONIZED), None)
        return (
            f"has a {own[0]} of its own; derive its class from {nearest or SynchronizedBatchNorm.__name__} and call "
            "super().forward(input), or put a torch.nn.BatchNorm in its place"
        )
    expected = {"process_group", "convert_sync_batchnorm"} if cls is nn.SyncBatchNorm else set()
    clashes = sorted(name for name in _RESERVED - expected if hasattr(layer, name))
    if clashes:
        return f"has a {clashes[0]} of its own, a name that synchronized layers need; rename it"
    return None


def _of_torch(cls: type[_BatchNorm], name: str) -> Any:
    # Python 3.10 has no `__getstate__` to inherit.
    return getattr(nn.SyncBatchNorm if cls is nn.SyncBatchNorm else _BatchNorm, name, None)


def _revert_layer(layer: _SynchronizedBatchNorm) -> bool:
    plain = _PLAIN.get(type(layer)) or vars(type(layer)).get("_unmixed")
    if plain is None:
        return False
    layer.__class__ = plain  # type: ignore[assignment]
    former = layer.__dict__.pop(_FORMER_GROUP, layer.__dict__.get("process_group"))
    for name in _RESERVED:
        layer.__dict__.pop(name, None)
    if plain is nn.SyncBatchNorm:
        layer.process_group = former
    return True


def _revert_parallel(parallel: _Callbacks) -> bool:
    ours = type(parallel) is DataParallelWithCallback
    plain = nn.DataParallel if ours else vars(type(parallel)).get("_unpatched")
    if plain is None:
        return False
    swap_class(parallel, plain)
    parallel.__dict__.pop("_sync_timeout", None)
    devices = [as_device(device) for device in parallel.device_ids]
    if is_local(devices):
        parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]
    return True


class _Mixed(_SynchronizedBatchNorm):
    """Marks the classes that `_mixed` makes; a pickle names the user's class, from which they can be made again."""

    _unmixed: type[_BatchNorm]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = tuple(super().__reduce_ex__(protocol))
        return _bare_mixed, (self._unmixed,), *rest


@functools.lru_cache(maxsize=256)
def _mixed(cls: type[_BatchNorm]) -> type[_Mixed]:
    """Return the synchronized subclass of `cls`, a class that has the forward of torch."""
    kinds = [_SYNCHRONIZED[base] for base in cls.__mro__ if base in _SYNCHRONIZED]
    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__init__": cls.__init__,  # so that ``type(layer)(...)`` takes the arguments that it always took
        "_unmixed": cls,
    }
    return types.new_class(
        f"Synchronized{cls.__name__}", (_Mixed, *kinds[:1], cls), {}, lambda ns: ns.update(namespace)
    )


def _bare_mixed(cls: type[_BatchNorm]) -> _Mixed:
    mixed = _mixed(cls)  # type: ignore[arg-type]
    return mixed.__new__(mixed)


class _Names:
    """Where the three classes are looked up, and what stood there before the first of nested contexts."""

    places = (torch.nn, torch.nn.modules)
    kinds = (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d)
    lock = threading.Lock()
    depth = 0
    before: tuple[tuple[Any, str, Any], ...] = ()


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Let `torch.nn.BatchNorm1d/2d/3d` be the synchronized classes inside of this context, for building a model.

    The names are replaced in `torch.nn` for the whole process, and put back when the last of nested or concurrent
    contexts is left, also by an exception. Code that took a class before, as in ``from torch.nn import BatchNorm2d`` or
    as a default argument, builds plain layers: `convert_model` also finds those.
    """
    with _Names.lock:
        if not _Names.depth:
            names = {ours: plain.__name__ for ours, plain in _PLAIN.items()}
            _Names.before = tuple((p, names[k], getattr(p, names[k])) for p in _Names.places for k in _Names.kinds)
            for place in _Names.places:
                for kind in _Names.kinds:
                    setattr(place, names[kind], kind)
        _Names.depth += 1
    try:
        yield
    finally:
        with _Names.lock:
            _Names.depth -= 1
            if not _Names.depth:
                for place, name, cls in _Names.before:
                    setattr(place, name, cls)
                _Names.before = ()
