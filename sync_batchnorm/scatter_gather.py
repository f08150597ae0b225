"""Trees of tensors, the inputs and outputs of a `DataParallel`: cut into chunks for replicas, and put together.

Torch does both for accelerators only. As there, chunks are copies, and containers keep their types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from sync_batchnorm.torch_private import plain_tensors
from sync_batchnorm.warning import warn

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

    Containers keep their type; all chunks share objects that are not tensors. A chunk has memory of its own: neither
    its replica nor the caller sees in-place changes of the other. A tensor that makes a single chunk is not copied. One
    that occurs twice is cut once. Chunks of a subclass of `Tensor` are plain tensors, as those that torch makes.
    """
    with plain_tensors():
        return _scatter(tree, devices, dim, {})


def _scatter(tree: Any, devices: Sequence[torch.device], dim: int, chunks_of: dict[int, list[Tensor]]) -> list[Any]:
    if isinstance(tree, Tensor):
        if id(tree) not in chunks_of:
            chunks = tree.chunk(len(devices), dim)
            several = len(chunks) > 1
            pairs = zip(chunks if several else [tree], devices, strict=False)
            chunks_of[id(tree)] = [chunk.to(device, copy=several) for chunk, device in pairs]
        return chunks_of[id(tree)]
    children = _children(tree)
    if not children:
        return [tree if children is None else _rebuild(tree, []) for _ in devices]
    of_replicas = zip(*(_scatter(child, devices, dim, chunks_of) for child in children), strict=False)
    return [_rebuild(tree, own) for own in of_replicas]


def check_structures(outputs: Sequence[Any]) -> None:
    """Check that all replicas have returned the same structure, whatever the values in it.

    Raises:
        ValueError: naming two replicas whose structures differ, and what they have returned.
        TypeError: if something else than tensors, containers and None was returned.
    """
    structures = list(map(_structure, outputs))
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                f"expected replicas to return one structure, but got {structures[0]} from replica 0 and {structure} "
                f"from replica {i}; return the same keys, lengths and types in every replica, for example an empty "
                "tensor where one has nothing"
            )


def _structure(tree: Any) -> str:
    if tree is None:
        return "None"
    if isinstance(tree, Tensor):
        return "Tensor" if tree.dim() else "scalar Tensor"
    if isinstance(tree, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {_structure(value)}" for key, value in tree.items())) + "}"
    children = _children(tree)
    if children is not None:
        return "(" + ", ".join(map(_structure, children)) + ")"
    if not isinstance(tree, Iterable) or isinstance(tree, (str, bytes, Set, Iterator)):
        raise _not_tensors(tree)
    return type(tree).__name__  # `torch.nn.parallel.gather` tries to build it from an iterator


def _not_tensors(tree: Any) -> TypeError:
    return TypeError(
        f"expected the replicas to return tensors, tuples, lists, dicts or None, but got {type(tree).__name__}; "
        "return tensors"
    )


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Put the outputs of all replicas together on `device`: tensors are concatenated along `dim`.

    Scalars become a vector, with the warning of torch. Containers keep their type, None stays None. All outputs have
    the structure of the first, see `check_structures`.

    Raises:
        TypeError: if something else than tensors, containers and None was returned.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if all(output.dim() == 0 for output in outputs) and dim == 0:
            warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
                "and return a vector."
            )
            return torch.stack([output.to(device) for output in outputs])
        return torch.cat([output.to(device) for output in outputs], dim)
    if first is None:
        return None
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs], device, dim)) for key in first)
    children = _children(first)
    if children is None:
        raise _not_tensors(first)
    return _rebuild(first, [gather(children, device, dim) for children in zip(*outputs, strict=True)])
