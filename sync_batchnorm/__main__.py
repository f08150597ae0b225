"""Check this machine, ``python -m sync_batchnorm``: versions, devices, copies between GPUs, parity and cost of a layer.

Prints a report that can be pasted into an issue; progress goes to stderr. The exit status is 0 if all checks pass, 1 if
one fails, 2 for bad arguments, 130 after Ctrl-C.

NOTE [checks that hang]: With faulty hardware, a copy between two GPUs may never return, and meanwhile Python runs no
signal handler. So checks of GPUs run in other processes. If a check does not end in time, these processes are killed,
the check counts as hung, and new processes run the rest. On the CPU, `DataParallelWithCallback` limits waits.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from sync_batchnorm import DataParallelWithCallback, __version__, convert_model
from sync_batchnorm.local_parallel import as_device
from sync_batchnorm.torch_private import MISSING

__all__: list[str] = []

Result = tuple[bool, str]  # whether the check passed, and its result as text
Check = Sequence[Callable[[], Result]]  # one function, or two that run in two processes

PROCESSES: Any = multiprocessing.get_context("spawn")  # A forked process cannot use CUDA after this process has.
SILENCE = 8.0  # seconds after which a check counts as hung: far more than any of them needs
BUDGET = 24.0  # seconds for all checks together: the report is promised within 30
# Relative to the largest value. Large enough for any order of summation in the kernels of a device; the statistics of a
# single replica are off by more than a tenth.
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}
ADVICE = {  # by the first word of the name of a check
    "copy": "Copies between GPUs do not work, mostly because of an IOMMU or PCIe ACS: switch it off in the firmware, "
    "or boot Linux with iommu=pt. Until then, use GPUs between which copies are right, or device_ids=[0, 0].",
    "NCCL": "NCCL does not work: set NCCL_P2P_DISABLE=1 and check again; NCCL_DEBUG=INFO tells what it tries.",
    "any other": "Please report this: the devices are connected, but the numbers are wrong or missing.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    names = [str(index) for index in range(torch.cuda.device_count())] or ["cpu"]
    default = ",".join(names if len(names) > 1 else names * 2)  # A single replica has no peer to exchange with.
    parser = argparse.ArgumentParser(
        prog="python -m sync_batchnorm", description="Check this machine, within 30 seconds."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--devices", type=parsed_devices, default=default, help='as in "0,1", "0,0" or "cpu,cpu"; here %(default)s'
    )
    options = parser.parse_args(arguments)
    start = monotonic()
    try:
        results = check_devices(options.devices, start + BUDGET)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    wrong = [name.split()[0] for name, (ok, _) in results.items() if not ok]
    report = {
        "ok": not wrong,
        "seconds": round(monotonic() - start, 1),
        "versions": versions(),
        "devices": {device: describe(device) for device in options.devices},
        "replicas": options.devices,
        "checks": [{"check": name, "ok": ok, "result": result} for name, (ok, result) in results.items()],
        # The first failed check is mostly the cause of the others.
        "advice": [ADVICE.get(word, ADVICE["any other"]) for word in wrong[:1]],
    }
    print(json.dumps(report, indent=2) if options.json else as_text(report), flush=True)
    return 1 if wrong else 0


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


def versions() -> dict[str, str]:
    """Return versions and environment variables for the report, by name."""
    cuda = "none"
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        cuda = f"{torch.version.cuda or torch.version.hip}, cuDNN {cudnn}"
    texts = {"sync_batchnorm": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    texts |= {"system": platform.platform(), "CUDA": cuda}
    if MISSING:
        texts["torch without"] = ", ".join(MISSING)
    variables = ("CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS")
    return texts | {name: os.environ[name] for name in variables if name in os.environ}


def describe(device: str) -> str:
    """Return a description of a device; for one of several GPUs, also its peer-to-peer access to others."""
    if not device.startswith("cuda"):
        return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    properties: Any = torch.cuda.get_device_properties(device)
    text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != torch.device(device).index]
    peers = [str(gpu) for gpu in others if torch.cuda.can_device_access_peer(device, gpu)]
    return f"{text}, peer-to-peer with {' '.join(peers) or 'none'}" if others else text


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report as text, with the advice near the end."""
    facts = report["versions"] | report["devices"] | {"replicas on": ", ".join(report["replicas"])}
    for check in report["checks"]:
        facts[check["check"]] = ("right, " if check["ok"] else "WRONG, ") + " ".join(check["result"].split())
    lines = [f"{name:23} {value}" for name, value in facts.items()]
    lines += ["", f"{'All is right' if report['ok'] else 'Something is wrong'}, after {report['seconds']} seconds."]
    lines += report["advice"]
    lines.append("To report it, right or wrong, paste all of this text; docs/self-check.md says what each line means.")
    return "\n".join(lines)


