"""Broadcast, scatter and gather of `torch._C`: `torch.nn.DataParallel` uses them, the CPU build of torch has none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from simulated_gpus.devices import StreamContext

__all__ = ["install"]

P = ParamSpec("P")
R = TypeVar("R")


def _to(tensor: Tensor, index: int) -> Tensor:
    return tensor.to(torch.device("cuda", index), non_blocking=True)


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    """Return the tensor on each device; itself where it already is."""
    return [_to(tensor, index) for index in devices]


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    """Return the tensors on each device: themselves on the first, copies on the others.

    Torch sends them in common buffers and returns views of these. Here each is copied by itself.
    """
    if any(tensor.get_device() != devices[0] for tensor in tensors):
        raise RuntimeError("All tensors must be on devices[0]")
    with torch.no_grad():
        return [list(tensors), *([_to(tensor, index) for tensor in tensors] for index in devices[1:])]


def scatter(
    tensor: Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[Tensor]:
    """Return one chunk for each device, copied on the stream given for it."""
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    result = []
    for i, chunk in enumerate(chunks):
        with StreamContext(streams[i] if streams is not None else None):
            result.append(_to(chunk, devices[i]))
    return result


def gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    """Copy tensors of several devices into one, side by side along `dim`."""
    for tensor, target in zip(tensors, out.split([tensor.size(dim) for tensor in tensors], dim), strict=True):
        if tensor.shape != target.shape:  # in the words of torch
            raise RuntimeError(f"Gather got an input of invalid size: got {tensor.shape}, but expected {target.shape}")
        target.copy_(tensor, non_blocking=True)
    return out


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """Return the tensors joined on one device; on the CPU for -1, on the current device for None."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.size(dim) for tensor in tensors)
    if destination is None:
        destination = torch.accelerator.current_device_index()
    device = torch.device("cpu") if destination == -1 else torch.device("cuda", destination)
    # As torch: channels last stays channels last if all tensors have it.
    formats = {_suggested_format(tensor) for tensor in tensors}
    memory_format = formats.pop() if len(formats) == 1 else torch.contiguous_format
    out = torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=memory_format)
    return gather_out(tensors, out, dim)


def _suggested_format(tensor: Tensor) -> torch.memory_format:
    """Return the format that torch derives from the strides."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    for dim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dim and tensor.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format


def install() -> None:
    """Put the functions where `torch.nn.parallel.comm` finds them."""
    functions = (broadcast, broadcast_coalesced, scatter, gather, gather_out)
    for function in functions:
        setattr(torch._C, f"_{function.__name__}", _without_subclasses(function))


def _without_subclasses(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` as one that knows no subclass of `Tensor`, and returns plain tensors, as those in C++."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run
