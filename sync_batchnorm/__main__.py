"""Check this machine, ``python -m sync_batchnorm``: versions, devices, copies between GPUs, parity and cost of a layer.

Prints a text to paste into a report; progress goes to stderr. Ends with status 0 if all is right, 1 if something is
wrong, 2 for bad arguments, 130 after Ctrl-C.

NOTE [checks that hang]: A copy between two GPUs that the hardware swallows never returns, and no signal handler of
Python runs meanwhile. So checks of GPUs run in another process. If it tells nothing for a while, it is killed, the
running check counts as hung, and another process does the rest. On the CPU, `DataParallelWithCallback` limits waits.
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
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from sync_batchnorm import DataParallelWithCallback, __version__, convert_model
from sync_batchnorm.local_parallel import as_device
from sync_batchnorm.torch_private import MISSING

__all__: list[str] = []

ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS")
PROCESSES: Any = multiprocessing.get_context("spawn")  # A process that is forked cannot use the CUDA of this one.
SILENCE = 8.0  # seconds after which a check counts as hung: far more than any of them needs
BUDGET = 24.0  # seconds for all checks together: the report is promised within 30
# Of the largest value. Wide enough for the order in which the kernels of any device add up; the statistics of a single
# replica are off by more than a tenth.
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}
# Channels and height: replicas on the CPU hand over small inputs, and exchange statistics of large ones.
SHAPES = ((8, 5), (32, 28))

Result = tuple[bool, str]  # whether it is right, and what was found


class Item(NamedTuple):
    """One check: its name in the report, on which devices, and the function that does it."""

    name: str
    devices: tuple[str, ...]
    check: Callable[[Sequence[str]], Result]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sync_batchnorm", description="Check this machine, within 30 seconds."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    usual = "without it every GPU, two replicas on a single one, or two on the CPU"
    parser.add_argument("--devices", default=found_devices(), help=f'"0,1", "0,0" or "cpu,cpu,cpu"; {usual}')
    options = parser.parse_args(arguments)
    start = monotonic()
    try:
        devices = parsed_devices(options.devices)
    except ValueError as error:
        parser.error(str(error))
    try:
        found = check_devices(devices, start + BUDGET)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    report = {
        "ok": all(ok for ok, _ in found.values()),
        "seconds": round(monotonic() - start, 1),
        "versions": versions(),
        "devices": {device: describe(device) for device in devices},
        "replicas": devices,
        "checks": [{"check": i.name, "devices": i.devices, "ok": ok, "result": was} for i, (ok, was) in found.items()],
        "advice": advice(found),
    }
    print(json.dumps(report, indent=2) if options.json else as_text(report), flush=True)
    return 0 if report["ok"] else 1


def found_devices() -> str:
    """Return the devices to check: every GPU; one of them, or the CPU, twice, as one replica has nobody to meet."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ",".join(gpus if len(gpus) > 1 else (gpus or ["cpu"]) * 2)


def parsed_devices(text: str) -> tuple[str, ...]:
    """Return the devices in a list that a user has typed; raise ValueError if there are no such replicas."""
    count = torch.cuda.device_count()
    try:
        devices = [as_device(int(name) if name.isdecimal() else name) for name in map(str.strip, text.split(","))]
    except RuntimeError:
        raise ValueError(f"expected devices as in 0,1 or cpu,cpu, but got {text!r}") from None
    if len(devices) < 2:
        raise ValueError(f"expected at least two devices, but got {text!r}; repeat one, as in {text},{text}")
    if len({device.type for device in devices}) > 1:
        raise ValueError(f"expected devices of one kind, but got {text!r}; list GPUs or cpu, not both")
    if devices[0].type == "cuda" and max(device.index or 0 for device in devices) >= count:
        raise ValueError(
            f"expected devices of this machine, but got {text!r}, and torch {torch.__version__} finds {count} CUDA "
            "devices here; leave --devices out to check what is found"
        )
    return tuple(map(str, devices))


