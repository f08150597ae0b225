"""Explain a difference: name the first faulty module call, its line, and its cause.

Once a module is wrong, the outputs of many later modules differ, too. Other outputs differ without harm. Therefore each
suspected module call is tested: the replicas run the pass again, but the output of this call is replaced by the output
on one device. The call counts as faulty only if the replacement changes the result for the caller. A cause is reported
if it is certain (a batch norm without synchronization, another number of calls, a replaced class), or if an experiment
with the model shows it.
"""

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm, reason_not_converted
from ..meeting import ReplicaSyncError
from ..torch_private import BatchNormBase
from .compare_calls import CompareMode, PatchMode, RecordMode, suspects_in
from .compare_passes import (
    IN_FORWARD,
    IN_PLACE,
    Check,
    Difference,
    FailsInReplicas,
    TwinRun,
    cause_of,
    differences,
    scalars,
)
from .compare_tensors import SCALARS, agree, gap_text, is_unsplit, numbers_of, tensors_of
from .faulty_line import CHANGES, RANDOM, Line, line_of_call, line_of_gradient
from .twin import OF_MODULES, CheckMode, ModuleCall, copied, shortened

__all__: list[str] = []

# At most this number of module calls is tested as the possible cause, and a message names at most this number of
# attributes. The number is arbitrary.
_MOST = 5
MOST_WORDS = 60  # Largest number of words in a message.

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
_IN_REPLICAS = 'see the page "Where to compute the loss"'
_PLAIN_NORM = "it calls F.batch_norm, or a batch norm that is no submodule; make it an attribute, and convert the model"


