"""One exchange: a call of a synchronized layer in all replicas, and its backward pass. Begin with `forward.py`."""

__all__: list[str] = []
