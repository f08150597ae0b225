"""Convert the user's device ids to devices, and check that the devices can be used together."""

import functools
import itertools
from collections.abc import Sequence

import torch

__all__: list[str] = []

DeviceId = int | str | torch.device


@functools.lru_cache(maxsize=256)
def as_device(device: DeviceId) -> torch.device:
    """Return the `torch.device` for a device id. All ids of one device give the same result.

    For example, ``0``, ``"cuda"`` and ``"cuda:0"`` all become ``cuda:0`` on a machine with CUDA.
    """
    if isinstance(device, int) and device != -1:
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cuda" if accelerator is None else accelerator.type, device)
    device = torch.device("cpu" if device == -1 else device)  # In `output_device`, torch writes -1 for the CPU.
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0)


@functools.lru_cache(maxsize=256)
def unsupported_by_torch(devices: tuple[torch.device, ...]) -> bool:
    """Return whether the devices include the CPU, or one device twice: torch's scatter and gather refuse both."""
    distinct = set(devices)
    return torch.device("cpu") in distinct or len(distinct) < len(devices)


def checked_devices(device_ids: Sequence[DeviceId] | None) -> tuple[torch.device, ...]:
    """Return the devices for the `device_ids` of a wrapper; an empty tuple if `device_ids` is None.

    Raise an error if `device_ids` is not a list, or names both the CPU and accelerators.
    """
    if isinstance(device_ids, str) or not isinstance(device_ids, (Sequence, type(None))):
        raise TypeError(f"device_ids must be a list, got {device_ids!r}; pass for example ['cpu'] * 2 or [0, 1]")
    devices = tuple(map(as_device, device_ids or ()))
    if unsupported_by_torch(devices) and len({device.type for device in devices}) > 1:
        raise ValueError(
            f"device_ids must be accelerators or the CPU, not both, got {[str(device) for device in devices]}; "
            "leave out the devices of one kind"
        )
    return devices


@functools.lru_cache(maxsize=256)
def check_transfers(devices: frozenset[torch.device]) -> None:
    """Raise an error if copies between two of the devices arrive with wrong data.

    A set of devices that passed is not checked again. With some drivers and settings of the IOMMU, peer-to-peer copies
    between GPUs lose data without an error:
    https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257, https://github.com/pytorch/pytorch/issues/132397.
    """
    # Tests pass accelerators to this function that the machine does not have. Do not check such devices.
    if len(devices) < 2 or not torch.accelerator.is_available():
        return
    for i, (source, target) in enumerate(itertools.permutations(devices, 2)):
        # Copy different numbers between each pair of devices. If a copy fails, the target's memory may still hold the
        # numbers of an earlier pair, and equal numbers would hide the failure.
        expected = torch.arange(i, 65536 + i, dtype=torch.int32, device="cpu")
        on_source = expected.to(source)
        if torch.equal(on_source.cpu(), expected) and not torch.equal(on_source.to(target).cpu(), expected):
            raise RuntimeError(
                f"a copy from {source} to {target} does not arrive, though it does by way of the CPU: training on "
                "both would go wrong without an error. Make peer-to-peer copies work, for example with the kernel "
                "parameter iommu=pt, or by disabling the IOMMU and PCI ACS; or use one of these devices"
            )
