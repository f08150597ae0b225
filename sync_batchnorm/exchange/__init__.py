"""One call of a synchronized layer in all replicas: `forward.py`, to be read downwards, and its backward pass."""

from .forward import merge_replicas as merge_replicas
from .forward import sync_batch_norm as sync_batch_norm
from .replica_call import ALONE as ALONE
from .replica_call import Connection as Connection

__all__: list[str] = []
