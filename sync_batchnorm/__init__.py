"""Synchronized batch normalization for `torch.nn.DataParallel`: N devices train to the same numbers as one.

This folder is all of the distribution `synchronized-batchnorm`, under the MIT licence in the file LICENSE, which a copy
of the folder keeps.
"""

import sys

__version__ = "2.4.0"

# This folder may be a copy that is on the path, imported without the version checks of pip. So the checks here come
# before the other imports, which would fail with less clear errors. Python 3.6 can still parse this file.
if sys.version_info < (3, 11):  # noqa: UP036
    raise ImportError(
        f"expected Python 3.11 or newer for sync_batchnorm {__version__}, but got Python {sys.version.split()[0]} "
        f"({sys.executable}); run it with a newer Python"
    )

import torch

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
    raise ImportError(
        f"expected torch 2.8 or newer for sync_batchnorm {__version__}, but got torch {torch.__version__} "
        f"({torch.__file__}); run: pip install --upgrade 'torch>=2.8'"
    )

from .batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    assert_synchronized,
    convert_model,
    merge_messages,
    patch_sync_batchnorm,
    revert_model,
    set_sbn_eps_mode,
    sync_moments,
)
from .check import assert_matches_one_device
from .comm import ReplicaSyncError, SlavePipe, SyncMaster
from .replicate import (
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
    "assert_matches_one_device",
    "assert_synchronized",
    "convert_model",
    "execute_replication_callbacks",
    "merge_messages",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "revert_model",
    "set_sbn_eps_mode",
    "sync_moments",
]
