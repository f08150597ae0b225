"""Time one layer, forward and backward: ours, `nn.BatchNorm2d` and the existing library, on CPU replicas or one GPU.

The layers stand in a row of `--layers`, so that the cost of starting threads is shared; the figures are for one layer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import CpuReplicas, Remote, environment, interleave, keep_freed_memory, median_ratio, training_step

from sync_batchnorm import convert_model, execute_replication_callbacks

SHAPES = [(8, 64, 56, 56), (8, 256, 28, 28), (8, 512, 7, 7), (4, 8, 4, 4)]


def contenders(
    shape: tuple[int, ...], channels_last: bool, replicas: int, options: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    """Return the steps to time."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    input = torch.randn(shape).contiguous(memory_format=memory_format)
    grad = torch.randn(shape).contiguous(memory_format=memory_format)
    plain = nn.Sequential(*[nn.BatchNorm2d(shape[1]) for _ in range(options.layers)])
    ours = convert_model(copy.deepcopy(plain))
    steps: dict[str, Any] = {
        "BatchNorm2d": training_step(CpuReplicas(plain, replicas, None), input, grad),
        "ours": training_step(CpuReplicas(ours, replicas, execute_replication_callbacks), input, grad),
    }
    if options.existing is not None:
        script = str(Path(__file__).with_name("existing.py"))
        words = [",".join(map(str, shape)), int(channels_last), replicas, options.layers, options.allocator]
        steps["existing"] = Remote(script, options.existing, *map(str, words))
    return steps


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--existing", help="folder into which sync-batchnorm==0.0.1 was installed")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--allocator",
        choices=["keeps", "returns"],
        default="keeps",
        help="what becomes of freed memory: see harness.py",
    )
    options = parser.parse_args()
    if options.allocator == "keeps":
        keep_freed_memory()
    torch.set_num_threads(1)
    print(environment())
    print("| shape | format | replicas | BatchNorm2d, ms | ours, ms | ours / BatchNorm2d | ours / existing |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for channels_last in (False, True):
            for replicas in (n for n in options.replicas if n <= shape[0]):
                steps = contenders(shape, channels_last, replicas, options)
                seconds = interleave(steps, options.rounds)
                ms = {name: 1e3 * statistics.median(s) / options.layers for name, s in seconds.items()}
                to_existing = "-"
                if "existing" in steps:
                    to_existing = f"{median_ratio(seconds['ours'], seconds['existing']):.2f}"
                    steps["existing"].close()  # type: ignore[attr-defined]
                print(
                    f"| {shape} | {'channels_last' if channels_last else 'contiguous'} | {replicas} "
                    f"| {ms['BatchNorm2d']:.3f} | {ms['ours']:.3f} "
                    f"| {median_ratio(seconds['ours'], seconds['BatchNorm2d']):.2f} | {to_existing} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
