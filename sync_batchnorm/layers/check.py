"""Whether every batch norm of a model would synchronize in its next forward."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel

from ..messages import check_module, check_number
from ..torch_private import BatchNormBase
from ..wrapper import _ReplicationMixin
from .convertible import IN_A_LIST, unregistered, why_left
from .layer import _SynchronizedBatchNorm

__all__ = ["assert_synchronized"]

Wrappers = Mapping[DataParallel[Any], set[nn.Module]]  # and all modules inside


def assert_synchronized(
    model: nn.Module, *, replicas: int | None = None, ignore: Collection[type[nn.Module] | str] = ()
) -> None:
    """Raise an error unless every batch norm of `model` would synchronize in its next forward pass.

    Call it on the wrapped model, in training mode, and before you freeze layers: the error also names layers that are
    in eval mode on purpose, see "Freezing layers" on the page "Usage". A wrapper of one device is fine: one replica has
    the whole batch. Several replicas in one of several processes are not noticed here, but in the next forward pass.

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
            would normalize with less than the whole batch, what has the code of one, and attributes with layers that
            torch does not register, with the reason for each; or if the model has no such layer. See "Training that is
            not synchronized" on the page "Troubleshooting".
    """
    check_module(model)
    check_number("replicas", replicas)
    modules = list(model.named_modules())
    _check_ignore(ignore, modules)
    wrappers = {module: set(module.modules()) for _, module in modules if isinstance(module, DataParallel)}
    norms = {name: module for name, module in modules if _is_batch_norm(module)}
    layers = {name: layer for name, layer in norms.items() if not _is_ignored(name, layer, ignore)}
    in_lists = unregistered(modules)
    if not norms and not in_lists:
        raise RuntimeError(
            f"expected a model with BatchNorm layers, but found none in {type(model).__name__}; check the model "
            "once it is built; if its norms are your own, with sync_moments, only assert_matches_one_device checks them"
        )
    problems: dict[str, list[str]] = {}  # the names of layers, by the reason
    for name, layer in layers.items():
        around = {wrapper: inside for wrapper, inside in wrappers.items() if layer in inside}
        why = _why_in_eval(layer, around, modules) or _why_unsynchronized(layer, around, replicas or 1)
        if why is not None:
            problems.setdefault(why, []).append(f"{name or 'the model itself'} ({type(layer).__name__})")
    for name, held in in_lists.items():
        number = f"{len(held)} BatchNorm {'layer' if len(held) == 1 else 'layers'}"
        problems.setdefault(IN_A_LIST, []).append(f"{name} ({number})")
    if problems:
        lines = "".join([f"\n  {', '.join(names)}: {why}" for why, names in problems.items()])
        found = f"{sum(map(len, problems.values()))} that would not:{lines}"
        raise RuntimeError(f"expected every batch norm of the model to synchronize, but got {found}")


def _check_ignore(ignore: Any, modules: Sequence[tuple[str, nn.Module]]) -> None:
    are_right = not isinstance(ignore, str) and all(isinstance(entry, (type, str)) for entry in ignore)
    if not are_right:
        raise TypeError(f"expected ignore as a list of classes and names of norms, but got {ignore!r}")
    missing = [entry for entry in ignore if isinstance(entry, str) and entry not in dict(modules)]
    if missing:
        raise ValueError(f"expected ignore to name modules of the model, but got {missing}; take names from the error")


def _is_ignored(name: str, layer: nn.Module, ignore: Collection[type[nn.Module] | str]) -> bool:
    return name in ignore or isinstance(layer, tuple([entry for entry in ignore if isinstance(entry, type)]))


def _is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm, or one that `convert_model` would name in a warning."""
    is_connected = hasattr(module, "__data_parallel_replicate__")  # a norm of the user's own
    return isinstance(module, BatchNormBase) or (why_left(module, {}) is not None and not is_connected)


def _why_unsynchronized(layer: nn.Module, wrappers: Wrappers, replicas: int) -> str | None:
    """Return why a layer in these wrappers would not synchronize, and what to do; None if it would."""
    if isinstance(layer, _SynchronizedBatchNorm):
        return _why_alone(layer, wrappers, replicas)
    reason = why_left(layer, {})
    if reason is not None:
        alone = (
            "" if isinstance(layer, BatchNormBase) else f"; if it is right alone, pass ignore=[{type(layer).__name__}]"
        )
        return f"convert_model leaves it as it is, because {reason}{alone}"
    if isinstance(layer, nn.SyncBatchNorm):
        return "it synchronizes processes, not the replicas of one; call convert_model(model)"
    return "it is not synchronized; call convert_model(model)"


def _why_in_eval(layer: nn.Module, wrappers: Wrappers, modules: Sequence[tuple[str, nn.Module]]) -> str | None:
    if layer.training or not isinstance(layer, _SynchronizedBatchNorm):
        return None
    if wrappers and layer.running_mean is layer.running_var is None:
        return None
    for name, module in modules:
        if type(module).train is not nn.Module.train and any(child is layer for child in module.modules()):
            return (
                f"it is in eval mode, and {name or 'the model itself'} has a train() of its own "
                f"({type(module).__name__}); if that freezes it on purpose, name it in ignore; if not, change train()"
            )
    purpose = "if it is frozen on purpose, call assert_synchronized before you freeze it"
    return f"it is in eval mode; call model.train(), or, {purpose}"


def _why_alone(layer: _SynchronizedBatchNorm, wrappers: Wrappers, replicas: int) -> str | None:
    for wrapper in wrappers:
        if not isinstance(wrapper, _ReplicationMixin):
            return f"its {type(wrapper).__name__} does not connect replicas; call patch_replication_callback on it"
    among_processes = layer.group_size is None and layer._active_group() is not None
    if not wrappers and not among_processes:
        return "no wrapper is around it; wrap the model with DataParallelWithCallback"
    # Of nested wrappers, the outermost makes the replicas. A layer may also be in several wrappers that are not nested.
    inside = [modules - {wrapper} for wrapper, modules in wrappers.items()]
    outermost = [wrapper for wrapper in wrappers if not any(wrapper in modules for modules in inside)]
    numbers = [len(wrapper.device_ids) or 1 for wrapper in outermost] or [1]
    if min(numbers) < replicas:
        return (
            f"its wrapper makes {min(numbers)} of {replicas} replicas; name more devices, CPUs only in a "
            "DataParallelWithCallback"
        )
    return _why_in_groups(layer.group_size, max(numbers))


def _why_in_groups(group_size: int | None, number: int) -> str | None:
    size = group_size or number
    groups = [list(range(first, min(first + size, number))) for first in range(0, number, size)]
    if len(groups) == 1:
        return None
    return f"its group_size of {size} makes groups {groups} of replicas; set it to None, or leave it if that is meant"
