"""One call of a synchronized layer in all replicas: `forward.py`, to be read downwards, and its backward pass."""

__all__: list[str] = []
