"""Where a difference begins, and why: by experiments, or by what is exact.

A pass is recorded, and run once more with one thing as it is on one device; a call is made again with other rows.
"""

import inspect
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm, why_left
from ..meeting import ReplicaSyncError
from ..torch_private import HOOKS, BatchNormBase
from ..trees import built, children_of, holds_tensors, tensors_in
from ..wrapper.hooks import hooks_of
from .comparing import SCALARS, Compared, Corrected, OneDevice, agree, chunk_of, gap, much, numbers_of, suspects_in
from .copies import Call, InDouble, Rows, copied, seed
from .passes import IN_FORWARD, IN_PLACE, Difference, FailsInReplicas, Passes, Side, differences, scalars

__all__: list[str] = []

_MOST = 5  # suspects and attributes that are corrected, one in a pass. Arbitrary.
_OF_MODULES = {*vars(nn.Module()), "eps_mode"}

RANDOM = "it draws random numbers, which differ in replicas, and may be meant to; switch that off to compare the rest"
CHANGES = "it returns something else each time for these rows: look for state, a generator of its own, or the time"
_SAMPLE = "what it returns for a sample depends on"
SAMPLES = f"{_SAMPLE} other samples of the batch, as with x.mean(0), x.std(), x[0] or padding to the longest sample"
PLACE = f"{_SAMPLE} its place in the batch or the number of samples, as with arange(len(x)) or a seed of its own"
STATE = "it returns the same for these rows when it is called again on one device: look for a cache, what it keeps, and"
STATE += " what it reads elsewhere"
_LIST = "; each replica gets a whole list or tensor of as many items as the batch has samples: if one for each, name it"
_LIST += ', as in DataParallelWithCallback(model, in_dims={"names": 0})'
_NO_SAMPLES = ", unless in_dims should name an argument whose rows are no samples"
_FORMULA = 'for another formula than F.batch_norm, use sync_moments, see "Norms of your own" on the page "Extending"'
_GRADIENT = "it calls torch.autograd.grad, which in a replica sees only its chunk; compute it outside the forward pass"
_BY_SAMPLE = "; if once for each sample, call it once for all rows, or set its group_size to 1"
_PLAIN_NORM = "it calls F.batch_norm, or a batch norm that is no submodule; make it an attribute, and convert the model"


