"""A `torch.nn.DataParallel` for any devices, with the four steps of this folder."""

import functools
import itertools
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..backends.streams import current_stream
from ..meeting import DEFAULT_TIMEOUT
from ..refusals import check_module, warn_once
from .copies import replicate
from .random_states import RandomStates
from .scatter_gather import check_structures, gather, number_of_chunks, scatter, tensors_in

__all__: list[str] = []

DeviceId = int | str | torch.device

NO_ACCELERATOR = (
    "PyTorch finds no accelerator, so the module runs without replicas; for replicas on the CPU write "
    "DataParallelWithCallback(module, ['cpu'] * 2)"
)


@functools.lru_cache(maxsize=256)
def as_device(device: DeviceId) -> torch.device:
    """Return the `torch.device` that a device id names, the same one for all ids of a device."""
    if isinstance(device, int) and device != -1:
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cuda" if accelerator is None else accelerator.type, device)
    device = torch.device("cpu" if device == -1 else device)  # -1 is torch's number for the CPU, as an `output_device`
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0)


def unsupported_by_torch(devices: Sequence[torch.device]) -> bool:
    """Return whether torch's own scatter and gather refuse replicas on `devices`."""
    distinct = set(devices)
    return torch.device("cpu") in distinct or len(distinct) < len(devices)


@functools.lru_cache(maxsize=256)
def check_copies(devices: frozenset[torch.device]) -> None:
    """Raise an error if what one of several accelerators copies to another one does not arrive; asked once for a set.

    With some drivers and settings of the IOMMU, peer-to-peer copies lose data without an error:
    https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257, https://github.com/pytorch/pytorch/issues/132397.
    """
    mode = torch.cuda.get_sync_debug_mode() if next(iter(devices)).type == "cuda" else 0
    if mode:
        torch.cuda.set_sync_debug_mode("default")  # The host waits for these copies.
    try:
        for i, (source, target) in enumerate(itertools.permutations(devices, 2)):
            # Not the numbers of the last pair, which memory may still hold.
            numbers = torch.arange(i, 65536 + i, dtype=torch.int32, device="cpu")
            sent = numbers.to(source)
            if torch.equal(sent.cpu(), numbers) and not torch.equal(sent.to(target).cpu(), numbers):
                raise RuntimeError(
                    f"a copy from {source} to {target} does not arrive, though it does by way of the CPU: training on "
                    "both would go wrong without an error. Make peer-to-peer copies work, for example with the kernel "
                    "parameter iommu=pt, or by disabling the IOMMU and PCI ACS; or use one of these devices"
                )
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


def checked_timeout(timeout: float) -> float:
    """Return a number of seconds, or raise an error for what is none, or out of range."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}; pass for example 300.0")
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout must be between 0 and {threading.TIMEOUT_MAX:g} seconds, got {timeout!r}; pass for example 300.0"
        )
    return float(timeout)


class AnyDeviceDataParallel(nn.DataParallel[Any]):
    """`torch.nn.DataParallel` that also takes CPU replicas, several replicas on one device, and a timeout."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        check_module(module)
        timeout = checked_timeout(timeout)
        if isinstance(device_ids, str) or not isinstance(device_ids, (Sequence, type(None))):
            raise TypeError(f"device_ids must be a list, got {device_ids!r}; pass for example ['cpu'] * 2 or [0, 1]")
        devices: Any = list(map(as_device, device_ids or ()))
        output: Any = None if output_device is None else as_device(output_device)
        if not unsupported_by_torch(devices):
            given: Any = -1 if output == torch.device("cpu") else output_device
            super().__init__(module, device_ids, given, dim)  # type: ignore[arg-type]
            if not self.device_ids:  # Without an accelerator, torch returns before it sets these.
                self.dim, self.output_device = dim, given
                if devices:
                    warn_once(NO_ACCELERATOR)
        elif len({device.type for device in devices}) > 1:
            raise ValueError(
                f"device_ids must be accelerators or the CPU, not both, got {[str(device) for device in devices]}; "
                "leave out the devices of one kind"
            )
        else:
            nn.Module.__init__(self)
            self.module, self.dim, self.device_ids = module, dim, devices
            self.output_device, self.src_device_obj = output or devices[0], devices[0]
        self._sync_timeout = timeout

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        kwargs = kwargs or {}
        if not inputs and not kwargs:
            return (), ()
        devices = list(map(as_device, device_ids))
        tensors = tensors_in((inputs, kwargs))
        if len(devices) > 1:
            # PyTorch would make a part for every device where some arguments are no tensors, and fill up the others.
            devices = devices[: number_of_chunks(tensors, self.dim, len(devices))]
        if len(devices) == 1 and all([tensor.device == devices[0] for tensor in tensors]):
            return (inputs,), (kwargs,)  # There is nothing to cut into chunks.
        if not unsupported_by_torch(devices) and all([tensor.dim() for tensor in tensors]):  # PyTorch cuts no scalars.
            return super().scatter(inputs, kwargs, devices)
        with torch.DisableTorchFunctionSubclass():  # as those that torch makes
            return tuple(zip(*scatter((inputs, kwargs), devices, self.dim), strict=True))

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        return replicate(module, list(map(as_device, device_ids)), not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        """Call each `Replica` in a thread of its own; return the outputs in order, or None for one that has failed."""
        devices = list(map(as_device, self.device_ids[: len(replicas)]))
        streams = {device: current_stream(device) for device in set(devices)}
        outputs: list[Any] = [None] * len(replicas)

        def work(i: int) -> None:
            try:
                stream = streams[devices[i]]
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    args = inputs[i] if isinstance(inputs[i], (list, tuple)) else (inputs[i],)
                    outputs[i] = replicas[i](*args, **kwargs[i])
            except BaseException as error:
                replicas[i]._sync_run.coordinator.leave(replicas[i]._sync_id, error)

        first, *others = replicas
        if not others:
            work(0)
            return outputs
        run: Any = getattr(first, "_sync_run", None)
        shares = run is not None and len(streams) < len(devices)
        if shares:
            ids, versions = [replica._sync_id for replica in replicas], _versions(self.module)
            states = RandomStates(dict(zip(ids, devices, strict=True)))
            run.coordinator.take_turns(ids, states.begin_turn)
        # After Ctrl-C in the caller, a busy daemon thread does not block exit.
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(replicas))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not (run and run.coordinator.has_given_up):
                thread.join(1.0)
        if shares:  # not after Ctrl-C in the caller, while replicas still run
            states.restore_caller()
            after = _versions(self.module)  # with those that forward() has added to the module
            changed = [name for name, version in versions.items() if after.get(name, version) != version]
            if changed:
                warn_once(
                    f"forward() modified parameters {changed} in place; each of the {len(replicas)} replicas, which "
                    "share their memory, repeated the change; make it a buffer, or change it outside forward()"
                )
        return outputs

    def gather(self, outputs: Any, output_device: DeviceId) -> Any:
        check_structures(outputs)
        device = as_device(output_device)
        if not unsupported_by_torch(list(map(as_device, self.device_ids))):
            return super().gather(outputs, str(device))  # type: ignore[arg-type]
        # Autocast would concatenate in its own dtype, or refuse tensors of another dtype. Torch gathers plain tensors.
        with torch.autocast(device.type, enabled=False), torch.DisableTorchFunctionSubclass():
            return gather(outputs, device, self.dim)


def _versions(module: nn.Module) -> dict[str, int]:
    """Return the version of each parameter, a number that grows with every change in place of the same memory."""
    return {name: 0 if own.is_inference() else own._version for name, own in module.named_parameters()}
