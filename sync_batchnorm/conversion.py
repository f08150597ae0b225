"""The names that older code imports from here, and that pickles of version 2.1 look up here."""

from .layers import convert_model, patch_sync_batchnorm, revert_model
from .layers.conversion import _SynchronizedAct as _SynchronizedAct  # of converted layers of timm

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]
