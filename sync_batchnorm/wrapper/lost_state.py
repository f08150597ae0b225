"""Warnings of what `forward` sets and loses with its replica, of what hooks set on the model, of replicas that stay."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..messages import warn_once

__all__: list[str] = []

LOOKS = 3  # Arbitrary: what a model counts or averages, it does in each training step.
PASSES = 32  # Arbitrary: more forward passes than one backward pass usually has.
_KINDS = frozenset({bool, int, float, complex, str})
CHANGE_IN_PLACE = (
    "Make numbers and averages buffers that are changed in place, as in self.step.add_(1), or set it outside forward"
)
MAKE_BEFORE = "Make modules, parameters and buffers in __init__()"
RETURN = "Return a penalty, so that the training loop gets it from all replicas"

# How many forward passes were looked at, by wrapper, in training mode and in eval mode. Not an attribute: a copy or
# pickle of a wrapper begins at zero.
_looks: "WeakKeyDictionary[nn.Module, Counter[bool]]" = WeakKeyDictionary()

# Replica 0 of each forward pass that is alive, by wrapper; None once there were many.
_alive: "WeakKeyDictionary[nn.Module, WeakSet[nn.Module] | None]" = WeakKeyDictionary()


# Modules, each with the prefix of its attributes' names in the model, and with what it had before the replicas ran: its
# attributes, parameters, buffers and submodules, and the data of its parameters.
Watched = Sequence[tuple[nn.Module, str, dict[str, Any], dict[str, Tensor]]]


def begin_watching(wrapper: nn.Module, original: nn.Module, replica: nn.Module) -> Callable[[], None]:
    """Count a look at a wrapper; return what warns after the forward pass of a replica that has not run yet.

    Nothing is looked at, or counted, after the first forward passes of a wrapper in the mode of the replica, and for a
    module that is no replica. In eval mode, only the modules of the original are looked at.
    """
    if not vars(replica).get("_is_replica"):
        return lambda: None
    _warn_of_replicas_that_stay(wrapper, replica)
    looks, mode = _looks.setdefault(wrapper, Counter()), replica.training
    if looks[mode] >= LOOKS:
        return lambda: None
    looks[mode] += 1
    of_replica = _watched(replica) if mode else ()
    of_model = () if original is replica else _watched(original)  # Replicas of somebody else's are their own originals.

    def warn() -> None:
        _warn_of_lost_state(replica, of_replica)
        _warn_of_set_on_model(original, of_model)

    return warn


def _watched(root: nn.Module) -> Watched:
    watched = []
    for name, module in root.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which makes new objects of its buffers at each look
            data = {key: tensor.detach() for key, tensor in module._parameters.items() if tensor is not None}
            watched.append((module, f"{name}." if name else "", _members(module), data))
    return watched


def _bound_anew(state: Watched) -> Iterator[tuple[nn.Module, str, str, Any, Any]]:
    """Yield for each member that is bound anew: the module, the prefix, the name, what was there or None, what is."""
    for module, prefix, members, _ in state:
        for name, value in _members(module).items():
            if name not in members or members[name] is not value:
                yield module, prefix, name, members.get(name), value


def _members(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._parameters, **module._buffers, **module._modules}


def _warn_of_lost_state(replica: nn.Module, state: Watched) -> None:
    """Warn of what a replica that has run has bound anew, and what the model would have kept on one device."""
    known = {id(replica)} | {id(member) for _, _, members, _ in state for member in members.values()}
    remedies: dict[str, str] = {}
    for module, prefix, name, before, value in _bound_anew(state):
        if remedy := _remedy(module, name, before, value, id(value) in known):
            remedies[prefix + name] = remedy
    for module, prefix, members, data in state:
        for name, tensor in data.items():
            if module._parameters.get(name) is members[name] and _has_other_data(members[name], tensor):
                remedies[prefix + name] = CHANGE_IN_PLACE
    if remedies:
        warn_once(
            f"forward() of {type(replica).__name__} set {_listed(remedies)} of replica 0, which ends with the forward "
            f"pass: the model keeps its former values. {'. '.join(dict.fromkeys(remedies.values()))}. Ignore this if "
            "each forward pass sets it anew"
        )


def _warn_of_set_on_model(original: nn.Module, state: Watched) -> None:
    """Warn of what was bound anew on the original itself while its replicas ran."""
    names: list[str] = []
    for _, prefix, name, before, value in _bound_anew(state):
        # A number that was set to what it was is the same, whichever replica was the last.
        if not (type(value) in _KINDS and type(before) in _KINDS and value == before):
            names.append(prefix + name)
    if names:
        warn_once(
            f"while replicas of {type(original).__name__} ran, something set {_listed(names)} of the model itself, as "
            "a hook or closure does that refers to the model: each replica sets it, and a forward() that reads it from "
            "self gets an older value. Register a forward hook in forward(), where self is the replica, and "
            "remove it there, or return what it collects"
        )


def _warn_of_replicas_that_stay(wrapper: nn.Module, replica: nn.Module) -> None:
    """Note a replica of a forward pass; warn once if those of many earlier passes of this wrapper are alive."""
    alive = _alive.setdefault(wrapper, WeakSet())
    if alive is None:
        return
    if len(alive) > PASSES:
        _alive[wrapper] = None
        gc.collect()  # once, since it takes long
        if len(alive) > PASSES:
            warn_once(
                f"replicas of more than {PASSES} earlier forward passes of {type(replica).__name__} are alive, with "
                "all that they keep. A backward or tensor hook that forward() registers and that refers to self keeps "
                "its replica, if forward() keeps an activation on self, too: write self.kept = y.detach(), or remove "
                "the hook. Ignore this if a backward pass of these forward passes is still to come, as for a "
                "checkpoint of a method of self"
            )
    alive.add(replica)


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _remedy(module: nn.Module, name: str, before: Any, value: Any, is_known: bool) -> str | None:
    """Return what to do if a member of a module that was bound anew is lost, or None if it is not.

    Of attributes, a number or a string is lost that has replaced another one, and a 0-dimensional tensor in a graph
    that has replaced what the attribute had before: a training loop reads such a penalty. All other tensors are
    activations, and what was None or missing may be a cache, which is filled in each forward pass. The mode may be set
    for the time that a forward runs.
    """
    if name in module._modules:
        return MAKE_BEFORE if value is not None and not is_known and value.state_dict() else None
    if name in module._parameters:
        return MAKE_BEFORE if value is not None and before is None and not is_known else None
    if name in module._buffers:
        if before is not None:
            return CHANGE_IN_PLACE
        return MAKE_BEFORE if name in module.state_dict() else None  # Other buffers may be caches, too.
    if type(value) in _KINDS and type(before) in _KINDS:
        both_nan = value != value and before != before
        return CHANGE_IN_PLACE if value != before and not both_nan and name != "training" else None
    return RETURN if before is not None and _is_in_graph(value) and value.dim() == 0 else None


def _has_other_data(parameter: Any, data: Tensor) -> bool:
    """Return whether other numbers were assigned to the `data` of a parameter, not only other memory or dtype."""
    if data.layout != torch.strided or parameter.dtype != data.dtype:
        return False
    return parameter.data_ptr() != data.data_ptr() and not torch.equal(parameter, data)


def _is_in_graph(value: object) -> bool:
    """Return whether a value is a tensor that a node of autograd has made."""
    if not issubclass(type(value), Tensor):
        return False
    try:
        return value.grad_fn is not None  # type: ignore[attr-defined]
    except RuntimeError:  # of one of the views of `unbind` or `split` whose base was changed in place
        return True
