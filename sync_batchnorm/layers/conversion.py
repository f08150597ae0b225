"""Converts a model to synchronized layers, and back.

A layer stays the same object; only its class changes, which `object.__setattr__` sets, since a layer may redirect its
own. So every reference to the layer, or to its parameters and buffers, stays valid. What cannot be converted is left as
it is, and `reason_not_converted` says why.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from ..derived import derived_class
from ..messages import check_module, warn
from ..torch_private import BatchNormBase
from ..wrapper import DataParallelWithCallback, _ReplicationMixin, patch, use_devices_of_torch
from .layer import SYNCHRONIZED, SynchronizedBatchNorm, SynchronizedBatchNorm2d, _SynchronizedBatchNorm, sync_options

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Modules = Sequence[tuple[str, nn.Module]]  # all of a model, with their names
Classes = Mapping[type[nn.Module], type[nn.Module]]  # synchronized classes, by the classes that they replace

_PLAIN: dict[type[nn.Module], type[nn.Module]] = {synced: plain for plain, synced in SYNCHRONIZED.items()}
_PLAIN[DataParallelWithCallback] = nn.DataParallel
# What a synchronized layer has beyond a plain one: methods, options, and what conversion and callbacks set on it.
_RESERVED = frozenset(name for name in vars(_SynchronizedBatchNorm) if not hasattr(BatchNormBase, name))
# A class that has its own version of one of these cannot be swapped for another one.
_COMPUTES = ("forward", "__call__", "__getstate__", "__reduce__", "__reduce_ex__")
_InstanceNorm: Any = nn.InstanceNorm1d.__base__  # the class of all instance norms, which has no public name
NOT_REGISTERED = "in a plain list or dict, which torch does not register; use nn.ModuleList or nn.ModuleDict"


def convert_model(
    module: ModuleT,
    *,
    classes: Classes | None = None,
    eps_mode: str | None = None,
    group_size: int | None = None,
    process_group: Any = None,
) -> ModuleT:
    """Synchronize the BatchNorm layers of `module` in place, and return `module`.

    `torch.nn.BatchNorm1d/2d/3d` become `SynchronizedBatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` becomes
    `SynchronizedBatchNorm`, and `torch.nn.DataParallel` becomes `DataParallelWithCallback`. Subclasses with torch's
    `forward`, and timm's `BatchNormAct2d`, become synchronized subclasses of themselves. Only classes and stored
    methods change: modules, parameters, buffers and hooks stay the same objects, also for an existing optimizer.
    Synchronized layers keep their options. `revert_model` undoes this.

    Example:
        >>> model = convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(model[1]).__name__
        'SynchronizedBatchNorm2d'

    Args:
        module: the model, or a single layer.
        classes: synchronized classes by the classes of yours that they replace (without subclasses), for a class with a
            `forward` of its own. See "Classes of your own" on the page "Usage".
        eps_mode, group_size, process_group: as of `SynchronizedBatchNorm`, for converted layers. A
            `torch.nn.SyncBatchNorm` keeps its own `process_group` if none is given.

    Raises:
        TypeError, ValueError: for bad options, before any change. A class in `classes` must be derived from the class
            that it replaces and from a synchronized layer, and define `forward` if the replaced class does.

    Warns:
        UserWarning: once, naming the batch norms that stay as they are, why, and what to do, see "What is not
            converted" on the page "Migrating"; and once for each option that synchronized layers keep.
    """
    check_module(module)
    modules = list(module.named_modules())
    options = sync_options(eps_mode, group_size, process_group)
    classes = {} if classes is None else classes
    _check_classes(classes)
    former = {child: type(child) for _, child in modules}
    reasons = [(name, _convert(child, classes, options)) for name, child in modules]
    layers = {name: child for name, child in modules if isinstance(child, _SynchronizedBatchNorm)}
    names = tuple(name or "the module itself" for name in layers)
    for number, layer in enumerate(layers.values()):
        layer.__dict__.update(_sync_layer=(number, names))
    _rebind_methods(modules, former)
    in_lists = [name for name, layer in unregistered(modules) if not isinstance(layer, _SynchronizedBatchNorm)]
    reasons += [(name, NOT_REGISTERED) for name in in_lists]
    _warn_of(reasons, "convert_model left BatchNorm layers as they are, which do not synchronize")
    _warn_of_kept_options(layers, options)
    return module


def revert_model(module: ModuleT) -> ModuleT:
    """Undo `convert_model` in place, and return `module`.

    All synchronized layers get their former class, or the corresponding one of torch, and lose their options. A
    `DataParallel` keeps each accelerator once, and no CPU replicas. Without a warning, the model no longer needs this
    library.

    Example:
        >>> model = revert_model(convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))))
        >>> type(model[1]).__name__
        'BatchNorm2d'

    Warns:
        UserWarning: once, naming the modules that cannot be reverted, such as those of your own subclasses of this
            library's classes, and why.
    """
    check_module(module)
    modules = list(module.named_modules())
    former = {child: type(child) for _, child in modules}
    reasons = [(name, _revert(child)) for name, child in modules]
    _rebind_methods(modules, former)
    _warn_of(reasons, "revert_model left modules as they are, which need sync_batchnorm")
    return module


def _rebind_methods(modules: Modules, former: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Let methods that were stored, such as `self.norm = self.bn.forward`, be those of the layer's new class."""
    for _, child in modules:
        attributes = vars(child)
        for holder in [attributes, *(value for value in attributes.values() if type(value) in (list, dict))]:
            for key, value in enumerate(holder) if isinstance(holder, list) else list(holder.items()):
                if isinstance(value, (MethodType, functools.partial)):
                    holder[key] = _reassigned(value, former)


