"""Convert the batch norms of a model to synchronized layers, and back.

The obvious way is to build a new layer, and to put it in place of the old layer in its parent module. But hooks, shared
layers, stored methods and other references would still belong to the old layer. So each layer stays the same object,
and only its class changes. The class is set by `object.__setattr__`, because a layer's class may override
`__setattr__`.

A batch norm whose class computes something else than torch's batch norm is not converted. For such a layer,
`reason_not_converted` returns a text with the reason and the remedy.
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
from ..wrapper.data_parallel import (
    DataParallelWithCallback,
    _ReplicationMixin,
    drop_unsupported_devices,
    patch,
)
from .layer import SYNCHRONIZED, SynchronizedBatchNorm, SynchronizedBatchNorm2d, _SynchronizedBatchNorm, sync_options

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Modules = Sequence[tuple[str, nn.Module]]  # (name, module) for all modules of a model
Classes = Mapping[type[nn.Module], type[nn.Module]]  # maps a user's class to the synchronized class that replaces it

_PLAIN: dict[type[nn.Module], type[nn.Module]] = {synced: plain for plain, synced in SYNCHRONIZED.items()}
_PLAIN[DataParallelWithCallback] = nn.DataParallel
# The names of attributes that synchronized layers add to torch's batch norm: methods, options such as `eps_mode`, and
# values set by a conversion or by replication callbacks.
_RESERVED = frozenset(name for name in vars(_SynchronizedBatchNorm) if not hasattr(BatchNormBase, name))
# If a layer's class overrides one of the following methods, the class cannot be replaced by a synchronized class: the
# layer would lose its own version of the method.
_COMPUTES = ("forward", "__call__", "__getstate__", "__reduce__", "__reduce_ex__")
_InstanceNorm: Any = nn.InstanceNorm1d.__base__  # torch's private base class of all instance norm layers
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
    `forward`, and timm's `BatchNormAct2d`, become synchronized subclasses of themselves. Modules, parameters, buffers
    and hooks stay the same objects.

    Example:
        >>> model = convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(model[1]).__name__
        'SynchronizedBatchNorm2d'

    Args:
        module: the model, or a single layer.
        classes: synchronized classes by the exact classes that they replace, see "Classes of your own" on the page
            "Usage".
        eps_mode, group_size, process_group: as of `SynchronizedBatchNorm`, for converted layers. A
            `torch.nn.SyncBatchNorm` keeps its own `process_group` if none is given.

    Raises:
        TypeError, ValueError: for bad options, before any change. A class in `classes` must be a subclass of the class
            that it replaces, and of a synchronized layer.

    Warns:
        UserWarning: for batch norms that stay as they are, see "What is not converted" on the page "Migrating"; and for
            options that synchronized layers keep.
    """
    check_module(module)
    modules = list(module.named_modules())
    options = sync_options(eps_mode, group_size, process_group)
    classes = {} if classes is None else classes
    _check_classes(classes)
    former_classes = {child: type(child) for _, child in modules}
    reasons = [(name, _convert(child, classes, options)) for name, child in modules]
    layers = {name: child for name, child in modules if isinstance(child, _SynchronizedBatchNorm)}
    names = tuple(name or "the module itself" for name in layers)
    for number, layer in enumerate(layers.values()):
        layer.__dict__.update(_sync_layer=(number, names))
    _rebind_methods(modules, former_classes)
    in_lists = [name for name, layer in unregistered_norms(modules) if not isinstance(layer, _SynchronizedBatchNorm)]
    reasons += [(name, NOT_REGISTERED) for name in in_lists]
    _warn_about(reasons, "convert_model left BatchNorm layers as they are, which do not synchronize")
    _warn_about_kept_options(layers, options)
    return module


