"""The wrapper: makes the replicas of a module, connects them, runs them in threads, and puts their outputs together.

What replicas exchange, and when, is up to the callbacks of the modules. Of batch norm the wrapper knows one thing:
whether a layer trains, so that it can warn of plain layers and refuse layers that do not belong to the replica.
"""

from .arguments import Arguments as Arguments
from .data_parallel import DataParallelWithCallback as DataParallelWithCallback
from .data_parallel import _ReplicationMixin as _ReplicationMixin
from .data_parallel import patch as patch
from .data_parallel import use_devices_of_torch as use_devices_of_torch
from .trees import built as built
from .trees import children_of as children_of
from .trees import holds_tensors as holds_tensors
from .trees import leaves_of as leaves_of
from .trees import named_leaves as named_leaves
from .trees import tensors_in as tensors_in
from .trees import with_leaves as with_leaves

__all__: list[str] = []
