"""Places, each a device and on CUDA a stream, and how a tensor goes from one to another. See NOTE [places]."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

_NOTHING = nullcontext()


class Place(NamedTuple):
    """Where a replica computes: its device, and on CUDA the stream there."""

    device: torch.device
    stream: torch.Stream | None  # None if the device has none

    def is_current(self) -> bool:
        """Return whether operators on tensors of this device use this stream, whatever the current device is."""
        return self.stream is None or torch.accelerator.current_stream(self.device.index) == self.stream

    def entered(self) -> AbstractContextManager[Any]:
        return _NOTHING if self.stream is None else _entered(self.stream)


@contextmanager
def _entered(stream: torch.Stream) -> Iterator[None]:
    # As `torch.cuda.stream` does it, with less Python.
    device, former = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(former)
        torch.accelerator.set_device_index(device)


CPU = Place(torch.device("cpu"), None)


def current_place(device: torch.device) -> Place:
    """Return `device`, and the stream there that this thread uses."""
    if device.type == "cpu":
        return CPU
    return Place(device, torch.accelerator.current_stream(device.index) if device.type == "cuda" else None)


class Streams:
    """The streams of several places in one thread, entered only if they are not current, which is asked once."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.are_current = all([place.is_current() for place in places])

    def at(self, place: Place) -> AbstractContextManager[Any]:
        """Return a context in which operators on tensors of the device of `place` use its stream."""
        return _NOTHING if self.are_current or place.is_current() else place.entered()

    def to_place(self, tensor: Any, source: Place, target: Place) -> Any:
        """Return `tensor`, which is ready at `source`, for use at `target`: itself on one device, otherwise a copy."""
        if source.device != target.device:  # Torch makes the copy wait for both streams, and both wait for it.
            if self.are_current:
                return tensor.to(target.device, non_blocking=True)
            with self.at(source), self.at(target):
                return tensor.to(target.device, non_blocking=True)
        if source.stream is not None and target.stream is not None and source.stream != target.stream:
            target.stream.wait_stream(source.stream)
            _record(tensor, target.stream)
        return tensor


CURRENT = Streams()  # for places that are current


def record_current(tensors: Iterable[Tensor | None], place: Place) -> None:
    """Tell the allocator that the current stream uses tensors that were made at `place`."""
    for tensor in tensors:
        _record(tensor, current_place(place.device).stream)


def _record(tensor: Tensor | None, stream: Any) -> None:
    if tensor is not None:
        with suppress(RuntimeError):  # for batched gradients, which have no memory of their own
            tensor.record_stream(stream)


@contextmanager
def in_order_with_engine(master: Place, places: Sequence[Place], tensors: Iterable[Tensor | None]) -> Iterator[Streams]:
    """Synchronize the body, the backward of a node at `places`, with the streams of the autograd engine, on CUDA.

    The engine assumes that the gradients which the node gets, `tensors`, are ready on its stream for the device of the
    master, or on its streams for their own devices, and that the results of the node are made there.
    """
    here = torch.accelerator.current_stream(master.device.index)
    ready: dict[torch.Stream, torch.Event] = {}  # one event for each stream that others wait for
    order: list[tuple[torch.Stream, torch.Stream]] = []
    streams = Streams()
    stream: Any  # like the master, all places have one
    for device, stream in dict.fromkeys(places):
        there = torch.accelerator.current_stream(device.index)
        streams.are_current = streams.are_current and there == stream
        for engine in dict.fromkeys((there, here)):
            if engine != stream:
                order.append((stream, engine))
                if engine not in ready:
                    ready[engine] = engine.record_event()
                stream.wait_event(ready[engine])
    for tensor, place in zip(tensors, places, strict=True):
        _record(tensor, place.stream)
    with streams.at(master):
        yield streams
    for stream, engine in order:
        engine.wait_stream(stream)
