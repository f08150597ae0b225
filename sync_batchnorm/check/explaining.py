"""Where a difference begins, and why: by experiments, or by what is exact.

A pass is recorded, and run once more with one thing as it is on one device; a call is made again with other rows.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm, why_left
from ..torch_private import HOOKS, BatchNormBase
from ..wrapper import tensors_in
from .comparing import SCALARS, Rows, agree, chunk_of, gap, much, samples_of
from .copies import Call, InDouble, border, copied, modules_in_closure, seed
from .passes import IN_FORWARD, Difference, FailsInReplicas, Pass, Passes, Side, differences, evidence, scalars
from .recording import Compared, Corrected, OneDevice, suspects_in

__all__: list[str] = []

_MOST = 5  # suspects and attributes that are corrected, one in a pass. Arbitrary.
_DEPTH = 4  # of containers that are looked into. Arbitrary.
_OF_MODULES = {*vars(nn.Module()), "eps_mode"} - {"_parameters", "_buffers"}
_PLAIN = (*SCALARS, type(None), Tensor)

Attribute = tuple[str, str]  # the names of the module, and of the attribute

RANDOM = "it draws random numbers, which differ in replicas, and may be meant to; switch that off to compare the rest"
CHANGES = (
    "it returns something else each time that it is called with the same rows: look for state that it keeps, for a "
    "random generator of its own, and for the time"
)
SAMPLES = (
    "what it returns for a sample depends on other samples of the batch, as with x.mean(0), x.std(), x[0] or padding "
    "to the longest sample"
)
PLACE = "what it returns for a sample depends on its place in the batch, as with torch.arange(len(x))"
SIZE = "what it returns for a sample depends on the number of samples, as with x / len(x) or a branch on len(x)"
STATE = (
    "it returns the same for these rows when it is called again on one device, without the others: look for a cache, "
    "what it keeps on itself, and what it reads elsewhere"
)
_FORMULA = (
    'For another formula than that of F.batch_norm, use sync_moments, see "Norms of your own" in docs/extending.md'
)
_PLAIN_NORM = (
    "it calls F.batch_norm, or a batch norm that is no submodule of it; assign a batch norm to an attribute, not to a "
    "list or dict, call that, and convert the model again"
)


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


def where_and_why(
    one: Call, suspects: Sequence[Call], model: nn.Module, rows: Sequence[Rows], dtype: torch.dtype, known: str | None
) -> tuple[str, str | None]:
    """Return which call differs and by how much, and the cause that is known or that experiments tell.

    `model` has the replicas.
    """
    converted, found = dict(model.named_modules())[one.key[0]], suspects[0]
    cause = _cause_in_norm(converted, found.norms, len(one.in_replicas)) or known
    for suspect in suspects if cause is None else ():
        if cause := _cause_in_call(one, suspect, converted, rows[suspect.replica], dtype):
            found = suspect
            break
    if cause in (None, SAMPLES) and "batch_norm" in found.norms:
        cause = _PLAIN_NORM
    elif cause in (SAMPLES, PLACE, SIZE) and not isinstance(one.module, torch.jit.ScriptModule):
        cause += _where_else(one.module)
    where = f"output of {_name_of_call(one, converted)}, in replica {found.replica}, {much(found.gap)}"
    if cause is None and found.where:
        where += f", in its samples {found.where} of {list(range(rows[found.replica].number))}"
    return f"first difference: {where}", cause


def _cause_in_call(one: Call, suspect: Call, converted: nn.Module, rows: Rows, dtype: torch.dtype) -> str | None:
    arguments = suspect.arguments, one.arguments, rows, dtype
    with suppress(Exception):  # It may not run again.
        if type(converted) is not type(one.module) and Experiment(one.module, *arguments).tells_apart(converted):
            return (
                f"{type(converted).__name__} computes something else than {type(one.module).__name__}, which it "
                f"replaces, on one device, too. {_FORMULA}"
            )
        return Experiment(converted, *arguments).cause()
    return None


def _where_else(module: nn.Module) -> str:
    """Return where the code is that a module runs, if it is not in its class alone."""
    hooks = [hook for name in HOOKS if "forward" in name for hook in vars(module).get(name, {}).values()]
    places = ["the forward that was set on the module"] if "forward" in vars(module) else []
    if any(getattr(hook, "func", None) is not border for hook in hooks):
        places.append("the forward hooks of the module")
    return f"; look at {' and '.join(places)}" if places else ""


def cause_of_failure(failed: str, call: Call, model: nn.Module) -> str:
    """Return in which call a function has raised an error in a replica, and why, if that is a plain batch norm."""
    converted, cause = dict(model.named_modules())[call.key[0]], None
    if failed == "batch_norm" and "batch_norm" in call.norms and not isinstance(converted, _SynchronizedBatchNorm):
        cause = _cause_in_norm(converted, call.norms, 1) or _PLAIN_NORM
    return f"; raised in {_name_of_call(call, converted)}{f': {cause}' if cause else ''}"


def _name_of_call(call: Call, converted: nn.Module) -> str:
    name, number = call.key
    return f"{name or 'the model itself'} ({_name_of_class(converted)}{f', call {number + 1}' if number else ''})"


def _name_of_class(module: nn.Module) -> str:
    """Return the name of the class of a module, with that of its file if a base of the class has the same name."""
    cls = type(module)
    bases = [base.__name__ for base in cls.__mro__[1:]]
    return f"{cls.__module__}.{cls.__name__}" if cls.__name__ in bases else cls.__name__


def _cause_in_norm(module: nn.Module, called: set[str], replicas: int) -> str | None:
    """Return why a batch norm does not synchronize in a replica; None if that is not the cause."""
    reason = why_left(module, {})
    if reason is not None:
        return f"a batch norm that convert_model leaves as it is, because it {reason.partition(' ')[2]}"
    if not isinstance(module, _SynchronizedBatchNorm):
        if isinstance(module, BatchNormBase):
            return "a batch norm that is not synchronized; call convert_model(model)"
        return None
    if (module.group_size or replicas) < replicas:
        return (
            f"with its group_size of {module.group_size}, groups of so many of the {replicas} replicas normalize "
            "separately; set it to None, unless that is meant"
        )
    if "sync_batch_norm" in called:
        return None
    base = next(cls.__name__ for cls in type(module).__mro__ if cls.__module__ == _SynchronizedBatchNorm.__module__)
    return (
        f"its forward never calls that of {base}, so each replica normalizes with its own chunk; call {base}."
        f"forward(self, input) in place of F.batch_norm. {_FORMULA}"
    )


def changed_parameter(call: Call, one: Pass, many: Pass, model: nn.Module) -> str | None:
    """Return what to do about a parameter that the call changes in replicas in another way than on one device."""
    inside = {id(parameter) for parameter in call.module.parameters()}
    for name, parameter in model.named_parameters():
        expected = one.of("parameter").get(name, parameter)
        if id(parameter) in inside and gap(many.of("parameter").get(name, expected), expected):
            return (
                f"its forward() changes the parameter {name} in place, and each replica once more, as all share its "
                "memory; compute another tensor from it, or change it outside the forward pass"
            )
    return None


def text_of_hooks(one: nn.Module) -> str:
    """Return which hooks read or write attributes of the original in replicas; `one` has run on one device."""
    texts = []
    for name, module in one.named_modules():
        for hook in [hook for hooks in HOOKS for hook in vars(module).get(hooks, {}).values()]:
            for other in modules_in_closure(hook):
                words = [*hook.__code__.co_names, *hook.__code__.co_consts]  # the latter for setattr
                attributes = [word for word in words if isinstance(word, str) and word in vars(other)]
                if attributes:
                    where = f"{hook.__qualname__} of {name or 'the model itself'}"
                    texts.append(f"{where} ({', '.join(attributes)})")
    if not texts:
        return ""
    return (
        "; hooks that refer to the model by a closure read and write attributes of the original, not of the replica: "
        f"{'; '.join(texts[:3])}. Make the hook a method of the module, see docs/troubleshooting.md"
    )


class Experiment:
    """A call of a module on one device, made again with other rows of the batch."""

    def __init__(self, module: nn.Module, some: Any, whole: Any, rows: Rows, dtype: torch.dtype) -> None:
        """`some` has the arguments in a replica, with some `rows` of those on one device, `whole`."""
        self._module, self._some, self._whole, self._rows, self._dtype = module, some, whole, rows, dtype
        self._here, self._everywhere = range(rows.first, rows.first + rows.number), range(rows.total)
        self._has_blocks = False
        self._has_blocks = not agree(self._selected(some, whole, self._here), some)

    def cause(self) -> str | None:
        """Return on what the rows of the replica depend; None if that is open."""
        everywhere, rows = self._everywhere, self._rows
        expected, again = self._outputs(everywhere, times=2)
        if not agree(self._outputs(everywhere)[0], expected):
            return CHANGES
        if not agree(self._outputs(everywhere, other_seed=1)[0], expected):
            return RANDOM
        alone = self._outputs(self._here)[0]
        right = [chunk_of(whole, some, rows) for whole, some in zip(expected, alone, strict=True)]
        if agree(alone, right):
            return None if any(map(_uses_batch, self._module.modules())) else STATE
        others = [row if row in self._here else rows.first for row in everywhere]
        if not agree(right, self._outputs(others)[0], rows):
            return SAMPLES
        if not agree(again, expected):
            return CHANGES
        turned = [(row + rows.first) % rows.total for row in everywhere]
        return SIZE if agree(right, self._outputs(turned)[0], rows._replace(first=0)) else PLACE

    def tells_apart(self, other: nn.Module) -> bool:
        """Return whether another module returns something else for the whole batch."""
        modules = [copied(module, self._dtype) for module in (self._module, other)]
        one, two = (self._called(module, self._everywhere) for module in modules)
        return not agree(one, two)

    def _outputs(self, rows: Sequence[int], times: int = 1, other_seed: int = 0) -> list[list[Tensor]]:
        """Return what a copy of the module returns for these rows of the batch, so many times in a row."""
        module = copied(self._module, self._dtype)
        for norm in filter(_uses_batch, module.modules()):
            _fix_statistics(norm)
        return [self._called(module, rows, other_seed) for _ in range(times)]

    def _called(self, module: nn.Module, rows: Sequence[int], number: int = 0) -> list[Tensor]:
        args, kwargs = self._selected(self._some, self._whole, rows)
        seed(number)
        with torch.no_grad(), InDouble(self._dtype):
            return [output.clone() for output in tensors_in(module(*args, **kwargs))]

    def _selected(self, some: Any, whole: Any, rows: Sequence[int]) -> Any:
        """Return a copy of the arguments on one device with these rows; a sample may be an item of a list."""
        if isinstance(some, Tensor):  # A copy, as the module may change it.
            return samples_of(whole.clone(), some, self._rows, rows, self._has_blocks)
        if type(some) is dict:
            return {key: self._selected(some[key], whole[key], rows) for key in some}
        if type(some) not in (list, tuple):
            return some
        if len(some) == self._rows.number and len(whole) == self._rows.total:
            return type(some)(whole[row] for row in rows)
        return type(some)(self._selected(*pair, rows) for pair in zip(some, whole, strict=True))


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _SynchronizedBatchNorm) and module.training


def _fix_statistics(norm: Any) -> None:
    """Let a synchronized layer, which mixes samples rightly, use fixed statistics."""
    norm.training = False
    if norm.running_mean is None:
        like = next(norm.parameters(), torch.zeros(()))
        norm.running_mean = like.new_zeros(norm.num_features)
        norm.running_var = like.new_ones(norm.num_features)
