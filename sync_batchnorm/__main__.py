"""The command ``python -m sync_batchnorm``: print versions and devices, and check that replicas compute as one device.

The exit status of the command is 0 if all checks pass, 1 if a check fails or hangs, and 2 for bad arguments.
"""

import argparse
import copy
import faulthandler
import os
import platform
import sys
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from . import DataParallelWithCallback, __version__, convert_model

__all__: list[str] = []

BUDGET = 25.0  # the time for all checks, in seconds; the command promises a report within 30 seconds
TIMEOUT = 5.0  # the longest time, in seconds, that a replica waits for the others; a working machine needs far less
# The largest allowed difference between replicas and one device, by dtype, relative to the largest value. Rounding
# errors from another order of summation stay below these limits. Without synchronization, the difference is more than
# 0.1.
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run all checks, and return the exit status of the command."""
    gpus = [str(index) for index in range(torch.cuda.device_count())]
    default = ",".join(gpus if len(gpus) > 1 else (gpus or ["cpu"]) * 2)  # A single replica has no peer.
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="Check this machine, in 30 seconds.")
    parser.add_argument(
        "--devices", type=parse_devices, default=default, help="for example 0,1 or cpu,cpu (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    # A copy between two faulty GPUs may never return, and then no Python code runs any more. So a watchdog thread in C
    # ends the process after `BUDGET` seconds.
    faulthandler.dump_traceback_later(BUDGET, exit=True, file=2)
    try:
        return check(options.devices)
    finally:
        faulthandler.cancel_dump_traceback_later()


def parse_devices(text: str) -> list[str]:
    """Parse a comma-separated list of devices, such as ``0,1`` or ``cpu,cpu``, and return the names of the devices."""
    count = torch.cuda.device_count()
    names = [f"cuda:{name}" if name.isdecimal() else name for name in text.replace(" ", "").split(",")]
    try:
        devices = [torch.device(name) for name in names]
    except RuntimeError:  # One of the names in the list is not the name of a device.
        devices = []
    wrong = any(device.type == "cuda" and (device.index or 0) >= count for device in devices)
    if wrong or len(devices) < 2 or len({device.type for device in devices}) > 1:
        raise argparse.ArgumentTypeError(
            f"expected at least two replicas, all on GPUs of this machine as in 0,0 or all on the CPU as in cpu,cpu, "
            f"but got {text!r}; torch {torch.__version__} finds {count} CUDA devices"
        )
    return list(map(str, devices))


def check(devices: Sequence[str]) -> int:
    """Run all checks on `devices`, print the report, and return the exit status: 0 if all checks passed, else 1."""
    begin, all_right, say = monotonic(), True, partial(print, flush=True)
    facts = {
        "sync_batchnorm": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        **{d: torch.cuda.get_device_name(d) if d.startswith("cuda") else platform.machine() for d in devices},
        "replicas on": ", ".join(devices),
    }
    for name, fact in facts.items():
        say(f"{name:23} {fact}")
    for dtype in ["float32"] if facts["replicas on"].startswith("mps") else TOLERANCES:  # Apple's GPUs have no float64.
        say(f"parity in {dtype:13}", end=" ")
        try:
            verdict, result = "right,", check_parity(devices, dtype)
        except Exception as error:  # Any error belongs in the report.
            verdict, result, all_right = "WRONG,", f"{type(error).__name__}: {error}", False
        say(verdict, " ".join(result.split()))
    say(f"\n{'All is right' if all_right else 'Something is wrong'}, after {monotonic() - begin:.1f} seconds.")
    say('To report it, right or wrong, paste all of this text; "Self-check" on the page "Diagnosing" explains it.')
    return 0 if all_right else 1


def check_parity(devices: Sequence[str], dtype: str) -> str:
    """Train a small model for two steps, in replicas on `devices` and on the first device alone; compare the results.

    Return a text with the largest difference between the results in replicas and on one device. Raise a `RuntimeError`
    if this difference is above the tolerance.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": devices[0]}
    plain = nn.Sequential(nn.BatchNorm2d(16), nn.SiLU(), nn.BatchNorm2d(16)).to(**options)  # MKL's tanh may lose digits
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), devices, timeout=TIMEOUT)
    errors = []
    for _ in range(2):
        # Each device gets one chunk of the batch; the last chunk is smaller than the others. `grad` is the gradient of
        # the output, with a mean near zero: large sums over `grad` would have rounding errors near the tolerance.
        input, grad = torch.randn(2, 2 * len(devices) - 1, 16, 9, 9, **options)
        in_replicas, on_one_device = step(parallel, 5 + 3 * input, grad), step(plain, 5 + 3 * input, grad)
        for actual, expected in zip(in_replicas, on_one_device, strict=True):
            errors.append((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    # The maximum is NaN if any of the errors is NaN. Python's `max` could hide a NaN.
    largest = float(torch.stack(errors).max())
    result = f"largest difference {largest:.1e}, allowed {TOLERANCES[dtype]:.0e}"
    if not largest <= TOLERANCES[dtype]:
        raise RuntimeError(result)
    return result


def step(net: nn.Module, input: Tensor, grad: Tensor) -> list[Tensor]:
    """Run a forward and a backward pass of `net`; return its output, gradients and buffers on the CPU, in float64."""
    output = net(input.requires_grad_())
    output.backward(grad)
    gradients: list[Any] = [tensor.grad for tensor in (input, *net.parameters())]
    return [tensor.detach().cpu().double() for tensor in (output, *gradients, *net.buffers())]


if __name__ == "__main__":
    sys.exit(main())
