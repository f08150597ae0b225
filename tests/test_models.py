"""Models as people write them: each equals one device, or ends in an error that names the layer and the remedy."""

import copy
import functools
import linecache
import types
from collections import namedtuple

import pytest
import torch
from conftest import device_lists
from helpers import (
    TwoLayers,
    as_devices,
    assert_equal,
    assert_same_state,
    assert_same_step,
    doubles,
    twins,
)
from scripted import WRAPPERS, OwnForward, Scripted, TorchStyle, batch, scripted
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm1d,
    assert_synchronized,
    convert_model,
    local_parallel,
    patch_replication_callback,
)


@pytest.fixture(params=list(WRAPPERS))
def wrap(request):
    """Every way to run replicas."""
    return WRAPPERS[request.param]


# The original of a layer, inside of a replica


class Steps(nn.Module):
    """Keeps its layers in a plain list, beside their registration."""

    def __init__(self, kind=list):
        super().__init__()
        self.linear, self.bn = nn.Linear(4, 4), SynchronizedBatchNorm1d(4)
        self.steps = kind([self.linear, self.bn])

    def forward(self, input):
        for step in self.steps:
            input = step(input)
        return input


ORIGINAL = r"expected the copy of bn that belongs to replica [0-9] on device cpu, but got the one of the"


def test_original_layer_in_a_plain_list_is_refused(wrap):
    with pytest.raises(RuntimeError, match=ORIGINAL):
        wrap(Steps())(torch.randn(6, 4))


def test_original_layer_in_the_closure_of_a_forward_is_refused(wrap):
    net = Steps(nn.ModuleList)
    forward = net.forward
    net.forward = functools.wraps(forward)(lambda input: forward(input))
    with pytest.raises(RuntimeError, match=ORIGINAL):
        wrap(net)(torch.randn(6, 4))


def test_forward_that_is_wrapped_on_the_wrapper_equals_one_device(devs):
    plain, parallel = twins(Steps(nn.ModuleList).double(), devs)
    for module in (plain, parallel):
        forward = module.forward
        module.forward = functools.wraps(forward)(lambda input, forward=forward: forward(input) * 2)
    assert_same_step(plain, parallel, doubles(6, 4, devices=devs))


@pytest.mark.parametrize("inner", [False, True], ids=["model", "submodule"])
def test_forward_bound_to_the_original_runs_on_the_replica(devs, inner):
    def doubled(self, input):
        return type(self).forward(self, input) * 2

    net = nn.Sequential(nn.Linear(4, 4), Steps(nn.ModuleList)).double()
    plain, parallel = twins(net, devs)
    for module in (plain, parallel.module):
        module = module[1] if inner else module
        module.forward = types.MethodType(doubled, module)
    assert_same_step(plain, parallel, doubles(6, 4, devices=devs))


