"""Processor time of whole training steps on simulated GPUs whose kernels, copies and streams cost nothing.

A step makes the replicas of a net, runs them forward, and runs a backward pass, through the wrapper as a user calls it.
All contenders are in one process on one core, where threads do not fight for the interpreter lock, and take turns after
each step: ratios of medians then repeat to 0.01, those of blocks of steps only to 0.07.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import run  # simulates GPUs, so it comes before torch
import torch
from common import import_torchvision
from free import costing_nothing, use_streams_of_torch
from harness import environment, take_core
from torch import nn

LAYERS = "a layer"  # of several in a row, without the making of replicas
NETS = ("resnet50", "mobilenet_v3_large", LAYERS)
IMAGES, SIZE = 2, 64  # in each replica
# The largest steps of ResNet-50 that are wanted, for each number of GPUs, as parts of those of version 2.3.
OF_OTHER = dict(zip(run.NUMBERS, (0.93, 0.94, 0.93), strict=True))
STEPS = dict(zip(run.NUMBERS, (150, 90, 60), strict=True))  # of each contender


class Step(NamedTuple):
    """What a step takes, in seconds of processor time."""

    replicate: float
    forward: float  # without the replicas
    backward: float

    def total(self, net: str) -> float:
        """Return the time that counts."""
        return self.forward + self.backward + (0 if net == LAYERS else self.replicate)


class Contender:
    """A net in the wrapper of a library, or in that of torch, and its input."""

    def __init__(self, library: ModuleType | None, net: str, number: int) -> None:
        shape = (IMAGES * number, 3, SIZE, SIZE)
        if net == LAYERS:
            shape = (run.SHAPE[0] * number, *run.SHAPE[1:])
            module: nn.Module = nn.Sequential(*[nn.BatchNorm2d(run.SHAPE[1]) for _ in range(run.LAYERS)])
        else:
            module = import_torchvision().models.get_model(net)
        self.parallel = run.wrap(library, module, list(range(number)))
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


def run_in_turns(libraries: dict[str, ModuleType | None], net: str, number: int, options: Any) -> dict[str, float]:
    """Print a row for each contender; return the median step of each."""
    contenders = {name: Contender(library, net, number) for name, library in libraries.items()}
    steps: dict[str, list[Step]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(options.steps or STEPS[number]):
        # In no fixed order: a step is quicker after one that has used the same operators.
        for name in order.sample(list(contenders), len(contenders)):
            steps[name].append(contenders[name].step())
    unit, text = (1e6 / run.LAYERS, "us") if net == LAYERS else (1e3, "ms")
    totals = {}
    for name, several in steps.items():
        totals[name] = statistics.median([step.total(net) for step in several])
        medians = [totals[name], *map(statistics.median, zip(*several, strict=True))]
        times = [f"{unit * seconds:.1f} {text}" for seconds in medians]
        run.print_row(net, number, name, *times, *contenders[name].containers())
    return totals


def print_ratios(net: str, number: int, totals: dict[str, float]) -> None:
    """Print our step as a part of that of each other contender, and theirs as parts of that with plain layers."""
    for rival in [rival for rival in totals if rival != run.OURS]:
        wanted = OF_OTHER[number] if (net, rival) == (NETS[0], run.OTHER) else ""
        run.print_row(net, number, f"{run.OURS} / {rival}", f"{totals[run.OURS] / totals[rival]:.2f}", wanted)
    for rival in [rival for rival in totals if rival not in (run.OURS, run.PLAIN)]:
        run.print_row(net, number, f"{rival} / {run.PLAIN}", f"{totals[rival] / totals[run.PLAIN]:.2f}", "")


def main() -> None:
    """Print both tables of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="folder of another version of the library")
    parser.add_argument("--existing", type=Path, help="folder into which sync-batchnorm==0.0.1 was installed")
    parser.add_argument("--steps", type=int, help=f"of each contender, by default {STEPS} by the number of GPUs")
    parser.add_argument("--nets", choices=NETS, nargs="+", default=NETS)
    parser.add_argument("--numbers", type=int, choices=run.NUMBERS, nargs="+", default=run.NUMBERS, help="of GPUs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    use_streams_of_torch()
    take_core(0)  # and so do the threads that will be started
    libraries = run.libraries_at(options.other, options.existing)
    print(environment() + ", one core")
    times = ("step", "replicate", "forward", "backward")
    run.print_head("net", "GPUs", "contender", *times, "containers after the forward", "left after the step")
    totals = {}
    with run.broadcasts_for_nothing(), costing_nothing():
        for net in options.nets:
            for number in options.numbers:
                totals[net, number] = run_in_turns(libraries, net, number, options)
    run.print_head("net", "GPUs", "contenders", "step", "wanted at most")
    for (net, number), of_contenders in totals.items():
        print_ratios(net, number, of_contenders)


if __name__ == "__main__":
    main()
