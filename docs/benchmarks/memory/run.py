"""Count, to the byte, the tensors that autograd saves for the backward pass of a layer on two CPU replicas."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
from harness import environment, print_head, print_row
from helpers import saved_bytes

from sync_batchnorm import DataParallelWithCallback, convert_model

SHAPES = [(8, 64, 56, 56), (8, 256, 28, 28), (8, 512, 7, 7), (4, 8, 4, 4)]


def main() -> None:
    """Print the table of the README."""
    # Plain layers in the same wrapper are what ours are compared with.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    print(environment())
    print_head("input", "input, bytes", "nn.BatchNorm2d saves", "ours saves")
    for shape in SHAPES:
        input, plain = torch.randn(shape, requires_grad=True), nn.BatchNorm2d(shape[1])
        layers = (plain, convert_model(copy.deepcopy(plain)))
        saved = [saved_bytes(DataParallelWithCallback(layer, ["cpu"] * 2)(input)) for layer in layers]
        print_row(shape, input.nbytes, *saved)


if __name__ == "__main__":
    main()