class Investigation:
    """The pass that differs, taken again by other copies and recorded."""

    def __init__(self, passes: Passes, index: int, difference: Difference) -> None:
        self._passes, self._index, self._difference = passes, index, difference
        self._one, self._many = (Side(passes, is_one, index) for is_one in (True, False))
        self._lost = _different_attributes(self._one.module, self._many.module) if index else []
        self._record = OneDevice(passes.dtype)
        self._of_one = self._one.take(index, difference.kind, [self._record])
        modes = [Compared(self._record, i, passes.rows, self._many.module) for i in range(len(passes.rows))]
        self._of_many = self._many.take(index, difference.kind, modes)
        self._calls = _text_of_calls(self._many.module, self._record.begun, modes, _BY_SAMPLE)

    def text(self) -> str:
        """Return what differs, where and why."""
        kind, overridden = self._difference.kind, self._many.parallel.overridden
        evidence, state = self._evidence(), self._state()
        text = evidence or self._difference.text
        where = self._where(state) if evidence or kind != "loss" else ""  # If `loss` itself differs, all outputs agree.
        if where:
            text = where if kind in IN_FORWARD else f"{where}. For the caller, {text}"
        else:
            note = f"your wrapper has its own {' and '.join(overridden)}, which the check has used"
            note, why = note if overridden and kind in IN_FORWARD else "", "" if evidence else self._why()
            text = "; ".join(filter(None, [text, self._rows(), note, why, state or self._calls]))
        in_pass = f"in pass {self._index + 1}, while the passes before agree: " if self._index else ""
        dropped = ", ".join(list(self._one.dropped | self._record.dropped)[:3])
        dropped = f" (compared with dropout switched off: {dropped})" if dropped and RANDOM not in text else ""
        return f"{in_pass}{text}{text_of_hooks(self._one.module)}{dropped}"

    def _why(self) -> str:
        """Return the cause of what differs for the caller, where that is certain."""
        kind, name, _, why = self._difference
        owner = dict(self._many.module.named_modules()).get(str(name).rpartition(".")[0])
        # What a layer that synchronizes writes is of the whole batch; a list of outputs is another one on one device.
        is_of_batch = why == IN_PLACE and _synchronizes(owner)
        return "" if is_of_batch or (kind == "loss" and "gather" in self._many.parallel.overridden) else why

    def _rows(self) -> str:
        """Return what is known of an output that has other rows than one for each sample."""
        one, many = (taken["output"].get(self._difference.name) for taken in (self._of_one, self._of_many))
        total = self._passes.rows[0].total
        if one is None or many is None or not one.dim() or len(one) == total:
            return ""
        why = f"{len(one)} rows for {total} samples, in another order in replicas; return z1, z2, not cat([z1, z2])"
        return "" if gap(numbers_of(many).sort(0).values, numbers_of(one).sort(0).values) else why

    def _state(self) -> str:
        """Return which attributes differ before the pass."""
        if buffers := [name for name in self._lost if name in dict(self._one.module.named_buffers())]:
            return f"the buffer {', '.join(buffers)} differs from that on one device: {IN_PLACE}"
        differs = f"{', '.join(self._lost)} differs from one device" if self._lost else ""
        why = f"what forward() sets on self ends with the replica, so {differs}; change a buffer in place instead, or"
        # A hook may have set it, on the model.
        return differs if not differs or text_of_hooks(self._one.module) else f"{why} set it outside the forward pass"

    def _changes(self, modes: Sequence[InDouble]) -> bool:
        """Return whether the caller sees something else in replicas with these modes."""
        kind, name = self._difference[:2]
        with suppress(FailsInReplicas):  # What a call returns on one device may not fit into a replica.
            seen = Side(self._passes, False, self._index).take(self._index, kind, modes)[kind]
            return not agree(seen.get(name, seen), self._of_many[kind].get(name, self._of_many[kind]))
        return False

    def _evidence(self) -> str:
        """Return what is known of numbers that replicas return; of the model as it is, if the loss differs there."""
        kind, name = self._difference[:2]
        is_number = kind == "output" and name is not None and self._of_one[kind][name].numel() == 1
        if kind not in ("loss", "gradient") and not is_number:
            return ""
        one, many = (Side(self._passes, is_one, is_moved=False).take(0, "loss") for is_one in (True, False))
        if self._index or not any(other.kind in IN_FORWARD for other in differences(one, many)):
            one, many = self._of_one, self._of_many
        pairs = sorted(scalars(one, many), key=lambda pair: agree(pair[0].mean(), pair[1]))
        if not pairs:
            return ""
        text = _related(*pairs[0], [len(rows.here) for rows in self._passes.rows])
        return f"{self._difference.text}; {text}" if kind == "gradient" else f"the loss differs: {text}"

    # NOTE [tried for gradients]: by hooks on tensors, the last call of the backward pass whose output gets the right
    # gradient and whose input does not. In 7 of 11 planted faults that was the module at fault, in 2 the one behind it:
    # a hook of the user's runs first, and what a replica computes under no_grad has no gradient to compare.
    def _where(self, state: str) -> str:
        """Return the first call that gets what it gets on one device, returns something else, and matters; and why."""
        one, model, passes = self._one.module, self._many.module, self._passes
        for call in [call for call in self._record.calls.values() if suspects_in(call, model)][:_MOST]:
            if self._changes([Corrected(passes.dtype, call, rows) for rows in passes.rows]):
                suspect, cause = self._cause(call, suspects_in(call, model), state)
                name = _name_of_call(call, model)
                where = f"{suspect.part} of {name}, in replica {suspect.number}, {much(suspect.gap)}"
                changed = ", ".join(_different_attributes(one, model, call.key[0]))
                if changed and cause in (CHANGES, STATE, ""):
                    cause += f"{cause and '; '}{changed} changed in this pass, and in replicas otherwise"
                return f"first difference: {where}{cause and ': '}{cause}"
        return ""

    def _cause(self, call: Call, suspects: Sequence[Call], state: str) -> tuple[Call, str]:
        """Return in which replica a call differs, and the cause that is known or that experiments tell."""
        suspect, module = suspects[0], self._many.module.get_submodule(call.key[0])
        cause = _cause_in_norm(module, suspect.called, len(call.in_replicas)) or self._changed_parameter(call) or state
        for candidate in suspects if not cause else ():
            rows = self._passes.rows[candidate.number]
            with suppress(Exception):  # It may not run again.
                cause = Experiment(module, call, candidate.arguments, rows, self._passes.dtype).cause()
            if cause:
                suspect = candidate
                break
        if cause in ("", SAMPLES) and "batch_norm" in suspect.called:
            cause = _PLAIN_NORM
        elif not cause:
            cause = _GRADIENT if "grad" in suspect.called and any(map(_uses_batch, module.modules())) else self._calls
        elif cause in (SAMPLES, PLACE):
            # Whose rows are cut wrongly cannot be known, unless there is a single tensor.
            several = _NO_SAMPLES if self._passes.path or len(tensors_in(self._passes.arguments)) > 1 else ""
            cause += _LIST if _holds_list(suspect.arguments, call.arguments, rows.total) else several
            hooks = sum(len(getattr(module, name)) for name in HOOKS if "forward" in name)
            cause += "; look at the forward hooks of the module" if hooks > 2 else ""  # Two are those of the check.
        return suspect, cause

    def _changed_parameter(self, call: Call) -> str:
        """Return what to do about a parameter that the call changes in replicas in another way than on one device."""
        one, many = (taken["parameter"] for taken in (self._of_one, self._of_many))
        for name, _ in call.module.named_parameters(prefix=call.key[0]):
            if name in many and name not in self._of_one["assigned"] and gap(many[name], one[name]):
                text = f"its forward() changes the parameter {name} in place, and each replica once more, as all share"
                return f"{text} its memory; compute another tensor from it, or change it outside"
        return ""


