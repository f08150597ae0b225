"""Hooks that a replica registers on itself or its submodules in `forward`: they act there, as on one device."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Net, as_devices, assert_equal, assert_same_step, doubles, twins
from scripted import WRAPPERS
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from sync_batchnorm import convert_model

LAYERS = {
    "linear": lambda: nn.Linear(3, 3),
    "rnn": lambda: nn.RNN(3, 3, batch_first=True),  # of an LSTM, simulated GPUs lack the kernels
    "lstm": lambda: nn.LSTM(3, 3, batch_first=True),
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
every_kind = pytest.mark.parametrize("register", REGISTER.values(), ids=list(REGISTER))


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


@pytest.mark.pairs
@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
@every_kind
@pytest.mark.parametrize("function", [for_this_call, if_there_is_none])
def test_hook_that_a_replica_registers_acts_as_on_one_device(devices, function, register, layer):
    layer = layer() if devices[0] == "cpu" or layer is not LAYERS["lstm"] else LAYERS["rnn"]()
    plain, parallel = twins(Net(function, bn=nn.BatchNorm1d(3), layer=layer, register=register).double(), devices)
    for _ in range(3):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))
    kept = [
        hooks for name, hooks in vars(parallel.module.layer).items() if name.startswith(("_forward_", "_backward_"))
    ]
    assert not any(len(hooks) for hooks in kept)  # What a replica registers ends with it.


def test_hooks_of_the_module_are_those_of_all_replicas_and_stay_when_one_removes_its_own(devices):
    def forward(net, input):
        handle = net.layer.register_forward_hook(doubled)
        output = net.layer(net.bn(input))
        handle.remove()
        return output

    plain = Net(forward, bn=nn.BatchNorm1d(3), layer=nn.Linear(3, 3)).double()
    plain, parallel = twins(plain, devices)
    handles = [
        model.layer.register_forward_hook(doubled_with_kwargs, with_kwargs=True) for model in (plain, parallel.module)
    ]
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))
    for handle in handles:
        handle.remove()
    assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


def test_hooks_of_two_modules_that_one_replica_registers_keep_apart_which_takes_kwargs(devices):
    def forward(net, input):
        handles = [
            net.first.register_forward_hook(doubled_with_kwargs, with_kwargs=True, always_call=True),
            net.second.register_forward_hook(doubled),
            net.second.register_forward_hook(doubled_with_kwargs, with_kwargs=True),
        ]
        output = net.second(net.first(net.bn(input)))
        handles[0].remove()
        output = output + net.second(net.first(input))
        handles[2].remove()
        output = output + net.second(net.first(input))
        handles[1].remove()
        return output

    net = Net(forward, bn=nn.BatchNorm1d(3), first=nn.Linear(3, 3), second=nn.Linear(3, 3)).double()
    plain, parallel = twins(net, devices)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


class Normalizes(nn.Module):
    """A hook that is a submodule of the model."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, module, args, output):
        return self.bn(output)


def test_hook_that_is_a_submodule_is_that_of_the_replica(devices):
    module = Net(lambda net, input: net.layer(input), layer=nn.Linear(3, 3), hook=Normalizes()).double()
    module.layer.register_forward_hook(module.hook)
    plain, parallel = twins(module, devices)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(6, 3, devices=devices))


class Keeping(nn.Module):
    """Keeps what a layer returns, by a hook that is a method of the model."""

    def __init__(self):
        super().__init__()
        self.bn, self.layer, self.kept = nn.BatchNorm1d(3), nn.Linear(3, 3), None
        self.layer.register_forward_hook(self.keep)
        self.bn.register_forward_pre_hook(partial(self.scaled, 2.0))

    def keep(self, module, args, output):
        self.kept = output

    def scaled(self, factor, module, args):
        return (args[0] * factor * self.layer.weight.sum(),)

    def forward(self, input):
        return self.layer(self.bn(input)) + self.kept.square()


def test_hooks_that_are_methods_of_the_model_are_those_of_each_replica(devices):
    plain, parallel = twins(Keeping().double(), devices)
    for _ in range(3):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))
    assert parallel.module.kept is None


def test_hook_with_the_number_of_one_that_was_unpickled_shares_no_flags_with_it(monkeypatch):
    def forward(net, input):
        handle = net.first.register_forward_hook(doubled_with_kwargs, with_kwargs=True)
        output = net.second(net.first(net.bn(input)))
        handle.remove()
        return output

    net = Net(forward, bn=nn.BatchNorm1d(3), first=nn.Linear(3, 3), second=nn.Linear(3, 3)).double()
    number = net.second.register_forward_hook(doubled).id
    (plain, parallel), data = twins(net, ["cpu"] * 2), doubles(7, 3)
    for model in (plain, parallel):  # A process that loads a model counts its hooks from zero.
        monkeypatch.setattr(RemovableHandle, "next_id", number)
        model(data)
    monkeypatch.setattr(RemovableHandle, "next_id", number)
    assert_same_step(plain, parallel, doubles(7, 3))


