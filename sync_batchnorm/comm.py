"""Names for older code, and for pickles of a `SyncMaster` that import them from this file."""

from .meeting import ReplicaSyncError as ReplicaSyncError
from .meeting import SlavePipe as SlavePipe
from .meeting import SyncMaster as SyncMaster
