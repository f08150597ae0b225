"""Hooks that a replica registers in `forward` act there, as on one device; those of the model are the model's."""

import copy
import gc
from typing import Any
from weakref import WeakSet

import pytest
import torch
from conftest import first_in_smoke, slow
from helpers import (
    Net,
    as_devices,
    assert_equal,
    assert_same_state,
    assert_same_step,
    assert_trains_as_one_device,
    doubles,
    twins,
)
from scripted import WRAPPERS
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, convert_model

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


REGISTER = {
    "forward": lambda layer: layer.register_forward_hook(doubled),
    "first": lambda layer: layer.register_forward_hook(doubled, prepend=True),
    "kwargs": lambda layer: layer.register_forward_hook(doubled_with_kwargs, with_kwargs=True),
    "always": lambda layer: layer.register_forward_hook(doubled, always_call=True),
    "pre": lambda layer: layer.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "pre kwargs": lambda layer: layer.register_forward_pre_hook(
        lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True
    ),
    "backward": lambda layer: layer.register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],)),
    "backward pre": lambda layer: layer.register_full_backward_pre_hook(
        lambda module, outer: (2 * outer[0], *outer[1:])
    ),
}


def net(forward, **attributes):
    """Return a net of a norm and a layer."""
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
    _, parallel = assert_trains_as_one_device(model, devices, 7, 3, steps=3)
    assert not has_hooks(parallel.module.layer)


def for_the_root(net, input):
    handle = net.register_forward_hook(doubled)
    output = net.bn(input)
    handle.remove()
    return output


def test_hook_that_a_replica_registers_on_the_root_is_its_own(devices):
    assert_trains_as_one_device(net(for_the_root), devices, 7, 3)


class Calling(nn.Module):
    """Has a hook that is a method of the model, or refers to it, and notes on which module it was called."""

    def __init__(self, kind: str, is_method: bool) -> None:
        super().__init__()
        self.bn, self.layer, self.calls = nn.BatchNorm1d(3), nn.Linear(3, 3), []
        getattr(self.layer, REGISTER_METHOD[kind])(self.note if is_method else lambda *args: self.note(*args))

    def note(self, module: nn.Module, *args: Any) -> None:
        self.calls.append((self, module))

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(self.bn(input))


REGISTER_METHOD = {"forward": "register_forward_hook", "backward": "register_full_backward_hook"}


@pytest.mark.parametrize("is_method", [True, False])
@pytest.mark.parametrize("kind", REGISTER_METHOD)
def test_hook_of_the_model_is_called_once_for_each_replica_and_belongs_to_the_model(devices, kind, is_method):
    model = convert_model(Calling(kind, is_method)).to(as_devices(devices)[0])
    parallel = DataParallelWithCallback(model, devices)
    parallel(torch.randn(7, 3, device=as_devices(devices)[0])).square().sum().backward()
    assert [net is model for net, _ in model.calls] == [True] * len(devices)
    assert len({id(layer) for _, layer in model.calls} - {id(model.layer)}) == len(devices)


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


WAYS = ["in forward", "hook of the replica", "hook of the model", "backward hook", "checkpoint", "beside a checkpoint"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:while replicas of Keeping ran")
def test_replicas_end_with_their_pass_whatever_keeps_an_activation(devices, way):
    parallel = DataParallelWithCallback(convert_model(Keeping(way)).to(as_devices(devices)[0]), devices)
    parallel.module.alive = [WeakSet[nn.Module]()]
    for _ in range(4):
        parallel(torch.randn(7, 3, device=as_devices(devices)[0])).square().sum().backward()
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


def test_hooks_of_the_module_are_those_of_all_replicas_and_stay_when_one_removes_its_own(devices):
    plain, parallel = twins(net(for_this_call, register=REGISTER["forward"]).double(), devices)
    layers = (plain.layer, parallel.module.layer)
    handles = [layer.register_forward_hook(doubled_with_kwargs, with_kwargs=True) for layer in layers]
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))
    for handle in handles:
        handle.remove()
    assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


@pytest.mark.parametrize("way", WRAPPERS)
def test_hooks_of_replicas_are_their_own_in_every_wrapper(way):
    plain = net(for_this_call, register=REGISTER["forward"]).double()
    parallel = WRAPPERS[way](convert_model(copy.deepcopy(plain)))
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3))


@pytest.mark.parametrize("kind", ["forward", "backward", "backward pre"])
def test_hooks_of_a_graph_module_are_those_of_its_replicas(devices, kind):
    plain, parallel = twins(net(run, layer=LAYERS["graph"]()).double(), devices)
    for model in (plain, parallel.module):
        REGISTER[kind](model.layer)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


def scriptable(self, input: tuple[Tensor], output: Tensor):
    return 2 * output


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_forward_hooks_of_a_scripted_module_act_in_each_replica():
    plain = net(run).double()
    plain.layer.register_forward_hook(scriptable)
    scripted = net(run, bn=copy.deepcopy(plain.bn), layer=torch.jit.script(plain.layer))
    data = doubles(7, 3)
    assert_equal(WRAPPERS["wrapper"](convert_model(scripted))(data), plain(data))


def test_hook_sees_what_its_own_replica_computes(devices):
    def forward(net, input):
        handle = net.layer.register_forward_hook(lambda module, args, output: seen.append(output) or 3 * output)
        output = net.layer(net.bn(input))
        handle.remove()
        return output

    seen: list[Tensor] = []
    assert_trains_as_one_device(net(forward), devices, 7, 3, steps=1)
    assert len(seen) == 1 + len(devices)
    assert {output.device for output in seen} == {torch.device(device) for device in as_devices(devices)}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("name", ["layer", "bn", "", "graph"])
def test_backward_hook_of_the_older_kind_is_refused_in_the_backward_with_the_remedy(devices, name):
    def forward(net, input):
        return net.graph(net.layer(net.bn(input)))

    plain, parallel = twins(net(forward, graph=LAYERS["graph"]()).double(), devices)
    hooked = parallel.module.get_submodule(name)
    handle = hooked.register_backward_hook(lambda *args: None)
    data = doubles(7, 3, devices=devices)
    output = parallel(data)
    text = (
        rf"^expected full backward hooks in replicas, but got {type(hooked).__name__} with those of "
        r"register_backward_hook.*; call register_full_backward_hook instead$"
    )
    with pytest.raises(RuntimeError, match=text):
        output.backward(torch.randn_like(output))
    with torch.no_grad():
        parallel(data)
    handle.remove()
    parallel.zero_grad()
    plain.load_state_dict(parallel.module.state_dict())
    assert_same_step(plain, parallel, data)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_backward_hook_of_the_older_kind_acts_where_one_replica_runs_the_module():
    calls = []
    model = convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model.register_backward_hook(lambda *args: calls.append(args[0]))
    parallel = WRAPPERS["wrapper"](model).eval()
    parallel(torch.randn(1, 3)).square().sum().backward()
    assert calls == [model]
