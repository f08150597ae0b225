"""Scatter and gather of trees: their tensors are cut into chunks for replicas, and put together.

PyTorch moves the tensors where it can, between distinct accelerators; it takes no scalars there, and no CPU.
"""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import gather as gather_by_torch
from torch.nn.parallel import scatter as scatter_by_torch
from torch.nn.utils.rnn import PackedSequence

from ..refusals import warn
from .trees import (
    NO_CONTAINERS,
    children_in_order,
    children_of,
    cut_children_of,
    fields_of,
    leaves_of,
    names_of_children,
    rebuilt,
    tensors_in,
    with_leaves,
)

__all__: list[str] = []

Devices = Sequence[torch.device]


def scatter(
    tree: Any, devices: Devices, dim: int, by_torch: bool = False, leaves: Sequence[Any] | None = None
) -> list[Any]:
    """Copy every tensor of `tree` in at most ``len(devices)`` chunks along `dim`, and return one tree for each chunk.

    Each chunk has a copy of every scalar tensor, and all share what is no tensor. `leaves` are the leaves of the tree,
    if the caller has them already.
    """
    leaves = leaves_of(tree) if leaves is None else leaves
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    trees = []
    for chunks in _cut(tensors, devices, dim, by_torch):
        if leaves is tree:  # a list of tensors
            trees.append(list(chunks))
            continue
        remaining = iter(chunks)
        replaced = [next(remaining) if isinstance(leaf, Tensor) else _of_replica(leaf) for leaf in leaves]
        trees.append(with_leaves(tree, iter(replaced)))
    return trees


def _of_replica(leaf: Any) -> Any:
    """Return a list or dict of the replica's own for an empty one, as for one with items; all share any other leaf."""
    return leaf.copy() if type(leaf) in (list, dict) and not leaf else leaf


def _cut(tensors: Sequence[Tensor], devices: Devices, dim: int, by_torch: bool) -> Sequence[Sequence[Tensor]]:
    """Return the chunks of the tensors for each replica."""
    if not tensors:
        return [()] * len(devices)
    if by_torch and all([tensor.dim() for tensor in tensors]):
        return scatter_by_torch(tuple(tensors), devices, dim)
    of_tensors = []
    with torch.DisableTorchFunctionSubclass():  # as those that torch makes
        for tensor in tensors:
            if by_torch and tensor.dim():
                of_tensors.append(scatter_by_torch(tensor, devices, dim))
                continue
            chunks = tensor.chunk(len(devices), dim) if tensor.dim() else [tensor] * len(devices)
            pairs = zip(chunks, devices, strict=False)
            of_tensors.append(tuple([chunk.to(device, copy=True) for chunk, device in pairs]))
    return list(zip(*of_tensors, strict=False))


def check_structures(outputs: Sequence[Any]) -> None:
    """Raise an error unless all replicas have returned the same structure, and the same of what is no tensor."""
    first, *others = outputs
    structure = _structure(first)
    for i, output in enumerate(others, 1):
        if _structure(output) != structure:
            raise ValueError(
                f"replica 0 returned {structure}, but replica {i} returned {_structure(output)}; return the same keys, "
                "lengths and types in every replica, for example an empty tensor where one has nothing"
            )
        difference = next(_differences(first, output, "output"), None)
        if difference is not None:
            path, expected, found = difference
            raise ValueError(
                f"replica 0 returned {path} = {reprlib.repr(expected)}, but replica {i} returned "
                f"{reprlib.repr(found)}; what is no tensor must be equal in all replicas; return a tensor with a row "
                "for each sample, or leave it out"
            )


def _structure(tree: Any, is_entry: bool = False) -> str:
    """Describe an output, or an entry of a mapping or dataclass, which need not hold tensors."""
    if tree is None:
        return "None"
    if isinstance(tree, Tensor):
        return "Tensor" if tree.dim() else "scalar Tensor"
    children = cut_children_of(tree)
    if isinstance(tree, Mapping):
        return "{" + ", ".join(sorted([f"{key!r}: {_structure(value, True)}" for key, value in tree.items()])) + "}"
    if children and fields_of(tree):
        values = [f"{name}={_structure(getattr(tree, name), True)}" for name in fields_of(tree)]
        return f"{type(tree).__name__}({', '.join(values)})"
    if children or (isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence)):
        return "(" + ", ".join([_structure(child, is_entry) for child in children]) + ")"
    items = _items_of(tree)
    if items:
        return f"{type(tree).__name__}({', '.join([_structure(item, is_entry) for item in items])})"
    if (is_entry or children_of(tree)) and not isinstance(tree, PackedSequence):
        return type(tree).__name__
    raise TypeError(
        "replicas must return tensors, None, or tuples, lists, mappings and dataclasses of tensors, got "
        f"{type(tree).__name__}; return tensors"
    )