def _reassigned(value: Any, former: Mapping[nn.Module, type[nn.Module]]) -> Any:
    """Return a method, or a partial of one, with that of the layer's new class; others as they are."""
    if isinstance(value, functools.partial):
        function = _reassigned(value.func, former)
        return value if function is value.func else functools.partial(function, *value.args, **value.keywords)
    layer = value.__self__ if isinstance(value, MethodType) else None
    if not isinstance(layer, nn.Module) or type(layer) is former.get(layer, type(layer)):
        return value
    name = getattr(value.__func__, "__name__", "")  # a partial has none
    return getattr(layer, name) if value.__func__ is getattr(former[layer], name, None) else value


def _warn_of(reasons: Iterable[tuple[str, str | None]], text: str) -> None:
    """Issue one warning of the modules that were left for a reason, by name; some names are of several layers."""
    left: dict[str, Counter[str]] = {}
    for name, reason in reasons:
        if reason is not None:
            left.setdefault(reason, Counter())[name or "(the module itself)"] += 1
    if left:
        lines = []
        for reason, counts in left.items():
            names = [name if number == 1 else f"{name} ({number} layers)" for name, number in counts.items()]
            lines.append(f"\n- {', '.join(names)}: {reason}")
        warn(f"{text}, {sum(map(Counter.total, left.values()))} in all:{''.join(lines)}")


def _warn_of_kept_options(layers: Mapping[str, nn.Module], options: Mapping[str, Any]) -> None:
    """Warn of layers that were synchronized before, with other options than those that were passed."""
    for option, value in options.items():
        if names := [name or "the module itself" for name, layer in layers.items() if getattr(layer, option) != value]:
            warn(
                f"convert_model left the {option} of layers that are synchronized already ({len(names)}, first: "
                f"{names[0]}); set it on each, as in layer.{option} = {value!r}, or build them with it"
            )


def _check_classes(classes: Classes) -> None:
    """Raise a `TypeError` for a class that cannot stand for another one, before anything is changed."""
    if not isinstance(classes, Mapping):
        raise TypeError(
            f"expected classes as a dict from your classes to synchronized ones, but got {classes!r}; pass for example "
            "{NormAct: SynchronizedNormAct}"
        )
    for plain, synced in classes.items():
        plain_name, synced_name = (cls.__name__ if isinstance(cls, type) else repr(cls) for cls in (plain, synced))
        are_types = isinstance(plain, type) and isinstance(synced, type) and plain is not synced
        is_right = are_types and issubclass(synced, plain) and issubclass(synced, _SynchronizedBatchNorm)
        if is_right and synced.forward is _SynchronizedBatchNorm.forward:
            is_right = plain.forward is BatchNormBase.forward
        if not is_right:
            advice = f"derive one, as in class Synchronized{plain_name}({plain_name}, SynchronizedBatchNorm2d)"
            raise TypeError(
                f"expected a synchronized subclass that does what {plain_name} does, but got {synced_name}; "
                f"{'leave it out, as convert_model has one' if plain in SYNCHRONIZED else advice}"
            )


def _convert(layer: nn.Module, classes: Classes, options: dict[str, Any]) -> str | None:
    """Convert one module, unless it is synchronized already or no batch norm; return why if it cannot be converted."""
    cls: Any = type(layer)
    if isinstance(layer, nn.DataParallel):
        patch(layer)
    reason = reason_not_converted(layer, classes)
    if reason is not None or not _is_left_to_convert(layer, classes):
        return reason
    base: Any = _SynchronizedAct if _is_of_timm(cls) else _kind_of(cls) or _SynchronizedBatchNorm
    synced = classes.get(cls) or SYNCHRONIZED.get(cls) or derived_class(cls, base)
    object.__setattr__(layer, "__class__", synced)
    if "process_group" in options and cls is nn.SyncBatchNorm:
        layer.__dict__.update(_former_process_group=layer.process_group)
    if cls in classes:
        layer.__dict__.update(_former_class=cls)
    layer.__dict__.update(options)
    return None


class _SynchronizedAct(SynchronizedBatchNorm2d):
    """The base of the class that replaces timm's."""

    def forward(self, input: Tensor) -> Any:
        return self.act(self.drop(super().forward(input)))  # type: ignore[operator]


