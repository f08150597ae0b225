"""Replicas are objects of the user's classes, of modules of any kind, with shared parameters and own buffers."""

import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import CUDA_COUNT, INTERLEAVED, device_lists
from helpers import (
    Net,
    as_devices,
    assert_equal,
    assert_same_state,
    assert_same_step,
    assert_trains_as_one_device,
    doubles,
    randomize,
    twins,
)
from scripted import WRAPPERS, R
from simulated_gpus import is_simulated
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, convert_model


def test_replicas_share_parameters_and_only_the_first_has_the_buffers(devices):
    _, parallel = twins(nn.BatchNorm1d(3), devices)
    first, second = parallel.replicate(parallel.module, parallel.device_ids)
    assert first.weight.data_ptr() == parallel.module.weight.data_ptr()
    assert first.running_mean.data_ptr() == parallel.module.running_mean.data_ptr()
    assert second.running_mean.data_ptr() != parallel.module.running_mean.data_ptr()
    if first.weight.device == second.weight.device:
        assert second.weight.data_ptr() == parallel.module.weight.data_ptr()


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
def test_modules_of_any_kind_train_in_replicas(devices, net):
    assert_trains_as_one_device(net(), devices, 6, 3)


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


def test_no_gradient_goes_on_from_a_buffer_that_no_replica_uses(devices):
    calls, unused = [], doubles(3, devices=devices).requires_grad_() * 2
    unused.grad_fn.register_hook(lambda *grads: calls.append(grads))
    module = Net(lambda net, input: input * net.weight, weight=nn.Parameter(doubles(3, devices=devices)))
    module.register_buffer("unused", unused)
    input, upstream = doubles(2, 4, 3, devices=devices)
    DataParallelWithCallback(module, devices)(input).backward(upstream)
    assert module.weight.grad is not None
    assert calls == []


def used_in_part(net, input):
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
@pytest.mark.parametrize("way", ["script", "trace"])
def test_scripted_submodules_equal_one_device(devices, way):
    def build() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))).double()
        inner = torch.jit.script(inner) if way == "script" else torch.jit.trace(inner, doubles(3, 4))
        return nn.Sequential(inner, nn.BatchNorm1d(4).double()).to(as_devices(devices)[0])

    plain, net = build(), build()  # A copy's parameters are no leaves.
    net.load_state_dict(plain.state_dict())
    parallel = DataParallelWithCallback(convert_model(net), devices)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 4, devices=devices))
    with torch.no_grad():
        input = doubles(7, 4, devices=devices)
        assert_equal(parallel(input), plain(input))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_buffers_of_scripted_modules_change_in_place_and_once():
    layer = torch.jit.script(nn.BatchNorm1d(4))  # which `convert_model` would leave
    for net in (nn.Sequential(layer, nn.Linear(4, 4)), layer):
        before = int(layer.num_batches_tracked)
        DataParallelWithCallback(net, ["cpu"] * 3)(torch.randn(6, 4))
        assert layer.num_batches_tracked == before + 1
    assert layer.running_mean.abs().max() > 0


class Looking(nn.Linear):
    def _replicate_for_data_parallel(self):
        self.look()
        return super()._replicate_for_data_parallel()


@pytest.fixture
def parallel():
    was_enabled = gc.isenabled()
    yield DataParallelWithCallback(Looking(2, 2), ["cpu"] * 2)
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_collector_is_disabled_only_while_replicas_are_built(parallel, is_enabled, fails):
    def look():
        seen.append(gc.isenabled())
        if fails:
            raise MemoryError("no replicas")

    seen, parallel.module.look = [], look
    (gc.enable if is_enabled else gc.disable)()
    with pytest.raises(MemoryError) if fails else nullcontext():
        parallel.replicate(parallel.module, parallel.device_ids)
    assert (seen[-1], gc.isenabled()) == (False, is_enabled)


