"""Places: where something computes, a device and on CUDA a stream; and how a tensor goes from one place to another.

Replicas may use streams of their own, and several replicas one device. NOTE [places] in `autograd.py` says what is
computed where.
"""

from __future__ import annotations

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
    stream: torch.Stream | None  # None where there are none

    def is_current(self) -> bool:
        """Return whether operators on tensors of this device use this stream, whatever device is the current one."""
        return self.stream is None or torch.accelerator.current_stream(self.device.index) == self.stream

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which this stream, and with it its device, is the current one: for code of users."""
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


_CPU = Place(torch.device("cpu"), None)


def current_place(device: torch.device) -> Place:
    """Return `device`, and the stream there that this thread uses."""
    if device.type == "cpu":
        return _CPU
    return Place(device, torch.accelerator.current_stream(device.index) if device.type == "cuda" else None)


def host_can_read(tensor: Tensor) -> bool:
    """Return whether the host can read the values of `tensor` without waiting for a device."""
    return tensor.device.type == "cpu"


class Streams:
    """The streams of several places, as one thread uses them: entered where they are not the current ones.

    They nearly always are. So that is asked once, when this object is made.

    Args:
        places: where something is done; none if they all were made by `current_place` in this thread.
    """

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.are_current = True
        for place in places:
            if not place.is_current():
                self.are_current = False

    def at(self, place: Place) -> AbstractContextManager[Any]:
        """Return a context in which operators on tensors of the device of `place` use its stream."""
        return _NOTHING if self.are_current or place.is_current() else place.entered()

    def to_place(self, tensor: Any, source: Place, target: Place) -> Any:
        """Return `tensor`, which is ready at `source`, for use at `target`: itself on one device, else a copy."""
        if source.device == target.device:
            if target.stream is not None and source.stream is not None and target.stream != source.stream:
                target.stream.wait_stream(source.stream)
                _record(tensor, target.stream)
            return tensor
        if self.are_current:  # Torch orders a copy after both streams, and what follows in either after the copy.
            return tensor.to(target.device, non_blocking=True)
        with self.at(source), self.at(target):
            return tensor.to(target.device, non_blocking=True)

    def to_place_joined(self, vectors: Sequence[Tensor], source: Place, target: Place) -> Sequence[Tensor]:
        """Return several vectors for use at `target`; from one device to another as one, which is copied at once."""
        if source == target:
            return vectors
        if source.device == target.device:
            return [self.to_place(vector, source, target) for vector in vectors]
        with self.at(source):
            joined = torch.cat(tuple(vectors))
        return (self.to_place(joined, source, target),)


def record_current(tensors: Iterable[Tensor | None], place: Place) -> None:
    """Tell the allocator that the current stream uses tensors that were made at `place`, on CUDA."""
    if not place.is_current():
        stream = torch.accelerator.current_stream(place.device.index)
        for tensor in tensors:
            if tensor is not None:
                _record(tensor, stream)


def _record(tensor: Tensor, stream: torch.Stream) -> None:
    with suppress(RuntimeError):  # of batched gradients, which have no memory of their own
        tensor.record_stream(stream)


@contextmanager
def in_order_with_engine(master: Place, places: Sequence[Place], tensors: Iterable[Tensor | None]) -> Iterator[Streams]:
    """Run the body in order with the streams that the engine of autograd has chosen for a backward; on CUDA.

    The engine takes all gradients of a node as ready on the stream that it has chosen for the device of `master`, or
    on those for their own devices, and takes the results of the node as made there.

    Args:
        master: the place of the node.
        places: where it computes.
        tensors: one for each of `places`, or None: gradients, which are used there.

    Yields:
        the streams of all places.
    """
    here = torch.accelerator.current_stream(master.device.index)
    ready: dict[torch.Stream, torch.Event] = {}  # one event for all who wait for a stream
    order: list[tuple[torch.Stream, torch.Stream]] = []
    streams = Streams()
    for device, stream in dict.fromkeys(places):
        if stream is None:
            continue
        there = here if device == master.device else torch.accelerator.current_stream(device.index)
        if there != stream:
            streams.are_current = False
            order.append((stream, there))
        if here != stream and here != there:
            order.append((stream, here))
    for stream, engine in order:
        if engine not in ready:
            ready[engine] = engine.record_event()
        stream.wait_event(ready[engine])
    for tensor, place in zip(tensors, places, strict=True):
        if tensor is not None and place.stream is not None:
            _record(tensor, place.stream)
    with streams.at(master):
        yield streams
    for stream, engine in order:
        engine.wait_stream(stream)
