"""Warnings of what `forward` sets and loses with its replica, and of what hooks set on the model, or read from it."""

import reprlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..messages import warn_once
from .hooks import hooks_of, reads_of

__all__: list[str] = []

LOOKS = 3  # Arbitrary: what a model counts or averages, it does in each training step.
_KINDS = frozenset({bool, int, float, complex, str})
CHANGE_IN_PLACE = "Change buffers in place, as in self.step.add_(1), or set it outside forward()"
MAKE_BEFORE = "Make modules, parameters and buffers in __init__()"
RETURN = "Return a penalty, so that the training loop gets it from all replicas"
REGISTER = "Register a forward hook in forward(), where self is the replica, and remove it there"
_LOST = "unless each forward pass sets it before it reads it, state is lost: forward() of {model} set {names} of "
_LOST += "replica 0, which ends with the forward pass, while the model keeps its former values. {details}"
_SET = "while replicas of {model} ran, something set {names} of the model itself, as a hook or closure does that "
_SET += (
    "refers to the model: each replica sets it, and a forward() that reads it from self gets an older value, or none. "
)
_SET += f"{REGISTER}, or return what it collects"
_READ = "hooks of {model} ({details}) read {names} of the model itself, while forward() sets that of the replica: they "
_READ += f"get an older value, or none. {REGISTER}"

# By wrapper, how many forward passes were looked at in training mode and in eval mode, and how often each attribute was
# named in each kind of warning. Not an attribute: a copy or pickle of a wrapper begins at zero.
_looks: "WeakKeyDictionary[nn.Module, Counter[Any]]" = WeakKeyDictionary()

# How many forward passes have changed a parameter in place, by module and by name.
_changes: "WeakKeyDictionary[nn.Module, Counter[str]]" = WeakKeyDictionary()

# The modules of a model, each with the prefix of its attributes' names in the model; its attributes, parameters,
# buffers and submodules at one moment; and the data of its parameters.
Snapshot = dict[nn.Module, tuple[str, dict[str, Any], dict[str, Tensor]]]
Found = dict[str, tuple[str, str]]  # by name of an attribute: how a text shows it, and a remedy or a hook


class Look:
    """Replica 0 and the model before a forward pass, to tell afterwards which attributes have changed.

    Nothing is looked at after the first forward passes of a wrapper in the mode of the replica, and for a module that
    is no replica.
    """

    def __init__(self, wrapper: nn.Module, original: nn.Module, replica: nn.Module) -> None:
        self._looks, self._original, self._replica = _looks.setdefault(wrapper, Counter()), original, replica
        self._mode = replica.training
        is_due = vars(replica).get("_is_replica") and self._looks[self._mode] < LOOKS
        self._of_replica = _snapshot(replica) if is_due else {}
        # Replicas of somebody else's are their own originals.
        self._of_model = _snapshot(original) if is_due and original is not replica else {}

    def warn(self) -> None:
        """Count a look, and warn of each attribute once."""
        self._looks[self._mode] += bool(self._of_replica)
        for text in self._texts(has_ended=True):
            warn_once(text)

    def note(self) -> str:
        """Return what the note of an error says of hooks of the model, after a forward pass that has failed."""
        with suppress(Exception):  # whatever state replicas and devices are in
            return " ".join([f"In this forward pass, {text}." for text in self._texts(has_ended=False)])
        return ""

    def _texts(self, has_ended: bool) -> Iterator[str]:
        lost = _lost(self._replica, self._of_replica) if self._mode and has_ended else {}
        for form, found in ((_LOST, lost), *self._of_hooks(has_ended)):
            new = {name: it for name, it in found.items() if not (has_ended and self._looks[form, name])}
            if new:
                self._looks.update([(form, name) for name in new if has_ended])
                names = ", ".join([shown for shown, _ in new.values()])
                details = "; ".join(dict.fromkeys([detail for _, detail in new.values()]))
                yield form.format(model=type(self._replica).__name__, names=names, details=details)

    def _of_hooks(self, has_ended: bool) -> Iterator[tuple[str, Found]]:
        """Yield what was set on the model, and what hooks read from it while the replica has another value."""
        on_model, on_replica = _reassigned(self._of_model), _reassigned(self._of_replica)
        changed = [(name, old) for name, (_, _, old, new) in on_model.items() if not _are_equal(old, new)]
        # What was missing or None before may be a cache. A later pass tells.
        yield _SET, {name: (name, "") for name, old in changed if old is not None or not has_ended}
        found: Found = {}
        for _, hook, variables in hooks_of(self._original) if on_replica else ():
            for module, key in reads_of(hook, variables):
                name = self._of_model[module][0] + key if module in self._of_model else ""
                if name in on_replica and name not in on_model and not _are_equal(*on_replica[name][2:]):
                    found[name] = name, hook.__qualname__
        yield _READ, found


def _snapshot(root: nn.Module) -> Snapshot:
    snapshot: Snapshot = {}
    for name, module in root.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which makes new objects of its buffers at each look
            data = {k: p.detach() for k, p in module._parameters.items() if p is not None and p.layout == torch.strided}
            snapshot[module] = f"{name}." if name else "", _members(module), data
    return snapshot


