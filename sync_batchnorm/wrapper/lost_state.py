"""Warn if `forward` sets attributes that are lost with the replica, or if hooks use the model in place of the replica.

`self` in `forward` is a replica. An attribute set on the replica is lost when the replica ends. The variables of a hook
refer to the model instead. So a hook and `forward` may use two different objects for one attribute: the hook sets it on
the model, but `forward` reads it from the replica; or `forward` sets it on the replica, but the hook reads it from the
model.
"""

import dis
import inspect
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..messages import warn_once
from ..torch_private import HOOKS, names_of_modules

__all__: list[str] = []

# Attributes are checked in this number of forward passes of a wrapper; training mode and eval mode are counted
# separately. A few passes are enough: a model that counts or averages something does so in each training step. The
# number is arbitrary.
LOOKS = 3
_KINDS = frozenset({bool, int, float, complex, str})
CHANGE_IN_PLACE = "Change buffers in place, as in self.step.add_(1), or set it outside forward()"
MAKE_BEFORE = "Make modules, parameters and buffers in __init__()"
RETURN = "Return a penalty, so that the training loop gets it from all replicas"
REGISTER = "Register a forward hook in forward(), where self is the replica, and remove it there"
_LOST = "unless each forward pass sets it before it reads it, state is lost: forward() of {model} set {names} of "
_LOST += "replica 0, which ends with the forward pass, while the model keeps its former values. {details}"
_SET = "while replicas of {model} ran, something set {names} of the model itself, through a hook or closure that "
_SET += (
    "refers to the model: each replica sets it, and a forward() that reads it from self gets an older value, or none. "
)
_SET += f"{REGISTER}, or return its results"
_READ = "hooks of {model} ({details}) read {names} of the model itself, while forward() sets that of the replica: they "
_READ += f"get an older value, or none. {REGISTER}"

# For each wrapper, a counter with two kinds of keys. The keys True and False count the forward passes that were checked
# in training mode and in eval mode. A key (text of a warning, name of an attribute) counts how often this warning named
# the attribute. The counter is not an attribute of the wrapper, so a copy or pickle of a wrapper begins at zero.
_looks: "WeakKeyDictionary[nn.Module, Counter[Any]]" = WeakKeyDictionary()

# For each wrapped module, a counter. It maps the name of each parameter to the number of forward passes that changed
# the parameter in place.
_changes: "WeakKeyDictionary[nn.Module, Counter[str]]" = WeakKeyDictionary()

# The state of a model at one moment. For each module: (the prefix of names in this module, such as "layer1.bn."; its
# attributes, parameters, buffers and submodules by name; the data of its parameters by name).
Snapshot = dict[nn.Module, tuple[str, dict[str, Any], dict[str, Tensor]]]
# A dict of the attributes to warn about. It maps the name of an attribute to a pair: (the text that shows the
# attribute; the remedy, or the name of the hook that reads the attribute).
Found = dict[str, tuple[str, str]]


class Look:
    """A check of one forward pass: it compares the attributes of replica 0 and of the model before and after the pass.

    Only the first forward passes of a wrapper are checked: the first in training mode, and the first in eval mode. A
    module that runs without replicas is not checked.
    """

    def __init__(self, wrapper: nn.Module, original: nn.Module, replica: nn.Module) -> None:
        self._looks, self._original, self._replica = _looks.setdefault(wrapper, Counter()), original, replica
        self._mode = replica.training
        is_due = vars(replica).get("_is_replica") and self._looks[self._mode] < LOOKS
        self._of_replica = _snapshot(replica) if is_due else {}
        # If the user made the replicas, the original model is unknown, and `original` is the replica itself.
        self._of_model = _snapshot(original) if is_due and original is not replica else {}

    def warn(self) -> None:
        """Warn, after a forward pass, about attributes that were set on a replica, and about hooks that use the
        original model.

        A wrapper warns about each attribute once, and only in its first forward passes, which this method counts.
        """
        self._looks[self._mode] += bool(self._of_replica)
        for text in self._texts(has_ended=True):
            warn_once(text)

    def note(self) -> str:
        """Return a text about hooks that set or read attributes of the model, for the note on an error."""
        # After a failure, replicas or devices may be in a broken state, and any access to them may raise another error.
        with suppress(Exception):
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
        """Yield (text of the warning, attributes to name in it) for each of the two warnings about hooks of the model.

        The first warning names attributes that were set on the model while replicas ran. The second warning names
        attributes that a hook reads from the model, although `forward` set another value on the replica.
        """
        on_model, on_replica = _reassigned(self._of_model), _reassigned(self._of_replica)
        changed = [(name, old) for name, (_, _, old, new) in on_model.items() if not _are_equal(old, new)]
        # Skip an attribute that was missing or None before this forward pass: it may be a cache, which is filled only
        # once. Any other attribute changes again in a later forward pass, and is named then.
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
        # Leave out scripted modules: each access to one of their buffers returns a new object, as if the buffer had
        # been reassigned.
        if not isinstance(module, torch.jit.ScriptModule):
            data = {k: p.detach() for k, p in module._parameters.items() if p is not None and p.layout == torch.strided}
            snapshot[module] = f"{name}." if name else "", _members(module), data
    return snapshot


