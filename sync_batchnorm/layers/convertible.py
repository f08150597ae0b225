"""Which modules are batch norms, and which of them `convert_model` cannot convert, with the reason."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from ..torch_private import BatchNormBase
from .layer import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    _SynchronizedBatchNorm,
)

__all__: list[str] = []

Classes = Mapping[type[nn.Module], type[nn.Module]]  # synchronized classes, by the classes that they replace

SYNCHRONIZED: dict[type[BatchNormBase], type[_SynchronizedBatchNorm]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNorm,
}
# What a synchronized layer has beyond a plain one: methods, options, and what conversion and callbacks set on it.
RESERVED = frozenset(name for name in vars(_SynchronizedBatchNorm) if not hasattr(BatchNormBase, name))
_InstanceNorm: Any = nn.InstanceNorm1d.__base__  # the class of all instance norms, which has no public name
IN_A_LIST = "in a plain list or dict, which torch does not register; use nn.ModuleList or nn.ModuleDict"
# A class that has its own version of one of these cannot be swapped for another one.
_COMPUTES = ("forward", "__call__", "__getstate__", "__reduce__", "__reduce_ex__")


def why_left(layer: nn.Module, classes: Classes) -> str | None:
    """Return why a batch norm that does not synchronize cannot be converted, and what to do; None for all others."""
    cls = type(layer)
    if isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name:
        return f"{layer.original_name} is compiled by TorchScript; convert the model that was compiled instead"
    if not is_left_to_convert(layer, classes):
        return None
    reason = _reason_to_leave(layer, cls in classes or is_of_timm(cls))
    return None if reason is None else f"{cls.__name__} {reason}"


def is_left_to_convert(layer: nn.Module, classes: Classes) -> bool:
    """Return whether a module is a batch norm that does not synchronize, or of a class that is to be replaced."""
    return type(layer) in classes or (_is_batch_norm(layer) and not isinstance(layer, _SynchronizedBatchNorm))


def _reason_to_leave(layer: nn.Module, has_class: bool) -> str | None:
    """Return why a layer cannot be converted, or None; `has_class`: whether a synchronized class replaces its class."""
    cls = type(layer)
    if isinstance(layer, LazyModuleMixin):
        # Even if a state dict has given it its parameters: its first forward changes its class.
        return "is lazy and has seen no input; run one batch through the model in eval mode, then convert it"
    if is_parametrized(layer):
        return "is parametrized; convert the model before its layers are parametrized"
    method = next((name for name in _COMPUTES if name in vars(layer)), None)
    if method is not None:
        return (
            f"has a {method} of its own, set on the object; convert the model before, or put a torch.nn.BatchNorm there"
        )
    base = nn.SyncBatchNorm if cls is nn.SyncBatchNorm else BatchNormBase
    method = next((name for name in _COMPUTES if getattr(cls, name) is not getattr(base, name)), None)
    if method is not None and not has_class:
        return _reason_to_leave_class(cls, method)
    expected = {"process_group"} if cls is nn.SyncBatchNorm else set()
    clashes = sorted(name for name in RESERVED - expected if hasattr(cls, name) or hasattr(layer, name))
    if clashes:
        return f"has a {clashes[0]} of its own, a name that synchronized layers need; rename it"
    return None


def _reason_to_leave_class(cls: type[nn.Module], method: str) -> str:
    """Return why the layers of a class with that method of its own cannot be converted, and what to do about it."""
    if issubclass(cls, nn.SyncBatchNorm):
        return "is derived from torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"
    name, kind = cls.__name__, (kind_of(cls) or SynchronizedBatchNorm).__name__
    synced = f"Synchronized{name}"
    if synced == kind:  # a class of the user that has the name of torch's
        name, synced = f"{cls.__module__}.{name}", f"My{kind}"
    see = 'see "Classes of your own" on the page "Usage"'
    formula = (
        'for another formula than that of batch norm, use sync_moments, see "Norms of your own" on the page "Extending"'
    )
    if issubclass(cls, BatchNormBase):
        return (
            f"has a {method} of its own; write class {synced}({name}, {kind}) and call convert_model(model, "
            f"classes={{{name}: {synced}}}), {see}; {formula}"
        )
    return (
        f"has the attributes of a batch norm and a {method} of its own; (1) if it normalizes each sample alone, as "
        f"AdaIN does, leave it as it is; (2) if it normalizes the batch, write class {synced}({name}, {kind}), whose "
        f"forward calls {kind}.forward(self, input), and call convert_model(model, classes={{{name}: {synced}}}), "
        f"{see}; {formula}"
    )


def is_of_timm(cls: type[nn.Module]) -> bool:
    """Return whether a class is timm's batch norm with an activation, which has a synchronized class here."""
    return (cls.__module__, cls.__name__) == ("timm.layers.norm_act", "BatchNormAct2d")


def _is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm of torch, or looks like one by its attributes and is not frozen."""
    names = module._buffers.keys() | vars(module).keys()
    has_attributes = {"num_features", "running_mean", "running_var"} <= names and "weight" not in module._buffers
    return isinstance(module, BatchNormBase) or (has_attributes and not isinstance(module, _InstanceNorm))


def kind_of(cls: type[nn.Module]) -> type[_SynchronizedBatchNorm] | None:
    """Return the synchronized class for that class of torch which `cls` is derived from, or None."""
    return next((SYNCHRONIZED[base] for base in cls.__mro__ if base in SYNCHRONIZED), None)


def unregistered(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, list[nn.Module]]:
    """Return the batch norms in lists, tuples and dicts, which torch does not register, by the names of attributes."""
    registered = {child for _, child in modules}
    found: dict[str, list[nn.Module]] = {}
    for name, child in modules:
        for attribute, value in vars(child).items():
            if attribute == "_modules" or not isinstance(value, (list, tuple, dict)):
                continue
            layers = {layer for held in _held(value) for layer in held.modules()} - registered
            found[f"{name}.{attribute}".strip(".")] = [layer for layer in layers if isinstance(layer, BatchNormBase)]
    return {name: layers for name, layers in found.items() if layers}


def _held(container: Any) -> Iterator[nn.Module]:
    """Yield the modules in a list, tuple or dict, and in those inside."""
    containers, seen = [container], {id(container)}
    for held in containers:  # which grows
        for item in held.values() if isinstance(held, dict) else held:
            if isinstance(item, nn.Module):
                yield item
            elif isinstance(item, (list, tuple, dict)) and id(item) not in seen:
                seen.add(id(item))
                containers.append(item)
