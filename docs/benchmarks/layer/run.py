"""Time one layer, forward and backward: ours, `nn.BatchNorm2d` and the existing library, on CPU replicas or one GPU.

`--layers` of them run in a row, so that the cost of starting threads is shared; the figures are for one layer.
A fourth contender, `nn.BatchNorm2d` after an exchange of empty messages, is the least that synchronization can cost.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from floor import with_exchanges
from harness import CpuReplicas, Remote, environment, interleave, keep_freed_memory, median_ratio, training_step

from sync_batchnorm import DataParallelWithCallback, convert_model, execute_replication_callbacks

SHAPES = [(8, 64, 56, 56), (8, 256, 28, 28), (8, 512, 7, 7), (4, 8, 4, 4)]


def in_replicas(model: nn.Module, replicas: int, device: str) -> Callable[[Tensor], Tensor]:
    """Return `model` in CPU replicas, or in replicas that share one GPU."""
    if device == "cpu":
        return CpuReplicas(model, replicas, execute_replication_callbacks)
    return DataParallelWithCallback(model.to(device), [0] * replicas)


def contenders(
    shape: tuple[int, ...], channels_last: bool, replicas: int, options: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    """Return the steps to time."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    input, grad = (torch.randn(shape).to(options.device, memory_format=memory_format) for _ in range(2))
    plain = nn.Sequential(*[nn.BatchNorm2d(shape[1]) for _ in range(options.layers)])
    models = {"plain": plain, "exchange": with_exchanges(plain), "ours": convert_model(copy.deepcopy(plain))}
    steps: dict[str, Any] = {
        name: training_step(in_replicas(model, replicas, options.device), input, grad) for name, model in models.items()
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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--allocator",
        choices=["keeps", "returns"],
        default="keeps",
        help="whether it keeps freed memory or returns it to the system: see harness.py",
    )
    options = parser.parse_args()
    # Plain layers in the same wrapper are what ours are compared with.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    if options.existing is not None and options.device != "cpu":
        parser.error("the existing library is compared on the CPU only")
    if options.allocator == "keeps":
        keep_freed_memory()
    torch.set_num_threads(1)
    print(environment())
    print("| shape | format | replicas | BatchNorm2d, ms | with an exchange, ms | ours, ms ", end="")
    print("| ours / BatchNorm2d | ours / existing |\n|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for channels_last in (False, True):
            for replicas in options.replicas:
                size = (max(replicas, shape[0]), *shape[1:])  # one sample for each of them at the least
                steps = contenders(size, channels_last, replicas, options)
                seconds = interleave(steps, options.rounds)
                ms = {name: 1e3 * statistics.median(s) / options.layers for name, s in seconds.items()}
                to_existing = "-"
                if "existing" in steps:
                    to_existing = f"{median_ratio(seconds['ours'], seconds['existing']):.2f}"
                    steps["existing"].close()  # type: ignore[attr-defined]
                print(
                    f"| {size} | {'channels_last' if channels_last else 'contiguous'} | {replicas} "
                    f"| {ms['plain']:.3f} | {ms['exchange']:.3f} | {ms['ours']:.3f} "
                    f"| {median_ratio(seconds['ours'], seconds['plain']):.2f} | {to_existing} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
