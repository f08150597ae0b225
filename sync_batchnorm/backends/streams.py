"""On CUDA, synchronized layers run on default streams: how replicas on other streams get there and back.

NOTE [streams]: A replica that uses a stream of its own enters the default streams for the call of a layer: these wait
for its stream, and its stream waits for them afterwards. So a tensor of the exchange belongs to a device, and nothing
else has to know of streams. In a process of its own nothing is entered, so that CUDA graphs can capture the layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__: list[str] = []

T = TypeVar("T")


def current_stream(device: torch.device) -> Any:
    """Return the stream of `device` that this thread uses; None if the device has none."""
    return torch.accelerator.current_stream(device.index) if device.type == "cuda" else None


def are_default(device: torch.device, other: torch.device | None) -> bool:
    """Return whether this thread uses the default streams of a GPU and, if there is one, of another one."""
    return not any([torch.accelerator.current_stream(gpu.index).stream_id for gpu in {device, other or device}])


def on_default_streams(
    devices: Iterable[torch.device], used: Iterable[Tensor | None], function: Callable[..., T], *args: Any
) -> T:
    """Return `function(*args)`, run on the default streams of distinct `devices`, in order with the current ones.

    `used` are the tensors that the function reads.
    """
    streams = _defaults_to_enter(devices)
    return on_streams(streams, used, function, *args) if streams else function(*args)


def on_streams(streams: Sequence[Any], used: Iterable[Tensor | None], function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, which reads `used`, run on `streams`, in order with those that are current there."""
    with _entered(streams):
        _record_on_current_streams(used)
        result = function(*args)
    _record_on_current_streams(result if isinstance(result, tuple) else (result,))
    return result


def _defaults_to_enter(devices: Iterable[torch.device]) -> list[Any]:
    """Return the default streams of those devices on which this thread uses another one."""
    streams = [torch.accelerator.current_stream(device.index) for device in devices if device.type == "cuda"]
    return [torch.cuda.default_stream(stream.device) for stream in streams if stream.stream_id]


@contextmanager
def _entered(streams: Sequence[Any]) -> Iterator[None]:
    device = torch.accelerator.current_device_index()
    outer = [torch.accelerator.current_stream(stream.device_index) for stream in streams]
    try:
        for stream, former in zip(streams, outer, strict=True):
            stream.wait_stream(former)
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(device)  # which setting a stream has changed
        yield
    finally:
        for stream, former in zip(streams, outer, strict=True):
            former.wait_stream(stream)
            torch.accelerator.set_stream(former)
        torch.accelerator.set_device_index(device)


def _record_on_current_streams(values: Iterable[Any]) -> None:
    """Tell the allocator that the current streams use those values that are tensors, whichever stream made them."""
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            try:  # `suppress` takes as long as the rest.
                value.record_stream(torch.accelerator.current_stream(value.device.index))
            except RuntimeError:  # of batched gradients, which have no memory of their own
                continue


def in_order_with_engine(
    devices: Sequence[torch.device], grads: Iterable[Tensor | None], function: Callable[..., Any], *args: Any
) -> Any:
    """Return `function(*args)`, the backward of a node with tensors on several `devices`, in order with the engine.

    The engine knows a single stream of a node: that of its first output, which is on the first device. It assumes that
    the gradients that the node gets are ready on that stream, and that the gradients that the node returns are, too.
    """
    if devices[0].type != "cuda":
        return function(*args)
    streams = {device: torch.accelerator.current_stream(device.index) for device in devices}
    first, *others = streams.values()
    if any([stream.stream_id for stream in streams.values()]):
        return on_streams(_defaults_to_enter(devices), (), in_order_with_engine, devices, grads, function, *args)
    ready = first.record_event()
    for other in others:
        other.wait_event(ready)
    _record_on_current_streams(grads)
    results = function(*args)
    for other in others:
        first.wait_stream(other)
    return results
