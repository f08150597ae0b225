"""Converts a model to synchronized layers, and back.

A layer stays the same object; only ``layer.__class__`` changes. So every reference to the layer, or to its parameters
and buffers, stays valid: in optimizers, hooks, other parents, plain lists. The class alone determines the way back, and
options are attributes that exist only if they were given. A class that computes something of its own cannot be swapped
for another class: such a layer is not converted, and a warning names it.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from sync_batchnorm.layers import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SyncOptions,
    _SynchronizedBatchNorm,
)
from sync_batchnorm.local_parallel import as_device, needs_own_parallel
from sync_batchnorm.replicate import (
    DataParallelWithCallback,
    Derived,
    _Callbacks,
    patch_replication_callback,
    swap_class,
)
from sync_batchnorm.torch_private import BatchNormBase, infer_parameters
from sync_batchnorm.warning import warn

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_SYNCHRONIZED: dict[type[BatchNormBase], type[_SynchronizedBatchNorm]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNorm,
}
_PLAIN: dict[type[nn.Module], type[BatchNormBase]] = {ours: plain for plain, ours in _SYNCHRONIZED.items()}

# The attributes that a synchronized layer has beyond a plain one; on an instance, options or the state of a replica.
_RESERVED = frozenset(name for name in vars(_SynchronizedBatchNorm) if not hasattr(BatchNormBase, name))
_FORMER_GROUP = "_former_process_group"  # of an `nn.SyncBatchNorm` to which `convert_model` gave another group
_FORMER_CLASS = "_former_class"  # of a layer that was converted by the `classes` of `convert_model`
# The attributes that a synchronized layer needs from a layer of another class; some may be None.
_NEEDED = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "eps", "momentum", "num_features")
# The methods by which a layer computes, is copied and is pickled. A class that has its own version of one cannot be
# swapped for another one.
_COMPUTES = ("forward", "__call__", "__getstate__", "__reduce__", "__reduce_ex__")


def convert_model(
    module: ModuleT,
    *,
    classes: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    eps_mode: str | None = None,
    group_size: int | None = None,
    process_group: Any = None,
) -> ModuleT:
    """Make every BatchNorm layer of `module` synchronized, in place, and return `module`.

    `torch.nn.BatchNorm1d/2d/3d` become `SynchronizedBatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` becomes
    `SynchronizedBatchNorm`, a subclass that keeps the forward of torch becomes a synchronized subclass of itself, so
    does timm's `BatchNormAct2d`, and `torch.nn.DataParallel` becomes `DataParallelWithCallback`. Only classes change:
    modules, parameters, buffers, hooks, flags and attributes are the same objects as before. So this may be called
    before or after an optimizer is built, on a submodule or the whole model, and on the module inside of a
    `DistributedDataParallel`. Layers that are already synchronized do not change, nor do their options. `revert_model`
    is the inverse.

    Args:
        module: the model, or a single layer.
        classes: for a class of yours that normalizes and computes more, the synchronized class that replaces it. If the
            forward of `NormAct` calls ``super().forward(input)``, that can be
            ``class SynchronizedNormAct(NormAct, SynchronizedBatchNorm2d): pass``; otherwise it needs a forward
            that computes the same from ``SynchronizedBatchNorm2d.forward(self, input)``. This excludes subclasses.
        eps_mode: an option of the converted layers, like the other two: see `SynchronizedBatchNorm`.
        group_size: see there.
        process_group: see there. None keeps the group of a `torch.nn.SyncBatchNorm`.

    Raises:
        TypeError, ValueError: for bad options, before anything is changed; also if a class in `classes` is not derived
            from both the class that it replaces and a synchronized one, or has the forward of only one of them, and if
            a layer lacks an attribute of a synchronized one, like `num_batches_tracked`.

    Warns:
        UserWarning: one warning that names every layer which was not converted, why, and what to do about it: layers
            with a forward of their own, lazy layers that have seen no input, parametrized and scripted layers.
    """
    modules = _named_modules(module)
    options = SyncOptions(eps_mode, group_size, process_group)
    options.check()
    classes = dict(classes or {})
    _check_classes(classes, modules)
    skipped: dict[str, list[str]] = {}
    for name, child in modules:
        if isinstance(child, nn.DataParallel):
            patch_replication_callback(child)
        elif _is_scripted(child):
            why = f"{child.original_name} is compiled by TorchScript; convert the model that was compiled instead"
            skipped.setdefault(why, []).append(name)
        elif type(child) in classes or (
            isinstance(child, BatchNormBase) and not isinstance(child, _SynchronizedBatchNorm)
        ):
            reason = _make_synchronized(child, classes, options)
            if reason:
                skipped.setdefault(f"{type(child).__name__} {reason}", []).append(name)
    _warn_of(skipped, "convert_model left BatchNorm layers as they are, which do not synchronize")
    return module


def revert_model(module: ModuleT) -> ModuleT:
    """Undo `convert_model` in place and return `module`, which then does not refer to this library any more.

    Layers get back their former class, and lose the options. A module without a former class gets the corresponding
    one: `SynchronizedBatchNorm1d/2d/3d` the `torch.nn.BatchNorm1d/2d/3d`, `SynchronizedBatchNorm` the
    `torch.nn.SyncBatchNorm`, `DataParallelWithCallback` the `torch.nn.DataParallel`. A `DataParallel` cannot run
    replicas on the CPU or several on one device: such `device_ids` are replaced by each accelerator once, or by none
    for the CPU, where the module then runs directly.

    Warns:
        UserWarning: one warning that names every module which cannot be reverted: its class was derived by hand from
            one of this library, so there is no class to go back to, or it is parametrized.
    """
    skipped: dict[str, list[str]] = {}
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
            skipped.setdefault(f"{type(child).__name__} {reason}", []).append(name)
    _warn_of(skipped, "revert_model left modules as they are, which need sync_batchnorm")
    return module


def _named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}; pass the model itself")
    return list(module.named_modules())


def _warn_of(skipped: dict[str, list[str]], what: str) -> None:
    if skipped:
        lines = [
            f"- {', '.join(name or '(the module itself)' for name in names)}: {why}" for why, names in skipped.items()
        ]
        warn(f"{what}, {sum(map(len, skipped.values()))} in all:\n" + "\n".join(lines))


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in module.original_name


def _check_classes(classes: dict[type[nn.Module], type[nn.Module]], modules: list[tuple[str, nn.Module]]) -> None:
    for plain, ours in classes.items():
        plain_name, our_name = (cls.__name__ if isinstance(cls, type) else repr(cls) for cls in (plain, ours))
        if not isinstance(plain, type) or not isinstance(ours, type) or not issubclass(ours, _SynchronizedBatchNorm):
            raise TypeError(
                f"expected a synchronized class to stand for {plain_name}, but got {our_name}; derive one, as in "
                f"class Synchronized{plain_name}({plain_name}, SynchronizedBatchNorm2d)"
            )
        if plain is ours or not issubclass(ours, plain):
            raise TypeError(
                f"expected a subclass of {plain_name} to stand for it, but got {our_name}; derive it from both, as in "
                f"class {our_name}({plain_name}, SynchronizedBatchNorm2d)"
            )
        computing = [cls for cls in ours.__mro__ if "forward" in vars(cls)]
        if computing[0] is _SynchronizedBatchNorm and plain.forward is not BatchNormBase.forward:
            raise TypeError(
                f"expected a class that does what {plain_name} does, but got {our_name}, whose forward is that of a "
                f"synchronized layer alone; name {plain_name} first among its bases, or write a forward"
            )
        for cls in computing:
            if cls is _SynchronizedBatchNorm or not issubclass(plain, cls):
                break  # what a user has written for a synchronized class
            code = getattr(inspect.unwrap(vars(cls)["forward"]), "__code__", None)
            if code is not None and "__class__" not in code.co_freevars:
                plain_name = cls.__name__
                raise TypeError(
                    f"expected a class that synchronizes, but got {our_name} with the forward of {plain_name}, which "
                    "never calls super().forward(input); write a forward that computes the same from "
                    "SynchronizedBatchNorm2d.forward(self, input)"
                )
    for name, child in modules:
        missing = [needed for needed in _NEEDED if type(child) in classes and not hasattr(child, needed)]
        if missing:
            plain_name = type(child).__name__
            raise TypeError(
                f"expected {missing[0]} in every layer of {plain_name}, but got none in "
                f"{name or 'the module itself'}; leave this class out"
            )


def _make_synchronized(
    layer: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]], options: SyncOptions
) -> str | None:
    """Convert one layer, or return why it cannot be converted."""
    given = classes.get(type(layer)) or _of_timm(type(layer))
    reason = _reason_to_leave(layer, given is not None)
    if reason:
        return reason
    if isinstance(layer, LazyModuleMixin):
        # A state dict has given this lazy layer its parameters, but only its first forward would make it an ordinary
        # one. This is what that forward calls (torch 1.8 to 2.13); it makes no parameters.
        infer_parameters(layer, layer, (torch.empty(0),))
    cls = type(layer)
    try:
        swap_class(layer, given or _SYNCHRONIZED.get(cls) or _mixed(cls))  # type: ignore[arg-type]
    except Exception as error:  # whatever a metaclass or `__init_subclass__` of the user's own may raise
        return f"does not take a synchronized subclass ({error}); derive its class from a synchronized one"
    if options.process_group is not None and cls is nn.SyncBatchNorm:
        layer.__dict__[_FORMER_GROUP] = layer.process_group
    if cls in classes:
        layer.__dict__[_FORMER_CLASS] = cls
    layer.__dict__.update(options.given())
    return None


def _of_timm(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the synchronized class for timm's `BatchNormAct2d`, or None for any other class."""
    if cls.__name__ != "BatchNormAct2d" or cls.__module__.partition(".")[0] != "timm":
        return None
    try:
        from sync_batchnorm.timm import SynchronizedBatchNormAct2d
    except ImportError:  # a timm from before `timm.layers`
        return None
    return SynchronizedBatchNormAct2d if issubclass(SynchronizedBatchNormAct2d, cls) else None


