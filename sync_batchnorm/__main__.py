"""Check this machine, ``python -m sync_batchnorm``: versions, devices, copies between GPUs, parity and cost of a layer.

Prints a report that can be pasted into an issue. The exit status is 0 if all checks pass, 1 if one fails or hangs,
2 for bad arguments, 130 after Ctrl-C.

NOTE [checks that hang]: With faulty hardware, a copy between two GPUs may never return; meanwhile Python runs no signal
handler, and a process that is blocked in a driver may outlive its kill. So GPUs are checked by another process, which
is killed when its time is over, and not waited for. On the CPU, `DataParallelWithCallback` limits waits.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

from .conversion import convert_model
from .parallel.data_parallel import as_device
from .replicate import DataParallelWithCallback

__all__: list[str] = []

# The other process; not with `-m`, so that the processes that it starts find the functions of this file.
PROGRAM = f"import json, sys, {__package__}.__main__ as own; sys.exit(own.check(*json.loads(sys.argv[1])))"
BUDGET = 25.0  # seconds for all checks of GPUs together: the report is promised within 30
TIMEOUT = 5.0  # seconds of a wait for other replicas: far more than any of them needs
# Relative to the largest value. Large enough for any order of summation in the kernels of a device; the statistics of a
# single replica are off by more than a tenth.
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    gpus = [str(index) for index in range(torch.cuda.device_count())]
    default = ",".join(gpus if len(gpus) > 1 else (gpus or ["cpu"]) * 2)  # A single replica has no peer.
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="Check this machine, in 30 seconds.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--devices", type=parsed_devices, default=default, help='as in "0,1", "0,0" or "cpu,cpu"; here %(default)s'
    )
    options = parser.parse_args(arguments)
    try:
        return (check if options.devices[0] == "cpu" else watch)(options.devices, options.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parsed_devices(text: str) -> list[str]:
    """Return the names of the devices in a comma-separated list, which a user has typed."""
    count = torch.cuda.device_count()
    try:
        devices = [as_device(int(name) if name.isdecimal() else name) for name in map(str.strip, text.split(","))]
    except RuntimeError:  # One of the names is no device.
        devices = []
    one_kind = len({device.type for device in devices}) == 1
    if len(devices) < 2 or not one_kind or any(d.type == "cuda" and d.index >= count for d in devices):
        raise argparse.ArgumentTypeError(
            f"expected at least two replicas, all on GPUs of this machine as in 0,0 or all on the CPU as in cpu,cpu, "
            f"but got {text!r}; torch {torch.__version__} finds {count} CUDA devices"
        )
    return list(map(str, devices))


def watch(devices: Sequence[str], as_json: bool) -> int:
    """As `check`, in another process, for a limited time. See NOTE [checks that hang]."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([devices, as_json])]
    checking = subprocess.Popen(command, start_new_session=True)
    result = f"HANGS, no end after {BUDGET:.0f} seconds"
    try:
        with suppress(subprocess.TimeoutExpired):
            if checking.wait(BUDGET) in (0, 1):
                return checking.returncode
            result = f"CRASHES, with status {checking.returncode}"
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(checking.pid, signal.SIGKILL)  # with the processes that it has started
            checking.wait(0.5)
    print(json.dumps({"ok": False, "result": result}) if as_json else f"{result}; the rest is not checked.")
    return 1


def check(devices: Sequence[str], as_json: bool) -> int:
    """Run all checks, print the report, and return the exit status; with JSON, the text goes to stderr."""
    begin, checks = monotonic(), []
    say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    facts = versions()
    names = {d: torch.cuda.get_device_name(d) if d.startswith("cuda") else platform.machine() for d in devices}
    for name, fact in (facts | names | {"replicas on": ", ".join(devices)}).items():
        say(f"{name:23} {fact}")
    for name, run in checks_of(devices).items():
        say(f"{name:23}", end=" ")
        try:
            ok, result = True, run()
        except Exception as error:  # Any error belongs in the report.
            ok, result = False, f"{type(error).__name__}: {error}"
        say("right," if ok else "WRONG,", " ".join(result.split()))
        checks.append({"check": name, "ok": ok, "result": result})
    all_right, seconds = all(found["ok"] for found in checks), round(monotonic() - begin, 1)
    say(f"\n{'All is right' if all_right else 'Something is wrong'}, after {seconds} seconds.")
    say("To report it, right or wrong, paste all of this text; docs/self-check.md says what each line means.")
    if as_json:
        report = {"ok": all_right, "seconds": seconds, "versions": facts, "devices": names, "replicas": devices}
        print(json.dumps({**report, "checks": checks}, indent=2))
    return 0 if all_right else 1


def versions() -> dict[str, str]:
    """Return versions and environment variables for the report, by name."""
    variables = ("CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS")
    return {
        "sync_batchnorm": sys.modules[__package__].__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        **{name: os.environ[name] for name in variables if name in os.environ},
    }


