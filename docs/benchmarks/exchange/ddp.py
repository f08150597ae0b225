"""Time a training step of layers under `DistributedDataParallel`, in two processes over gloo on this machine.

Contenders are `nn.BatchNorm2d`, this library, and with ``--other FOLDER`` another version of it. They take turns: each
block starts the processes of each contender anew. Figures are medians over the blocks, of the median step of a block,
for one of several layers in a row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[3]
SHAPES = [(2, 8, 2, 2), (4, 64, 14, 14), (8, 64, 56, 56)]  # the input of each process
LAYERS, STEPS = 10, 15


def work(rank: int, folder: str, synchronized: bool) -> None:
    """Print the median microseconds that a step takes a layer, for each shape, in the first of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    for shape in SHAPES:
        net: nn.Module = nn.Sequential(*[nn.BatchNorm2d(shape[1]) for _ in range(LAYERS)])
        if synchronized:
            from sync_batchnorm import convert_model

            net = convert_model(net)
        ddp, input, times = DistributedDataParallel(net), torch.randn(shape), []
        grad = torch.randn(shape)
        for _ in range(STEPS):
            dist.barrier()
            begin = time.perf_counter()
            ddp(input).backward(grad)
            times.append(time.perf_counter() - begin)
        if rank == 0:
            print(statistics.median(times[STEPS // 3 :]) / LAYERS * 1e6, flush=True)
    dist.destroy_process_group()


def block(path: Path, synchronized: bool) -> list[float]:
    """Return what `work` prints, with the library of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, *(["--synchronized"] if synchronized else [])]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        texts = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"expected processes that end with 0, but got {[process.returncode for process in ranks]}")
    return list(map(float, texts[0].split()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time layers under DistributedDataParallel in two processes.")
    parser.add_argument("--other", type=Path, help="the folder of another version of this library")
    parser.add_argument("--blocks", type=int, default=7)
    for name, options in (("rank", {"type": int}), ("folder", {}), ("synchronized", {"action": "store_true"})):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)  # of one process of a block
    options = parser.parse_args()
    if options.folder is not None:
        return work(options.rank, options.folder, options.synchronized)
    contenders = {"nn.BatchNorm2d": (ROOT, False), "ours": (ROOT, True)}
    if options.other is not None:
        contenders["other"] = (options.other, True)
    found: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(options.blocks):
        for name, contender in contenders.items():
            found[name].append(block(*contender))
    print(
        "| input of each process | " + " | ".join(f"{name}, us" for name in contenders) + " | ours / nn.BatchNorm2d |"
    )
    print("|---" * (len(contenders) + 2) + "|")
    for i, shape in enumerate(SHAPES):
        times = {name: statistics.median(one[i] for one in blocks) for name, blocks in found.items()}
        ratio = times["ours"] / times["nn.BatchNorm2d"]
        print(f"| {shape} | " + " | ".join(f"{one:.0f}" for one in times.values()) + f" | {ratio:.2f} |")


if __name__ == "__main__":
    main()
