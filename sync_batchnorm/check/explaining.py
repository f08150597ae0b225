"""Explain a difference: name the first faulty module call, its line, and its cause.

Many module outputs differ after the first fault, and some differ without harm. Therefore a suspect is tested: the pass
runs again in replicas with the output of one call patched by its value from one device. The call counts as the fault
only if this changes the result for the caller. Causes are reported if they are exact (a batch norm that is not
converted, another number of calls, a replaced class) or if such an experiment shows them.
"""

import inspect
from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm, reason_not_converted
from ..meeting import ReplicaSyncError
from ..torch_private import BatchNormBase
from ..trees import children_of, is_sequence_type, tensors_in
from ..wrapper.hooks import hooks_of
from .comparing import (
    SCALARS,
    CompareMode,
    PatchMode,
    RecordMode,
    agree,
    compared,
    describe_gap,
    gap,
    numbers_of,
    suspects_in,
)
from .lines import CHANGES, RANDOM, Line, line_of_call, line_of_gradient
from .passes import (
    IN_FORWARD,
    IN_PLACE,
    CheckConfig,
    Difference,
    FailsInReplicas,
    TwinRun,
    cause_of,
    differences,
    scalars,
)
from .twin import CheckMode, ModuleCall, copied, shortened

__all__: list[str] = []

_MOST = 5  # Suspects to patch (one pass each), and attributes to list. Arbitrary.
MOST_WORDS = 60  # Largest length of a message.
_OF_MODULES = {*vars(nn.Module()), "eps_mode"}

SAMPLES = "what it returns for a sample depends on other samples of the batch"
_LIST = "each replica gets a whole list or tensor as long as the batch: if it lists samples, name it: "
_LIST += 'in_dims={"names": 0}'
_NO_SAMPLES = "unless in_dims should name an argument whose rows are no samples"
_FORMULA = 'for another formula than F.batch_norm, use sync_moments, see "Norms of your own"'
_GRADIENT = "it calls torch.autograd.grad, which in a replica sees only its chunk: that of a mean depends on the "
_GRADIENT += "number of samples; take that of a sum, or compute it outside the forward pass"
_AS_OFTEN = "; call it as often in each replica, or, if once for each sample, once for all rows or with group_size 1"
_BY_SAMPLE = "; if once for each sample, call it once for all rows, or set its group_size to 1"
_DIVIDES = ", or, if it divides sums, return these, and divide outside"
_PADS = "; or pad the entries of the list to one size outside, if forward() pads them to the largest of its chunk"
_IN_REPLICAS = 'see "In the replicas, with balanced memory"'
_OF_ORIGINAL = "hooks that refer to the model use attributes of the original, not the replica"
_PLAIN_NORM = "it calls F.batch_norm, or a batch norm that is no submodule; make it an attribute, and convert the model"


