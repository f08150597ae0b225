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
from harness import (
    FORMATS,
    OnCoresOfTheirOwn,
    environment,
    interleave,
    keep_freed_memory,
    median_ratio,
    print_head,
    print_row,
    training_step,
)

from sync_batchnorm import DataParallelWithCallback, convert_model


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "mobilenet_v3_large"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    # Plain layers in the same wrapper are what ours are compared with.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    keep_freed_memory()
    print(environment())
    print_head("network", "format", "unsynchronized, ms", "synchronized, ms", "ratio")
    for name in options.networks:
        for kind, memory_format in FORMATS.items():
            plain = import_torchvision().models.get_model(name, weights=None).to(memory_format=memory_format)
            input = torch.randn(options.batch, 3, options.size, options.size).contiguous(memory_format=memory_format)
            grad = torch.randn(options.batch, 1000)
            nets = {"plain": plain, "ours": convert_model(copy.deepcopy(plain))}
            steps = {
                key: training_step(DataParallelWithCallback(OnCoresOfTheirOwn(net), ["cpu"] * 2), input, grad)
                for key, net in nets.items()
            }
            seconds = interleave(steps, options.rounds)
            ms = [f"{1e3 * statistics.median(values):.0f}" for values in seconds.values()]
            print_row(name, kind, *ms, f"{median_ratio(seconds['ours'], seconds['plain']):.2f}")


if __name__ == "__main__":
    main()