def check_devices(devices: Sequence[str], deadline: float) -> dict[str, Result]:
    """Check the connections between devices, NCCL between processes, and the library on the devices."""
    gpus = [device for device in dict.fromkeys(devices) if device.startswith("cuda")]
    checks: dict[str, Check] = {f"copy {a} -> {b}": [partial(check_copy, a, b)] for a in gpus for b in gpus if a != b}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if checks:
            checks["NCCL broadcast to all"] = [partial(check_broadcast, gpus)]
            checks["NCCL between processes"] = [partial(check_nccl, gpus, rank, f"{folder}/store") for rank in range(2)]
        for dtype in ["float32"] if devices[0].startswith("mps") else TOLERANCES:  # Apple's GPUs have no float64.
            checks[f"parity in {dtype}"] = [partial(check_parity, devices, dtype)]
        checks["cost, synchronized"] = [partial(check_cost, devices, True)]
        checks["cost, not synchronized"] = [partial(check_cost, devices, False)]
        if devices[0] == "cpu":
            return {name: outcome(name, function) for name, (function,) in checks.items()}
        return supervised(checks, deadline)


def supervised(checks: Mapping[str, Check], deadline: float) -> dict[str, Result]:
    """Run `checks` in other processes until `deadline`; return the result of each. See NOTE [checks that hang]."""
    results: dict[str, Result] = {}
    workers: list[futures.Executor] = []
    try:
        for name, functions in checks.items():
            patience = deadline - monotonic()  # The processes first import torch.
            if patience <= 0:
                results[name] = False, "not checked, the time was over"
                continue
            try:
                if not workers:
                    workers = [futures.ProcessPoolExecutor(1, PROCESSES, start_worker) for _ in range(2)]
                    for started in [worker.submit(start_worker) for worker in workers]:
                        started.result(patience)
                patience = max(0.0, min(SILENCE, deadline - monotonic()))
                calls = zip(workers, functions, strict=False)
                running = [worker.submit(outcome, name, function) for worker, function in calls]
                futures.wait(running, patience)
                results[name] = min([call.result(0) for call in running])  # a failed result, if there is one
            except (futures.TimeoutError, futures.BrokenExecutor) as error:
                hung = isinstance(error, futures.TimeoutError)
                results[name] = False, f"hangs, no end after {patience:.1f} seconds" if hung else "its process ended"
                kill_workers()
                workers.clear()
    finally:
        kill_workers()
    return results


def start_worker() -> None:
    """Prepare a process that runs checks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process handles Ctrl-C, and kills this one.
    os.dup2(2, 1)  # Libraries such as NCCL print to stdout; send that to stderr.


def kill_workers() -> None:
    """Kill the processes that run checks."""
    for process in multiprocessing.active_children():
        process.kill()
        process.join(0.5)  # A process that is blocked in a driver may outlive its kill.


def outcome(name: str, function: Callable[[], Result]) -> Result:
    """Run one check, and print its name to stderr."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        return function()
    except Exception as error:  # Any error belongs in the report.
        return False, f"{type(error).__name__}: {error}"


def check_copy(source: str, target: str) -> Result:
    """Copy a small and a large tensor from one device to another, and compare what arrives."""
    for size in (64, 1 << 24):
        sent, expected = (torch.arange(size, dtype=torch.int32, device=device) for device in (source, target))
        wait_for([source, target])
        start = perf_counter()
        received = sent.to(target)
        wait_for([source, target])
        rate = sent.nbytes / (perf_counter() - start) / 1e9
        if wrong := int((received != expected).sum()):
            return False, f"{wrong} of {size} values arrive wrong"
    return True, f"{rate:.1f} GB/s"


def check_broadcast(devices: Sequence[str]) -> Result:
    """Broadcast a tensor to all devices, through NCCL, as `torch.nn.DataParallel` sends the parameters."""
    sent = torch.arange(1 << 20, dtype=torch.float32, device=devices[0])
    copies = nn.parallel.comm.broadcast(sent, list(map(torch.device, devices)))  # type: ignore[no-untyped-call]
    wrong = [d for d, received in zip(devices, copies, strict=True) if not torch.equal(received.cpu(), sent.cpu())]
    return not wrong, f"arrives wrong on {', '.join(wrong)}" if wrong else f"{len(devices)} devices"


