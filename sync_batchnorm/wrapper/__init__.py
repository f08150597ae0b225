"""The wrapper `DataParallelWithCallback`: replicate a module, connect the replicas, run them, and gather their outputs.

The wrapper does not know how layers exchange data between replicas: each layer decides this in its replication
callback. The wrapper only reads which batch norm layers are in training mode. It warns about those that do not
synchronize. It raises an error if a replica contains another wrapper with synchronized layers in training mode.
"""

__all__: list[str] = []
