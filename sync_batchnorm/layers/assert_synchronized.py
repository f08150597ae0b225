"""Check that all batch norms of a model would synchronize, without running the model.

The check looks at the class of each batch norm, at its mode (training or eval), and at the wrappers around the layer.
For each layer that would not synchronize, the error message contains one reason and its remedy. Layers with the same
reason are listed together.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel

from ..messages import check_module, check_number
from ..processes import active_group
from ..torch_private import BatchNormBase
from ..wrapper.data_parallel import DataParallelWithCallback, _ReplicationMixin
from .conversion import NOT_REGISTERED, Modules, reason_not_converted, unregistered_norms
from .layer import _SynchronizedBatchNorm

__all__ = ["assert_synchronized"]

# Maps each `DataParallel` of a model to the set of all modules inside this `DataParallel`.
Wrappers = Mapping[DataParallel[Any], set[nn.Module]]


def assert_synchronized(
    model: nn.Module, *, replicas: int | None = None, ignore: Collection[type[nn.Module] | str] = ()
) -> None:
    """Raise an error unless all batch norms of `model` are converted, connected and in training mode.

    Call this function in training mode, before you freeze layers, see "Freezing layers" on the page "Usage". The model
    does not run. A wrapper with one device is accepted. A plain norm beside a wrapper is accepted, too, because it gets
    the whole batch. A converted norm outside every wrapper is an error, unless `ignore` names it, or several processes
    exchange.

    Example:
        >>> assert_synchronized(DataParallelWithCallback(SynchronizedBatchNorm2d(8), ["cpu"] * 2))

    Args:
        model: the wrapper, or any module around it.
        replicas: how many replicas a wrapper must make of a large batch, at least; None: any number.
        ignore: classes and names of norms to skip.

    Raises:
        TypeError, ValueError: for bad arguments.
        RuntimeError: with names and reasons, if a batch norm, or a layer with the code of one, would not synchronize;
            if only a plain list, tuple or dict holds BatchNorm layers; or if the model has none.
    """
    check_module(model)
    check_number("replicas", replicas)
    modules = list(model.named_modules())
    norms = {name: module for name, module in modules if _is_norm_to_check(module)}
    _check_ignore(ignore, norms)
    ignored = tuple(entry for entry in ignore if isinstance(entry, type))
    layers = {name: layer for name, layer in norms.items() if name not in ignore and not isinstance(layer, ignored)}
    problems: dict[str, list[str]] = {}  # reason -> names of layers
    for name, why in _find_unsynchronized(layers, modules, replicas or 1):
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


def _check_ignore(ignore: Any, norms: Collection[str]) -> None:
    """Raise an error unless each entry of `ignore` is a class, or the name of a batch norm in the model."""
    if isinstance(ignore, str) or not all(isinstance(entry, (type, str)) for entry in ignore):
        raise TypeError(f"expected ignore as a list of classes and names of norms, but got {ignore!r}")
    if unknown := [entry for entry in ignore if isinstance(entry, str) and entry not in norms]:
        remedy = "name each norm itself, as the error without ignore does"
        raise ValueError(f"expected ignore to name batch norms, but got {unknown}; {remedy}")


def _is_norm_to_check(module: nn.Module) -> bool:
    """Return whether `assert_synchronized` checks a module.

    `assert_synchronized` checks batch norms of torch, and all modules that `convert_model` would warn about.
    """
    # A user's norm class may itself define the replication callback, `__data_parallel_replicate__`. A norm of such a
    # class synchronizes without a conversion.
    is_connected = hasattr(module, "__data_parallel_replicate__")
    return isinstance(module, BatchNormBase) or (reason_not_converted(module, {}) is not None and not is_connected)


def _find_unsynchronized(layers: Mapping[str, nn.Module], modules: Modules, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each layer that would not synchronize.

    Also yield (name, reason) for each attribute that holds batch norms in a plain list or dict: torch does not register
    these layers.
    """
    wrappers = {module: set(module.modules()) for _, module in modules if isinstance(module, DataParallel)}
    for name, layer in layers.items():
        if why := _reason_unsynchronized(layer, wrappers, modules, replicas):
            yield f"{name or 'the model itself'} ({type(layer).__name__})", why
    for name, number in Counter(name for name, _ in unregistered_norms(modules)).items():
        yield f"{name} ({number} BatchNorm {'layer' if number == 1 else 'layers'})", NOT_REGISTERED