class Investigation:
    """Explain a difference.

    The pass in which the difference was found runs once more, with new copies of the model.

    Args:
        check: the model and options of the check.
        index: number of earlier passes.
        difference: the difference to explain.
    """

    def __init__(self, check: Check, index: int, difference: Difference) -> None:
        self._check, self._index, self._difference = check, index, difference
        self._one, self._many = (TwinRun(check, is_one, index) for is_one in (True, False))
        self._lost = _different_attributes(self._one.module, self._many.module) if index else []
        self._record = RecordMode(check.dtype)
        self._of_one = self._one.take(index, difference.kind, [self._record])
        modes = [CompareMode(self._record, i, check.rows, self._many.module) for i in range(len(check.rows))]
        self._of_many = self._many.take(index, difference.kind, modes)
        others = [mode.gets_other for mode in modes if mode.gets_other and mode.gets_other.key[0] != check.name]
        self._gets_other = _name_of_call(others[0], self._many.module) if others else ""
        self._hooks = self._one.text_of_hooks()

    def text(self) -> str:
        """Return the text of the error: the difference, the place where it begins, and its cause."""
        kind, name = self._difference[:2]
        what, *evidence = self._evidence() or [self._difference.text]
        # If a hook refers to the user's model, outputs may have other shapes because of this hook. So do not quote the
        # shapes.
        if self._hooks and name is None:
            what = "outputs differ"
        # If the loss is the first wrong result, all outputs are right, and usually no module is at fault. So do not
        # search for a faulty module. There are two exceptions: a replica returned a wrong scalar, or an output has a
        # class that the check cannot compare.
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
        """Return the sentences of the error message for a wrong result that no module call explains."""
        overridden = self._many.parallel.overridden if self._difference.kind in IN_FORWARD else ()
        note = f"your wrapper has its own {' and '.join(overridden)}, which the check has used" if overridden else ""
        why, line = "" if evidence or (self._hooks and self._difference.name is None) else self._why(), ""
        if not why and self._difference.kind == "gradient":
            with suppress(Exception):  # The model may not run again.
                line = line_of_gradient(self._check, self._index, self._difference.name)
        what += "" if why or line or self._hooks else self._where_to_look()
        return [what, self._hooks, line, *evidence, self._rows(), note, why, self._state() or self._calls()]

    def _why(self) -> str:
        """If no module call explains the wrong result, return another cause, or "" if none is certain."""
        kind, name = self._difference[:2]
        why = cause_of(self._difference, self._of_one, self._of_many)
        owner = dict(self._many.module.named_modules()).get(str(name).rpartition(".")[0])
        # The cause from `cause_of` is wrong in two cases. First, a buffer that changes in place is no fault in a
        # synchronized layer. Second, the user's loss function is not at fault if it gets a list from the user's own
        # `gather`, and a tensor on one device.
        is_of_batch = why == IN_PLACE and _synchronizes(owner)
        return "" if is_of_batch or (kind == "loss" and "gather" in self._many.parallel.overridden) else why

    def _where_to_look(self) -> str:
        """Return advice for the user: where in the model to look for the cause of a wrong gradient."""
        kind, name = self._difference[:2]
        if kind != "gradient" or any(True for _ in scalars(self._of_one, self._of_many)):
            return ""
        grads = self._of_one[kind]
        before = [other for other in list(grads)[: list(grads).index(name)] if grads[other] is not None]
        agreed = [f", while that of {other}, before it, agrees" for other in before if numbers_of(grads[other]).any()]
        where = f"{agreed[-1]}; if no branch leads past that, look between these two" if agreed else "; look"
        return f"{where} for detach, no_grad, hooks on tensors and a torch.autograd.Function"

    def _rows(self) -> str:
        """Return a note if an output in replicas has the same rows as on one device, but in another order.

        The samples may be in another order if the output has more or fewer rows than the batch. For example, if a model
        computes two views of each sample, the output `torch.cat([z1, z2])` has twice as many rows.
        """
        one, many = (taken["output"].get(self._difference.name) for taken in (self._of_one, self._of_many))
        total = self._check.rows[0].total
        if one is None or many is None or not one.dim() or len(one) == total:
            return ""
        why = f"{len(one)} rows for {total} samples, in another order in replicas; return z1, z2, not cat([z1, z2])"
        return why if agree(numbers_of(many).sort(0).values, numbers_of(one).sort(0).values) else ""

    def _state(self) -> str:
        """Return a note with the attributes and buffers whose values in replicas were already wrong before the pass."""
        if buffers := [name for name in self._lost if name in dict(self._one.module.named_buffers())]:
            return f"the buffer {', '.join(buffers)} differs from that on one device: {IN_PLACE}"
        differs = f"{', '.join(self._lost)} differs from one device" if self._lost else ""
        why = f"what forward() sets on self ends with the replica, so {differs}; change a buffer in place instead, or"
        # A hook that refers to the user's model may be the cause of the difference. So do not blame `forward`.
        return differs if not differs or self._hooks else f"{why} set it outside the forward pass"

    def _changes(self, modes: Sequence[CheckMode]) -> bool:
        """Run the pass in replicas again, under the given modes, and return whether the wrong result changes."""
        kind, name = self._difference[:2]
        # The modes may replace an output by one of another shape, and later code may raise an error for this shape.
        with suppress(FailsInReplicas):
            seen = TwinRun(self._check, False, self._index).take(self._index, kind, modes)[kind]
            return not agree(seen.get(name, seen), self._of_many[kind].get(name, self._of_many[kind]))
        return False

    def _evidence(self) -> list[str]:
        """Return notes about scalars that replicas return, such as a loss.

        The check perturbs the parameters, so the user has never seen the values that the check compares. If values also
        differ in the unperturbed model, the notes quote these.
        """
        kind, name = self._difference[:2]
        is_number = kind == "output" and name is not None and self._of_one[kind][name].numel() == 1
        if kind not in ("loss", "gradient") and not is_number:
            return []
        one, many = (TwinRun(self._check, is_one, is_moved=False).take(0, "loss") for is_one in (True, False))
        if self._index or not any(other.kind in IN_FORWARD for other in differences(one, many)):
            one, many = self._of_one, self._of_many
        pairs = sorted(scalars(one, many), key=lambda pair: agree(pair[0].mean(), pair[1]))
        if not pairs:
            return []
        divides_outside = self._check.loss is not None and len(pairs) > 1
        remedy = f"compute it from the gathered output{'' if divides_outside or self._check.pads else _DIVIDES}"
        if kind == "gradient":
            return [self._difference.text, f"if replicas return the loss, {remedy}"]
        before = _PADS if self._check.pads else f", {_IN_REPLICAS}; or something before it mixes samples"
        gets = f": what {self._gets_other} gets differs, too" if self._gets_other else ""
        return _related(*pairs[0], [len(rows.here) for rows in self._check.rows], f"{remedy}{before}{gets}")

    def _where(self, state: str) -> tuple[str, str]:
        """Return (place, cause) of the first faulty module call, or ("", ""); see NOTE [tried for gradients].

        A call is faulty if three things hold. Its inputs agree with one device. Its output does not. And the result of
        the whole model changes if the call returns the output from one device instead.
        """
        model, check = self._many.module, self._check
        calls = [(call, suspects) for call in self._record.calls.values() if (suspects := suspects_in(call, model))]
        for call, suspects in calls[:_MOST]:
            if self._changes([PatchMode(check.dtype, call, rows) for rows in check.rows]):
                number, cause = self._cause(call, suspects, state)
                part, how = suspects[number].gap
                where = f"{part} of {_name_of_call(call, model)}, in replica {number}"
                return f"first difference: {where}, {how}", cause
        return "", ""

    def _cause(self, call: ModuleCall, suspects: Mapping[int, ModuleCall], state: str) -> tuple[int, str]:
        """Return (number of the replica with the fault, cause or source line) for a faulty module call.

        Args:
            call: the call on one device.
            suspects: maps the number of each replica with a wrong output to the same call in this replica.
            state: note about attributes that differed before the pass, or "".
        """
        first, module = min(suspects), self._many.module.get_submodule(call.key[0])
        cause = _cause_in_norm(module, suspects[first].called, len(call.in_replicas))
        cause = cause or self._changed_parameter(call) or state
        if cause := cause or self._cause_in_class(module, call) or self._calls(call.key[0]):
            return first, cause
        for number in suspects:
            with suppress(Exception):  # The model may not run again.
                if (line := line_of_call(self._check, self._index, call.key, number))[0]:
                    return number, self._cause_by_line(line, call, number, suspects[number])
        return first, self._cause_by_line(("", None, ""), call, first, suspects[first])

    def _cause_by_line(self, line: Line, call: ModuleCall, number: int, suspect: ModuleCall) -> str:
        """Return a text with the faulty source line; if no line is certain, with the changes that were observed."""
        text, operation, why = line
        module = self._many.module.get_submodule(call.key[0])
        called = {operation.place.name} if operation else suspect.called
        # A wrong result of `grad` may come from the value that it differentiates. So do not name the line of `grad`.
        if "grad" in called:
            return _GRADIENT
        names = ", ".join(_different_attributes(self._one.module, self._many.module, call.key[0]))
        changed = names and f"{names} changed in this pass"
        pairs = zip(*[[*args, *kwargs.values()] for args, kwargs in (suspect.arguments, call.arguments)], strict=False)
        beside = _LIST if any(is_unsplit(here, there, self._check.rows[0].total) for here, there in pairs) else ""
        if operation and operation.gets_another() and changed:
            return changed
        if why:
            beside = changed if why == CHANGES else ""
        elif "batch_norm" in called:
            beside = _PLAIN_NORM
        elif operation or (not changed and self._mixes_samples(module, call, number, suspect)):
            is_of_torch = type(module).__module__.startswith("torch.nn")  # Torch's own code is correct.
            # If the model gets several input tensors, the wrapper may have split one of them along a wrong dimension.
            is_open = is_of_torch or self._check.path or len(tensors_of(self._check.arguments)) > 1
            beside = beside or (_NO_SAMPLES if is_open else "")
            beside = beside if operation else f"{SAMPLES}{beside and '; '}{beside}"
        return "; ".join(filter(None, [text + (why and f": {why}"), beside or changed]))

    def _mixes_samples(self, module: nn.Module, call: ModuleCall, number: int, suspect: ModuleCall) -> bool:
        """Return whether the output of a module for one sample depends on other samples.

        If the output changes from call to call with the same inputs, return False.

        Run a copy of the module three times, outside the model: twice with the inputs that the module got in replica
        `number`, and once with its inputs on one device.
        """
        with suppress(Exception), CheckMode(self._check.dtype):
            alone = copied(module, self._check.dtype)
            calls = (suspect.arguments, suspect.arguments, call.arguments)
            once, twice, whole = (alone(*args, **kwargs) for args, kwargs in calls)
            differs = any(gap_text(once, whole, self._check.rows[number]))
            return differs and agree(once, twice) and not any(map(_uses_batch, module.modules()))
        return False

    def _cause_in_class(self, module: nn.Module, call: ModuleCall) -> str:
        """Return a note if the conversion of a layer has changed the result of the layer."""
        if type(module) is not type(call.module):
            args, kwargs = call.arguments
            with suppress(Exception), CheckMode(self._check.dtype):
                now, then = (copied(each, self._check.dtype)(*args, **kwargs) for each in (module, call.module))
                if not agree(now, then):
                    names = f"{type(module).__name__} computes something else than {type(call.module).__name__}"
                    return f"{names}, which it replaces, on one device, too; {_FORMULA}"
        return ""

    def _calls(self, path: str = "") -> str:
        return _text_of_calls(self._many, self._record.begun, _BY_SAMPLE, path)

    def _changed_parameter(self, call: ModuleCall) -> str:
        """Return a note if the module changes a parameter in place, and replicas end with another value."""
        one, many = (taken["parameter"] for taken in (self._of_one, self._of_many))
        for name, _ in call.module.named_parameters(prefix=call.key[0]):
            if name in many and name not in self._of_one["assigned"] and not agree(many[name], one[name]):
                text = f"its forward() changes the parameter {name} in place, and each replica once more, as all share"
                return f"{text} its memory; compute another tensor from it, or change it outside"
        return ""


