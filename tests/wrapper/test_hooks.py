"""Hooks of replicas act there, as on one device; those of the model are the model's, and what they read is named."""

import copy
import gc
import warnings
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from conftest import first_in_smoke, slow
from helpers import Net, as_devices, assert_same_state, assert_same_step, assert_trains_as_one_device, doubles, twins
from scripted import WRAPPERS, R
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, convert_model

LAYERS = {
    "linear": lambda: nn.Linear(3, 3),
    "rnn": lambda: nn.RNN(3, 3, batch_first=True),  # of an LSTM, simulated GPUs lack the kernels
    "graph": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh())),
    "norm": lambda: nn.BatchNorm1d(3),
}


def doubled(module, args, output):
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def doubled_with_kwargs(module, args, kwargs, output):
    return doubled(module, args, output)


def doubled_before(module, args, kwargs):
    return (2 * args[0],), kwargs


REGISTER = {
    "forward": lambda layer: layer.register_forward_hook(doubled),
    "first": lambda layer: layer.register_forward_hook(doubled, prepend=True),
    "kwargs": lambda layer: layer.register_forward_hook(doubled_with_kwargs, with_kwargs=True),
    "always": lambda layer: layer.register_forward_hook(doubled, always_call=True),
    "pre": lambda layer: layer.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "pre kwargs": lambda layer: layer.register_forward_pre_hook(doubled_before, with_kwargs=True),
    "backward": lambda layer: layer.register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],)),
    "backward pre": lambda layer: layer.register_full_backward_pre_hook(lambda _, outer: (2 * outer[0], *outer[1:])),
}


def net(forward, **attributes):
    return Net(forward, **{"bn": nn.BatchNorm1d(3), "layer": nn.Linear(3, 3), **attributes})


def run(net, input):
    rows = net.bn(input)
    if isinstance(net.layer, nn.RNNBase):
        return net.layer(rows[:, None])[0][:, 0]
    return net.layer(rows)


def has_hooks(module):
    return any(hooks for name, hooks in vars(module).items() if name.startswith(("_forward_", "_backward_")))


def for_this_call(net, input):
    handle = net.register(net.layer)
    output = run(net, input)
    handle.remove()
    return output + run(net, input)


def if_there_is_none(net, input):
    """Register for good, by the attribute that torch's own users look at."""
    if not has_hooks(net.layer):
        net.register(net.layer)
    return run(net, input)


@pytest.mark.parametrize("layer", ["linear", "norm", *slow("rnn", "graph")])
@pytest.mark.parametrize("register", first_in_smoke(REGISTER.values()), ids=list(REGISTER))
@pytest.mark.parametrize("function", [for_this_call, if_there_is_none])
def test_hook_that_a_replica_registers_acts_as_on_one_device_and_ends_with_it(devices, function, register, layer):
    model = net(function, layer=LAYERS[layer](), register=register)
    _, parallel = assert_trains_as_one_device(model, devices, 7, 3)
    assert not has_hooks(parallel.module.layer)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hook_of_the_model_is_called_once_for_each_replica_and_belongs_to_the_model(devices, register):
    model, calls = convert_model(net(run)).to(as_devices(devices)[0]), []
    getattr(model.layer, register)(MethodType(lambda net, module, *args: calls.append((net, module)), model))
    output = DataParallelWithCallback(model, devices)(doubles(7, 3, devices=devices).float())
    output.backward(torch.randn_like(output))
    assert [owner is model for owner, _ in calls] == [True] * len(devices)
    assert len({id(layer) for _, layer in calls} - {id(model.layer)}) == len(devices)