def _text_of_calls(model: nn.Module, on_one: Mapping[str, int], modes: Sequence[InDouble], remedy: str = "") -> str:
    """Return which synchronized layer replicas call another number of times than one device."""
    for name in [name for name, module in model.named_modules() if _synchronizes(module)]:
        others = [mode.begun[name] for mode in modes]
        if {*others} != {on_one[name]}:
            return f"number of calls of {name}: {on_one[name]} on one device, {others} in replicas{remedy}"
    return ""


def _related(of_replicas: Tensor, on_one: Tensor, name: str, sizes: list[int]) -> str:
    """Return how numbers that replicas return are related to that of one device; `sizes`: their numbers of rows."""
    ways = [("sum", of_replicas.sum(), "add them up"), ("mean", of_replicas.mean(), "take their mean")]
    if len(set(sizes)) > 1 and len(sizes) == len(of_replicas):
        mean = torch.tensor(sizes, dtype=torch.float64) @ of_replicas / sum(sizes)
        ways.append(("mean weighted by rows", mean, "weight them by their rows, or return sums and counts"))
    values = ", ".join([f"{value:.6g}" for value in of_replicas.tolist()])
    text = f"{name}replicas with {sizes} rows return {values}, one device returns {float(on_one):.6g}"
    what_to_do = "compute it from the gathered output, or, if it divides sums, return these, and divide outside"
    if on_one.isfinite() and of_replicas.isfinite().all():
        equal = [(f"the {way}", remedy) for way, value, remedy in ways if not gap(value, on_one)]
        same, what_to_do = [*equal, ("none of these", what_to_do)][0]
        values = ", ".join([f"their {way} is {float(value):.6g}" for way, value, _ in ways])
        text += f"; {values}: {same} is that of one device"
    return f'{text}; {what_to_do}, see "In the replicas, with balanced memory" on the page "Where to compute the loss"'


def text_of_failure(error: Exception, model: nn.Module, modes: Sequence[InDouble], on_one: Mapping[str, int]) -> str:
    """Return what only replicas raise, and in which module; `model` has the replicas, `on_one` the calls of modules."""
    calls = _text_of_calls(model, on_one, modes) if isinstance(error, ReplicaSyncError) else ""
    text = f"{type(error).__name__}: {error}{calls and '; '}{calls}"
    # Its peers were released with errors of their own.
    for call, _ in [mode.failed for mode in modes if mode.failed and mode.failed[1] is error]:
        text += f"; raised in {_name_of_call(call, model)}"
        module = model.get_submodule(call.key[0])
        if "batch_norm" in call.called and "Expected more than 1 value" in text and not _uses_batch(module):
            text += f": {_cause_in_norm(module, call.called, 1) or _PLAIN_NORM}"
    return f"runs on one device, but not in replicas: {text}{text_of_hooks(model)}"


