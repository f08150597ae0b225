"""What a real GPU says: times, launches, errors, memory and waits of replicas that share it.

Replicas are made with repeated indices, as ``[0, 0]``. So streams, the operators of CUDA, threads and the autograd
graph are those of several GPUs; copies between GPUs are not, and kernels run one after another. Replicas that share a
GPU take turns, which those on several GPUs do not: the contender "without turns" is ours without them, for its time.
With ``SIMULATED_GPUS=1`` in the environment, the script runs on a simulated GPU, to try it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import os
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("tests", "docs/benchmarks", "docs/benchmarks/precision", "docs/examples")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
SIMULATED = "SIMULATED_GPUS" in os.environ
if SIMULATED:
    import simulated_gpus

    simulated_gpus.simulate(int(os.environ["SIMULATED_GPUS"]))
# ruff: noqa: E402

import torch
from batches import SHAPE, batches
from common import import_torchvision
from harness import FORMATS, environment, library_at, median_ratio, print_head, print_row
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

WHOLE, PLAIN, OURS, SEVERAL = "whole batch", "nn.BatchNorm2d", "ours", "ours, without turns"
OTHER, EXISTING = "the other version, without turns", "the older library"
RATIOS = [(OURS, PLAIN), (SEVERAL, PLAIN), (OURS, EXISTING), (SEVERAL, OTHER)]
TIMES = ("wall", "issued", "processor")  # of a step: until it ends, until all is issued, and of all threads
LAYERS = 8  # in a row
SHAPES = [(8, 64, 56, 56), (8, 256, 28, 28), (8, 512, 14, 14), (8, 2048, 7, 7)]  # in each replica
IMAGES, SIZE = (2, 32) if SIMULATED else (8, 224)  # in each replica

Libraries = dict[str, ModuleType | None]


def libraries_at(other: Path | None, existing: Path | None) -> Libraries:
    """Import the contenders; None stands for plain layers."""
    libraries: Libraries = {WHOLE: None, PLAIN: None, OURS: library_at(ROOT), SEVERAL: library_at(ROOT)}
    if other is not None:
        libraries[OTHER] = library_at(other)
    for name in (SEVERAL, OTHER):
        if (library := libraries.get(name)) is not None:
            of_wrapper = library.DataParallelWithCallback.parallel_apply.__globals__
            of_runs = of_wrapper["call_replicas"].__globals__
            of_runs["_run_in_turns"] = of_runs["_run_threads"]
    if existing is not None:
        libraries[EXISTING] = library = library_at(existing)
        library.set_sbn_eps_mode("plus")  # the rule of `nn.BatchNorm2d`
    return libraries


def wrap(name: str, library: ModuleType | None, net: nn.Module, replicas: int) -> Any:
    """Return `net` on the GPU: alone, or in replicas of torch's wrapper or of that of a library."""
    if name == WHOLE:
        return net.cuda()
    if library is None:
        return nn.DataParallel(net.cuda(), [0] * replicas)
    return library.DataParallelWithCallback(library.convert_model(net).cuda(), [0] * replicas)


def norms(number: int, channels: int = 64) -> nn.Sequential:
    return nn.Sequential(*[nn.BatchNorm2d(channels) for _ in range(number)])


