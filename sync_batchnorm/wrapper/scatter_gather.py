"""Split the arguments of a call into chunks for replicas, and gather the outputs of all replicas into one output.

torch's own functions `scatter` and `gather` refuse replicas on the CPU, two replicas on one device, and scalars. So
torch's functions are used only if all replicas are on distinct accelerators (`by_torch` is true). In all other cases,
functions of this file move the tensors.
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


def scatter_tree(tree: Tree, dims: Sequence[int | None], devices: Sequence[torch.device], by_torch: bool) -> list[Any]:
    """Split each leaf of a tree into one chunk for each device, and return a tree of chunks for each device.

    `dims` names, for each leaf, the dimension along which the leaf is split, or None. If a tensor, list or dict is not
    split, each replica gets its own copy of it. Any other object is shared by all replicas.
    """
    with torch.DisableTorchFunctionSubclass():  # Chunks are plain tensors, as in torch.
        chunks = [_chunks(leaf, dim, devices, by_torch) for leaf, dim in zip(tree.leaves, dims, strict=True)]
    return [tree.build(iter(leaves)) for leaves in zip(*chunks, strict=True)]


def _chunks(leaf: Leaf, dim: int | None, devices: Sequence[torch.device], by_torch: bool) -> Sequence[Any]:
    """Return a list of the chunks of one leaf, with a chunk for each device."""
    path, value, named_dim = leaf
    if dim is not None and by_torch:
        return scatter_by_torch(value, devices, dim)  # type: ignore[no-any-return]
    if dim is not None:
        pieces = value.chunk(len(devices), dim)
        return [piece.to(device, copy=True) for piece, device in zip(pieces, devices, strict=True)]
    if leaf.splits_by_entry():
        size = math.ceil(len(value) / len(devices))
        return [_move(Leaf(path, value[size * i :][:size], 0), device, True) for i, device in enumerate(devices)]
    if type(value) in (list, dict):
        return [copy.copy(value) for _ in devices]
    is_moved = named_dim is None or isinstance(value, Tensor)
    return [_move(leaf, device, True) if is_moved else value for device in devices]


def _move(leaf: Leaf, device: torch.device, copies: bool = False) -> Any:
    """Move one value of the arguments, a leaf of their tree, to `device`, and return it.

    The value may be a tensor, an object with a method `to`, or a list with such values as entries. Any other object is
    returned unchanged. If `copies` is true, tensors that are already on the device are copied.
    """
    if isinstance(leaf.value, Tensor):
        return leaf.value.to(device, copy=copies)
    if leaf.splits_by_entry():
        entries = Tree(leaf.value, None, leaf.path)
        return entries.build(iter([_move(entry, device, copies) for entry in entries.leaves]))
    # Some `to` methods change their object in place, for example those of token batches of transformers. The user's
    # object must not change, so move a shallow copy of it.
    return copy.copy(leaf.value).to(device) if has_to_method(type(leaf.value)) else leaf.value


def gather_trees(
    outputs: Sequence[Any], device: torch.device, dim: int, by_torch: bool = False, dims: Dims = None
) -> Any:
    """Gather the outputs of all replicas: concatenate their tensors on `device`, and return one output.

    Tensors are concatenated along `dim`, unless the user's `out_dims`, here `dims`, names another dimension for them.
    Scalars become a vector, as in torch. Leaves that are not tensors are taken from replica 0. Raise an error if the
    outputs of replicas differ in their structure.
    """
    named_dims = UNSPECIFIED if dims is None else dims
    first, *others = [Tree(output, named_dims, ("output",), is_output=True) for output in outputs]
    joined: list[Any] = []
    for leaf, values in zip(first.leaves, _values_by_leaf(first, others), strict=True):
        if isinstance(leaf.value, Tensor) and leaf.dim is not None:
            along = dim if leaf.dim is UNSPECIFIED else leaf.dim
            if leaf.value.dim():
                along = leaf.resolve_dim(dim, _OUT_DIMS)
            elif along == 0 and not any([value.dim() for value in values]):
                values = [value.unsqueeze(0) for value in values]
                if leaf.dim is UNSPECIFIED:
                    warn(f"{_SCALARS}; will instead unsqueeze and return a vector.")
            joined.append(_join_tensors(values, device, along, by_torch))
        elif leaf.splits_by_entry():
            joined.append(_move(leaf._replace(value=[entry for entries in values for entry in entries]), device))
        else:
            joined.append(leaf.value if leaf.dim is UNSPECIFIED else _move(leaf, device))
    return first.build(iter(joined))


def _values_by_leaf(first: Tree, others: Sequence[Tree]) -> list[list[Any]]:
    """Return a list for each leaf of the output: the values of this leaf in all replicas.

    Raise an error if the values of a leaf in different replicas cannot be gathered.
    """
    misplaced = [(leaf.path, type(leaf.value).__name__) for leaf in first.leaves if _is_misplaced(leaf)]
    for path, kind in (*first.unreachable, *misplaced):
        whole = format_dims("out_dims", path[1:], None) if path[1:] else "out_dims=(None,) and return (value,)"
        raise TypeError(
            f"replicas must return tensors, None, or tuples, lists, mappings and dataclasses of tensors, got {kind} in "
            f"{format_path(path)}; return a tensor (loss.detach()[None] for loss.item()), or pass {whole} if it is "
            "equal in all replicas, or out_dims=0 for a list with an entry for each sample"
        )
    by_path, *others_by_path = [{leaf.path: leaf for leaf in tree.leaves} for tree in (first, *others)]
    for i, other_by_path in enumerate(others_by_path, 1):
        for path in by_path | other_by_path:
            one, other = by_path.get(path), other_by_path.get(path)
            if one is None or other is None or not _agree(one, other.value):
                raise ValueError(
                    f"replica 0 returned {format_path(path)} = {_shown(one)}, but replica {i} returned {_shown(other)}"
                    f"; {_remedy(one, other)}"
                )
    return [[leaf.value, *[leaves[path].value for leaves in others_by_path]] for path, leaf in by_path.items()]


def _remedy(*leaves: Leaf | None) -> str:
    """Return the remedy for the error that the outputs of two replicas cannot be gathered."""
    if all([leaf is not None and isinstance(leaf.value, Number) for leaf in leaves]):
        return "return a tensor in place of a number that replicas compute, such as loss.detach()[None] for loss.item()"
    return (
        "return the same keys, lengths and types in every replica, and equal values of what is no tensor or None in "
        "out_dims, or name a list with an entry for each sample in out_dims=0"
    )


def _shown(leaf: Leaf | None) -> str:
    """Return the text that shows a leaf of an output in an error message."""
    if leaf is None:
        return "nothing there"
    return "a tensor" if isinstance(leaf.value, Tensor) and leaf.dim is not None else reprlib.repr(leaf.value)


def _is_misplaced(leaf: Leaf) -> bool:
    """Return whether a leaf of a replica's output is forbidden, because gathering would lose its values.

    Gathering keeps only replica 0's value of a leaf that is no tensor. So a number is forbidden: it may differ between
    replicas, like a count or a loss. Other objects, such as strings, are forbidden only outside mappings and
    dataclasses, and only if `out_dims` does not name them.
    """
    value = leaf.value
    if leaf.dim is None or value is None or isinstance(value, (Tensor, list)):
        return False
    # A tuple, mapping or dataclass is a leaf of the output only if no tensors are in it.
    if isinstance(value, (tuple, Mapping)) or is_dataclass(value):
        return any(map(_is_number, leaves_of(children_of(value))))
    return _is_number(value) or all([type(key) is Index for key in leaf.path[1:]])


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a 0-d array with a number. Bools and Enums do not count as numbers."""
    value = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    return isinstance(value, Number) and not isinstance(value, (bool, Enum))


