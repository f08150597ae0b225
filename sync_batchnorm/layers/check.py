"""Whether every batch norm of a model would synchronize in its next forward."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel

from ..refusals import check_module, check_number
from ..torch_private import BatchNormBase
from ..wrapper import _ReplicationMixin
from .layer import _SynchronizedBatchNorm

__all__ = ["assert_synchronized"]


def assert_synchronized(model: nn.Module, *, replicas: int | None = None) -> None:
    """Raise an error unless every batch norm of `model` would synchronize in its next forward.

    Call it on the wrapped model, in training mode. The error also names layers that are in eval mode on purpose, like
    those of a frozen backbone. A wrapper of one device is fine: one replica has the whole batch.

    Example:
        >>> assert_synchronized(DataParallelWithCallback(SynchronizedBatchNorm2d(8), ["cpu"] * 2))

    Args:
        model: the wrapper, or whatever contains it.
        replicas: the minimum number of replicas that a wrapper must make of a large batch; None for any.

    Raises:
        TypeError, ValueError: for bad arguments.
        RuntimeError: naming every `torch.nn.BatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` and synchronized layer that
            would normalize with less than the whole batch, with the reason for each; or if there is none of them.
    """
    check_module(model)
    check_number("replicas", replicas)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BatchNormBase)}
    if not layers:
        raise RuntimeError(
            f"expected a model with BatchNorm layers, but torch finds none in {type(model).__name__}; is one in a "
            "plain list? Use nn.ModuleList"
        )
    wrappers = [(module, set(module.modules())) for module in model.modules() if isinstance(module, DataParallel)]
    problems = []
    for name, layer in layers.items():
        around = [wrapper for wrapper, modules in wrappers if layer in modules]
        why = _why_unsynchronized(layer, around, replicas or 1)
        if why is not None:
            problems.append(f"\n  {name or 'the model itself'} ({type(layer).__name__}): {why}")
    if problems:
        found = f"{len(problems)} that would not:{''.join(problems)}"
        raise RuntimeError(f"expected every batch norm of the model to synchronize, but got {found}")


def _why_unsynchronized(layer: BatchNormBase, wrappers: Sequence[DataParallel[Any]], replicas: int) -> str | None:
    if isinstance(layer, nn.SyncBatchNorm):
        return "it synchronizes processes, not the replicas of one; call convert_model(model)"
    if not isinstance(layer, _SynchronizedBatchNorm):
        return "it is not synchronized; call convert_model(model)"
    if not layer.training and not (wrappers and layer.running_mean is layer.running_var is None):
        return "it is in eval mode; call model.train(), or leave it if it is frozen on purpose"
    # Of nested wrappers, the outermost makes the replicas. A layer may also be in several wrappers that are not nested.
    for wrapper in wrappers:
        if not isinstance(wrapper, _ReplicationMixin):
            return f"its {type(wrapper).__name__} does not connect replicas; call patch_replication_callback on it"
    among_processes = layer.group_size is None and layer._active_group() is not None
    if not wrappers and not among_processes:
        return "no wrapper is around it; wrap the model with DataParallelWithCallback"
    number = len(wrappers[0].device_ids if wrappers else ()) or 1
    if number < replicas:
        return f"its wrapper makes {number} of {replicas} replicas; name more devices"
    size = layer.group_size or number
    groups = [list(range(first, min(first + size, number))) for first in range(0, number, size)]
    if len(groups) > 1:
        return (
            f"its group_size of {size} makes groups {groups} of replicas; set it to None, or leave it if that is meant"
        )
    return None