def _revert(module: nn.Module) -> str | None:
    """Give a module its former class, if it has one of this library; return why if that is not possible."""
    if not isinstance(module, (_SynchronizedBatchNorm, _ReplicationMixin)):
        return None
    cls, state = type(module), module.__dict__
    plain = state.get("_former_class") or _PLAIN.get(cls) or vars(cls).get("_sync_original")
    if is_parametrized(module):
        return f"{cls.__name__} is parametrized; remove its parametrizations first"
    if plain is None:
        return f"{cls.__name__} is derived from a class of sync_batchnorm; give it the class that you want, by hand"
    object.__setattr__(module, "__class__", plain)
    if isinstance(module, nn.DataParallel):
        use_devices_of_torch(module)
        return None
    group = state.get("_former_process_group", state.get("process_group"))
    for name in _RESERVED:
        state.pop(name, None)
    if plain is nn.SyncBatchNorm:
        state["process_group"] = group
    return None


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Let `torch.nn.BatchNorm1d/2d/3d` build synchronized layers while this context is open.

    In the whole process, each new layer is converted as by `convert_model`, even in code with ``from torch.nn import
    BatchNorm2d``. ``nn.LazyBatchNorm1d/2d/3d`` and `torch.nn.SyncBatchNorm` stay. If the code that builds the model
    checks ``type(layer)`` or sets a layer's `forward`, convert the finished model instead. Contexts may be nested; only
    one thread at a time may open them.

    Example:
        >>> with patch_sync_batchnorm():
        ...     layer = nn.BatchNorm2d(8)
        >>> type(layer).__name__
        'SynchronizedBatchNorm2d'

    Warns:
        UserWarning: if a new layer cannot be converted, and why.
    """
    init, is_open = BatchNormBase.__init__, True

    @functools.wraps(init)
    def __init__(self: BatchNormBase, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # A class that was derived while a context was open keeps this function, which does nothing after that.
        if is_open and not isinstance(self, nn.SyncBatchNorm) and (reason := _convert(self, {}, {})):
            warn(f"patch_sync_batchnorm left a BatchNorm layer as it is, which does not synchronize: {reason}")

    BatchNormBase.__init__ = __init__  # type: ignore[method-assign]
    try:
        yield
    finally:
        BatchNormBase.__init__, is_open = init, False  # type: ignore[method-assign]


def reason_not_converted(layer: nn.Module, classes: Classes) -> str | None:
    """Return why a batch norm that does not synchronize cannot be converted, and what to do; None for all others."""
    cls = type(layer)
    if isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name:
        return f"{layer.original_name} is compiled by TorchScript; convert the model that was compiled instead"
    if not _is_left_to_convert(layer, classes):
        return None
    reason = _reason_to_leave(layer, cls in classes or _is_of_timm(cls))
    return None if reason is None else f"{cls.__name__} {reason}"


def _is_left_to_convert(layer: nn.Module, classes: Classes) -> bool:
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
    if method := next((name for name in _COMPUTES if name in vars(layer)), None):
        return (
            f"has a {method} of its own, set on the object; convert the model before, or put a torch.nn.BatchNorm there"
        )
    base = nn.SyncBatchNorm if cls is nn.SyncBatchNorm else BatchNormBase
    method = next((name for name in _COMPUTES if getattr(cls, name) is not getattr(base, name)), None)
    if method is not None and not has_class:
        return _reason_to_leave_class(cls, method)
    expected = {"process_group"} if cls is nn.SyncBatchNorm else set()
    if clashes := sorted(name for name in _RESERVED - expected if hasattr(cls, name) or hasattr(layer, name)):
        return f"has a {clashes[0]} of its own, a name that synchronized layers need; rename it"
    return None


def _reason_to_leave_class(cls: type[nn.Module], method: str) -> str:
    """Return why the layers of a class with that method of its own cannot be converted, and what to do about it."""
    if issubclass(cls, nn.SyncBatchNorm):
        return "is derived from torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"
    name, kind = cls.__name__, (_kind_of(cls) or SynchronizedBatchNorm).__name__
    synced = f"Synchronized{name}"
    if synced == kind:  # a class of the user that has the name of torch's
        name, synced = f"{cls.__module__}.{name}", f"My{kind}"
    write = f"write class {synced}({name}, {kind})"
    call = f'call convert_model(model, classes={{{name}: {synced}}}), see "Classes of your own"'
    if issubclass(cls, BatchNormBase):
        formula = 'for another formula, use sync_moments, see "Norms of your own"'
        return f"has a {method} of its own; {write}, in which {kind}.forward computes the norm, and {call}; {formula}"
    return (
        f"has the attributes of a batch norm and a {method} of its own; (1) if it normalizes each sample alone, leave "
        f"it; (2) if it normalizes the batch, {write}, whose forward calls {kind}.forward(self, input), and {call}"
    )


def _is_of_timm(cls: type[nn.Module]) -> bool:
    """Return whether a class is timm's batch norm with an activation, which has a synchronized class here."""
    return (cls.__module__, cls.__name__) == ("timm.layers.norm_act", "BatchNormAct2d")


def _kind_of(cls: type[nn.Module]) -> type[_SynchronizedBatchNorm] | None:
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
