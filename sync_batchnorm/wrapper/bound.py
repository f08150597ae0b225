"""What `forward` and hooks bind on the modules of a replica, and when that is detached.

NOTE [what replicas keep]: A replica may live as long as its graph does: a backward hook, or a checkpoint, that reads
`self` needs it. If an attribute of the replica keeps the graph, too, both live forever: Python's collector does not see
the nodes of autograd through which they refer to each other. On one device, the next forward pass binds the attribute
anew. Here that pass has replicas of its own. So when it begins, what the former replicas have bound is detached.

Things that do not work: to empty the former replicas, or to drop their tensors, since the backward pass of two forward
passes may still run, as of `(D(real) + D(fake)).backward()`; to detach what a list of the user's holds, in place of a
copy of that list; to look at all attributes, since `_flat_weights` of an RNN, which it was given, need their graph.
"""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ..torch_private import FLAGS_OF_HOOKS, HOOKS
from .converted import Conversion

__all__: list[str] = []

KEPT = "_sync_kept"  # the attribute of each module of a replica that has the `Kept`
# What a replica has of its own from the beginning.
_OWN = frozenset({KEPT, "_is_replica", "_apply", "_parameters", "_buffers", "_modules", *HOOKS, *FLAGS_OF_HOOKS})


class Kept:
    """Belongs to all modules of a replica, and knows them weakly: it is alive while one of them is.

    `given` has the attributes that the originals of these modules had when the replica was made.
    """

    __slots__ = ("__weakref__", "given", "modules")

    def __init__(self, given: Sequence[dict[str, Any]] = ()) -> None:
        self.given, self.modules = given, list[Conversion]()

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()  # A copy of a module belongs to no replica.

    def alive(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Return the modules that are alive, with what they were given."""
        pairs = zip(self.modules, self.given, strict=True)
        return [(module, given) for reference, given in pairs if (module := reference.module()) is not None]


# The replicas that have run, by the wrapped module. Almost all have ended by the next forward pass.
_have_run: "WeakKeyDictionary[nn.Module, deque[ref[Kept]]]" = WeakKeyDictionary()


def bound_on(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that were bound on a module of a replica: those that are not what it was `given`."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OWN and (name not in given or given[name] is not value)
    }


def note_run(original: nn.Module, replica: nn.Module) -> None:
    """Note that a replica of `original` has run."""
    kept = vars(replica).get(KEPT)
    if kept is not None:  # as the wrapped module itself has none
        _have_run.setdefault(original, deque()).append(ref(kept))


def detach_what_has_run(original: nn.Module) -> None:
    """Detach what is bound on the replicas of former passes of `original`, see NOTE [what replicas keep]."""
    alive: list[Kept] = []
    have_run = _have_run.get(original, deque())
    with suppress(IndexError):  # Other threads may add some, or take some.
        while have_run:
            kept = have_run.popleft()()
            if kept is not None:
                alive.append(kept)
    modules = [pair for kept in alive for pair in kept.alive()]
    results: dict[int, Any] = {}
    for module, given in modules:  # A parameter, or what was given, may have got another name.
        for value in (*given.values(), *module._parameters.values()):
            results[id(value)] = value
    for module, given in modules:
        _detach_bound(module, given, results)
    have_run.extend(map(ref, alive))  # A hook may bind more until the backward pass has ended.


def _detach_bound(module: nn.Module, given: dict[str, Any], results: dict[int, Any]) -> None:
    state, buffers = vars(module), module._buffers
    for name, value in bound_on(module, given).items():
        state[name] = _detached(value, results)
    for name, buffer in list(buffers.items()):
        original = given["_buffers"].get(name)
        # One of an original that requires a gradient is in the graph from the beginning.
        if buffer is not None and (original is None or not original.requires_grad):
            buffers[name] = _detached(buffer, results)


def _detached(value: Any, results: dict[int, Any]) -> Any:
    """Return a tensor without its graph, a copy of a container in which tensors have none, or `value` as it is.

    `results` has what was returned before, or has to be, by the `id` of the value.
    """
    if id(value) in results:
        return results[id(value)]
    if isinstance(value, Tensor):
        # It still requires a gradient: otherwise the recomputation of a checkpoint would save fewer tensors.
        return value if value.grad_fn is None else value.detach().requires_grad_()
    results[id(value)] = value  # for a container that contains itself
    before = _items(value)
    items = {key: _detached(item, results) for key, item in before.items()}
    if any(item is not before[key] for key, item in items.items()):
        with suppress(Exception):  # of a class of the user's, which may refuse copies
            results[id(value)] = _with_items(value, items)
    return results[id(value)]


def _items(container: Any) -> dict[Any, Any]:
    """Return what is in a container, by index, key or name; in a function, its defaults and what it closes over."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, (list, deque, tuple)):
        return dict(enumerate(container))
    if isinstance(container, FunctionType):
        cells = zip(container.__code__.co_freevars, container.__closure__ or (), strict=True)
        filled = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        return {**dict(enumerate(container.__defaults__ or ())), **filled}
    if isinstance(container, partial):
        return {**dict(enumerate(container.args)), **container.keywords}
    return vars(container) if is_dataclass(container) and hasattr(container, "__dict__") else {}


def _with_items(container: Any, items: dict[Any, Any]) -> Any:
    """Return a copy of a container with other items."""
    if isinstance(container, tuple):
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
