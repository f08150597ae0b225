"""What differs first between one device and replicas, in the order of a training step, and the probable cause."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm, why_left
from ..torch_private import BatchNormBase
from .comparing import ROUNDING, TOLERANCE, gap, largest
from .recording import Call, Copy, Difference, InDouble, OneDevice, has_hooks_of_others

__all__: list[str] = []


_DRAWS = "draws random numbers, which differ in replicas, and may be meant to; switch that off to compare the rest"

_RETURN_SUMS = "return sums and counts from the replicas, add them up, and divide outside"
_NO_MEAN = (
    "what each replica returns is no plain mean over its samples: it divides by something that depends on the chunk, "
    f"as with class weights, ignore_index or Dice; {_RETURN_SUMS}"
)
_MORE = "`loss` depends on more than the output, as on random numbers"

# What a layer calls in its own forward on one device or in replicas, not in both.
_NORMS = ("batch_norm", "add_", "sync_batch_norm")

_FORMULA = (
    'For another formula than that of F.batch_norm, use sync_moments, see "Norms of your own" in docs/extending.md'
)

# Where a module could not be called again to find out which of these it is.
MIXES = "it mixes samples, as x.mean(0) does, or depends on the size of the batch or a sample's place in it"


@dataclass
class Steps:
    """A training step on one device, and the same one in replicas."""

    one: Copy
    many: Copy
    trace: OneDevice
    found: list[Difference]  # between calls of modules
    sizes: list[int]  # the number of rows in the chunk of each replica
    results: list[list[Tensor]]  # what each replica has returned
    has_loss: bool  # whether the user has passed one

    def first_difference(self) -> str | None:
        """Return what differs first for the caller, where, and the probable cause."""
        text = next(self._differences(), None)
        if text is None or _DRAWS in text or not (self.one.has_dropout or self.trace.has_dropout):
            return text
        return f"{text} (compared with dropout switched off)"

    def _differences(self) -> Iterator[str]:
        """Yield what differs for the caller, in the order of the step."""
        yield from self._different_outputs_and_loss()
        yield from self._different_gradients()
        yield from self._different_parameters()
        yield from self._different_buffers()
        yield from self._different_attributes()

    def _different_outputs_and_loss(self) -> Iterator[str]:
        one, many = self.one, self.many
        shapes, found = ([tuple(tensor.shape) for tensor in step.outputs] for step in (one, many))
        pairs = zip(many.outputs, one.outputs, strict=False)
        gaps = [gap(actual, expected) for actual, expected in pairs if expected.numel() != 1]
        has_scalars = any(output.numel() == 1 for output in one.outputs)  # one from each replica
        largest_gap = max(gaps, default=0.0) if len(shapes) == len(found) else math.inf
        # What moves the loss as little as outputs that agree may do is no difference.
        loss_gap = gap(many.loss, one.loss, max(one.slack, TOLERANCE * largest(*one.outputs)))
        if 0.0 < largest_gap < math.inf or (loss_gap and has_scalars):
            yield from self._different_modules()
        if largest_gap:
            sizes_differ = (
                f"have shapes {shapes} on one device, {found} in replicas; return a row for each sample, and compute "
                "what concerns the whole batch from the gathered output"
            )
            by = f"differ, by {largest_gap:.1e} of their largest value"
            cause = f"; the model {_DRAWS}" if one.draws else ""
            yield f"outputs {sizes_differ if largest_gap == math.inf else by + cause}"
        yield from self._different_values()
        if loss_gap:
            ratio = float(many.loss / one.loss)
            by = f"by {abs(ratio - 1):.1e} of it" if abs(ratio - 1) < 0.01 else f"ratio {ratio:.3}"
            cause = self._cause_in_scalars(ratio) if has_scalars else _MORE
            what = "outputs agree, the loss does not" if gaps else "the loss differs"
            yield f"{what}: {one.loss:.6g} on one device, {many.loss:.6g} in replicas ({by}): {cause}"

    def _different_values(self) -> Iterator[str]:
        """Yield which numbers, flags and strings among the outputs differ."""
        if len(self.one.values) != len(self.many.values):
            return
        for expected, actual in zip(self.one.values, self.many.values, strict=True):
            if not _agree(actual, expected):
                yield (
                    f"among the outputs, {expected!r} on one device is {actual!r} in replicas: numbers, flags and "
                    "strings are those of replica 0; return a tensor with a row for each sample, and compute what "
                    "concerns the whole batch from the gathered output"
                )

    def _scalars(self) -> tuple[Tensor, Tensor]:
        """Return the scalars that one device returns, and those of replicas, a row for each."""
        scalars = [i for i, tensor in enumerate(self.one.outputs) if tensor.numel() == 1]
        rows = [[tensors[i] for i in scalars] for tensors in (self.one.outputs, *self.results)]
        of_one, *of_replicas = [torch.stack([tensor.double().reshape(()) for tensor in row]) for row in rows]
        return of_one, torch.stack(of_replicas)

    def _cause_in_scalars(self, ratio: float) -> str:
        """Return the probable cause of a loss that differs by this ratio, where each replica returns a scalar."""
        of_one, of_replicas = self._scalars()
        for i, values in enumerate(of_replicas):
            if of_one.isfinite().all() and not values.isfinite().all():
                value = float(values[~values.isfinite()][0])
                why = "as of a mean over nothing (ignore_index, an empty mask)"
                return f"replica {i} returns {value}, {why}; {_RETURN_SUMS}"
        if math.isclose(ratio, len(self.sizes), rel_tol=TOLERANCE):
            return "each replica returns a mean, and `loss` adds them up; take their mean"
        if math.isclose(ratio * len(self.sizes), 1.0, rel_tol=TOLERANCE):
            taken = "`loss` takes their mean; add them up"
            alone = "without a `loss` their mean is taken; pass loss=torch.sum, if your training adds them up"
            return f"each replica returns a sum, and {taken if self.has_loss else alone}"
        weights = torch.tensor(self.sizes, dtype=torch.float64) / sum(self.sizes)
        if gap(weights @ of_replicas, of_one):
            return _NO_MEAN
        if len(set(self.sizes)) == 1:
            return "each replica returns a mean over its own chunk, and `loss` does not take the mean of these"
        what = f"each replica returns a mean over its own chunk, of {self.sizes} rows"
        return f"{what}; weight them by these numbers, or {_RETURN_SUMS}"

    def _different_gradients(self) -> Iterator[str]:
        one, many = self.one.grads, self.many.grads
        floor = TOLERANCE * largest(*[grad for grad in one.values() if grad is not None])
        agreed = None  # the last gradient of the backward pass that is none of those that differ, and not zero
        for name in one:
            actual, expected = _both(many[name], one[name])
            if by := gap(actual, expected, floor):
                yield from self._hidden_modules()
                has_scalars = any(output.numel() == 1 for output in self.one.outputs)
                if has_scalars and not math.isclose(self.one.loss, self.many.loss, rel_tol=ROUNDING):
                    of_it = abs(float(self.many.loss / self.one.loss) - 1)
                    yield (
                        f"the loss differs by {of_it:.1e} of it, and the gradient of {name} by {by:.1e} of its largest "
                        f"value: {_NO_MEAN}"
                    )
                between = (
                    "" if agreed is None else f", in the forward pass from {name} to {agreed}, whose gradient agrees"
                )
                yield (
                    "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is "
                    f"that of {name}: {self._cause_in_gradient(actual, expected)}{between}"
                )
            elif expected.any():
                agreed = name

    def _cause_in_gradient(self, actual: Tensor, expected: Tensor) -> str:
        """Return what replicas make of a gradient, by its norm, and what to look for."""
        size, whole = float(actual.norm()), float(expected.norm())
        look = "look for detach, no_grad or a branch on the size of the batch"
        if not size or not whole:
            return f"{'it is missing, or zero, in replicas only' if whole else 'only replicas have one'}; {look}"
        ratio, number = size / whole, len(self.sizes)
        own_backward = "a torch.autograd.Function or a hook on a tensor"
        if math.isclose(ratio, number, rel_tol=TOLERANCE):
            what = f"something divides by the number of samples in the backward pass; look for {own_backward}"
        elif math.isclose(ratio * number, 1.0, rel_tol=TOLERANCE):
            what = f"something multiplies by the number of samples in the backward pass; look for {own_backward}"
        else:
            part = "replicas drop a part of it" if ratio < 1 else "replicas have more, or other parts of it"
            what = f"{part}; {look}, and for {own_backward}"
        return f"its norm in replicas is {ratio:.3} times that on one device: {what}"

    def _different_parameters(self) -> Iterator[str]:
        one, many = self.one.parameters, self.many.parameters
        for name, expected in one.items():
            if name not in many:
                yield (
                    f"outputs, loss and gradients agree; after the forward pass, the parameter {name} is there on one "
                    "device only: what a replica makes ends with it; make it in __init__"
                )
            elif by := gap(many[name], expected):
                yield from self._hidden_modules()
                yield (
                    f"outputs, loss and gradients agree; the parameter {name} differs after the forward pass, by "
                    f"{by:.1e} of its largest value: forward() changes it, in each replica once; make it a buffer, "
                    "which only replica 0 writes, or change it outside the forward pass"
                )

    def _different_buffers(self) -> Iterator[str]:
        for name, expected in self.one.buffers.items():
            actual = self.many.buffers.get(name)
            by = math.inf if actual is None else gap(actual, expected)
            if by and name not in self.one.uncounted:
                yield from self._hidden_modules()
                much = "" if by == math.inf else f", by {by:.1e} of its largest value"
                yield (
                    f"outputs, loss and gradients agree; the buffer {name} differs after the forward pass{much}: only "
                    "what replica 0 writes into it in place stays, and that is from its own chunk; update it outside "
                    "the forward pass"
                )

    def _hidden_modules(self) -> Iterator[str]:
        for text in self._different_modules():
            yield (
                f"{text}. Outputs and loss of the model still agree, perhaps because a scale of zero follows, or "
                "nearly zero, which hides this until it is trained"
            )

    def _different_attributes(self) -> Iterator[str]:
        modules = dict(self.many.module.named_modules()) | dict(self.one.module.named_modules())
        for key in self.one.attributes | self.many.attributes:
            actual, expected = (step.attributes.get(key, _UNSET) for step in (self.many, self.one))
            if not _agree(actual, expected):
                name, attribute = key
                kind = type(modules[name]).__name__
                yield (
                    f"outputs, loss, gradients, parameters and buffers agree; the attribute {attribute} of "
                    f"{name or 'the model itself'} ({kind}) differs after the forward pass: {expected!r} on one "
                    f"device, {actual!r} in replicas. What forward() sets on self ends with the replica; keep it in a "
                    "buffer that is changed in place, or set the attribute outside the forward pass"
                )

    def _different_modules(self) -> Iterator[str]:
        """Yield which modules have inputs that agree, and outputs that do not, the first one first."""
        for first in sorted(self.found, key=attrgetter("position", "replica")):
            name, number = first.key
            call, converted = self.trace.calls[first.key], self._converted(first)
            kind = f"{_name_of_class(converted)}{f', call {number + 1}' if number else ''}"
            where = f"output of {name or 'the model itself'} ({kind}), in replica {first.replica}"
            yield f"first difference: {where}, by {first.gap:.1e} of its largest value: {self._cause(call, first)}"

    def _cause(self, call: Call, difference: Difference) -> str:
        """Return the probable cause of a difference in a call."""
        module, replicas = self._converted(difference), len(self.sizes)
        if isinstance(module, _SynchronizedBatchNorm) and (module.group_size or replicas) < replicas:
            return (
                f"with its group_size of {module.group_size}, groups of so many of the {replicas} replicas normalize "
                "separately; set it to None, unless that is meant"
            )
        one, many, inside = self.one.parameters, self.many.parameters, set(call.module.parameters())
        names = [name for name, parameter in self.one.module.named_parameters() if parameter in inside]
        changed = [name for name in names if gap(many.get(name, one[name]), one[name])]
        if changed:
            return (
                f"its forward() changes the parameter {changed[0]} in place, and each replica once more, as all share "
                "its memory; compute another tensor from it, or change it outside the forward pass"
            )
        return _cause_in_call(call, difference, module)

    def _converted(self, difference: Difference) -> nn.Module:
        """Return the module whose replicas differ: on one device, `classes=` of `convert_model` does not apply."""
        return self.many.module.get_submodule(difference.key[0])


class _Unset:
    def __repr__(self) -> str:
        return "unset"


_UNSET = _Unset()  # what an attribute is that no module has


def _agree(actual: Any, expected: Any) -> bool:
    """Return whether the values of two attributes are the same."""
    if isinstance(actual, float) and isinstance(expected, float):
        both_nan = math.isnan(actual) and math.isnan(expected)
        return both_nan or math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE**2)
    return bool(actual == expected)


def _both(actual: Tensor | None, expected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two gradients, zeros for one that is None."""
    shape_of = actual if actual is not None else expected
    zeros = torch.zeros(()) if shape_of is None else torch.zeros_like(shape_of)
    found, wanted = (zeros if grad is None else grad.to_dense() for grad in (actual, expected))
    return found, wanted