class Borrowed(nn.Module):
    """Holds a method of its layer, taken before the layer is converted."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.norm = self.bn.forward

    def forward(self, input):
        return self.norm(input)


def test_method_of_a_layer_that_a_module_holds_is_that_of_its_copy(devs):
    plain, net = Borrowed().double(), Borrowed().double()
    for module in (plain, net):
        module.to(as_devices(devs)[0])
    assert_same_step(plain, DataParallelWithCallback(convert_model(net), devs), doubles(6, 4, devices=devs))


def test_layer_that_is_no_part_of_the_model_is_refused(wrap):
    class Borrowing(nn.Module):
        def forward(self, input):
            return borrowed(input)

    borrowed = SynchronizedBatchNorm1d(4)
    with pytest.raises(RuntimeError, match=r"expected a layer or wrapper that is registered in the .* but got a Sync"):
        wrap(Borrowing())(torch.randn(6, 4))
    borrowed.eval()
    wrap(Borrowing())(torch.randn(6, 4))


HOLDS = {
    "list": lambda wrapper: [wrapper],
    "partial": lambda wrapper: [functools.partial(wrapper)],
    "closure": lambda wrapper: [lambda input: wrapper(input)],
}


class Calling(nn.Module):
    """Calls a wrapper that is no part of it."""

    def __init__(self, wrapper, hold=HOLDS["list"]):
        super().__init__()
        self.bn, self.held = nn.BatchNorm1d(4), hold(wrapper)

    def forward(self, input):
        return self.bn(input + self.held[0](input))


def inner_net():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()


INNER = {
    "two devices": lambda net: DataParallelWithCallback(convert_model(net), ["cpu"] * 2),
    "one device": lambda net: DataParallelWithCallback(convert_model(net), ["cpu"]),
    "patched": lambda net: patch_replication_callback(OwnForward(convert_model(net), 2)),
}
UNREGISTERED = (
    r"expected a layer or wrapper that is registered in the wrapped module, but got a \w+ that is not \(replica"
)


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_wrapper_that_is_no_part_of_the_model_is_refused(wrap, hold):
    inner = DataParallelWithCallback(convert_model(inner_net()), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=UNREGISTERED):
        wrap(convert_model(Calling(inner, hold).double()))(doubles(12, 4))


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_every_wrapper_that_trains_and_is_no_part_of_the_model_is_refused(inner, mode):
    net = inner_net().append(nn.BatchNorm1d(4)).double()
    inner = inner(net)
    net[1].eval()
    parallel = DataParallelWithCallback(convert_model(Calling(inner).double()), ["cpu"] * 3)
    with mode(), pytest.raises(RuntimeError, match=UNREGISTERED):
        parallel(doubles(12, 4))


def test_wrapper_of_the_model_itself_is_refused_in_a_replica():
    net = convert_model(Calling(None).double())
    net.inner = DataParallelWithCallback(convert_model(inner_net()), ["cpu"] * 2)
    net.held = [net.inner]
    with pytest.raises(RuntimeError, match="expected the copy of inner that belongs to replica"):
        DataParallelWithCallback(net, ["cpu"] * 2)(doubles(12, 4))


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_wrapper_that_is_no_part_of_the_model_may_run_in_eval_mode(wrap, inner):
    frozen = inner_net()
    frozen(doubles(5, 4))
    plain, parallel = Calling(frozen.eval()).double(), Calling(inner(copy.deepcopy(frozen)).eval()).double()
    assert_same_step(plain, wrap(convert_model(parallel)), doubles(12, 4))


def test_wrapper_without_synchronized_layers_may_train_in_a_replica(wrap):
    net = nn.Linear(4, 4).double()
    plain, parallel = Calling(net), Calling(DataParallelWithCallback(copy.deepcopy(net), ["cpu"] * 2))
    assert_same_step(plain.double(), wrap(convert_model(parallel.double())), doubles(12, 4))
    assert_same_state(parallel.held[0], net)


def test_shallow_copy_of_an_original_layer_is_no_part_of_the_model(wrap):
    net = Steps()
    net.steps = [copy.copy(net.bn)]
    with pytest.raises(RuntimeError, match=UNREGISTERED):
        wrap(net)(torch.randn(6, 4))


def test_copy_that_its_class_does_not_connect_warns_and_is_not_refused():
    class Alone(SynchronizedBatchNorm1d):
        def __data_parallel_replicate__(self, ctx, copy_id):
            pass

    with pytest.warns(UserWarning, match="trains in a replica that was never connected to its peers"):
        DataParallelWithCallback(nn.Sequential(Alone(4)), ["cpu"] * 2)(torch.randn(6, 4))


def test_original_layer_in_eval_mode_is_not_refused():
    plain, parallel = twins(Steps().double(), ["cpu"] * 3)
    for module in (plain, parallel):
        module.eval()
    assert_same_step(plain, parallel, doubles(6, 4))


def test_original_layers_run_outside_of_replicas_between_forwards():
    parallel = DataParallelWithCallback(Steps(nn.ModuleList), ["cpu"] * 2)
    parallel(torch.randn(6, 4))
    parallel.module(torch.randn(6, 4))
    assert parallel.module.bn.num_batches_tracked == 2


@pytest.mark.watchdog(120.0)
@pytest.mark.parametrize("place", ["model", "layer"])
def test_modules_that_compile_themselves_run_uncompiled_in_replicas(devs, place):
    plain, parallel = twins(Steps(nn.ModuleList).double(), devs)
    compiled = parallel.module if place == "model" else parallel.module.bn
    compiled.compile(backend="eager")
    name = "the module itself" if place == "model" else r"steps\.1|bn"
    message = rf"expected modules that replicas can run as they are, but got \['({name})'\] compiled by"
    if len(devs) == 1:
        return
    with pytest.warns(UserWarning, match=message):
        assert_same_step(plain, parallel, doubles(6, 4, devices=devs))
    assert compiled._compiled_call_impl is not None
    assert parallel.module.bn.num_batches_tracked == 1


@pytest.mark.watchdog(120.0)
@pytest.mark.parametrize("devices", device_lists(2))
def test_compiled_submodules_are_refused_and_stay_whole(devices):
    plain, parallel = twins(nn.Sequential(TwoLayers(), nn.Flatten(), nn.Linear(16, 2)).double(), devices)
    first = parallel.module[0]
    parallel.module[0] = torch.compile(first, backend="eager")
    before = list(parallel.state_dict())
    message = r"expected modules that can be replicated, but got \['0'\] from torch\.compile"
    with pytest.raises(RuntimeError, match=message):
        parallel(doubles(4, 3, 6, 6, devices=devices))
    assert list(parallel.state_dict()) == before
    parallel.module[0] = parallel.module[0]._orig_mod  # as the error says
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6, devices=devices))


@pytest.mark.watchdog(120.0)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of what the compiler leaves alone
@pytest.mark.once("whole", "devices")
@pytest.mark.parametrize("whole", [True, False], ids=["torch.compile", "compile"])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 2], ids=["1", "2"])  # Simulated GPUs cannot be compiled for.
def test_wrappers_may_be_compiled(devices, whole):
    torch.compiler.reset()
    plain, parallel = twins(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), devices)
    compiled = torch.compile(parallel, backend="eager") if whole else parallel
    if not whole:
        parallel.compile(backend="eager")
    for _ in range(2):
        inputs = [doubles(6, 4, devices=devices)] * 2
        inputs[1] = inputs[0].clone()
        assert_equal(compiled(inputs[1]), plain(inputs[0]))
    assert_same_state(parallel, plain)


# Warnings


def test_warnings_point_to_the_call_of_the_wrapper():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[0].compile(backend="eager")
    parallel = DataParallelWithCallback(net, ["cpu"] * 2)
    with pytest.warns(UserWarning, match=r"^expected .*, but got ") as caught:
        parallel(torch.randn(6, 4))
    assert [warning.filename for warning in caught] == [__file__] * 2


class Around(nn.Module):
    """Has the layer inside of a container of torch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(SynchronizedBatchNorm1d(4)))

    def forward(self, input):
        return self.body(input)