def _reason_to_leave(layer: nn.Module, has_class: bool) -> str | None:
    """Return why a layer cannot be converted, or None; `has_class`: whether a synchronized class replaces its class."""
    cls = type(layer)
    if isinstance(layer, LazyModuleMixin) and (infer_parameters is None or layer.has_uninitialized_params()):
        return "is lazy and has seen no input; run one batch through the model, then convert it"
    if is_parametrized(layer):
        return "is parametrized; convert the model before its layers are parametrized"
    if cls is not nn.SyncBatchNorm and isinstance(layer, nn.SyncBatchNorm):
        return "is a subclass of torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"
    own = next((name for name in _COMPUTES if name in vars(layer)), None)
    if own is not None:
        return f"has a {own} of its own, set on the object; convert the model before, or put a torch.nn.BatchNorm there"
    own = next((name for name in _COMPUTES if getattr(cls, name, None) is not _of_torch(cls, name)), None)
    if own is not None and not has_class:
        nearest = next((_SYNCHRONIZED[base] for base in cls.__mro__ if base in _SYNCHRONIZED), SynchronizedBatchNorm)
        ours = f"Synchronized{cls.__name__}"
        return (
            f"has a {own} of its own; write class {ours}({cls.__name__}, {nearest.__name__}) and call "
            f"convert_model(model, classes={{{cls.__name__}: {ours}}}), see its documentation"
        )
    expected = {"process_group", "convert_sync_batchnorm"} if cls is nn.SyncBatchNorm else set()
    clashes = sorted(name for name in _RESERVED - expected if hasattr(cls, name) or hasattr(layer, name))
    if clashes:
        return f"has a {clashes[0]} of its own, a name that synchronized layers need; rename it"
    return None


