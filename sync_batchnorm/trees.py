"""Flatten nested arguments or outputs of a model into leaves with paths, and build the same nesting with other leaves.

The inner nodes of such a tree are lists, tuples, mappings and dataclasses. Every other object is a leaf:

    {"images": x, "boxes": [b0, b1]}    leaves: x at ['images'], b0 at ['boxes'][0], b1 at ['boxes'][1]

An instance of a user's dataclass or mapping class counts as a leaf if it holds no tensors. For example, an object with
settings of the model is a leaf, and all replicas share this object.
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

# A value of `in_dims` or `out_dims` is one of three: an int, which is the dimension of samples; None, if each replica
# gets the whole object; or a dict, list or tuple with such values for the children of a container.
Dims = Any
UNSPECIFIED: Any = "unspecified"  # for a leaf for which the user named no dimension
# The path to a node of a tree: the name of the tree, then the keys, indices and fields from the root down to the node.
Path = tuple[Any, ...]

# Classes of leaves that cannot hold tensors.
_ATOMS = {NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
# Python's own containers. In a tree, each container is a node, and the entries of the container are its children.
_PLAIN = (list, tuple, dict)
_OTHER_STRUCTURE = ", or call a second wrapper of the module where it returns something else, as in eval mode"


class Index(int):
    """The index of a list or tuple entry, as one part of the path to a leaf."""


class Field(str):
    """The name of a dataclass field, as one part of the path to a leaf."""


def format_path(path: Path) -> str:
    """Format the path to a leaf as a Python expression, such as ``batch['boxes'][0].shape``."""
    return f"{path[0]}" + "".join([f".{key}" if isinstance(key, Field) else f"[{key!r}]" for key in path[1:]])


def format_dims(option: str, path: Path, dims: Dims) -> str:
    """Format the option `in_dims` or `out_dims` for the leaf at `path`, such as ``in_dims={'batch': {'boxes': 0}}``."""
    return f"{option}={functools.reduce(lambda inner, key: {key: inner}, reversed(path), dims)}"


def is_sequence_type(kind: type) -> bool:
    """Return whether instances of a class may hold one entry for each sample of a batch.

    The result is True for lists, tuples and their subclasses, but False for named tuples and `torch.Size`.
    """
    return issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields") and kind is not torch.Size


def has_to_method(kind: type) -> bool:
    """Return whether the instances of a class have a method `to(device)` that returns a moved object.

    Modules are no such objects: `nn.Module.to` moves the module itself, in place.
    """
    return hasattr(kind, "to") and not issubclass(kind, nn.Module)


class Leaf(NamedTuple):
    """A leaf of a tree, with its path in the tree, and its dimension of samples from `in_dims` or `out_dims`."""

    path: Path
    value: Any
    # The dimension of samples in `value`; None if every replica gets the whole value; or `UNSPECIFIED` if the user
    # named no dimension.
    dim: Any

    def splits_by_entry(self) -> bool:
        """Return whether this leaf is a list or tuple with one entry for each sample.

        A list of samples is split into shorter lists, one for each replica. Tensors in the list are not split.
        """
        return bool(self.dim == 0) and is_sequence_type(type(self.value))

    def resolve_dim(self, default: int, remedy: str) -> int:
        """Return the dimension of samples in the tensor of this leaf, as a non-negative number.

        If the user named no dimension for this leaf, `default` is used. If the tensor lacks the dimension, an error is
        raised, and its message ends with `remedy`.
        """
        dim, ndim = default if self.dim is UNSPECIFIED else self.dim, self.value.dim()
        if -ndim <= dim < ndim:
            return int(dim % ndim)
        raise ValueError(
            f"{format_path(self.path)} of shape {tuple(self.value.shape)} has no dimension {dim}; {remedy}"
        )


class Tree:
    """Nested arguments or outputs, flattened into a list of leaves.

    Attributes:
        leaves: the leaves of the tree, in order.
        build: a function that takes an iterator of new leaves, and returns a tree of the same structure with them.
        lists: the lists and tuples in the tree for which the user named no dimension, by path. Each value is (the list,
            the index in `leaves` of its first leaf, the index after its last leaf).
        unreachable: (path, class name) of each object in the tree with tensors that cannot be flattened, for example
            because they are private attributes of the object.
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
        """Append the leaves of the subtree at `path` to `leaves`; return a function that rebuilds this subtree.

        The returned function takes an iterator of new leaves, and returns a subtree with the new leaves.
        """
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
        # A list or dict that holds only numbers and strings counts as a single leaf. So each replica gets the whole
        # object, for example a whole list of words.
        if dims is UNSPECIFIED and kind in (list, dict) and not self._is_output:
            return {*map(type, tree.values() if kind is dict else tree)} <= _ATOMS
        splits_by_entry = dims == 0 and is_sequence_type(kind) and not (self._is_output and issubclass(kind, tuple))
        return splits_by_entry or issubclass(kind, (Tensor, nn.Module)) or (dims is None and has_to_method(kind))

    def _reachable_children(self, path: Path, tree: Any, kind: Any, dims: Dims) -> dict[Any, Any]:
        """Return the children of a container by their keys, indices or field names; return an empty dict for a leaf.

        If an instance of a user's container class holds no tensors, it counts as a leaf, unless `in_dims` or `out_dims`
        names its entries. If a container holds tensors outside its children, it is added to `unreachable`.
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
        """Return a dict from the key of each child of a container to the entry for this child in the user's `dims`.

        Raise a `ValueError` if the keys or the length of the user's `dims` do not fit the children of the container.
        """
        has_entries = {*map(type, children)} <= {Index}
        if isinstance(dims, dict):
            names = {key: key for key in children} | dict(
                zip(getattr(kind, "_fields", children), children, strict=True)
            )
            # The keys of a mapping may differ between calls, so `in_dims` may name keys that are missing in this call.
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
    """Return whether `nn.DataParallel` would gather an output object by iterating over the object.

    `nn.DataParallel` iterates over an object if the class of the object defines `__iter__`, for example over a
    key-value cache of transformers.
    """
    is_other = issubclass(kind, (*_PLAIN, Mapping, Set, str, bytes)) or dataclasses.is_dataclass(kind)
    # `hasattr(kind, "__iter__")` would be wrong. It is also true for an Enum class, whose metaclass defines `__iter__`.
    has_items = any(["__iter__" in vars(cls) for cls in kind.__mro__]) and getattr(tree, "ndim", None) != 0
    return has_items and not hasattr(kind, "__next__") and not is_other


def children_of(tree: Any) -> dict[Any, Any]:
    """Return the children of a container by their keys, indices or field names; return an empty dict for a leaf."""
    kind = type(tree)
    if issubclass(kind, dict):
        # A subclass of `dict` may override the method `items`, so call the method of `dict`.
        return dict(dict.items(tree))
    if issubclass(kind, (list, tuple)):
        return {} if kind is PackedSequence else dict(zip(map(Index, range(len(tree))), tree, strict=True))
    if dataclasses.is_dataclass(kind):
        return {Field(field.name): getattr(tree, field.name, None) for field in dataclasses.fields(kind)}
    with suppress(Exception):  # The methods `keys` and `__getitem__` of a user's mapping class may raise any error.
        return {key: tree[key] for key in tree.keys()} if issubclass(kind, Mapping) else {}  # noqa: SIM118
    return {}


def holds_tensors(tree: Any) -> bool:
    """Return whether an object holds tensors, directly or in nested containers. No method of the object is called.

    Do not search for tensors in modules, classes, functions and other callables. But search in collections that are
    callable, such as the graph objects of PyTorch Geometric.
    """
    nodes, seen = [tree], {id(tree)}
    for node in nodes:  # The loop appends to the list over which it runs, and so visits the children of each node, too.
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
    """Return a container like `original`, with the same class and the same attributes, but with other items."""
    kind: Any = type(original)
    if kind in (list, tuple):
        return kind(items)
    children = dict(zip(keys, items, strict=True))
    if kind is dict:
        return children
    try:
        # Test for dataclasses before mappings, because the output classes of transformers are both dataclasses and
        # dicts.
        if dataclasses.is_dataclass(kind):
            result = dataclasses.replace(original, **children)
            for name, child in children.items():  # `replace` calls `__post_init__`, which may change fields.
                object.__setattr__(result, name, child)
        elif hasattr(kind, "__copy__") and issubclass(kind, Mapping):
            result = copy.copy(original)  # A copy of a `defaultdict` keeps its `default_factory`.
            result.update(children)
        else:
            values = children if issubclass(kind, Mapping) else children.values()
            result = kind(*values) if hasattr(kind, "_fields") else kind(values)
        if hasattr(original, "__dict__"):  # Copy attributes that were set after `original` was made.
            vars(result).update({**vars(original), **vars(result)})
        return result
    except Exception as error:
        raise TypeError(
            f"cannot build {format_path(path)}, a {kind.__name__}, with other tensors: {error}; use a dict, or a "
            "dataclass whose constructor takes its fields"
        ) from error


def leaves_of(tree: Any) -> list[Any]:
    """Return a list of the leaves of nested arguments or outputs, in order."""
    return [leaf.value for leaf in Tree(tree, is_output=True).leaves]


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return (path, leaf) for each leaf of a tree, in order. Paths begin with `name`, as in ``output['loss']``."""
    return [(format_path(leaf.path), leaf.value) for leaf in Tree(tree, path=(name,), is_output=True).leaves]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return a list of all tensors in nested arguments or outputs, in order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree with the structure of `tree` and with new leaves, given in the order of `leaves_of(tree)`."""
    return Tree(tree, is_output=True).build(leaves)
