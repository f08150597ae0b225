"""Scatter and gather of trees: their tensors are cut into chunks for replicas, and put together.

PyTorch moves the tensors where it can, between distinct accelerators; it takes no scalars there, and no CPU.
"""

import copy
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import gather as gather_by_torch
from torch.nn.parallel import scatter as scatter_by_torch

from ..messages import warn
from ..trees import (
    UNSPECIFIED,
    Dims,
    Index,
    Leaf,
    Tree,
    children_of,
    format_dims,
    format_path,
    has_to_method,
    leaves_of,
)

__all__: list[str] = []

_OUT_DIMS = "name the dimension of its samples in out_dims, or None there if it is equal in all replicas"
_SCALARS = "Was asked to gather along dimension 0, but all input tensors were scalars"  # as torch


def cut(tree: Tree, dims: Sequence[int | None], devices: Sequence[torch.device], by_torch: bool) -> list[Any]:
    """Cut the leaves of a tree into chunks, one for each device, and return a tree for each chunk.

    `dims` has the dimension of each leaf that is cut. Each chunk has a copy of every other tensor, list and dict, and
    all chunks share what is neither.
    """
    with torch.DisableTorchFunctionSubclass():  # Chunks are plain tensors, as those that torch makes.
        chunks = [_chunks(leaf, dim, devices, by_torch) for leaf, dim in zip(tree.leaves, dims, strict=True)]
    return [tree.build(iter(of_device)) for of_device in zip(*chunks, strict=True)]


def _chunks(leaf: Leaf, dim: int | None, devices: Sequence[torch.device], by_torch: bool) -> Sequence[Any]:
    path, value, named = leaf
    if dim is not None and by_torch:
        return scatter_by_torch(value, devices, dim)  # type: ignore[no-any-return]
    if dim is not None:
        return [piece.to(at, copy=True) for piece, at in zip(value.chunk(len(devices), dim), devices, strict=True)]
    if leaf.splits_by_entry():
        size = math.ceil(len(value) / len(devices))
        return [_moved(Leaf(path, value[size * i :][:size], 0), device, True) for i, device in enumerate(devices)]
    if type(value) in (list, dict):
        return [copy.copy(value) for _ in devices]
    return [_moved(leaf, device, True) if named is None or isinstance(value, Tensor) else value for device in devices]


def _moved(leaf: Leaf, device: torch.device, copies: bool = False) -> Any:
    """Return a leaf on a device: a tensor, what has a method `to`, or a list of these and of trees of them."""
    if isinstance(leaf.value, Tensor):
        return leaf.value.to(device, copy=copies)
    if leaf.splits_by_entry():
        entries = Tree(leaf.value, None, leaf.path)
        return entries.build(iter([_moved(entry, device, copies) for entry in entries.leaves]))
    # A `to` that moves in place, as that of a batch of tokens, must not move what others have, too.
    return copy.copy(leaf.value).to(device) if has_to_method(type(leaf.value)) else leaf.value


def join(outputs: Sequence[Any], device: torch.device, dim: int, by_torch: bool = False, dims: Dims = None) -> Any:
    """Put outputs together on `device`: tensors along `dim`, or as `dims` says; scalars into a vector, as torch.

    What is no tensor is that of the first. Raises an error unless all outputs have one structure.
    """
    named = UNSPECIFIED if dims is None else dims
    first, *others = [Tree(output, named, ("output",), is_output=True) for output in outputs]
    joined: list[Any] = []
    for leaf, values in zip(first.leaves, _values_by_leaf(first, others), strict=True):
        if isinstance(leaf.value, Tensor) and leaf.dim is not None:
            along = dim if leaf.dim is UNSPECIFIED else leaf.dim
            if leaf.value.dim():
                along = leaf.dimension(dim, _OUT_DIMS)
            elif along == 0 and not any([value.dim() for value in values]):
                values = [value.unsqueeze(0) for value in values]
                if leaf.dim is UNSPECIFIED:
                    warn(f"{_SCALARS}; will instead unsqueeze and return a vector.")
            joined.append(_join_tensors(values, device, along, by_torch))
        elif leaf.splits_by_entry():
            joined.append(_moved(leaf._replace(value=[entry for entries in values for entry in entries]), device))
        else:
            joined.append(leaf.value if leaf.dim is UNSPECIFIED else _moved(leaf, device))
    return first.build(iter(joined))


