"""The wrapper `DataParallelWithCallback`: replicate a module, connect the replicas, run them, and gather their outputs.

The wrapper does not know how layers exchange data between replicas: each layer decides this in its replication
callback. The wrapper only reads whether batch norm layers are in training mode. It warns about layers in training mode
that do not synchronize. It raises an error if a second wrapper, inside a replica, would train synchronized layers of
another replica.
"""

__all__: list[str] = []
