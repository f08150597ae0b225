"""The wrapper: replicate a module, connect the replicas, run them in threads, and gather their outputs.

Callbacks of the modules decide about exchanges. The wrapper reads one fact about batch norm layers, their mode: it
warns about plain layers in training mode, and refuses training of another replica's layers.
"""

from .arguments import Arguments as Arguments
from .data_parallel import DataParallelWithCallback as DataParallelWithCallback
from .data_parallel import _ReplicationMixin as _ReplicationMixin
from .data_parallel import drop_unsupported_devices as drop_unsupported_devices
from .data_parallel import patch as patch

__all__: list[str] = []
