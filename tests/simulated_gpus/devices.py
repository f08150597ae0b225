"""Devices, streams, events and random numbers of `torch.cuda`, from what torch offers for any accelerator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from simulated_gpus.install import native

__all__ = ["install"]

CUDA = 1  # the number of the device type in `torch.Stream`, c10::DeviceType::CUDA

# What torch has in the place of some functions below, for `use_streams_of_torch` in docs/benchmarks/host/free.py.
OF_TORCH = {
    name: getattr(torch.cuda, name)
    for name in ("StreamContext", "stream", "current_stream", "default_stream", "set_stream")
}


def index_of(device: Any = None) -> int:
    """Return the index of a device; that of the current one for None and for "cuda"."""
    return _get_device_index(device, optional=True)


class Stream(torch.Stream):
    """A stream, as `torch.cuda.Stream` is: of the current device unless one is given."""

    def __new__(cls, device: Any = None, priority: int = 0, **of_another: Any) -> Stream:
        if of_another:
            return super().__new__(cls, **of_another)
        return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """What stands for the handle of the stream in CUDA."""
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event, a new one unless one is given."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """An event, as `torch.cuda.Event` is, but one that knows no time."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class StreamContext:
    """As `torch.cuda.StreamContext`: also makes the device of the stream current. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.previous = current_stream()
            self.previous_there = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.previous_there)
            torch.accelerator.set_stream(self.previous)


def as_cuda_stream(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    """Return the stream that this thread uses on a device."""
    return as_cuda_stream(torch.accelerator.current_stream(index_of(device)))


def default_stream(device: Any = None) -> Stream:
    """Return the stream that a thread uses on a device if it sets no other."""
    return Stream(stream_id=0, device_index=index_of(device), device_type=CUDA)


def exchange_device(index: int) -> int:
    """Make a device current and return the previous one; for a negative index do nothing and return -1."""
    if index < 0:
        return -1
    previous = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    return previous


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream current, and its device."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


PROPERTIES = SimpleNamespace(
    name="simulated GPU", major=9, minor=0, total_memory=1 << 34, multi_processor_count=1, warp_size=32
)


def properties(device: Any = None) -> SimpleNamespace:
    """Return the same for every device, after a check of its index."""
    index = index_of(device)
    if not 0 <= index < native().num_devices():
        raise AssertionError("Invalid device id")
    return PROPERTIES


def install() -> None:
    """Complete `torch.cuda`. What it builds from these functions in Python is left as it is, such as the seeds."""
    cuda, c, simulator = torch.cuda, torch._C, native()

    # Functions that a CUDA build has in torch._C, and that torch.cuda calls.
    c._cuda_getDeviceCount = simulator.num_devices
    c._cuda_getDevice = lambda: torch.accelerator.current_device_index()
    c._cuda_setDevice = lambda index: torch.accelerator.set_device_index(index)
    c._cuda_getCurrentRawStream = lambda index: current_stream(index).stream_id
    c._cuda_get_sync_debug_mode, c._cuda_set_sync_debug_mode = lambda: 0, lambda mode: None
    c._cuda_synchronize = lambda: simulator.synchronize(torch.accelerator.current_device_index())
    c._cuda_isCurrentStreamCapturing = lambda: False

    cuda._initialized = True
    cuda._lazy_init = cuda.init = lambda: None
    cuda.default_generators = tuple(simulator.default_generator(i) for i in range(simulator.num_devices()))
    cuda.device_count = simulator.num_devices
    cuda._exchange_device = cuda._maybe_exchange_device = exchange_device
    cuda.Stream, cuda.Event, cuda.StreamContext = Stream, Event, StreamContext
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.stream = StreamContext
    cuda.current_stream, cuda.default_stream, cuda.set_stream = current_stream, default_stream, set_stream
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = properties
    cuda.get_device_name = lambda device=None: properties(device).name
    cuda.get_device_capability = lambda device=None: (properties(device).major, properties(device).minor)
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # which otherwise warns that there is no cuDNN
    cuda.nccl.is_available = lambda tensors: False  # torch.nn.parallel then copies tensor by tensor
    c._cuda_emptyCache = c._accelerator_emptyCache = lambda: None
