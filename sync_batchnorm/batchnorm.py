"""The names that older code imports from here, and that older pickles look up here. They live in other files now."""

from .check import assert_synchronized
from .conversion import _mixed as _mixed
from .conversion import convert_model, patch_sync_batchnorm, revert_model
from .layers import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from .layers import _SynchronizedBatchNorm as _SynchronizedBatchNorm

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
