"""Warnings of what `forward` sets and loses with its replica, and of what hooks set on the model, or read from it."""

import reprlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..messages import warn_once
from .hooks import hooks_of

__all__: list[str] = []

LOOKS = 3  # Arbitrary: what a model counts or averages, it does in each training step.
_KINDS = frozenset({bool, int, float, complex, str})
CHANGE_IN_PLACE = (
    "Make numbers and averages buffers that are changed in place, as in self.step.add_(1), or set it outside forward"
)
MAKE_BEFORE = "Make modules, parameters and buffers in __init__()"
RETURN = "Return a penalty, so that the training loop gets it from all replicas"
REGISTER = "Register a forward hook in forward(), where self is the replica, and remove it there"

# By wrapper, how many forward passes were looked at in training mode and in eval mode, and how often each attribute was
# named in each kind of warning. Not an attribute: a copy or pickle of a wrapper begins at zero.
_looks: "WeakKeyDictionary[nn.Module, Counter[Any]]" = WeakKeyDictionary()

# How many forward passes have changed a parameter in place, by module and by name.
_changes: "WeakKeyDictionary[nn.Module, Counter[str]]" = WeakKeyDictionary()

# Modules, each with the prefix of its attributes' names in the model, and with what it had before the replicas ran: its
# attributes, parameters, buffers and submodules, and the data of its parameters.
Watched = Sequence[tuple[nn.Module, str, dict[str, Any], dict[str, Tensor]]]


class Look:
    """Replica 0 and the model before a forward pass, to tell afterwards which attributes have changed.

    Nothing is looked at after the first forward passes of a wrapper in the mode of the replica, and for a module that
    is no replica.
    """

    def __init__(self, wrapper: nn.Module, original: nn.Module, replica: nn.Module) -> None:
        self._looks, self._original, self._replica = _looks.setdefault(wrapper, Counter()), original, replica
        self._mode = replica.training
        is_due = vars(replica).get("_is_replica") and self._looks[self._mode] < LOOKS
        self._of_replica: Watched = _watched(replica) if is_due else ()
        # Replicas of somebody else's are their own originals.
        self._of_model: Watched = _watched(original) if is_due and original is not replica else ()

    def warn(self) -> None:
        """Count a look, and warn of each attribute once."""
        self._looks[self._mode] += bool(self._of_replica)
        lost = _lost_state(self._replica, self._of_replica) if self._mode else {}
        # What was missing or None before may be a cache. A later pass tells.
        set_on_model = {name: values for name, values in _changed(self._of_model).items() if values[0] is not None}
        for found, text_of in ((lost, _text_of_lost), (set_on_model, _text_of_set), (self._reads(), _text_of_reads)):
            new = {name: it for name, it in found.items() if not self._looks[text_of, name]}
            self._looks.update((text_of, name) for name in new)
            if new:
                warn_once(text_of(type(self._replica).__name__, new))

    def note(self) -> str:
        """Return what the note of an error says of hooks of the model, after a forward pass that has failed."""
        with suppress(Exception):  # whatever state replicas and devices are in
            pairs = (_changed(self._of_model), _text_of_set), (self._reads(), _text_of_reads)
            texts = [text_of(type(self._replica).__name__, found) for found, text_of in pairs if found]
            return " ".join([f"In this forward pass, {text}." for text in texts])
        return ""

    def _reads(self) -> dict[str, Any]:
        """Return the attributes of the model that hooks read while the replica has other values, each with a hook."""
        prefixes = {module: prefix for module, prefix, *_ in self._of_model}
        hooks = [(hook, reads) for _, hook, reads, _ in hooks_of(self._original)] if prefixes else []
        read = {prefixes[module] + name: hook for hook, reads in hooks for module, name in reads if module in prefixes}
        set_on_model = {prefix + name for _, prefix, name, *_ in _reassigned(self._of_model)}
        return {name: read[name] for name in _changed(self._of_replica, read.keys() - set_on_model)}


def _watched(root: nn.Module) -> Watched:
    watched = []
    for name, module in root.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which makes new objects of its buffers at each look
            data = {key: tensor.detach() for key, tensor in module._parameters.items() if tensor is not None}
            watched.append((module, f"{name}." if name else "", _members(module), data))
    return watched


def _reassigned(state: Watched) -> Iterator[tuple[nn.Module, str, str, Any, Any]]:
    """Yield for each member that is bound anew: the module, the prefix, the name, what was there or None, what is."""
    for module, prefix, members, _ in state:
        for name, value in _members(module).items():
            if name not in members or members[name] is not value:
                yield module, prefix, name, members.get(name), value


def _members(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._parameters, **module._buffers, **module._modules}


def _changed(state: Watched, among: Collection[str] | None = None) -> dict[str, tuple[Any, Any]]:
    """Return for each member, or each of some, that is bound to another value: what was there or None, what is."""
    found = {prefix + name: (before, value) for _, prefix, name, before, value in _reassigned(state)}
    names = found if among is None else [name for name in found if name in among]
    return {name: found[name] for name in names if not _are_equal(*found[name])}


