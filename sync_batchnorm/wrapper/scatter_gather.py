"""Trees of tensors, the inputs and outputs of a `DataParallel`: cut into chunks for replicas, and put together."""

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
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
    """Return the tensors of a tree of tuples, lists and dicts, those that are less deep first."""
    nodes = [tree]
    for node in nodes:  # which grows
        if isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, (list, tuple)):
            nodes += node
    return [node for node in nodes if isinstance(node, Tensor)]


def scatter(tree: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Copy every tensor of `tree` in at most ``len(devices)`` chunks along `dim`, and return one tree for each chunk.

    Each chunk has a copy of every scalar tensor, and all share what is no tensor.
    """
    if isinstance(tree, Tensor):
        chunks = tree.chunk(len(devices), dim) if tree.dim() else [tree] * len(devices)
        return [chunk.to(device, copy=True) for chunk, device in zip(chunks, devices, strict=False)]
    if not isinstance(tree, (dict, list, tuple)) or not tree:
        return [tree] * len(devices)
    children = tree.values() if isinstance(tree, dict) else tree
    of_replicas = zip(*map(partial(scatter, devices=devices, dim=dim), children), strict=False)
    return list(map(partial(_rebuild, tree), of_replicas))


def number_of_chunks(tensors: Sequence[Tensor], dim: int, most: int) -> int:
    """Return how many chunks along `dim` tensors, except for scalars, make; raise an error if they differ."""
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor.dim()] or [()] * len(tensors)
    # As `torch.chunk` cuts them; nothing is cut into empty chunks.
    sizes = [shape[dim] if -len(shape) <= dim < len(shape) else None for shape in shapes]
    numbers = [0 if size is None else -(-size // -(-size // most)) if size else most for size in sizes]
    if 0 in numbers or len(set(numbers)) > 1:
        raise ValueError(
            f"tensors of shapes {shapes} make {numbers} chunks along dimension {dim} for {most} devices, but must all "
            "make the same number; give every tensor a row for each sample, and make what every replica "
            "needs as a whole a buffer of the module"
        )
    return numbers[0] if numbers else most


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
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector."
        )
        return torch.stack(moved)
    if first is None:
        return None
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs], device, dim)) for key in first)
    return _rebuild(first, [gather(children, device, dim) for children in zip(*outputs, strict=True)])