def test_collector_stays_enabled_if_another_thread_enables_it_meanwhile(parallel):
    parallel.module.look = gc.enable  # as the other thread does, whose replicas are built now
    gc.disable()
    parallel.replicate(parallel.module, parallel.device_ids)
    assert gc.isenabled()


DEVICES = ["cpu"] * R


def looking(look: Callable[[Any, Tensor], Any]) -> Net:
    return Net(lambda net, input: (net.bn(input), look(net, input))[0], bn=SynchronizedBatchNorm1d(3))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("replica", range(2))
def test_copy_of_a_layer_that_is_made_in_a_forward_is_refused(copied, replica):
    def copies_its_layer(net, input, number):
        return copied(net.bn)(input) if int(number[0]) == replica else input

    parallel = DataParallelWithCallback(Net(copies_its_layer, bn=SynchronizedBatchNorm1d(3)), ["cpu"] * 2)
    message = r"called Sync\w+, which belongs to no replica|replica 1 on device cpu waits"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        parallel(torch.randn(6, 3), torch.arange(2).repeat_interleave(3))


def test_replicas_end_without_a_garbage_collection():
    replicas: list[Any] = []
    parallel = DataParallelWithCallback(looking(lambda net, input: replicas.append(weakref.ref(net))), DEVICES)
    gc.disable()
    try:
        parallel(torch.randn(2 * R, 3)).backward(torch.randn(2 * R, 3))
        assert [replica() for replica in replicas] == [None] * R
    finally:
        gc.enable()


class Converting(Net):
    def __call__(self, input: Tensor) -> Tensor:
        return nn.Module.__call__(self, input * 2) * 3


@pytest.mark.parametrize("name", WRAPPERS)
def test_root_with_a_call_of_its_own_is_called_by_it(name):
    plain = randomize(Converting(lambda net, input: net.bn(input), bn=nn.BatchNorm1d(3)).double())
    parallel = WRAPPERS[name](convert_model(copy.deepcopy(plain)))
    assert_same_step(plain, parallel, doubles(2 * R, 3))
    with torch.no_grad():
        assert not parallel(doubles(2 * R, 3)).requires_grad


def named(net: Any, input: Tensor) -> Tensor:
    return net.original(net.module(net.replica(input)) * net.modes + net.coordinator) * net.replica_id


def test_model_may_have_attributes_of_any_name():
    linears = {"replica": nn.Linear(3, 3), "module": nn.Linear(3, 3), "modes": nn.Parameter(torch.randn(3))}
    net = Net(named, **linears, original=nn.BatchNorm1d(3), coordinator=nn.Buffer(torch.randn(3)), replica_id=5)
    plain, parallel = twins(net.double(), DEVICES)
    assert_same_step(plain, parallel, doubles(7, 3))
    names = ("replica", "module", "original", "modes", "coordinator", "replica_id", "forward")
    replica = parallel.replicate(parallel.module, parallel.device_ids)[1]
    found = {name: type(getattr(replica, name)) for name in names}
    expected = {name: type(getattr(parallel.module, name)) for name in names}
    assert found == expected | {"modes": Tensor}  # no parameter, as in torch
    assert list(map(type, replica.modules())) == list(map(type, parallel.module.modules()))


def test_replicas_may_be_made_and_run_by_hand():
    net = Net(lambda net, input: net.bn(input) * net.factor, bn=nn.BatchNorm1d(3), factor=1.0)
    plain, parallel = twins(net.double(), DEVICES)
    data = doubles(7, 3)
    replicas = parallel.replicate(parallel.module, parallel.device_ids)
    for i, replica in enumerate(replicas):
        replica.factor = i + 2.0
    outputs = parallel.parallel_apply(replicas[::-1], list(data.chunk(R))[::-1], [{}] * R)[::-1]
    expected = [chunk * (i + 2.0) for i, chunk in enumerate(plain(data).chunk(R))]
    assert_equal(torch.cat(outputs), torch.cat(expected))
    assert parallel.module.factor == 1.0


