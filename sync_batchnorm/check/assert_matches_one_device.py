"""Check that replicas of a model compute the same as one device: `assert_matches_one_device`.

The obvious check compares the output of each layer. But single layers may differ although the model as a whole is
right, for example if the wrapper's `gather` adds up the outputs of replicas. So the check compares only the results
that the caller gets: outputs, loss, gradients, parameters and buffers, in three training passes.

    three passes --differ--> is it rounding? --no--> faulty_module.Investigation (names the module, line and cause)
         |                         |
        agree                     yes (a perturbation of parameters by 1e-12 moves the result as far)

A fixed tolerance cannot distinguish errors from rounding, because some models amplify rounding. Therefore the check
measures rounding (see compare_passes.py), but only after it has found a difference.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ..messages import check_module, check_number, collected_warnings, warn
from .compare_passes import Check, FailsInReplicas, Loss, Observed, TwinRun, beyond_rounding, differences, scalars
from .compare_tensors import agree
from .faulty_module import Investigation, text_of_failure

__all__ = ["assert_matches_one_device"]

# The check runs this number of passes. If a replica loses state in the first pass, the results of the second pass
# differ. If some state begins to change only in the second pass, as in a schedule, the results of the third pass
# differ.
_PASSES = 3

# A user's wrapper may call functions of torch that refuse CPU tensors. This table maps a part of torch's error message
# to the method that the user should call instead.
_REFUSED_BY_TORCH = {
    "Gather function not implemented for CPU": "gather(outputs, output_device)",
    "Expected a non cpu device": "scatter(inputs, kwargs, device_ids)",
}


def assert_matches_one_device(
    model: nn.Module,
    *inputs: Any,
    loss: Loss | None = None,
    replicas: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Raise an error unless replicas of `model` compute the same as one device with the whole batch.

    Two copies of the model run on the CPU, with perturbed parameters. Their results may differ by 1e-6 of the largest
    value, or by rounding. The model and random states stay unchanged. Pass ``2 * replicas - 1`` small samples. See
    "What differs from one device" on the page "Diagnosing".

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))))
        >>> assert_matches_one_device(parallel, torch.randn(3, 3), loss=lambda output: output.square().mean())

    Args:
        model: the wrapper (with its own `scatter`, `gather` and `forward`), a model that contains one, or a model
            without a wrapper, converted or not.
        inputs, kwargs: the whole batch, split as by the wrapper.
        loss: maps the gathered output to a scalar. None: outputs, or means of scalars from replicas, get random
            gradients.
        replicas: number of replicas. None: one for each device of the wrapper, at least two.
        dtype: ``torch.float64``, or ``torch.float32`` (tolerance 1e-4) for operators without float64.

    Raises:
        AssertionError: if results differ, or only replicas raise an error.
        TypeError, ValueError: for invalid arguments, several wrappers, a `loss` that is no scalar or has no gradient,
            fewer than two chunks, or, without `loss`, unknown classes made outside replicas.
        RuntimeError: if the model cannot be copied, or `torch.distributed` joins several processes.

    Warns:
        UserWarning: if results agree, but all chunks are equal and each replica returns the mean of its chunk.
    """
    check_module(model)
    check_number("replicas", replicas)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    # The check needs gradients, so it leaves inference mode if the caller has entered it.
    with _random_states_kept(), torch.compiler.set_stance("force_eager"), torch.inference_mode(False):
        try:
            with collected_warnings() as warned, _steps_of_torch_named():
                doubt = _compare(Check(model, (inputs, dict(kwargs or {})), replicas, loss, dtype))
        except (AssertionError, FailsInReplicas) as failure:
            error = AssertionError(text_of_failure(*failure.args)) if isinstance(failure, FailsInReplicas) else failure
            for text in warned:
                error.add_note(f"The wrapper has warned: {text}.")
            raise error from failure.__cause__
    if doubt:
        warn(doubt)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """On exit, restore the random states of torch (CPU), of Python, and of NumPy if it is imported."""
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield


def _compare(check: Check) -> str:
    """Raise an error for the first difference that is not a rounding error.

    If all results agree, return a warning if chunks of equal size may hide an error, otherwise "".
    """
    one, many, doubt = None, None, ""
    for index in range(_PASSES):
        one = one or TwinRun(check, True, index)
        of_one = _on_one_device(check, one, index)
        many = many or TwinRun(check, False, index)  # Make this copy only now, because it takes memory.
        of_many = many.take(index)
        _refuse_unseen(check, of_many)
        doubt = doubt or _hidden_by_equal_chunks(check, of_one, of_many)
        if difference := next(differences(of_one, of_many), None):
            one = many = None
            difference = beyond_rounding(check, index, (of_one, of_many))
        del of_one, of_many
        if difference:
            raise AssertionError(Investigation(check, index, difference).text())
    return doubt


def _hidden_by_equal_chunks(check: Check, one: Observed, many: Observed) -> str:
    """Return a warning if each replica may return the mean of its chunk, and all chunks have equal sizes, else "".

    If each replica returns the mean of its chunk, the mean of these values is the mean of the batch only for chunks of
    equal size. So a check with equal chunks does not notice that the value is wrong for chunks of different sizes.
    """
    are_means = any(agree(of_replicas.mean(), on_one) for of_replicas, on_one, _ in scalars(one, many))
    if len({len(rows.here) for rows in check.rows}) > 1 or not are_means:
        return ""
    return (
        f"all chunks have {len(check.rows[0].here)} rows, so that the mean of a chunk that each replica returns "
        f"cannot be told from the mean of the batch; pass {2 * check.replicas - 1} samples, unless those of your "
        "training make equal chunks"
    )


def _on_one_device(check: Check, one: TwinRun, index: int) -> Observed:
    """Run a pass on one device. If it fails, add a note to the error: the error comes from a copy of the model."""
    try:
        return one.take(index)
    except Exception as error:
        where = f"This is from a copy of the model on one device: on the CPU, in {str(check.dtype)[6:]}"
        with suppress(Exception):  # An exception that is a frozen dataclass refuses notes.
            error.add_note(f"{where}; for operators without float64, pass dtype=torch.float32.")
            if hooks := one.text_of_hooks():
                error.add_note(hooks)
        raise


@contextmanager
def _steps_of_torch_named() -> Iterator[None]:
    """Replace torch's errors about tensors on the CPU by an error with a remedy.

    The new error names the user's method that called torch, and the method of this library to call instead.
    """
    try:
        yield
    except Exception as error:
        for text, step in _REFUSED_BY_TORCH.items():
            if text in str(error):
                what = f"your {step.partition('(')[0]} calls that of torch, which takes no tensors of the CPU"
                raise RuntimeError(f"{what}; call super().{step}") from error
        raise


def _refuse_unseen(check: Check, many: Observed) -> None:
    """Raise a TypeError if the check cannot look into an output, and the user gave no `loss` that it could compare."""
    for path, kind in many["unseen"].items() if check.loss is None else ():
        raise TypeError(
            f"expected outputs to compare, but got {path} of class {kind}, in which no tensors can be seen; return "
            "tensors, in a tuple, list, dict or dataclass, or pass a `loss` that takes them from it"
        )
