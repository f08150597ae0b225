"""The names that older code imports from here, and that pickles of the older library look up here."""

from .layers import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    assert_synchronized,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
    set_sbn_eps_mode,
)

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
