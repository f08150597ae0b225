"""The synchronized layers, the conversion of a model to them and back, and whether all of a model synchronize."""

from .check import assert_synchronized
from .conversion import convert_model, patch_sync_batchnorm, revert_model
from .conversion import why_left as why_left
from .layer import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from .layer import _SynchronizedBatchNorm as _SynchronizedBatchNorm

__all__ = [
    "SynchronizedBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "assert_synchronized",
    "convert_model",
    "patch_sync_batchnorm",
    "revert_model",
    "set_sbn_eps_mode",
]