def bytes_allocated() -> int:
    """Return the bytes of all tensors on the GPU, without garbage."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


class Contender:
    """A net and its optimizer; a step, and the milliseconds that it takes."""

    def __init__(
        self, name: str, library: ModuleType | None, net: nn.Module, replicas: int, input: Tensor, amp: bool = False
    ) -> None:
        self.model, self.input, self.amp = wrap(name, library, net, replicas), input, amp
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)
        with torch.no_grad():
            output = net.eval()(input[:1])
        net.train()
        self.grad = torch.randn_like(output).expand(len(input), *output.shape[1:]) / 100
        self.times: list[tuple[float, ...]] = []  # see `TIMES`

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=self.amp):
            loss = (self.model(self.input) * self.grad).sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def time(self) -> None:
        torch.cuda.synchronize()
        start, of_processor = time.perf_counter(), time.process_time()
        self.step()
        issued, of_processor = time.perf_counter() - start, time.process_time() - of_processor
        torch.cuda.synchronize()
        self.times.append(tuple(1e3 * seconds for seconds in (time.perf_counter() - start, issued, of_processor)))


def ratios_of(contenders: Iterable[str]) -> list[tuple[str, str]]:
    """Return the ratios whose contenders run."""
    return [ratio for ratio in RATIOS if set(ratio) <= set(contenders)]


def print_head_of_times(libraries: Libraries, *names: str) -> None:
    """Print the head of a table of `time_in_turn`."""
    print_head(*names, *(f"{name}, ms" for name in libraries), *(" / ".join(ratio) for ratio in ratios_of(libraries)))


def time_in_turn(contenders: dict[str, Contender], options: argparse.Namespace, units: int, *cells: Any) -> None:
    """Print the median of each contender for a unit, and medians of ratios; all take turns after each step."""
    for i in range(4 + options.rounds):
        for contender in contenders.values():
            if i == 4:  # after a warm-up
                contender.times.clear()
            contender.time()
    which = TIMES.index(options.time)
    times = {name: [several[which] for several in contender.times] for name, contender in contenders.items()}
    medians = (f"{statistics.median(taken) / units:.3g}" for taken in times.values())
    ratios = (f"{median_ratio(times[ours], times[rival]):.2f}" for ours, rival in ratios_of(times))
    print_row(*cells, *medians, *ratios)


def time_steps(libraries: Libraries, options: argparse.Namespace) -> None:
    """A training step of a ResNet-50, with its optimizer."""
    print_head_of_times(libraries, "precision, format", "replicas")
    for amp, kind in ((False, "contiguous"), (True, "channels_last")):
        plain = import_torchvision().models.resnet50()
        for replicas in options.replicas:
            input = torch.randn(IMAGES * replicas, 3, SIZE, SIZE, device="cuda").to(memory_format=FORMATS[kind])
            contenders = {}
            for name, library in libraries.items():
                net = copy.deepcopy(plain).cuda().to(memory_format=FORMATS[kind])
                contenders[name] = Contender(name, library, net, replicas, input, amp)
            time_in_turn(contenders, options, 1, f"{'float16, ' if amp else 'float32, '}{kind}", replicas)
            del contenders
            gc.collect()


def time_layers(libraries: Libraries, options: argparse.Namespace) -> None:
    """A layer, of eight in a row, with replicas, scatter and gather, and an optimizer."""
    print_head_of_times(libraries, "input of each replica", "format", "replicas")
    for shape in SHAPES:
        for kind, memory_format in FORMATS.items():
            for replicas in options.replicas:
                size = (shape[0] * replicas, *shape[1:])
                input = torch.randn(size, device="cuda").to(memory_format=memory_format)
                contenders = {}
                for name, library in libraries.items():
                    contenders[name] = Contender(name, library, norms(LAYERS, shape[1]), replicas, input)
                time_in_turn(contenders, options, LAYERS, shape, kind, replicas)


def milliseconds(body: Callable[[], object], rounds: int) -> str:
    """Return the median time until all is issued."""
    taken = []
    for _ in range(3 + rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        body()
        taken.append(1e3 * (time.perf_counter() - start))
    return f"{statistics.median(taken[3:]):.3g}"


def run_in_new_thread(body: Callable[[], object]) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def time_threads(libraries: Libraries, options: argparse.Namespace) -> None:
    """Forward passes of a net without replicas, by thread; milliseconds until all is issued."""
    tasks, ends = SimpleQueue[Any](), SimpleQueue[Any]()

    def serve() -> None:
        while True:
            ends.put(tasks.get()())

    def run_in_kept_thread(body: Callable[[], object]) -> None:
        tasks.put(body)
        ends.get()

    threading.Thread(target=serve, daemon=True).start()
    models = import_torchvision().models
    image = torch.randn(IMAGES, 3, SIZE, SIZE, device="cuda")
    nets: dict[str, tuple[nn.Module, Tensor]] = {
        name: (models.get_model(name).cuda(), image) for name in ("resnet18", "resnet50", "mobilenet_v3_large")
    }
    nets["53 nn.BatchNorm2d"] = norms(53).cuda(), torch.randn(8, 64, 14, 14, device="cuda")
    print_head("net", "main thread", "a new thread for each pass", "one thread that stays")
    for name, (net, input) in nets.items():

        def forward(net: nn.Module = net, input: Tensor = input) -> None:
            net(input)

        ways = (lambda body: body(), run_in_new_thread, run_in_kept_thread)
        print_row(name, *(milliseconds(lambda way=way: way(forward), options.rounds) for way in ways))
    generator = torch.cuda.default_generators[0]
    taken = milliseconds(lambda: [generator.set_state(generator.get_state()) for _ in range(100)], options.rounds)
    print(f"\nThe state of the GPU's generator, read and set, takes {float(taken) * 10:.0f} us.")


def kernels_of(body: Callable[[], object]) -> tuple[Counter[str], float]:
    """Return the kernels, copies and fills that a function runs on the GPU, and their seconds there."""
    if SIMULATED:
        with simulated_gpus.recording() as ran:
            body()
        return Counter(ran.by_operator()), 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        body()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counter(event.name for event in on_gpu), sum(event.self_device_time_total for event in on_gpu) / 1e6


def passes_of_layers(parallel: Any, dtype: torch.dtype, kind: str) -> Iterator[tuple[Counter[str], float]]:
    """Yield what a forward and a backward pass of layers in two replicas runs on the GPU, after a warm-up."""
    parts = [torch.randn(SHAPES[0], device="cuda", dtype=dtype).to(memory_format=FORMATS[kind]) for _ in range(2)]
    leaves, grads = [part.requires_grad_() for part in parts], [torch.randn_like(part) for part in parts]
    for is_last in (False, False, True):
        replicas = parallel.replicate(parallel.module, [0, 0])
        outputs: list[Tensor] = []

        def forward(replicas: Any = replicas, outputs: list[Tensor] = outputs) -> None:
            outputs[:] = parallel.parallel_apply(replicas, [(leaf,) for leaf in leaves], [{}, {}])

        def backward(outputs: list[Tensor] = outputs) -> None:
            torch.autograd.backward(outputs, grads)

        for body in (forward, backward):
            if is_last:
                yield kernels_of(body)
            else:
                body()


def count_kernels(libraries: Libraries, options: argparse.Namespace) -> None:
    """What a layer launches in two replicas, and how long that runs on the GPU."""
    found: dict[str, Counter[str]] = {}
    print_head(
        "dtype", "format", "contender", "launches forward", "us on the GPU", "launches backward", "us on the GPU"
    )
    for dtype in (torch.float32, torch.float16):
        for kind in FORMATS:
            for name in [name for name in libraries if name not in (WHOLE, SEVERAL, OTHER)]:
                parallel, cells = wrap(name, libraries[name], norms(LAYERS), 2), list[str]()
                ways = zip(("forward", "backward"), passes_of_layers(parallel, dtype, kind), strict=True)
                for way, (counts, seconds) in ways:
                    cells += [f"{sum(counts.values()) / LAYERS:g}", f"{1e6 * seconds / LAYERS:.1f}"]
                    if name == OURS and dtype == torch.float32:
                        found[f"{way}, {kind}"] = counts
                print_row(str(dtype).removeprefix("torch."), kind, name, *cells)
    for title, counts in found.items():
        print(f"\nours, float32, {title}, {LAYERS} layers in two replicas:")
        print("\n".join(f"    {count:4} {kernel[:110]}" for kernel, count in counts.most_common()))


def count_kernels_of_steps(libraries: Libraries, options: argparse.Namespace) -> None:
    """What a training step of a ResNet-50 in float32 launches, and how long that runs on the GPU."""
    print_head("replicas", "contender", "launches", "ms on the GPU")
    plain = import_torchvision().models.resnet50()
    for replicas in options.replicas:
        input = torch.randn(IMAGES * replicas, 3, SIZE, SIZE, device="cuda")
        for name in [name for name in libraries if name not in (SEVERAL, OTHER)]:
            contender = Contender(name, libraries[name], copy.deepcopy(plain).cuda(), replicas, input)
            contender.step()
            counts, seconds = kernels_of(contender.step)
            print_row(replicas, name, sum(counts.values()), f"{1e3 * seconds:.3g}")


def error(actual: Tensor, expected: Tensor, relative: bool = False) -> float:
    """Return the largest absolute error, or the largest relative one."""
    difference = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs()
    return float((difference / expected.detach().cpu() if relative else difference).max())


def results(layer: Any, model: nn.Module, input: Tensor, grad: Tensor) -> list[Tensor]:
    """Return variance, output and input gradient of a step of `model`, which has `layer` inside."""
    torch.manual_seed(1)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(SHAPE[1]) + 0.5)
        layer.bias.copy_(torch.randn(SHAPE[1]))
    leaf = input.clone(memory_format=torch.preserve_format).requires_grad_()
    output = model(leaf)
    output.backward(grad)
    return [layer.running_var, output, leaf.grad]  # type: ignore[list-item]


def print_errors(libraries: Libraries, options: argparse.Namespace) -> None:
    """Errors of float32 against float64 on the CPU, by ratio of mean and deviation, on four replicas and on one."""
    names = [name for name in libraries if name not in (PLAIN, SEVERAL, OTHER)]
    columns = [f"{quantity}: {name}" for quantity in ("variance", "output", "input gradient") for name in names]
    print_head("format", "mean / deviation", *columns, "four replicas and one: output", "input gradient")
    for kind, ratio, input, grad in batches():
        exact_layer = nn.BatchNorm2d(SHAPE[1], momentum=1.0).double()
        exact = results(exact_layer, exact_layer, input.double(), grad.double())
        found = {}
        for name, library, replicas in [(n, libraries[n], 4) for n in names] + [("one", libraries[OURS], 1)]:
            model = wrap(name, library, nn.BatchNorm2d(SHAPE[1], momentum=1.0), replicas)
            found[name] = results(getattr(model, "module", model), model, input.cuda(), grad.cuda())
        cells = [error(found[name][i], exact[i], i == 0) for i in range(3) for name in names]
        cells += [error(found[OURS][i], found["one"][i]) for i in (1, 2)]
        print_row(kind, f"{ratio:g}", *(f"{cell:.0e}" for cell in cells))


def repeat_steps(libraries: Libraries, options: argparse.Namespace) -> None:
    """How many of 200 equal steps on four replicas have other bits than the first."""
    ours: Any = libraries[OURS]
    torch.backends.cudnn.deterministic = True
    nets = {"three layers": norms(3), "three layers, float16, channels_last": norms(3)}
    nets["convolutions between"] = nn.Sequential(nn.Conv2d(64, 64, 3), norms(1), nn.Conv2d(64, 64, 3), norms(1))
    print_head("net", "steps with other bits", "largest difference")
    for title, net in nets.items():
        parallel = ours.DataParallelWithCallback(ours.convert_model(net).cuda(), [0] * 4)
        input = torch.randn(15, 64, 28, 28, device="cuda")
        if "float16" in title:
            input = input.half().to(memory_format=torch.channels_last)
        state, steps = copy.deepcopy(net.state_dict()), []
        for _ in range(200):
            net.load_state_dict(state)
            net.zero_grad()
            leaf = input.clone(memory_format=torch.preserve_format).requires_grad_()
            output = parallel(leaf)
            output.float().square().mean().backward()
            tensors = [output, leaf.grad, *[p.grad for p in net.parameters()], *net.buffers()]
            steps.append([tensor.detach().cpu() for tensor in tensors])  # type: ignore[union-attr]
        differences = [max(map(error, step, steps[0])) for step in steps]
        print_row(title, sum(difference != 0 for difference in differences), f"{max(differences):.1e}")
    torch.backends.cudnn.deterministic = False


class Fails(nn.Module):
    """Raises in its last replica, if it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = norms(2), norms(2)

    def forward(self, input: Tensor) -> Tensor:
        output = self.first(input)
        if self.fails and len(input) == 1:  # the last of unequal chunks
            raise LookupError("as told")
        return self.second(output)  # type: ignore[no-any-return]


