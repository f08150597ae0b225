"""Hooks of the model that read from it what `forward` sets on the replica are named, if that is certain."""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import as_devices
from scripted import WRAPPERS, R
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d


class Film(nn.Module):
    """Sets a condition, a new one in each forward pass, which a hook of its body may read."""

    def __init__(self, hook_of: Callable[[Any], Any], kind: str = "forward_hook") -> None:
        super().__init__()
        self.body, self.part = nn.Linear(3, 3), nn.Linear(3, 3)
        self.make: Callable[[Tensor], Any] = lambda input: float(input.sum())
        self.bn = SynchronizedBatchNorm1d(3)
        self.condition: Any = 1.0
        self.part.condition = 1.0
        self.seen, self.is_tracing, self.recorder = [], False, SimpleNamespace(condition=2.0)
        getattr(self.body, f"register_{kind}")(hook_of(self))

    def modulate(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.condition

    def modulate_and_check(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output * self.condition
        if self.is_tracing:
            print(output)
        return output

    def modulate_if_it_fails(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        try:
            return output * 2
        except TypeError:
            return output * self.condition

    def reset(self) -> None:
        self.condition = 1.0

    def reset_first(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.reset()
        return output * self.condition

    def look_at_gradients(self, module: nn.Module, *gradients: Any) -> None:
        self.seen.append(self.condition)

    def trace(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.is_tracing:
            print(self.condition)

    def set_first(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.condition = 1.0
        return output * self.condition

    def set_first_by_name(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        setattr(self, "condition", 1.0)  # noqa: B010
        return output * self.condition

    def set_here(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.condition = output.detach()

    @torch.no_grad()
    def modulate_without_grad(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.condition

    def forward(self, input: Tensor) -> Tensor:
        self.condition = self.part.condition = self.make(input)
        return self.bn(self.body(input) + self.part(input))


class Recorder:
    """Has hooks of its own, and an attribute of the same name as the model."""

    def __init__(self, model: Film) -> None:
        self.part, self.condition = model.part, 3.0

    def record(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.condition

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.record(module, args, output)


def read_module(module: Any, args: Any, output: Tensor) -> Tensor:
    module.condition = 2.0
    return output * module.condition


def read_global(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * model.condition


model: Any = None


def keep_global(net: Film) -> Any:
    global model
    model = net
    return read_global


def with_name_of_global(net: Film) -> Any:
    def hook(model: Any, args: Any, output: Tensor) -> Tensor:
        model.condition = 2.0
        return output * model.condition

    keep_global(net)
    return hook


def with_unset_variable(net: Film) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output if module is not net else later

    if net is None:
        later = None
    return hook


def with_rebound_variable(net: Any) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal net
        before, net = net, SimpleNamespace(condition=2.0)
        output = output * net.condition
        net = before
        return output

    return hook


READ = {  # the hook of a model, and what is named
    "a method": (lambda net: net.modulate, "condition"),
    "a closure": (lambda net: lambda module, args, output: output * net.condition, "condition"),
    "a partial of a method": (lambda net: partial(net.modulate), "condition"),
    "a method before a branch": (lambda net: net.modulate_and_check, "condition"),
    "a decorated method": (lambda net: net.modulate_without_grad, "condition"),
    "a global": (keep_global, "condition"),
    "a submodule": (lambda net: lambda module, args, output: output * net.part.condition, "part.condition"),
}
NOT_READ = {
    "an attribute of the module that is called": lambda net: read_module,
    "an argument with the name of a global": with_name_of_global,
    "an attribute of another object": lambda net: Recorder(net).record,
    "an attribute of an attribute": lambda net: lambda module, args, output: output * net.recorder.condition,
    "an attribute that the hook has set": lambda net: net.set_first,
    "an attribute that the hook has set by name": lambda net: net.set_first_by_name,
    "an attribute in a branch": lambda net: net.trace,
    "an attribute that a method of the model sets first": lambda net: net.reset_first,
    "an attribute behind a return": lambda net: net.modulate_if_it_fails,
    "an attribute of one of two": lambda net: lambda *args: (net.recorder if net else net.part).condition * args[2],
    "an object that can be called": Recorder,
    "a variable that is not set": with_unset_variable,
    "a variable that the hook sets": with_rebound_variable,
}


def texts_of(net: Film, devices: Any, wrapper: Any = DataParallelWithCallback) -> list[str]:
    """Return the warnings of hooks."""
    parallel = wrapper(net.to(as_devices(devices)[0]), devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            output = parallel(torch.randn(3 * len(devices), 3, device=as_devices(devices)[0]))
            if torch.is_grad_enabled():
                output.square().sum().backward()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if text.startswith(("hooks of", "while replicas of"))]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", READ)
def test_hook_that_reads_from_the_model_what_forward_sets_is_named_once(devices, kind, training):
    hook_of, name = READ[kind]
    (text,) = texts_of(Film(hook_of).train(training), devices)
    assert f" read {name} of the model itself" in text


def test_text_has_the_hook_and_the_remedy():
    (text,) = texts_of(Film(lambda net: net.modulate), ["cpu"] * 2)
    assert text.startswith("hooks of Film (Film.modulate) read condition of the model itself, while forward() sets")
    assert "Register a forward hook in forward()" in text
    assert len(text.split()) <= 60


@pytest.mark.parametrize("way", ["wrapper", "patched", "own-parallel_apply"])
def test_hook_that_reads_from_the_model_is_named_in_every_wrapper(way):
    assert len(texts_of(Film(lambda net: net.modulate), ["cpu"] * R, wrapper=lambda net, _: WRAPPERS[way](net))) == 1


@pytest.mark.parametrize("kind", NOT_READ)
def test_hook_that_does_not_certainly_read_it_is_not_named(devices, kind):
    assert texts_of(Film(NOT_READ[kind]), devices) == []


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hook_is_named_if_there_is_a_backward_pass(devices, kind):
    assert len(texts_of(Film(lambda net: net.look_at_gradients, kind), devices)) == 1
    with torch.no_grad():
        assert texts_of(Film(lambda net: net.look_at_gradients, kind), devices) == []


SAME = {  # what forward sets in each pass, of which the model has an equal one
    "number": lambda: 1,
    "string": lambda: "".join(["a", "b"]),
    "tuple": lambda: (3, [4.0, None]),
    "shape": lambda: torch.ones(3, 2).shape,
    "tensor": lambda: torch.arange(3),
    "NaN": lambda: float("nan"),
}


@pytest.mark.parametrize("kind", SAME)
def test_hook_that_gets_an_equal_value_is_not_named(kind):
    net = Film(lambda net: lambda *args: net.seen.append(net.condition))
    net.make = lambda input: SAME[kind]()
    net.condition = net.part.condition = SAME[kind]()
    assert texts_of(net, ["cpu"] * 2) == []
    net.condition = None
    assert len(texts_of(net, ["cpu"] * 2)) == 1


def test_hook_that_reads_what_another_hook_sets_is_not_named(devices):
    net = Film(lambda net: net.set_here)
    net.condition = None
    net.part.register_forward_hook(net.modulate)
    texts = texts_of(net, devices)
    assert [text for text in texts if text.startswith("hooks of")] == []
    assert len(texts) == 1  # of what the first hook sets


class Keeping(nn.Module):
    """Has a hook that sets, or reads, an attribute that is missing, and a forward that reads, or sets, it."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.body, self.bn, self.hook = nn.Linear(3, 3), SynchronizedBatchNorm1d(3), hook
        self.body.register_forward_hook(getattr(self, hook))

    def set(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def read(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.kept

    def forward(self, input: Tensor) -> Tensor:
        if self.hook == "read":
            self.kept = input
        output = self.bn(self.body(input))
        return output + self.kept


NOTES = {
    "set": "In this forward pass, while replicas of Keeping ran, something set kept of the model itself, as a hook or",
    "read": "In this forward pass, hooks of Keeping (Keeping.read) read kept of the model itself, while",
}


@pytest.mark.parametrize("hook", NOTES)
def test_error_of_a_failed_forward_pass_has_a_note_of_hooks_each_time(devices, hook):
    parallel = DataParallelWithCallback(Keeping(hook).to(as_devices(devices)[0]), devices)
    for _ in range(5):
        with pytest.raises(AttributeError, match="has no attribute 'kept'") as caught:
            parallel(torch.randn(3 * len(devices), 3, device=as_devices(devices)[0]))
        assert NOTES[hook] in "".join(caught.value.__notes__)
        vars(parallel.module).pop("kept", None)


def test_error_that_has_nothing_to_do_with_hooks_has_no_note_of_them():
    net = Film(lambda net: net.trace)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        DataParallelWithCallback(net, ["cpu"] * 2)(torch.randn(4, 5))
    assert "hooks" not in "".join(caught.value.__notes__)