def _agree(leaf: Leaf, other: Any) -> bool:
    """Return whether a leaf of replica 0's output can be gathered with `other`, the same leaf of another replica.

    Two tensors can always be gathered, because they are concatenated. So can two lists with an entry for each sample.
    Any other leaf must have the same value in both replicas.
    """
    value = leaf.value
    if (isinstance(value, Tensor) and leaf.dim is not None) or leaf.splits_by_entry():
        return isinstance(other, Tensor if isinstance(value, Tensor) else list)
    # Compare only the shapes of tensors on accelerators: to compare their values, the host would have to wait.
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return isinstance(other, Tensor) and value.shape == other.shape
    try:
        if hasattr(value, "shape"):  # Compare tensors and NumPy arrays with the usual tolerance of `assert_close`.
            torch.testing.assert_close(other, value, equal_nan=True)
            return True
        return value is other or bool(value == other or (value != value and other != other))
    # If the values differ, `assert_close` raises an `AssertionError`, and `==` of arrays may raise a `ValueError`.
    except Exception:
        return False


def _join_tensors(tensors: Sequence[Tensor], device: torch.device, dim: int, by_torch: bool) -> Tensor:
    try:
        if by_torch:
            return gather_by_torch(tensors, str(device), dim)  # type: ignore[arg-type, no-any-return]
        # Autocast is off in this function: it would cast the tensors, or raise an error for tensors of other dtypes.
        # The result is a plain tensor, also for subclasses of `Tensor`, as in torch's gather.
        with torch.autocast(device.type, enabled=False), torch.DisableTorchFunctionSubclass():
            return torch.cat([tensor.to(device) for tensor in tensors], dim)
    except (RuntimeError, IndexError) as error:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len({(len(shape), *shape[:dim], *shape[dim:][1:]) for shape in shapes}) == 1:
            raise
        why = (
            f"; outputs are put together along dimension {dim}, so all other sizes must be equal; pad them, for "
            "example with total_length=input.shape[1] in pad_packed_sequence, or name the dimension of the samples in "
            "out_dims"
        )
        if len({*map(len, shapes)}) > 1:
            why = (
                ": their numbers of dimensions differ, as after squeeze() of a single row; write flatten(1) for "
                "(N, C, 1, 1), squeeze(1) for (N, 1)"
            )
        raise RuntimeError(f"replicas returned tensors of shapes {shapes}{why}") from error
