"""The kinds of devices, and which of them an input is on: the one place where that is asked."""

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
    """Return the backend for `device`: the general one, unless there is one for its type."""
    return BACKENDS.get(device.type, GENERAL)
