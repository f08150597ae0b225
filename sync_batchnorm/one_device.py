"""`assert_matches_one_device`: whether a model computes in replicas what it computes on one device, and what differs.

What the caller sees decides. What modules return only says where a difference begins: experts, buckets or similarity
matrices may differ inside replicas that are right.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .conversion import convert_model
from .layers import _SynchronizedBatchNorm
from .parallel.scatter_gather import tensors_in
from .recording import Loss, Record, RecordedCopy, random_states, set_random_states
from .refusals import check_module
from .replicate import DataParallelWithCallback

__all__ = ["assert_matches_one_device"]

TOLERANCE = 1e-6  # of differences, relative to the largest value of a tensor; rounding makes 1e-9 of real nets
FLOOR = 1e-6  # the least size that they are relative to, as some tensors are zero except for rounding


def assert_matches_one_device(
    model: nn.Module,
    *inputs: Any,
    loss: Loss | None = None,
    replicas: int = 2,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raise an error unless replicas of `model` compute what it computes on one device with the whole batch.

    Two copies of the model, in its modes, run a forward and a backward pass on the CPU, in float64 and without dropout.
    The model and all random states stay as they are. A hook that writes elsewhere also does so for the copies.

    Example:
        >>> model = convert_model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)))
        >>> assert_matches_one_device(model, torch.randn(6, 3), loss=lambda output: output.square().mean())

    Args:
        model: the model, converted or not. Of a wrapper, its module.
        inputs: the whole batch, in trees of tensors, which are cut into chunks as by a `DataParallel`.
        loss: makes a scalar from the gathered output, as ``lambda output: cross_entropy(output, labels)``. None: each
            output gets a random gradient, or, where each replica returns a scalar, the mean of these.
        replicas: how many of them to compare with one device.
        kwargs: keyword inputs.

    Raises:
        AssertionError: naming the first module whose inputs agree and whose output does not; otherwise the loss, the
            first gradient in the order of the backward pass, a parameter or a buffer; by how much, and the probable
            cause. Also if only replicas raise an error.
        TypeError, ValueError: for bad arguments, and a batch of fewer than two chunks.
        RuntimeError: if the model cannot be copied.
    """
    check_module(model)
    dim = getattr(model, "dim", 0) if isinstance(model, nn.DataParallel) else 0
    model = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    states, failure = random_states(), None
    modes = torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False)
    with modes[0], modes[1], modes[2], warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Was asked to gather along dimension 0")  # the losses of replicas
        one, many = (RecordedCopy(model, (inputs, dict(kwargs or {}))) for _ in range(2))
        parallel = DataParallelWithCallback(many, ["cpu"] * max(1, replicas), dim=dim)
        chunks = map(tensors_in, zip(*parallel.scatter(many.given[0], many.given[1], parallel.device_ids), strict=True))
        sizes = [chunk[0].shape[dim] for chunk in chunks if chunk]
        if len(sizes) < 2 or not sum(sizes):
            raise ValueError(
                f"expected at least two chunks, but {replicas} replicas get {sizes} rows; pass a larger batch"
            )
        many.records = [Record() for _ in sizes]
        try:
            one.step(one, loss, ())
            many.step(parallel, loss, one.outputs)
        except Exception as error:
            if not one.is_done:
                error.add_note("This is from a copy of the model on one device: on the CPU, in float64.")
                raise
            failure = error
        finally:
            set_random_states(states)
        text = next(_differences(one, many, sizes, model, failure), None)
        off = " (dropout is switched off in both copies)" if one.records[0].is_dropout_off else ""
    del one, many, parallel, chunks  # which the error would keep alive
    if text is not None:
        raise AssertionError(text + off) from failure and failure.with_traceback(None)


def _differences(
    one: RecordedCopy, many: RecordedCopy, sizes: list[int], model: nn.Module, error: Exception | None
) -> Iterator[str]:
    """Yield what differs for the caller, in the order of the training step."""
    shapes, found = ([tuple(tensor.shape) for tensor in step.outputs] for step in (one, many))
    pairs = [(a, e) for a, e in zip(many.outputs, one.outputs, strict=False) if e.numel() != 1]
    has_scalars = len(pairs) < len(shapes)  # one from each replica
    if many.outputs and (len(shapes) != len(found) or any(a.shape != e.shape for a, e in pairs)):
        yield f"outputs have shapes {shapes} on one device, {found} in replicas; return a row for each sample"
    gap = max((_gap(a, e) for a, e in pairs), default=0.0)
    if gap > TOLERANCE:
        yield from _modules(one, many, sizes, model)
        yield f"outputs differ, by {gap:.1e} of their largest value"
    if error is not None:
        yield f"runs on one device, but not in replicas: {type(error).__name__}: {error}"
    elif _gap(many.loss, one.loss, FLOOR * max(map(_largest, one.outputs), default=0.0)) > TOLERANCE:
        yield from _modules(one, many, sizes, model) if has_scalars else ()
        ratio = float(many.loss / one.loss)
        if not has_scalars:
            cause = "`loss` depends on more than the output, as on random numbers"
        elif math.isclose(ratio, len(sizes), rel_tol=TOLERANCE):
            cause = "each replica returns a mean, and `loss` adds them up; take their mean"
        elif math.isclose(ratio, 1 / len(sizes), rel_tol=TOLERANCE):
            cause = "each replica returns a sum, and `loss` takes their mean; add them up"
        elif len(set(sizes)) > 1:
            cause = f"each replica returns a mean over its own chunk, of {sizes} rows; weight them by these"
        else:
            cause = (
                "each replica returns something else than a mean of its samples; take the loss of the gathered outputs"
            )
        what = "outputs agree, the loss does not" if pairs else "the loss differs"
        yield f"{what}: {one.loss:.6g} on one device, {many.loss:.6g} in replicas (ratio {ratio:.3}): {cause}"
    floor = FLOOR * max((_largest(leaf.grad) for leaf in one.leaves.values() if leaf.grad is not None), default=0.0)
    for name in dict.fromkeys(one.order + many.order):
        leaves = one.leaves[name], many.leaves[name]
        expected, actual = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
        if _gap(actual, expected, floor) > TOLERANCE:
            ratio = float(actual.norm() / expected.norm())
            cause = "only replicas drop it" if not ratio else "they drop a part of it, or add up what should be a mean"
            yield (
                "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that "
                f"of {name} (ratio of norms {ratio:.3}): {cause}; look for detach, no_grad or a branch on the size of "
                "the batch, and in functions with a backward pass of their own"
            )
    for name, expected in one.state.items():
        gap = _gap(many.state.get(name, expected[..., None]), expected)
        if gap > TOLERANCE:
            yield (
                f"outputs, loss and gradients agree; {name} differs after the forward pass, by {gap:.1e} of its "
                "largest value: only what replica 0 writes into it stays, which is from its own chunk; update it "
                "outside the forward pass"
            )


