"""Flatten nested arguments and outputs into leaves with their paths, and rebuild them with other leaves.

The nodes of a tree are lists, tuples, mappings and dataclasses; everything else is a leaf:

    {"images": x, "boxes": [b0, b1]}    leaves: x at ['images'], b0 at ['boxes'][0], b1 at ['boxes'][1]

A dataclass or a mapping class of the user's is a leaf if it holds no tensors: replicas share an object of settings.
"""

import copy
import dataclasses
import functools
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from types import ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__: list[str] = []

# The user's, for a tree: an int, None (each replica gets the whole), or a dict, list or tuple for its children.
Dims = Any
UNSPECIFIED: Any = "unspecified"  # in place of a dimension: the user named none
Path = tuple[Any, ...]  # the name of a tree, then keys, indices and fields down to a node

# Classes without tensors, and containers that every tree splits into children.
_ATOMS = {NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_PLAIN = (list, tuple, dict)
_OTHER_STRUCTURE = ", or call a second wrapper of the module where it returns something else, as in eval mode"


class Index(int):
    """The index of an entry, in a path."""


class Field(str):
    """The name of a field, in a path."""


def format_path(path: Path) -> str:
    """Format a path as a Python expression, such as ``batch['boxes'][0].shape``."""
    return f"{path[0]}" + "".join([f".{key}" if isinstance(key, Field) else f"[{key!r}]" for key in path[1:]])


def format_dims(option: str, path: Path, dims: Dims) -> str:
    """Format the value of `in_dims` or `out_dims` for one path, such as ``in_dims={'batch': {'boxes': 0}}``."""
    return f"{option}={functools.reduce(lambda inner, key: {key: inner}, reversed(path), dims)}"


def is_sequence_type(kind: type) -> bool:
    """Return whether instances may hold one entry per sample: lists and tuples, except named tuples and shapes."""
    return issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields") and kind is not torch.Size


def has_to_method(kind: type) -> bool:
    """Return whether a class defines `to(device)`, except modules."""
    return hasattr(kind, "to") and not issubclass(kind, nn.Module)  # `Module.to` moves in place.


class Leaf(NamedTuple):
    """A leaf of a tree, with its path and the dimension from `in_dims` or `out_dims`."""

    path: Path
    value: Any
    dim: Any  # an int, None or `UNSPECIFIED`

    def splits_by_entry(self) -> bool:
        """Return whether this is a list or tuple of samples: scattered and gathered by entries, not by rows."""
        return bool(self.dim == 0) and is_sequence_type(type(self.value))

    def resolve_dim(self, default: int, remedy: str) -> int:
        """Return the dimension of samples in a tensor, at least 0; `default` unless the user named one."""
        dim, ndim = default if self.dim is UNSPECIFIED else self.dim, self.value.dim()
        if -ndim <= dim < ndim:
            return int(dim % ndim)
        raise ValueError(
            f"{format_path(self.path)} of shape {tuple(self.value.shape)} has no dimension {dim}; {remedy}"
        )


class Tree:
    """A flattened tree.

    Attributes:
        leaves: the leaves, in order.
        build: returns a tree of the same structure, with leaves from an iterator.
        lists: lists and tuples without a dimension from the user, by path: (list, index of its first leaf, index
            after its last leaf).
        unreachable: (path, class name) of objects whose tensors cannot be reached.
    """

    def __init__(self, tree: Any, dims: Dims = UNSPECIFIED, path: Path = (), is_output: bool = False) -> None:
        self.leaves: list[Leaf] = []
        self.lists: dict[Path, tuple[Sequence[Any], int, int]] = {}
        self.unreachable: list[tuple[Path, str]] = []
        self._is_output = is_output
        try:
            self.build = self._add(path, tree, dims)
        except RecursionError:
            raise ValueError(
                "arguments or outputs are nested too deeply, or contain themselves; pass or return their tensors alone"
            ) from None

    def _add(self, path: Path, tree: Any, dims: Dims) -> Callable[[Iterator[Any]], Any]:
        """Append the leaves of a subtree; return a function from an iterator of new leaves to a new subtree."""
        kind = type(tree)
        is_leaf = kind is Tensor or kind in _ATOMS or self._is_leaf(tree, kind, dims)
        children = {} if is_leaf else self._reachable_children(path, tree, kind, dims)
        by_child = self._dims_by_child(path, children, kind, dims) if isinstance(dims, _PLAIN) else None
        if not children:
            self.leaves.append(Leaf(path, tree, dims))
            return next
        start, builds = len(self.leaves), []
        for key, child in children.items():
            child_dims = dims if by_child is None else by_child.get(key, UNSPECIFIED)
            builds.append(self._add((*path, key), child, child_dims))
        if dims is UNSPECIFIED and is_sequence_type(kind):
            self.lists[path] = tree, start, len(self.leaves)
        return lambda leaves: _rebuild(path, tree, children, [build(leaves) for build in builds])

    def _is_leaf(self, tree: Any, kind: Any, dims: Dims) -> bool:
        # A list of words is one leaf: it is copied as a whole.
        if dims is UNSPECIFIED and kind in (list, dict) and not self._is_output:
            return {*map(type, tree.values() if kind is dict else tree)} <= _ATOMS
        splits_by_entry = dims == 0 and is_sequence_type(kind) and not (self._is_output and issubclass(kind, tuple))
        return splits_by_entry or issubclass(kind, (Tensor, nn.Module)) or (dims is None and has_to_method(kind))

    def _reachable_children(self, path: Path, tree: Any, kind: Any, dims: Dims) -> dict[Any, Any]:
        """Return the children of a container; nothing for a leaf. Note tensors that no child leads to.

        A container of the user's without tensors is a leaf, unless `in_dims` or `out_dims` names its entries.
        """
        items = list(tree) if self._is_output and kind not in _PLAIN and _is_iterable(tree, kind) else tree
        is_plain = issubclass(kind, _PLAIN) and kind is not PackedSequence
        holds = is_plain or holds_tensors(items)
        if not holds and not isinstance(dims, dict):
            return {}
        children = children_of(items)
        if dims is not None and kind not in _PLAIN:
            attributes = getattr(tree, "__dict__", {}) if is_plain or dataclasses.is_dataclass(kind) else {}
            others = [value for name, value in attributes.items() if value is not children.get(name)]
            if (holds and not children and not is_plain) or holds_tensors(others):
                self.unreachable.append((path, kind.__name__))
        return children

    def _dims_by_child(self, path: Path, children: dict[Any, Any], kind: Any, dims: Dims) -> dict[Any, Dims]:
        """Match a dict, list or tuple of dimensions to the children of a container."""
        has_entries = {*map(type, children)} <= {Index}
        if isinstance(dims, dict):
            names = {key: key for key in children} | dict(
                zip(getattr(kind, "_fields", children), children, strict=True)
            )
            # The keys of a mapping may differ from call to call.
            if issubclass(kind, (Mapping, NoneType)) or dims.keys() <= names.keys():
                return {key: dims[name] for name, key in names.items() if name in dims}
        elif kind is NoneType or (has_entries and len(dims) == len(children)):
            return dict(zip(children, dims, strict=False))
        option, other = ("out_dims", _OTHER_STRUCTURE) if self._is_output else ("in_dims", "")
        size = f" of {len(children)} entries" if children else ""
        several = f", or a {'tuple of as many' if has_entries else 'dict by its keys or fields'}" if children else ""
        raise ValueError(
            f"{format_path(path)} is a {kind.__name__}{size}, but {option} names a {type(dims).__name__} for it, "
            f"{dims!r}; name one dimension for all of it{several}{other}"
        )


def _is_iterable(tree: Any, kind: type) -> bool:
    """Return whether `nn.DataParallel` gathers an output by iterating over it, such as a cache of transformers."""
    is_other = issubclass(kind, (*_PLAIN, Mapping, Set, str, bytes)) or dataclasses.is_dataclass(kind)
    # Not by `hasattr`: an Enum can be iterated as a class, by its metaclass.
    has_items = any(["__iter__" in vars(cls) for cls in kind.__mro__]) and getattr(tree, "ndim", None) != 0
    return has_items and not hasattr(kind, "__next__") and not is_other


def children_of(tree: Any) -> dict[Any, Any]:
    """Return the children of a container, by key, index or field; nothing for a leaf."""
    kind = type(tree)
    if issubclass(kind, dict):
        return dict(dict.items(tree))  # not `tree.items()`, which a subclass may override
    if issubclass(kind, (list, tuple)):
        return {} if kind is PackedSequence else dict(zip(map(Index, range(len(tree))), tree, strict=True))
    if dataclasses.is_dataclass(kind):
        return {Field(field.name): getattr(tree, field.name, None) for field in dataclasses.fields(kind)}
    with suppress(Exception):  # from methods of the user's class
        return {key: tree[key] for key in tree.keys()} if issubclass(kind, Mapping) else {}  # noqa: SIM118
    return {}


def holds_tensors(tree: Any) -> bool:
    """Return whether an object holds tensors, directly or in containers, without calling its methods.

    Modules, classes and functions are not searched. A callable collection, such as a graph of PyTorch Geometric, is.
    """
    nodes, seen = [tree], {id(tree)}
    for node in nodes:  # The loop appends to `nodes`.
        if isinstance(node, (nn.Module, type, ModuleType)) or (callable(node) and not isinstance(node, Collection)):
            continue
        held = list(node.values()) if type(node) is dict else gc.get_referents(node)
        kinds = {*map(type, held)}
        if any([issubclass(kind, Tensor) for kind in kinds]):
            return True
        kinds = {kind for kind in kinds - _ATOMS if issubclass(kind, Collection) or dataclasses.is_dataclass(kind)}
        children = [child for child in held if type(child) in kinds and gc.is_tracked(child)] if kinds else []
        nodes += [child for child in children if id(child) not in seen]
        seen.update(map(id, children))
    return False


def _rebuild(path: Path, original: Any, keys: Collection[Any], items: list[Any]) -> Any:
    """Return a container of the class and with the attributes of `original`, but with other items."""
    kind: Any = type(original)
    if kind in (list, tuple):
        return kind(items)
    children = dict(zip(keys, items, strict=True))
    if kind is dict:
        return children
    try:
        if dataclasses.is_dataclass(kind):  # first: outputs of transformers are dataclasses and dicts
            result = dataclasses.replace(original, **children)
            for name, child in children.items():  # `__post_init__` may have changed them once more.
                object.__setattr__(result, name, child)
        elif hasattr(kind, "__copy__") and issubclass(kind, Mapping):
            result = copy.copy(original)  # keeps the factory of a defaultdict
            result.update(children)
        else:
            values = children if issubclass(kind, Mapping) else children.values()
            result = kind(*values) if hasattr(kind, "_fields") else kind(values)
        if hasattr(original, "__dict__"):  # attributes set after construction
            vars(result).update({**vars(original), **vars(result)})
        return result
    except Exception as error:
        raise TypeError(
            f"cannot build {format_path(path)}, a {kind.__name__}, with other tensors: {error}; use a dict, or a "
            "dataclass whose constructor takes its fields"
        ) from error


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    return [leaf.value for leaf in Tree(tree, is_output=True).leaves]


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return (formatted path, leaf) for each leaf of a tree, in order."""
    return [(format_path(leaf.path), leaf.value) for leaf in Tree(tree, path=(name,), is_output=True).leaves]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree of the same structure with other leaves, in the order of `leaves_of`."""
    return Tree(tree, is_output=True).build(leaves)
