"""What replicas consist of: shared parameters, buffers of which the first are the module's, and modules of any kind."""

import functools
import gc
import types
from contextlib import nullcontext

import pytest
import torch
from conftest import device_lists
from helpers import (
    Net,
    as_devices,
    assert_equal,
    assert_same_step,
    assert_trains_as_one_device,
    doubles,
    twins,
)
from simulated_gpus import is_simulated
from torch import nn

from sync_batchnorm import DataParallelWithCallback, convert_model
from sync_batchnorm.wrapper.replicas import make_replicas


def test_replicas_share_parameters_and_only_the_first_has_the_buffers(devices):
    _, parallel = twins(nn.BatchNorm1d(3), devices)
    first, second = parallel.replicate(parallel.module, parallel.device_ids)
    assert first.weight.data_ptr() == parallel.module.weight.data_ptr()
    assert first.running_mean.data_ptr() == parallel.module.running_mean.data_ptr()
    assert second.running_mean.data_ptr() != parallel.module.running_mean.data_ptr()
    if first.weight.device == second.weight.device:
        assert second.weight.data_ptr() == parallel.module.weight.data_ptr()
    for replica in (first, second):
        assert next(replica.parameters()) is replica.weight
        assert replica.weight.grad_fn is not None


def with_buffers(factor):
    def forward(net, input):
        net.seen.append((net.factor.requires_grad, net.offset.requires_grad))
        return input * net.factor.sin() + net.offset

    net = Net(forward, offset=nn.Buffer(torch.ones_like(factor.detach())), seen=[])
    net.register_buffer("factor", factor)
    return net


@pytest.mark.parametrize("devices", device_lists(1, 3))
def test_buffers_that_require_grad_get_it(devices):
    def run(factor, input):
        return DataParallelWithCallback(with_buffers(factor), devices)(input)

    inputs = [doubles(*shape, devices=devices).requires_grad_() for shape in ((3,), (4, 3))]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("devices", device_lists(1, 2))
def test_nothing_in_replicas_requires_grad_under_no_grad(devices):
    parallel = DataParallelWithCallback(with_buffers(doubles(3, devices=devices).requires_grad_()), devices)
    output = parallel(doubles(4, 3, devices=devices))
    with torch.no_grad():
        parallel(doubles(4, 3, devices=devices))
    first, last = parallel.module.seen[: len(devices)], parallel.module.seen[len(devices) :]
    assert output.requires_grad
    assert first == [(True, False)] * len(devices)
    # The first replica has the buffers of the module themselves. The replicas note what they see in any order.
    assert sorted(last, reverse=True) == [(i == 0, False) for i in range(len(devices))]


class Unused(nn.Linear):
    def __init__(self):
        super().__init__(3, 3, bias=False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("nothing", None)
        self.register_module("none", None)

    def forward(self, input):
        assert self.bias is self.nothing is None
        return super().forward(input)


def recurrent():
    """Return a net with a recurrent layer, not an LSTM, whose kernels simulated GPUs lack, and a complex parameter."""

    def forward(net, input):
        net.rnn.flatten_parameters()
        return (net.bn(net.rnn(input[:, None])[0].transpose(1, 2)).flatten(1) * net.phase).abs()

    phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))
    return Net(forward, rnn=nn.RNN(3, 4, 2, batch_first=True), bn=nn.BatchNorm1d(4), phase=phase)


def computing():
    """Return a net whose weights are computed from parameters."""
    norms = nn.utils.parametrizations
    by_hook, linear = nn.utils.spectral_norm(nn.Linear(3, 3)), norms.weight_norm(nn.Linear(3, 3))
    return nn.Sequential(by_hook, norms.spectral_norm(nn.Linear(3, 3)), linear, nn.BatchNorm1d(3))


class Bound(nn.Module):
    """Has a forward of its own, set on the object and bound to it in some way, and so has its submodule."""

    def __init__(self, bind):
        super().__init__()
        self.bn, self.inner = nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.again = self.inner.forward
        for module, function in ((self, Bound.compute), (self.inner, Bound.compute_inside)):
            module.forward = bind(module, function)

    def compute(self, input):
        return self.bn(torch.tanh(self.again(self.inner(input))))

    def compute_inside(self, input):
        return torch.relu(self[1](self[0](input)))


def as_wrapping_libraries_do(module, function):
    """Set a partial that calls what was the forward, which is an attribute now."""
    module._old_forward = types.MethodType(function, module)
    new = functools.partial(lambda module, *args, **kwargs: 2 * module._old_forward(*args, **kwargs), module)
    return functools.update_wrapper(new, module._old_forward)


def as_wrapped(module, function):
    """Set a partial that calls what was the forward, which is an attribute of the partial."""
    new = functools.partial(lambda module, *args: 2 * module.forward.__wrapped__(*args), module)
    return functools.update_wrapper(new, types.MethodType(function, module))


BINDINGS = {
    "method": lambda module, function: types.MethodType(function, module),
    "partial": lambda module, function: functools.partial(function, module),
    "keyword": lambda module, function: functools.partial(lambda input, me: function(me, input), me=module),
    "nested": lambda module, function: functools.partial(types.MethodType(function, module)),
    "library": as_wrapping_libraries_do,
    "wrapped": as_wrapped,
}


