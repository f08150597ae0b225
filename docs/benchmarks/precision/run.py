"""Compare float32 results with float64 ones on the same data: ours, `nn.BatchNorm2d` and the older library.

Prints the largest error of the variance, relative to it, and the largest absolute errors of output and input gradient,
whose values are about one in size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from batches import SHAPE, batches, step
from harness import environment, print_head, print_row
from torch import Tensor, nn

from sync_batchnorm import SynchronizedBatchNorm2d, execute_replication_callbacks

QUANTITIES = ("variance", "output", "input gradient")
Step = dict[str, Tensor]


def run_existing(folder: str) -> list[Step]:
    """Return the steps of the older library."""
    with tempfile.TemporaryDirectory() as temporary:
        results = str(Path(temporary) / "steps.pt")
        subprocess.run([sys.executable, str(Path(__file__).with_name("existing.py")), folder, results], check=True)
        steps: list[Step] = torch.load(results)
    return steps


def error(actual: Tensor, expected: Tensor, relative: bool) -> float:
    """Return the largest absolute error, or the largest relative one."""
    difference = (actual.double() - expected).abs()
    return float((difference / expected if relative else difference).max())


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--existing", help="folder into which sync-batchnorm==0.0.1 was installed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    existing = None if options.existing is None else run_existing(options.existing)
    print(environment())
    names = ["torch", "ours"] if existing is None else ["torch", "ours", "older"]
    columns = [f"{quantity}: {name}" for quantity in QUANTITIES for name in names]
    print_head("format", "mean / deviation", *columns)
    for number, (kind, ratio, input, grad) in enumerate(batches()):
        exact = step(nn.BatchNorm2d(SHAPE[1], momentum=1.0).double(), None, input.double(), grad.double())
        ours = SynchronizedBatchNorm2d(SHAPE[1], momentum=1.0)
        steps = [
            step(nn.BatchNorm2d(SHAPE[1], momentum=1.0), None, input, grad),
            step(ours, execute_replication_callbacks, input, grad),
            *([] if existing is None else [existing[number]]),
        ]
        errors = [error(found[name], exact[name], name == "variance") for name in QUANTITIES for found in steps]
        print_row(kind, f"{ratio:g}", *(f"{value:.0e}" for value in errors))


if __name__ == "__main__":
    main()
