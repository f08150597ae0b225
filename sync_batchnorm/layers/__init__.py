"""The synchronized batch norm layers, and functions to convert a model, to check it, and to write norms of your own."""

from .conversion import reason_not_converted as reason_not_converted
from .layer import SynchronizedBatchNorm, SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d  # noqa: F401 - for pickles
from .layer import _SynchronizedBatchNorm as _SynchronizedBatchNorm

__all__: list[str] = []