def _values_by_leaf(first: Tree, others: Sequence[Tree]) -> list[list[Any]]:
    """Return what all outputs have for each leaf of the first; raise an error if they cannot be put together."""
    misplaced = [(leaf.path, type(leaf.value).__name__) for leaf in first.leaves if _is_misplaced(leaf)]
    for path, kind in (*first.unreachable, *misplaced):
        whole = format_dims("out_dims", path[1:], None) if path[1:] else "out_dims=(None,) and return (value,)"
        raise TypeError(
            f"replicas must return tensors, None, or tuples, lists, mappings and dataclasses of tensors, got {kind} in "
            f"{format_path(path)}; return a tensor (loss.detach() for loss.item()), or pass {whole} if it is equal in "
            "all replicas, or out_dims=0 for a list with an entry for each sample"
        )
    of_first, *of_others = [{leaf.path: leaf for leaf in tree.leaves} for tree in (first, *others)]
    for i, of_other in enumerate(of_others, 1):
        for path in of_first | of_other:
            one, other = of_first.get(path), of_other.get(path)
            if one is None or other is None or not _agree(one, other.value):
                raise ValueError(
                    f"replica 0 returned {format_path(path)} = {_shown(one)}, but replica {i} returned {_shown(other)}"
                    f"; {_remedy(one, other)}"
                )
    return [[leaf.value, *[of_other[path].value for of_other in of_others]] for path, leaf in of_first.items()]


def _remedy(*leaves: Leaf | None) -> str:
    if all([leaf is not None and isinstance(leaf.value, Number) for leaf in leaves]):
        return "return a tensor in place of a number that replicas compute, such as loss.detach() for loss.item()"
    return (
        "return the same keys, lengths and types in every replica, and equal values of what is no tensor or None in "
        "out_dims, or name a list with an entry for each sample in out_dims=0"
    )


def _shown(leaf: Leaf | None) -> str:
    if leaf is None:
        return "nothing there"
    return "a tensor" if isinstance(leaf.value, Tensor) and leaf.dim is not None else reprlib.repr(leaf.value)


def _is_misplaced(leaf: Leaf) -> bool:
    """Return whether a leaf has numbers, which may count its chunk, or is no tensor in no mapping or dataclass."""
    value = leaf.value
    if leaf.dim is None or value is None or isinstance(value, (Tensor, list)):
        return False
    if isinstance(value, (tuple, Mapping)) or is_dataclass(value):  # without tensors
        return any(map(_is_number, leaves_of(children_of(value))))
    return _is_number(value) or all([type(key) is Index for key in leaf.path[1:]])


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or an array without dimensions that has one; no bool and no Enum."""
    value = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    return isinstance(value, Number) and not isinstance(value, (bool, Enum))


def _agree(leaf: Leaf, other: Any) -> bool:
    """Return whether what another replica has in place of a leaf of the first can be put together with it."""
    value = leaf.value
    if (isinstance(value, Tensor) and leaf.dim is not None) or leaf.splits_by_entry():
        return isinstance(other, Tensor if isinstance(value, Tensor) else list)
    if isinstance(value, Tensor) and value.device.type != "cpu":  # A comparison would make the host wait.
        return isinstance(other, Tensor) and value.shape == other.shape
    try:
        if hasattr(value, "shape"):  # a tensor or an array
            torch.testing.assert_close(other, value, equal_nan=True)
            return True
        return value is other or bool(value == other or (value != value and other != other))
    except Exception:  # such as an `AssertionError` for tensors and arrays that are not close
        return False


def _join_tensors(tensors: Sequence[Tensor], device: torch.device, dim: int, by_torch: bool) -> Tensor:
    try:
        if by_torch:
            return gather_by_torch(tensors, str(device), dim)  # type: ignore[arg-type, no-any-return]
        # Autocast would concatenate in its own dtype, or refuse tensors of another dtype. Torch gathers plain tensors.
        with torch.autocast(device.type, enabled=False), torch.DisableTorchFunctionSubclass():
            return torch.cat([tensor.to(device) for tensor in tensors], dim)
    except (RuntimeError, IndexError) as error:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len({(len(shape), *shape[:dim], *shape[dim:][1:]) for shape in shapes}) == 1:
            raise
        raise RuntimeError(f"replicas returned tensors of shapes {shapes}{_why_unequal(shapes, dim)}") from error


def _why_unequal(shapes: Sequence[tuple[int, ...]], dim: int) -> str:
    """Return why outputs of these shapes cannot be put together along a dimension, and what to do."""
    if len({*map(len, shapes)}) > 1:
        return (
            ": their numbers of dimensions differ, as after squeeze() of a single row; write flatten(1) for "
            "(N, C, 1, 1), squeeze(1) for (N, 1)"
        )
    return (
        f"; outputs are put together along dimension {dim}, so all other sizes must be equal; pad them, for example "
        "with total_length=input.shape[1] in pad_packed_sequence, or name the dimension of the samples in out_dims"
    )
