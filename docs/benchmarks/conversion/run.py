"""Train models of torchvision and timm on three CPU replicas and on one device, and print how much they differ.

The last column has the differences that rounding alone makes: one device trains the model twice, the second time with
the samples of the batch in reverse order.
"""

from __future__ import annotations

import argparse
import copy
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
import conftest

conftest.import_torchvision()  # also where its compiled operators are missing; so the rest is imported below
# ruff: noqa: E402
import zoo
from harness import environment, print_head, print_row
from torch import Tensor, nn


class Reordered(nn.Module):
    """Run a module on the samples of the batch in reverse, and put its outputs back in order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> list[Tensor]:
        return [output.flip(0) for output in zoo.tensors_of(self.module(input.flip(0)))]


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-most", type=int, help="how many models to train (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(environment())
    print_head("model", "layers", "outputs", "gradients", "gradients, reordered")
    families = zoo.FAMILIES | {f"timm's {name}": partial(zoo.small_timm, name) for name in zoo.TIMM_TRAINED}
    for name, make in islice(families.items(), options.at_most):
        torch.manual_seed(0)
        model, input = make()
        replicas = zoo.train_both(copy.deepcopy(model), input)
        plain = zoo.without_chance(model.double())
        rounding = zoo.differences(plain, Reordered(copy.deepcopy(plain)), input)
        numbers = (replicas["outputs"], replicas["gradients"], rounding["gradients"])
        print_row(name, len(zoo.batch_norms(model)), *(f"{number:.0e}" for number in numbers))


if __name__ == "__main__":
    main()
