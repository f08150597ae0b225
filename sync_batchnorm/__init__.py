"""Synchronized batch normalization for `torch.nn.DataParallel`: N devices train to the same numbers as one.

This folder is the whole distribution `synchronized-batchnorm`. A copy of it keeps the file LICENSE (MIT).

NOTE [without the interpreter lock]: Free-threaded Python does not have the global interpreter lock (GIL), so this
library never relies on the GIL to protect its state.

Two threads may share four kinds of state. Each kind is guarded in its own way:

- The records of a forward pass, and the states of random generators: by a lock, in the `Coordinator` and in
  `random_states.py`.
- The messages of an exchange: nobody changes a message after it was built. Everything that a backward pass reads is
  complete before the master answers.
- The modules of a replica, with their dictionaries: the caller's thread makes them, and afterwards only the thread of
  the replica uses them.
- The tables of the process: by single operations, with `setdefault` where only one thread may win. Two threads may
  compute the same entry, and either is right. The page "How it works" lists all tables.

Two resources belong to the whole process, and this library cannot guard them with a lock. The first is the garbage
collector: a thread enables the collector again only if the same thread disabled it. The second is the stack frames of
other threads. `Record.stack` reads these frames for the text of a timeout error, although Python 3.13 without the GIL
does not promise that this is safe.

Free-threaded Python counts references by thread, even if it runs with the GIL. If a replica's thread drops the last
reference to an object of the caller's thread, the object is not freed at once. It is freed when the caller's thread
runs next, at most a second later (`_run_threads`).
"""

import sys

__version__ = "2.5.0"

# Check the versions of Python and torch before all other imports, which would fail with less clear errors. Pip checks
# the versions too, but users may copy this folder without pip. Python 3.6 can still parse this file.
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
from .check.assert_matches_one_device import assert_matches_one_device
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
