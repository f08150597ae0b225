"""`assert_matches_one_device`: whether a model computes in replicas what it computes on one device.

What the caller sees decides, in three passes. What differs is run again, with parameters moved by rounding, and
explained if that does not make the difference, too.
"""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..call.processes import active_group
from ..meeting import add_note
from ..refusals import check_module, check_number, silence
from .comparing import agree, gap
from .copies import InDouble, random_states, restore_random_states
from .explaining import Investigation, text_of_failure
from .passes import IN_FORWARD, Difference, FailsInReplicas, Key, Loss, Pass, Passes, differences, moved, scalars

__all__ = ["assert_matches_one_device"]

_PASSES = 3  # State that is lost in the first shows in the second, that of a schedule which begins there in the third.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6}  # how far parameters move to see what rounding does


def assert_matches_one_device(
    model: nn.Module,
    *inputs: Any,
    loss: Loss | None = None,
    replicas: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Raise an error unless replicas of `model` compute what it computes on one device with the whole batch.

    Two copies of the model, in its modes, take three passes on the CPU, in float64, two of them with a backward pass;
    parameters move a little before each. Outputs, the loss, gradients, parameters and persistent buffers may differ by
    a millionth of their largest value, or by what rounding moves. Switched off are torch's dropout functions,
    stochastic depth of torchvision, and attributes dropout, layerdrop, drop_prob, drop_path_prob, drop_path_rate and
    drop_connect_rate; an error says which. The model and all random states stay as they are. A hook that writes
    elsewhere also does so for the copies. ``2 * replicas - 1`` small images are enough, and make unequal chunks. It
    compares the model with itself: a loss that is wrong
    in the same way on one device passes. "What differs from one device" in docs/diagnosing.md explains the messages.

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))))
        >>> assert_matches_one_device(parallel, torch.randn(3, 3), loss=lambda output: output.square().mean())

    Args:
        model: the wrapper that will train, whose `scatter`, `gather` and `forward` are used if its class has its own;
            or the model alone, converted or not.
        inputs, kwargs: the whole batch, in trees of tensors, which are cut into chunks as by the wrapper.
        loss: makes a scalar from the gathered output, as ``lambda output: cross_entropy(output, labels)``. None: each
            output gets a random gradient, or, where each replica returns a scalar, the mean of these.
        replicas: how many of them to compare with one device. None: as many as the wrapper has devices, or two.
        dtype: in which the copies compute. ``torch.float32``, with a tolerance of 1e-4, for operators without float64.

    Raises:
        AssertionError: if they differ; it names the first module whose inputs agree and whose output does not, or
            what else differs, by how much, where, and the cause, if an experiment tells it. Also if only replicas
            raise an error; what the copy on one device raises gets a note.
        TypeError, ValueError: for bad arguments, a `loss` that is no scalar or has no gradient, and a batch of fewer
            than two chunks.
        RuntimeError: if the model cannot be copied, or `torch.distributed` joins this process with others.

    Warns:
        UserWarning: if all agrees, but all chunks are equal and each replica returns a scalar.
    """
    check_module(model)
    check_number("replicas", replicas)
    if active_group(None) is not None:
        raise RuntimeError("expected a single process, as the copies would exchange with others; call it in one alone")
    if dtype not in _ROUNDING:
        raise ValueError(f"expected dtype=torch.float64 or torch.float32, but got {dtype}")
    wrapper = model if isinstance(model, nn.DataParallel) else None
    number = replicas or max(2, 0 if wrapper is None else len(wrapper.device_ids))
    model = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    states, warning = random_states(), None
    try:
        with torch.inference_mode(False), torch.enable_grad(), silence(), torch.compiler.set_stance("force_eager"):
            warning = _compare(Passes(model, (inputs, dict(kwargs or {})), wrapper, number, loss, dtype))
    finally:
        restore_random_states(states)
    if warning is not None:
        warnings.warn(warning, stacklevel=2)


class _Differing(NamedTuple):
    """A pass that differs."""

    number: int
    one: Pass
    many: Pass


def _compare(passes: Passes) -> str | None:
    """Raise an error for the first difference beyond rounding; return what to warn of if there is none."""
    number = 0
    try:
        while isinstance(differing := _differing_pass(passes, number), _Differing):
            number, found = differing.number, _beyond_rounding(passes, differing)
            del differing  # to hold less at a time
            if found is not None:
                raise AssertionError(Investigation(passes, number, found).text())
            number += 1
    except FailsInReplicas as failure:
        raise AssertionError(text_of_failure(passes, *failure.args)) from failure.__cause__
    return differing


def _differing_pass(passes: Passes, first: int) -> _Differing | str | None:
    """Return the first pass, from `first` on, in which the caller sees a difference; or else what to warn of."""
    one, many, warning = passes.side(True, first), None, None
    for number in range(first, _PASSES):
        try:
            of_one = one.take(number)
        except Exception as error:
            _note_float32(error, passes, one.parallel.modes[0])
            raise
        many = many or passes.side(False, first)  # not before, to hold less at a time
        of_many = many.take(number)
        if next(differences(of_one, of_many), None) is not None:
            return _Differing(number, of_one, of_many)
        warning = warning or _warning_of_equal_chunks(passes, of_one, of_many)
        del of_one, of_many  # to hold less at a time
        one.copy.move(number)
        many.copy.move(number)
    return warning


def _note_float32(error: Exception, passes: Passes, mode: InDouble) -> None:
    """Give an error on one device a note, if it is not raised in float32."""
    with suppress(Exception):
        replace(passes, dtype=torch.float32).side(True, 1)
        where = f", where {mode.failed[0]} fails in float64" if mode.failed else ""
        add_note(error, f"It runs in float32{where}: pass dtype=torch.float32.")


def _warning_of_equal_chunks(passes: Passes, one: Pass, many: Pass) -> str | None:
    are_means = any(agree(of_replicas.mean(), on_one) for of_replicas, on_one in scalars(one, many))
    if len({number for _, number, _ in passes.rows}) > 1 or not are_means:
        return None
    return (
        f"all chunks have {passes.rows[0].number} rows, so that the mean of a chunk that each replica returns cannot "
        f"be told from the mean of the batch; pass {2 * passes.replicas - 1} samples, which make unequal chunks, "
        "unless those of your training are always equal"
    )


def _beyond_rounding(passes: Passes, differing: _Differing) -> Difference | None:
    """Return the first difference that a change of the parameters by rounding does not make, too."""
    first = next(differences(differing.one, differing.many))
    for kind in dict.fromkeys((first.kind, "gradient")):
        rounding = _moved(passes, differing, _ROUNDING[passes.dtype], kind)
        found = _first_lasting(passes, differing, rounding)
        if found is None:  # Does that move without a change, too, as random numbers do?
            itself = _moved(passes, differing, 0.0, kind)
            rounding = {key: by for key, by in rounding.items() if not itself.get(key)}
            found = _first_lasting(passes, differing, rounding)
        if found is not None and (found.kind in IN_FORWARD or kind not in IN_FORWARD):
            return found
    return None


def _moved(passes: Passes, differing: _Differing, noise: float, kind: str) -> dict[Key, float]:
    """Return how far the tensors of a pass move, on one device or in replicas, if parameters move by `noise`."""
    found = dict[Key, float]()
    for is_one, before in ((True, differing.one), (False, differing.many)):
        after = passes.side(is_one, differing.number, noise).take(differing.number, kind)
        for key, by in moved(before, after).items():
            found[key] = max(by, found.get(key, 0.0))
    return found


def _first_lasting(passes: Passes, differing: _Differing, rounding: Mapping[Key, float]) -> Difference | None:
    for found in differences(differing.one, differing.many, rounding):
        if found.kind != "buffer" or _is_state(passes, differing, str(found.name)):
            return found
    return None


def _is_state(passes: Passes, differing: _Differing, name: str) -> bool:
    """Return whether a buffer ends a pass on one device with another value if it begins with another one."""
    side = passes.side(True, differing.number)
    buffer = dict(side.copy.module.named_buffers()).get(name)
    if buffer is None:
        return True
    buffer.data.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)
    try:
        after = side.take(differing.number, "buffer").of("buffer").get(name)
    except Exception:  # It depends on the buffer.
        return True
    return after is None or bool(gap(after, differing.one.of("buffer")[name]))
