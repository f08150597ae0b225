"""Whether replicas compute what one device computes: `one_device.py`, to be read downwards, is the check."""

__all__: list[str] = []
