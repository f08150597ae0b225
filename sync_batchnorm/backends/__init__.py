"""Batch normalization on each type of device. Device types without a row in `BACKENDS` use `base.GENERAL`."""

from .cpu import Cpu
from .cuda import Cuda

__all__: list[str] = []

BACKENDS = {"cpu": Cpu(), "cuda": Cuda()}  # maps the type of a device to its backend