class Investigation:
    """The differing pass, run again with new copies and recorded."""

    def __init__(self, passes: CheckConfig, index: int, difference: Difference) -> None:
        self._passes, self._index, self._difference = passes, index, difference
        self._one, self._many = (TwinRun(passes, is_one, index) for is_one in (True, False))
        self._lost = _different_attributes(self._one.module, self._many.module) if index else []
        self._record = RecordMode(passes.dtype)
        self._of_one = self._one.take(index, difference.kind, [self._record])
        self._modes = [CompareMode(self._record, i, passes.rows, self._many.module) for i in range(len(passes.rows))]
        self._of_many = self._many.take(index, difference.kind, self._modes)
        others = [mode.gets_other for mode in self._modes if mode.gets_other and mode.gets_other.key[0] != passes.name]
        self._gets_other = _name_of_call(others[0], self._many.module) if others else ""
        self._hooks = text_of_hooks(self._one.module, passes.model)

    def text(self) -> str:
        """Return the message: the difference, its place and its cause."""
        kind, name = self._difference[:2]
        what, *evidence = self._evidence() or [self._difference.text]
        if self._hooks and name is None:  # On one device, the model may return other shapes.
            what = "outputs differ"
        # If the loss differs but no scalar of a replica does, all outputs agree and no module is at fault. Outputs of
        # unknown classes are an exception: they were not compared.
        is_inside = evidence or kind != "loss" or self._of_one["unseen"]
        where, cause = self._where(self._state()) if is_inside else ("", "")
        if where:
            seen = f"for the caller, the {kind} {'of ' * (kind == 'gradient')}{name} differs"
            causes = joined(where, self._hooks) + (cause and f"{'; ' if self._hooks else ': '}{cause}")
            texts = [what if name is None else "", *causes.split("; "), "" if kind in IN_FORWARD else seen]
        else:
            texts = self._of_caller(what, evidence)
        dropped = ", ".join(list(self._one.dropped | self._record.dropped)[:3])
        texts += [f"compared with dropout switched off: {dropped}"] if dropped and RANDOM not in cause else []
        in_pass = f"in pass {self._index + 1}: " if self._index else ""
        return in_pass + joined(*texts, most=MOST_WORDS - len(in_pass.split()))

    def _of_caller(self, what: str, evidence: Sequence[str]) -> list[str]:
        """Return the parts of the message if no module call is at fault."""
        overridden = self._many.parallel.overridden if self._difference.kind in IN_FORWARD else ()
        note = f"your wrapper has its own {' and '.join(overridden)}, which the check has used" if overridden else ""
        why = "" if evidence or (self._hooks and self._difference.name is None) else self._why()
        line = "" if why else self._line_of_gradient()
        what += "" if why or line or self._hooks else self._where_to_look()
        return [what, self._hooks, line, *evidence, self._rows(), note, why, self._state() or self._calls()]

    def _why(self) -> str:
        """Return the cause of the difference for the caller, if it is certain."""
        kind, name = self._difference[:2]
        why = cause_of(self._difference, self._of_one, self._of_many)
        owner = dict(self._many.module.named_modules()).get(str(name).rpartition(".")[0])
        # Synchronized layers update their buffers from the whole batch. A custom `gather` that returns a list gives
        # `loss` another argument than on one device.
        is_of_batch = why == IN_PLACE and _synchronizes(owner)
        return "" if is_of_batch or (kind == "loss" and "gather" in self._many.parallel.overridden) else why

    def _where_to_look(self) -> str:
        """Return advice for a wrong gradient, with the last right gradient of the backward pass before it."""
        kind, name = self._difference[:2]
        if kind != "gradient" or any(True for _ in scalars(self._of_one, self._of_many)):
            return ""
        grads = self._of_one[kind]
        before = [other for other in list(grads)[: list(grads).index(name)] if grads[other] is not None]
        agreed = [f", while that of {other}, before it, agrees" for other in before if numbers_of(grads[other]).any()]
        where = f"{agreed[-1]}; if no branch leads past that, look between these two" if agreed else "; look"
        return f"{where} for detach, no_grad, hooks on tensors and a torch.autograd.Function"

    def _rows(self) -> str:
        """Return a note if an output has the right rows in another order, and not one row for each sample."""
        one, many = (taken["output"].get(self._difference.name) for taken in (self._of_one, self._of_many))
        total = self._passes.rows[0].total
        if one is None or many is None or not one.dim() or len(one) == total:
            return ""
        why = f"{len(one)} rows for {total} samples, in another order in replicas; return z1, z2, not cat([z1, z2])"
        return "" if gap(numbers_of(many).sort(0).values, numbers_of(one).sort(0).values) else why

    def _state(self) -> str:
        """Return a note about the attributes and buffers that differed before the pass."""
        if buffers := [name for name in self._lost if name in dict(self._one.module.named_buffers())]:
            return f"the buffer {', '.join(buffers)} differs from that on one device: {IN_PLACE}"
        differs = f"{', '.join(self._lost)} differs from one device" if self._lost else ""
        why = f"what forward() sets on self ends with the replica, so {differs}; change a buffer in place instead, or"
        # With hooks, the attribute may have been set on the original model.
        return differs if not differs or self._hooks else f"{why} set it outside the forward pass"

    def _changes(self, modes: Sequence[CheckMode]) -> bool:
        """Return whether the differing result changes if replicas run with these modes."""
        kind, name = self._difference[:2]
        with suppress(FailsInReplicas):  # A patched output may have a wrong shape for the replica.
            seen = TwinRun(self._passes, False, self._index).take(self._index, kind, modes)[kind]
            return not agree(seen.get(name, seen), self._of_many[kind].get(name, self._of_many[kind]))
        return False

    def _evidence(self) -> list[str]:
        """Return notes about scalars returned by replicas, such as a loss.

        They are taken from the unperturbed model if its forward pass differs, too: users know these values.
        """
        kind, name = self._difference[:2]
        is_number = kind == "output" and name is not None and self._of_one[kind][name].numel() == 1
        if kind not in ("loss", "gradient") and not is_number:
            return []
        one, many = (TwinRun(self._passes, is_one, is_moved=False).take(0, "loss") for is_one in (True, False))
        if self._index or not any(other.kind in IN_FORWARD for other in differences(one, many)):
            one, many = self._of_one, self._of_many
        pairs = sorted(scalars(one, many), key=lambda pair: agree(pair[0].mean(), pair[1]))
        if not pairs:
            return []
        divides_outside = self._passes.loss is not None and len(pairs) > 1
        remedy = f"compute it from the gathered output{'' if divides_outside or self._passes.pads else _DIVIDES}"
        if kind == "gradient":
            return [self._difference.text, f"if replicas return the loss, {remedy}"]
        before = _PADS if self._passes.pads else f", {_IN_REPLICAS}; or something before it mixes samples"
        gets = f": what {self._gets_other} gets differs, too" if self._gets_other else ""
        return _related(*pairs[0], [len(rows.here) for rows in self._passes.rows], f"{remedy}{before}{gets}")

    def _where(self, state: str) -> tuple[str, str]:
        """Return (place, cause) of the first faulty module call; see NOTE [tried for gradients].

        A call is faulty if its inputs agree with one device, its output differs, and patching it changes the result.
        """
        model, passes = self._many.module, self._passes
        for call in [call for call in self._record.calls.values() if suspects_in(call, model)][:_MOST]:
            if self._changes([PatchMode(passes.dtype, call, rows) for rows in passes.rows]):
                number, cause = self._cause(call, state)
                part, how = describe_gap(call.in_replicas[number].output, call.output, passes.rows[number])
                where = f"{part} of {_name_of_call(call, model)}, in replica {number}"
                return f"first difference: {where}, {how}", cause
        return "", ""

    def _cause(self, call: ModuleCall, state: str) -> tuple[int, str]:
        """Return (number of the replica with the fault, cause or source line) for a faulty call."""
        suspects = suspects_in(call, self._many.module)
        first, module = min(suspects), self._many.module.get_submodule(call.key[0])
        cause = _cause_in_norm(module, suspects[first].called, len(call.in_replicas))
        cause = cause or self._changed_parameter(call) or state
        if cause := cause or self._cause_in_class(module, call) or self._calls(call.key[0]):
            return first, cause
        for number in suspects:
            with suppress(Exception):  # The model may not run again.
                line = line_of_call(self._passes, self._index, call.key, number)
                if line[0]:
                    return number, self._cause_by_line(line, number, call)
        return first, self._cause_by_line(("", None, ""), first, call)

    def _cause_by_line(self, line: Line, number: int, call: ModuleCall) -> str:
        """Return the source line with a remedy, or, without a line, the best known cause."""
        (text, operation, why), suspect = line, call.in_replicas[number]
        module = self._many.module.get_submodule(call.key[0])
        called = {operation.place.name} if operation else suspect.called
        if "grad" in called:  # The fault may be the differentiated value, so the line is left out.
            return _GRADIENT
        beside, changed = self._whole_list(suspect, call), self._changed_attributes(call)
        if operation and operation.gets_another() and changed:
            return changed
        if why:
            beside = changed if why == CHANGES else ""
        elif "batch_norm" in called:
            beside = _PLAIN_NORM
        elif operation or (not changed and self._mixes_samples(module, number, call)):
            is_of_torch = type(module).__module__.startswith("torch.nn")  # Its code is correct.
            # With several tensors, one of them may be split along a wrong dimension. A single tensor cannot.
            is_open = is_of_torch or self._passes.path or len(tensors_in(self._passes.arguments)) > 1
            beside = beside or (_NO_SAMPLES if is_open else "")
            beside = beside if operation else f"{SAMPLES}{beside and '; '}{beside}"
        return "; ".join(filter(None, [text + (why and f": {why}"), beside or changed]))

    def _mixes_samples(self, module: nn.Module, number: int, call: ModuleCall) -> bool:
        """Return whether a copy of the module is deterministic, but its output for a sample depends on the batch."""
        with suppress(Exception), CheckMode(self._passes.dtype):
            chunk = call.in_replicas[number].arguments
            alone = copied(module, self._passes.dtype)
            once, twice, whole = (alone(*args, **kwargs) for args, kwargs in (chunk, chunk, call.arguments))
            pairs = compared(once, whole, self._passes.rows[number])
            return (
                not any(map(_uses_batch, module.modules())) and agree(once, twice) and any(gap(*pair) for pair in pairs)
            )
        return False

    def _whole_list(self, suspect: ModuleCall, call: ModuleCall) -> str:
        arguments = [[*args, *kwargs.values()] for args, kwargs in (suspect.arguments, call.arguments)]
        total = self._passes.rows[0].total
        pairs = zip(*arguments, strict=False)
        return _LIST if any(_holds_list(some, whole, total) for some, whole in pairs) else ""

    def _changed_attributes(self, call: ModuleCall) -> str:
        names = ", ".join(_different_attributes(self._one.module, self._many.module, call.key[0]))
        return names and f"{names} changed in this pass"

    def _cause_in_class(self, module: nn.Module, call: ModuleCall) -> str:
        """Return a note if a converted class differs on one device from the class it replaced."""
        if type(module) is not type(call.module):
            args, kwargs = call.arguments
            with suppress(Exception), CheckMode(self._passes.dtype):
                now, then = (copied(each, self._passes.dtype)(*args, **kwargs) for each in (module, call.module))
                if not agree(now, then):
                    names = f"{type(module).__name__} computes something else than {type(call.module).__name__}"
                    return f"{names}, which it replaces, on one device, too; {_FORMULA}"
        return ""

    def _line_of_gradient(self) -> str:
        with suppress(Exception):  # The model may not run again.
            is_gradient = self._difference.kind == "gradient"
            return line_of_gradient(self._passes, self._index, self._difference.name) if is_gradient else ""
        return ""

    def _calls(self, path: str = "") -> str:
        return _text_of_calls(self._many.module, self._record.begun, self._modes, _BY_SAMPLE, path)

    def _changed_parameter(self, call: ModuleCall) -> str:
        """Return a note if the call changes one of its parameters differently in replicas than on one device."""
        one, many = (taken["parameter"] for taken in (self._of_one, self._of_many))
        for name, _ in call.module.named_parameters(prefix=call.key[0]):
            if name in many and name not in self._of_one["assigned"] and gap(many[name], one[name]):
                text = f"its forward() changes the parameter {name} in place, and each replica once more, as all share"
                return f"{text} its memory; compute another tensor from it, or change it outside"
        return ""


