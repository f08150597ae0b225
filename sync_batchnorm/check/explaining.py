"""Why a call returns something else in replicas: it is made again on one device; or what is exact about norms."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm, why_left
from ..torch_private import HOOKS, BatchNormBase
from ..wrapper import tensors_in
from .comparing import Rows, agree, chunk_of, gap, much, samples_of
from .copies import copied, modules_in_closure
from .double import Call, InDouble, border, seed
from .passes import Pass

__all__: list[str] = []

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
