"""Check this machine, ``python -m sync_batchnorm``: versions, devices, copies between GPUs, parity and time of a layer.

Prints a table to paste into a report; progress goes to stderr. Ends with status 0 if all is right, 1 if something is
wrong, 2 for bad arguments. `selfcheck.py` has the checks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch

from sync_batchnorm import __version__
from sync_batchnorm.local_parallel import as_device
from sync_batchnorm.selfcheck import BUDGET, Finding, Item, items_for, run
from sync_batchnorm.torch_private import MISSING

__all__: list[str] = []

DESCRIPTION = "Check whether synchronized batch normalization works on this machine. Takes less than 30 seconds."
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sync_batchnorm", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help='the devices of the replicas, as in "0,1", "0,0" or "cpu,cpu,cpu"; '
        "without it every GPU, two replicas on a single one, or two on the CPU",
    )
    options = parser.parse_args(arguments)
    try:
        devices = found_devices() if options.devices is None else parsed_devices(options.devices)
    except ValueError as error:
        parser.error(str(error))
    try:
        findings, seconds = check_devices(devices)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    report = {
        "ok": all(finding.ok for finding in findings),
        "seconds": round(seconds, 1),
        "versions": versions(),
        "devices": {device: describe(device) for device in dict.fromkeys(devices)},
        "replicas": devices,
        "checks": [{"check": str(f.item), "devices": f.item.devices, "ok": f.ok, "result": f.result} for f in findings],
        "advice": advice(findings),
    }
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0 if report["ok"] else 1


def found_devices() -> list[str]:
    """Return the devices to check: every GPU; one of them, or the CPU, twice, as one replica has nobody to meet."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return gpus if len(gpus) > 1 else (gpus or ["cpu"]) * 2


def parsed_devices(text: str) -> list[str]:
    """Return the devices that a user has listed.

    Raises:
        ValueError: for a list that is too short or mixed, and for devices that are not there.
    """
    devices = []
    for name in text.split(","):
        name = name.strip()
        try:
            device = as_device(int(name) if name.isdecimal() else name)
        except RuntimeError:
            raise ValueError(f"expected devices as in 0,1 or cpu,cpu, but got {name!r} in {text!r}") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"expected devices of this machine, but got {device}, and torch {torch.__version__} finds "
                f"{torch.cuda.device_count()} CUDA devices here; leave --devices out to check what is found"
            )
        devices.append(str(device))
    if len(devices) < 2:
        raise ValueError(
            f"expected at least two devices, but got {text!r}; a device may be repeated, as in {text},{text}"
        )
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise ValueError(f"expected devices of one kind, but got {text!r}; list GPUs or cpu, not both")
    return devices


def check_devices(devices: list[str]) -> tuple[list[Finding], float]:
    """Check the connections between devices, and the library on them; return the findings, and the seconds it took."""
    start = monotonic()
    links, library = items_for(devices)
    findings = run(links, start + BUDGET)
    if all(finding.ok for finding in findings):
        findings += run(library, start + BUDGET)
    else:  # They would hang, or be wrong, for the same reason.
        findings += [Finding(item, False, "not checked, as the devices are not connected") for item in library]
    return findings, monotonic() - start


def versions() -> dict[str, str]:
    """Return what else matters beside the devices, as text."""
    cuda = "none"
    if torch.cuda.is_available():
        built = f"HIP {torch.version.hip}" if torch.version.hip else str(torch.version.cuda)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        cuda = f"{built}, cuDNN {cudnn}"
    found = {
        "sync_batchnorm": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CUDA": cuda,
    }
    if MISSING:
        found["torch without"] = ", ".join(MISSING)
    return found | {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


def describe(device: str) -> str:
    """Return what a device is."""
    if device == "cpu":
        return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if device.startswith("cuda"):
        properties: Any = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return platform.processor() or "unknown"


def advice(findings: Sequence[Finding]) -> list[str]:
    """Return what to do about what is wrong."""
    wrong = [finding.item for finding in findings if not finding.ok]
    kinds = {item.kind for item in wrong}
    if "copy" in kinds:
        return [
            "Copies between GPUs do not work, mostly because of an IOMMU or PCIe ACS that stands between them: switch "
            "it off in the firmware (VT-d, AMD-Vi, ACS), or boot Linux with iommu=pt.",
            f"Until then, train on GPUs that reach each other: CUDA_VISIBLE_DEVICES={','.join(connected(findings))}. "
            "Several replicas on one GPU need no copies: device_ids=[0, 0].",
        ]
    if "broadcast" in kinds:
        return [
            "Plain copies between the GPUs work, but NCCL, through which torch.nn.DataParallel sends parameters, does "
            "not: set NCCL_P2P_DISABLE=1 and check again; NCCL_DEBUG=INFO tells what it tries."
        ]
    return (
        ["Please report this table: the devices are connected, but the numbers are wrong or missing."] if kinds else []
    )


def connected(findings: Sequence[Finding]) -> list[str]:
    """Return the first GPUs that all reach each other, as CUDA_VISIBLE_DEVICES names them."""
    broken = {finding.item.devices for finding in findings if finding.item.kind == "copy" and not finding.ok}
    kept: list[str] = []
    for device in dict.fromkeys(device for item in _copies(findings) for device in item.devices):
        if not any((device, other) in broken or (other, device) in broken for other in kept):
            kept.append(device)
    indices = [int(device.partition(":")[2]) for device in kept]
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [visible[index] if index < len(visible) else str(index) for index in indices]


def _copies(findings: Sequence[Finding]) -> list[Item]:
    return [finding.item for finding in findings if finding.item.kind == "copy"]


def as_text(report: dict[str, Any]) -> str:
    """Return the report as a table in Markdown, and below it what to do."""
    rows = [["check", "result", "right"]]
    rows += [[name, value, ""] for name, value in (report["versions"] | report["devices"]).items()]
    rows.append(["replicas on", ", ".join(report["replicas"]), ""])
    rows += [[check["check"], check["result"], "yes" if check["ok"] else "NO"] for check in report["checks"]]
    rows = [[" ".join(cell.split()).replace("|", "/") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    verdict = "All is right" if report["ok"] else "Something is wrong"
    return "\n".join([*lines, "", f"{verdict}, after {report['seconds']} seconds.", *report["advice"]])


if __name__ == "__main__":
    sys.exit(main())
