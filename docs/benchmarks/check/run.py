"""Measure what `assert_matches_one_device` takes, beside one training step of the model: peak memory, and time."""

from __future__ import annotations

import argparse
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

from sync_batchnorm import assert_matches_one_device, convert_model


def measure(what: str, net: str, images: int, pixels: int) -> None:
    """Print the peak memory of this process in MiB, and the seconds that the step or the check takes."""
    model = getattr(import_torchvision().models, net)(weights=None)
    batch = torch.randn(images, 3, pixels, pixels)
    start = time.perf_counter()
    if what == "step":
        model.double()(batch.double()).square().mean().backward()
    else:
        assert_matches_one_device(convert_model(model), batch)
    seconds = time.perf_counter() - start
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--pixels", type=int, default=160)
    parser.add_argument("--measure", choices=["step", "check"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        return measure(options.measure, options.net, options.images, options.pixels)
    print(environment())
    print(f"| {options.net}, {options.images} images of {options.pixels} pixels | peak, MiB | seconds |\n|---|---|---|")
    found = []
    for what in ("step", "check"):
        command = [sys.executable, __file__, "--measure", what, *sys.argv[1:]]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        peak, seconds = map(float, output.split())
        found.append((peak, seconds))
        print(f"| {'a step in float64' if what == 'step' else 'the check'} | {peak:.0f} | {seconds:.1f} |")
    (peak, seconds), (peak_of_check, seconds_of_check) = found
    print(f"| ratio | {peak_of_check / peak:.2f} | {seconds_of_check / seconds:.1f} |")


if __name__ == "__main__":
    main()
