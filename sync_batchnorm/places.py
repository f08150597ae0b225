"""Places: where something computes, a device and on CUDA a stream; and how a tensor goes from one place to another.

Replicas may use streams of their own, and several replicas one device. NOTE [places] in `autograd.py` says what is
computed where.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []


class Place(NamedTuple):
    """Where a replica computes: its device, and on CUDA the stream there."""

    device: torch.device
    stream: torch.cuda.Stream | None  # None where there are none

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which this stream, and with it its device, is the current one: for code of users."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def ordered(self) -> AbstractContextManager[Any]:
        """Return a context in which operators on tensors of this device use this stream.

        Nothing has to be entered where they do so already, whatever device is the current one, as nearly always.
        """
        if self.stream is None or torch.cuda.current_stream(self.device) == self.stream:
            return nullcontext()
        return torch.cuda.stream(self.stream)


_CPU = Place(torch.device("cpu"), None)


def current_place(device: torch.device) -> Place:
    """Return `device`, and the stream there that this thread uses."""
    if device.type == "cpu":
        return _CPU
    return Place(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)


def hand_over(tensor: Tensor, source: Place, target: Place) -> Tensor:
    """Return `tensor`, which is ready at `source`, for use at `target`: itself on one device, else a copy."""
    if source.device == target.device:
        if target.stream is not None and source.stream is not None and target.stream != source.stream:
            target.stream.wait_stream(source.stream)
            _record(tensor, target.stream)
        return tensor
    with source.ordered(), target.ordered():  # torch orders a copy after one stream, and the other after it
        return tensor.to(target.device, non_blocking=True)


def _record(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    with suppress(RuntimeError):  # of batched gradients, which have no memory of their own
        tensor.record_stream(stream)


def hand_over_packed(vectors: Sequence[Tensor], source: Place, target: Place) -> list[Tensor]:
    """Hand over several tensors of one shape; from one device to another as one copy."""
    if source.device == target.device:
        return [hand_over(vector, source, target) for vector in vectors]
    with source.ordered():
        packed = torch.stack(list(vectors))
    return list(hand_over(packed, source, target).unbind())
