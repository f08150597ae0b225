"""Processor time of whole training steps on simulated GPUs whose kernels, copies and streams cost nothing.

A step makes the replicas of a net, runs them forward, and runs a backward pass, through the wrapper as a user calls it.
All contenders are in one process on one core, where threads do not fight for the interpreter lock, and take turns after
each step: ratios of medians then repeat to 0.01, those of blocks of steps only to 0.07. ``--other`` names the folder of
another version of this library, such as a worktree of an older commit, and ``--existing`` that of the older library.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs" / "benchmarks"), str(ROOT / "docs" / "examples")]
import simulated_gpus

simulated_gpus.simulate(8)  # before torch is imported, and so before what is imported below
# ruff: noqa: E402

import torch
from common import import_torchvision
from free import costing_nothing, use_streams_of_torch
from harness import environment, library_at, print_head, print_row, take_core
from torch import nn
from torch.nn.parallel import comm

OURS, PLAIN, OTHER, EXISTING = "ours", "nn.BatchNorm2d", "the other version", "the older library"
LAYERS = "a layer"  # of several in a row, without the making of replicas
NETS = ("resnet50", "mobilenet_v3_large", LAYERS)
IMAGES, SIZE = 2, 64  # in each replica
IN_A_ROW, SHAPE = 20, (2, 8, 2, 2)  # how many layers, and the shape of the input of each replica
STEPS = {2: 150, 4: 90, 8: 60}  # of each contender, by the number of GPUs


class Step(NamedTuple):
    """What a step takes, in seconds of processor time."""

    replicate: float
    forward: float  # without the replicas
    backward: float

    def total(self, net: str) -> float:
        """Return the time that counts."""
        return self.forward + self.backward + (0 if net == LAYERS else self.replicate)


def libraries_at(other: Path | None, existing: Path | None) -> dict[str, ModuleType | None]:
    """Import this library and others, where their folders are given; None stands for plain layers."""
    libraries: dict[str, ModuleType | None] = {PLAIN: None, OURS: library_at(ROOT)}
    for name, folder in ((OTHER, other), (EXISTING, existing)):
        if folder is not None:
            libraries[name] = library_at(folder)
    return libraries


def wrap(library: ModuleType | None, net: nn.Module, devices: list[int]) -> Any:
    """Return `net`, whose layers are converted, in the wrapper of a library; or as it is, in that of torch."""
    if library is None:
        return nn.DataParallel(net.cuda(), devices)
    return library.DataParallelWithCallback(library.convert_model(net).cuda(), devices)


class Contender:
    """A net in the wrapper of a library, or in that of torch, and its input."""

    def __init__(self, library: ModuleType | None, net: str, number: int) -> None:
        if net == LAYERS:
            shape: tuple[int, ...] = (SHAPE[0] * number, *SHAPE[1:])
            module: nn.Module = nn.Sequential(*[nn.BatchNorm2d(SHAPE[1]) for _ in range(IN_A_ROW)])
        else:
            shape = (IMAGES * number, 3, SIZE, SIZE)
            module = import_torchvision().models.get_model(net)
        self.parallel = wrap(library, module, list(range(number)))
        self.replicate, self.seconds = self.parallel.replicate, 0.0
        self.parallel.replicate = self.timed_replicate
        self.input = torch.randn(shape, device="cuda:0")
        # A whole step at once: operators run in their first call, and a backward of pooling needs true indices. In the
        # first three steps, a wrapper also looks for state that is lost.
        for _ in range(4):
            output = self.parallel(self.input)
            self.grad_output = torch.randn_like(output)
            output.backward(self.grad_output)

    def timed_replicate(self, *args: Any) -> Any:
        start = time.process_time()
        replicas = self.replicate(*args)
        self.seconds += time.process_time() - start
        return replicas

    def forward(self) -> torch.Tensor:
        self.parallel.zero_grad()
        output: torch.Tensor = self.parallel(self.input)
        return output

    def containers(self) -> tuple[int, int]:
        """Return how many containers a step has made after the forward, and leaves for the garbage collector."""
        gc.collect()
        gc.disable()
        before = gc.get_count()[0]
        output = self.forward()
        after_forward = gc.get_count()[0] - before
        output.backward(self.grad_output)
        del output
        after_step = gc.get_count()[0] - before
        gc.enable()
        return after_forward, after_step

    def step(self) -> Step:
        """Run a step, and return what it took."""
        self.seconds, start = 0.0, time.process_time()
        output = self.forward()
        middle = time.process_time()
        output.backward(self.grad_output)
        del output
        end = time.process_time()
        return Step(self.seconds, middle - start - self.seconds, end - middle)


def run_in_turns(libraries: dict[str, ModuleType | None], net: str, number: int, options: argparse.Namespace) -> None:
    """Print a row for each contender, with its median step and ours as a part of it."""
    contenders = {name: Contender(library, net, number) for name, library in libraries.items()}
    steps: dict[str, list[Step]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(options.steps or STEPS[number]):
        # In no fixed order: a step is quicker after one that has used the same operators.
        for name in order.sample(list(contenders), len(contenders)):
            steps[name].append(contenders[name].step())
    unit, text = (1e6 / IN_A_ROW, "us") if net == LAYERS else (1e3, "ms")
    totals = {name: statistics.median([step.total(net) for step in several]) for name, several in steps.items()}
    for name, several in steps.items():
        medians = [totals[name], *map(statistics.median, zip(*several, strict=True))]
        times = [f"{unit * seconds:.1f} {text}" for seconds in medians]
        print_row(net, number, name, *times, f"{totals[OURS] / totals[name]:.2f}", *contenders[name].containers())


@contextmanager
def broadcasts_for_nothing() -> Iterator[None]:
    """Let each broadcast return what the first one for the same tensors has returned."""
    broadcast, kept = comm.broadcast_coalesced, dict[Any, Any]()

    def once(tensors: Any, devices: Any, **options: Any) -> Any:
        key = (*map(id, tensors), *map(str, devices))
        if key not in kept:
            kept[key] = broadcast(tensors, devices, **options)
        return [[tensor.detach() for tensor in own] for own in kept[key]]

    with mock.patch.object(comm, "broadcast_coalesced", once):
        yield


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="folder of another version of the library")
    parser.add_argument("--existing", type=Path, help="folder into which sync-batchnorm==0.0.1 was installed")
    parser.add_argument("--steps", type=int, help=f"of each contender, by default {STEPS} by the number of GPUs")
    parser.add_argument("--nets", choices=NETS, nargs="+", default=NETS[:1], help=f"default: {NETS[0]}")
    parser.add_argument("--numbers", type=int, choices=STEPS, nargs="+", default=list(STEPS), help="of GPUs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    use_streams_of_torch()
    take_core(0)  # and so do the threads that will be started
    libraries = libraries_at(options.other, options.existing)
    print(environment())
    columns = ("step", "replicate", "forward", "backward", "ours / this", "containers after forward", "after the step")
    print_head("net", "GPUs", "contender", *columns)
    with broadcasts_for_nothing(), costing_nothing():
        for net in options.nets:
            for number in options.numbers:
                run_in_turns(libraries, net, number, options)


if __name__ == "__main__":
    main()
