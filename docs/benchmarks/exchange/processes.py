"""Time the exchange of one layer between processes, over gloo on this machine.

For each number of processes it starts a process group of its own, and prints a line for each number of channels: the
time of the collective of a forward and of that of a backward, with packing and merging. Each figure is the minimum of
several rounds: that of the round which other programs disturbed least. ``--other`` names the folder of another version
of this library; both take turns, and a ratio is the median of those of rounds that follow each other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "docs" / "benchmarks"))
from harness import environment, interleave, library_at, median_ratio, print_head, print_row  # noqa: E402

__all__ = ["main"]

ROUNDS, CALLS = 30, 50
OURS, OTHER, WAYS = "ours", "other", ("forward", "backward")


def timed(body: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs `body` in all processes, and returns the microseconds of a call of it."""

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            body()
        return (time.perf_counter() - start) / CALLS * 1e6

    return step


def exchange(library: ModuleType, width: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what a layer of a library does between processes, in a forward pass and in a backward pass."""
    statistics, sums = torch.ones(2, 1, width).double().unbind(), torch.zeros(2, width).double()
    layer = library.SynchronizedBatchNorm1d(width)
    until_2_4 = not hasattr(layer._peers(), "gather_statistics")
    gather, reduce = ("gathered_statistics", "all_reduced") if until_2_4 else ("gather_statistics", "all_reduce")
    return (
        lambda: getattr(layer._peers(), gather)(statistics, 512, None),
        lambda: getattr(layer._peers(), reduce)(sums),
    )


def measure(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{size}", size), rank=rank, world_size=size)
    libraries = {OURS: library_at(ROOT)}
    if options.other is not None:
        libraries[OTHER] = library_at(options.other)
    for width in options.channels:
        bodies = {name: exchange(library, width) for name, library in libraries.items()}
        cells = [f"{size}", f"{width}"]
        for i in range(len(WAYS)):
            found = interleave({name: timed(body[i]) for name, body in bodies.items()}, options.rounds)
            cells += [f"{min(times):.0f}" for times in found.values()]
            if OTHER in found:
                cells.append(f"{median_ratio(found[OURS], found[OTHER]):.2f}")
        if rank == 0:
            print_row(*cells)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the exchange of one layer between processes on this machine.")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 512, 2048], help="default: 64 512 2048")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--other", type=Path, help="the folder of another version of this library")
    options = parser.parse_args()
    columns = ("{}, us", "{} of the other, us", "{}, ratio") if options.other else ("{}, us",)
    torch.set_num_threads(1)
    print(environment())
    print_head("processes", "channels", *(column.format(way) for way in WAYS for column in columns))
    for size in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (size, folder, options), nprocs=size)


if __name__ == "__main__":
    main()
