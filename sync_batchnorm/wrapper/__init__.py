"""The wrapper: makes the replicas of a module, connects them, runs them in threads, and puts their outputs together.

What replicas exchange, and when, is up to the callbacks of the modules. Of batch norm the wrapper knows one thing:
whether a layer trains, so that it can warn of plain layers and refuse layers that do not belong to the replica.
"""

from .arguments import Arguments as Arguments
from .data_parallel import DataParallelWithCallback as DataParallelWithCallback
from .data_parallel import _ReplicationMixin as _ReplicationMixin
from .data_parallel import patch as patch
from .data_parallel import use_devices_of_torch as use_devices_of_torch

__all__: list[str] = []