def _reason_unsynchronized(layer: nn.Module, wrappers: Wrappers, modules: Modules, replicas: int) -> str | None:
    """Return the reason why a layer would not synchronize, followed by a remedy; return None if it would."""
    enclosing = {wrapper: inside for wrapper, inside in wrappers.items() if layer in inside}
    is_outside = bool(wrappers) and not enclosing
    if isinstance(layer, _SynchronizedBatchNorm):
        return _reason_in_eval(layer, enclosing, modules) or _reason_alone(layer, enclosing, is_outside, replicas)
    if is_outside and active_group(None) is None:
        return None  # A layer outside every wrapper gets the whole batch, because only wrappers split a batch.
    if isinstance(layer, BatchNormBase) and (reason := _reason_in_eval(layer, enclosing, modules)):
        return reason
    if reason := reason_not_converted(layer, {}):
        left = f", here by ignore=[{type(layer).__name__}]"
        return f"convert_model leaves it, because {reason}{'' if isinstance(layer, BatchNormBase) else left}"
    if isinstance(layer, nn.SyncBatchNorm):
        return "it synchronizes processes, not the replicas of one; call convert_model(model)"
    return "it is not synchronized; call convert_model(model)"


def _reason_in_eval(layer: BatchNormBase, wrappers: Wrappers, modules: Modules) -> str | None:
    """Return the reason why a layer would use running statistics in place of batch statistics, or None."""
    # A layer without running statistics uses batch statistics even in eval mode, and its replicas synchronize them.
    if layer.training or (wrappers and layer.running_mean is layer.running_var is None):
        return None
    for name, module in modules:
        if type(module).train is not nn.Module.train and any(child is layer for child in module.modules()):
            return (
                f"it is in eval mode, and {name or 'the model itself'} has a train() of its own "
                f"({type(module).__name__}); if that freezes it on purpose, name it in ignore; if not, change train()"
            )
    # An unconverted layer may stay in eval mode forever, for example in the teacher model of a distillation.
    is_plain = not isinstance(layer, _SynchronizedBatchNorm)
    remedy = "name it in ignore" if is_plain else "call assert_synchronized before you freeze it"
    return f"it is in eval mode; call model.train(), or, if it is frozen on purpose, {remedy}"


def _reason_alone(layer: _SynchronizedBatchNorm, wrappers: Wrappers, is_outside: bool, replicas: int) -> str | None:
    """If a synchronized layer would exchange with too few replicas, return the reason, otherwise None.

    A layer should exchange with all replicas of its wrapper, and with at least `replicas` replicas. With a
    `group_size`, it exchanges only within its group.
    """
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
    # Several wrappers may contain the layer. If the wrappers are nested, only the outermost wrapper makes replicas.
    # Separate wrappers may share a layer.
    inside = [modules - {wrapper} for wrapper, modules in wrappers.items()]
    outermost = [wrapper for wrapper in wrappers if not any(wrapper in modules for modules in inside)]
    numbers: dict[int, Any] = {len(wrapper.device_ids) or 1: wrapper for wrapper in outermost} or {1: None}
    number = min(numbers)
    if number < replicas:
        how = "CPUs only in a DataParallelWithCallback"
        if isinstance(numbers[number], DataParallelWithCallback):
            how = f'as in DataParallelWithCallback(wrapper.module, ["cpu"] * {replicas})'
        return f"its wrapper makes {number} of {replicas} replicas; name more devices, {how}"
    number = max(numbers)
    size = layer.group_size or number
    groups = [list(range(first, min(first + size, number))) for first in range(0, number, size)]
    if len(groups) == 1:
        return None
    return f"its group_size of {size} makes groups {groups} of replicas; set it to None, or leave it if that is meant"
