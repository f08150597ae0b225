"""The kinds of devices, and the only function that chooses the backend for a device."""

from __future__ import annotations

import torch

from sync_batchnorm.backends.base import Backend
from sync_batchnorm.backends.cpu import Cpu
from sync_batchnorm.backends.cuda import Cuda
from sync_batchnorm.backends.general import General
from sync_batchnorm.backends.joined import Joined

__all__: list[str] = []

GENERAL = General()
BACKENDS: dict[str, Backend] = {"cpu": Cpu(), "cuda": Cuda()}  # by the type of the device
BACKENDS["cpu"].joined = Joined()


def backend_for(device: torch.device) -> Backend:
    """Return the backend for the type of `device`, or the general one if that type has none."""
    return BACKENDS.get(device.type, GENERAL)