def _different_attributes(one: nn.Module, many: nn.Module, module: str = "") -> list[str]:
    """Return which attributes differ between two copies of a model, or of a module in it."""
    here, there = _attributes_of(one, module), _attributes_of(many, module)
    return [name for name in here | there if not agree(_plain(there.get(name)), _plain(here.get(name)))][:_MOST]


def _attributes_of(model: nn.Module, module: str) -> dict[str, Any]:
    """Return the attributes, parameters and buffers of all modules by name, but for those that each module has."""
    attributes = dict[str, Any]()
    for name, child in dict(model.named_modules())[module].named_modules(prefix=module):
        # Running statistics follow from what goes into a layer.
        left_out = _OF_MODULES | {*nn.BatchNorm1d(1)._buffers} if isinstance(child, BatchNormBase) else _OF_MODULES
        members = {} if isinstance(child, nn.DataParallel) else {**vars(child), **child._parameters, **child._buffers}
        attributes |= {f"{name}.{key}".strip("."): members[key] for key in members if key not in left_out}
    return attributes


def _plain(value: Any, depth: int = 4) -> Any:  # containers that are looked into; arbitrary
    """Return what can be seen of an attribute: its tensors, numbers, flags and strings, in lists for other objects."""
    if isinstance(value, (*SCALARS, Tensor)):
        return value
    if not depth or isinstance(value, nn.Module):
        return None
    held = value if isinstance(value, (Mapping, Sequence, Set)) else getattr(value, "__dict__", {})
    items = [*held, *held.values()] if isinstance(held, Mapping) else held
    return [type(value).__name__, *[_plain(item, depth - 1) for item in items]]


def _holds_list(some: Any, whole: Any, length: int) -> bool:
    """Return whether a replica got a whole tensor, or list without tensors, of this length; `whole`: what all have."""
    if isinstance(some, Tensor):
        return some.dim() > 0 and len(some) == length and some.shape == getattr(whole, "shape", None)
    is_list = isinstance(some, (list, tuple)) and len(some) == length and not tensors_in(some)
    of_some, parts = children_of(some), children_of(whole)
    inside = [_holds_list(child, parts.get(key), length) for key, child in of_some.items()]
    return is_list or (len(of_some) == len(parts) and any(inside))


def _name_of_call(call: Call, model: nn.Module) -> str:
    """Return the name of a module, and its class, with the file if a base of the class has the same name."""
    (name, number), cls = call.key, type(model.get_submodule(call.key[0]))
    has_namesake = cls.__name__ in [base.__name__ for base in cls.__mro__[1:]]
    name_of_class = f"{cls.__module__}.{cls.__name__}" if has_namesake else cls.__name__
    return f"{name or 'the model itself'} ({name_of_class}{f', call {number + 1}' if number else ''})"


def _cause_in_norm(module: nn.Module, called: set[str], replicas: int) -> str:
    """Return why a batch norm does not synchronize in a replica; nothing if that is not the cause."""
    if reason := why_left(module, {}):
        return f"a batch norm that convert_model leaves as it is, because it {reason.partition(' ')[2]}"
    if not isinstance(module, _SynchronizedBatchNorm):
        is_plain = isinstance(module, BatchNormBase)
        return "a batch norm that is not synchronized; call convert_model(model)" if is_plain else ""
    if (module.group_size or replicas) < replicas:
        text = f"with its group_size of {module.group_size}, groups of so many of the {replicas} replicas normalize"
        return f"{text} separately; set it to None, unless meant"
    base = next(cls.__name__ for cls in type(module).__mro__ if cls.__module__ == _SynchronizedBatchNorm.__module__)
    text = f"its forward never calls that of {base}; call {base}.forward(self, input), not F.batch_norm; {_FORMULA}"
    return "" if "sync_batch_norm" in called else text


def text_of_hooks(model: nn.Module) -> str:
    """Return which hooks read or write attributes of the original in replicas; `model` has run."""
    for name, hook, _, accesses in hooks_of(model):
        of_hook = {getattr(hook, "__name__", ""), *[attribute for _, attribute in accesses]}
        used = [(other, vars(other).keys() & _names_in_methods(type(other), of_hook)) for other, _ in accesses]
        if attributes := accesses & {(other, attribute) for other, names in used for attribute in names}:
            return (
                "; hooks that refer to the model read and write attributes of the original, not the replica: "
                f"{getattr(hook, '__qualname__', hook)} of {name or 'the model itself'} "
                f'({", ".join(sorted(attribute for _, attribute in attributes))}), see "Hooks that refer to the model"'
            )
    return ""


