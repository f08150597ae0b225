"""Turn the layers of a model into synchronized ones and back, by their class, and nothing else of them."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from sync_batchnorm.batchnorm import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d
from sync_batchnorm.replicate import patch_replication_callback

__all__ = ["convert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}


def convert_model(
    module: ModuleT, *, eps_mode: str | None = None, group_size: int | None = None, process_group: Any = None
) -> ModuleT:
    """Make every `torch.nn.BatchNorm1d/2d/3d` in `module` synchronized, in place, and return `module`."""
    for child in module.modules():
        if type(child) in _SYNCHRONIZED:
            child.__class__ = _SYNCHRONIZED[type(child)]
            child._set_sync_options(eps_mode, group_size, process_group)  # type: ignore[operator]
        elif isinstance(child, nn.DataParallel):
            patch_replication_callback(child)
    return module
