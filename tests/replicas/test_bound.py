"""Replicas end with their pass, whatever `forward` or a hook keeps on them."""

import gc
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import pytest
import torch
from helpers import Net, as_devices, assert_equal, assert_same_state, assert_trains_as_one_device, doubles, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, convert_model
from sync_batchnorm.wrapper.bound import KEPT, where_bound


class Pair(NamedTuple):
    first: Tensor
    second: int


@dataclass
class Record:
    value: Any


class Named(dict):
    pass


# What `forward` or a hook does with a tensor.
KEEP = {
    "attribute": lambda net, tensor: setattr(net, "kept", tensor),
    "list": lambda net, tensor: setattr(net, "kept", [tensor]),
    "list that forward makes": lambda net, tensor: net.made.append(tensor),
    "nested": lambda net, tensor: setattr(net, "kept", Named(a=({"b": [tensor]}, Pair(tensor, 1)))),
    "deque": lambda net, tensor: setattr(net, "kept", deque([tensor], maxlen=2)),
    "dataclass": lambda net, tensor: setattr(net, "kept", Record(tensor)),
    "closure": lambda net, tensor: setattr(net, "kept", [lambda: tensor]),
    "default": lambda net, tensor: setattr(net, "kept", lambda first=0, second=tensor: second),
    "partial": lambda net, tensor: setattr(net, "kept", partial(print, tensor, end=tensor)),
    "buffer": lambda net, tensor: setattr(net, "buffer", tensor),
    "attribute of a layer": lambda net, tensor: setattr(net.layer, "kept", tensor),
    "penalty": lambda net, tensor: setattr(net, "kept", tensor.square().sum()),
}


class Function(torch.autograd.Function):
    """Keeps the net in its node."""

    @staticmethod
    def forward(ctx, input, net):
        ctx.net = net
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.net.hook(grad)
        return grad, None


class Keeping(nn.Module):
    """Keeps a tensor, in its forward or in the hook of `kind`, through which the graph refers to it."""

    def __init__(self, kind: str, keep: Any, in_hook: bool) -> None:
        super().__init__()
        self.stem, self.bn, self.layer = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("buffer", None)
        self.kind, self.keep, self.in_hook, self.made = kind, keep, in_hook, None
        if kind == "forward hook":
            self.layer.register_forward_hook(self.on_call)
        if kind in ("backward hook", "both"):
            self.layer.register_full_backward_hook(self.on_call)
        if kind == "both":
            self.layer.register_forward_hook(self.on_call)
            self.stem.register_forward_pre_hook(partial(self.before_call, 1.0))
        if kind == "backward pre hook":
            self.layer.register_full_backward_pre_hook(self.before_call)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.alive[0].add(self)

    def on_call(self, module: nn.Module, before: Any, after: Any) -> None:
        self.hook(after[0] if isinstance(after, tuple) else after)

    def before_call(self, *args: Any) -> None:
        self.hook(args[-1][0])

    def hook(self, tensor: Tensor) -> None:
        if self.in_hook:
            self.keep(self, tensor)

    def body(self, input: Tensor) -> Tensor:
        return self.layer(input).tanh()

    def forward(self, input: Tensor) -> Tensor:
        self.made = []
        hidden = self.bn(self.stem(input))
        if self.kind == "hook of forward":
            self.layer.register_full_backward_hook(self.on_call)
        output = checkpoint(self.body, hidden, use_reentrant=False) if self.kind == "checkpoint" else self.body(hidden)
        if self.kind == "tensor hook":
            output.register_hook(lambda grad: self.hook(grad))
        if self.kind == "function":
            output = Function.apply(output, self)
        if not self.in_hook:
            self.keep(self, output)
        return output


KINDS = [
    "forward hook", "backward hook", "both", "backward pre hook", "hook of forward", "tensor hook", "function",
    "checkpoint",
]  # fmt: skip


