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

import copy
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ..torch_private import FLAGS_OF_HOOKS, HOOKS

__all__: list[str] = []

KEPT = "_sync_kept"  # the attribute of each module of a replica that has the `Kept`
# What a replica has of its own from the beginning.
_OWN = frozenset({KEPT, "_is_replica", "_parameters", "_buffers", "_modules", *HOOKS, *FLAGS_OF_HOOKS})
_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}


class Kept:
    """Belongs to all modules of a replica, and knows them weakly: it is alive while one of them is.

    `given` has the attributes that the originals of these modules had when the replica was made; all replicas of a
    forward pass have the same list. `records` says whether they record a graph.
    """

    __slots__ = ("__weakref__", "given", "modules", "records")

    def __init__(self, given: Sequence[dict[str, Any]] = (), records: bool = False) -> None:
        self.given, self.records = given, records
        self.modules: list[ref[nn.Module]] = []

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()  # A copy of a module belongs to no replica.

    def alive(self) -> list[tuple[int, nn.Module, dict[str, Any]]]:
        """Return the modules that are alive, with their places in the model and what they were given."""
        places = zip(itertools.count(), self.modules, self.given, strict=False)
        return [(i, module, given) for i, reference, given in places if (module := reference()) is not None]


# The replicas that have run, by the wrapped module. Almost all have ended by the next forward pass.
_have_run: "WeakKeyDictionary[nn.Module, deque[ref[Kept]]]" = WeakKeyDictionary()


def bound_on(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that were bound on a module of a replica: those that are not what it was `given`."""
    return {
        name: value
        for name, value in vars(module).copy().items()  # A backward pass in another thread may bind more.
        if name not in _OWN and (name not in given or given[name] is not value)
    }


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
    if len({id(kept.given) for kept in alive}) > 1:  # more than one pass
        _detach(alive)
    have_run.extend(map(ref, alive))


def _detach(alive: Sequence[Kept]) -> None:
    modules = [item for kept in alive for item in kept.alive()]
    results: dict[int, Any] = {}
    for _, module, given in modules:  # A parameter, or what was given, may have got another name.
        for value in (*given.values(), *module._parameters.values()):
            results[id(value)] = value
    later: set[tuple[int, str]] = set()  # what later passes have bound: the places of modules, and names
    for _, of_pass in itertools.groupby(reversed(alive), lambda kept: id(kept.given)):
        names: set[tuple[int, str]] = set()
        for place, module, given in [item for kept in of_pass for item in kept.alive()]:
            bound = bound_on(module, given)
            names.update((place, name) for name in bound)
            again = [name for name in bound if (place, name) in later]
            _detach_attributes(vars(module), again, results)
            if later:
                _detach_attributes(module._buffers, _bound_buffers(module, given), results)
        later |= names


def _bound_buffers(module: nn.Module, given: dict[str, Any]) -> list[str]:
    """Return which buffers may have been bound: those of originals that require a gradient are in the graph anyway."""
    before = given["_buffers"]
    return [name for name in module._buffers if before.get(name) is None or not before[name].requires_grad]


def _detach_attributes(attributes: dict[str, Any], names: Sequence[str], results: dict[int, Any]) -> None:
    for name in names:
        with suppress(Exception):  # of the user's code, such as a class that refuses copies: then it stays as it is
            attributes[name] = _detached(attributes[name], results)


def _detached(value: Any, results: dict[int, Any]) -> Any:
    """Return a tensor without its graph, a copy of a container in which tensors have none, or `value` as it is.

    `results` has what was returned before, or has to be, by the `id` of the value.
    """
    if id(value) in results:
        return results[id(value)]
    if issubclass(type(value), Tensor):
        # It still requires a gradient: otherwise the recomputation of a checkpoint would save fewer tensors.
        return value.detach().requires_grad_() if is_in_graph(value) else value
    results[id(value)] = value  # for a container that contains itself
    before = items_of(value)
    if {*map(type, before.values())} <= _ATOMS:
        return value
    items = {key: _detached(item, results) for key, item in before.items()}
    if any(item is not before[key] for key, item in items.items()):
        results[id(value)] = with_items(value, items)
    return results[id(value)]


def is_in_graph(tensor: Tensor) -> bool:
    """Return whether a tensor is the output of a node of autograd."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # of one of the views of `unbind` or `split` whose base was changed in place
        return True


def items_of(container: Any) -> dict[Any, Any]:
    """Return what is in a container, by index, key or name; in a function, its defaults and what it closes over.

    This calls no code of the container, which may raise: not its `__iter__`, nor that which a weak proxy would call.
    """
    cls = type(container)
    if issubclass(cls, dict):
        return dict(dict.items(container))
    for sequence in (list, deque, tuple, set):
        if issubclass(cls, sequence):
            return dict(enumerate(sequence.__iter__(container)))
    if issubclass(cls, FunctionType):
        cells = zip(container.__code__.co_freevars, container.__closure__ or (), strict=True)
        filled = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        return {**dict(enumerate(container.__defaults__ or ())), **filled}
    if issubclass(cls, partial):
        return {**dict(enumerate(container.args)), **container.keywords}
    is_object = not issubclass(cls, (nn.Module, ModuleType)) and (is_dataclass(cls) or not callable(container))
    return dict(getattr(container, "__dict__", {})) if is_object else {}


def with_items(container: Any, items: dict[Any, Any]) -> Any:
    """Return a copy of a container with other items."""
    if isinstance(container, (tuple, set)):
        return type(container)(*items.values()) if hasattr(container, "_fields") else type(container)(items.values())
    if isinstance(container, FunctionType):
        code = container.__code__
        cells = tuple([CellType(items[name]) if name in items else CellType() for name in code.co_freevars])
        defaults = tuple([item for key, item in items.items() if isinstance(key, int)])
        function = FunctionType(code, container.__globals__, container.__name__, defaults, cells)
        function.__kwdefaults__ = container.__kwdefaults__
        vars(function).update(vars(container))
        return function
    if isinstance(container, partial):
        arguments = [item for key, item in items.items() if isinstance(key, int)]
        return partial(container.func, *arguments, **{key: items[key] for key in container.keywords})
    result = copy.copy(container)
    for key, item in items.items():
        if isinstance(container, (dict, list, deque)):
            result[key] = item
        else:
            object.__setattr__(result, key, item)
    return result
