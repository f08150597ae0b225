"""The wrapper `DataParallelWithCallback`: replicate a module, connect the replicas, run them, and gather their outputs.

The wrapper does not know how layers exchange: each layer decides this in its replication callback. The wrapper reads
only the mode of batch norm layers. It warns about unsynchronized layers in training mode. It raises an error if a
wrapper inside a replica would train synchronized layers of another replica.
"""

__all__: list[str] = []