def test_warning_in_a_replica_points_to_the_code_that_calls_the_layer():
    with pytest.warns(UserWarning, match="trains in a replica that was never connected") as caught:
        TorchStyle(Around(), 2)(torch.randn(6, 4))
    (warning,) = caught
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() == "return self.body(input)"


def test_warning_in_a_thread_without_code_of_the_caller_breaks_nothing():
    devices = [torch.device("cpu")] * 2
    replicas = local_parallel.replicate(SynchronizedBatchNorm1d(4), devices, False)
    with pytest.warns(UserWarning, match="trains in a replica that was never connected"):
        local_parallel.parallel_apply(replicas, [torch.randn(6, 4)] * 2, [{}] * 2, devices)


def test_devices_that_a_wrapper_merely_lists_are_not_asked_for_anything():
    plain, module = nn.BatchNorm1d(4).double(), SynchronizedBatchNorm1d(4).double()
    parallel = patch_replication_callback(TorchStyle(module, 2))
    parallel.device_ids = ["cuda:6"] * 2  # its replicas run on the CPU
    assert_same_step(plain, parallel, doubles(6, 4))


# Operations in place


class InPlace(nn.Module):
    """Begins with operations in place, on what it is given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.bn = nn.BatchNorm1d(4)

    def forward(self, input):
        return self.bn(input.mul_(self.scale).relu_())


# On distinct GPUs inputs are cut, and parameters copied, by torch, which then refuses operations in place.
local = pytest.mark.parametrize("devices", [p for p in device_lists(1, 3) if not p.id.startswith("cuda-")])
replicas = pytest.mark.parametrize("devices", [p for p in device_lists(2, 3) if not p.id.startswith("cuda-")])


@local
def test_head_that_begins_in_place_equals_one_device(devices):
    plain, parallel = twins(InPlace().double(), devices)
    backbone = nn.Linear(4, 4).double().to(as_devices(devices)[0])
    input, grad = (doubles(7, 4, devices=devices) for _ in range(2))
    found = []
    for model in (plain, parallel):
        backbone.zero_grad()
        model(backbone(input)).backward(grad)
        found.append((backbone.weight.grad, backbone.bias.grad))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_equal(ours, theirs)
    assert_same_state(parallel, plain)


@replicas
def test_data_that_a_model_changes_in_place_are_those_of_the_replica_alone(devices):
    plain, parallel = twins(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), devices)
    input, grad = doubles(7, 4, devices=devices), doubles(7, 4, devices=devices)
    before = input.clone()
    for model, given in ((plain, before.clone()), (parallel, input)):
        model(given).backward(grad)
    assert_equal(input, before)
    assert input._version == 0
    assert_same_state(parallel, plain)


@replicas
def test_inputs_that_the_caller_has_saved_or_that_are_leaves_may_change_in_place_in_replicas(devices):
    plain, parallel = twins(InPlace().double(), devices)
    data, grad = doubles(7, 4, devices=devices), doubles(7, 4, devices=devices)
    leaves = [data.clone().requires_grad_() for _ in range(2)]
    for model, leaf, own in ((plain, leaves[0], torch.clone), (parallel, leaves[1], lambda tensor: tensor)):
        features = leaf.sigmoid()  # whose gradient needs what it returned
        (model(own(features)) * grad + features**2).sum().backward()
    assert_equal(leaves[1].grad, leaves[0].grad)
    leaves = [data.clone().requires_grad_() for _ in range(2)]
    plain(leaves[0].clone()).backward(grad)
    parallel(leaves[1]).backward(grad)
    assert_equal(leaves[1].grad, leaves[0].grad)
    assert_equal(leaves[1].detach(), data)
    assert_same_state(parallel, plain)


@local
def test_batch_that_the_caller_overwrites_before_the_backward_gives_no_wrong_gradients(devices):
    plain, parallel = twins(TwoLayers().double(), devices)
    batch, grad = doubles(7, 3, 6, 6, devices=devices), doubles(7, 4, 2, 2, devices=devices)
    plain(batch.clone()).backward(grad)
    output = parallel(batch)
    batch.copy_(doubles(7, 3, 6, 6, devices=devices))
    if len(devices) > 1:
        output.backward(grad)
        assert_same_state(parallel, plain)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward(grad)


@local
def test_change_in_place_before_an_exception_spoils_no_earlier_graph(devices):
    class Failing(nn.Module):
        def forward(self, input):
            input.mul_(2)
            raise LookupError("the cause")

    features = doubles(6, 4, devices=devices).requires_grad_().sigmoid()
    squares = features**2
    expected = 2 * features.detach()
    with pytest.raises(LookupError, match="the cause"):
        DataParallelWithCallback(Failing(), devices)(features)
    if len(devices) > 1:
        assert_equal(torch.autograd.grad(squares, features, torch.ones_like(squares))[0], expected)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()


class Twice(nn.Module):
    def forward(self, one, other):
        return one.mul_(2.0) * other


def test_one_tensor_as_two_arguments_stays_one():
    leaves = [torch.ones(4, 3, requires_grad=True) for _ in range(2)]
    for model, leaf in zip((Twice(), DataParallelWithCallback(Twice(), ["cpu"] * 2)), leaves, strict=True):
        input = leaf * 1
        output = model(input, input)
        assert_equal(output, torch.full((4, 3), 4.0))
        output.backward(torch.ones(4, 3))
    assert_equal(leaves[1].grad, leaves[0].grad)


@pytest.mark.parametrize("size", [1, 3])
def test_inputs_of_inference_mode_are_taken(size):
    plain, parallel = twins(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().eval(), ["cpu"] * size)
    with torch.inference_mode():
        input = doubles(6, 4)
        assert_equal(parallel(input), plain(input))
    with torch.no_grad():
        assert_equal(parallel(input), plain(input))


def clamp(model, input):
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)


def double_for_autograd(model, input):
    model.weight.mul_(2)


def double_in_the_first_replica(model, input):
    if input[0, 0] == 1:
        with torch.no_grad():
            model.weight.mul_(2)


@replicas
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [clamp, double_for_autograd, double_in_the_first_replica])
def test_parameters_that_a_forward_changes_are_refused(change, frozen, devices):
    class Changing(nn.Linear):
        def forward(self, input):
            change(self, input)
            return super().forward(input)

    net = Changing(4, 4).requires_grad_(not frozen).to(as_devices(devices)[0])
    input = torch.zeros(6, 4, device=as_devices(devices)[0])
    input[0, 0] = 1
    with pytest.raises(RuntimeError, match=r"expected parameters that stay as they are in a forward.*\['weight'\]"):
        DataParallelWithCallback(net, devices)(input)


def test_parameters_that_the_forward_of_a_single_chunk_changes_are_those_of_one_device():
    class Changing(nn.Linear):
        def forward(self, input):
            clamp(self, input)
            return super().forward(input)

    plain, parallel = twins(Changing(4, 4).double(), ["cpu"] * 2)
    assert_same_step(plain, parallel, doubles(1, 4))
    assert parallel.module.weight.abs().max() == 0.1


# Modules of other kinds


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(3, 4).double())], ids=["script", "trace"]
)
def test_scripted_submodules_equal_one_device(devs, make):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = make(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))).double())
            self.bn = nn.BatchNorm1d(4).double()

        def forward(self, input):
            return self.bn(self.first(input))

    plain, net = (Mixed().to(as_devices(devs)[0]) for _ in range(2))  # A copy has parameters that are no leaves.
    net.load_state_dict(plain.state_dict())
    parallel = DataParallelWithCallback(convert_model(net), devs)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 4, devices=devs))
    with torch.no_grad():
        input = doubles(7, 4, devices=devs)
        assert_equal(parallel(input), plain(input))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_buffers_of_scripted_submodules_change_in_place_and_once():
    net = nn.Sequential(torch.jit.script(nn.BatchNorm1d(4)), nn.Linear(4, 4))  # which `convert_model` would leave
    parallel = DataParallelWithCallback(net, ["cpu"] * 3)
    parallel(torch.randn(6, 4))
    assert parallel.module[0].num_batches_tracked == 1
    assert parallel.module[0].running_mean.abs().max() > 0


# Wrappers in wrappers


@pytest.mark.parametrize("devices", device_lists(1, 2))
def test_wrapper_inside_a_wrapper_synchronizes_over_all_replicas(devices):
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).double()
    plain.to(as_devices(devices)[0])
    net = convert_model(copy.deepcopy(plain))
    backbone = net[1]
    net[1] = DataParallelWithCallback(backbone, devices)
    outer = DataParallelWithCallback(net, devices)
    assert_synchronized(outer)
    input = doubles(8, 3, devices=devices)
    assert_equal(outer(input), plain(input))
    assert backbone[1].num_batches_tracked == 1


def test_plain_wrapper_inside_a_wrapper_is_refused_before_anything_runs():
    inner = nn.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    inner.__dict__.update(dim=0, device_ids=[0, 1], output_device=0, src_device_obj=torch.device("cpu"))
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3), inner)
    outer = DataParallelWithCallback(convert_and_keep(net), ["cpu"] * 2)
    message = r"expected one wrapper .*but got '2' \(DataParallel\) inside of a DataParallelWithCallback"
    with pytest.raises(RuntimeError, match=message):
        outer(torch.randn(4, 3))
    assert net[1].num_batches_tracked == 0


def test_plain_wrapper_without_devices_inside_a_wrapper_runs_its_module():
    inner = nn.DataParallel(nn.Linear(3, 3).double())
    inner.__dict__.update(dim=0, device_ids=[], output_device=None)  # as where there is no GPU
    data = doubles(4, 3)
    assert_equal(DataParallelWithCallback(inner, ["cpu"] * 2)(data), inner.module(data))


def convert_and_keep(net):
    convert_model(net[1])
    return net


# Errors that a forward swallows


@pytest.mark.parametrize("instead", [lambda x: x, lambda x: None if x[0, 0] < 0 else x], ids=["input", "input-or-None"])
@pytest.mark.parametrize("replica", [0, 1])
def test_error_that_a_forward_swallows_reaches_the_caller(wrap, replica, instead):
    class Swallowing(Scripted):
        def forward(self, x, replica):
            try:
                return super().forward(x, replica)
            except RuntimeError:
                return instead(x)

    def fails(model, x):
        raise RuntimeError("out of memory")

    model = Swallowing().double()
    model.steps = {(replica, "between"): fails}
    parallel = wrap(model)
    message = rf"expected errors of an exchange to leave .*every replica to call head .*replica {replica} on dev"
    x, numbers = batch()
    x[:2] = -x[:2].abs()
    x[2:] = x[2:].abs()
    with pytest.raises(ReplicaSyncError, match=message):
        parallel(x, numbers)
    model.steps = {}
    parallel(*batch())


def test_error_that_is_swallowed_behind_the_call_of_another_wrapper_reaches_the_caller():
    class Swallowing(Scripted):
        def forward(self, x, replica):
            try:
                return super().forward(x, replica)
            except RuntimeError:
                return x

    class CallsAnother(OwnForward):
        def forward(self, *inputs):
            another(*inputs)
            return super().forward(*inputs)

    def fails(model, x):
        raise RuntimeError("out of memory")

    another = WRAPPERS["wrapper"](scripted())
    model = Swallowing().double()
    model.steps = {(1, "between"): fails}
    with pytest.raises(ReplicaSyncError, match="expected errors of an exchange to leave the forward"):
        patch_replication_callback(CallsAnother(model, 3))(*batch())


@pytest.mark.parametrize("swallows", [False, True], ids=["failing", "swallowing"])
def test_wrapper_that_skips_a_batch_by_itself_may_do_so(swallows):
    class Swallowing(Scripted):
        def forward(self, x, replica):
            try:
                return super().forward(x, replica)
            except RuntimeError:
                if not swallows:
                    raise
                return x

    class Skipping(DataParallelWithCallback):
        def forward(self, *inputs):
            try:
                return super().forward(*inputs)
            except RuntimeError:
                return None

    def fails(model, x):
        raise RuntimeError("out of memory")

    model = Swallowing().double()
    model.steps = {(1, "between"): fails}
    parallel = Skipping(model, ["cpu"] * 3)
    assert parallel(*batch()) is None


# What replicas return

Pair = namedtuple("Pair", ["left", "right"])
STRUCTURES = {
    "none": (lambda x: x, lambda x: None),
    "none-first": (lambda x: None, lambda x: x),
    "tuple": (lambda x: x, lambda x: (x, x)),
    "none-inside": (lambda x: (x, None), lambda x: (x, x)),
    "keys": (lambda x: {"a": x}, lambda x: {"b": x}),
    "more-keys": (lambda x: {"a": x}, lambda x: {"a": x, "b": x}),
    "lengths": (lambda x: [x, x], lambda x: [x]),
    "fields": (lambda x: Pair(x, x), lambda x: {"left": x, "right": x}),
    "scalar": (lambda x: x, lambda x: x.sum()),
}


class Returning(nn.Module):
    """Returns one thing in the first replica, another in those that follow."""

    def __init__(self, first, others):
        super().__init__()
        self.first, self.others = first, others

    def forward(self, input):
        return (self.first if input[0, 0] == 0 else self.others)(input)


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_replicas_that_return_different_structures_are_named(devices, kind):
    parallel = DataParallelWithCallback(Returning(*STRUCTURES[kind]), devices)
    message = r"expected replicas to return one structure, but got .+ from replica 0 and .+ from replica 1; "
    with pytest.raises(ValueError, match=message):
        parallel(torch.arange(12.0, device=as_devices(devices)[0]).view(6, 2))


@pytest.mark.parametrize("output", ["text", {1.0}, 1.5, True, object()], ids=["str", "set", "float", "bool", "object"])
@pytest.mark.parametrize("devices", device_lists(2))
def test_replicas_that_return_no_tensors_are_told(devices, output):
    parallel = DataParallelWithCallback(Returning(*[lambda x: (x, output)] * 2), devices)
    with pytest.raises(TypeError, match=f"lists, dicts or None, but got {type(output).__name__}; return tensors"):
        parallel(torch.zeros(4, 2, device=as_devices(devices)[0]))


@pytest.mark.parametrize("devices", device_lists(2))
def test_sequences_of_two_kinds_are_put_together_as_torch_does(devices):
    parallel = DataParallelWithCallback(Returning(lambda x: (x,), lambda x: [x]), devices)
    data = torch.arange(8.0, device=as_devices(devices)[0]).view(4, 2)
    assert_equal(parallel(data)[0], data)


# What the wrapper is given


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, images, labels):
        return self.bn(images).sum((0, 1)).view(1) + labels.sum(0, keepdim=True)


@pytest.mark.parametrize("sizes", [(8, 16), (8, 7), (5, 3)], ids=str)
@pytest.mark.parametrize("devices", device_lists(2, 4))
def test_tensors_that_torch_cuts_into_equally_many_chunks_are_taken(devices, sizes):
    plain, parallel = twins(Summing().double(), devices)
    inputs = doubles(sizes[0], 3, devices=devices), doubles(sizes[1], devices=devices)
    assert_equal(parallel(*inputs).sum(), plain(*inputs).sum())


@pytest.mark.parametrize("sizes", [(8, 3), (3, 8), (6, 8)], ids=str)
@pytest.mark.parametrize("devices", device_lists(4))
def test_tensors_that_make_different_numbers_of_chunks_are_refused(devices, sizes):
    _, parallel = twins(Summing().double(), devices)
    message = r"expected tensors that make equally many chunks along dimension 0, but got .* which make \[\d, \d\] of 4"
    with pytest.raises(ValueError, match=message):
        parallel(doubles(sizes[0], 3, devices=devices), doubles(sizes[1], devices=devices))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda t: t.__name__)
def test_wrapper_inside_of_a_transform_is_refused_with_the_remedy(transform):
    _, parallel = twins(nn.BatchNorm1d(3), ["cpu"] * 2)
    data = torch.randn(2, 4, 3) if transform is torch.func.vmap else torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="expected replicas outside of the transforms") as error:
        transform(lambda x: parallel(x).square().sum())(data)
    assert "use torch.autograd.grad" in str(error.value)
    assert parallel.module.num_batches_tracked == 0
    assert parallel(torch.randn(4, 3)).shape == (4, 3)
