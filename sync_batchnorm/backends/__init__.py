"""The kinds of devices that have a faster backend than any device."""

from .cpu import Cpu
from .cuda import Cuda

__all__: list[str] = []

BACKENDS = {"cpu": Cpu(), "cuda": Cuda()}  # by the type of the device
