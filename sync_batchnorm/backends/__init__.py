"""The kinds of devices, and the only function that chooses the backend for a device."""

import torch

from .base import GENERAL, Backend
from .cpu import Cpu
from .cuda import Cuda

__all__: list[str] = []

BACKENDS: dict[str, Backend] = {"cpu": Cpu(), "cuda": Cuda()}  # by the type of the device


def backend_for(device: torch.device) -> Backend:
    """Return the backend for the type of `device`, or the general one if that type has none."""
    return BACKENDS.get(device.type, GENERAL)
