"""A `torch.nn.DataParallel` for any devices, with the four steps of this folder."""

import functools
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ..backends.streams import current_stream
from ..refusals import check_module, warn_once
from ..torch_private import plain_tensors
from .copies import replicate
from .scatter_gather import check_sizes, check_structures, gather, scatter, tensors_in

__all__: list[str] = []

DeviceId = int | str | torch.device

NO_ACCELERATOR = (
    "expected devices for the replicas, but got none, since torch finds no accelerator; the module runs by itself, or "
    "in replicas on the CPU: DataParallelWithCallback(module, ['cpu'] * 2)"
)


@functools.lru_cache(maxsize=256)
def as_device(device: DeviceId) -> torch.device:
    """Return the `torch.device` that a device id names, the same one for all ids of a device."""
    if device == -1:  # torch's number for the CPU, as an `output_device`
        return torch.device("cpu")
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator is not None else "cuda", device)
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, 0)


def needs_own_parallel(devices: Sequence[torch.device]) -> bool:
    """Return whether torch's own scatter and gather refuse replicas on `devices`."""
    distinct = set(devices)
    return torch.device("cpu") in distinct or len(distinct) < len(devices)


class AnyDeviceDataParallel(nn.DataParallel[Any]):
    """`torch.nn.DataParallel` that also takes CPU replicas and several replicas on one device."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
    ) -> None:
        check_module(module)
        if isinstance(device_ids, str) or not isinstance(device_ids, (Sequence, type(None))):
            raise TypeError(
                f"expected device_ids as a list, but got {device_ids!r}; pass for example ['cpu'] * 2 or [0, 1]"
            )
        devices = list(map(as_device, device_ids or ()))
        if not needs_own_parallel(devices):
            if output_device is not None and as_device(output_device).type == "cpu":
                output_device = -1
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
            if not self.device_ids:  # Without an accelerator, torch returns before it sets these.
                self.dim, self.output_device = dim, output_device  # type: ignore[assignment]
                if devices:
                    warn_once(NO_ACCELERATOR)
            return
        if len({device.type for device in devices}) > 1:
            raise ValueError(
                f"expected device_ids of one kind, but got {[str(device) for device in devices]}; "
                "use accelerators or the CPU, not both"
            )
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.device_ids = devices  # type: ignore[assignment]
        self.output_device = devices[0] if output_device is None else as_device(output_device)  # type: ignore[assignment]
        self.src_device_obj = devices[0]

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        kwargs = kwargs or {}
        if not inputs and not kwargs:
            return (), ()
        devices = list(map(as_device, device_ids))
        if len(devices) > 1:
            check_sizes((inputs, kwargs), self.dim, len(devices))
        elif all(tensor.device == devices[0] for tensor in tensors_in((inputs, kwargs))):
            return (inputs,), (kwargs,)  # There is nothing to cut into chunks.
        if not needs_own_parallel(devices):
            return super().scatter(inputs, kwargs, device_ids)  # type: ignore[arg-type]
        with plain_tensors():  # as those that torch makes
            return tuple(zip(*scatter((inputs, kwargs), devices, self.dim), strict=True))

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        return replicate(module, list(map(as_device, device_ids)), not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        """Call each `Replica` in a thread of its own; return the outputs in order, or None for one that has failed."""
        devices = list(map(as_device, self.device_ids[: len(replicas)]))
        streams = {device: current_stream(device) for device in devices}
        outputs: list[Any] = [None] * len(replicas)

        def work(i: int) -> None:
            try:
                stream = streams[devices[i]]
                with nullcontext() if stream is None else torch.cuda.stream(stream):  # and its device
                    args = inputs[i] if isinstance(inputs[i], (list, tuple)) else (inputs[i],)
                    outputs[i] = replicas[i](*args, **kwargs[i])
            except BaseException as error:
                replicas[i]._sync_run.fail(error)

        if len(replicas) == 1:
            work(0)
            return outputs
        # After Ctrl-C in the caller, a daemon that is busy does not keep the process alive.
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(replicas))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(streams) < len(devices):
            _watch_shared_parameters(self.module, replicas, outputs)
        return outputs

    def gather(self, outputs: Any, output_device: DeviceId) -> Any:
        check_structures(outputs)
        device = as_device(output_device)
        if not needs_own_parallel(list(map(as_device, self.device_ids))):
            return super().gather(outputs, str(device))  # type: ignore[arg-type]
        # Autocast would concatenate in its own dtype, or refuse tensors of another dtype. Torch gathers plain tensors.
        with torch.autocast(device.type, enabled=False), plain_tensors():
            return gather(outputs, device, self.dim)


def _watch_shared_parameters(original: nn.Module, replicas: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Warn of parameters that a forward has changed in place, and let its backward notice if they change later.

    Replicas on one device have aliases of one memory, each with a version counter of its own.
    """
    aliases = [
        (f"{prefix}.{name}".strip("."), alias)
        for replica in replicas
        for prefix, module in getattr(replica, "_sync_replica", replica).named_modules()
        for name, alias in module.__dict__.get("_former_parameters", {}).items()
        if not alias.is_inference()
    ]
    parameters = [parameter for parameter in original.parameters() if not parameter.is_inference()]
    versions = {parameter.data_ptr(): (parameter, parameter._version) for parameter in parameters}
    # Detached, with the same version counter: a replica may return an alias, whose hook must not refer to its node.
    shared = [(alias.detach(), *versions[alias.data_ptr()]) for _, alias in aliases if alias.data_ptr() in versions]

    def notice(_: Any) -> None:
        increment_version([alias for alias, parameter, version in shared if parameter._version != version])

    for output in tensors_in(outputs):
        if output.requires_grad:
            output.register_hook(notice)  # type: ignore[no-untyped-call]
    if names := {name for name, alias in aliases if alias._version}:
        warn_once(
            f"expected a forward that leaves its parameters as they are, but got changes of {sorted(names)} by each of "
            f"{len(replicas)} replicas, which share their memory; make it a buffer, or change it outside of the forward"
        )
