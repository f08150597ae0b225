"""`assert_matches_one_device`: whether a model computes in replicas what it computes on one device.

What the caller sees decides, in three passes. What differs is run again, with parameters moved by rounding, and
explained if that does not make the difference, too.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ..meeting import add_note
from ..messages import check_module, check_number, collected_warnings
from .comparing import gap, largest, numbers_of
from .explaining import Investigation, text_of_failure, text_of_hooks
from .passes import (
    ROUNDING,
    CheckConfig,
    Difference,
    FailsInReplicas,
    Key,
    Loss,
    Observed,
    TwinRun,
    differences,
    pairs_of,
)

__all__ = ["assert_matches_one_device"]

_PASSES = 3  # State that is lost in the first shows in the second, that of a schedule which begins there in the third.
# How many times what rounding moves is still rounding, since it differs from run to run. Parameters that move by 1e-12
# move what is no rounding by some 1e-12 as well: a hundred times that is far below the tolerance.
_MARGIN = 100

# The call that takes the CPU, by what a function of torch says that does not, and that the user calls in its place.
_REFUSED_BY_TORCH = {
    "Gather function not implemented for CPU": "gather(outputs, output_device)",
    "Expected a non cpu device": "scatter(inputs, kwargs, device_ids)",
}

Pair = tuple[Observed, Observed]  # a pass on one device, and the same one in replicas


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
    parameters move a little before each. Outputs, the loss, gradients, parameters and persistent buffers (but no
    ``num_batches_tracked``) may differ by a millionth of their largest value, or by what rounding moves. Dropout and
    stochastic depth are switched off. The model, and the random states of torch, Python and NumPy, stay as they are. A
    hook that writes elsewhere also does so for the copies. ``2 * replicas - 1`` small images are enough, and make
    unequal chunks; with equal ones, the mean of a replica passes. What is wrong in the same way on one device passes.
    See "What differs from one device" on the page "Diagnosing".

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))))
        >>> assert_matches_one_device(parallel, torch.randn(3, 3), loss=lambda output: output.square().mean())

    Args:
        model: the wrapper that will train, whose `scatter`, `gather` and `forward` are used if its class has its own;
            a model that contains one, with what it computes outside of replicas; or the model alone, converted or not.
        inputs, kwargs: the whole batch, in trees of tensors, which are cut into chunks as by the wrapper.
        loss: makes a scalar from the gathered output, as ``lambda output: cross_entropy(output, labels)``. None: each
            output gets a random gradient, or, where each replica returns a scalar, the mean of these.
        replicas: how many of them to compare with one device. None: as many as the wrapper has devices, or two.
        dtype: in which the copies compute. ``torch.float32``, with a tolerance of 1e-4, for operators without float64.

    Raises:
        AssertionError: if they differ; it names the first module whose inputs agree and whose output does not, or
            what else differs, by how much, where, and the cause, if an experiment tells it. Also if only replicas
            raise an error; what the copy on one device raises gets a note.
        TypeError, ValueError: for bad arguments, a model with several wrappers, a `loss` that is no scalar or has no
            gradient, a batch of fewer than two chunks, and, without a `loss`, an output whose tensors cannot be seen.
        RuntimeError: if the model cannot be copied, or `torch.distributed` joins this process with others.
    """
    check_module(model)
    check_number("replicas", replicas)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    path, wrapper = _wrapper_in(model)
    replicas = replicas or max(2, len(wrapper.device_ids) if wrapper else 0)
    model = wrapper.module if model is wrapper else model
    # Outside of inference mode, gradients are enabled.
    with _random_states_kept(), torch.compiler.set_stance("force_eager"), torch.inference_mode(False):
        try:
            with collected_warnings() as warned, _steps_of_torch_named():
                _compare(CheckConfig(model, (inputs, dict(kwargs or {})), wrapper, path, replicas, loss, dtype))
        except (AssertionError, FailsInReplicas) as failure:
            error = AssertionError(text_of_failure(*failure.args)) if isinstance(failure, FailsInReplicas) else failure
            for text in warned:
                add_note(error, f"The wrapper has warned: {text}.")
            raise error from failure.__cause__


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the states of the generators of torch for the CPU, of Python, and of NumPy if it is imported."""
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield


def _wrapper_in(model: nn.Module) -> tuple[str, nn.DataParallel[Any] | None]:
    """Return the name of the wrapper that a model is or contains, and the wrapper; raise an error for several ones.

    A wrapper in another one makes no replicas.
    """
    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, nn.DataParallel)}
    inside = {id(module) for wrapper in wrappers.values() for module in wrapper.module.modules()}
    outermost = {name: wrapper for name, wrapper in wrappers.items() if id(wrapper) not in inside}
    if len(outermost) > 1:
        name = next(iter(outermost))
        raise ValueError(
            f"expected a model with one wrapper, but got {', '.join(outermost)} in a {type(model).__name__}; check "
            f"each alone, as in assert_matches_one_device(model.{name}, ...) with the inputs of that wrapper"
        )
    return next(iter(outermost.items()), ("", None))


def _compare(passes: CheckConfig) -> None:
    """Raise an error for the first difference beyond rounding."""
    one = many = None
    for index in range(_PASSES):
        one = one or TwinRun(passes, True, index)
        of_one = _on_one_device(passes, one, index)
        many = many or TwinRun(passes, False, index)  # not before, to hold less at a time
        of_many = many.take(index)
        _refuse_unseen(passes, of_many)
        if difference := next(differences(of_one, of_many), None):
            one = many = None
            difference = _beyond_rounding(passes, index, (of_one, of_many))
        del of_one, of_many
        if difference:
            raise AssertionError(Investigation(passes, index, difference).text())


def _on_one_device(passes: CheckConfig, one: TwinRun, index: int) -> Observed:
    """Take a pass; an error gets a note."""
    try:
        return one.take(index)
    except Exception as error:
        where = f"This is from a copy of the model on one device: on the CPU, in {str(passes.dtype)[6:]}"
        add_note(error, f"{where}; for operators without float64, pass dtype=torch.float32.")
        if hooks := text_of_hooks(one.module, passes.model):
            add_note(error, hooks)
        raise


@contextmanager
def _steps_of_torch_named() -> Iterator[None]:
    """Name the method of the user's wrapper that calls a function of torch which takes no CPU."""
    try:
        yield
    except Exception as error:
        for text, step in _REFUSED_BY_TORCH.items():
            if text in str(error):
                what = f"your {step.partition('(')[0]} calls that of torch, which takes no tensors of the CPU"
                raise RuntimeError(f"{what}; call super().{step}") from error
        raise