def _of_torch(cls: type[nn.Module], name: str) -> Any:
    # Python 3.10 has no `__getstate__` to inherit.
    return getattr(nn.SyncBatchNorm if cls is nn.SyncBatchNorm else BatchNormBase, name, None)


def _revert_layer(layer: _SynchronizedBatchNorm) -> bool:
    plain = layer.__dict__.get(_FORMER_CLASS) or _PLAIN.get(type(layer)) or vars(type(layer)).get("_original")
    if plain is None or is_parametrized(layer):
        return False
    swap_class(layer, plain)
    former = layer.__dict__.pop(_FORMER_GROUP, layer.__dict__.get("process_group"))
    for name in (*_RESERVED, _FORMER_CLASS):
        layer.__dict__.pop(name, None)
    if plain is nn.SyncBatchNorm:
        layer.process_group = former
    return True


def _revert_parallel(parallel: _Callbacks) -> bool:
    ours = type(parallel) is DataParallelWithCallback
    plain = nn.DataParallel if ours else vars(type(parallel)).get("_original")
    if plain is None:
        return False
    swap_class(parallel, plain)
    parallel.__dict__.pop("_sync_timeout", None)
    devices = [as_device(device) for device in parallel.device_ids]
    if needs_own_parallel(devices):
        parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]
    return True


