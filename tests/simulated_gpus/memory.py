"""The memory in use, as `torch.cuda` and `torch.accelerator` report it. Nothing is cached: what is reserved is used."""

from __future__ import annotations

from typing import Any

import torch

from simulated_gpus.devices import index_of, properties
from simulated_gpus.install import native

__all__ = ["install"]


def memory_stats(device: int) -> dict[str, Any]:
    """Return the bytes in use, now and at most, nested as the allocator of CUDA does it."""
    now, most = native().memory_used(device)
    numbers = {"all": {"current": now, "peak": most}}
    return {"allocated_bytes": numbers, "reserved_bytes": numbers}


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return how many bytes of a device are free, and how many there are."""
    index = index_of(device)
    now, _ = native().memory_used(index)
    total = properties(index).total_memory
    return total - now, total


def install() -> None:
    """Put the functions where `torch.cuda.memory` and `torch.accelerator` find them."""
    c, simulator = torch._C, native()
    c._cuda_memoryStats = c._accelerator_getDeviceStats = memory_stats
    c._cuda_resetPeakMemoryStats = c._accelerator_resetPeakStats = simulator.reset_peak_memory
    c._cuda_emptyCache = c._accelerator_emptyCache = lambda: None
    c._cuda_ipc_collect = lambda: None
    c._cuda_getAllocatorBackend = lambda: "native"
    c._accelerator_isAllocatorInitialized = lambda: True
    c._accelerator_getMemoryInfo = mem_get_info
    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = mem_get_info