def _members(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._parameters, **module._buffers, **module._modules}


def _reassigned(state: Snapshot) -> dict[str, tuple[nn.Module, str, Any, Any]]:
    """Return the attributes of a model that were reassigned since a snapshot of the model.

    The result maps full names, such as "layer1.bn.count", to (module, attribute name, old value, new value). The old
    value is None if the attribute is new. Parameters, buffers and submodules count as attributes, too.
    """
    return {
        prefix + key: (module, key, old.get(key), new)
        for module, (prefix, old, _) in state.items()
        for key, new in _members(module).items()
        if old.get(key) is not new
    }


def _are_equal(before: Any, value: Any) -> bool:
    """Return whether two values of an attribute are equal. NaN is equal to NaN.

    A new `nn.Parameter` is never equal to the old one, even with equal elements, because an optimizer identifies a
    parameter by its object. Two values are not equal if their comparison raises an error.
    """
    with suppress(Exception):
        if isinstance(before, Tensor):
            return torch.equal(before, value) and not isinstance(before, nn.Parameter)
        return bool(before == value or (before != before and value != value))
    return False


def _lost(replica: nn.Module, state: Snapshot) -> Found:
    """Return the attributes that the model loses because `forward` set them on a replica.

    Parameters, buffers and submodules count as attributes. `state` is the snapshot of the replica before `forward`.
    """
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
            # Do not warn if only the memory of the parameter's data was replaced, and the values are the same.
            if is_replaced and new.dtype == old.dtype and not torch.equal(new, old):
                lost[prefix + key] = prefix + key, CHANGE_IN_PLACE
    return lost


def _remedy(module: nn.Module, name: str, before: Any, value: Any, is_known: bool) -> str | None:
    """Return a remedy if the model loses the new value of an attribute that `forward` set on a replica, otherwise None.

    A number or a string in a plain attribute counts as lost only if it replaced another number or string. The attribute
    `training` never counts, because `forward` may switch it for a while.

    A training loop may read a tensor from a plain attribute, for example a penalty that is added to the loss. So a
    tensor is lost if it is 0-dimensional, requires a gradient, and replaced another value. Any other tensor counts as
    an activation. If a plain attribute was None or missing before, it counts as a cache, which each forward pass fills.
    """
    is_new = value is not None and not is_known
    if name in module._modules:
        return MAKE_BEFORE if is_new and value.state_dict() else None
    if name in module._parameters:
        return MAKE_BEFORE if is_new and before is None else None
    if name in module._buffers:  # A new buffer counts as a cache, not as lost state, unless the state dict contains it.
        return CHANGE_IN_PLACE if before is not None else MAKE_BEFORE if name in module.state_dict() else None
    if type(value) in _KINDS and type(before) in _KINDS:
        return CHANGE_IN_PLACE if name != "training" and not _are_equal(before, value) else None
    is_penalty = isinstance(value, Tensor) and value.requires_grad and value.dim() == 0
    return RETURN if before is not None and is_penalty else None


