"""Convert and revert all models of torchvision and timm, train small ones on three CPU replicas, print what differs.

The last column has the differences that rounding alone makes: one device trains the model twice, the second time with
the samples of the batch in reverse order.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
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
from harness import environment
from helpers import anatomy, classes
from torch import Tensor, nn

from sync_batchnorm import convert_model, revert_model


def sweep(library: str, found: Iterable[tuple[str, nn.Module]]) -> None:
    """Print how many models convert, and revert to what they were, and how long that takes."""
    start, busy = time.perf_counter(), time.process_time()
    models, layers, left, converting, reverting = 0, 0, Counter[str](), 0.0, 0.0
    for name, model in found:
        before = anatomy(model), classes(model)
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those that are left are counted
            convert_model(model)
        converting += time.process_time() - begin
        left.update(type(layer).__name__ for layer in zoo.batch_norms(model) if not hasattr(layer, "group_size"))
        same = anatomy(model) == before[0]
        begin = time.process_time()
        revert_model(model)
        reverting += time.process_time() - begin
        if not same or (anatomy(model), classes(model)) != before:
            raise SystemExit(f"expected {name} as it was, but it has changed")
        models, layers = models + 1, layers + len(zoo.batch_norms(model))
    remain = ", ".join(f"{number} {name}" for name, number in left.items()) or "none"
    print(f"{library}: {models} models with {layers} layers, of which {remain} left as they were;", end=" ")
    print("built, converted, reverted and compared twice:", end=" ")
    print(f"{time.perf_counter() - start:.1f} s, {time.process_time() - busy:.1f} s of processor time")
    print(f"processor time per model: convert_model {1e3 * converting / models:.1f} ms, ", end="")
    print(f"revert_model {1e3 * reverting / models:.1f} ms")


class Reordered(nn.Module):
    """Run a module on the samples of the batch in reverse, and put its outputs back in order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> list[Tensor]:
        return [output.flip(0) for output in zoo.tensors_in(self.module(input.flip(0)))]


def train(at_most: int | None) -> None:
    """Print a row of the largest relative differences for each model that is trained."""
    start = time.perf_counter()
    print("| model | layers | outputs | gradients | state | gradients, reordered |")
    print("|---|---|---|---|---|---|")
    families = zoo.FAMILIES | {f"timm's {name}": partial(zoo.small_timm, name) for name in zoo.TIMM_TRAINED}
    for name, make in islice(families.items(), at_most):
        torch.manual_seed(0)
        model, input = make()
        replicas = zoo.train_both(copy.deepcopy(model), input)
        plain = zoo.without_chance(model.double())
        rounding = zoo.differences(plain, Reordered(copy.deepcopy(plain)), input)
        numbers = [*replicas.values(), rounding["gradients"]]
        cells = " | ".join(f"{number:.1e}" for number in numbers)
        print(f"| {name} | {len(zoo.batch_norms(model))} | {cells} |", flush=True)
    print(f"trained three times in {time.perf_counter() - start:.0f} s")


def main() -> None:
    """Print what the README has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-most", type=int, help="how many models of each library, and to train (default: all)")
    at_most = parser.parse_args().at_most
    torch.set_num_threads(1)
    print(environment())
    sweep("torchvision", islice(zoo.models_with_batch_norm(), at_most))
    sweep("timm", islice(((name, zoo.build_timm(name)) for name in zoo.TIMM), at_most))
    train(at_most)


if __name__ == "__main__":
    main()
