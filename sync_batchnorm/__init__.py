"""Synchronized batch normalization for `torch.nn.DataParallel`: N devices train to the same numbers as one."""

from sync_batchnorm.batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from sync_batchnorm.check import assert_synchronized
from sync_batchnorm.comm import SlavePipe, SyncMaster
from sync_batchnorm.convert import convert_model, patch_sync_batchnorm, revert_model
from sync_batchnorm.errors import ReplicaSyncError
from sync_batchnorm.replicate import (
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "ReplicaSyncError",
    "SlavePipe",
    "SyncMaster",
    "SynchronizedBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "assert_synchronized",
    "convert_model",
    "execute_replication_callbacks",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "revert_model",
    "set_sbn_eps_mode",
]
