"""What the host pays for one layer on several GPUs, as processor time on simulated ones; and for the replicas of a net.

Twice: with kernels as they are simulated, which take processor time too, and with kernels, copies and streams that cost
nothing. ``--other`` names the folder of another version of this library, such as a worktree of an older commit, and
``--existing`` that of the existing library; each is loaded beside this one, and all take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from free import costing_nothing, use_streams_of_torch
from harness import environment, library_at, print_head, print_row, take_core
from simulated_gpus import recording
from torch import Tensor, nn
from torch.nn.parallel import comm

LAYERS, SHAPE = 20, (2, 8, 2, 2)  # the shape of the input of each replica
NUMBERS = (2, 4, 8)  # of GPUs
OURS, PLAIN, OTHER, EXISTING = "ours", "nn.BatchNorm2d", "the other version", "the existing library"
WAYS = ("forward", "backward")

Times = dict[str, dict[str, list[float]]]  # by row and column, one for each number of GPUs


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
    """A wrapper around layers in a row, with replicas that are made anew for each step, and what a step costs."""

    def __init__(self, library: ModuleType | None, number: int) -> None:
        net = nn.Sequential(*[nn.BatchNorm2d(SHAPE[1]) for _ in range(LAYERS)])
        self.parallel = wrap(library, net, list(range(number)))
        self.parts = [torch.randn(SHAPE, device=f"cuda:{i}").requires_grad_() for i in range(number)]
        self.grads = [torch.randn(SHAPE, device=f"cuda:{i}") for i in range(number)]
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self.launches: dict[str, int] = {}

    def step(self, count: bool = False) -> None:
        """Make replicas, and time a forward and a backward of them, or count their launches."""
        self.parallel.zero_grad()
        parts = [part.detach().requires_grad_() for part in self.parts]
        replicas = self.parallel.replicate(self.parallel.module, self.parallel.device_ids)
        outputs: list[Tensor] = []

        def forward() -> None:
            outputs[:] = self.parallel.parallel_apply(replicas, [(part,) for part in parts], [{} for _ in parts])

        for name, body in zip(WAYS, (forward, lambda: torch.autograd.backward(outputs, self.grads)), strict=True):
            if count:
                with recording() as ran:
                    body()
                self.launches[name] = ran.launches
            else:
                start = time.process_time()
                body()
                self.seconds[name].append(time.process_time() - start)

    def microseconds(self, way: str) -> float:
        """Return the median for one layer."""
        return 1e6 * statistics.median(self.seconds[way]) / LAYERS


def print_growth(kind: str, times: Times) -> None:
    """Print for each row and column, with times for all numbers of GPUs, the last as a multiple of the first."""
    print_head(kind, *(f"{column}, {NUMBERS[-1]} GPUs / {NUMBERS[0]}" for column in next(iter(times.values()))))
    for row, columns in times.items():
        print_row(row, *(f"{several[-1] / several[0]:.1f}" for several in columns.values()))


def run_interleaved(libraries: dict[str, ModuleType | None], number: int, rounds: int) -> dict[str, Contender]:
    running = {name: Contender(library, number) for name, library in libraries.items()}
    for i in range(3 + rounds):
        for contender in running.values():
            if i == 3:  # after a warm-up
                contender.seconds = {way: [] for way in WAYS}
            contender.step()
    return running


def time_layers(libraries: dict[str, ModuleType | None], rounds: int) -> None:
    """Print processor time and launches of a layer, with kernels as they are simulated."""
    times: Times = {name: {way: [] for way in WAYS} for name in libraries}
    print_head("GPUs", "contender", "forward, us", "launches", "backward, us", "launches")
    for number in NUMBERS:
        for name, contender in run_interleaved(libraries, number, rounds).items():
            contender.step(count=True)
            cells = []
            for way in WAYS:
                times[name][way].append(contender.microseconds(way))
                cells += [f"{times[name][way][-1]:.0f}", f"{contender.launches[way] / LAYERS:g}"]
            print_row(number, name, *cells)
    print_growth("contender", times)


def time_free_layers(libraries: dict[str, ModuleType | None], rounds: int) -> None:
    """Print processor time of a layer where kernels cost nothing, what it is of other contenders', and how it grows."""
    times: Times = {name: {way: [] for way in WAYS} for name in libraries}
    print_head("GPUs", "contender", "forward, us", "backward, us")
    for number in NUMBERS:
        with costing_nothing():
            running = run_interleaved(libraries, number, rounds)
        for name, contender in running.items():
            for way in WAYS:
                times[name][way].append(contender.microseconds(way))
            print_row(number, name, *(f"{times[name][way][-1]:.0f}" for way in WAYS))
    for rival in [name for name in libraries if name != OURS]:
        print_head("GPUs", *(f"{way}, ours / {rival}" for way in WAYS))
        for i, number in enumerate(NUMBERS):
            print_row(number, *(f"{times[OURS][way][i] / times[rival][way][i]:.2f}" for way in WAYS))
    print_growth("contender", times)