def _text_of_calls(
    model: nn.Module, on_one: Mapping[str, int], modes: Sequence[CheckMode], remedy: str, path: str = ""
) -> str:
    """Return a note about the first synchronized layer that replicas do not call as often as one device."""
    modules = model.get_submodule(path).named_modules(prefix=path)
    for name in [name for name, module in modules if _synchronizes(module)]:
        others = [mode.begun[name] for mode in modes]
        if {*others} != {on_one[name]}:
            return f"number of calls of {name}: {on_one[name]} on one device, {others} in replicas{remedy}"
    return ""


def _related(of_replicas: Tensor, on_one: Tensor, name: str, sizes: list[int], remedy: str) -> list[str]:
    """Compare scalars of replicas with one device: is their sum, mean, or weighted mean equal to it?

    Args:
        of_replicas: one value for each replica.
        on_one: the value on one device.
        name: output name, for the message.
        sizes: number of rows of each replica.
        remedy: advice if no relation holds.

    Returns:
        The relation and the values, in words.
    """
    ways = [("sum", of_replicas.sum(), "add them up"), ("mean", of_replicas.mean(), "take their mean")]
    if len(set(sizes)) > 1 and len(sizes) == len(of_replicas):
        mean = torch.tensor(sizes, dtype=torch.float64) @ of_replicas / sum(sizes)
        ways.append(("mean weighted by rows", mean, "weight them by their rows, or return sums and counts"))
    values, rows = [", ".join([f"{each:.6g}" for each in of[:4]]) for of in (of_replicas.tolist(), sizes)]
    more = ", ..." if len(of_replicas) > 4 else ""
    numbers = f"replicas with [{rows}{more}] rows return {values}{more}, one device returns {float(on_one):.6g}"
    if not (on_one + of_replicas.sum()).isfinite():
        return [f"the loss differs: {name}{remedy}", numbers]
    for way, value, what_to_do in ways:
        if not gap(value, on_one):
            text = f"the loss differs: {name}of what replicas return, the {way} is that of one device; {what_to_do}"
            return [f"{text}, {_IN_REPLICAS}", numbers]
    return [f"the loss differs: {name}no sum or mean of what replicas return is that of one device; {remedy}", numbers]