def test_hook_on_the_root_that_is_removed_in_the_same_call_does_not_act(devices):
    def forward(net, input):
        handle = net.register_forward_hook(doubled)
        output = net.bn(input)
        handle.remove()
        return output

    plain, parallel = twins(Net(forward, bn=nn.BatchNorm1d(3)).double(), devices)
    for _ in range(3):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


@pytest.mark.parametrize("way", WRAPPERS)
def test_hooks_of_replicas_are_their_own_in_every_wrapper(way):
    net = Net(for_this_call, bn=nn.BatchNorm1d(3), layer=nn.Linear(3, 3), register=REGISTER["forward"]).double()
    parallel = WRAPPERS[way](convert_model(copy.deepcopy(net)))
    for _ in range(2):
        assert_same_step(net, parallel, doubles(7, 3))


GRAPHS = {
    "forward": lambda layer: layer.register_forward_hook(doubled),
    "full backward": lambda layer: layer.register_full_backward_hook(lambda module, inner, outer: (10 * inner[0],)),
    "backward pre": lambda layer: layer.register_full_backward_pre_hook(lambda module, outer: (10 * outer[0],)),
}


@pytest.mark.parametrize("register", GRAPHS.values(), ids=list(GRAPHS))
def test_hooks_of_a_graph_module_are_those_of_its_replicas(devices, register):
    plain, parallel = twins(Net(run, bn=nn.BatchNorm1d(3), layer=LAYERS["graph"]()).double(), devices)
    for model in (plain, parallel.module):
        register(model.layer)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


def scriptable(self, input: tuple[Tensor], output: Tensor):
    return 2 * output


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_forward_hooks_of_a_scripted_module_act_in_each_replica():
    layer = nn.Linear(3, 3).double()
    layer.register_forward_hook(scriptable)
    plain = Net(run, bn=nn.BatchNorm1d(3).double(), layer=layer)
    scripted = Net(run, bn=copy.deepcopy(plain.bn), layer=torch.jit.script(layer))
    data = doubles(7, 3)
    assert_equal(WRAPPERS["wrapper"](convert_model(scripted))(data), plain(data))


def test_hook_sees_what_its_own_replica_computes(devices):
    def forward(net, input):
        handle = net.layer.register_forward_hook(lambda module, args, output: seen.append(output) or 3 * output)
        output = net.layer(net.bn(input))
        handle.remove()
        return output

    seen: list[Tensor] = []
    plain, parallel = twins(Net(forward, bn=nn.BatchNorm1d(3), layer=nn.Linear(3, 3)).double(), devices)
    assert_same_step(plain, parallel, doubles(7, 3, devices=devices))
    assert len(seen) == 1 + len(devices)
    assert {output.device for output in seen} == {torch.device(device) for device in as_devices(devices)}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("name", ["layer", "bn", "", "graph"])
def test_backward_hook_of_the_older_kind_is_refused_in_the_backward_with_the_remedy(devices, name):
    def forward(net, input):
        return net.graph(net.layer(net.bn(input)))

    plain = Net(forward, bn=nn.BatchNorm1d(3), layer=nn.Linear(3, 3), graph=LAYERS["graph"]()).double()
    plain, parallel = twins(plain, devices)
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
    for model in (plain, parallel.module):
        model.load_state_dict(parallel.module.state_dict())
    assert_same_step(plain, parallel, data)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_backward_hook_of_the_older_kind_acts_where_one_replica_runs_the_module():
    calls = []
    model = convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model.register_backward_hook(lambda *args: calls.append(args[0]))
    parallel = WRAPPERS["wrapper"](model).eval()
    parallel(torch.randn(1, 3)).square().sum().backward()
    assert calls == [model]


WAYS = {
    "copy": lambda layer, x: layer._forward_hooks.copy().popitem()[1](layer, (x,), x),
    "deepcopy": lambda layer, x: copy.deepcopy(layer)(x),
    "pickle": lambda layer, x: pickle.loads(pickle.dumps(layer))(x),
    "by number": lambda layer, x: layer._forward_hooks[next(iter(layer._forward_hooks))](layer, (x,), x),
    "popitem": lambda layer, x: layer._forward_hooks.popitem()[1](layer, (x,), x),
}


class Adding(nn.Module):
    """Its layer without parameters has a hook that is a method."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.bn, self.way = nn.Identity(), nn.BatchNorm1d(3), way
        self.layer.register_forward_hook(self.add)

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.bn.weight

    def forward(self, input: Tensor) -> Tensor:
        return WAYS[self.way](self.layer, self.bn(input))


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_a_replica_are_copied_and_looked_up_as_those_of_any_module(devices, way):
    plain, parallel = twins(Adding(way).double(), devices)
    with torch.no_grad():  # Torch copies no parameters that are in a graph.
        data = doubles(6, 3, devices=devices)
        assert_equal(parallel(data), plain(data))