def revert_model(module: ModuleT) -> ModuleT:
    """Undo `convert_model` in place, and return `module`.

    Each registered synchronized layer gets back its former class, or becomes a batch norm of torch, and loses its
    options. Each `DataParallel` keeps one replica on each accelerator, and none on the CPU. If no warning is issued,
    and no plain list holds layers, the model no longer needs this library.

    Example:
        >>> model = revert_model(convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))))
        >>> type(model[1]).__name__
        'BatchNorm2d'

    Warns:
        UserWarning: for modules that cannot be reverted, such as your own subclasses of this library's classes.
    """
    check_module(module)
    modules = list(module.named_modules())
    former_classes = {child: type(child) for _, child in modules}
    reasons = [(name, _revert(child)) for name, child in modules]
    _rebind_methods(modules, former_classes)
    _warn_about(reasons, "revert_model left modules as they are, which need sync_batchnorm")
    return module


def _rebind_methods(modules: Modules, former_classes: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Update methods of converted layers that were stored as attributes, as by ``self.norm = self.bn.forward``.

    A bound method that was stored before the conversion still runs the code of the layer's former class. So it is
    replaced by the same method of the layer's new class.
    """
    for _, child in modules:
        attributes = vars(child)
        for holder in [attributes, *(value for value in attributes.values() if type(value) in (list, dict))]:
            for key, value in enumerate(holder) if isinstance(holder, list) else list(holder.items()):
                if isinstance(value, (MethodType, functools.partial)):
                    holder[key] = _rebind(value, former_classes)


def _rebind(value: Any, former_classes: Mapping[nn.Module, type[nn.Module]]) -> Any:
    """If `value` is a bound method of a converted layer, return the same method of the layer's new class.

    If the bound method is inside a `functools.partial`, return a partial of the new method. Return any other value
    unchanged.
    """
    if isinstance(value, functools.partial):
        function = _rebind(value.func, former_classes)
        return value if function is value.func else functools.partial(function, *value.args, **value.keywords)
    layer = value.__self__ if isinstance(value, MethodType) else None
    if not isinstance(layer, nn.Module) or type(layer) is former_classes.get(layer, type(layer)):
        return value
    name = getattr(value.__func__, "__name__", "")  # A bound method may wrap a partial, which has no name.
    return getattr(layer, name) if value.__func__ is getattr(former_classes[layer], name, None) else value


def _warn_about(reasons: Iterable[tuple[str, str | None]], text: str) -> None:
    """Issue one warning that lists all reasons, each with the names of its modules.

    `reasons` yields (name of a module, reason). Pairs without a reason are skipped.

    If a plain list holds several layers, `reasons` contains the name of the list once for each layer. The warning then
    says how many layers the list holds.
    """
    by_reason: dict[str, Counter[str]] = {}
    for name, reason in reasons:
        if reason is not None:
            by_reason.setdefault(reason, Counter())[name or "(the module itself)"] += 1
    if by_reason:
        lines = []
        for reason, counts in by_reason.items():
            names = [name if number == 1 else f"{name} ({number} layers)" for name, number in counts.items()]
            lines.append(f"\n- {', '.join(names)}: {reason}")
        warn(f"{text}, {sum(map(Counter.total, by_reason.values()))} in all:{''.join(lines)}")


def _warn_about_kept_options(layers: Mapping[str, nn.Module], options: Mapping[str, Any]) -> None:
    """Warn about layers that were already synchronized, and therefore do not get the new `options`."""
    for option, value in options.items():
        if names := [name or "the module itself" for name, layer in layers.items() if getattr(layer, option) != value]:
            warn(
                f"convert_model left the {option} of layers that are synchronized already ({len(names)}, first: "
                f"{names[0]}); set it on each, as in layer.{option} = {value!r}, or build them with it"
            )


def _check_classes(classes: Classes) -> None:
    """Raise a `TypeError` if `classes` maps a class of layers to another class that cannot replace it."""
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
    """Convert a module in place if it is an unsynchronized batch norm or a `DataParallel`; skip other modules.

    If the module is a batch norm that cannot be converted, return the reason. In all other cases, return None.
    """
    cls: Any = type(layer)
    if isinstance(layer, nn.DataParallel):
        patch(layer)
    reason = reason_not_converted(layer, classes)
    if reason is not None or not _needs_conversion(layer, classes):
        return reason
    base: Any = _SynchronizedAct if _is_timm_act(cls) else _synchronized_base(cls) or _SynchronizedBatchNorm
    synced = classes.get(cls) or SYNCHRONIZED.get(cls) or derived_class(cls, base)
    object.__setattr__(layer, "__class__", synced)
    if "process_group" in options and cls is nn.SyncBatchNorm:
        layer.__dict__.update(_former_process_group=layer.process_group)
    if cls in classes:
        layer.__dict__.update(_former_class=cls)
    layer.__dict__.update(options)
    return None


class _SynchronizedAct(SynchronizedBatchNorm2d):
    """A synchronized batch norm with an activation: the new base class for timm's `BatchNormAct2d`."""

    def forward(self, input: Tensor) -> Any:
        return self.act(self.drop(super().forward(input)))  # type: ignore[operator]


def _revert(module: nn.Module) -> str | None:
    """Give a converted layer or wrapper the class that it had before the conversion; skip other modules.

    Return None on success, and also for skipped modules. Otherwise, return the reason why the class cannot be restored.
    """
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
        drop_unsupported_devices(module)
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

    Each layer that the process builds meanwhile is converted as by `convert_model`, except ``nn.LazyBatchNorm1d/2d/3d``
    and `torch.nn.SyncBatchNorm`. If the code that builds the model checks ``type(layer)``, convert the finished model
    instead. A layer whose `forward` it sets cannot be converted. Contexts may be nested, but only one thread at a time
    may open them.

    Example:
        >>> with patch_sync_batchnorm():
        ...     layer = nn.BatchNorm2d(8)
        >>> type(layer).__name__
        'SynchronizedBatchNorm2d'

    Warns:
        UserWarning: if a new layer cannot be converted.
    """
    init, is_open = BatchNormBase.__init__, True

    @functools.wraps(init)
    def __init__(self: BatchNormBase, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # This `__init__` may be called after the end of the patch, for example by a class that was defined before the
        # end and refers to it. So convert layers only while `is_open` is True.
        if is_open and not isinstance(self, nn.SyncBatchNorm) and (reason := _convert(self, {}, {})):
            warn(f"patch_sync_batchnorm left a BatchNorm layer as it is, which does not synchronize: {reason}")

    BatchNormBase.__init__ = __init__  # type: ignore[method-assign]
    try:
        yield
    finally:
        BatchNormBase.__init__, is_open = init, False  # type: ignore[method-assign]


def reason_not_converted(layer: nn.Module, classes: Classes) -> str | None:
    """Return the reason why a batch norm cannot be converted, followed by a remedy.

    Return None if the layer can be converted, is synchronized already, or is not a batch norm.
    """
    cls = type(layer)
    if isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name:
        return f"{layer.original_name} is compiled by TorchScript; convert the model that was compiled instead"
    if not _needs_conversion(layer, classes):
        return None
    reason = _reason_of_layer(layer, cls in classes or _is_timm_act(cls))
    return None if reason is None else f"{cls.__name__} {reason}"


def _needs_conversion(layer: nn.Module, classes: Classes) -> bool:
    """Return whether a module is a batch norm that is not synchronized yet, or an instance of a class in `classes`.

    A module whose class is not derived from torch's batch norm still counts as a batch norm if it has the attributes of
    a batch norm, such as `running_mean`. A frozen norm, which has its weight as a buffer, does not count.
    """
    names = layer._buffers.keys() | vars(layer).keys()
    has_attributes = {"num_features", "running_mean", "running_var"} <= names and "weight" not in layer._buffers
    looks_like_one = has_attributes and not isinstance(layer, _InstanceNorm)
    is_batch_norm = isinstance(layer, BatchNormBase) or looks_like_one
    return type(layer) in classes or (is_batch_norm and not isinstance(layer, _SynchronizedBatchNorm))


def _reason_of_layer(layer: nn.Module, has_class: bool) -> str | None:
    """Return the reason why a batch norm layer cannot be converted, or None.

    `has_class` is true if a synchronized class exists for the layer's class. In this case, the layer's class may
    override `forward`.
    """
    cls = type(layer)
    if isinstance(layer, LazyModuleMixin):
        # A lazy layer sets its own class in its first forward pass, even if a state dict was loaded before. So a
        # conversion to a synchronized class would be lost.
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
        return _reason_of_class(cls, method)
    expected = {"process_group"} if cls is nn.SyncBatchNorm else set()
    if clashes := sorted(name for name in _RESERVED - expected if hasattr(cls, name) or hasattr(layer, name)):
        return f"has a {clashes[0]} of its own, a name that synchronized layers need; rename it"
    return None


def _reason_of_class(cls: type[nn.Module], method: str) -> str:
    """Return the reason why a batch norm class that overrides `method` cannot be converted, and a remedy."""
    if issubclass(cls, nn.SyncBatchNorm):
        return "is derived from torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"
    name, kind = cls.__name__, (_synchronized_base(cls) or SynchronizedBatchNorm).__name__
    synced = f"Synchronized{name}"
    if synced == kind:  # The user's class has the same name as a class of torch, for example "BatchNorm2d".
        name, synced = f"{cls.__module__}.{name}", f"My{kind}"
    write = f"write class {synced}({name}, {kind})"
    call = f"call convert_model(model, classes={{{name}: {synced}}})"
    if issubclass(cls, BatchNormBase):
        formula = 'for another formula, use sync_moments, see "Norms of your own"'
        write += f", in which {kind}.forward computes the norm"
        return f'has a {method} of its own; {write}, and {call}, see "Classes of your own"; {formula}'
    return (
        f"has the attributes of a batch norm and a {method} of its own; if it normalizes the batch, {write}, whose "
        f"forward calls {kind}.forward(self, input), and {call}; otherwise leave it"
    )


def _is_timm_act(cls: type[nn.Module]) -> bool:
    """Return whether a class is timm's `BatchNormAct2d`, a batch norm with an activation."""
    return (cls.__module__, cls.__name__) == ("timm.layers.norm_act", "BatchNormAct2d")


def _synchronized_base(cls: type[nn.Module]) -> type[_SynchronizedBatchNorm] | None:
    """Return the synchronized class for torch's batch norms and their subclasses; return None for other classes."""
    return next((SYNCHRONIZED[base] for base in cls.__mro__ if base in SYNCHRONIZED), None)


def unregistered_norms(modules: Modules) -> Iterator[tuple[str, nn.Module]]:
    """Yield (attribute path, layer) for each batch norm in a plain list, tuple or dict of a module.

    Torch does not register layers in plain containers, so `named_modules()` does not find them.
    """
    registered = {child for _, child in modules}
    for name, child in modules:
        for attribute, value in vars(child).items():
            if attribute == "_modules" or not isinstance(value, (list, tuple, dict)):
                continue
            for layer in {layer for held in _modules_in(value) for layer in held.modules()} - registered:
                if isinstance(layer, BatchNormBase):
                    yield f"{name}.{attribute}".strip("."), layer


def _modules_in(container: Any) -> Iterator[nn.Module]:
    """Yield all modules in a list, tuple or dict, including modules in nested lists, tuples and dicts."""
    containers, known = [container], {id(container)}
    for held in containers:  # The loop appends to the list over which it runs, and so visits nested containers, too.
        for item in held.values() if isinstance(held, dict) else held:
            if isinstance(item, nn.Module):
                yield item
            elif isinstance(item, (list, tuple, dict)) and id(item) not in known:
                known.add(id(item))
                containers.append(item)
