"""The synchronized layer for timm's batch norm with an activation; imported only where a model has such layers."""

from typing import Any

from timm.layers import BatchNormAct2d
from torch import Tensor

from .layers import SynchronizedBatchNorm2d

__all__ = ["SynchronizedBatchNormAct2d"]


class SynchronizedBatchNormAct2d(BatchNormAct2d, SynchronizedBatchNorm2d):  # type: ignore[misc]
    """A `timm.layers.BatchNormAct2d` that synchronizes: `SynchronizedBatchNorm2d`, then drop and activation."""

    _original = BatchNormAct2d  # what `revert_model` makes of it
    drop: Any
    act: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(SynchronizedBatchNorm2d.forward(self, x)))  # type: ignore[no-any-return]
