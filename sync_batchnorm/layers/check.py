"""Why a batch norm of a model does not synchronize: what its wrapper lacks, and what `convert_model` cannot convert."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DataParallel
from torch.nn.utils.parametrize import is_parametrized

from ..call.processes import active_group
from ..messages import check_module, check_number
from ..torch_private import BatchNormBase
from ..wrapper import DataParallelWithCallback, _ReplicationMixin
from .layer import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    _SynchronizedBatchNorm,
)

__all__ = ["assert_synchronized"]

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
Modules = Sequence[tuple[str, nn.Module]]  # all of a model, with their names
Wrappers = Mapping[DataParallel[Any], set[nn.Module]]  # and all modules inside


def assert_synchronized(
    model: nn.Module, *, replicas: int | None = None, ignore: Collection[type[nn.Module] | str] = ()
) -> None:
    """Raise an error if a batch norm among the modules of `model` is not converted, not connected, or in eval mode.

    Call it on the wrapped model, in training mode, and before you freeze layers: the error also names layers that are
    in eval mode on purpose, see "Freezing layers" on the page "Usage". A wrapper of one device is fine: one replica has
    the whole batch. So has a norm outside every wrapper, which need not be converted unless processes exchange. It runs
    nothing: what a `forward` of yours computes, `assert_matches_one_device` compares. Several replicas that would
    exchange with other processes are noticed only in the next forward pass.

    Example:
        >>> assert_synchronized(DataParallelWithCallback(SynchronizedBatchNorm2d(8), ["cpu"] * 2))

    Args:
        model: the wrapper, or whatever contains it.
        replicas: the minimum number of replicas that a wrapper must make of a large batch; None for any.
        ignore: classes and names of norms that are left out, as those that normalize each sample alone (AdaIN) or that
            are frozen on purpose.

    Raises:
        TypeError, ValueError: for bad arguments.
        RuntimeError: naming every `torch.nn.BatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` and synchronized layer that
            would not synchronize, what has the code of one, and lists, tuples and dicts of layers in attributes, with
            the reason for each; or if the model has no such layer. See "Training that is not synchronized" on the page
            "Troubleshooting".
    """
    check_module(model)
    check_number("replicas", replicas)
    modules = list(model.named_modules())
    _check_ignore(ignore, modules)
    norms = {name: module for name, module in modules if _is_norm_to_check(module)}
    layers = {name: layer for name, layer in norms.items() if not _is_ignored(name, layer, ignore)}
    problems: dict[str, list[str]] = {}  # the names of layers, by the reason
    for name, why in _unsynchronized(layers, modules, replicas or 1):
        problems.setdefault(why, []).append(name)
    if not norms and not problems:
        raise RuntimeError(
            f"expected a model with BatchNorm layers, but found none in {type(model).__name__}; check the model "
            "once it is built; if its norms are your own, with sync_moments, only assert_matches_one_device checks them"
        )
    if problems:
        lines = "".join([f"\n  {', '.join(names)}: {why}" for why, names in problems.items()])
        number = sum(map(len, problems.values()))
        raise RuntimeError(
            f"expected every batch norm of the model to synchronize, but got {number} that would not:{lines}"
        )


def _check_ignore(ignore: Any, modules: Modules) -> None:
    are_right = not isinstance(ignore, str) and all(isinstance(entry, (type, str)) for entry in ignore)
    if not are_right:
        raise TypeError(f"expected ignore as a list of classes and names of norms, but got {ignore!r}")
    missing = [entry for entry in ignore if isinstance(entry, str) and entry not in dict(modules)]
    if missing:
        raise ValueError(f"expected ignore to name modules of the model, but got {missing}; take names from the error")


def _is_ignored(name: str, layer: nn.Module, ignore: Collection[type[nn.Module] | str]) -> bool:
    return name in ignore or isinstance(layer, tuple([entry for entry in ignore if isinstance(entry, type)]))


def _is_norm_to_check(module: nn.Module) -> bool:
    """Return whether a module is a batch norm, or one that `convert_model` would name in a warning."""
    is_connected = hasattr(module, "__data_parallel_replicate__")  # a norm of the user's own
    return isinstance(module, BatchNormBase) or (why_left(module, {}) is not None and not is_connected)


def _unsynchronized(layers: Mapping[str, nn.Module], modules: Modules, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer that would not synchronize, and of attributes with such layers, with the reason."""
    wrappers = {module: set(module.modules()) for _, module in modules if isinstance(module, DataParallel)}
    for name, layer in layers.items():
        why = _why_unsynchronized(layer, wrappers, modules, replicas)
        if why is not None:
            yield f"{name or 'the model itself'} ({type(layer).__name__})", why
    for name, number in Counter(name for name, _ in unregistered(modules)).items():
        yield f"{name} ({number} BatchNorm {'layer' if number == 1 else 'layers'})", IN_A_LIST


def _why_unsynchronized(layer: nn.Module, wrappers: Wrappers, modules: Modules, replicas: int) -> str | None:
    """Return why a layer of a model with these wrappers would not synchronize, and what to do; None if it would."""
    around = {wrapper: inside for wrapper, inside in wrappers.items() if layer in inside}
    is_outside = bool(wrappers) and not around
    if isinstance(layer, _SynchronizedBatchNorm):
        return _why_in_eval(layer, around, modules) or _why_alone(layer, around, is_outside, replicas)
    if is_outside and active_group(None) is None:
        return None  # It gets the whole batch, since only wrappers make replicas.
    reason = why_left(layer, {})
    if reason is not None:
        alone = f"; if it is right alone, pass ignore=[{type(layer).__name__}]"
        return f"convert_model leaves it as it is, because {reason}{'' if isinstance(layer, BatchNormBase) else alone}"
    if isinstance(layer, nn.SyncBatchNorm):
        return "it synchronizes processes, not the replicas of one; call convert_model(model)"
    return "it is not synchronized; call convert_model(model)"