class Keeping(nn.Module):
    """Reads what a hook, which is a method that `forward` registers, keeps of its layer; or keeps an activation."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.bn, self.layer, self.way, self.kept = nn.BatchNorm1d(3), nn.Linear(3, 3), way, None
        if way == "hook of the model":
            self.layer.register_forward_hook(self.keep)
        if way == "backward hook":
            self.layer.register_full_backward_hook(self.look)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.alive[0].add(self)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def look(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.looked = grad_output

    def body(self, input: Tensor) -> Tensor:
        return self.layer(input).tanh()

    def forward(self, input: Tensor) -> Tensor:
        input = self.bn(input)
        if self.way == "hook of the replica":
            with self.layer.register_forward_hook(self.keep):
                return self.layer(input) + self.kept.square()
        output = checkpoint(self.body, input, use_reentrant=False) if "checkpoint" in self.way else self.body(input)
        if self.way not in ("hook of the model", "checkpoint"):
            self.kept = output
        return output


WAYS = ["hook of the replica", "hook of the model", "backward hook", "beside a checkpoint"]


@pytest.mark.parametrize("way", [*WAYS, *slow("in forward", "checkpoint")])
@pytest.mark.filterwarnings("ignore:while replicas of Keeping ran")
def test_replicas_end_with_their_pass_whatever_keeps_an_activation(devices, way):
    parallel = DataParallelWithCallback(convert_model(Keeping(way)).to(as_devices(devices)[0]), devices)
    parallel.module.alive = [WeakSet[nn.Module]()]
    for _ in range(4):
        output = parallel(torch.randn(7, 3, device=as_devices(devices)[0]))
        output.backward(torch.randn_like(output))
    gc.collect()
    assert len(parallel.module.alive[0]) <= len(devices)


def test_hook_that_a_replica_registers_may_be_its_method(devices):
    model = Keeping("hook of the replica")
    model.alive = [WeakSet[nn.Module]()]
    assert_trains_as_one_device(model, devices, 7, 3)


def gated(net: Any, input: Tensor, tag: str) -> Tensor:
    """Keeps a gate, under a name for each kind of images, which its checkpoint and a hook read in the backward pass."""
    hidden = net.bn(net.stem(input))
    setattr(net, tag, net.stem(input).sigmoid())
    hidden.register_hook(lambda grad: grad * getattr(net, tag))
    return checkpoint(lambda hidden: net.layer(hidden).tanh() * getattr(net, tag), hidden, use_reentrant=False)


def test_two_passes_and_one_backward_read_what_each_has_kept(devices):
    model = Net(gated, stem=nn.Linear(3, 4), bn=nn.BatchNorm1d(4), layer=nn.Linear(4, 4))
    plain, parallel = twins(model.double(), devices)
    real, fake = doubles(6, 3, devices=devices), doubles(6, 3, devices=devices)
    for model in (plain, parallel):
        (model(real, "real").square().sum() + model(fake, "fake").square().sum()).backward()
    assert_same_state(parallel, plain)


def test_hook_that_is_a_submodule_which_synchronizes_is_refused():
    hook = Net(lambda net, *args: net.bn(args[-1]), bn=nn.BatchNorm1d(3))
    model = net(lambda net, input: net.layer(input), hook=hook)
    model.layer.register_forward_hook(model.hook)
    with pytest.raises(RuntimeError, match=r"called hook\.bn, of the original module instead of its own copy"):
        WRAPPERS["wrapper"](convert_model(model))(torch.randn(6, 3))


@pytest.mark.parametrize("way", WRAPPERS)
def test_hooks_of_the_module_are_those_of_all_replicas_and_stay_when_one_removes_its_own(way):
    plain = net(for_this_call, register=REGISTER["forward"]).double()
    parallel = WRAPPERS[way](convert_model(copy.deepcopy(plain)))
    layers = (plain.layer, parallel.module.layer)
    handles = [layer.register_forward_hook(doubled_with_kwargs, with_kwargs=True) for layer in layers]
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3))
    for handle in handles:
        handle.remove()
    assert_same_step(plain, parallel, doubles(7, 3))


@pytest.mark.parametrize("kind", ["forward", "backward", "backward pre"])
def test_hooks_of_a_graph_module_are_those_of_its_replicas(devices, kind):
    plain, parallel = twins(net(run, layer=LAYERS["graph"]()).double(), devices)
    for model in (plain, parallel.module):
        REGISTER[kind](model.layer)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("name", ["layer", "bn", "", "graph"])
def test_backward_hook_of_the_older_kind_is_refused_in_the_backward_with_the_remedy(devices, name):
    model = net(lambda net, input: net.graph(net.layer(net.bn(input))), graph=LAYERS["graph"]())
    plain, parallel = twins(model.double(), devices)
    handle = parallel.module.get_submodule(name).register_backward_hook(lambda *args: None)
    data = doubles(7, 3, devices=devices)
    output = parallel(data)
    with pytest.raises(RuntimeError, match=r"full backward hooks .* of register_backward_hook.*; call register_full_"):
        output.backward(torch.randn_like(output))
    handle.remove()
    parallel.zero_grad()
    plain.load_state_dict(parallel.module.state_dict())
    assert_same_step(plain, parallel, data)


class Film(nn.Module):
    """Sets a condition, a new one in each forward pass, which a hook of its body may read."""

    def __init__(self, hook_of: Callable[[Any], Any], kind: str = "forward_hook") -> None:
        super().__init__()
        self.body, self.part, self.bn = nn.Linear(3, 3), nn.Linear(3, 3), SynchronizedBatchNorm1d(3)
        self.make: Callable[[Tensor], Any] = lambda input: float(input.sum())
        self.condition = self.body.condition = self.part.condition = 1.0
        self.seen, self.is_tracing, self.recorder = [], False, SimpleNamespace(condition=2.0)
        getattr(self.body, f"register_{kind}")(hook_of(self))

    def modulate(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.condition

    @torch.no_grad()
    def modulate_without_grad(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.condition

    def reset(self) -> None:
        self.condition = 1.0

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


def read_global(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * model.condition


model: Any = None


def keep_global(net: Film) -> Any:
    global model
    model = net
    return read_global


def setting(net: Film) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        net.condition = 1.0
        return output * net.condition

    return hook


def returning(net: Film) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        try:
            return output * 2
        except TypeError:
            return output * net.condition

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
    "before a branch": (lambda net: lambda *args: (args[2] * net.condition, net.is_tracing and 1)[0], "condition"),
    "a decorated method": (lambda net: net.modulate_without_grad, "condition"),
    "a global": (keep_global, "condition"),
    "a submodule": (lambda net: lambda module, args, output: output * net.part.condition, "part.condition"),
}
NOT_READ = {
    "an attribute of the module that is called": lambda net: lambda module, args, output: output * module.condition,
    "an argument with the name of a global": lambda net: keep_global(net) and (lambda model, *args: model.condition),
    "an attribute of another object": lambda net: Recorder(net).record,
    "an attribute of an attribute": lambda net: lambda module, args, output: output * net.recorder.condition,
    "an attribute that the hook has set": setting,
    "an attribute that is set by name": lambda net: lambda *args: (setattr(net, "condition", 1), net.condition)[1],
    "an attribute in a branch": lambda net: lambda *args: net.condition if net.is_tracing else None,
    "an attribute that a method of the model sets first": lambda net: lambda *args: (net.reset(), net.condition)[1],
    "an attribute behind a return": returning,
    "an attribute of one of two": lambda net: lambda *args: (net.recorder if net else net.part).condition * args[2],
    "an object that can be called": Recorder,
    "a variable that is not set": with_unset_variable,
    "a variable that the hook sets": with_rebound_variable,
}


def texts_of(net: Film, devices: Any, wrapper: Any = DataParallelWithCallback) -> list[str]:
    parallel = wrapper(net.to(as_devices(devices)[0]), devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            output = parallel(torch.randn(3 * len(devices), 3, device=as_devices(devices)[0]))
            if torch.is_grad_enabled():
                output.backward(torch.randn_like(output))
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if text.startswith(("hooks of", "while replicas of"))]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", READ)
def test_hook_that_reads_from_the_model_what_forward_sets_is_named_once(devices, kind, training):
    hook_of, name = READ[kind]
    (text,) = texts_of(Film(hook_of).train(training), devices)
    assert f" read {name} of the model itself" in text


@pytest.mark.parametrize("way", ["wrapper", "patched", "own-parallel_apply"])
def test_text_has_the_hook_and_the_remedy_in_every_wrapper(way):
    (text,) = texts_of(Film(lambda net: net.modulate), ["cpu"] * R, wrapper=lambda net, _: WRAPPERS[way](net))
    assert text.startswith("hooks of Film (Film.modulate) read condition of the model itself, while forward() sets")
    assert "Register a forward hook in forward()" in text
    assert len(text.split()) <= 60


@pytest.mark.parametrize("kind", NOT_READ)
def test_hook_that_does_not_certainly_read_it_is_not_named(devices, kind):
    assert texts_of(Film(NOT_READ[kind]), devices) == []


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hook_is_named_if_there_is_a_backward_pass(devices, kind):
    def look(net: Film) -> Any:
        return lambda module, *gradients: net.seen.append(net.condition)

    assert len(texts_of(Film(look, kind), devices)) == 1
    with torch.no_grad():
        assert texts_of(Film(look, kind), devices) == []


SAME = {  # what forward sets in each pass, of which the model has an equal one
    "number": lambda: 1,
    "tuple": lambda: (3, [4.0, None]),
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
    net = Film(lambda net: lambda *args: setattr(net, "condition", args[2].detach()))
    net.condition = None
    net.part.register_forward_hook(net.modulate)
    texts = texts_of(net, devices)
    assert [text for text in texts if text.startswith("hooks of")] == []
    assert len(texts) == 1  # of what the first hook sets


class Missing(nn.Module):
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
    "set": "In this forward pass, while replicas of Missing ran, something set kept of the model itself, through",
    "read": "In this forward pass, hooks of Missing (Missing.read) read kept of the model itself, while",
}


@pytest.mark.parametrize("hook", NOTES)
def test_error_of_a_failed_forward_pass_has_a_note_of_hooks_each_time(devices, hook):
    parallel = DataParallelWithCallback(Missing(hook).to(as_devices(devices)[0]), devices)
    for _ in range(5):
        with pytest.raises(AttributeError, match="has no attribute 'kept'") as caught:
            parallel(torch.randn(3 * len(devices), 3, device=as_devices(devices)[0]))
        assert NOTES[hook] in "".join(caught.value.__notes__)
        vars(parallel.module).pop("kept", None)


def test_error_that_has_nothing_to_do_with_hooks_has_no_note_of_them():
    net = Film(NOT_READ["an attribute in a branch"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        DataParallelWithCallback(net, ["cpu"] * 2)(torch.randn(4, 5))
    assert "hooks of" not in "".join(caught.value.__notes__)
