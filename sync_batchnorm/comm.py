"""Import the public names of `meeting/`, for older code and older pickles that import these names from this file."""

from .meeting import ReplicaSyncError as ReplicaSyncError
from .meeting import SlavePipe as SlavePipe
from .meeting import SyncMaster as SyncMaster