def _items_of(output: Any) -> list[Any]:
    """Return the items of an iterable with tensors that is no container of `trees.py`; nothing for anything else.

    Torch gathers every iterable, and makes its class of the gathered items. The caches of transformers rely on that.
    """
    if isinstance(output, (str, bytes, Set, Iterator, *NO_CONTAINERS)) or not isinstance(output, Iterable):
        return []
    items = [] if children_of(output) else list(output)
    return items if tensors_in(items) else []


def _differences(first: Any, other: Any, path: str, in_leaf: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two trees of one structure differ in what is no tensor, and what they have there."""
    if first is other or isinstance(first, Tensor):
        return
    children, others = children_of(first), children_in_order(other, first)
    if children:
        in_leaf = in_leaf or not cut_children_of(first)
    elif not in_leaf:  # `gather` does not look for items in a leaf.
        children, others = _items_of(first), _items_of(other)
    if not children and not _are_equal(first, other):
        yield path, first, other
    names = names_of_children(first) or [f"[{i}]" for i in range(len(children))]
    for name, child, child_of_other in zip(names, children, others, strict=True):
        yield from _differences(child, child_of_other, path + name, in_leaf)


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN is equal to NaN, and arrays are equal if their elements are."""
    try:
        if hasattr(one, "shape"):  # an array, which compares its elements
            return bool(one.shape == other.shape and (one == other).all())
        return bool(one == other or (one != one and other != other))
    except Exception:
        return False


def gather(outputs: Sequence[Any], device: torch.device, dim: int, by_torch: bool = False) -> Any:
    """Put outputs together on `device`: tensors along `dim`, scalars into a vector, as torch.

    What is no tensor is that of the first. Raises an error unless all outputs have one structure.
    """
    check_structures(outputs)
    first = outputs[0]
    leaves: list[Any] = []
    groups = []
    for group in zip(*[leaves_of(output, like=first) for output in outputs], strict=True):
        if isinstance(group[0], Tensor):
            groups.append(group)
        items = list(map(_items_of, group))
        leaves.append(rebuilt(group[0], gather(items, device, dim, by_torch)) if items[0] else group[0])
    joined = iter(_join(groups, device, dim, by_torch) if groups else ())
    return with_leaves(first, iter([next(joined) if isinstance(leaf, Tensor) else leaf for leaf in leaves]))


def _join(groups: Sequence[Sequence[Tensor]], device: torch.device, dim: int, by_torch: bool) -> Sequence[Tensor]:
    """Return one tensor for each group of tensors, one of each replica."""
    try:
        return _joined(groups, device, dim, by_torch)
    except RuntimeError as error:
        for tensors in groups:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            others = [(len(shape), *shape[:dim], *shape[dim:][1:]) for shape in shapes]
            i = next((i for i, sizes in enumerate(others) if sizes != others[0]), None)
            if i is not None:
                raise RuntimeError(
                    f"replica 0 returned a tensor of shape {shapes[0]}, but replica {i} one of shape {shapes[i]}; "
                    f"outputs are put together along dimension {dim}, so all other sizes must be equal; pad the "
                    "outputs, for example with total_length=input.shape[1] in pad_packed_sequence, or move the "
                    f"dimension of the samples to {dim}"
                ) from error
        raise


def _joined(groups: Sequence[Sequence[Tensor]], device: torch.device, dim: int, by_torch: bool) -> Sequence[Tensor]:
    joined: list[Tensor] = []
    if by_torch:
        joined.extend(gather_by_torch(list(zip(*groups, strict=True)), str(device), dim))  # type: ignore[arg-type]
        return joined
    # Autocast would concatenate in its own dtype, or refuse tensors of another dtype. Torch gathers plain tensors.
    with torch.autocast(device.type, enabled=False), torch.DisableTorchFunctionSubclass():
        for tensors in groups:
            moved = [tensor.to(device) for tensor in tensors]
            if moved[0].dim() or dim:
                joined.append(torch.cat(moved, dim))
                continue
            warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
                "and return a vector."
            )
            joined.append(torch.stack(moved))
    return joined
