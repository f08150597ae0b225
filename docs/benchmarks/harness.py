"""What the benchmarks share: CPU replicas for any library of this design, interleaved timing, and a process of its own.

Nothing here imports a synchronized batch norm: the contenders are handed in, so that the same lines time all of them.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def keep_freed_memory() -> None:
    """Let the allocator of glibc keep freed memory, as the allocators that torch's tuning guide recommends do.

    Otherwise every activation may be a mapping of its own, and page faults hide what a layer costs.
    """
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has another allocator
        mallopt(m_mmap_threshold, 2**25)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_arena_max, 1)  # that of a thread is unmapped when it becomes empty


def shallow_replicas(module: nn.Module, num_replicas: int) -> list[nn.Module]:
    """Replicate a module on one device: shared parameters, copied buffers but for copy 0."""
    replicas = []
    for copy_id in range(num_replicas):
        copies = {child: child._replicate_for_data_parallel() for child in module.modules()}
        for child, copy in copies.items():
            for name, grandchild in child._modules.items():
                setattr(copy, name, copies[grandchild])
            views = {name: None if p is None else p.view_as(p) for name, p in child._parameters.items()}
            for name, parameter in views.items():
                setattr(copy, name, parameter)
            for name, buffer in child._buffers.items():
                setattr(copy, name, buffer if copy_id == 0 or buffer is None else buffer.clone())
        replicas.append(copies[module])
    return replicas


def take_core(number: int) -> None:
    """Bind the calling thread to a core, in turn by `number`, where the system lets us.

    A scheduler may keep threads together that wake each other, as replicas do, and leave the other cores idle.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(threading.get_native_id(), {_CORES[number % len(_CORES)]})


_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class OnCoresOfTheirOwn(nn.Module):
    """Runs the replicas of the module inside on different cores."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.numbers = itertools.count()

    def forward(self, input: Tensor) -> Tensor:
        take_core(next(self.numbers))
        output: Tensor = self.inside(input)
        return output


class CpuReplicas:
    """Run a module on CPU replicas, in threads, and call the replication callbacks of the library under test."""

    def __init__(
        self, module: nn.Module, num_replicas: int, callbacks: Callable[[Sequence[nn.Module]], None] | None
    ) -> None:
        self.module, self.num_replicas, self.callbacks = module, num_replicas, callbacks

    def __call__(self, input: Tensor) -> Tensor:
        chunks = input.chunk(self.num_replicas)
        replicas = shallow_replicas(self.module, len(chunks))
        if self.callbacks is not None:
            self.callbacks(replicas)
        outputs: list[Any] = [None] * len(chunks)

        def work(i: int) -> None:
            take_core(i)
            outputs[i] = replicas[i](chunks[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(chunks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(outputs)


class _AddOnCpu:
    @staticmethod
    def apply(_destination: int, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.stack(tensors[i::num_inputs]).sum(0) for i in range(num_inputs))


class _ShareOnCpu:
    @staticmethod
    def apply(devices: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors * len(devices)


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


def import_existing(folder: str) -> tuple[Any, Callable[[Sequence[nn.Module]], None]]:
    """Import sync-batchnorm 0.0.1 from `folder`, in a process of its own: it has the import name of ours.

    Returns:
        its module of layers, with its CUDA-only reduce and broadcast replaced, and the caller of its callbacks.
    """
    sys.path.insert(0, folder)
    existing = importlib.import_module("sync_batchnorm.batchnorm")
    existing.ReduceAddCoalesced, existing.Broadcast = _AddOnCpu, _ShareOnCpu  # type: ignore[attr-defined]
    return existing, importlib.import_module("sync_batchnorm.replicate").execute_replication_callbacks


def training_step(model: Callable[[Tensor], Tensor], input: Tensor, grad: Tensor) -> Callable[[], float]:
    """Return a function that runs one forward and backward and returns its seconds."""
    leaf = input.clone(memory_format=torch.preserve_format).requires_grad_()

    def step() -> float:
        leaf.grad = None
        start = time.perf_counter()
        model(leaf).backward(grad)
        if leaf.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def interleave(steps: dict[str, Callable[[], float]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Time all contenders in turn, so that whatever else the machine does affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(warmup + rounds):
        for name, step in steps.items():
            taken = step()
            if i >= warmup:
                seconds[name].append(taken)
    return seconds


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the ratios of steps that ran one after the other."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


class Remote:
    """A contender in a process of its own, for a library with the same import name as another.

    The process runs `script` with `arguments`, prints ``ready``, and for each line ``step`` that it reads prints the
    seconds of one step.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._expect()

    def _expect(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"expected an answer of {self._process.args}, but it ended; its error is above")
        return line

    def __call__(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._expect())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)  # on a loaded machine, an interpreter that has torch takes seconds to end


def serve(step: Callable[[], float]) -> None:
    """Be the other end of `Remote`."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)


def print_row(*cells: Any) -> None:
    """Print a row of a table."""
    print("|", *(f"{cell} |" for cell in cells), flush=True)


def print_head(*names: str) -> None:
    """Print the head of a table."""
    print()
    print_row(*names)
    print("|" + "---|" * len(names))


def environment() -> str:
    """Return the line of a page that tells the version, the day, the software and the hardware of a measurement."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "sync_batchnorm/__init__.py").read_text(), re.MULTILINE)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"Version {version}, {datetime.date.today()}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {device}; cores: {cores}, intra-op threads: {torch.get_num_threads()}."
    )
