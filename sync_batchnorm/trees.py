"""Trees, the arguments and outputs of a wrapper: taken apart into leaves with their paths, and built anew.

A tree consists of lists, tuples, mappings and dataclasses; everything else is a leaf. So is a mapping that is no dict,
or a dataclass, without tensors: all replicas share an object of settings.
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

Dims = Any  # what is named for a tree: a dimension, None for the whole, or a dict, list or tuple of such
UNSPECIFIED: Any = "usual"  # in place of a dimension: nothing is named
Path = tuple[Any, ...]  # the name of a tree, and the keys, indices and fields that lead from it to a part

_ATOMS = {NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_PLAIN = (list, tuple, dict)
_OTHER_STRUCTURE = ", or call a second wrapper of the module where it returns something else, as in eval mode"


class Index(int):
    """The index of an entry, in a path."""


class Field(str):
    """The name of a field, in a path."""


def format_path(path: Path) -> str:
    """Return a path as Python writes it."""
    return f"{path[0]}" + "".join([f".{key}" if isinstance(key, Field) else f"[{key!r}]" for key in path[1:]])


def format_dims(option: str, path: Path, dims: Dims) -> str:
    """Return how `in_dims` or `out_dims` names dimensions for a path, as Python writes it."""
    return f"{option}={functools.reduce(lambda of_key, key: {key: of_key}, reversed(path), dims)}"


def is_sequence_type(kind: type) -> bool:
    """Return whether objects of a class may have an entry for each sample; named tuples and shapes have none."""
    return issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields") and kind is not torch.Size


def has_to_method(kind: type) -> bool:
    """Return whether objects of a class have a method `to` that returns them on another device."""
    return hasattr(kind, "to") and not issubclass(kind, nn.Module)  # A module would be moved in place.


class Leaf(NamedTuple):
    """A leaf, or a list that is cut or put together by its entries, and the dimension that is named for it."""

    path: Path
    value: Any
    dim: Any  # an int, None or `UNSPECIFIED`

    def splits_by_entry(self) -> bool:
        """Return whether this is a list that is cut or put together by its entries."""
        return bool(self.dim == 0) and is_sequence_type(type(self.value))

    def must_move(self, device: torch.device) -> bool:
        """Return whether a single replica on a device cannot take this as it is."""
        if isinstance(self.value, Tensor):
            return self.value.device != device
        return self.splits_by_entry() or (self.dim is None and has_to_method(type(self.value)))

    def dimension(self, usual: int, remedy: str) -> int:
        """Return the dimension of a tensor that is named for it, or else the usual one."""
        dim, number = usual if self.dim is UNSPECIFIED else self.dim, self.value.dim()
        if -number <= dim < number:
            return int(dim % number)
        raise ValueError(
            f"{format_path(self.path)} of shape {tuple(self.value.shape)} has no dimension {dim}; {remedy}"
        )


class Tree:
    """A tree taken apart: its `leaves`, in order, and `build`, which makes such a tree of other leaves.

    `lists` has, by their paths, the lists and tuples for which nothing is named, each with where its leaves begin and
    end. `unreachable` has the path and the class of what holds tensors that are no leaves.
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
        """Add the leaves of a tree; return what builds such a tree of the leaves that it takes from an iterator."""
        kind = type(tree)
        is_leaf = kind is Tensor or kind in _ATOMS or self._is_leaf(tree, kind, dims)
        children = {} if is_leaf else self._children(path, tree, kind, dims)
        of_children = self._dims_of(path, children, kind, dims) if isinstance(dims, _PLAIN) else None
        if not children:
            self.leaves.append(Leaf(path, tree, dims))
            return next
        start, builds = len(self.leaves), []
        for key, child in children.items():
            builds.append(
                self._add((*path, key), child, dims if of_children is None else of_children.get(key, UNSPECIFIED))
            )
        if dims is UNSPECIFIED and is_sequence_type(kind):
            self.lists[path] = tree, start, len(self.leaves)
        return lambda leaves: built(path, tree, children, [build(leaves) for build in builds])

    def _is_leaf(self, tree: Any, kind: Any, dims: Dims) -> bool:
        if dims is UNSPECIFIED and kind in (list, dict) and not self._is_output:  # A list of words is copied at once.
            return {*map(type, tree.values() if kind is dict else tree)} <= _ATOMS
        is_by_entries = dims == 0 and is_sequence_type(kind) and not (self._is_output and issubclass(kind, tuple))
        return is_by_entries or issubclass(kind, (Tensor, nn.Module)) or (dims is None and has_to_method(kind))

    def _children(self, path: Path, tree: Any, kind: Any, dims: Dims) -> dict[Any, Any]:
        """Return what a container holds that has tensors, or whose entries are named; nothing for a leaf."""
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

    def _dims_of(self, path: Path, children: dict[Any, Any], kind: Any, dims: Dims) -> dict[Any, Dims]:
        """Return the dimensions that are named for the children of a container."""
        has_entries = {*map(type, children)} <= {Index}
        if isinstance(dims, dict):
            names = {key: key for key in children} | dict(
                zip(getattr(kind, "_fields", children), children, strict=True)
            )
            # A mapping need not have all keys each time.
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
    """Return whether torch gathers an output by its items, as the caches of transformers rely on."""
    is_other = issubclass(kind, (*_PLAIN, Mapping, Set, str, bytes)) or dataclasses.is_dataclass(kind)
    # Not by `hasattr`: an Enum can be iterated as a class, by its metaclass.
    has_items = any(["__iter__" in vars(cls) for cls in kind.__mro__]) and getattr(tree, "ndim", None) != 0
    return has_items and not hasattr(kind, "__next__") and not is_other


