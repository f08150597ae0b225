"""Count what a layer saves for the backward, to the byte, and measure the peak memory of a step in a fresh process."""

from __future__ import annotations

import argparse
import copy
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
from harness import environment
from helpers import saved_bytes

from sync_batchnorm import DataParallelWithCallback, convert_model

SHAPES = [(8, 64, 56, 56), (8, 256, 28, 28), (8, 512, 7, 7), (4, 8, 4, 4)]


def bytes_of_replicas(layer: nn.Module, shape: tuple[int, ...], memory_format: torch.memory_format) -> int:
    """Return the bytes that two CPU replicas of `layer` save."""
    input = torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()
    return saved_bytes(DataParallelWithCallback(layer, ["cpu"] * 2)(input))


def peak(kind: str) -> None:
    """Print the growth of the peak memory of this process over a step of twelve layers, in MiB."""
    layers: nn.Module = nn.Sequential(*[nn.BatchNorm2d(64) for _ in range(12)])
    if kind == "synchronized":
        convert_model(layers)
    model = DataParallelWithCallback(layers, ["cpu"] * 2)
    input = torch.randn(8, 64, 112, 112, requires_grad=True)
    grad = torch.randn(8, 64, 112, 112)
    model(input[:2]).backward(grad[:2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model(input).backward(grad)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    """Print the tables of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", choices=["plain", "synchronized"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Plain layers in the same wrapper are what ours are compared with.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    if options.peak:
        return peak(options.peak)
    print(environment())
    print("| shape | format | input, bytes | BatchNorm2d saves | ours saves | ours / BatchNorm2d |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        for memory_format in (torch.contiguous_format, torch.channels_last):
            plain = nn.BatchNorm2d(shape[1])
            expected = bytes_of_replicas(copy.deepcopy(plain), shape, memory_format)
            ours = bytes_of_replicas(convert_model(plain), shape, memory_format)
            kind = str(memory_format).removeprefix("torch.").removesuffix("_format")
            size = 4 * torch.Size(shape).numel()
            print(f"| {shape} | {kind} | {size} | {expected} | {ours} | {ours / expected:.4f} |")
    print("\n| growth of the peak in a step, twelve layers at (8, 64, 112, 112) | MiB |\n|---|---|")
    for kind in ("plain", "synchronized"):
        command = [sys.executable, __file__, "--peak", kind]
        grown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        print(f"| {kind} | {float(grown):.0f} |")


if __name__ == "__main__":
    main()
