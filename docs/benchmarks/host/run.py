"""What the host pays for one layer on several GPUs, as processor time on simulated ones; and for the replicas of a net.

A simulated launch costs processor time too, so the table also has the launches: what is the same for both contenders
falls out of a difference, and not of a ratio. ``--other`` names the folder of another version of this library, such as
a worktree of an older commit, which is loaded beside this one and takes turns with it.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs" / "benchmarks"), str(ROOT / "docs" / "examples")]
import simulated_gpus

simulated_gpus.simulate(8)  # before torch is imported, and so before what is imported below
# ruff: noqa: E402

import torch
from common import import_torchvision
from harness import environment
from simulated_gpus import recording
from torch import Tensor, nn
from torch.nn.parallel import comm

LAYERS, SHAPE = 20, (2, 8, 2, 2)  # the shape of the input of each replica


def library_at(folder: Path) -> ModuleType:
    """Import the library that lies in a folder, beside one that is there already."""
    names = [name for name in sys.modules if name.partition(".")[0] == "sync_batchnorm"]
    hidden = {name: sys.modules.pop(name) for name in names}
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("sync_batchnorm")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "sync_batchnorm"]:
            del sys.modules[name]
        sys.modules.update(hidden)


class Contender:
    """A wrapper around layers in a row, with replicas that are made anew for each step, and what a step costs."""

    def __init__(self, wrap: Callable[[nn.Module, list[int]], Any], devices: list[int]) -> None:
        net = nn.Sequential(*[nn.BatchNorm2d(SHAPE[1]) for _ in range(LAYERS)]).cuda()
        self.parallel, self.devices = wrap(net, devices), devices
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": []}
        self.launches: dict[str, int] = {}

    def step(self, count: bool = False) -> None:
        parts = [torch.randn(SHAPE, device=f"cuda:{i}").requires_grad_() for i in self.devices]
        grads = [torch.randn(SHAPE, device=f"cuda:{i}") for i in self.devices]
        replicas = self.parallel.replicate(self.parallel.module, self.parallel.device_ids)
        outputs: list[Tensor] = []

        def forward() -> None:
            outputs[:] = self.parallel.parallel_apply(replicas, [(part,) for part in parts], [{} for _ in parts])

        for name, body in (("forward", forward), ("backward", lambda: torch.autograd.backward(outputs, grads))):
            if count:
                with recording() as ran:
                    body()
                self.launches[name] = ran.launches
            else:
                start = time.process_time()
                body()
                self.seconds[name].append(time.process_time() - start)


def contenders(other: ModuleType | None) -> dict[str, Callable[[nn.Module, list[int]], Any]]:
    found = {"ours": library_at(ROOT)} | ({"the other version": other} if other is not None else {})
    made: dict[str, Callable[[nn.Module, list[int]], Any]] = {"nn.BatchNorm2d": nn.DataParallel}
    for name, library in found.items():
        made[name] = lambda net, devices, of=library: of.DataParallelWithCallback(of.convert_model(net), devices)
    return made


def time_layers(made: dict[str, Callable[[nn.Module, list[int]], Any]], rounds: int) -> None:
    print("| GPUs | contender | forward, us | launches | backward, us | launches |")
    print("|---|---|---|---|---|---|")
    for number in (2, 4, 8):
        running = {name: Contender(wrap, list(range(number))) for name, wrap in made.items()}
        for contender in running.values():
            contender.step(count=True)
        for _ in range(rounds):
            for contender in running.values():
                contender.step()
        for name, contender in running.items():
            cells = [
                f"{1e6 * statistics.median(contender.seconds[way]) / LAYERS:.0f} | {contender.launches[way] / LAYERS:g}"
                for way in ("forward", "backward")
            ]
            print(f"| {number} | {name} | {' | '.join(cells)} |", flush=True)


@contextmanager
def copies_for_nothing() -> Iterator[None]:
    """Let each broadcast return what the first one for the same tensors has returned."""
    broadcast, kept = comm.broadcast_coalesced, dict[Any, Any]()

    def once(tensors: Any, devices: Any, **options: Any) -> Any:
        key = (*map(id, tensors), *map(str, devices))
        if key not in kept:
            kept[key] = broadcast(tensors, devices, **options)
        return [[tensor.detach() for tensor in own] for own in kept[key]]

    with mock.patch.object(comm, "broadcast_coalesced", once):
        yield


def time_replicas(made: dict[str, Callable[[nn.Module, list[int]], Any]], rounds: int) -> None:
    print("| net | GPUs |" + "".join(f" {name}, ms |" for name in made))
    print("|---|---|" + "---|" * len(made))
    models = import_torchvision().models
    for net in ("resnet50", "mobilenet_v3_large"):
        for number in (2, 4, 8):
            wrapped = [wrap(models.get_model(net).cuda(), list(range(number))) for wrap in made.values()]
            seconds: list[list[float]] = [[] for _ in wrapped]
            with copies_for_nothing():
                for _ in range(rounds):
                    for parallel, taken in zip(wrapped, seconds, strict=True):
                        start = time.process_time()
                        parallel.replicate(parallel.module, parallel.device_ids)
                        taken.append(time.process_time() - start)
            cells = "".join(f" {1e3 * statistics.median(taken):.1f} |" for taken in seconds)
            print(f"| {net} | {number} |{cells}", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="folder of another version of the library")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "expected batch norms that synchronize")
    torch.set_num_threads(1)
    print(environment())
    made = contenders(None if options.other is None else library_at(options.other))
    time_layers(made, options.rounds)
    time_replicas(made, max(3, options.rounds // 4))


if __name__ == "__main__":
    main()
