"""The checks of `python -m sync_batchnorm`; those of GPUs run in a process of their own, so that a hung one is stopped.

NOTE [checks that hang]: A copy between two GPUs that the hardware swallows never returns, and no signal handler of
Python gets to run meanwhile. So the process that prints the report makes no copy by itself: it starts this file as a
program, which does one item after the other and prints a line for each. When no line has come for a while, it kills
that program, counts the running item as hung, and starts another program for the rest. On the CPU nothing hangs but
replicas that wait, which `DataParallelWithCallback` limits; there it does the items itself.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sync_batchnorm.conversion import convert_model
from sync_batchnorm.replicate import DataParallelWithCallback

__all__: list[str] = []

# An item that takes so many seconds counts as hung: far more than any of them needs.
SILENCE = 8.0
# All items together may take so many seconds: the report is promised within 30.
BUDGET = 24.0

# Of the largest value. Wide enough for the order in which the kernels of any device add up; the statistics of a single
# replica are off by more than a tenth.
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}
# Channels and height: replicas on the CPU hand over small inputs, and exchange statistics of large ones.
SHAPES = ((8, 5), (32, 28))

_MARK = "finding: "  # Libraries print to the same stream, NCCL for one.
_READY = [True, "ready"]  # the first finding of the program, before which it imports torch


class Item(NamedTuple):
    """One check: its kind, and on which devices."""

    kind: str  # "copy", "broadcast", "float32", "float64" or "time"
    devices: tuple[str, ...]

    def __str__(self) -> str:
        if self.kind == "copy":
            return "copy {} -> {}".format(*self.devices)
        return {"broadcast": "broadcast to all", "time": "time"}.get(self.kind, f"parity in {self.kind}")


class Finding(NamedTuple):
    """What came of an item."""

    item: Item
    ok: bool
    result: str


def items_for(devices: Sequence[str]) -> tuple[list[Item], list[Item]]:
    """Return the checks of the connections between `devices`, and those of the library on them."""
    gpus = [device for device in dict.fromkeys(devices) if device.startswith("cuda")]
    links = [Item("copy", (source, target)) for source in gpus for target in gpus if source != target]
    if links:
        links.append(Item("broadcast", tuple(gpus)))
    # Apple's GPUs have no float64.
    dtypes = ["float32"] if devices[0].startswith("mps") else ["float32", "float64"]
    return links, [Item(kind, tuple(devices)) for kind in (*dtypes, "time")]


def run(items: Sequence[Item], deadline: float, program: Sequence[str] = (), silence: float = SILENCE) -> list[Finding]:
    """Do `items`, and return what came of each, in order. Say on stderr which one is running.

    Args:
        items: what to do.
        deadline: the value of `time.monotonic` after which nothing is begun, or waited for in another process.
        program: a command that does the items of its last argument, in another process; empty for this file, or for
            none where all devices are the CPU.
        silence: seconds after which an item in another process counts as hung.
    """
    findings: list[Finding] = []
    local = not program and all(device == "cpu" for item in items for device in item.devices)
    program = program or (sys.executable, "-m", "sync_batchnorm.selfcheck")
    while len(findings) < len(items) and monotonic() < deadline:
        left = items[len(findings) :]
        if local:
            findings.append(check(left[0]))
            continue
        reported, end = _run_program([*program, json.dumps(left)], silence, deadline)
        findings += [Finding(item, ok, result) for item, (ok, result) in zip(left, reported, strict=False)]
        if len(reported) < len(left):
            findings.append(Finding(left[len(reported)], False, end))
    return findings + [Finding(item, False, "not checked, the time was over") for item in items[len(findings) :]]


def _run_program(command: Sequence[str], silence: float, deadline: float) -> tuple[list[tuple[bool, str]], str]:
    """Return what the program has reported, and in words how it ended."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # A file, as nobody may be there to close a pipe: a process inside of a driver outlives its kill.
        path = Path(folder, "findings")
        with path.open("w", encoding="utf-8") as file:
            child = subprocess.Popen(command, stdout=file)
        try:
            end = _follow(child, path, silence, deadline)
        finally:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
        return _read(path)[1:], end


def _follow(child: subprocess.Popen[bytes], path: Path, silence: float, deadline: float) -> str:
    """Wait until the child has ended, or hangs, or the time is over; return which of them."""
    num_reported, since = 0, monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return f"its process ended with status {child.wait(0.1)}"
        num_before, num_reported = num_reported, len(_read(path))
        if num_reported != num_before:
            since = monotonic()
        if num_reported and monotonic() > since + silence:
            return f"hangs, no end after {silence:g} seconds"
        if monotonic() > deadline:
            return "did not end before the time was over"


