"""The names that older code imports from here, and that pickles of whole models made by 2.0 and 2.1 look up here."""

from torch.nn.parallel import DataParallel as DataParallel

from .derived import derive_again as _derived  # noqa: F401 - for pickles
from .wrapper import (
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)
from .wrapper import _ReplicationMixin as _ReplicationMixin

__all__ = ["CallbackContext", "DataParallelWithCallback", "execute_replication_callbacks", "patch_replication_callback"]
