"""Batch normalization on each kind of device. Kinds without a row in `BACKENDS` use `base.GENERAL`."""

from .cpu import Cpu
from .cuda import Cuda

__all__: list[str] = []

BACKENDS = {"cpu": Cpu(), "cuda": Cuda()}  # by the type of the device
