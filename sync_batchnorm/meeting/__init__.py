"""Exchanges between the replicas of one forward pass: replicas wait for each other, take turns, and stop on errors.

The files of this folder do not depend on tensors: the message of a replica can be any object.
"""

from .coordinator import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from .coordinator import PATIENCE as PATIENCE
from .coordinator import Coordinator as Coordinator
from .errors import ReplicaSyncError as ReplicaSyncError
from .errors import strip_frames as strip_frames
from .pipes import RunningCallback as RunningCallback
from .pipes import SlavePipe as SlavePipe
from .pipes import SyncMaster as SyncMaster
from .pipes import running_callback as running_callback

__all__: list[str] = []