@pytest.mark.parametrize("kind", BINDINGS)
def test_forward_that_is_bound_to_a_module_runs_in_its_replica(devices, kind):
    assert_trains_as_one_device(Bound(BINDINGS[kind]), devices, 6, 3)


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # but with simulated GPUs
@pytest.mark.parametrize("net", [Unused, recurrent, computing])
def test_modules_of_any_kind_train_in_replicas(devs, net):
    assert_trains_as_one_device(net(), devs, 6, 3)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_called_once_and_not_for_those_that_no_replica_uses(devices, register):
    plain, parallel = twins(Unused().double(), devices)
    calls = []
    for name, parameter in parallel.module.named_parameters():
        getattr(parameter, register)(lambda given, name=name: calls.append((name, given)))
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(6, 3, devices=devices))
        ((name, given),) = calls
        assert name == "weight"
        assert_equal(given if register == "register_hook" else given.grad, plain.weight.grad)
        calls.clear()
        plain.zero_grad()
        parallel.zero_grad()


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):  # zeros, if there is none
        return grad


def test_no_gradient_goes_on_from_a_buffer_that_no_replica_uses(devices):
    source = doubles(3, devices=devices).requires_grad_()
    module = Net(lambda net, input: input * net.weight, weight=nn.Parameter(doubles(3, devices=devices)))
    module.register_buffer("unused", Identity.apply(source))
    DataParallelWithCallback(module, devices)(doubles(4, 3, devices=devices)).sum().backward()
    assert module.weight.grad is not None
    assert source.grad is None


def used_in_part(net, input):
    """Uses a parameter where the first number is positive, so not in every replica."""
    return input.sin() * (net.weight if input[0, 0] > 0 else net.bias)


@pytest.mark.parametrize("positive", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("devices", device_lists(3))
def test_parameters_that_some_replicas_use_have_first_and_second_derivatives(devices, positive):
    module = Net(used_in_part, weight=nn.Parameter(torch.randn(3)), bias=nn.Parameter(torch.randn(3))).double()
    input = doubles(3, 3, devices=devices)
    for i in range(3):
        input[i, 0] = 1 if i in positive else -1

    parallel = DataParallelWithCallback(module.to(as_devices(devices)[0]), devices)
    input.requires_grad_()
    parameters = [input, module.weight, module.bias]

    def gradients(output):
        first = torch.autograd.grad(output, parameters, upstream, create_graph=True)
        return [*first, *torch.autograd.grad(first, [input], [grad.sin().detach() for grad in first])]

    upstream = doubles(3, 3, devices=devices)
    expected = gradients(torch.cat([module(row) for row in input.split(1)]))
    for actual, wanted in zip(gradients(parallel(input)), expected, strict=True):
        assert_equal(actual, wanted)


@pytest.mark.skipif(is_simulated(), reason="simulated GPUs have no sparse tensors")
@pytest.mark.parametrize("devices", device_lists(3))
def test_sparse_gradients_stay_sparse_and_add_up(devices):
    plain, parallel = twins(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.BatchNorm1d(4)).double(), devices)
    indices = torch.randint(5, (6, 4), device=as_devices(devices)[0])
    grad = doubles(6, 4, 3, devices=devices)
    for module in (plain, parallel):
        module(indices).backward(grad)
    weight = parallel.module[0].weight
    assert weight.grad.is_sparse
    assert_equal(weight.grad.to_dense(), plain[0].weight.grad.to_dense())


def test_uninitialized_lazy_modules_are_refused_in_the_words_of_torch():
    parallel = DataParallelWithCallback(nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3)), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters can't be used with `DataParallel`"):
        parallel(torch.zeros(4, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(3, 4).double())], ids=["script", "trace"]
)
def test_scripted_submodules_equal_one_device(devs, make):
    def build() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
        return nn.Sequential(make(inner.double()), nn.BatchNorm1d(4).double()).to(as_devices(devs)[0])

    plain, net = build(), build()  # A copy's parameters are no leaves.
    net.load_state_dict(plain.state_dict())
    parallel = DataParallelWithCallback(convert_model(net), devs)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 4, devices=devs))
    with torch.no_grad():
        input = doubles(7, 4, devices=devs)
        assert_equal(parallel(input), plain(input))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_buffers_of_scripted_modules_change_in_place_and_once():
    layer = torch.jit.script(nn.BatchNorm1d(4))  # which `convert_model` would leave
    for net in (nn.Sequential(layer, nn.Linear(4, 4)), layer):
        before = int(layer.num_batches_tracked)
        DataParallelWithCallback(net, ["cpu"] * 3)(torch.randn(6, 4))
        assert layer.num_batches_tracked == before + 1
    assert layer.running_mean.abs().max() > 0


class Looking(nn.Module):
    """Looks at the collector while it is copied."""

    def _replicate_for_data_parallel(self):
        self.look()
        return super()._replicate_for_data_parallel()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_collector_is_disabled_only_while_replicas_are_built(is_enabled, fails):
    def look():
        seen.append(gc.isenabled())
        if fails:
            raise MemoryError("no replicas")

    seen, was_enabled, net = [], gc.isenabled(), Looking()
    net.look = look
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(MemoryError) if fails else nullcontext():
            make_replicas(net, as_devices(["cpu"] * 2), detach=False)
        seen.append(gc.isenabled())
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert seen == ([False] if fails else [False, False]) + [is_enabled]


def test_collector_stays_enabled_if_another_thread_enables_it_meanwhile(monkeypatch):
    def look():
        monkeypatch.undo()
        gc.enable()  # as the other thread does, whose replicas are built now
        return False

    monkeypatch.setattr(gc, "isenabled", look)  # while the other thread builds its replicas
    make_replicas(nn.Linear(2, 2), as_devices(["cpu"] * 2), detach=False)
    assert gc.isenabled()