def _cause_in_call(call: Call, difference: Difference, converted: nn.Module) -> str:
    """Return the probable cause of a difference in a module, from its call on one device and what it calls there."""
    if call.draws:
        return f"it {_DRAWS}"
    called_in_replica = difference.called
    cause = _cause_in_norm(converted, called_in_replica)
    if cause is not None:
        return cause
    if type(converted) is not type(call.module) and _computes_otherwise(difference, converted, call.module):
        return (
            f"{type(converted).__name__} computes something else than {type(call.module).__name__}, which it replaces, "
            f"on one device, too. {_FORMULA}"
        )
    ignored = _NORMS if isinstance(converted, _SynchronizedBatchNorm) else ()
    called, there = (
        Counter({name: n for name, n in calls.items() if name not in ignored})
        for calls in (call.called, called_in_replica)
    )
    differing = (called - there) | (there - called)
    if differing:
        what = min(differing, key=lambda name: (hasattr(Tensor, name), name))  # names of modules come first
        return (
            f"it calls {what} {called[what]} times on one device, {there[what]} times in the replica; look for a "
            "branch, a loop or a cache that depends on the batch or its size"
        )
    return f"{_dependence(difference, call.module) or MIXES}{_where_else(call.module)}"


def _dependence(difference: Difference, module: nn.Module) -> str | None:
    """Return what the rows that differ depend on; None if the module cannot be called again to find out."""
    with suppress(Exception), InDouble():
        return None if difference.probe is None else difference.probe.dependence(module)
    return None