def versions() -> dict[str, str]:
    """Return what else matters beside the devices, as text."""
    cuda = "none"
    if torch.cuda.is_available():
        built = f"HIP {torch.version.hip}" if torch.version.hip else str(torch.version.cuda)
        cuda = f"{built}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    found = {"sync_batchnorm": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    found |= {"system": platform.platform(), "CUDA": cuda}
    if MISSING:
        found["torch without"] = ", ".join(MISSING)
    return found | {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


def describe(device: str) -> str:
    """Return what a device is; of one of several GPUs, also which others it can copy to without the host."""
    if device == "cpu":
        return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if not device.startswith("cuda"):
        return platform.processor() or "unknown"
    properties: Any = torch.cuda.get_device_properties(device)
    text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != torch.device(device).index]
    peers = [str(gpu) for gpu in others if torch.cuda.can_device_access_peer(device, gpu)]
    return f"{text}, peer-to-peer with {' '.join(peers) or 'none'}" if others else text


def advice(found: Mapping[Item, Result]) -> list[str]:
    """Return what to do about what is wrong."""
    wrong = {item.name.split()[0] for item, (ok, _) in found.items() if not ok}
    if "copy" in wrong:
        return [
            "Copies between GPUs do not work, mostly because of an IOMMU or PCIe ACS that stands between them: switch "
            "it off in the firmware (VT-d, AMD-Vi, ACS), or boot Linux with iommu=pt.",
            f"Until then, train on GPUs that reach each other: CUDA_VISIBLE_DEVICES={','.join(connected(found))}. "
            "Several replicas on one GPU need no copies: device_ids=[0, 0].",
        ]
    if wrong & {"broadcast", "NCCL,"}:
        return [
            "Plain copies between the GPUs work, but NCCL, through which torch.nn.DataParallel sends parameters, does "
            "not: set NCCL_P2P_DISABLE=1 and check again; NCCL_DEBUG=INFO tells what it tries."
        ]
    return ["Please report this: the devices are connected, but the numbers are wrong or missing."] if wrong else []


def connected(found: Mapping[Item, Result]) -> list[str]:
    """Return the first GPUs that all reach each other, as CUDA_VISIBLE_DEVICES names them."""
    copies = {item.devices: ok for item, (ok, _) in found.items() if item.name.startswith("copy ")}
    kept: list[str] = []
    for device in dict.fromkeys(source for source, _ in copies):
        if all(copies[device, other] and copies[other, device] for other in kept):
            kept.append(device)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    indices = [int(device.partition(":")[2]) for device in kept]
    return [visible[index] if index < len(visible) else str(index) for index in indices]


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report as a table in Markdown, and below it what to do."""
    rows = [["check", "result", "right"]]
    rows += [[name, value, ""] for name, value in (report["versions"] | report["devices"]).items()]
    rows.append(["replicas on", ", ".join(report["replicas"]), ""])
    rows += [[check["check"], check["result"], "yes" if check["ok"] else "NO"] for check in report["checks"]]
    rows = [[" ".join(cell.split()).replace("|", "/") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    last = "To report it, right or wrong, paste all of this text; docs/self-check.md says what each row means."
    verdict = "All is right" if report["ok"] else "Something is wrong"
    return "\n".join([*lines, "", f"{verdict}, after {report['seconds']} seconds.", *report["advice"], last])


def check_devices(devices: tuple[str, ...], deadline: float) -> dict[Item, Result]:
    """Check the connections between devices, the library on them, and NCCL between processes."""
    gpus = tuple(device for device in dict.fromkeys(devices) if device.startswith("cuda"))
    links = [Item(f"copy {a} -> {b}", (a, b), check_copy) for a in gpus for b in gpus if a != b]
    # Apple's GPUs have no float64.
    dtypes = ["float32"] if devices[0].startswith("mps") else ["float32", "float64"]
    library = [Item(f"parity in {dtype}", devices, partial(check_parity, dtype)) for dtype in dtypes]
    library.append(Item("time", devices, partial(check_cost, "time", (1, 64, 56))))
    if links:
        links.append(Item("broadcast to all", gpus, check_broadcast))
        # Many small layers: the wrapper itself counts little, and the host is slower than the GPUs.
        library.append(Item("host time a layer", devices, partial(check_cost, "host", (20, 8, 8))))
        library.append(Item("launches a layer", devices, partial(check_cost, "launches", (20, 8, 8))))
    found = run(links, deadline)
    if all(ok for ok, _ in found.values()):
        found |= run(library, deadline)
    else:  # They would hang, or be wrong, for the same reason.
        found |= {item: (False, "not checked, as the devices are not connected") for item in library}
    if links:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            pair = [Item("NCCL, two processes", gpus[:2], partial(check_nccl, f"{folder}/store", i)) for i in range(2)]
            found |= run(pair[:1], deadline, pair[1:])
    return found


def run(items: Sequence[Item], deadline: float, meanwhile: Sequence[Item] = ()) -> dict[Item, Result]:
    """Do `items` until `deadline`, and return what came of each; one more process does `meanwhile`, if it is given."""
    found: dict[Item, Result] = {}
    local = all(device == "cpu" for item in items for device in item.devices)
    while (left := items[len(found) :]) and monotonic() < deadline:
        results = [check(left[0])] if local else supervised([left, meanwhile] if meanwhile else [left], deadline)
        found |= zip(left, results, strict=False)
    return found | {item: (False, "not checked, the time was over") for item in left}


def supervised(items: Sequence[Sequence[Item]], deadline: float) -> list[Result]:
    """Do each list of items in a process; return their results, up to the first that hangs or ends its process."""
    results: list[Result] = []
    ours, theirs = PROCESSES.Pipe(duplex=False)
    processes = [PROCESSES.Process(target=work, args=(theirs, some), daemon=True) for some in items]
    patience = deadline - monotonic()  # At first torch is imported there.
    try:
        for process in processes:
            process.start()
        theirs.close()
        while len(results) < len(items[0]):
            if not ours.poll(patience):
                return [*results, (False, f"hangs, no end after {patience:.1f} seconds")]
            results += ours.recv()
            patience = max(0.0, min(SILENCE, deadline - monotonic()))
    except (EOFError, OSError):  # the second on Windows
        processes[0].join(1.0)
        results.append((False, f"its process ended with status {processes[0].exitcode}"))
    finally:
        for process in multiprocessing.active_children():
            process.kill()
            process.join(1.0)  # A process inside of a driver outlives its kill.
    return results


def work(connection: Connection, items: Sequence[Item]) -> None:
    """Do `items` in a process that is supervised, and tell what comes of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits, which ends this one.
    os.dup2(2, 1)  # Libraries print there, NCCL for one.
    connection.send([])
    for item in items:
        connection.send([check(item)])


