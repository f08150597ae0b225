"""Work on streams of a test's own, in order with the stream that was current."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["on_a_side_stream", "on_stream"]


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream, *tensors: Tensor) -> Iterator[None]:
    """Use `stream` in order with the current stream, also for `tensors`."""
    outer = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outer)
    for tensor in tensors:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


def on_a_side_stream(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Return `function` of `input`, computed on a new stream."""
    outer = torch.cuda.current_stream(input.device)
    with on_stream(torch.cuda.Stream(input.device), input):
        output = function(input)
    output.record_stream(outer)
    return output
