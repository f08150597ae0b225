"""Kernels, copies and streams that cost nothing on simulated GPUs, under torch's own Python for streams.

What is left is what the host pays on real GPUs apart from the driver: Python, the dispatcher and autograd of torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from simulated_gpus import devices
from simulated_gpus.install import native

__all__ = ["costing_nothing", "use_streams_of_torch"]


class StreamBase(torch.Stream):
    """What a CUDA build has in C++ below `torch.cuda.Stream`."""

    cuda_stream = torch.Stream.stream_id  # stands for the handle of the stream


class EventBase(torch.Event):
    """What a CUDA build has in C++ below `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool, blocking: bool, interprocess: bool, **_: Any) -> EventBase:
        return super().__new__(cls, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def use_streams_of_torch() -> None:
    """Put back the classes and functions of torch for streams, for good, over functions in C++ like those of CUDA.

    Call it before there are streams: those that were made by classes of the simulation equal no other ones.
    """
    cuda, c, simulator = torch.cuda, torch._C, native()
    c._CudaStreamBase, c._CudaEventBase = StreamBase, EventBase
    torch.backends.cuda.is_built = lambda: True
    c._cuda_getDevice = simulator.current_device
    c._cuda_getCurrentStream, c._cuda_setStream = simulator.current_stream, simulator.set_stream
    c._cuda_getDefaultStream = lambda index: (0, index, devices.CUDA)
    cuda._exchange_device = cuda._maybe_exchange_device = simulator.exchange_device
    importlib.reload(cuda.streams)
    cuda.Stream, cuda.Event = cuda.streams.Stream, cuda.streams.Event
    for name, original in devices.OF_TORCH.items():
        setattr(cuda, name, original)


@contextmanager
def costing_nothing() -> Iterator[None]:
    """Let kernels and copies compute nothing in the body, in all threads, and let nothing be checked or counted.

    Tensors are made, of the right kind, with whatever their memory holds. An operator runs as usual the first time that
    it is called with arguments of some kind.
    """
    native().set_costs_nothing(True)
    try:
        yield
    finally:
        native().set_costs_nothing(False)