def check(item: Item) -> Result:
    """Do one item in this process, and say on stderr that it is running."""
    print(f"{item.name} ...", file=sys.stderr, flush=True)
    try:
        return item.check(item.devices)
    except Exception as error:  # It belongs into the report, whatever it is.
        return False, f"{type(error).__name__}: {error}"


def check_copy(devices: Sequence[str]) -> Result:
    """Copy a few and many bytes from one device to another one, and compare what arrives."""
    for size in (64, 1 << 24):
        sent, expected = (torch.arange(size, dtype=torch.int32, device=device) for device in devices)
        wait_for(devices)
        start = perf_counter()
        received = sent.to(devices[1])
        wait_for(devices)
        rate = sent.nbytes / (perf_counter() - start) / 1e9
        if wrong := int((received != expected).sum()):
            return False, f"{wrong} of {size} values arrive wrong"
    return True, f"{rate:.1f} GB/s"


def check_broadcast(devices: Sequence[str]) -> Result:
    """Send a tensor to all devices at once, as `torch.nn.DataParallel` sends the parameters: through NCCL."""
    sent = torch.arange(1 << 20, dtype=torch.float32, device=devices[0])
    copies = nn.parallel.comm.broadcast(sent, list(map(torch.device, devices)))  # type: ignore[no-untyped-call]
    wrong = [d for d, received in zip(devices, copies, strict=True) if not torch.equal(received.cpu(), sent.cpu())]
    return not wrong, f"arrives wrong on {', '.join(wrong)}" if wrong else f"{len(devices)} devices"


def check_nccl(store: str, rank: int, devices: Sequence[str]) -> Result:
    """Add up tensors of two processes, as `DistributedDataParallel` does; `store` is a file through which they meet."""
    if not distributed.is_available() or not distributed.is_nccl_available():
        return True, "not available in this torch"
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    own = torch.arange(1 << 20, dtype=torch.float32, device=devices[rank])
    received = own * (1 + rank)
    distributed.all_reduce(received)
    wrong = (received != 3 * own).sum()
    distributed.all_reduce(wrong)
    num_wrong = int(wrong)  # in both processes
    distributed.destroy_process_group()
    return not num_wrong, f"{num_wrong} of {2 * len(own)} values arrive wrong" if num_wrong else "2 devices"