def _read(path: Path) -> list[tuple[bool, str]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [tuple(json.loads(line[len(_MARK) :])) for line in lines if line.startswith(_MARK) and line.endswith("\n")]


def check(item: Item) -> Finding:
    """Do one item in this process, and say on stderr that it is running."""
    print(f"{item} ...", file=sys.stderr, flush=True)
    try:
        if item.kind == "copy":
            return Finding(item, *check_copy(*item.devices))
        if item.kind == "broadcast":
            return Finding(item, *check_broadcast(item.devices))
        if item.kind == "time":
            return Finding(item, True, check_time(item.devices))
        return Finding(item, *check_parity(item.kind, item.devices))
    except Exception as error:  # It belongs into the report, whatever it is.
        return Finding(item, False, f"{type(error).__name__}: {error}")


def check_copy(source: str, target: str) -> tuple[bool, str]:
    """Copy a few and many bytes from one device to another one, and compare what arrives."""
    for size in (64, 1 << 24):
        sent = torch.arange(size, dtype=torch.int32, device=source)
        expected = torch.arange(size, dtype=torch.int32, device=target)
        _wait_for((source, target))
        start = perf_counter()
        received = sent.to(target)
        _wait_for((source, target))
        seconds = perf_counter() - start
        wrong = int((received != expected).sum())
        if wrong:
            return False, f"{wrong} of {size} values arrive wrong"
    return True, f"{sent.nbytes / seconds / 1e9:.1f} GB/s"


def check_broadcast(devices: Sequence[str]) -> tuple[bool, str]:
    """Send a tensor to all devices at once, as `torch.nn.DataParallel` sends the parameters: through NCCL."""
    sent = torch.arange(1 << 20, dtype=torch.float32, device=devices[0])
    copies = nn.parallel.comm.broadcast(  # type: ignore[no-untyped-call]
        sent, [torch.device(device) for device in devices]
    )
    wrong = [d for d, received in zip(devices, copies, strict=True) if not torch.equal(received.cpu(), sent.cpu())]
    return not wrong, f"arrives wrong on {', '.join(wrong)}" if wrong else f"{len(devices)} devices"


def check_parity(dtype: str, devices: Sequence[str]) -> tuple[bool, str]:
    """Compare replicas of unequal size on `devices` with `torch.nn.BatchNorm2d` on the first of them."""
    torch.manual_seed(0)
    error = _largest(_difference(getattr(torch, dtype), devices, *shape) for shape in SHAPES)
    return error <= TOLERANCES[dtype], f"largest difference {error:.1e}, allowed {TOLERANCES[dtype]:.0e}"


def _difference(dtype: torch.dtype, devices: Sequence[str], channels: int, height: int) -> float:
    """Return the largest difference in outputs, gradients and buffers of two steps, relative to the largest value."""
    plain = nn.Sequential(nn.BatchNorm2d(channels), nn.Tanh(), nn.BatchNorm2d(channels)).to(devices[0], dtype)
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    converted = convert_model(copy.deepcopy(plain))
    parallel = DataParallelWithCallback(converted, devices, timeout=SILENCE)
    errors = []
    for _ in range(2):
        # So many rows make one chunk for each device, the last one smaller than the others.
        rows = torch.randn(2 * len(devices) - 1, channels, height, height, dtype=dtype, device=devices[0])
        inputs = [(3 * rows + 5).requires_grad_() for _ in range(2)]
        expected, actual = plain(inputs[0]), parallel(inputs[1])
        grad = torch.randn_like(expected)
        expected.backward(grad)
        actual.backward(grad)
        errors += [_error(actual, expected), _error(inputs[1].grad, inputs[0].grad)]
    errors += [_error(a.grad, b.grad) for a, b in zip(converted.parameters(), plain.parameters(), strict=True)]
    errors += [_error(a, b) for a, b in zip(converted.buffers(), plain.buffers(), strict=True)]
    return _largest(errors)


def _largest(errors: Iterable[float]) -> float:
    return float(torch.tensor(list(errors), dtype=torch.float64).max())  # NaN if one of them is, other than `max`


def _error(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return float("inf")
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def check_time(devices: Sequence[str]) -> str:
    """Time forward and backward of one layer in replicas on `devices`, synchronized and not."""
    shape = (4 * len(devices), 64, 56, 56)
    input = torch.randn(shape, device=devices[0]).requires_grad_()
    grad = torch.randn(shape, device=devices[0])
    layers = [nn.BatchNorm2d(64).to(devices[0]), convert_model(nn.BatchNorm2d(64)).to(devices[0])]
    wrappers = [DataParallelWithCallback(layer, devices, timeout=SILENCE) for layer in layers]
    times: list[list[float]] = [[], []]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads // len(devices)))  # Replicas on the CPU share its cores.
    try:
        with warnings.catch_warnings():
            # One of the two is there to be compared with.
            warnings.filterwarnings("ignore", "expected batch norms that synchronize")
            for _ in range(8):
                for wrapper, found in zip(wrappers, times, strict=True):
                    _wait_for(devices)
                    start = perf_counter()
                    wrapper(input).backward(grad)
                    _wait_for(devices)
                    found.append(1000 * (perf_counter() - start))
    finally:
        torch.set_num_threads(num_threads)
    plain, synchronized = map(min, times)  # Others may use the machine; nothing makes a step faster than it is.
    return f"{synchronized:.2f} ms synchronized, {plain:.2f} ms not, {synchronized / plain:.2f} times, {shape}"


def _wait_for(devices: Sequence[str]) -> None:
    for device in dict.fromkeys(devices):
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


def main(argument: str) -> None:
    """Do the items of `argument`, and print a line for each."""
    print(_MARK + json.dumps(_READY), flush=True)
    for kind, devices in json.loads(argument):
        _, ok, result = check(Item(kind, tuple(devices)))
        print(_MARK + json.dumps([ok, result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