def text_of_failure(error: Exception, passes: CheckConfig, model: nn.Module, modes: Sequence[CheckMode]) -> str:
    """Return the message for an error raised only in replicas, with its module. `model` is the copy with replicas."""
    calls = _text_of_calls(model, passes.begun, modes, _AS_OFTEN) if isinstance(error, ReplicaSyncError) else ""
    text = f"runs on one device, but not in replicas: {type(error).__name__}: {calls or shortened(error, 30)}"
    where = ""
    # Other replicas raise other errors, when they are released from their wait.
    for call, _ in [mode.failed for mode in modes if mode.failed and mode.failed[1] is error]:
        where = f"raised in {_name_of_call(call, model)}"
        module = model.get_submodule(call.key[0])
        if "batch_norm" in call.called and "Expected more than 1 value" in text and not _uses_batch(module):
            where += f": {_cause_in_norm(module, call.called, 1) or _PLAIN_NORM}"
    return joined(text, where, text_of_hooks(model, passes.model))


def joined(*texts: str, most: int = MOST_WORDS) -> str:
    """Join nonempty texts until the next one would exceed `most` words."""
    result, *others = filter(None, texts)
    for text in others:
        if len(f"{result} {text}".split()) > most:
            break
        result = f"{result}; {text}"
    return result


