"""Check whether replicas compute the same as one device. The check begins in the file `one_device.py`."""

__all__: list[str] = []