def children_of(tree: Any) -> dict[Any, Any]:
    """Return what a container holds, by key, index or field; nothing for a leaf."""
    kind = type(tree)
    if issubclass(kind, dict):
        return dict(dict.items(tree))  # without the code of its class
    if issubclass(kind, (list, tuple)):
        return {} if kind is PackedSequence else dict(zip(map(Index, range(len(tree))), tree, strict=True))
    if dataclasses.is_dataclass(kind):
        return {Field(field.name): getattr(tree, field.name, None) for field in dataclasses.fields(kind)}
    with suppress(Exception):  # whatever the code of its class raises
        return {key: tree[key] for key in tree.keys()} if issubclass(kind, Mapping) else {}  # noqa: SIM118
    return {}


def holds_tensors(tree: Any) -> bool:
    """Return whether tensors can be seen in an object, or in containers in it, without calling its code.

    A module, a class and a function are no data; what can be called and has items, as graphs of PyTorch Geometric, is.
    """
    nodes, seen = [tree], {id(tree)}
    for node in nodes:  # which grows
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


def built(path: Path, original: Any, keys: Collection[Any], items: list[Any]) -> Any:
    """Return a container like another one, with other items."""
    kind = type(original)
    if kind in (list, tuple):
        return kind(items)
    children = dict(zip(keys, items, strict=True))
    try:
        return children if kind is dict else _rebuilt(original, kind, children)
    except Exception as error:
        raise TypeError(
            f"cannot build {format_path(path)}, a {kind.__name__}, with other tensors: {error}; use a dict, or a "
            "dataclass whose constructor takes its fields"
        ) from error


def _rebuilt(original: Any, kind: Any, children: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(kind):  # as are the outputs of transformers, which are dicts, too
        result = dataclasses.replace(original, **children)
        for name, child in children.items():  # The constructor has changed it, as it had changed that of the original.
            object.__setattr__(result, name, child)
    elif hasattr(kind, "__copy__") and issubclass(kind, Mapping):
        result = copy.copy(original)  # with the default of a defaultdict
        result.update(children)
    else:
        items = children if issubclass(kind, Mapping) else children.values()
        result = kind(*items) if hasattr(kind, "_fields") else kind(items)
    if hasattr(original, "__dict__"):  # what was set on the object afterwards
        vars(result).update({**vars(original), **vars(result)})
    return result


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    return [leaf.value for leaf in Tree(tree, is_output=True).leaves]


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, in order, each with its path as Python writes it."""
    return [(format_path(leaf.path), leaf.value) for leaf in Tree(tree, path=(name,), is_output=True).leaves]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree like `tree` with other leaves, in the order of `leaves_of`."""
    return Tree(tree, is_output=True).build(leaves)
