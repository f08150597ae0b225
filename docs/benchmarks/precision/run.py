"""Compare float32 results with float64 ones on the same data: ours, `nn.BatchNorm2d` and the existing library.

Prints the tables of the page beside it: the largest error of the variance, relative to it, and the largest
absolute errors of output and input gradient, whose values are about one in size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from batches import EPS, REPLICAS, SHAPE, batches, small_batch, step
from harness import environment
from torch import Tensor, nn

from sync_batchnorm import SynchronizedBatchNorm2d, execute_replication_callbacks

Step = dict[str, Tensor]


def run_existing(folder: str) -> list[Step]:
    """Return the steps of the existing library, the last of them with the clamped variance."""
    with tempfile.TemporaryDirectory() as temporary:
        results = str(Path(temporary) / "steps.pt")
        subprocess.run([sys.executable, str(Path(__file__).with_name("existing.py")), folder, results], check=True)
        steps: list[Step] = torch.load(results)
    return steps


def error(actual: Tensor, expected: Tensor, relative: bool) -> float:
    """Return the largest absolute error, or the largest relative one."""
    difference = (actual.double() - expected).abs()
    return float((difference / expected if relative else difference).max())


def rows(existing: list[Step] | None) -> Iterator[tuple[str, float, list[str]]]:
    """Yield for each batch its format, its ratio, and the errors, quantity by quantity and layer by layer."""
    for number, (kind, ratio, input, grad) in enumerate(batches()):
        exact = step(nn.BatchNorm2d(SHAPE[1], momentum=1.0).double(), None, input.double(), grad.double())
        steps = [step(nn.BatchNorm2d(SHAPE[1], momentum=1.0), None, input, grad)]
        steps += [] if existing is None else [existing[number]]
        ours = SynchronizedBatchNorm2d(SHAPE[1], momentum=1.0)
        steps.append(step(ours, execute_replication_callbacks, input, grad))
        yield (
            kind,
            ratio,
            [
                f"{error(found[name], exact[name], name == 'variance'):.0e}"
                for name in ("variance", "output", "input gradient")
                for found in steps
            ],
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--existing", help="folder into which sync-batchnorm==0.0.1 was installed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    existing = None if options.existing is None else run_existing(options.existing)
    print(f"{environment()}; input {SHAPE}, {REPLICAS} replicas")
    layers = ["torch", *([] if existing is None else ["existing"]), "ours"]
    names = [f"{quantity}: {layer}" for quantity in ("variance", "output", "input gradient") for layer in layers]
    current = None
    for kind, ratio, errors in rows(existing):
        if kind != current:
            current = kind
            print(f"\n{kind}\n\n| mean / deviation | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        print(f"| {ratio:g} | {' | '.join(errors)} |", flush=True)
    if existing is not None:
        clamped = SynchronizedBatchNorm2d(SHAPE[1], eps=EPS, momentum=1.0, eps_mode="clamp").double()
        found = step(clamped, execute_replication_callbacks, *small_batch())
        print(f'\neps_mode="clamp", float64, eps {EPS:g}: largest difference from the existing library')
        for name, value in found.items():
            largest = float(existing[-1][name].abs().max())
            print(f"{name}: {float((value - existing[-1][name]).abs().max()):.1e} of {largest:.1e}")


if __name__ == "__main__":
    main()
