"""Trees of tensors, the inputs and outputs of a `DataParallel`: cut into chunks for replicas, and put together."""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..refusals import warn

__all__: list[str] = []


def _rebuild(like: Any, items: Sequence[Any]) -> Any:
    """Make a container of the type of `like`; the items of a dict are its values."""
    if isinstance(like, dict):
        return type(like)(zip(like, items, strict=True))
    is_namedtuple = isinstance(like, tuple) and hasattr(like, "_asdict") and hasattr(like, "_fields")
    return type(like)(*items) if is_namedtuple else type(like)(items)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree of tuples, lists and dicts, in order."""
    tensors, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Tensor):
            tensors.append(node)
        elif isinstance(node, dict):
            stack += reversed(node.values())
        elif isinstance(node, (list, tuple)):
            stack += reversed(node)
    return tensors


def scatter(tree: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Cut every tensor of `tree` into at most ``len(devices)`` chunks along `dim`, and return one tree for each chunk.

    Each chunk has a copy of every scalar tensor, and all share what is no tensor. Several chunks are copies: in-place
    changes stay with those who make them.
    """
    if isinstance(tree, Tensor):
        if not tree.dim():
            return [tree.to(device, copy=True) for device in devices]
        chunks = tree.chunk(len(devices), dim)
        several = len(chunks) > 1
        pairs = zip(chunks if several else [tree], devices, strict=False)
        return [chunk.to(device, copy=several) for chunk, device in pairs]
    if not isinstance(tree, (dict, list, tuple)) or not tree:
        return [tree] * len(devices)
    children = tree.values() if isinstance(tree, dict) else tree
    of_replicas = zip(*[scatter(child, devices, dim) for child in children], strict=False)
    return [_rebuild(tree, own) for own in of_replicas]


def number_of_chunks(shapes: Sequence[tuple[int, ...]], dim: int, most: int) -> int:
    """Return how many chunks along `dim` tensors of `shapes`, but for scalars, make; raise an error if they differ."""
    shapes = list(filter(None, shapes)) or shapes
    numbers = [_number_of_chunks(shape[dim], most) if -len(shape) <= dim < len(shape) else 0 for shape in shapes]
    if 0 in numbers or len(set(numbers)) > 1:
        raise ValueError(
            f"tensors of shapes {shapes} make {numbers} chunks along dimension {dim} for {most} devices, but must all "
            "make the same number; give every tensor a row for each sample, and make what every replica "
            "needs as a whole a buffer of the module"
        )
    return numbers[0] if numbers else most


def _number_of_chunks(size: int, most: int) -> int:
    """Return into how many chunks `torch.chunk` cuts `size`, at most `most`; if empty, into `most` empty ones."""
    return -(-size // -(-size // most)) if size else most


def check_structures(outputs: Sequence[Any]) -> None:
    """Raise an error unless all replicas have returned the same structure of tensors, containers and None."""
    structures = list(map(_structure, outputs))
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                f"replica 0 returned {structures[0]}, but replica {i} returned {structure}; return the same keys, "
                "lengths and types in every replica, for example an empty tensor where one has nothing"
            )


def _structure(tree: Any) -> str:
    if tree is None:
        return "None"
    if isinstance(tree, Tensor):
        return "Tensor" if tree.dim() else "scalar Tensor"
    if isinstance(tree, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {_structure(value)}" for key, value in tree.items())) + "}"
    if isinstance(tree, (list, tuple)):
        return "(" + ", ".join(map(_structure, tree)) + ")"
    if isinstance(tree, Iterable) and not isinstance(tree, (str, bytes, Set, Iterator)):
        return type(tree).__name__  # which `gather` builds from an iterable, as torch
    raise TypeError(
        f"replicas must return tensors, tuples, lists, dicts or None, got {type(tree).__name__}; return tensors"
    )


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Put outputs of one structure together on `device`: tensors along `dim`, scalars into a vector, as torch."""
    first = outputs[0]
    if isinstance(first, Tensor):
        moved = [output.to(device) for output in outputs]
        if first.dim() or dim:
            return torch.cat(moved, dim)
        warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
            "and return a vector."
        )
        return torch.stack(moved)
    if first is None:
        return None
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs], device, dim)) for key in first)
    return _rebuild(first, [gather(children, device, dim) for children in zip(*outputs, strict=True)])