def test_replicas_of_the_users_are_not_taken_for_those_of_a_forward_pass_around_or_before_them():
    def calls_replicas(net, input):
        twice = parallel.parallel_apply([nn.Softsign(), nn.Softsign()], [(input,)] * 2, [{}] * 2)
        return torch.stack(twice).sum(0)

    parallel, input = DataParallelWithCallback(nn.Identity(), ["cpu"] * 2), torch.randn(4, 3)
    replicas = parallel.replicate(parallel.module, parallel.device_ids)
    parallel.parallel_apply(replicas, [(input,)] * 2, [{}] * 2)
    for outputs in (calls_replicas(None, input), DataParallelWithCallback(Net(calls_replicas), ["cpu"] * 2)(input)):
        assert_equal(outputs, 2 * nn.functional.softsign(input))


CPU_AUTOCAST = functools.partial(torch.autocast, "cpu")
MODES = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16": functools.partial(CPU_AUTOCAST, torch.bfloat16),
    "float16": functools.partial(CPU_AUTOCAST, torch.float16),
    "disabled": functools.partial(CPU_AUTOCAST, enabled=False),
    "without-cache": functools.partial(CPU_AUTOCAST, torch.bfloat16, cache_enabled=False),
}


def modes():
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    enabled = torch.is_autocast_enabled("cpu")
    return *grad, enabled and torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["wrapper", "own-forward"])
def test_replicas_run_in_the_modes_of_the_caller(mode, name):
    seen = []
    parallel = WRAPPERS[name](looking(lambda net, input: seen.append(modes())).eval())
    with MODES[mode]():
        parallel(torch.randn(2 * R, 3))
        assert seen == [modes()] * R
    assert modes()[:2] == (True, False)


@pytest.mark.parametrize("name", WRAPPERS)
def test_end_of_an_iterator_in_a_replica_is_an_error_of_the_caller_and_ends_no_loop_of_it(name):
    def look(net: nn.Module, input: Tensor) -> None:
        if input.max() > 10:
            next(iter([]))

    parallel = WRAPPERS[name](looking(look))
    batches = [torch.randn(2 * R, 3), torch.cat([torch.randn(2 * R - 1, 3), torch.full((1, 3), 11.0)])]
    with pytest.raises(RuntimeError, match=rf"^replica {R - 1} on device cpu raised StopIteration") as caught:
        list(map(parallel, batches))
    assert isinstance(caught.value.__cause__, StopIteration)
    assert parallel(batches[0]).shape == (2 * R, 3)


on_devices = pytest.mark.parametrize("devices", [*device_lists(2, 3), *INTERLEAVED])


class Doubled(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * input


class All(nn.Module):
    """Every way in which a module holds parameters; `look` is what its forward makes of itself."""

    def __init__(self, look: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.look = look
        self.bn, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)
        kind, options = (nn.RNN, {}) if CUDA_COUNT else (nn.LSTM, {"proj_size": 2})  # which simulated GPUs lack
        self.rnn = kind(3, 3, batch_first=True, bidirectional=True)
        self.other = kind(6, 3, bias=False, batch_first=True, **options)
        self.list = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.dict = nn.ParameterDict({"scale": nn.Parameter(torch.randn(3))})
        self.parametrized = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Doubled())
        self.normed = parametrizations.weight_norm(nn.Linear(3, 3))
        self.alias, self.shared = self.linear, nn.Linear(3, 3)
        self.shared.weight, self.shared.bias = self.linear.weight, self.bn.bias
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_parameter("nothing", None)

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        hidden = self.alias(self.bn(input)) * self.list[0] + self.list[1] * self.dict["scale"] + self.frozen
        hidden = self.other(self.rnn(hidden[:, None])[0])[0][:, 0].repeat(1, 2)[:, :3]
        return self.shared(self.normed(self.parametrized(hidden))), self.look(self)