def checks_of(devices: Sequence[str]) -> dict[str, Callable[[], str]]:
    """Return the checks by name; each returns its result, or raises an error if something is wrong."""
    gpus = [device for device in dict.fromkeys(devices) if device.startswith("cuda")]
    checks: dict[str, Callable[[], str]] = {}
    checks |= {f"copy {a} -> {b}": partial(check_copy, a, b) for a in gpus for b in gpus if a != b}
    if checks:
        checks["NCCL broadcast to all"] = partial(check_broadcast, gpus)
        checks["NCCL between processes"] = partial(check_processes, gpus)
    for dtype in ["float32"] if devices[0].startswith("mps") else TOLERANCES:  # Apple's GPUs have no float64.
        checks[f"parity in {dtype}"] = partial(check_parity, devices, dtype)
    checks["cost, synchronized"] = partial(check_cost, devices, True)
    checks["cost, not synchronized"] = partial(check_cost, devices, False)
    return checks


def numbers(device: str) -> Tensor:
    """Return what checks of connections send."""
    return torch.arange(1 << 24, dtype=torch.int32, device=device)


def compare(*received: Tensor) -> str:
    """Compare what has arrived with what was sent, where it has arrived."""
    for tensor in received:
        if wrong := int((tensor != numbers(str(tensor.device))).sum()):
            raise RuntimeError(f"{wrong} of {len(tensor)} values arrive wrong on {tensor.device}")
    return f"arrives on {', '.join(str(tensor.device) for tensor in received)}"


def check_copy(source: str, target: str) -> str:
    """Copy a tensor from one GPU to another."""
    return compare(numbers(source).to(target))


def check_broadcast(gpus: Sequence[str]) -> str:
    """Broadcast a tensor to all GPUs, through NCCL, as `torch.nn.DataParallel` sends the parameters."""
    return compare(*nn.parallel.comm.broadcast(numbers(gpus[0]), gpus))  # type: ignore[no-untyped-call]


def check_processes(gpus: Sequence[str]) -> str:
    """Add up tensors of two processes on the first two GPUs, through NCCL, as `DistributedDataParallel` does."""
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "not available in this torch"
    with tempfile.TemporaryDirectory() as folder:
        spawn(add_up, (gpus, f"{folder}/store"), nprocs=2)  # type: ignore[no-untyped-call]
    return f"{gpus[0]} and {gpus[1]}"


def add_up(rank: int, gpus: Sequence[str], store: str) -> None:
    """Be one of two processes that add up their tensors, and meet at the file `store`."""
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    received = numbers(gpus[rank])
    distributed.all_reduce(received)
    compare(received // 2)
    distributed.destroy_process_group()


def check_parity(devices: Sequence[str], dtype: str) -> str:
    """Compare two steps of replicas of unequal size on `devices` with `torch.nn.BatchNorm2d` on the first device."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": devices[0]}
    plain = nn.Sequential(nn.BatchNorm2d(16), nn.Tanh(), nn.BatchNorm2d(16)).to(**options)
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), devices, timeout=TIMEOUT)
    errors = []
    for _ in range(2):
        # One chunk for each device, the last smaller than the others. The mean of the gradient is near zero: otherwise
        # the rounding error of its sums comes near the tolerance.
        input, grad = torch.randn(2, 2 * len(devices) - 1, 16, 9, 9, **options)
        input = 5 + 3 * input
        for actual, expected in zip(step(parallel, input, grad), step(plain, input, grad), strict=True):
            actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
            errors.append((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    largest = float(torch.stack(errors).max())  # NaN if one of them is NaN, unlike Python's `max`
    result = f"largest difference {largest:.1e}, allowed {TOLERANCES[dtype]:.0e}"
    if not largest <= TOLERANCES[dtype]:
        raise RuntimeError(result)
    return result


def check_cost(devices: Sequence[str], synchronized: bool) -> str:
    """Time training steps of ten layers in the wrapper; return the time of one layer."""
    torch.set_num_threads(1)  # Each replica on the CPU has threads of its own, which would fight for the cores.
    plain = nn.Sequential(*(nn.BatchNorm2d(128) for _ in range(10))).to(devices[0])
    net = DataParallelWithCallback(convert_model(plain) if synchronized else plain, devices, timeout=TIMEOUT)
    input, grad = torch.randn(2, 4 * len(devices), 128, 28, 28, device=devices[0])
    seconds = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "expected batch norms that synchronize")  # plain ones, for comparison
        for _ in range(8):
            start = perf_counter()
            step(net, input, grad)[1].cpu()  # waits for the GPUs
            seconds.append(perf_counter() - start)
    return f"{100 * median(seconds):.2f} ms"  # a tenth of a step, in milliseconds


def step(net: nn.Module, input: Tensor, grad: Tensor) -> list[Any]:
    """Do a forward and a backward; return the output, all gradients, and the buffers."""
    input = input.detach().requires_grad_()
    output = net(input)
    output.backward(grad)
    return [output, input.grad, *(parameter.grad for parameter in net.parameters()), *net.buffers()]


if __name__ == "__main__":
    sys.exit(main())