def _refuse_unseen(passes: CheckConfig, many: Observed) -> None:
    """Raise an error if there is no `loss`, and an output whose tensors nobody can see."""
    for path, kind in many["unseen"].items() if passes.loss is None else ():
        raise TypeError(
            f"expected outputs to compare, but got {path} of class {kind}, in which no tensors can be seen; return "
            "tensors, in a tuple, list, dict or dataclass, or pass a `loss` that takes them from it"
        )


def _beyond_rounding(passes: CheckConfig, index: int, pair: Pair) -> Difference | None:
    """Return the first difference that a change of the parameters by rounding does not make, too."""
    rounding = _moved(passes, index, pair, ROUNDING[passes.dtype])
    for is_repeated in (False, True):
        if is_repeated:  # What moves without a change, too, as random numbers do, is no rounding.
            itself = _moved(passes, index, pair, 0.0)
            rounding = {key: by for key, by in rounding.items() if not itself.get(key)}
        for difference in differences(*pair, rounding):
            if difference.kind != "buffer" or _is_state(passes, index, pair, str(difference.name)):
                return difference
    return None


def _moved(passes: CheckConfig, index: int, pair: Pair, noise: float) -> dict[Key, float]:
    """Return how far the tensors of a pass move, on one device or in replicas, if parameters move by `noise`."""
    moves = dict[Key, float]()
    for is_one, before in zip((True, False), pair, strict=True):
        for key, now, then in pairs_of(TwinRun(passes, is_one, index, noise).take(index), before):
            if now.shape == then.shape:
                moves[key] = max(_MARGIN * largest(numbers_of(now) - numbers_of(then)), moves.get(key, 0.0))
    return moves


def _is_state(passes: CheckConfig, index: int, pair: Pair, name: str) -> bool:
    """Return whether a buffer ends a pass on one device with another value if it begins with another one."""
    side = TwinRun(passes, True, index)
    with suppress(Exception):  # if it depends on the buffer, or makes it anew
        buffer = dict(side.module.named_buffers())[name]
        buffer.data.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)
        return bool(gap(side.take(index, "buffer")["buffer"][name], pair[0]["buffer"][name]))
    return True
