"""What the examples share: options and their checks, names and colours of the runs, the import of torchvision."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sync_batchnorm import DataParallelWithCallback

__all__ = [
    "EQUAL",
    "ONE_DEVICE",
    "STYLES",
    "SYNCHRONIZED",
    "UNSYNCHRONIZED",
    "add_options",
    "check_at_least",
    "check_seed",
    "choose_devices",
    "choose_file",
    "import_torchvision",
    "judge",
    "prepare",
    "tidy",
]

ONE_DEVICE, UNSYNCHRONIZED, SYNCHRONIZED = "one device", "unsynchronized", "synchronized"

EQUAL = 1e-8  # what the largest difference to one device may be in float64

# Colours by Okabe and Ito, which stay apart for colour-blind readers; width, dash and marker tell the lines apart
# without colour. The line of one device is wide enough to be seen under one that lies on it.
STYLES: dict[str, dict[str, Any]] = {
    ONE_DEVICE: {"color": "#B0B0B0", "linewidth": 7, "solid_capstyle": "round"},
    UNSYNCHRONIZED: {"color": "#D55E00", "linewidth": 1.8, "linestyle": "--", "marker": "s", "markersize": 5},
    SYNCHRONIZED: {"color": "#0072B2", "linewidth": 1.8, "marker": "o", "markersize": 5},
}


def add_options(parser: argparse.ArgumentParser, replicas: int) -> None:
    """Add the options that every example with replicas has; there are `replicas` of them unless the user says so."""
    parser.add_argument("--replicas", type=int, help=f"number of replicas (default: one for each GPU, or {replicas})")
    parser.add_argument(
        "--devices",
        help="devices, separated by commas, that the replicas use in turn, as cpu or 0,1 or cuda:0 "
        "(default: all GPUs if there are several, otherwise cpu)",
    )
    parser.add_argument("--seed", type=int, default=0, help="for parameters, data and order (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for the picture (default: out)")


def choose_devices(
    parser: argparse.ArgumentParser, names: str | None, replicas: int | None, default: int
) -> list[torch.device]:
    """Return a device for each replica; devices that cannot be used end the program with a sentence."""
    gpus = torch.cuda.device_count()
    each = names.split(",") if names else [str(i) for i in range(gpus)] if gpus > 1 else ["cpu"]
    if replicas is None:
        replicas = len(each) if len(each) > 1 else default
    if replicas < 2:
        parser.error(f"expected at least 2 replicas, but got {replicas}; there is nothing to synchronize in one")
    try:
        devices = [_usable_device(each[i % len(each)]) for i in range(replicas)]
        DataParallelWithCallback(nn.Identity(), devices)
    except (RuntimeError, AssertionError, ValueError) as error:  # Torch without CUDA raises an AssertionError.
        parser.error(f"expected devices of this machine, but got {names!r}: {error}")
    return devices


def _usable_device(name: str) -> torch.device:
    device = torch.device(int(name)) if name.strip().isdigit() else torch.device(name.strip())
    torch.zeros(1, device=device).item()
    return device


def choose_file(parser: argparse.ArgumentParser, folder: Path, name: str) -> Path:
    """Return where the picture goes, and remove an old one, which might be taken for the new one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
    except OSError as error:
        parser.error(f"expected an output folder that can be written to, but got {str(folder)!r}; {error}")
    return folder / name


def check_seed(parser: argparse.ArgumentParser, seed: int) -> None:
    if not -(2**63) <= seed < 2**64:
        parser.error(f"expected a seed of 64 bits, but got {seed}")


def check_at_least(parser: argparse.ArgumentParser, least: int, name: str, value: int) -> None:
    if value < least:
        parser.error(f"expected --{name} of at least {least}, but got {value}")


def prepare(devices: Sequence[torch.device]) -> None:
    """Say where the replicas are; give those on the CPU, which are threads and share the cores, one core each."""
    if devices[0].type == "cpu":
        torch.set_num_threads(1)
    print(f"{len(devices)} replicas on {', '.join(dict.fromkeys(map(str, devices)))}", flush=True)


def judge(when: str, what: str, differences: Mapping[str, float]) -> bool:
    """Say which runs equal the one on one device, and return whether these are the synchronized ones alone."""
    correct = True
    for name in (SYNCHRONIZED, UNSYNCHRONIZED):
        equal, expected = differences[name] <= EQUAL, name == SYNCHRONIZED
        correct = correct and equal == expected
        print(
            f"{'As expected' if equal == expected else 'NOT as expected'}: {when} the {name} run "
            f"{'equals' if equal else 'differs from'} the one-device run: largest {what} difference "
            f"{differences[name]:.2g}, and up to {EQUAL:g} counts as equal."
        )
    return correct


def tidy(axes: Any, xlabel: str) -> None:
    """Give a plot its grid and the label of its steps."""
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def import_torchvision() -> ModuleType:
    """Import torchvision, even where its compiled operators do not fit the installed torch.

    The wheels of torch and torchvision come from several places, and a pair that does not fit fails at import. The nets
    do without the operators that it looks for, so these are declared, and the import is tried once more.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torchvision = importlib.import_module("torchvision")
    _declared.append(library)
    return torchvision


_declared: list[torch.library.Library] = []  # Operators are gone again when the library that declares them is.
