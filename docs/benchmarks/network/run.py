"""Time a training step of whole networks of torchvision: synchronized against unsynchronized, in the same wrapper."""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from common import import_torchvision
from floor import with_exchanges
from harness import (
    OnCoresOfTheirOwn,
    environment,
    interleave,
    keep_freed_memory,
    median_ratio,
    training_step,
)

from sync_batchnorm import DataParallelWithCallback, convert_model


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "mobilenet_v3_large"])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="one for each replica")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    # Plain layers in the same wrapper are what ours are compared with.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    keep_freed_memory()
    devices = [int(device) if device.isdigit() else device for device in options.devices]
    home = f"cuda:{devices[0]}" if isinstance(devices[0], int) else devices[0]
    print(environment())
    print("| network | format | unsynchronized, ms | synchronized, ms | ratio | ratio with exchanges alone |")
    print("|---|---|---|---|---|---|")
    for name in options.networks:
        for memory_format in (torch.contiguous_format, torch.channels_last):
            plain = import_torchvision().models.get_model(name, weights=None).to(home, memory_format=memory_format)
            nets = {
                "plain": plain,
                "exchange": with_exchanges(plain),
                "synchronized": convert_model(copy.deepcopy(plain)),
            }
            input = torch.randn(options.batch, 3, options.size, options.size, device=home)
            input = input.contiguous(memory_format=memory_format)
            grad = torch.randn(options.batch, 1000, device=home)
            steps = {
                key: training_step(DataParallelWithCallback(OnCoresOfTheirOwn(net), devices), input, grad)
                for key, net in nets.items()
            }
            seconds = interleave(steps, options.rounds)
            ms = {key: 1e3 * statistics.median(values) for key, values in seconds.items()}
            ratio, floor = (median_ratio(seconds[key], seconds["plain"]) for key in ("synchronized", "exchange"))
            kind = str(memory_format).removeprefix("torch.").removesuffix("_format")
            print(
                f"| {name} | {kind} | {ms['plain']:.0f} | {ms['synchronized']:.0f} | {ratio:.3f} | {floor:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
