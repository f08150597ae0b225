"""The four steps of a `torch.nn.DataParallel` for any devices: scatter, replicate, apply, gather.

`torch.nn.parallel` refuses CPU replicas and several replicas on one device. Its semantics are kept, with two
differences that one device allows: replicas share the storage of the parameters instead of copying it, and the engine
adds up their gradients.
"""

__all__: list[str] = []
