"""Trees, the arguments and results of a `DataParallel`: taken apart into leaves, and built anew with other leaves.

A tree consists of lists, tuples, dicts and their subclasses, of `UserList`, `deque` and other mappings, and of
dataclasses. Its leaves are tensors and everything else. A container that is no list, tuple or dict is a leaf, too, if
it has no tensors: all replicas share an object of settings, but each gets a dict of its own.
"""

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__: list[str] = []

_PLAIN = (list, tuple, dict)  # whose copies are cheap and certain
NO_CONTAINERS = (Tensor, nn.Module, PackedSequence)  # even if they are tuples, mappings or dataclasses


def fields_of(tree: Any) -> list[str]:
    """Return the names of the fields of an object of a dataclass; none for other objects, also for classes."""
    return [field.name for field in dataclasses.fields(tree)] if hasattr(type(tree), "__dataclass_fields__") else []


def children_of(tree: Any) -> Collection[Any]:
    """Return what a container holds, in order; nothing for what is no container, and for an empty one."""
    if isinstance(tree, NO_CONTAINERS):
        return ()
    if isinstance(tree, (list, tuple, UserList, deque)):
        return tree
    if isinstance(tree, Mapping):
        return tree.values()
    # An attribute of a field that its constructor does not set may be missing.
    return [getattr(tree, name, None) for name in fields_of(tree)]


def children_in_order(tree: Any, like: Any) -> Collection[Any]:
    """Return the children of a container, those of a mapping in the order of the keys of `like`."""
    return [tree[key] for key in like] if isinstance(like, Mapping) else children_of(tree)


def names_of_children(tree: Any) -> list[str]:
    """Return what follows the name of a container to name each of its children, in order."""
    if isinstance(tree, Mapping):
        return [f"[{key!r}]" for key in tree]
    return [f".{name}" for name in fields_of(tree)] or [f"[{i}]" for i in range(len(children_of(tree)))]


def cut_children_of(tree: Any) -> Collection[Any]:
    """Return the children of a tree if it is taken apart; nothing for a leaf."""
    children = children_of(tree)
    return children if isinstance(tree, _PLAIN) or (children and _holds_tensors(tree)) else ()


def _holds_tensors(tree: Any) -> bool:
    """Return whether there is a tensor in a tree, which may contain itself."""
    nodes, seen = [tree], set()
    for node in nodes:  # which grows
        if isinstance(node, Tensor):
            return True
        if id(node) not in seen:
            seen.add(id(node))
            nodes.extend(children_of(node))  # `+=` would make another list, if it is a `UserList`.
    return False


def leaves_of(tree: Any, like: Any = None) -> list[Any]:
    """Return the leaves of a tree, in the order of those of `like`, a tree of the same structure, if it is given.

    Of a list of tensors, the list itself.
    """
    if type(tree) is list and {*map(type, tree)} == {Tensor}:  # the most frequent arguments, without a call for each
        return tree
    leaves: list[Any] = []
    try:
        _add_leaves(tree, tree if like is None else like, leaves)
    except RecursionError:
        raise ValueError(
            "arguments are nested too deeply, or contain themselves, so that they cannot be cut into chunks; "
            "pass the tensors of what contains itself as arguments of their own"
        ) from None
    return leaves


def _add_leaves(tree: Any, like: Any, leaves: list[Any]) -> None:
    of_like = cut_children_of(like)
    if not of_like:
        leaves.append(tree)
        return
    children = of_like if tree is like else children_in_order(tree, like)
    for child, child_like in zip(children, of_like, strict=True):
        _add_leaves(child, child_like, leaves)


def with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree like `tree` with other leaves, in the order of `leaves_of`."""
    children = cut_children_of(tree)
    if not children:
        return next(leaves)
    return rebuilt(tree, [with_leaves(child, leaves) for child in children])


def nodes_of(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all containers and leaves of a tree that is called `path`, each with how to write it."""
    yield path, tree
    for name, child in zip(names_of_children(tree), cut_children_of(tree), strict=False):
        yield from nodes_of(child, path + name)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def rebuilt(like: Any, children: Sequence[Any]) -> Any:
    """Return a container like `like` with other children, which are as many."""
    kind = type(like)
    if kind in (list, tuple):
        return kind(children)
    if kind is dict:
        return dict(zip(like, children, strict=True))
    try:
        if isinstance(like, Mapping):
            return _rebuilt_mapping(like, dict(zip(like, children, strict=True)))
        if fields_of(like):
            return _rebuilt_dataclass(like, children)
        if isinstance(like, (list, UserList)):
            made = copy.copy(like)  # whose constructor may take other arguments
            made[:] = children
            if not _is_stale(made, like):
                return made
        if isinstance(like, deque):
            queue = copy.copy(like)
            deque.__init__(queue, children, like.maxlen)
            return queue
        return kind(*children) if hasattr(kind, "_fields") else kind(children)  # a named tuple takes them one by one
    except Exception as error:
        raise TypeError(
            f"cannot build a {kind.__name__} for the tensors of each replica, or of all of them: {error}; use a dict, "
            "or a dataclass whose constructor takes its fields and nothing else"
        ) from error


def _is_stale(made: Any, like: Any) -> bool:
    """Return whether a copy that got other items still has tensors of the original, in attributes made of its items."""
    before = getattr(like, "__dict__", {})
    attributes = getattr(made, "__dict__", {}).items()
    return any(value is before.get(name) and _holds_tensors(value) for name, value in attributes)


def _rebuilt_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    # A copy keeps what a constructor does not take, such as the default of a defaultdict. Where a class does not say
    # how it is copied, items of its copies may be those of the original.
    if isinstance(like, MutableMapping) and (isinstance(like, dict) or hasattr(type(like), "__copy__")):
        with suppress(Exception):  # Mappings that refuse changes are left to their constructors.
            made = copy.copy(like)
            for key, item in items.items():
                made[key] = item
            if not _is_stale(made, like):
                return made
    built: Mapping[Any, Any] = type(like)(items)  # type: ignore[call-arg]
    if built.keys() != items.keys():
        raise TypeError(f"made of its items, it has the keys {list(built)} instead of {list(items)}")
    return built


def _rebuilt_dataclass(like: Any, children: Sequence[Any]) -> Any:
    fields = dataclasses.fields(like)
    derived = [field.name for field in fields if not field.init]
    if derived:
        raise TypeError(f"its fields {derived} are declared with init=False, so nothing says how to cut them")
    for name, field in type(like).__dataclass_fields__.items():
        if isinstance(field.type, dataclasses.InitVar) or (isinstance(field.type, str) and "InitVar" in field.type):
            raise TypeError(f"InitVar {name!r} must be specified, and the object does not keep what it was")
    items = {field.name: child for field, child in zip(fields, children, strict=True)}
    made = dataclasses.replace(like, **items)
    for name, item in items.items():
        if getattr(made, name) is not item:  # The constructor has changed it, as it had changed that of `like`.
            object.__setattr__(made, name, item)
    for name, value in getattr(like, "__dict__", {}).items():  # what was set on the object afterwards
        if name not in vars(made) and not _holds_tensors(value):
            object.__setattr__(made, name, value)
    return made
