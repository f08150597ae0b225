"""What `forward` assigns to `self`, and loses with the replica, is named in one warning; activations are not."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from helpers import Net, Numbered, as_devices
from scripted import WRAPPERS, R
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d


class Counting(Numbered):
    """A module with every kind of state; `assign` is what its forward does with it."""

    def __init__(self, assign: Any) -> None:
        state = {"step": 0, "rate": 0.5, "phase": "a", "is_warm": False, "size": None, "seen": {}, "best": math.nan}
        buffers = {"ema": nn.Buffer(torch.zeros(3)), "count": nn.Buffer(torch.zeros((), dtype=torch.long))}
        super().__init__(forward, assign=assign, bn=SynchronizedBatchNorm1d(3), **state, **buffers)
        self.register_buffer("mask", None)


def forward(net: Any, input: Tensor) -> Tensor:
    output = net.bn(input)
    net.assign(net, output)
    return output


def steps(parallel: nn.DataParallel, devices: Any, number: int = 3, backward: bool = True) -> list[str]:
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        for _ in range(number):
            output = parallel(torch.randn(8 * len(devices), 3, device=as_devices(devices)[0]))
            if backward:
                output.backward(torch.randn_like(output))
    return [str(warning.message) for warning in issued]


def warned(assign: Any, devices: Any, number: int = 3) -> list[str]:
    return steps(DataParallelWithCallback(Counting(assign).to(as_devices(devices)[0]), devices), devices, number)


def count_step(net: Any, output: Tensor) -> None:
    net.step += 1


def count(net: Any, output: Tensor) -> None:
    count_step(net, output)
    net.rate, net.phase, net.is_warm = 0.1, "b", True
    net.ema = 0.9 * net.ema + 0.1 * output.detach().mean(0)


def keep(net: Any, output: Tensor) -> None:
    net.activation = net.last = output
    net.norm = output.detach().norm()
    net.seen[output.device] = output.shape
    net.count += 1  # in place
    net.step += 0
    net.rate = float(str(net.rate))  # another object that is equal
    net.is_warm = bool(net.step)
    net.bn.training = True
    if net.size is None:
        net.size = len(output)
    net.best = float("nan")
    net.new = 3
    net.current = net.bn  # another name of what the replica has
    net.loss = output.square().mean()  # where there was none


UNLESS = "unless each forward pass sets it before it reads it, state is lost: forward() of"


@pytest.mark.smoke
def test_numbers_strings_and_buffers_that_a_replica_loses_are_named_once(devices):
    inner = Counting(count)
    model = nn.Sequential(inner, Counting(keep)).to(as_devices(devices)[0])
    (text,) = steps(DataParallelWithCallback(model, devices), devices)
    assert text.startswith(
        f"{UNLESS} Sequential set 0.step (from 0 to 1), 0.rate (from 0.5 to 0.1), 0.phase (from 'a' to 'b'), 0.is_warm "
        "(from False to True), 0.ema of replica 0, which"
    )
    assert "self.step.add_(1)" in text
    assert (inner.step, inner.rate, inner.phase, inner.is_warm) == (0, 0.5, "a", False)
    assert not inner.ema.any()
    assert model[1].count == 3  # what a replica 0 changes in place stays


def make(net: Any, name: str, value: Any) -> None:
    """Set an attribute that is missing or None."""
    if getattr(net, name, None) is None:
        setattr(net, name, value)


def keep_penalty(net: Any, output: Tensor) -> None:
    net.rate = output.square().mean()


def linear(output: Tensor) -> nn.Module:
    return nn.Linear(3, 3, device=output.device)


NUMBERS = "Change buffers in place"
MAKE, RETURN = "Make modules, parameters and buffers in __init__()", "Return a penalty"
MADE = {  # what a forward pass makes, by name, and the remedies
    "head": (lambda net, x: make(net, "head", linear(x)), [MAKE]),
    "size": (lambda net, output: make(net, "size", linear(output)), [MAKE]),
    "bn.extra": (lambda net, output: setattr(net.bn, "extra", nn.Parameter(torch.ones_like(output[0]))), [MAKE]),
    "mask": (lambda net, output: make(net, "mask", torch.ones_like(output)), [MAKE]),
    "rate": (keep_penalty, [RETURN]),
    "rate and head": (lambda net, x: (keep_penalty(net, x), make(net, "head", linear(x))), [MAKE, RETURN]),
    "step and head": (lambda net, x: (count_step(net, x), make(net, "head", linear(x))), [NUMBERS, MAKE]),
}


@pytest.mark.parametrize("names", MADE)
def test_what_is_made_in_a_forward_pass_is_named_once_with_its_remedies(devices, names):
    assign, remedies = MADE[names]
    (text,) = warned(assign, devices)
    names = names.replace(" and ", ", ").replace("step", "step (from 0 to 1)")
    assert text.startswith(f"{UNLESS} Counting set {names} of replica 0, which ends with the forward pass")
    assert [remedy for remedy in (NUMBERS, MAKE, RETURN) if remedy in text] == remedies


@pytest.mark.parametrize(("replica", "number"), [(0, 1), (1, 0)])
def test_what_replica_0_sets_is_named_alone(devices, replica, number):
    def assign(net: Any, output: Tensor) -> None:
        net.step += net.number == replica

    assert len(warned(assign, devices)) == number


def test_activations_caches_and_changes_in_place_are_not_named(devices):
    assert warned(keep, devices) == []


def test_number_that_changes_in_another_way_in_each_forward_pass_is_named_once(devices):
    def assign(net: Any, output: Tensor) -> None:
        net.rate = float(output.detach().sum())

    assert len(warned(assign, devices)) == 1


def later(net: Any, output: Tensor) -> None:
    if net.count > net.first:
        net.step += 1
    net.count += 1


@pytest.mark.parametrize(("first", "expected"), [(0, 1), (1, 1), (2, 0), (10, 0)])
def test_first_forward_passes_are_looked_at_and_no_others(first, expected):
    model = Counting(later)
    model.first = first
    parallel = DataParallelWithCallback(model, ["cpu"] * 2)
    before = list(vars(parallel))
    texts = steps(parallel, ["cpu"] * 2, 6)
    assert len(texts) == expected
    assert list(vars(parallel)) == before
    assert list(vars(copy.deepcopy(parallel))) == before


def test_forward_passes_in_eval_mode_are_not_looked_at():
    parallel = DataParallelWithCallback(Counting(count).eval(), ["cpu"] * 2)
    assert steps(parallel, ["cpu"] * 2, 5, backward=False) == []
    assert parallel.module.step == 0
    assert len(steps(parallel.train(), ["cpu"] * 2)) == 1


class Hooked(Net):
    """Has a hook of a layer that does with the model, and an output or gradient, what `values` does."""

    def __init__(self, kind: str, values: Any) -> None:
        state = {"kept": None, "count": 0, "seen": {}, "calls": [], "scale": nn.Parameter(torch.ones(3))}
        # PyTorch warns of a backward hook where no input requires a gradient.
        super().__init__(lambda net, x: net.bn(net.scale * x), bn=SynchronizedBatchNorm1d(3), values=values, **state)
        self.register_buffer("norm", None)
        register = self.bn.register_full_backward_hook if "backward" in kind else self.bn.register_forward_hook
        register(self.method if "method" in kind else lambda *args: self.method(*args))

    def method(self, module: nn.Module, before: Any, after: Any) -> None:
        self.values(self, after[0] if isinstance(after, tuple) else after)


def keep_on_model(net: Any, output: Tensor) -> None:
    net.calls.append(1)
    net.kept, net.count, net.bn.rows = output, net.count + 1, [len(output)]
    net.norm = output.detach().norm().to(net.scale.device)  # The wrapper refuses a buffer of the model elsewhere.


ON_MODEL = "while replicas of Hooked ran, something set {} of the model itself, through a hook or closure"


def evaluate(parallel: nn.DataParallel, devices: Any, number: int = 3) -> list[str]:
    with torch.no_grad():
        return steps(parallel.eval(), devices, number, backward=False)


@pytest.mark.parametrize("kind", ["method", "closure"])
@pytest.mark.parametrize("run", [steps, evaluate])
def test_what_a_hook_sets_on_the_model_is_named_once(devices, run, kind):
    model = Hooked(kind, keep_on_model).to(as_devices(devices)[0])
    first, second = run(DataParallelWithCallback(model, devices), devices)
    assert first.startswith(ON_MODEL.format("count"))
    assert second.startswith(ON_MODEL.format("kept, norm"))  # which were None before the first forward pass
    assert "Register a forward hook in forward(), where self is the replica" in first
    assert len(model.calls) == 3 * len(devices)  # one in each replica


@pytest.mark.parametrize("way", ["wrapper", "patched", "own-parallel_apply"])
def test_what_is_lost_and_what_a_hook_sets_are_named_in_every_wrapper(way):
    (text,) = steps(WRAPPERS[way](Counting(count)), ["cpu"] * R)
    assert text.startswith(f"{UNLESS} Counting set step (from 0 to 1), rate (from 0.5 to 0.1), phase")
    text, _ = steps(WRAPPERS[way](Hooked("method", keep_on_model)), ["cpu"] * R)
    assert text.startswith(ON_MODEL.format("count"))


@pytest.mark.parametrize(("first", "second"), [(steps, evaluate), (evaluate, steps)])
def test_training_and_evaluation_have_looks_of_their_own(first, second):
    parallel = DataParallelWithCallback(Hooked("method", lambda net, output: None), ["cpu"] * 2)
    assert first(parallel, ["cpu"] * 2) == []
    parallel.module.values = keep_on_model
    assert first(parallel, ["cpu"] * 2) == []
    assert len(second(parallel.train(), ["cpu"] * 2, 1)) == 1


NOT_NAMED = {  # hooks, and what they do
    "nothing is bound": ("method", lambda net, output: net.seen.setdefault(output.device, output)),
    "the same object": ("closure", lambda net, output: setattr(net, "seen", net.seen)),
    "the number that it was": ("closure", lambda net, output: setattr(net, "step", float(net.step))),
    "an equal tensor": ("closure", lambda net, output: setattr(net, "table", torch.arange(3))),
    "an equal tuple": ("closure", lambda net, output: setattr(net, "shape", tuple(output.shape))),
    "a cache": ("closure", lambda net, output: make(net, "kept", output)),
    "a cache that was missing": ("method", lambda net, output: make(net, "late", output)),
    "after the replicas": ("backward method", keep_on_model),
}


@pytest.mark.parametrize("kind", NOT_NAMED)
def test_what_binds_nothing_on_the_model_while_replicas_run_is_not_named(devices, kind):
    hook, values = NOT_NAMED[kind]
    model = Hooked(hook, values).to(as_devices(devices)[0])
    parallel = DataParallelWithCallback(model, devices)
    for step in range(3):
        model.step = step
        assert steps(parallel, devices, 1) == []
    assert len(model.calls) == (3 * len(devices) if "backward" in hook else 0)


def test_single_chunk_keeps_what_it_assigns():
    model = Net(lambda net, x: setattr(net, "step", net.step + 1) or x, step=0)
    parallel = DataParallelWithCallback(model, ["cpu"] * 2)
    assert parallel(torch.randn(1, 3)).shape == (1, 3)
    assert model.step == 1


def test_failed_forward_pass_names_nothing():
    def fail(net: Any, output: Tensor) -> None:
        net.step += 1
        raise LookupError

    parallel = DataParallelWithCallback(Counting(fail), ["cpu"] * 2)
    with pytest.raises(LookupError):
        parallel(torch.randn(4, 3))
    parallel.module.assign = count
    assert len(steps(parallel, ["cpu"] * 2)) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_modules_are_left_alone():
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)), SynchronizedBatchNorm1d(3))
    assert steps(DataParallelWithCallback(model, ["cpu"] * 2), ["cpu"] * 2) == []


DATA = {  # what forward assigns to the data of a parameter, the value before, and the warnings
    "as momentum encoders do": (lambda data: 0.9 * data + 0.1, 0.5, 1),
    "the same numbers in other memory, as flatten_parameters": (torch.clone, 0.5, 0),
    "NaN, which is not equal to NaN": (lambda data: data, math.nan, 0),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_of_a_parameter_that_a_replica_loses_is_named_if_it_has_other_numbers(devices, kind):
    def assign(net: Any, output: Tensor) -> None:
        net.fc.weight.data = change(net.fc.weight.data)

    change, value, number = DATA[kind]
    model = Counting(assign).to(as_devices(devices)[0])
    model.fc = nn.Linear(2, 2, device=as_devices(devices)[0])
    nn.init.constant_(model.fc.weight, value)
    before = model.fc.weight.detach().clone()
    texts = steps(DataParallelWithCallback(model, devices), devices)
    assert [text.startswith(f"{UNLESS} Counting set fc.weight of replica 0, ") for text in texts] == [True] * number
    assert torch.allclose(model.fc.weight, before, equal_nan=True)
