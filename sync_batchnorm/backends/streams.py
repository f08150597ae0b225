"""Streams of CUDA: synchronized layers run on the default streams of their devices.

NOTE [streams]: The obvious way is to let each replica compute on its current stream. Then every tensor of an exchange
would have to know which stream made it and which streams read it. Instead, a replica that uses another stream enters
the default stream for the call of a layer:

    stream of the replica   --- conv ---+                       +--- relu ---
                                   wait |                       | wait
    default stream                      +--- batch norm --------+

So the tensors of an exchange belong to a device, and no other file has to know of streams. The only replica of a
process stays on its current stream, so that CUDA graphs can capture the layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__: list[str] = []

T = TypeVar("T")


def current_stream(device: torch.device) -> Any:
    """Return the current stream of this thread on `device`; None if the device has no streams."""
    return torch.accelerator.current_stream(device.index) if device.type == "cuda" else None


def uses_default_streams(device: torch.device, other: torch.device | None) -> bool:
    """Return whether this thread uses the default stream of a GPU, and of another GPU if there is one."""
    return not any([torch.accelerator.current_stream(gpu.index).stream_id for gpu in {device, other or device}])


def on_default_streams(
    devices: Iterable[torch.device], inputs: Iterable[Tensor | None], function: Callable[..., T], *args: Any
) -> T:
    """Run `function(*args)` on the default streams of distinct `devices`, in order with the current streams.

    `inputs` are the tensors that the function reads.
    """
    streams = _default_streams_to_enter(devices)
    return on_streams(streams, inputs, function, *args) if streams else function(*args)


def on_streams(streams: Sequence[Any], inputs: Iterable[Tensor | None], function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)`, which reads `inputs`, on `streams`, in order with the current streams."""
    with _enter_streams(streams):
        _record_on_current_streams(inputs)
        result = function(*args)
    _record_on_current_streams(result if isinstance(result, tuple) else (result,))
    return result


def _default_streams_to_enter(devices: Iterable[torch.device]) -> list[Any]:
    """Return the default streams of the devices on which this thread uses another stream."""
    streams = [torch.accelerator.current_stream(device.index) for device in devices if device.type == "cuda"]
    return [torch.cuda.default_stream(stream.device) for stream in streams if stream.stream_id]


@contextmanager
def _enter_streams(streams: Sequence[Any]) -> Iterator[None]:
    device = torch.accelerator.current_device_index()
    outer_streams = [torch.accelerator.current_stream(stream.device_index) for stream in streams]
    try:
        for stream, outer in zip(streams, outer_streams, strict=True):
            stream.wait_stream(outer)
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(device)  # `set_stream` has changed it.
        yield
    finally:
        for stream, outer in zip(streams, outer_streams, strict=True):
            outer.wait_stream(stream)
            torch.accelerator.set_stream(outer)
        torch.accelerator.set_device_index(device)


def _record_on_current_streams(values: Iterable[Any]) -> None:
    """Tell the allocator that the current streams use these tensors. Values that are no tensors are skipped."""
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            try:  # `suppress` takes as long as the rest.
                value.record_stream(torch.accelerator.current_stream(value.device.index))
            except RuntimeError:  # of batched gradients, which have no memory of their own
                continue


def in_order_with_engine(
    devices: Sequence[torch.device], grads: Iterable[Tensor | None], function: Callable[..., Any], *args: Any
) -> Any:
    """Run `function(*args)`, the backward pass of a node with tensors on several `devices`, in order with the engine.

    The engine knows a single stream for a node: the stream of its first output, on the first device. It assumes that
    incoming and returned gradients are ready on that stream.
    """
    if devices[0].type != "cuda":
        return function(*args)
    streams = {device: torch.accelerator.current_stream(device.index) for device in devices}
    first, *others = streams.values()
    if any([stream.stream_id for stream in streams.values()]):
        default_streams = _default_streams_to_enter(devices)
        return on_streams(default_streams, (), in_order_with_engine, devices, grads, function, *args)
    ready = first.record_event()
    for other in others:
        other.wait_event(ready)
    _record_on_current_streams(grads)
    results = function(*args)
    for other in others:
        first.wait_stream(other)
    return results