def _why_in_eval(layer: _SynchronizedBatchNorm, wrappers: Wrappers, modules: Modules) -> str | None:
    if layer.training or (wrappers and layer.running_mean is layer.running_var is None):
        return None
    for name, module in modules:
        if type(module).train is not nn.Module.train and any(child is layer for child in module.modules()):
            return (
                f"it is in eval mode, and {name or 'the model itself'} has a train() of its own "
                f"({type(module).__name__}); if that freezes it on purpose, name it in ignore; if not, change train()"
            )
    purpose = "if it is frozen on purpose, call assert_synchronized before you freeze it"
    return f"it is in eval mode; call model.train(), or, {purpose}"


def _why_alone(layer: _SynchronizedBatchNorm, wrappers: Wrappers, is_outside: bool, replicas: int) -> str | None:
    for wrapper in wrappers:
        if not isinstance(wrapper, _ReplicationMixin):
            return f"its {type(wrapper).__name__} does not connect replicas; call patch_replication_callback on it"
    among_processes = layer.group_size is None and layer._active_group() is not None
    if not wrappers and not among_processes:
        if is_outside:
            return (
                "it stands outside every wrapper; on a gathered output that is right, so name it in ignore; elsewhere, "
                "wrap the model with DataParallelWithCallback"
            )
        return "no wrapper is around it; wrap the model with DataParallelWithCallback"
    # Of nested wrappers, the outermost makes the replicas. A layer may also be in several wrappers that are not nested.
    inside = [modules - {wrapper} for wrapper, modules in wrappers.items()]
    outermost = [wrapper for wrapper in wrappers if not any(wrapper in modules for modules in inside)]
    numbers: dict[int, Any] = {len(wrapper.device_ids) or 1: wrapper for wrapper in outermost} or {1: None}
    number = min(numbers)
    if number < replicas:
        how = "CPUs only in a DataParallelWithCallback"
        if isinstance(numbers[number], DataParallelWithCallback):
            how = f'as in DataParallelWithCallback(wrapper.module, ["cpu"] * {replicas})'
        return f"its wrapper makes {number} of {replicas} replicas; name more devices, {how}"
    return _why_in_groups(layer.group_size, max(numbers))


def _why_in_groups(group_size: int | None, number: int) -> str | None:
    size = group_size or number
    groups = [list(range(first, min(first + size, number))) for first in range(0, number, size)]
    if len(groups) == 1:
        return None
    return f"its group_size of {size} makes groups {groups} of replicas; set it to None, or leave it if that is meant"


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
    """Return whether a module is to be converted: of one of these classes, or a batch norm that does not synchronize.

    A batch norm is one of torch, or looks like one by its attributes and is not frozen.
    """
    names = layer._buffers.keys() | vars(layer).keys()
    has_attributes = {"num_features", "running_mean", "running_var"} <= names and "weight" not in layer._buffers
    looks_like_one = has_attributes and not isinstance(layer, _InstanceNorm)
    is_batch_norm = isinstance(layer, BatchNormBase) or looks_like_one
    return type(layer) in classes or (is_batch_norm and not isinstance(layer, _SynchronizedBatchNorm))


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
    write = f"write class {synced}({name}, {kind})"
    call = (
        f'call convert_model(model, classes={{{name}: {synced}}}), see "Classes of your own" on the page "Usage"; for '
        'another formula than that of batch norm, use sync_moments, see "Norms of your own" on the page "Extending"'
    )
    if issubclass(cls, BatchNormBase):
        return f"has a {method} of its own; {write}, in which {kind}.forward computes the norm, and {call}"
    return (
        f"has the attributes of a batch norm and a {method} of its own; (1) if it normalizes each sample alone, as "
        f"AdaIN does, leave it as it is; (2) if it normalizes the batch, {write}, whose forward calls "
        f"{kind}.forward(self, input), and {call}"
    )


def is_of_timm(cls: type[nn.Module]) -> bool:
    """Return whether a class is timm's batch norm with an activation, which has a synchronized class here."""
    return (cls.__module__, cls.__name__) == ("timm.layers.norm_act", "BatchNormAct2d")


def kind_of(cls: type[nn.Module]) -> type[_SynchronizedBatchNorm] | None:
    """Return the synchronized class for that class of torch which `cls` is derived from, or None."""
    return next((SYNCHRONIZED[base] for base in cls.__mro__ if base in SYNCHRONIZED), None)


def unregistered(modules: Modules) -> Iterator[tuple[str, nn.Module]]:
    """Yield the batch norms in lists, tuples and dicts, which torch does not register, by the names of attributes."""
    registered = {child for _, child in modules}
    for name, child in modules:
        for attribute, value in vars(child).items():
            if attribute == "_modules" or not isinstance(value, (list, tuple, dict)):
                continue
            for layer in {layer for held in _held(value) for layer in held.modules()} - registered:
                if isinstance(layer, BatchNormBase):
                    yield f"{name}.{attribute}".strip("."), layer


def _held(container: Any) -> Iterator[nn.Module]:
    """Yield the modules in a list, tuple or dict, and in those inside."""
    containers, known = [container], {id(container)}
    for held in containers:  # which grows
        for item in held.values() if isinstance(held, dict) else held:
            if isinstance(item, nn.Module):
                yield item
            elif isinstance(item, (list, tuple, dict)) and id(item) not in known:
                known.add(id(item))
                containers.append(item)
