"""Warnings of what `forward` sets or registers, and what ends with the replica; in the first forward passes."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..messages import warn_once
from ..torch_private import HOOKS
from .bound import bound_on, is_in_graph

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


class Watched(NamedTuple):
    """A module of a replica, and what it had before the replica ran."""

    prefix: str  # of the names of its attributes in the model
    module: nn.Module
    before: dict[str, Any]  # its attributes, and its buffers
    parameters: dict[str, tuple[Tensor, Tensor]]  # with a tensor of the same data
    belongings: set[int]  # the identities of all modules and parameters of the replica


def begin_watching(wrapper: nn.Module, replica: nn.Module) -> list[Watched] | None:
    """Count a look at a wrapper, and return the modules of a replica that has not run yet.

    None, uncounted, after the first training steps of a wrapper, and for a module that is no replica.
    """
    looks = _looks.get(wrapper, 0)
    if looks >= LOOKS or not replica.training or not vars(replica).get("_is_replica"):
        return None
    _looks[wrapper] = looks + 1
    belongings = {id(item) for item in [*replica.modules(), *replica.parameters()]}
    watched = []
    for name, module in replica.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which makes new objects of its buffers at each look
            parameters = {
                key: (parameter, parameter.detach())
                for key, parameter in module._parameters.items()
                if parameter is not None and parameter.layout == torch.strided
            }
            before = {**vars(module), "_buffers": dict(module._buffers)}
            watched.append(Watched(f"{name}." if name else "", module, before, parameters, belongings))
    return watched


def warn_of_lost_state(replica: nn.Module, state: Sequence[Watched]) -> None:
    """Warn of what a replica that has run has bound anew, and what the model would have kept on one device."""
    remedies: dict[str, None] = {}
    lost = []
    for watched in state:
        for attribute, remedy in [*_lost_attributes(watched), *_lost_members(watched)]:
            lost.append(watched.prefix + attribute)
            remedies[remedy] = None
    if lost:
        names = " and ".join(filter(None, [", ".join(lost[:-1]), lost[-1]]))
        warn_once(
            f"forward() of {type(replica).__name__} set {names} of replica 0, which ends with the forward pass: the "
            f"model keeps its former values. {'. '.join(remedies)}. Ignore this if each forward pass sets it anew"
        )


def _lost_attributes(watched: Watched) -> Iterator[tuple[str, str]]:
    """Yield the names of attributes that were bound anew, and what to do.

    A number or a string, in place of another one; or a 0-dimensional tensor in a graph, in place of what the attribute
    had before: a training loop reads such a penalty. All other tensors are activations, and what was None or missing
    may be a cache, which is filled in each forward pass. The mode may be set for the time that a forward runs.
    """
    for attribute, value in bound_on(watched.module, watched.before).items():
        before = watched.before.get(attribute)
        if type(value) in _KINDS and type(before) in _KINDS:
            both_nan = value != value and before != before
            if value != before and not both_nan and attribute != "training":
                yield attribute, CHANGE_IN_PLACE
        elif issubclass(type(value), Tensor) and value.dim() == 0 and is_in_graph(value) and before is not None:
            yield attribute, RETURN


def _lost_members(watched: Watched) -> Iterator[tuple[str, str]]:
    """Yield the names of buffers, parameters and modules that were bound anew or made, and what to do."""
    module = watched.module
    for name, buffer in module._buffers.items():
        before = watched.before["_buffers"].get(name)
        is_cache = before is None and name in module._non_persistent_buffers_set
        if buffer is not before and not is_cache:
            yield name, MAKE_BEFORE if before is None else CHANGE_IN_PLACE
    for name, parameter in module._parameters.items():
        if name in watched.parameters:
            if _has_other_data(parameter, *watched.parameters[name]):
                yield name, CHANGE_IN_PLACE
        elif parameter is not None and id(parameter) not in watched.belongings:
            yield name, MAKE_BEFORE
    for name, child in module._modules.items():
        if child is not None and id(child) not in watched.belongings and child.state_dict():
            yield name, MAKE_BEFORE


def _has_other_data(present: Tensor | None, parameter: Tensor, before: Tensor) -> bool:
    """Return whether other numbers were assigned to the `data` of a parameter, not only other memory or dtype."""
    if present is not parameter or parameter.dtype != before.dtype or parameter.data_ptr() == before.data_ptr():
        return False
    return not torch.equal(parameter, before)


def warn_of_lost_hooks(replicas: Sequence[nn.Module]) -> None:
    """Warn of modules on which some replicas have registered hooks in their run, and others have not."""
    modules = zip(*[replica.modules() for replica in replicas], strict=False)
    lost = []
    for (name, _), copies in zip(replicas[0].named_modules(), modules, strict=False):
        if len({_number_of_hooks(copy) for copy in copies}) > 1:
            lost.append(name or "the model itself")
    if lost:
        warn_once(
            f"forward() of {type(replicas[0]).__name__} registered hooks on {', '.join(lost)} in some replicas and not "
            "in others. A hook ends with its replica, so what all replicas share, such as a list of handles, must not "
            "decide whether to register one: keep the handle in an attribute of self, or register outside forward()"
        )


def _number_of_hooks(module: nn.Module) -> int:
    return sum([len(vars(module).get(name, ())) for name in HOOKS])
