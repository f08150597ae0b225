"""Statistics of memory, as `torch.cuda` and `torch.accelerator` report them, and the cache that one can empty."""

from __future__ import annotations

from typing import Any

import torch

from simulated_gpus.devices import index_of, properties
from simulated_gpus.install import native

__all__ = ["install"]

POOLS = ("all", "small_pool", "large_pool")
IN_POOLS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
ALONE = ("oversize_allocations", "oversize_segments")
NUMBERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
FIELDS = ("current", "peak", "allocated", "freed")


def memory_stats(device: int) -> dict[str, Any]:
    """Return all that the allocator of CUDA reports, nested as it does; what is not simulated is zero."""
    known = native().memory_statistics(device)

    def numbers(name: str) -> dict[str, int]:
        return dict(zip(FIELDS, known.get(name, (0, 0, 0, 0)), strict=True))

    stats: dict[str, Any] = {name: {pool: numbers(f"{name}.{pool}") for pool in POOLS} for name in IN_POOLS}
    return stats | {name: numbers(name) for name in ALONE} | dict.fromkeys(NUMBERS, 0) | {"max_split_size": -1}


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return how many bytes of a device are free, and how many there are."""
    index = index_of(device)
    reserved = memory_stats(index)["reserved_bytes"]["all"]["current"]
    total = properties(index).total_memory
    return total - reserved, total


def install() -> None:
    """Put the functions where `torch.cuda.memory` and `torch.accelerator` find them."""
    c, simulator = torch._C, native()
    c._cuda_memoryStats = memory_stats
    c._cuda_resetPeakMemoryStats = simulator.reset_peak_memory
    c._cuda_resetAccumulatedMemoryStats = simulator.reset_accumulated_memory
    c._cuda_emptyCache = simulator.empty_cache
    c._cuda_ipc_collect = lambda: None
    c._cuda_getAllocatorBackend = lambda: "native"
    c._accelerator_isAllocatorInitialized = lambda: True
    c._accelerator_getDeviceStats = memory_stats
    c._accelerator_getMemoryInfo = mem_get_info
    c._accelerator_resetPeakStats = simulator.reset_peak_memory
    c._accelerator_resetAccumulatedStats = simulator.reset_accumulated_memory
    c._accelerator_emptyCache = simulator.empty_cache
    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = mem_get_info