def _lost_state(replica: nn.Module, state: Watched) -> dict[str, tuple[str, str]]:
    """Return what a replica that has run has bound anew, and what the model would have kept on one device.

    That is, by name, the remedy, and from which number to which.
    """
    known = {id(replica)} | {id(member) for _, _, members, _ in state for member in members.values()}
    lost: dict[str, tuple[str, str]] = {}
    for module, prefix, name, before, value in _reassigned(state):
        if remedy := _remedy(module, name, before, value, id(value) in known):
            numbers = f" (from {reprlib.repr(before)} to {reprlib.repr(value)})" if type(value) in _KINDS else ""
            lost[prefix + name] = remedy, numbers
    for module, prefix, members, data in state:
        for name, tensor in data.items():
            if module._parameters.get(name) is members[name] and _has_other_data(members[name], tensor):
                lost[prefix + name] = CHANGE_IN_PLACE, ""
    return lost


def _text_of_lost(model: str, lost: Mapping[str, tuple[str, str]]) -> str:
    remedies = ". ".join(dict.fromkeys([remedy for remedy, _ in lost.values()]))
    return (
        f"unless each forward pass sets it before it reads it, state is lost: forward() of {model} set "
        f"{_listed([name + numbers for name, (_, numbers) in lost.items()])} of replica 0, which ends with the forward "
        f"pass, while the model keeps its former values. {remedies}"
    )


def _text_of_set(model: str, names: Collection[str]) -> str:
    return (
        f"while replicas of {model} ran, something set {_listed(names)} of the model itself, as a hook or closure does "
        "that refers to the model: each replica sets it, and a forward() that reads it from self gets an older value, "
        f"or none. {REGISTER}, or return what it collects"
    )


def _text_of_reads(model: str, hooks: Mapping[str, Any]) -> str:
    hook = next(iter(hooks.values()))
    return (
        f"hooks of {model}, such as {getattr(hook, '__qualname__', hook)}, read {_listed(hooks)} of the model itself, "
        f"while forward() sets that of the replica: they get an older value, or none. {REGISTER}"
    )


def _are_equal(before: Any, value: Any) -> bool:
    """Return whether two values are equal, whatever objects they are. NaN is equal to NaN."""
    if before is value:
        return True
    with suppress(Exception):  # of values that cannot be compared
        if isinstance(before, Tensor):  # An optimizer knows a parameter by its identity.
            return torch.equal(before, value) and not isinstance(before, nn.Parameter)
        return bool(before == value or (before != before and value != value))
    return False


def _listed(names: Collection[str]) -> str:
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
        return CHANGE_IN_PLACE if name != "training" and not _are_equal(before, value) else None
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


class ParameterChanges:
    """The changes in place of parameters in a forward pass whose replicas share their memory.

    Replicas may all change a parameter in the same way, as `clamp_` does, so that to repeat it changes nothing. To know
    that, all parameters are watched in the first forward pass of a module. Later, only those are that have changed
    in an earlier one, a few times.
    """

    def __init__(self, module: nn.Module) -> None:
        # The version of a tensor grows with every change in place of its memory.
        self._parameters = [(name, p, p._version) for name, p in module.named_parameters() if not p.is_inference()]
        is_first, self._counts = module not in _changes, _changes.setdefault(module, Counter())
        watched = [it for it in self._parameters if is_first or 0 < self._counts[it[0]] <= LOOKS]
        # To repeat `max_norm` changes nothing, though each replica changes other rows.
        modules = [it for it in module.modules() if isinstance(it, (nn.Embedding, nn.EmbeddingBag))] if watched else []
        bounded = {id(child._parameters.get("weight")) for child in modules if child.max_norm is not None}
        self._watched = [it for it in watched if id(it[1]) not in bounded and it[1].layout == torch.strided]
        self._after_first: dict[str, Tensor] = {}

    def look(self) -> None:
        """Copy parameters that have just changed in a turn, the first turn that changes them."""
        for name, parameter, version in self._watched:
            if parameter._version != version and name not in self._after_first:
                self._after_first[name] = parameter.detach().clone()

    def warn(self, times: int) -> None:
        """Warn of parameters that have changed after the first turn that has changed them."""
        self._counts.update([name for name, parameter, version in self._parameters if parameter._version != version])
        first = self._after_first
        names = [name for name, p, _ in self._watched if name in first and _differs(first.pop(name), p)]
        if names:
            warn_once(
                f"forward() modified parameters {names} in place; each of the {times} replicas, which share their "
                "memory, repeated the change; make it a buffer, or change it outside forward()"
            )


def _differs(first: Tensor, parameter: Tensor) -> bool:
    """Return whether values differ by more than rounding, as that of a second normalization."""
    rounding = 8 * torch.finfo(parameter.dtype).eps if parameter.is_floating_point() else 0.0
    return not torch.allclose(first, parameter, rtol=rounding, atol=0.0, equal_nan=True)
