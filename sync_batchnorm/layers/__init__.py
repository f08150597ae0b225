"""The synchronized layers, conversion to them and back, `assert_synchronized`, and what norms of one's own need."""

from .check import assert_synchronized
from .check import why_left as why_left
from .conversion import convert_model, patch_sync_batchnorm, revert_model
from .layer import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from .layer import _SynchronizedBatchNorm as _SynchronizedBatchNorm
from .moments import merge_messages, sync_moments

__all__ = [
    "SynchronizedBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "assert_synchronized",
    "convert_model",
    "merge_messages",
    "patch_sync_batchnorm",
    "revert_model",
    "set_sbn_eps_mode",
    "sync_moments",
]