def measure_memory(libraries: Libraries, options: argparse.Namespace) -> None:
    """The memory of a step of twelve layers at (8, 64, 112, 112) in each of two replicas, and of many small steps."""
    print_head("contender", "peak of a step, MiB", "left after it, MiB")
    input = torch.randn(16, 64, 112, 112, device="cuda")
    for name in [name for name in libraries if name not in (SEVERAL, OTHER)]:
        contender = Contender(name, libraries[name], norms(12), 2, input)
        contender.step()
        before = bytes_allocated()
        torch.cuda.reset_peak_memory_stats()
        contender.step()
        after = bytes_allocated()
        print_row(name, *(f"{(size - before) / 2**20:.2f}" for size in (torch.cuda.max_memory_allocated(), after)))
        del contender
    ours, module = libraries[OURS], Fails()
    small = Contender(OURS, ours, module, 4, torch.randn(7, 64, 8, 8, device="cuda"))
    sizes = []
    for number in (50, 950):
        for _ in range(number):
            small.step()
        sizes.append(bytes_allocated())
    module.fails = True
    for _ in range(50):
        with contextlib.suppress(LookupError):
            small.step()
    print_head("bytes after 50 steps on four replicas", "after 1,000", "after 50 more, which fail", "threads")
    print_row(*sizes, bytes_allocated(), threading.active_count())


