"""Time the exchange of one layer between processes, over gloo on this machine.

For each number of processes it starts a process group of its own, and prints a line for each number of channels: the
time of the collective of a forward and of that of a backward, with packing and merging. Each figure is the minimum of
several rounds: that of the round which other programs disturbed least.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sync_batchnorm import SynchronizedBatchNorm1d
from sync_batchnorm.call import processes

__all__ = ["main"]

ROUNDS, CALLS = 30, 50


def minimum(body: Callable[[], object]) -> float:
    """Return the microseconds that a call of `body` takes in the fastest round."""
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            body()
        times.append((time.perf_counter() - start) / CALLS)
    return min(times) * 1e6


def measure(rank: int, size: int, folder: str, channels: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{size}", size), rank=rank, world_size=size)
    for width in channels:
        statistics, sums = torch.ones(2, 1, width).double().unbind(), torch.zeros(2, width).double()
        layer = SynchronizedBatchNorm1d(width)
        peers = processes.Peers(dist.group.WORLD, "layer", weakref.ref(layer))
        forward = minimum(partial(processes.gather_statistics, statistics, 512, peers, None))
        backward = minimum(partial(peers.all_reduced, sums))
        if rank == 0:
            print(f"| {size} | {width} | {forward:.0f} | {backward:.0f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the exchange of one layer between processes on this machine.")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4], help="default: 2 3 4")
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 512, 2048], help="default: 64 512 2048")
    options = parser.parse_args()
    print("| processes | channels | forward, us | backward, us |")
    print("|---|---|---|---|")
    for size in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (size, str(Path(folder)), options.channels), nprocs=size)


if __name__ == "__main__":
    main()
