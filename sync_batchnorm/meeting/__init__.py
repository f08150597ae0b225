"""Where replicas meet: who waits for whom, whose turn it is, what travels, and what breaks a forward pass.

It knows nothing of tensors: messages can be any object.
"""

from .coordinator import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from .coordinator import PATIENCE as PATIENCE
from .coordinator import Coordinator as Coordinator
from .errors import ReplicaSyncError as ReplicaSyncError
from .errors import add_note as add_note
from .errors import without_frames as without_frames
from .pipes import RunningCallback as RunningCallback
from .pipes import SlavePipe as SlavePipe
from .pipes import SyncMaster as SyncMaster
from .pipes import running_callback as running_callback

__all__: list[str] = []