def check_nccl(devices: Sequence[str], rank: int, store: str) -> Result:
    """Add up tensors of two processes, as `DistributedDataParallel` does; `store` is the file for their rendezvous."""
    if not distributed.is_available() or not distributed.is_nccl_available():
        return True, "not available in this torch"
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    own = torch.arange(1 << 20, dtype=torch.float32, device=devices[rank])
    received = own * (1 + rank)
    distributed.all_reduce(received)
    wrong = int((received != 3 * own).sum())
    distributed.destroy_process_group()
    return not wrong, f"{wrong} of {len(own)} values arrive wrong" if wrong else f"{devices[0]} and {devices[1]}"


def check_parity(devices: Sequence[str], dtype: str) -> Result:
    """Compare two steps of replicas of unequal size on `devices` with `torch.nn.BatchNorm2d` on the first device."""
    torch.manual_seed(0)
    errors = []
    for channels, height in ((8, 5), (32, 28)):  # On the CPU, only the first inputs are small enough to be joined.
        plain = nn.Sequential(nn.BatchNorm2d(channels), nn.Tanh(), nn.BatchNorm2d(channels))
        for parameter in plain.to(devices[0], getattr(torch, dtype)).parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), devices, timeout=SILENCE)
        # This number of rows makes one chunk for each device; the last chunk is smaller than the others.
        shape = (2, 2 * len(devices) - 1, channels, height, height)
        for _ in range(2):
            # The mean of the gradient is near zero: otherwise the rounding error of its sums comes near the tolerance.
            input, grad = torch.randn(shape, dtype=getattr(torch, dtype), device=devices[0])
            input = 5 + 3 * input
            for actual, expected in zip(step(parallel, input, grad), step(plain, input, grad), strict=True):
                actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
                errors.append((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    error = float(torch.stack(errors).max())  # NaN if one of them is NaN, unlike Python's `max`
    return error <= TOLERANCES[dtype], f"largest difference {error:.1e}, allowed {TOLERANCES[dtype]:.0e}"


def check_cost(devices: Sequence[str], synchronized: bool) -> Result:
    """Measure training steps of ten layers in the wrapper; return the cost of one layer."""
    plain = nn.Sequential(*(nn.BatchNorm2d(128) for _ in range(10))).to(devices[0])
    net = DataParallelWithCallback(convert_model(plain) if synchronized else plain, devices, timeout=SILENCE)
    input, grad = torch.randn(2, 4 * len(devices), 128, 28, 28, device=devices[0])
    returned, done = [], []
    num_threads = torch.get_num_threads()
    # Replicas divide the cores: with more threads than cores, other programs make a step take several times as long.
    torch.set_num_threads(max(1, num_threads // len(devices)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "expected batch norms that synchronize")  # plain ones, for comparison
        for _ in range(8):
            wait_for(devices)
            start = perf_counter()
            step(net, input, grad)
            returned.append(perf_counter() - start)
            wait_for(devices)
            done.append(perf_counter() - start)
    torch.set_num_threads(num_threads)
    result = f"{100 * median(done):.2f} ms"  # per layer: a tenth of the time, in milliseconds
    if not devices[0].startswith("cuda"):
        return True, result
    launches = 0
    if ProfilerActivity.CUDA in supported_activities():  # type: ignore[no-untyped-call]
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as ran:
            step(net, input, grad)
            wait_for(devices)
        # User annotations, such as the spans of `profiling.py`, are events too.
        launches = sum(e.device_type.name == "CUDA" and not e.is_user_annotation for e in ran.events())
    counted = f"{launches / 10:.1f} launches" if launches else "launches not available"
    return True, f"{result}, host {100 * median(returned):.2f} ms, {counted}"


def step(net: nn.Module, input: Tensor, grad: Tensor) -> list[Any]:
    """Do a forward and a backward; return the output, all gradients, and the buffers."""
    input = input.detach().requires_grad_()
    output = net(input)
    output.backward(grad)
    return [output, input.grad, *(parameter.grad for parameter in net.parameters()), *net.buffers()]


def wait_for(devices: Sequence[str]) -> None:
    """Wait until the CUDA devices among `devices` have finished their work."""
    for device in devices:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    from sync_batchnorm import __main__ as by_name  # where other processes look up the functions that they run

    # Not `sys.exit`, which waits for the other processes: one that is blocked in a driver may never end.
    os._exit(by_name.main())