def check_parity(dtype: str, devices: Sequence[str]) -> Result:
    """Compare replicas of unequal size on `devices` with `torch.nn.BatchNorm2d` on the first of them, in two steps."""
    torch.manual_seed(0)
    errors = []
    for channels, height in SHAPES:
        plain = nn.Sequential(nn.BatchNorm2d(channels), nn.Tanh(), nn.BatchNorm2d(channels))
        for parameter in plain.to(devices[0], getattr(torch, dtype)).parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), devices, timeout=SILENCE)
        # So many rows make one chunk for each device, the last one smaller than the others.
        shape = (2 * len(devices) - 1, channels, height, height)
        for _ in range(2):
            input, grad = (5 + 3 * torch.randn(shape, dtype=getattr(torch, dtype), device=devices[0]) for _ in range(2))
            for actual, expected in zip(*(step(net, input, grad) for net in (parallel, plain)), strict=True):
                actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
                errors.append((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    error = float(torch.stack(errors).max())  # NaN if one of them is, other than `max`
    return error <= TOLERANCES[dtype], f"largest difference {error:.1e}, allowed {TOLERANCES[dtype]:.0e}"


def step(net: nn.Module, input: Tensor, grad: Tensor) -> list[Any]:
    """Do a forward and a backward; return the output, all gradients, and the buffers."""
    input = input.detach().requires_grad_()
    output = net(input)
    output.backward(grad)
    return [output, input.grad, *(parameter.grad for parameter in net.parameters()), *net.buffers()]


def check_cost(kind: str, sizes: tuple[int, int, int], devices: Sequence[str]) -> Result:
    """Measure steps of `sizes[0]` layers in the wrapper, synchronized and not; tell the cost of one layer."""
    if kind == "launches" and ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
        return True, "not available in this torch"
    steps = 2 if kind == "launches" else 8  # A profile takes long, and the second step is like all others.
    depth, channels, height = sizes
    shape = (4 * len(devices), channels, height, height)
    input, grad = (torch.randn(shape, device=devices[0]) for _ in range(2))
    plain = nn.Sequential(*(nn.BatchNorm2d(channels) for _ in range(depth))).to(devices[0])
    converted = convert_model(copy.deepcopy(plain))
    nets = [DataParallelWithCallback(net, devices, timeout=SILENCE) for net in (converted, plain)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads // len(devices)))  # Replicas on the CPU share its cores.
    with warnings.catch_warnings():
        # One of the two is there to be compared with.
        warnings.filterwarnings("ignore", "expected batch norms that synchronize")
        costs = [[cost_of_step(kind, net, input, grad, devices) for net in nets] for _ in range(steps)]
    torch.set_num_threads(num_threads)
    # Nothing makes a step faster than it is, but threads of the host may meet by luck.
    synchronized, other = ((median if kind == "host" else min)(found) / depth for found in zip(*costs, strict=True))
    if kind == "launches":
        return True, f"{synchronized:.1f} synchronized, {other:.1f} not, kernels and copies on all GPUs"
    return True, f"{synchronized:.2f} ms synchronized, {other:.2f} ms not, {synchronized / other:.2f} times, {shape}"


def cost_of_step(kind: str, net: nn.Module, input: Tensor, grad: Tensor, devices: Sequence[str]) -> float:
    """Return the milliseconds of a step, those until its calls return, or the number of kernels and copies on GPUs."""
    wait_for(devices)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) if kind == "launches" else nullcontext() as ran:
        start = perf_counter()
        step(net, input, grad)
        returned = perf_counter()
        wait_for(devices)
        done = perf_counter()
    if ran is not None:  # Spans such as those of `profiling.py` are events too.
        return len([e for e in ran.events() if e.device_type.name == "CUDA" and not e.is_user_annotation])
    return 1000 * ((done if kind == "time" else returned) - start)


def wait_for(devices: Sequence[str]) -> None:
    """Wait until GPUs have done what they were told; others do it at once."""
    for device in devices:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    from sync_batchnorm import __main__ as by_name  # where other processes look up the functions that they run

    # Not `sys.exit`: the usual end waits for other processes, also for one that is stuck in a driver and never ends.
    os._exit(by_name.main())