class Merges:
    """What the master does between the arrival of the last replica and the delivery: its callback, while patched."""

    def __init__(self, library: ModuleType) -> None:
        self.kind, self.seconds, self.counting = library.comm.SyncMaster, list[float](), False
        self.launches = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the callbacks of all masters that are made in the body."""
        init = self.kind.__init__

        def watching(master: Any, callback: Callable[[Any], Any]) -> None:
            init(master, lambda messages: self.run(callback, messages))

        with mock.patch.object(self.kind, "__init__", watching):
            yield

    def run(self, callback: Callable[[Any], Any], messages: Any) -> Any:
        if self.counting:
            with recording() as ran:
                result = callback(messages)
            self.launches += ran.launches
            return result
        start = time.thread_time()
        result = callback(messages)
        self.seconds.append(time.thread_time() - start)
        return result


def time_merges(libraries: dict[str, ModuleType | None], rounds: int) -> None:
    """Print processor time and launches of the master after the last arrival, in one forward of a layer."""
    print_head("GPUs", "contender", "simulated kernels, us", "kernels for nothing, us", "launches", "wanted at most")
    synchronized = {name: library for name, library in libraries.items() if library is not None}
    modes = {"simulated kernels": nullcontext, "kernels for nothing": costing_nothing}
    times: Times = {name: {mode: [] for mode in modes} for name in synchronized}
    for number in NUMBERS:
        merges = {name: Merges(library) for name, library in synchronized.items()}
        with ExitStack() as stack:
            for merge in merges.values():
                stack.enter_context(merge.watched())
            running = {name: Contender(library, number) for name, library in synchronized.items()}
            for mode, context in modes.items():
                with context():
                    for i in range(3 + rounds):
                        for name, contender in running.items():
                            if i == 3:
                                merges[name].seconds.clear()
                            contender.step()
                for name, merge in merges.items():
                    times[name][mode].append(1e6 * statistics.median(merge.seconds))
            for name, merge in merges.items():
                merge.counting = True
                running[name].step()
                cells = [f"{several[-1]:.0f}" for several in times[name].values()]
                print_row(number, name, *cells, f"{merge.launches / LAYERS:g}", 2 * number + 3)  # with the outputs
    print_growth("contender", times)


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


def time_replicas(libraries: dict[str, ModuleType | None], rounds: int) -> None:
    """Print the processor time of `replicate` for two nets, where kernels and copies cost nothing."""
    rivals = [name for name in libraries if name != OURS]
    ratios = [f"ours / {rival}" for rival in rivals]
    print_head("net", "GPUs", *(f"{name}, ms" for name in libraries), *ratios)
    models, nets = import_torchvision().models, ("resnet50", "mobilenet_v3_large")
    times: Times = {net: {name: [] for name in libraries} for net in nets}
    for net in nets:
        for number in NUMBERS:
            wrapped = {n: wrap(library, models.get_model(net), list(range(number))) for n, library in libraries.items()}
            seconds: dict[str, list[float]] = {name: [] for name in wrapped}
            with broadcasts_for_nothing(), costing_nothing():
                for j in range(1 + rounds):
                    for name, parallel in wrapped.items():
                        start = time.process_time()
                        parallel.replicate(parallel.module, parallel.device_ids)
                        if j:
                            seconds[name].append(time.process_time() - start)
            found = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
            for name, median in found.items():
                times[net][name].append(median)
            cells = [f"{median:.1f}" for median in found.values()]
            cells += [f"{found[OURS] / found[rival]:.2f}" for rival in rivals]
            print_row(net, number, *cells)
    print_growth("net", times)


PARTS: dict[str, tuple[str, Callable[[dict[str, ModuleType | None], int], None]]] = {
    "simulated": ("A layer, with kernels as they are simulated:", time_layers),
    "free": ("A layer, with kernels, copies and streams that cost nothing:", time_free_layers),
    "merge": ("Of the forward, the part after the last arrival:", time_merges),
    "replicate": ("The replicas of a net, with kernels and copies that cost nothing:", time_replicas),
}


def main() -> None:
    """Print the tables of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="folder of another version of the library")
    parser.add_argument("--existing", type=Path, help="folder into which sync-batchnorm==0.0.1 was installed")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parts", choices=list(PARTS), nargs="+", default=list(PARTS), help="which tables to print")
    parser.add_argument(
        "--one-core",
        action="store_true",
        help="keep all threads on one core, where the system can: then they do not fight for the interpreter lock",
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    torch.set_num_threads(1)
    use_streams_of_torch()
    if options.one_core:
        take_core(0)  # and so do the threads that will be started
    print(environment() + ", one core" * options.one_core)
    libraries = libraries_at(options.other, options.existing)
    for part in options.parts:
        title, run = PARTS[part]
        print(f"\n{title}")
        run(libraries, max(5, options.rounds // 4) if part == "replicate" else options.rounds)


if __name__ == "__main__":
    main()
