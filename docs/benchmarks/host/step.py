"""Processor time of whole training steps on simulated GPUs whose kernels, copies and streams cost nothing.

A step makes the replicas of a net, runs them forward, and runs a backward, through the wrapper as a user calls it. Each
contender is a process of its own, so that the garbage collector meets only what belongs to it. All processes share one
core, where threads do not fight for the interpreter lock, and take turns: each runs a block of steps while the others
wait. Times are means over all steps: a full garbage collection comes once in many steps, and takes longer than one.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
import warnings
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
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
# The largest whole steps that are wanted: of ResNet-50 as parts of those of `nn.DataParallel`, for each number of GPUs;
# and of a layer, forward and backward, as parts of those of the other version.
OF_PLAIN, OF_OTHER = dict(zip(run.NUMBERS, (1.60, 1.45, 1.38), strict=True)), 0.95


class Step(NamedTuple):
    """What a step takes, in seconds of processor time, and what it makes, as the garbage collector counts."""

    replicate: float
    forward: float  # without the replicas
    backward: float
    full: float  # of these, in full garbage collections
    after_forward: float  # containers that are alive then, beyond those before the step
    after_step: float  # containers that are left for the garbage collector

    def total(self, net: str) -> float:
        """Return the time that counts."""
        return self.forward + self.backward + (0 if net == LAYERS else self.replicate)


class Contender:
    """A net in the wrapper of a library, or in that of torch, and its input."""

    def __init__(self, folder: Path | None, net: str, number: int) -> None:
        shape = (IMAGES * number, 3, SIZE, SIZE)
        if net == LAYERS:
            shape = (run.SHAPE[0] * number, *run.SHAPE[1:])
            module: nn.Module = nn.Sequential(*[nn.BatchNorm2d(run.SHAPE[1]) for _ in range(run.LAYERS)])
        else:
            module = import_torchvision().models.get_model(net)
        library = None if folder is None else run.library_at(folder)
        self.parallel = run.wrap(library, module, list(range(number)))
        self.replicate, self.seconds, self.full = self.parallel.replicate, 0.0, 0.0
        self.parallel.replicate = self.timed_replicate
        self.input = torch.randn(shape, device="cuda:0")
        # A whole step at once: operators run in their first call, and a backward of pooling needs true indices. In the
        # first three steps, a wrapper also looks for state that is lost.
        for _ in range(4):
            output = self.parallel(self.input)
            self.grad_output = torch.randn_like(output)
            output.backward(self.grad_output)
        self.made = self.containers()
        gc.callbacks.append(self.time_full_collection)

    def timed_replicate(self, *args: Any) -> Any:
        start = time.process_time()
        replicas = self.replicate(*args)
        self.seconds += time.process_time() - start
        return replicas

    def time_full_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            self.full += time.process_time() if phase == "stop" else -time.process_time()

    def forward(self) -> torch.Tensor:
        self.parallel.zero_grad()
        output: torch.Tensor = self.parallel(self.input)
        return output

    def containers(self) -> tuple[int, int]:
        """Return how many containers one more step has made after the forward, and after the step."""
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

    def block(self, steps: int) -> Step:
        """Run steps, and return the mean of what they took."""
        # A collection of generation 1 may come at the same point of every step. In each block, this moves it on.
        gc.collect(0)
        self.seconds = self.full = forward = backward = 0.0
        for _ in range(steps):
            start = time.process_time()
            output = self.forward()
            middle = time.process_time()
            output.backward(self.grad_output)
            del output
            forward += middle - start
            backward += time.process_time() - middle
        seconds = self.seconds, forward - self.seconds, backward, self.full
        return Step(*(one / steps for one in seconds), *self.made)


def serve(connection: Connection, *contender: Any) -> None:
    """Be the process of one contender: for each number of steps that arrives, run a block and send what it took."""
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    use_streams_of_torch()
    take_core(0)  # and so do the threads that will be started
    with run.broadcasts_for_nothing(), costing_nothing():
        own = Contender(*contender)
        while steps := connection.recv():
            connection.send(own.block(steps))


def run_in_turn(folders: dict[str, Path | None], net: str, number: int, options: Any) -> dict[str, Step]:
    """Return the mean step of each contender."""
    spawn, blocks = multiprocessing.get_context("spawn"), {name: list[Step]() for name in folders}
    connections = {}
    with ExitStack() as stack:
        for name, folder in folders.items():
            connections[name], other_end = spawn.Pipe()
            process = spawn.Process(target=serve, args=(other_end, folder, net, number))
            process.start()
            other_end.close()
            stack.callback(process.join)
            stack.callback(connections[name].send, 0)
        for i in range(1 + options.blocks):
            for name, connection in connections.items():
                connection.send(options.steps)
                block = connection.recv()
                if i:  # after a warm-up
                    blocks[name].append(block)
    return {name: Step(*map(statistics.mean, zip(*several, strict=True))) for name, several in blocks.items()}


def print_steps(net: str, number: int, steps: dict[str, Step]) -> None:
    """Print a row for each contender."""
    unit, text = (1e6 / run.LAYERS, "us") if net == LAYERS else (1e3, "ms")
    for name, step in steps.items():
        times = [f"{unit * seconds:.1f} {text}" for seconds in (step.total(net), *step[:4])]
        run.print_row(net, number, name, *times, f"{step.after_forward:.0f}", f"{step.after_step:.0f}")


def print_ratios(net: str, number: int, steps: dict[str, Step]) -> None:
    """Print our step as a part of that of each other contender, and theirs as parts of that with plain layers."""
    seconds = {name: step.total(net) for name, step in steps.items()}
    others = {name: step.total(net) - step.full for name, step in steps.items()}
    wanted = {run.PLAIN: OF_PLAIN[number] if net == NETS[0] else "", run.OTHER: OF_OTHER if net == LAYERS else ""}
    for rival in [rival for rival in seconds if rival != run.OURS]:
        ratios = [f"{taken[run.OURS] / taken[rival]:.2f}" for taken in (seconds, others)]
        run.print_row(net, number, f"{run.OURS} / {rival}", *ratios, wanted.get(rival, ""))
    for rival in [rival for rival in seconds if rival not in (run.OURS, run.PLAIN)]:
        ratios = [f"{taken[rival] / taken[run.PLAIN]:.2f}" for taken in (seconds, others)]
        run.print_row(net, number, f"{rival} / {run.PLAIN}", *ratios, "")


def main() -> None:
    """Print both tables of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="folder of another version of the library")
    parser.add_argument("--existing", type=Path, help="folder into which sync-batchnorm==0.0.1 was installed")
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--nets", choices=NETS, nargs="+", default=NETS)
    parser.add_argument("--numbers", type=int, choices=run.NUMBERS, nargs="+", default=run.NUMBERS, help="of GPUs")
    options = parser.parse_args()
    folders: dict[str, Path | None] = {run.PLAIN: None, run.OURS: run.ROOT}
    folders |= {run.OTHER: options.other} if options.other else {}
    folders |= {run.EXISTING: options.existing} if options.existing else {}
    print(environment() + ", one core")
    times = ("step", "replicate", "forward", "backward", "full collections")
    run.print_head("net", "GPUs", "contender", *times, "containers after the forward", "left after the step")
    results = {}
    for net in options.nets:
        for number in options.numbers:
            results[net, number] = run_in_turn(folders, net, number, options)
            print_steps(net, number, results[net, number])
    run.print_head("net", "GPUs", "contenders", "step", "without full collections", "wanted at most")
    for (net, number), steps in results.items():
        print_ratios(net, number, steps)


if __name__ == "__main__":
    main()
