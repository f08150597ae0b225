"""Check whether replicas compute the same as one device. Start reading in `assert_matches_one_device.py`."""

__all__: list[str] = []
