"""The names that older code imports from here, and that pickles of a `SyncMaster` look up here."""

from .meeting import ReplicaSyncError as ReplicaSyncError
from .meeting import SlavePipe as SlavePipe
from .meeting import SyncMaster as SyncMaster