def look_for_waits(libraries: Libraries, options: argparse.Namespace) -> None:
    """Whether a step of a ResNet-50 on four replicas waits for the GPU, and is the same on a side stream."""
    input = torch.randn(7, 3, 64, 64, device="cuda")
    contender = Contender(OURS, libraries[OURS], import_torchvision().models.resnet50(), 4, input)
    for _ in range(4):
        contender.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        contender.step()
        print("\nWith set_sync_debug_mode('error'), a step raises nothing.")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.backends.cudnn.deterministic = True
    side, gradients = torch.cuda.Stream(), []
    for stream in (torch.cuda.current_stream(), *[side] * 20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            contender.step()
        torch.cuda.current_stream().wait_stream(side)
        gradients.append([parameter.grad.cpu() for parameter in contender.model.parameters()])
    largest = max(max(map(error, step, gradients[0])) for step in gradients)
    print(f"The gradients of 20 steps on a side stream differ from those on the default one by {largest:.0e}.")
    torch.backends.cudnn.deterministic = False


# In this order, because a profiler that has run once slows down what is timed after it.
PARTS = {
    "threads": time_threads,
    "steps": time_steps,
    "layers": time_layers,
    "errors": print_errors,
    "repeat": repeat_steps,
    "memory": measure_memory,
    "waits": look_for_waits,
    "kernels": count_kernels,
    "kernels-of-steps": count_kernels_of_steps,
}


def main() -> int:
    """Print a table for each part; return how many parts have failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="folder of another version of the library")
    parser.add_argument("--existing", type=Path, help="folder into which sync-batchnorm==0.0.1 was installed")
    parser.add_argument("--parts", choices=list(PARTS), nargs="+", default=list(PARTS), help="which tables to print")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--time", choices=TIMES, default=TIMES[0], help="of a step, in the tables of steps and layers")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    libraries = libraries_at(options.other, options.existing)
    print(environment())
    failed = 0
    for part in options.parts:
        start = time.perf_counter()
        print(f"\n{PARTS[part].__doc__}")
        try:
            PARTS[part](libraries, options)
        except Exception:
            failed += 1
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"\n({part}: {time.perf_counter() - start:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