class ParameterChanges:
    """Find parameters that `forward` changes in place while replicas on one device share the memory of the parameters.

    Replicas on one device run one after another, so each replica repeats the change on the values that the replica
    before left. The repetition may be harmless: a second `clamp_` changes nothing, and the `max_norm` of an embedding
    may change other rows in each replica. The fault is certain only if one turn changes an element of the parameter,
    and a later turn changes the same element again.

    To find elements of a parameter that two replicas changed, copies of the parameter are made before and during a
    forward pass. This takes time. So it is done only for parameters that changed in an earlier forward pass, and in
    only a few forward passes.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [(name, p) for name, p in module.named_parameters() if not p.is_inference()]
        # Torch counts changes in place: `_version` of a tensor grows with every change of its memory.
        self._parameters = {name: (p, p._version) for name, p in parameters if p.layout == torch.strided}
        self._counts = _changes.setdefault(module, Counter())
        watched = [name for name in self._counts if self._counts[name] <= LOOKS and name in self._parameters]
        # Copies of each watched parameter: one from before the forward pass, and one from after the run of the first
        # replica that changed the parameter.
        self.watched = {name: [self._parameters[name][0].detach().clone()] for name in watched}

    def look(self) -> None:
        """If a watched parameter has changed since the forward pass began, and was not copied yet, copy it.

        This method is called each time another replica begins to run on the shared device.
        """
        for name, values in self.watched.items():
            parameter, version = self._parameters[name]
            if parameter._version != version and len(values) == 1:
                values.append(parameter.detach().clone())

    def warn(self, times: int) -> None:
        """Warn about parameters in which two replicas changed the same element. `times` is the number of replicas."""
        self._counts.update([name for name, (p, version) in self._parameters.items() if p._version != version])
        values, self.watched = self.watched, {}
        if names := [name for name, turns in values.items() if _is_repeated(self._parameters[name][0], *turns)]:
            warn_once(
                f"forward() modified parameters {names} in place; each of the {times} replicas, which share their "
                "memory, repeated the change; make it a buffer, or change it outside forward()"
            )


def _is_repeated(last: Tensor, before: Tensor, first: Tensor | None = None) -> bool:
    """Return whether two replicas on the same device have changed the same element of a parameter in place.

    `before`, `first` and `last` are values of the parameter: before the forward pass, after the run of the first
    replica that changed it, and at the end. If `first` and `last` differ only by rounding, they count as equal.
    """
    if first is None:  # No replica, or only the last replica, changed the parameter.
        return False
    # If several replicas use the same row of an embedding with `max_norm`, each replica normalizes the row again.
    # Rounding then changes the elements of the row by less than this relative difference.
    rounding = 8 * torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    again = ~torch.isclose(first, last, rtol=rounding, atol=0.0, equal_nan=True)
    return bool((again & (before != first)).any())


# The hooks of a model. A hook that is registered on the model runs in each replica. But the variables of the hook (its
# `self`, its closure and its globals) still refer to the model, not to the replica.

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
# To find the attributes that a hook reads, its bytecode is searched. The search ends at the first jump, and at the
# first instruction whose name begins with one of these strings.
_ENDS = ("RETURN_", "RAISE_", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")


def hooks_of(model: nn.Module) -> Iterator[tuple[str, FunctionType, dict[str, Any]]]:
    """Yield (module name, function, variables) for each hook of a model. The dict of variables maps names to values.

    Only hooks written in Python are found. Arguments and local variables of a hook are None in the dict, because they
    have no value before the hook is called; only `self` of a bound method has its value.
    """
    kinds = [kind for kind in HOOKS if torch.is_grad_enabled() or "backward" not in kind]
    for module, name in names_of_modules(model).items():
        for hook in [hook for kind in kinds for hook in vars(module).get(kind, {}).values()]:
            method = hook.func if isinstance(hook, partial) else hook
            function, owner = inspect.unwrap(getattr(method, "__func__", method)), getattr(method, "__self__", None)
            # Skip a hook if it is not written in Python, or if a variable of its closure is not set yet.
            with suppress(TypeError, ValueError):
                outside, code = inspect.getclosurevars(function), function.__code__
                local = {**dict.fromkeys((*code.co_varnames, *code.co_cellvars)), **outside.nonlocals}
                yield name, function, {**outside.globals, **local, **dict.fromkeys(code.co_varnames[:1], owner)}


def reads_of(function: FunctionType, variables: Mapping[str, Any]) -> set[tuple[nn.Module, str]]:
    """Return (module, attribute name) for each attribute that a hook certainly reads in every call.

    The search begins at modules that are values of the hook's variables. It follows only reads that certainly happen,
    at the start of the hook's code. So it ends at the first branch, and at the first assignment to an attribute or an
    outer variable. It also ends at the first use of a module's method, because the method could set attributes.
    """
    reads, owner = set[tuple[nn.Module, str]](), cast(Any, None)
    for step in dis.get_instructions(function):
        name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        is_read = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(owner, nn.Module)
        ends = step.opcode in _JUMPS or step.opname.startswith(_ENDS) or name == "setattr"
        if ends or (is_read and hasattr(type(owner), name)):
            break
        reads |= {(owner, name)} if is_read else set()
        is_variable = "LOAD_FAST" in step.opname or step.opname in ("LOAD_GLOBAL", "LOAD_DEREF")
        owner = owner._modules.get(name) if is_read else variables.get(name) if is_variable else None
    return reads
