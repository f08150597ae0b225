"""Scatter and gather trees of tensors (tuples, lists, dicts) over any devices, as `torch.nn.parallel` does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def _is_namedtuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_asdict") and hasattr(tree, "_fields")


def _rebuild(like: Any, items: Sequence[Any]) -> Any:
    """Make a container of the type of `like`; the items of a dict are its values."""
    if isinstance(like, dict):
        return type(like)(zip(like, items, strict=True))
    return type(like)(*items) if _is_namedtuple(like) else type(like)(items)


def _children(tree: Any) -> list[Any] | None:
    """Return what a container holds, or None for a leaf."""
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree) if isinstance(tree, (list, tuple)) else None


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree of tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for child in _children(tree) or () for tensor in tensors_in(child)]


def scatter(tree: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Cut every tensor of `tree` into at most ``len(devices)`` chunks along `dim`, and return one tree for each chunk.

    Containers keep their type; what is not a tensor is shared by all. Views are returned where no copy is needed.
    """
    if isinstance(tree, Tensor):
        chunks = tree.chunk(len(devices), dim)
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    children = _children(tree)
    if not children:
        return [tree if children is None else _rebuild(tree, []) for _ in devices]
    parts = [scatter(child, devices, dim) for child in children]
    return [_rebuild(tree, part) for part in zip(*parts, strict=False)]


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Put the outputs of all replicas together on `device`: tensors are concatenated along `dim`.

    Scalars become a vector, with the warning of torch. Containers keep their type, None stays None.

    Raises:
        ValueError: if dicts have different numbers of keys.
        TypeError: if something else than tensors, containers and None was returned.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if all(output.dim() == 0 for output in outputs) and dim == 0:
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
                "and return a vector.",
                stacklevel=4,
            )
            return torch.stack([output.to(device) for output in outputs])
        return torch.cat([output.to(device) for output in outputs], dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("All dicts must have the same number of keys")
        return type(first)((key, gather([output[key] for output in outputs], device, dim)) for key in first)
    children = _children(first)
    if children is None:
        raise TypeError(
            f"expected the replicas to return tensors, tuples, lists, dicts or None, but got {type(first).__name__}; "
            "return tensors"
        )
    parts = zip(*outputs, strict=False)
    return _rebuild(first, [gather(part, device, dim) for part in parts])
