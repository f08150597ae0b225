"""Say before a long run which layers of a model would not be synchronized, and why."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel

from sync_batchnorm import distributed
from sync_batchnorm.batchnorm import _SynchronizedBatchNorm
from sync_batchnorm.replicate import _Callbacks

__all__ = ["assert_synchronized"]


def assert_synchronized(model: nn.Module) -> None:
    """Check that every batch norm of `model` would synchronize in its next forward; return if so.

    Call it on the wrapped model, in training mode. Layers that are in eval mode on purpose, like those of a frozen
    backbone, are named as well. A wrapper of one device is fine: one replica has the whole batch. Whether every
    replica will call every layer cannot be seen from here; what does not, fails at once in the forward.

    Args:
        model: the wrapper, or whatever contains it.

    Raises:
        RuntimeError: naming every `torch.nn.BatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` and synchronized layer that
            would normalize with less than the whole batch, with the reason for each.
    """
    found = list(_unsynchronized(model))
    if found:
        layers = "".join(
            f"\n  {name or 'the model itself'} ({type(layer).__name__}): {why}" for name, layer, why in found
        )
        raise RuntimeError(
            f"expected every batch norm of the model to synchronize, but got {len(found)} that would not:{layers}"
        )


def _unsynchronized(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    wrappers = [(name, module) for name, module in model.named_modules() if isinstance(module, DataParallel)]
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            # The innermost wrapper comes last. The root has no name, and contains everything.
            around = [module for prefix, module in wrappers if not prefix or name.startswith(prefix + ".")]
            why = _reason(layer, around[-1] if around else None)
            if why is not None:
                yield name, layer, why


def _reason(layer: _BatchNorm, wrapper: DataParallel[nn.Module] | None) -> str | None:
    if isinstance(layer, nn.SyncBatchNorm):
        return "it synchronizes processes, not the replicas of one; call convert_model(model)"
    if not isinstance(layer, _SynchronizedBatchNorm):
        return "it is not synchronized; call convert_model(model)"
    if not layer.training:
        return "it is in eval mode; call model.train(), or leave it if it is frozen on purpose"
    if wrapper is not None and not isinstance(wrapper, _Callbacks):
        return f"its {type(wrapper).__name__} does not connect replicas; call patch_replication_callback on it"
    if wrapper is None and distributed.peers(layer.process_group) is None:
        return "no wrapper is around it; wrap the model with DataParallelWithCallback"
    return None
