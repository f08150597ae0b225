"""Warnings of what `forward` sets or registers, and what ends with the replica; in the first forward passes."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..messages import warn_once

__all__: list[str] = []

LOOKS = 3  # Arbitrary: what a model counts or averages, it does in each training step.
_KINDS = frozenset({bool, int, float, complex, str})
CHANGE_IN_PLACE = (
    "Make numbers and averages buffers that are changed in place, as in self.step.add_(1), or set it outside forward"
)
MAKE_BEFORE = "Make modules, parameters and buffers in __init__()"
RETURN = "Return a penalty, so that the training loop gets it from all replicas"

# How many forward passes were looked at, by wrapper. Not an attribute: a copy or pickle of a wrapper begins at zero.
_looks: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()


# A module of a replica, the prefix of its attributes' names in the model, and what it had before the replica ran: its
# attributes, parameters, buffers and submodules, and the data of its parameters.
Watched = tuple[nn.Module, str, dict[str, Any], dict[str, Tensor]]


def begin_watching(wrapper: nn.Module, replica: nn.Module) -> list[Watched] | None:
    """Count a look at a wrapper, and return the modules of a replica that has not run yet.

    None, uncounted, after the first training steps of a wrapper, and for a module that is no replica.
    """
    looks = _looks.get(wrapper, 0)
    if looks >= LOOKS or not replica.training or not vars(replica).get("_is_replica"):
        return None
    _looks[wrapper] = looks + 1
    watched: list[Watched] = []
    for name, module in replica.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which makes new objects of its buffers at each look
            data = {key: tensor.detach() for key, tensor in module._parameters.items() if tensor is not None}
            watched.append((module, f"{name}." if name else "", _members(module), data))
    return watched


def _members(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._parameters, **module._buffers, **module._modules}


def warn_of_lost_state(replica: nn.Module, state: Sequence[Watched]) -> None:
    """Warn of what a replica that has run has bound anew, and what the model would have kept on one device."""
    known = {id(replica)} | {id(member) for _, _, members, _ in state for member in members.values()}
    remedies: dict[str, str] = {}
    for module, prefix, members, data in state:
        for name, value in _members(module).items():
            before, remedy = members.get(name), None
            if value is not before:
                remedy = _remedy(module, name, before, value, id(value) in known)
            elif name in data and _has_other_data(value, data[name]):
                remedy = CHANGE_IN_PLACE
            if remedy is not None:
                remedies[prefix + name] = remedy
    if remedies:
        *others, last = remedies
        names = f"{', '.join(others)} and {last}" if others else last
        warn_once(
            f"forward() of {type(replica).__name__} set {names} of replica 0, which ends with the forward pass: the "
            f"model keeps its former values. {'. '.join(dict.fromkeys(remedies.values()))}. Ignore this if each "
            "forward pass sets it anew"
        )


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
