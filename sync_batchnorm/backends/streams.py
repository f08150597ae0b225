"""CUDA streams: a synchronized layer runs on the default streams of its devices.

NOTE [streams]: The obvious way is to let each replica compute on its current stream. Then the code would have to track,
for every tensor of an exchange, the stream that wrote it and the streams that read it. Instead, a replica on another
stream enters the default stream for the call of a layer:

    stream of the replica   --- conv ---+                       +--- relu ---
                                   wait |                       | wait
    default stream                      +--- batch norm --------+

Layers run on the default stream of each device. So all tensors of an exchange belong to default streams, and only this
file handles streams. If a process runs a single replica, the layer stays on the replica's current stream, so that a
CUDA graph can capture it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__: list[str] = []

T = TypeVar("T")


def current_stream(device: torch.device) -> Any:
    """Return the current stream of this thread on `device`, or None if the device is not a GPU."""
    return torch.accelerator.current_stream(device.index) if device.type == "cuda" else None


def uses_default_streams(device: torch.device, other: torch.device | None) -> bool:
    """Return whether this thread uses the default streams of the GPUs `device` and `other` at present.

    `other` may also be None, or the same GPU.
    """
    return not any([torch.accelerator.current_stream(gpu.index).stream_id for gpu in {device, other or device}])


def on_default_streams(
    devices: Iterable[torch.device], inputs: Iterable[Tensor | None], function: Callable[..., T], *args: Any
) -> T:
    """Run `function(*args)` on the default streams of `devices`, which contains each device once. Return the result.

    The kernels of the function run in order with other kernels on this thread's current streams: after all earlier
    kernels, and before all later ones. `inputs` are the tensors that the function reads.
    """
    streams = _default_streams_to_enter(devices)
    return on_streams(streams, inputs, function, *args) if streams else function(*args)


def on_streams(streams: Sequence[Any], inputs: Iterable[Tensor | None], function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` on other streams, and return the result. `inputs` are the tensors that the function reads.

    The kernels of the function run in order with other kernels on this thread's current streams: after all earlier
    kernels, and before all later ones.
    """
    with _enter_streams(streams):
        _record_on_current_streams(inputs)
        result = function(*args)
    _record_on_current_streams(result if isinstance(result, tuple) else (result,))
    return result


def _default_streams_to_enter(devices: Iterable[torch.device]) -> list[Any]:
    """Return the default streams of those GPUs on which this thread uses another stream at present."""
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
        torch.accelerator.set_device_index(device)  # `set_stream` also changed the current device.
        yield
    finally:
        for stream, outer in zip(streams, outer_streams, strict=True):
            outer.wait_stream(stream)
            torch.accelerator.set_stream(outer)
        torch.accelerator.set_device_index(device)


def _record_on_current_streams(values: Iterable[Any]) -> None:
    """Tell the memory allocator that the current streams use these tensors. Skip values that are not tensors."""
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            try:  # `contextlib.suppress` would double the time of this function.
                value.record_stream(torch.accelerator.current_stream(value.device.index))
            except RuntimeError:  # `record_stream` fails for batched gradients, which have no memory of their own.
                continue


def in_order_with_engine(
    devices: Sequence[torch.device], grads: Iterable[Tensor | None], function: Callable[..., Any], *args: Any
) -> Any:
    """Run `function(*args)`, the backward pass of an autograd node with tensors on several devices.

    The autograd engine uses a single stream for a node: the stream of the node's first output, on the first device. The
    engine assumes that incoming and returned gradients are ready on this first stream. So the streams of the other
    devices wait for the first stream before the function runs, and the first stream waits for them afterwards.
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