def penalty(net: nn.Module) -> Tensor:
    of_all = sum(parameter.square().sum() for parameter in net.parameters())
    of_part = sum(p.abs().sum() for name, p in net.linear.named_parameters() if name.endswith("bias"))
    return (of_all + of_part + torch.cat([p.flatten() for p in net.rnn.parameters()]).sin().sum()).reshape(1)


def assert_same_penalty(plain: nn.Module, parallel: nn.Module, data: Tensor) -> None:
    (expected, one), (output, several) = plain(data), parallel(data)
    assert_equal(output, expected)
    assert_equal(several, one.expand(len(several)), tolerance=1e-12)
    if torch.is_grad_enabled():
        for loss in (expected.sin().sum() + one.mean(), output.sin().sum() + several.mean()):
            loss.backward()
    assert_same_state(parallel, plain, tolerance=1e-12)


@on_devices
def test_penalty_over_parameters_of_a_replica_has_the_value_and_the_gradients_of_one_device(devices):
    plain, parallel = twins(All(penalty).double(), devices)
    for is_enabled in (True, False, True):
        with torch.set_grad_enabled(is_enabled):
            assert_same_penalty(plain, parallel, doubles(8, 3, devices=devices))


@pytest.mark.smoke
@pytest.mark.parametrize("way", WRAPPERS)
def test_penalty_is_right_in_every_wrapper(way):
    plain = All(penalty).double()
    assert_same_penalty(plain, WRAPPERS[way](convert_model(copy.deepcopy(plain))), doubles(2 * R, 3))


@on_devices
def test_replica_finds_names_state_and_dtype_as_on_one_device(devices):
    def look(net: nn.Module) -> Tensor:
        names = [[name for name, _ in net.named_parameters(remove_duplicate=removes)] for removes in (True, False)]
        states = [list(module.state_dict()) for module in (net, net.rnn)]
        trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        has = len(net.rnn.all_weights[0]), "weight" in vars(net.linear), "nothing" in net._parameters
        seen.append([names, states, trained, has, next(net.parameters()).dtype])
        devices_seen.append({p.device for p in [*net.parameters(), *net.state_dict().values()]})
        return next(net.bn.parameters())[:1]

    seen, devices_seen = list[Any](), list[Any]()
    plain, parallel = twins(All(look).double(), devices)
    data = doubles(8, 3, devices=devices)
    plain(data)
    parallel(data)
    assert seen == seen[:1] * (1 + len(devices))
    assert sorted(map(str, devices_seen[1:])) == sorted(str({device}) for device in as_devices(devices))


@on_devices
def test_parameters_of_replicas_are_theirs(devices):
    _, parallel = twins(All(penalty), devices)
    originals = dict(parallel.module.named_parameters())
    for replica in parallel.replicate(parallel.module, parallel.device_ids):
        own = dict(replica.named_parameters())
        assert list(own) == list(originals)
        assert all((own[name].grad_fn is not None) == p.requires_grad for name, p in originals.items())
        assert replica.alias is replica.linear
        assert own["linear.weight"] is replica.linear.weight is replica.shared.weight
        assert own["bn.bias"] is replica.bn.bias is replica.shared.bias
        assert own["rnn.weight_hh_l0"] is replica.rnn.weight_hh_l0
        assert any(own["rnn.weight_hh_l0"] is weight for weight in replica.rnn._flat_weights)
    assert all(originals[name] is parameter for name, parameter in parallel.module.named_parameters())


def assigned(net: nn.Module, input: Tensor) -> Tensor:
    net.linear.weight = net.linear.weight * 2
    return net.linear(net.bn(input))


def test_tensor_cannot_be_assigned_to_the_name_of_a_parameter(devices):
    for model in twins(Net(assigned, bn=nn.BatchNorm1d(3), linear=nn.Linear(3, 3)).double(), devices):
        with pytest.raises(TypeError, match=r"cannot assign .+ as parameter 'weight'"):
            model(doubles(4, 3, devices=devices))
