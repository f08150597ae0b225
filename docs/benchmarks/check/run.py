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
from harness import environment, print_head, print_row

from sync_batchnorm import SynchronizedBatchNorm2d, assert_matches_one_device, convert_model, revert_model

WHAT = {"step": "a step in float64", "check": "the check", "failing": "a check that fails at a layer in the middle"}


BATCHES = [(4, 160), (2, 64)]  # images and their pixels


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
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        what, images, pixels = options.measure
        return measure(what, options.net, int(images), int(pixels))
    print(environment())
    print_head("batch", "run", "peak, MiB", "seconds", "peak / step", "seconds / step")
    for images, pixels in BATCHES:
        batch, found = f"{options.net}, {images} images of {pixels} pixels", []
        for what, name in WHAT.items():
            command = [sys.executable, __file__, "--net", options.net, "--measure", what, f"{images}", f"{pixels}"]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            peak, seconds = map(float, output.split())
            found.append((peak, seconds))
            ratios = f"{peak / found[0][0]:.2f}", f"{seconds / found[0][1]:.1f}"
            print_row(batch, name, f"{peak:.0f}", f"{seconds:.1f}", *ratios)


if __name__ == "__main__":
    main()