def _text_of_calls(run: TwinRun, on_one: Mapping[str, int], remedy: str, path: str = "") -> str:
    """Return a note about a synchronized layer that runs more often, or less often, in a replica than on one device.

    Args:
        run: the run in replicas.
        on_one: number of calls on one device, by the name of the module.
        remedy: advice at the end of the note.
        path: name of the module to search for such a layer; "" for the whole model.
    """
    modules = run.module.get_submodule(path).named_modules(prefix=path)
    for name in [name for name, module in modules if _synchronizes(module)]:
        others = [mode.begun[name] for mode in run.parallel.modes]
        if {*others} != {on_one[name]}:
            return f"number of calls of {name}: {on_one[name]} on one device, {others} in replicas{remedy}"
    return ""


def _related(of_replicas: Tensor, on_one: Tensor, name: str, sizes: list[int], remedy: str) -> list[str]:
    """Return sentences about the replicas' values: whether their sum or mean is the value on one device.

    Args:
        of_replicas: the values of the scalar in all replicas.
        on_one: the value of the scalar on one device.
        name: name of the output, for the message.
        sizes: for each replica, the number of rows in its chunk.
        remedy: advice if neither the sum nor a mean is the value on one device.
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
        if agree(value, on_one):
            text = f"the loss differs: {name}of what replicas return, the {way} is that of one device; {what_to_do}"
            return [f"{text}, {_IN_REPLICAS}", numbers]
    return [f"the loss differs: {name}no sum or mean of what replicas return is that of one device; {remedy}", numbers]


def text_of_failure(error: Exception, run: TwinRun) -> str:
    """Return the message for an error that only replicas raise.

    The message names the module that raised the error.

    Args:
        error: the error from one of the replicas.
        run: the failed run, with the copy of the model.
    """
    calls = _text_of_calls(run, run.check.begun, _AS_OFTEN) if isinstance(error, ReplicaSyncError) else ""
    text = f"runs on one device, but not in replicas: {type(error).__name__}: {calls or shortened(error, 30)}"
    where = ""
    # Find the module call that raised this error. Other replicas wait for the failed one, and raise later errors.
    for call, _ in [mode.failed for mode in run.parallel.modes if mode.failed and mode.failed[1] is error]:
        where = f"raised in {_name_of_call(call, run.module)}"
        module = run.module.get_submodule(call.key[0])
        if "batch_norm" in call.called and "Expected more than 1 value" in text and not _uses_batch(module):
            where += f": {_cause_in_norm(module, call.called, 1) or _PLAIN_NORM}"
    return joined(text, where, run.text_of_hooks())


def joined(*texts: str, most: int = MOST_WORDS) -> str:
    """Join texts with semicolons, and stop before the text that would make the message longer than `most` words."""
    result, *others = filter(None, texts)
    for text in others:
        if len(f"{result} {text}".split()) > most:
            break
        result = f"{result}; {text}"
    return result


def _different_attributes(one: nn.Module, many: nn.Module, module: str = "") -> list[str]:
    """Return the names of attributes whose values on one device and in replicas differ.

    Args:
        one: the copy of the model for one device.
        many: the copy of the model for replicas.
        module: name of the module to compare, with its submodules; "" for the whole model.
    """
    here, there = _attributes_of(one, module), _attributes_of(many, module)
    return [name for name in here | there if not agree(_plain(there.get(name)), _plain(here.get(name)))][:_MOST]


def _attributes_of(model: nn.Module, module: str) -> dict[str, Any]:
    """Return a dict of the attributes, parameters and buffers of a module and its submodules, with dotted names.

    The result contains neither the attributes that `nn.Module` itself sets, nor running statistics.
    """
    attributes = dict[str, Any]()
    for name, child in dict(model.named_modules())[module].named_modules(prefix=module):
        # Leave out running statistics: the layer computes them from its inputs, and the user's `forward` does not set
        # them.
        left_out = OF_MODULES | {*nn.BatchNorm1d(1)._buffers} if isinstance(child, BatchNormBase) else OF_MODULES
        is_opaque = isinstance(child, (nn.DataParallel, torch.jit.ScriptModule))
        members = {} if is_opaque else {**vars(child), **child._parameters, **child._buffers}
        attributes |= {f"{name}.{key}".strip("."): members[key] for key in members if key not in left_out}
    return attributes


def _plain(value: Any, depth: int = 4) -> Any:  # The depth is arbitrary.
    """Convert the value of an attribute to nested lists of tensors, numbers, flags and strings."""
    if isinstance(value, (*SCALARS, Tensor)):
        return value
    if not depth or isinstance(value, nn.Module):
        return None
    held = value if isinstance(value, (Mapping, Sequence, Set)) else getattr(value, "__dict__", {})
    items = [*held, *held.values()] if isinstance(held, Mapping) else held
    return [type(value).__name__, *[_plain(item, depth - 1) for item in items]]


def _name_of_call(call: ModuleCall, model: nn.Module) -> str:
    """Return the name and class of a called module, for messages.

    If a class and one of its base classes have the same name, the class is named with its Python module.
    """
    (name, number), cls = call.key, type(model.get_submodule(call.key[0]))
    has_namesake = cls.__name__ in [base.__name__ for base in cls.__mro__[1:]]
    name_of_class = f"{cls.__module__}.{cls.__name__}" if has_namesake else cls.__name__
    return f"{name or 'the model itself'} ({name_of_class}{f', call {number + 1}' if number else ''})"


def _cause_in_norm(module: nn.Module, called: set[str], replicas: int) -> str:
    """If the module is a batch norm that does not synchronize, return the reason, otherwise "".

    Args:
        module: the module, in a copy of the model with replicas.
        called: names of the functions that the module has called: batch_norm, sync_batch_norm or grad.
        replicas: number of replicas.
    """
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


def _uses_batch(module: object) -> bool:
    return isinstance(module, _SynchronizedBatchNorm) and module.training


def _synchronizes(module: Any) -> bool:
    return _uses_batch(module) and module.group_size != 1


# NOTE [tried for gradients]: we tried to find the module that makes a gradient wrong, by hooks on tensors. The search
# was for the last module call in the backward pass where the gradient of the output is right, and the gradient of the
# input is wrong. Of 11 faults that we planted, it found the right module 7 times, and the next module twice. It fails
# because hooks of the user run before ours, and because results under no_grad have no gradients.