def _members(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._parameters, **module._buffers, **module._modules}


def _reassigned(state: Snapshot) -> dict[str, tuple[nn.Module, str, Any, Any]]:
    """Return by name each member that is reassigned: the module, the attribute, the old value or None, the new one."""
    return {
        prefix + key: (module, key, old.get(key), new)
        for module, (prefix, old, _) in state.items()
        for key, new in _members(module).items()
        if old.get(key) is not new
    }


def _are_equal(before: Any, value: Any) -> bool:
    """Return whether two values are equal, whatever objects they are. NaN is equal to NaN."""
    with suppress(Exception):  # of values that cannot be compared
        if isinstance(before, Tensor):  # An optimizer knows a parameter by its identity.
            return torch.equal(before, value) and not isinstance(before, nn.Parameter)
        return bool(before == value or (before != before and value != value))
    return False


def _lost(replica: nn.Module, state: Snapshot) -> Found:
    """Return the members that a replica has reassigned, and that the model would have kept on one device."""
    known = {id(replica)} | {id(member) for _, members, _ in state.values() for member in members.values()}
    lost = Found()
    for name, (module, key, before, value) in _reassigned(state).items():
        if remedy := _remedy(module, key, before, value, id(value) in known):
            numbers = f" (from {reprlib.repr(before)} to {reprlib.repr(value)})" if type(value) in _KINDS else ""
            lost[name] = name + numbers, remedy
    for module, (prefix, members, data) in state.items():
        for key, old in data.items():
            new: Any = members[key]
            is_replaced = new.data_ptr() != old.data_ptr() and module._parameters.get(key) is new
            if is_replaced and new.dtype == old.dtype and not torch.equal(new, old):  # The same numbers may move.
                lost[prefix + key] = prefix + key, CHANGE_IN_PLACE
    return lost


def _remedy(module: nn.Module, name: str, before: Any, value: Any, is_known: bool) -> str | None:
    """Return what to do if a member of a module that was reassigned is lost, or None if it is not.

    Of attributes, a number or a string is lost that has replaced another one, and a 0-dimensional tensor that requires
    a gradient and has replaced any value: a training loop reads such a penalty. All other tensors are activations, and
    what was None or missing may be a cache, which is filled in each forward pass. The mode may be set for the time that
    a forward runs.
    """
    is_new = value is not None and not is_known
    if name in module._modules:
        return MAKE_BEFORE if is_new and value.state_dict() else None
    if name in module._parameters:
        return MAKE_BEFORE if is_new and before is None else None
    if name in module._buffers:  # Others than those in the state may be caches, too.
        return CHANGE_IN_PLACE if before is not None else MAKE_BEFORE if name in module.state_dict() else None
    if type(value) in _KINDS and type(before) in _KINDS:
        return CHANGE_IN_PLACE if name != "training" and not _are_equal(before, value) else None
    is_penalty = isinstance(value, Tensor) and value.requires_grad and value.dim() == 0
    return RETURN if before is not None and is_penalty else None


class ParameterChanges:
    """The changes in place of parameters in a forward pass whose replicas share their memory.

    Replicas may all change a parameter in the same way, as `clamp_` does, so that to repeat it changes nothing, or each
    other rows, as `max_norm` does. An element that one turn has changed and a later one changes again is certain. A
    parameter is copied after the first forward pass that has changed it, until a few more have.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [(name, p) for name, p in module.named_parameters() if not p.is_inference()]
        # The version of a tensor grows with every change in place of its memory.
        self._parameters = {name: (p, p._version) for name, p in parameters if p.layout == torch.strided}
        self._counts = _changes.setdefault(module, Counter())
        watched = [name for name in self._counts if self._counts[name] <= LOOKS and name in self._parameters]
        # Copies of each watched parameter: before the pass, and after the first turn that changes it.
        self.watched = {name: [self._parameters[name][0].detach().clone()] for name in watched}

    def look(self) -> None:
        """Copy parameters that have just changed in a turn, the first turn that changes them."""
        for name, values in self.watched.items():
            parameter, version = self._parameters[name]
            if parameter._version != version and len(values) == 1:
                values.append(parameter.detach().clone())

    def warn(self, times: int) -> None:
        """Warn of parameters with elements that two turns have changed."""
        self._counts.update([name for name, (p, version) in self._parameters.items() if p._version != version])
        values, self.watched = self.watched, {}
        if names := [name for name, turns in values.items() if _is_repeated(self._parameters[name][0], *turns)]:
            warn_once(
                f"forward() modified parameters {names} in place; each of the {times} replicas, which share their "
                "memory, repeated the change; make it a buffer, or change it outside forward()"
            )


def _is_repeated(last: Tensor, before: Tensor, first: Tensor | None = None) -> bool:
    """Return whether elements that the first turn has changed differ at last by more than rounding."""
    if first is None:  # Only the last turn has changed it, if any.
        return False
    rounding = 8 * torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0  # of a second normalization
    again = ~torch.isclose(first, last, rtol=rounding, atol=0.0, equal_nan=True)
    return bool((again & (before != first)).any())