def _computes_otherwise(difference: Difference, converted: nn.Module, original: nn.Module) -> bool:
    """Return whether two modules return different outputs for the whole batch of a call."""
    with suppress(Exception), InDouble():  # They may not run again.
        return difference.probe is not None and difference.probe.tells_apart(converted, original)
    return False


def _where_else(module: nn.Module) -> str:
    """Return where the code is that a module runs, if it is not in its class alone."""
    places = []
    if "forward" in vars(module):
        places.append("the forward that was set on the module")
    if has_hooks_of_others(module):
        places.append("the forward hooks of the module")
    return f"; look at {' and '.join(places)}" if places else ""


def _name_of_class(module: nn.Module) -> str:
    """Return the name of the class of a module, with that of its file if a base of the class has the same name."""
    cls = type(module)
    bases = [base.__name__ for base in cls.__mro__[1:]]
    return f"{cls.__module__}.{cls.__name__}" if cls.__name__ in bases else cls.__name__


def _cause_in_norm(module: nn.Module, called: Counter[str]) -> str | None:
    """Return why a batch norm, or what calls one in a replica, does not synchronize; None if that is not the cause."""
    reason = why_left(module, {})
    if reason is not None:
        return f"a batch norm that convert_model leaves as it is, because it {reason.partition(' ')[2]}"
    if not isinstance(module, _SynchronizedBatchNorm):
        if isinstance(module, BatchNormBase):
            return "a batch norm that is not synchronized; call convert_model(model)"
        hidden = (
            "it calls F.batch_norm, or a batch norm that is no submodule of it; assign a batch norm to an attribute, "
            "not to a list or dict, call that, and convert the model again"
        )
        return hidden if called["batch_norm"] else None
    if called["sync_batch_norm"]:
        return None
    base = next(cls.__name__ for cls in type(module).__mro__ if cls.__module__ == _SynchronizedBatchNorm.__module__)
    return (
        f"its forward never calls that of {base}, so each replica normalizes with its own chunk; call {base}."
        f"forward(self, input) in place of F.batch_norm. {_FORMULA}"
    )
