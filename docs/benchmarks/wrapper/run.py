"""Time the wrapper alone: a forward of a network of 53 blocks that computes nothing, by number of replicas."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import environment, interleave

from sync_batchnorm import DataParallelWithCallback, convert_model


class Idle(nn.Module):
    """53 blocks of convolution, BatchNorm and activation, as many as a ResNet-50 has, none of them called."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU()) for _ in range(53)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input: Tensor) -> Tensor:
        return input


def timed(model: nn.Module, input: Tensor) -> Callable[[], float]:
    """Return a function that runs one forward and returns its seconds."""

    def step() -> float:
        start = time.perf_counter()
        model(input)
        return time.perf_counter() - start

    return step


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    # Plain layers in the same wrapper are what ours are compared with.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    print(environment())
    print("| replicas | without callbacks, ms | 53 synchronized layers, ms |")
    print("|---|---|---|")
    for replicas in options.replicas:
        nets = {"plain": Idle(), "ours": convert_model(Idle())}
        input = torch.zeros(replicas, 1)
        steps = {name: timed(DataParallelWithCallback(net, ["cpu"] * replicas), input) for name, net in nets.items()}
        ms = {name: 1e3 * statistics.median(taken) for name, taken in interleave(steps, options.rounds).items()}
        print(f"| {replicas} | {ms['plain']:.2f} | {ms['ours']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