@functools.lru_cache(maxsize=256)
def _mixed(cls: type[BatchNormBase]) -> type[_SynchronizedBatchNorm]:
    """Return the synchronized subclass of `cls`, a class with the forward of torch."""
    kinds = [_SYNCHRONIZED[base] for base in cls.__mro__ if base in _SYNCHRONIZED]
    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__init__": cls.__init__,  # so that ``type(layer)(...)`` takes the same arguments as before
        "_original": cls,
        "_derive": staticmethod(_mixed),
    }
    bases = (Derived, *(kinds[:1] or [_SynchronizedBatchNorm]), cls)
    return types.new_class(f"Synchronized{cls.__name__}", bases, {}, lambda ns: ns.update(namespace))


class _Patch:
    """The state of `patch_sync_batchnorm`: how many contexts are open, and what to restore when none is."""

    lock = threading.Lock()
    depth = 0
    before: ClassVar[dict[type[BatchNormBase], Any]] = {}
    skipped: ClassVar[dict[str, int]] = {}  # the number of layers that were not converted, by the reason


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Let `torch.nn.BatchNorm1d/2d/3d` build synchronized layers while this context is open, for building a model.

    Every new layer is converted as by `convert_model`, also in code with ``from torch.nn import BatchNorm2d``, or with
    the class as a default argument. Only the `__init__` of the three classes is replaced, in the whole process, and
    restored when the last of nested or concurrent contexts closes, also by an exception.

    Warns:
        UserWarning: when the last context closes: one warning that names the classes of layers which were not
            converted, and why.
    """
    with _Patch.lock:
        if not _Patch.depth:
            for cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                _Patch.before[cls] = vars(cls).get("__init__")
                cls.__init__ = _synchronizing(cls.__init__)  # type: ignore[method-assign]
        _Patch.depth += 1
    skipped: dict[str, int] = {}
    try:
        yield
    finally:
        with _Patch.lock:
            _Patch.depth -= 1
            if not _Patch.depth:
                for patched, init in _Patch.before.items():
                    if init is not None:
                        patched.__init__ = init  # type: ignore[method-assign]
                    elif "__init__" in vars(patched):  # unless other code has removed it
                        del patched.__init__
                _Patch.before.clear()
                skipped, _Patch.skipped = _Patch.skipped, {}
    if skipped:
        reasons = "".join(f"\n- {number} layers: {why}" for why, number in skipped.items())
        warn(f"patch_sync_batchnorm left BatchNorm layers as they are, which do not synchronize:{reasons}")


def _synchronizing(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: BatchNormBase, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # A class that was derived while a context was open keeps this function, which does nothing after that.
        if _Patch.depth and not isinstance(self, _SynchronizedBatchNorm):
            reason = _make_synchronized(self, {}, SyncOptions())
            if reason:
                why = f"{type(self).__name__} {reason}"
                with _Patch.lock:
                    _Patch.skipped[why] = _Patch.skipped.get(why, 0) + 1

    return __init__