def _modules(one: RecordedCopy, many: RecordedCopy, sizes: list[int], model: nn.Module) -> Iterator[str]:
    """Yield which modules have inputs that agree, and outputs that do not."""
    for key, call in one.records[0].calls.items():
        for i, record in enumerate(many.records):
            rows = sum(sizes[:i]), sizes[i], sum(sizes)
            own = record.calls.get(key)
            if own is None or _gap_of_rows(own[0], call[0], rows, math.inf) > TOLERANCE:
                continue
            gap = _gap_of_rows(own[1], call[1], rows, 0.0)
            if gap > TOLERANCE:
                name, module = key[0] or "the model itself", model.get_submodule(key[0])
                which = f"{name} ({type(module).__name__}{', call ' + str(key[1] + 1) if key[1] else ''})"
                cause = _cause(module, key, one.records[0], record)
                yield f"first difference: output of {which}, in replica {i}, by {gap:.1e} of its largest value: {cause}"


def _cause(module: nn.Module, key: tuple[str, int], one: Record, record: Record) -> str:
    expected, draws = one.calls[key][2:]
    functions = record.calls[key][2]
    if draws:
        return "it draws random numbers, which differ in replicas; switch that off to compare the rest"
    if isinstance(module, _SynchronizedBatchNorm):
        return f"group_size={module.group_size} and eps_mode={module.eps_mode!r} make it differ in replicas"
    if not list(module.children()):
        with warnings.catch_warnings(record=True) as left:
            warnings.simplefilter("always")
            if type(convert_model(copy.deepcopy(module))) is not type(module):
                return "a batch norm that is not synchronized; call convert_model(model)"
        if left:
            reason = str(left[-1].message).partition(f": {type(module).__name__} ")[2]
            return f"a batch norm that convert_model has left alone, because it {reason}"
    where, size = "times on one device", "look for a branch, a loop or a cache that depends on the batch or its size"
    for child, number in one.numbers.items():
        if child.startswith(key[0]) and record.numbers[child] != number:
            return f"it calls {child} {number} {where}, {record.numbers[child]} times there; {size}"
    if functions["batch_norm"]:
        return "it calls F.batch_norm, or a batch norm that is no submodule of it"
    for function in sorted((expected - functions) | (functions - expected)):
        return f"it calls {function} {expected[function]} {where}, {functions[function]} times there; {size}"
    return "it mixes samples, as x.mean(0) does, or depends on the size of the batch or a sample's place in it"


def _gap_of_rows(
    parts: Sequence[Tensor], wholes: Sequence[Tensor], rows: tuple[int, int, int], unknown: float
) -> float:
    """Return the largest difference of what a replica has from its part of what one device has, or `unknown`."""
    first, size, total = rows
    largest = 0.0 if len(parts) == len(wholes) else unknown
    for part, whole in zip(parts, wholes, strict=False):
        is_scalar = whole.numel() == 1  # as the loss of a replica
        for dim, (own, length) in enumerate(zip(part.shape, whole.shape, strict=False)):
            if own != length and own * total == size * length:
                whole = whole.narrow(dim, first * length // total, own)
                break
        gap = _gap(part, whole) if part.shape == whole.shape else unknown
        largest = max(largest, unknown if is_scalar and gap > TOLERANCE else gap)
    return largest


def _gap(actual: Tensor, expected: Tensor, floor: float = FLOOR) -> float:
    """Return the largest difference, relative to the largest value or `floor`; two NaN agree."""
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = (t.detach() if t.is_complex() else t.detach().to_dense().double() for t in (actual, expected))
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    largest = _largest((actual - expected).abs().masked_fill(equal, 0.0).nan_to_num(math.inf))
    return largest and largest / max(floor, _largest(expected))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().to_dense().abs().nan_to_num(0.0, 0.0).max()) if tensor.numel() else 0.0