def _different_attributes(one: nn.Module, many: nn.Module, module: str = "") -> list[str]:
    """Return names of attributes that differ between two copies of a model, or of one of its modules."""
    here, there = _attributes_of(one, module), _attributes_of(many, module)
    return [name for name in here | there if not agree(_plain(there.get(name)), _plain(here.get(name)))][:_MOST]


def _attributes_of(model: nn.Module, module: str) -> dict[str, Any]:
    """Return attributes, parameters and buffers of all nested modules by name, without the fields of `nn.Module`."""
    attributes = dict[str, Any]()
    for name, child in dict(model.named_modules())[module].named_modules(prefix=module):
        # Running statistics are left out: they follow from the inputs of the layer.
        left_out = _OF_MODULES | {*nn.BatchNorm1d(1)._buffers} if isinstance(child, BatchNormBase) else _OF_MODULES
        is_opaque = isinstance(child, (nn.DataParallel, torch.jit.ScriptModule))
        members = {} if is_opaque else {**vars(child), **child._parameters, **child._buffers}
        attributes |= {f"{name}.{key}".strip("."): members[key] for key in members if key not in left_out}
    return attributes


def _plain(value: Any, depth: int = 4) -> Any:  # The depth is arbitrary.
    """Convert an attribute to nested lists of tensors, numbers, flags and strings."""
    if isinstance(value, (*SCALARS, Tensor)):
        return value
    if not depth or isinstance(value, nn.Module):
        return None
    held = value if isinstance(value, (Mapping, Sequence, Set)) else getattr(value, "__dict__", {})
    items = [*held, *held.values()] if isinstance(held, Mapping) else held
    return [type(value).__name__, *[_plain(item, depth - 1) for item in items]]