@pytest.mark.pairs
@pytest.mark.once("kind", "way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [(name, where) for name in KEEP for where in ("in a hook", "in forward")], ids=" ".join)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:forward.. of Keeping set|Using backward.. with create_graph=True")
def test_replicas_of_an_earlier_pass_end_when_a_later_one_keeps_the_same(devices, create_graph, way, kind):
    """Also where the collector is off: the replicas are in no cycle that Python would have to find."""
    in_hook = way[1] == "in a hook"
    model = convert_model(Keeping(kind, KEEP[way[0]], in_hook)).to(as_devices(devices)[0])
    parallel = DataParallelWithCallback(model, devices)
    model.alive, numbers = [WeakSet[nn.Module]()], []
    gc.disable()
    try:
        for _ in range(4):
            output = parallel(torch.randn(8, 3, device=as_devices(devices)[0]))
            output.square().sum().backward(create_graph=create_graph)
            parallel.zero_grad()
            if kind in ("checkpoint", "hook of forward"):  # whose cycles are those of the program
                gc.collect()
            numbers.append(len(model.alive[0]))
    finally:
        gc.enable()
    # What a backward pass keeps is kept again in the next one, when a later pass has replicas, too.
    assert max(numbers[1:]) <= len(devices) * (2 if in_hook and create_graph else 1)


class Closed(dict):
    """As a store that was closed."""

    def keys(self):
        raise KeyError("closed")

    __iter__ = keys


class ClosedList(list):
    def __iter__(self):
        raise ValueError("closed")


def view_of_changed(tensor: Tensor) -> Tensor:
    base = tensor * 1
    first = base.unbind()[0]
    base.mul_(2)
    return first  # PyTorch raises an error where its `grad_fn` is asked for.


def proxy(tensor: Tensor) -> Any:
    tensor.record = Record(1)  # which ends with the output of the replica
    return weakref.proxy(tensor.record)


def chained(tensor: Tensor) -> list[Any]:
    chain = [tensor]
    for _ in range(2000):
        chain = [chain]
    return chain


HARD_TO_READ = {
    "mapping": lambda tensor: Closed(a=tensor),
    "list": lambda tensor: ClosedList([tensor]),
    "proxy": proxy,
    "view": view_of_changed,
    "penalty": lambda tensor: view_of_changed(tensor.sum()[None]),
    "chain": chained,
}


@pytest.mark.parametrize("make", HARD_TO_READ.values(), ids=list(HARD_TO_READ))
@pytest.mark.filterwarnings("ignore:forward.. of Net set kept")
def test_what_cannot_be_read_is_kept_without_an_error(devices, make):
    def forward(net, input):
        output = net.layer(net.bn(input))
        net.kept = make(output)
        replicas.append(net)
        return output

    replicas: list[Any] = []
    net = Net(forward, bn=nn.BatchNorm1d(3), layer=nn.Linear(3, 3), kept=0)
    assert_trains_as_one_device(net, devices, 7, 3, steps=3)


