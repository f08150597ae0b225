"""One call of a layer: the part of each replica, the exchange, the node, and what a recomputation repeats."""

__all__: list[str] = []
