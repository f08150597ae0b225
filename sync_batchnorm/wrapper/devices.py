"""The devices of replicas: the ids by which users name them, and whether what is copied between them arrives."""

import functools
import itertools
from collections.abc import Sequence

import torch

__all__: list[str] = []

DeviceId = int | str | torch.device


@functools.lru_cache(maxsize=256)
def as_device(device: DeviceId) -> torch.device:
    """Return the `torch.device` that a device id names, the same one for all ids of a device."""
    if isinstance(device, int) and device != -1:
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cuda" if accelerator is None else accelerator.type, device)
    device = torch.device("cpu" if device == -1 else device)  # -1 is torch's number for the CPU, as an `output_device`
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0)


@functools.lru_cache(maxsize=256)
def unsupported_by_torch(devices: tuple[torch.device, ...]) -> bool:
    """Return whether torch's own scatter and gather refuse replicas on `devices`."""
    distinct = set(devices)
    return torch.device("cpu") in distinct or len(distinct) < len(devices)


def checked_devices(device_ids: Sequence[DeviceId] | None) -> tuple[torch.device, ...]:
    """Return the devices that a wrapper is given; raise an error for what is no list, or names the CPU beside others.

    None becomes an empty tuple.
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
    """Raise an error if what one of several accelerators copies to another does not arrive; a set that passes stays so.

    With some drivers and settings of the IOMMU, peer-to-peer copies lose data without an error:
    https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257, https://github.com/pytorch/pytorch/issues/132397.
    """
    if len(devices) < 2 or not torch.accelerator.is_available():  # as in tests that replace the steps
        return
    for i, (source, target) in enumerate(itertools.permutations(devices, 2)):
        # Not the numbers of the last pair, which memory may still hold.
        numbers = torch.arange(i, 65536 + i, dtype=torch.int32, device="cpu")
        there = numbers.to(source)
        if torch.equal(there.cpu(), numbers) and not torch.equal(there.to(target).cpu(), numbers):
            raise RuntimeError(
                f"a copy from {source} to {target} does not arrive, though it does by way of the CPU: training on "
                "both would go wrong without an error. Make peer-to-peer copies work, for example with the kernel "
                "parameter iommu=pt, or by disabling the IOMMU and PCI ACS; or use one of these devices"
            )
