"""Where a difference begins, and why: a pass is recorded, and run once more with one thing as it is on one device."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .comparing import SCALARS, agree, gap
from .copies import copied
from .differences import Difference, differences, evidence, scalars
from .double import InDouble
from .explaining import (
    CHANGES,
    RANDOM,
    STATE,
    cause_of_failure,
    changed_parameter,
    text_of_hooks,
    where_and_why,
)
from .passes import IN_FORWARD, FailsInReplicas, Pass, Passes, Side
from .recording import Compared, Corrected, OneDevice, suspects_in

__all__: list[str] = []

_MOST = 5  # suspects and attributes that are corrected, one in a pass. Arbitrary.
_DEPTH = 4  # of containers that are looked into. Arbitrary.
_OF_MODULES = {*vars(nn.Module()), "eps_mode"} - {"_parameters", "_buffers"}
_PLAIN = (*SCALARS, type(None), Tensor)

Attribute = tuple[str, str]  # the names of the module, and of the attribute


class Investigation:
    """The pass that differs, taken again by other copies and recorded."""

    def __init__(self, passes: Passes, number: int, found: Difference) -> None:
        self._passes, self._number, self._found = passes, number, found
        self._one = passes.side(True, number)
        one, self._lost = self._one.copy.module, list[Attribute]()
        if number:
            self._many = passes.side(False, number)
            self._lost = _different_attributes(one, self._many.copy.module)
        self._values = {key: copied(_value_of(one, key), passes.dtype) for key in self._lost[:_MOST]}
        self._record = OneDevice(passes.dtype)
        self._of_one = self._one.take(number, found.kind, [self._record])
        if not number:
            self._many = passes.side(False)  # not before, to hold less at a time
        many = self._many.copy.module
        modes = [Compared(self._record, i, passes.rows, many) for i in range(len(passes.rows))]
        self._of_many = self._many.take(number, found.kind, modes)
        self._changed = _different_attributes(one, many)

    def text(self) -> str:
        """Return what differs, where and why."""
        kind, overridden, known = self._found.kind, self._many.parallel.overridden, self._evidence()
        state = self._text_of_state()
        where = None if kind == "loss" and known is None else self._where(state)  # In the one case, all outputs agree.
        text = self._found.text if known is None else known
        if where is not None:
            text = where if kind in IN_FORWARD else f"{where}. For the caller, {text}"
        elif overridden and kind in IN_FORWARD:
            text += f"; your wrapper has its own {' and '.join(overridden)}, which the check has used"
        if where is None and state is not None:
            text += f"; {state}"
        if self._number:
            text = f"in pass {self._number + 1}, while the passes before agree: {text}"
        text += text_of_hooks(self._one.copy.module)
        dropped = ", ".join(list(self._one.copy.dropped | self._record.dropped)[:3])
        has_note = dropped and RANDOM not in text
        return f"{text} (compared with dropout switched off: {dropped})" if has_note else text

    def _where(self, state: str | None) -> str | None:
        """Return the first call that gets what it gets on one device, returns something else, and matters."""
        model, rows = self._many.copy.module, self._passes.rows
        for call in [call for call in self._record.calls.values() if suspects_in(call, model)][:_MOST]:
            many = self._passes.side(False, self._number)
            if not self._changes(many, [Corrected(self._passes.dtype, call, of_replica) for of_replica in rows]):
                continue
            known = changed_parameter(call, self._of_one, self._of_many, self._one.copy.module) or state
            where, cause = where_and_why(call, suspects_in(call, model), model, rows, self._passes.dtype, known)
            names = _names([key for key in self._changed if key[0].startswith(call.key[0])])
            if cause in (CHANGES, STATE, None) and names:
                cause = "; ".join(filter(None, [cause, f"{names} changed in this pass, and in replicas otherwise"]))
            return f"{where}: {cause}" if cause else where
        return None

    def _text_of_state(self) -> str | None:
        """Return which attributes matter that differ before the pass; all of them, if none matters alone."""
        mattering = []
        for key, value in self._values.items():
            many = self._passes.side(False, self._number)
            setattr(dict(many.copy.module.named_modules())[key[0]], key[1], copied(value, self._passes.dtype))
            mattering += [key] if self._changes(many, ()) else []
        if not self._lost:
            return None
        return (
            f"what forward() sets on self ends with the replica, so {_names(mattering or self._lost)} differs from "
            "that on one device; keep it in a buffer that is changed in place, or set it outside the forward pass"
        )

    def _changes(self, many: Side, modes: Sequence[InDouble]) -> bool:
        """Return whether the caller sees something else in replicas where one thing is as on one device."""
        try:
            after = many.take(self._number, self._found.kind, modes)
        except FailsInReplicas:
            return True
        return not agree(self._seen(after), self._seen(self._of_many))

    def _seen(self, taken: Pass) -> Any:
        if self._found.kind in ("shapes", "value"):
            return list(taken.of("output").values()), taken.values
        return taken.tensors.get((self._found.kind, self._found.name))

    def _evidence(self) -> str | None:
        """Return what is known of numbers that replicas return; of the model as it is, if the loss differs there."""
        if self._found.kind not in ("loss", "gradient"):
            return None
        one, many = self._of_one, self._of_many
        if self._number == 0:
            one_as_is, many_as_is = (
                self._passes.side(is_one, is_moved=False).take(0, "loss") for is_one in (True, False)
            )
            if any(other.kind == "loss" for other in differences(one_as_is, many_as_is)):
                one, many = one_as_is, many_as_is
        pairs = sorted(scalars(one, many), key=lambda pair: agree(pair[0].mean(), pair[1]))
        if not pairs:
            return None
        text = evidence(*pairs[0], [rows.number for rows in self._passes.rows])
        return f"the loss differs: {text}" if self._found.kind == "loss" else f"{self._found.text}; {text}"


def text_of_failure(passes: Passes, text: str, model: nn.Module, modes: Sequence[InDouble]) -> str:
    """Return what only replicas raise, and in which module; `model` has the replicas."""
    failed = next((mode.failed for mode in modes if mode.failed and mode.failed[1].module is not None), None)
    where = cause_of_failure(*failed, model) if failed else ""
    return f"runs on one device, but not in replicas: {text}{where}{text_of_hooks(passes.side(True, 1).copy.module)}"


def _names(attributes: Sequence[Attribute]) -> str:
    return ", ".join([_name_of(attribute) for attribute in attributes[:_MOST]])


def _name_of(attribute: Attribute) -> str:
    """Return how the code calls an attribute."""
    return ".".join(filter(None, attribute))


def _value_of(model: nn.Module, attribute: Attribute) -> Any:
    """Return what an attribute is."""
    return _attributes_of(dict(model.named_modules())[attribute[0]]).get(attribute[1])


def _different_attributes(one: nn.Module, many: nn.Module) -> list[Attribute]:
    """Return which attributes differ between two copies of a model."""
    there = dict(many.named_modules())
    return [
        (name, attribute)
        for name, module in one.named_modules()
        if name in there
        for attribute in _attributes_of(module) | _attributes_of(there[name])
        if not _are_same(_attributes_of(there[name]).get(attribute), _attributes_of(module).get(attribute), _DEPTH)
    ]


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are not those of each module, with its parameters and buffers."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    parameters, buffers = attributes.pop("_parameters", {}), attributes.pop("_buffers", {})
    return attributes if isinstance(module, torch.jit.ScriptModule) else attributes | dict(parameters) | dict(buffers)


def _are_same(actual: Any, expected: Any, depth: int) -> bool:
    """Return whether two attributes hold the same tensors, numbers, flags and strings, as far as can be seen."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return not gap(actual, expected)
    if isinstance(actual, _PLAIN) or isinstance(expected, _PLAIN):
        return type(actual) is type(expected) and agree(actual, expected)
    if not depth or isinstance(expected, nn.Module):
        return True
    some, all_ = _items_of(actual), _items_of(expected)
    return len(some) == len(all_) and all(_are_same(*pair, depth - 1) for pair in zip(some, all_, strict=True))


def _items_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