def _holds_list(some: Any, whole: Any, length: int) -> bool:
    """Return whether an argument of `length` entries reached a replica unsplit.

    The argument may be a tensor or a list, also a nested one. A list of tensors was split row by row, so it does not
    count.

    Args:
        some: argument of the replica.
        whole: the same argument on one device.
        length: number of samples in the batch.
    """
    if isinstance(some, Tensor):
        return some.dim() > 0 and len(some) == length and some.shape == getattr(whole, "shape", None)
    entries = [*some] if is_sequence_type(type(some)) else []
    is_whole = len(entries) == length and not all(isinstance(entry, Tensor) and entry.dim() for entry in entries)
    of_some, parts = children_of(some), children_of(whole)
    inside = [_holds_list(child, parts.get(key), length) for key, child in of_some.items()]
    return is_whole or (len(of_some) == len(parts) and any(inside))


def _name_of_call(call: ModuleCall, model: nn.Module) -> str:
    """Return the module's name and class, for messages. The class gets its file if a base class has the same name."""
    (name, number), cls = call.key, type(model.get_submodule(call.key[0]))
    has_namesake = cls.__name__ in [base.__name__ for base in cls.__mro__[1:]]
    name_of_class = f"{cls.__module__}.{cls.__name__}" if has_namesake else cls.__name__
    return f"{name or 'the model itself'} ({name_of_class}{f', call {number + 1}' if number else ''})"


def _cause_in_norm(module: nn.Module, called: set[str], replicas: int) -> str:
    """Return why a batch norm is not synchronized, or an empty string if it is."""
    if reason := reason_not_converted(module, {}):
        return f"a batch norm that convert_model leaves as it is: it {reason.partition(' ')[2]}"
    if not isinstance(module, _SynchronizedBatchNorm):
        is_plain = isinstance(module, BatchNormBase)
        return "a batch norm that is not synchronized; call convert_model(model)" if is_plain else ""
    if (module.group_size or replicas) < replicas:
        text = f"with its group_size of {module.group_size}, groups of so many of the {replicas} replicas normalize"
        return f"{text} separately; set it to None, unless meant"
    base = next(cls.__name__ for cls in type(module).__mro__ if cls.__module__ == _SynchronizedBatchNorm.__module__)
    text = f"its forward never calls that of {base}; call {base}.forward(self, input), not F.batch_norm; {_FORMULA}"
    return "" if "sync_batch_norm" in called or not module.training else text


def text_of_hooks(model: nn.Module, original: nn.Module) -> str:
    """Return which hook uses an attribute or container of the original that methods use, too; `model`, a copy, ran."""
    held = [(f"{name}.{key}", it) for name, child in original.named_modules() for key, it in vars(child).items()]
    names = {id(it): name.strip(".") for name, it in held if isinstance(it, (dict, list, set, deque))}
    methods = [it for child in model.modules() for cls in type(child).__mro__ for it in vars(cls).items()]
    codes: set[Any] = {getattr(inspect.unwrap(it), "__code__", None) for key, it in methods if key != "__init__"}
    for module, hook, variables in hooks_of(model):
        values, code = [*variables.values(), *(hook.__defaults__ or ())], hook.__code__
        words = {name for other in codes - {code, None} for name in other.co_names} - _OF_MODULES
        words &= {*code.co_names, *code.co_consts}  # the latter for setattr
        used = [key for it in values if isinstance(it, nn.Module) for key in vars(it) if key in words]
        if used := [*used, *[names[id(it)] for it in values if id(it) in names]]:
            name = f"{hook.__qualname__} of {module or 'the model itself'} ({', '.join(used)})"
            return f'{_OF_ORIGINAL}: {name}, see "Hooks that refer to the model"'
    return ""


def _uses_batch(module: object) -> bool:
    return isinstance(module, _SynchronizedBatchNorm) and module.training


def _synchronizes(module: Any) -> bool:
    return _uses_batch(module) and module.group_size != 1


# NOTE [tried for gradients]: to name the faulty module of a wrong gradient, by hooks on tensors. They searched for the
# last call of the backward pass with a correct gradient of its output and a wrong gradient of its input. Of 11 planted
# faults, this named the right module 7 times, and its successor twice. It fails because a hook of the user runs first,
# and because results computed under no_grad have no gradient to compare.
