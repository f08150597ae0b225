"""What `forward` and hooks bind on the modules of a replica, and when that is detached.

NOTE [what replicas keep]: A replica may live as long as its graph does: a backward hook, or a checkpoint, that reads
`self` needs it. If an attribute of the replica keeps the graph, too, both live forever: Python's collector does not see
the nodes of autograd through which they refer to each other. On one device, a later forward pass binds the attribute
anew. Here that pass has replicas of its own. So when a later pass has bound an attribute, what the replicas of earlier
passes have bound under that name is detached.

Things that do not work: to empty earlier replicas, or to drop their tensors, since the backward pass of two forward
passes may still run, as of `(D(real) + D(fake)).backward()`; to detach when the next pass begins, since that pass may
bind other names, as for real and fake images; to detach in a pass without a graph, as of an evaluation
between a forward and a backward pass; to detach what a list of the user's holds, in place of a copy of that list.
"""

import itertools
import operator
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ..torch_private import FLAGS_OF_HOOKS, HOOKS
from .trees import leaves_of, with_leaves

__all__: list[str] = []

KEPT = "_sync_kept"  # the attribute of each module of a replica that has the `Kept`
# What a replica has of its own from the beginning.
_OWN = frozenset({KEPT, "_is_replica", "_parameters", "_buffers", "_modules", *HOOKS, *FLAGS_OF_HOOKS})


class Kept:
    """Belongs to all modules of a replica, and knows them weakly: it is alive while one of them is.

    `modules` has them by the original. `given` has the attributes that the originals had when the replica was made; all
    replicas of a forward pass have the same dictionary. `records` says whether they record a graph.
    """

    __slots__ = ("__weakref__", "given", "modules", "records")

    def __init__(self, given: dict[nn.Module, dict[str, Any]], records: bool) -> None:
        self.given, self.records = given, records
        self.modules: dict[nn.Module, ref[nn.Module]] = {}

    def __reduce__(self) -> Any:
        return Kept, ({}, False)  # A copy of a module belongs to no replica.

    def alive(self) -> list[tuple[nn.Module, nn.Module, dict[str, Any]]]:
        """Return for each module that is alive its original, itself, and what it was given."""
        return [
            (original, module, self.given[original])
            for original, reference in self.modules.items()
            if (module := reference()) is not None
        ]


# The replicas that have run, by the wrapped module. Almost all have ended by the next forward pass.
_have_run: "WeakKeyDictionary[nn.Module, deque[ref[Kept]]]" = WeakKeyDictionary()


def note_run(original: nn.Module, replica: nn.Module) -> None:
    """Note that a replica of `original` has run."""
    kept = vars(replica).get(KEPT)
    if kept is not None and kept.records:  # The wrapped module itself has none.
        _have_run.setdefault(original, deque()).append(ref(kept))


def detach_what_was_bound_again(original: nn.Module) -> None:
    """Detach what is bound on replicas of earlier passes of `original`, see NOTE [what replicas keep]."""
    alive: list[Kept] = []
    have_run = _have_run.get(original, deque())
    with suppress(IndexError):  # Other threads may add some, or take some.
        while have_run:
            kept = have_run.popleft()()
            if kept is not None:
                alive.append(kept)
    if alive and alive[0].given is not alive[-1].given:  # Then there is more than one pass.
        _detach(alive)
    have_run.extend(map(ref, alive))


def _detach(alive: Sequence[Kept]) -> None:
    modules = [item for kept in alive for item in kept.alive()]
    # A parameter, or what a replica was given, may have got another name.
    given_ids = {id(value) for _, module, given in modules for value in (*given.values(), *module._parameters.values())}
    later: set[tuple[nn.Module, str]] = set()  # what later passes have bound: originals, and names
    for _, of_pass in itertools.groupby(reversed(alive), lambda kept: id(kept.given)):
        names: set[tuple[nn.Module, str]] = set()
        for original, module, given in [item for kept in of_pass for item in kept.alive()]:
            for attributes, name in where_bound(module, given):
                names.add((original, name))
                if (original, name) in later:
                    with suppress(Exception):  # of a class that refuses to be copied: then it stays as it is
                        attributes[name] = _detached(attributes[name], given_ids)
        later |= names


def where_bound(module: nn.Module, given: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the names that may have been bound on a module of a replica, each with the dictionary that has it."""
    attributes = vars(module)
    names = [
        name
        for name, value in attributes.copy().items()  # A backward pass in another thread may bind more.
        if name not in _OWN and (name not in given or given[name] is not value)
    ]
    # A buffer of which the original requires a gradient is in the graph anyway.
    originals = given["_buffers"]
    buffers = [name for name in module._buffers if originals.get(name) is None or not originals[name].requires_grad]
    return [(attributes, name) for name in names] + [(module._buffers, name) for name in buffers]


def _detached(value: Any, given_ids: set[int]) -> Any:
    """Return a tensor without its graph, a copy of a container in which tensors have none, or `value` as it is."""
    if id(value) in given_ids:
        return value
    leaves = leaves_of(value)
    detached = [_detached_leaf(leaf, given_ids) for leaf in leaves]
    return with_leaves(value, iter(detached)) if any(map(operator.is_not, leaves, detached)) else value


def _detached_leaf(leaf: Any, given_ids: set[int]) -> Any:
    if id(leaf) in given_ids:
        return leaf
    if is_in_graph(leaf):
        # It still requires a gradient: otherwise the recomputation of a checkpoint would save fewer tensors.
        return leaf.detach().requires_grad_()
    if type(leaf) not in (FunctionType, partial):
        return leaf
    held = (leaf.func, leaf.args, leaf.keywords) if type(leaf) is partial else (leaf.__defaults__, closure_of(leaf))
    detached = _detached(held, given_ids | {id(leaf)})  # A function may refer to itself.
    if detached is held:
        return leaf
    if type(leaf) is partial:
        return partial(detached[0], *detached[1], **detached[2])
    return with_closure(leaf, *detached)


def closure_of(function: Any) -> list[Any]:
    """Return the values of the variables in the closure of a function; nothing if one is not set yet."""
    with suppress(ValueError):
        return [cell.cell_contents for cell in function.__closure__ or ()] if type(function) is FunctionType else []
    return []


def with_closure(function: Any, defaults: tuple[Any, ...] | None, closure: Sequence[Any]) -> Any:
    """Return a copy of a function that has other defaults, and other values in its closure."""
    cells = tuple(map(CellType, closure)) or function.__closure__
    result = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def is_in_graph(value: object) -> bool:
    """Return whether a value is a tensor that a node of autograd has made."""
    if not issubclass(type(value), Tensor):
        return False
    try:
        return value.grad_fn is not None  # type: ignore[attr-defined]
    except RuntimeError:  # of one of the views of `unbind` or `split` whose base was changed in place
        return True