class Discriminator(nn.Module):
    """Reads what its forward keeps, in its checkpoint and in its backward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.RNN(4, 4, batch_first=True)
        self.bn.register_full_backward_hook(self.scaled)
        self.bn.register_forward_hook(self.shifted)

    def scaled(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if grad is None else grad * self.kept[0].detach() for grad in grad_input)

    def shifted(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.kept[0]

    def body(self, input: Tensor) -> Tensor:
        return self.layers(self.bn(self.stem(input))[:, None])[0][:, 0] * self.kept[0]

    def forward(self, input: Tensor) -> Tensor:
        self.kept = [self.stem(input), {"factor": self.prior.to(input.device)}]
        whole = checkpoint(self.body, input, use_reentrant=False) + self.kept[1]["factor"]
        # Of a layer alone, whose hook is a method of the model.
        return whole + checkpoint(self.bn, self.kept[0], use_reentrant=False)


def test_two_passes_and_one_backward_read_what_each_pass_has_kept(devices):
    plain, parallel = twins(Discriminator().double(), devices)
    results = {}
    for model, backward_last in ((plain, False), (parallel, True)):
        prior = torch.ones(4, dtype=torch.float64, device=as_devices(devices)[0], requires_grad=True)
        losses, net = [], model if model is plain else model.module
        torch.manual_seed(0)
        for factor in (2.0, 3.0, 0.5):
            net.prior = prior * factor  # in the graph, and another one for each pass
            losses.append(factor * model(doubles(6, 3, devices=devices)).square().mean())
            if not backward_last:  # One device overwrites what it has kept.
                losses[-1].backward()
        if backward_last:
            sum(losses).backward()
        results[model] = [*losses, prior.grad, *[parameter.grad for parameter in model.parameters()]]
    for actual, expected in zip(results[parallel], results[plain], strict=True):
        assert_equal(actual, expected)


def gated(net: nn.Module, input: Tensor, tag: str) -> Tensor:
    """Keeps a gate, under a name for each kind of images, which its checkpoint and a hook read in the backward pass."""
    hidden = net.bn(net.stem(input))
    setattr(net, tag, net.stem(input).sigmoid())  # A reentrant checkpoint takes its gradient where it recomputes.
    if not net.training:
        return net.layer(hidden)
    hidden.register_hook(lambda grad: grad * getattr(net, tag))
    return checkpoint(lambda hidden: net.layer(hidden).tanh() * getattr(net, tag), hidden, use_reentrant=True)


def gated_twins(devices: Any) -> Any:
    return twins(Net(gated, stem=nn.Linear(3, 4), bn=nn.BatchNorm1d(4), layer=nn.Linear(4, 4)).double(), devices)


def test_evaluation_before_the_backward_pass_leaves_the_graph_of_what_training_has_kept(devices):
    plain, parallel = gated_twins(devices)
    data = doubles(6, 3, devices=devices)
    for model in (plain, parallel):
        loss = model(data, "real").square().sum()
        if model is parallel:  # One device overwrites what it has kept.
            with torch.no_grad():
                model.eval()(data, "real")
        model.train()
        loss.backward()
    assert_same_state(parallel, plain)


def test_names_that_a_later_pass_does_not_bind_keep_their_graphs(devices):
    plain, parallel = gated_twins(devices)
    real, fake = doubles(6, 3, devices=devices), doubles(6, 3, devices=devices)
    for model in (plain, parallel):
        (model(real, "real").square().sum() + model(fake, "fake").square().sum()).backward()
    assert_same_state(parallel, plain)


def test_what_is_no_part_of_a_replica_keeps_its_graph():
    def forward(net, input):
        store = net.store
        net.kept = store  # a list of the caller's, under another name
        store.append(net.layer(input))
        net.pair = (store[-1], "text")
        replicas.append(net)
        return store[-1] * 1

    replicas: list[Any] = []
    _, parallel = twins(Net(forward, layer=nn.Linear(3, 3), store=[]).double(), ["cpu"] * 2)
    store = parallel.module.store
    for _ in range(2):
        parallel(doubles(4, 3))
    assert [tensor.grad_fn is not None for tensor in store] == [True] * 4
    assert all(replica.kept is store for replica in replicas)


@pytest.mark.filterwarnings("ignore:forward.. of Net set mean")
def test_replica_that_is_kept_has_what_it_was_given():
    def forward(net, input):
        net.kept, net.number = net.layer(input), 3
        net.mean = net.kept[0].mean()
        replicas.append(net)
        return net.kept[0]

    replicas: list[Any] = []
    _, parallel = twins(Net(forward, layer=nn.RNN(3, 3), mean=nn.Buffer(torch.zeros(()))).double(), ["cpu"] * 2)
    parallel.module.prior = torch.ones(3, dtype=torch.float64, requires_grad=True) * 2
    parallel(doubles(4, 3))
    first = replicas[:2]
    parallel.module.prior = None
    parallel(doubles(4, 3))
    for replica in first:
        assert [tensor.grad_fn for tensor in (*replica.kept, replica.mean)] == [None] * 3
        assert replica.prior.grad_fn is not None
        assert all(tensor.grad_fn is not None for tensor in [*replica.parameters(), *replica.layer._flat_weights])
        bound = where_bound(replica, vars(replica)[KEPT].given[parallel.module])
        assert [name for _, name in bound] == ["kept", "number", "mean"]
    assert all(tensor.grad_fn is not None for replica in replicas[2:] for tensor in (*replica.kept, replica.mean))
