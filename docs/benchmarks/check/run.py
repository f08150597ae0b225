"""Measure what `assert_matches_one_device` takes, beside one training step of the model: memory and processor time."""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from common import import_torchvision
from harness import environment

from sync_batchnorm import SynchronizedBatchNorm2d, assert_matches_one_device, convert_model, revert_model

WHAT = {"step": "a step in float64", "check": "the check", "failing": "a check that fails at a layer in the middle"}


def measure(what: str, net: str, images: int, pixels: int) -> None:
    """Print the peak memory of this process in MiB, and the seconds of processor time of the step or the check."""
    model = getattr(import_torchvision().models, net)(weights=None)
    batch = torch.randn(images, 3, pixels, pixels)
    if what != "step":
        convert_model(model)
    if what == "failing":
        norms = [module for module in model.modules() if isinstance(module, SynchronizedBatchNorm2d)]
        revert_model(norms[len(norms) // 2])
    start = time.process_time()
    if what == "step":
        model.double()(batch.double()).square().mean().backward()
    else:
        with contextlib.suppress(AssertionError):
            assert_matches_one_device(model, batch)
    seconds = time.process_time() - start
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--pixels", type=int, default=160)
    parser.add_argument("--measure", choices=list(WHAT), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        return measure(options.measure, options.net, options.images, options.pixels)
    print(environment())
    print(
        f"| {options.net}, {options.images} images of {options.pixels} pixels "
        "| peak, MiB | seconds | of the step: peak | seconds |"
    )
    print("|---|---|---|---|---|")
    found = []
    for what, name in WHAT.items():
        command = [sys.executable, __file__, "--measure", what, *sys.argv[1:]]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        peak, seconds = map(float, output.split())
        found.append((peak, seconds))
        ratio = f"{peak / found[0][0]:.2f} | {seconds / found[0][1]:.1f}"
        print(f"| {name} | {peak:.0f} | {seconds:.1f} | {ratio} |")


if __name__ == "__main__":
    main()