def _names_in_methods(cls: type, of_hook: Set[str]) -> set[str]:
    """Return the names that methods of a class use, except for `__init__` and those of a hook. Others log only."""
    methods = [inspect.unwrap(inspect.getattr_static(cls, key)) for key in {*dir(cls)} - {"__init__"} - of_hook]
    return {name for method in methods for name in getattr(getattr(method, "__code__", None), "co_names", ())}


class Experiment:
    """A call of a module on one device, made again with other rows of the batch."""

    def __init__(self, module: nn.Module, call: Call, some: Any, rows: Rows, dtype: torch.dtype) -> None:
        """`call` is that on one device, `some` has the arguments in a replica, with some `rows` of those there."""
        self._module, self._call, self._some, self._rows, self._dtype = module, call, some, rows, dtype

    def cause(self) -> str:
        """Return on what the rows of the replica depend; nothing if that is open."""
        everywhere, here, former = range(self._rows.total), self._rows.here, self._call.module
        if type(former) is not type(self._module):
            now, then = (self._called(copied(module, self._dtype), everywhere) for module in (self._module, former))
            if not agree(now, then):
                names = f"{type(self._module).__name__} computes something else than {type(former).__name__}"
                return f"{names}, which it replaces, on one device, too; {_FORMULA}"
        expected = self._outputs(everywhere)
        if not agree(self._outputs(everywhere), expected):
            return CHANGES
        if not agree(self._outputs(everywhere, other_seed=1), expected):
            return RANDOM
        alone = self._outputs(here)
        right = [chunk_of(whole, some, self._rows) for whole, some in zip(expected, alone, strict=True)]
        if agree(alone, right):
            return "" if any(map(_uses_batch, self._module.modules())) else STATE
        others = [row if row in here else here.start for row in everywhere]
        if not agree(right, self._outputs(others), self._rows):
            return SAMPLES
        return PLACE if agree(self._outputs(everywhere, times=2), expected) else CHANGES

    def _outputs(self, rows: Sequence[int], times: int = 1, other_seed: int = 0) -> list[Tensor]:
        """Return what a copy of the module returns for these rows of the batch, the last of so many times."""
        module = copied(self._module, self._dtype)
        for norm in filter(_uses_batch, module.modules()):  # It mixes samples rightly, so with fixed statistics.
            norm.training = False
            if norm.running_mean is None:
                norm.running_mean, norm.running_var = torch.ones(2, norm.num_features, dtype=self._dtype)
        return [self._called(module, rows, other_seed) for _ in range(times)][-1]

    def _called(self, module: nn.Module, rows: Sequence[int], number: int = 0) -> list[Tensor]:
        args, kwargs = self._selected(self._some, self._call.arguments, rows)
        seed(number)
        with torch.enable_grad(), InDouble(self._dtype):  # for torch.autograd.grad in its forward
            return [output.detach().clone() for output in tensors_in(module(*args, **kwargs))]

    def _selected(self, some: Any, whole: Any, rows: Sequence[int]) -> Any:
        """Return a copy of the arguments on one device with these rows; a sample may be an item of a list."""
        if isinstance(some, Tensor):  # A copy, as the module may change it.
            return chunk_of(whole.clone(), some, self._rows, rows)
        of_some, parts = children_of(some), children_of(whole)
        if len(of_some) == len(self._rows.here) and len(parts) == self._rows.total:
            parts = dict(enumerate([list(parts.values())[row] for row in rows]))
        else:
            parts = {key: self._selected(part, parts[key], rows) for key, part in of_some.items()}
        if not parts and holds_tensors(whole):
            raise LookupError("an object with tensors cannot be cut")
        return built((), whole, parts, list(parts.values())) if parts else whole


def _uses_batch(module: object) -> bool:
    return isinstance(module, _SynchronizedBatchNorm) and module.training


def _synchronizes(module: Any) -> bool:
    return _uses_batch(module) and module.group_size != 1
