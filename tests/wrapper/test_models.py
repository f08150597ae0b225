"""Models as people write them: each equals one device, or ends in an error that names the layer and the remedy."""

import copy
import functools

import pytest
import torch
from conftest import device_lists, slow
from helpers import Net, TwoLayers, as_devices, assert_equal, assert_same_state, assert_same_step, doubles, twins
from scripted import OwnForward, Scripted, batch
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm1d,
    assert_synchronized,
    convert_model,
    execute_replication_callbacks,
    patch_replication_callback,
)


class Steps(nn.Module):
    """Keeps its layers in a list of some kind, beside their registration."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.bn = nn.Linear(4, 4), SynchronizedBatchNorm1d(4)
        self.steps = kind([self.linear, self.bn])

    def forward(self, input):
        for step in self.steps:
            input = step(input)
        return input


ORIGINAL = r"replica [0-9] on device cpu called bn, of the original module instead of its own copy: every replica would"


def wrap_forward(net, factor=1):
    """Set a function on an object that keeps its forward in a closure."""
    forward = net.forward
    net.forward = functools.wraps(forward)(lambda input: forward(input) * factor)


REACH = {  # whether the layers are in a plain list, how else a replica reaches them, and the cause that is named
    "list": (list, lambda net: None, r"Usual causes: \(1\) a plain list"),
    "closure": (nn.ModuleList, wrap_forward, r"Usual causes: .*\(2\) a replaced forward"),
    "compile": (nn.ModuleList, lambda net: net.compile(backend="eager"), r"cause is compile\(\) of Steps: compile f"),
    "compiled layer": (nn.ModuleList, lambda net: net.bn.compile(backend="eager"), r"cause is compile\(\) of Sync"),
}


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler
@pytest.mark.parametrize("how", ["list", "closure", "compile", *slow("compiled layer")])
def test_original_layer_that_a_replica_reaches_is_refused(wrap, how):
    kind, reach, cause = REACH[how]
    net = Steps(kind).double()
    reach(net)
    parallel, data = wrap(net), doubles(6, 4)
    with pytest.raises(RuntimeError, match=f"{ORIGINAL}.*{cause}"):
        parallel(data)
    assert net.bn.num_batches_tracked == 0
    net.eval()  # where it has the same parameters and buffers
    assert_equal(parallel(data), net(data))


def test_forward_that_is_wrapped_on_the_wrapper_equals_one_device(devices):
    plain, parallel = twins(Steps(nn.ModuleList).double(), devices)
    for module in (plain, parallel):
        wrap_forward(module, 2)
    assert_same_step(plain, parallel, doubles(6, 4, devices=devices))


def test_layer_that_is_no_part_of_the_model_is_refused(wrap):
    borrowed, frozen = SynchronizedBatchNorm1d(4), DataParallelWithCallback(SynchronizedBatchNorm1d(4), ["cpu"] * 2)
    frozen.eval()
    uses = [lambda input: borrowed(input), lambda input: execute_replication_callbacks([borrowed])]
    # after another wrapper with a single chunk, which runs in the thread of its caller, and with two
    uses += [lambda input, rows=rows: borrowed(frozen(input[:rows])) for rows in (1, 2)]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"called SynchronizedBatchNorm1d, which belongs to no replica"):
            wrap(Net(lambda net, input, use=use: use(input)))(torch.randn(6, 4))
    borrowed.eval()
    wrap(Net(lambda net, input: borrowed(input)))(torch.randn(6, 4))


def calling(wrapper):
    """Return a module that calls a wrapper which is no part of it."""
    return Net(lambda net, input: net.bn(input + net.held[0](input)), bn=nn.BatchNorm1d(4), held=[wrapper])


def inner_net():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()


INNER = {
    "two devices": lambda net: DataParallelWithCallback(convert_model(net), ["cpu"] * 2),
    "one device": lambda net: DataParallelWithCallback(convert_model(net), ["cpu"]),
    "patched": lambda net: patch_replication_callback(OwnForward(convert_model(net), 2)),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("mode", [torch.enable_grad, *slow(torch.no_grad)])
@pytest.mark.parametrize("has_statistics", [True, False])
def test_wrapper_outside_the_model_whose_layers_use_the_batch_is_refused(wrap, inner, mode, has_statistics):
    net = inner_net().append(nn.BatchNorm1d(4, track_running_stats=has_statistics)).double()
    inner = inner(net)
    net.eval()[-1].train(has_statistics)
    message = r"replica [0-9] .* called \w+, which belongs to no replica: every replica would"
    for rows in (12, 3):  # which make four rows and one in each replica
        with mode(), pytest.raises(RuntimeError, match=message):
            wrap(convert_model(calling(inner).double()))(doubles(rows, 4))


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_wrapper_that_is_no_part_of_the_model_may_run_in_eval_mode(wrap, inner):
    frozen = inner_net()
    frozen(doubles(5, 4))
    plain, parallel = calling(frozen.eval()).double(), calling(inner(copy.deepcopy(frozen)).eval()).double()
    assert_same_step(plain, wrap(convert_model(parallel)), doubles(12, 4))


def test_wrapper_without_synchronized_layers_may_train_in_a_replica(wrap):
    net = nn.Linear(4, 4).double()
    plain, parallel = calling(net), calling(DataParallelWithCallback(copy.deepcopy(net), ["cpu"] * 2))
    assert_same_step(plain.double(), wrap(convert_model(parallel.double())), doubles(12, 4))
    assert_same_state(parallel.held[0], net)


@pytest.mark.timeout(900)
def test_compiled_submodules_are_refused_and_stay_whole(devices):
    plain, parallel = twins(nn.Sequential(TwoLayers(), nn.Flatten(), nn.Linear(16, 2)).double(), devices)
    first = parallel.module[0]
    parallel.module[0] = torch.compile(first, backend="eager")
    before = list(parallel.state_dict())
    message = r"expected modules that can be replicated, but '0' is what torch\.compile returned"
    with pytest.raises(RuntimeError, match=message):
        parallel(doubles(4, 3, 6, 6, devices=devices))
    assert list(parallel.state_dict()) == before
    parallel.module[0] = parallel.module[0]._orig_mod  # as the error says
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6, devices=devices))


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of what the compiler leaves alone
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("number", [1, *slow(2)])
def test_wrappers_may_be_compiled(number, whole):
    torch.compiler.reset()
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    plain, parallel = twins(net, ["cpu"] * number)  # Simulated GPUs cannot be compiled for.
    compiled = torch.compile(parallel, backend="eager", fullgraph=number == 1) if whole else parallel
    if not whole:
        parallel.compile(backend="eager")
    for _ in range(2):
        input = doubles(6, 4)
        assert_equal(compiled(input.clone()), plain(input))
    assert_same_state(parallel, plain)


# On distinct GPUs inputs are cut, and parameters copied, by torch, which then refuses operations in place.
local = [params for params in device_lists(1, 3) if not params.id.startswith("cuda-")]


@pytest.mark.parametrize("devices", [params for params in local if len(params.values[0]) > 1])
def test_inputs_change_in_place_in_replicas_alone_even_if_they_are_leaves_or_the_caller_has_saved_them(devices):
    net = Net(lambda net, input: net.bn(input.mul_(net.scale).relu_()), bn=nn.BatchNorm1d(4))
    net.scale = nn.Parameter(torch.full((4,), 1.5))
    plain, parallel = twins(net.double(), devices)
    data, grad = doubles(7, 4, devices=devices), doubles(7, 4, devices=devices)
    for saved in (torch.sigmoid, lambda leaf: leaf):  # whose gradient needs what it returned; or the leaf itself
        leaves = [data.clone().requires_grad_() for _ in range(2)]
        for model, leaf in ((plain, leaves[0]), (parallel, leaves[1])):
            features = saved(leaf)
            passed = features.clone() if model is plain else features
            (model(passed) * grad + features**2).sum().backward()
        assert_equal(leaves[1].grad, leaves[0].grad)
    assert torch.equal(leaves[1].detach(), data)
    assert leaves[1]._version == 0
    assert_same_state(parallel, plain)


@pytest.mark.parametrize("devices", local)
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


@pytest.mark.parametrize("size", [1, 3])
def test_inputs_of_inference_mode_are_taken(size):
    plain, parallel = twins(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().eval(), ["cpu"] * size)
    with torch.inference_mode():
        input = doubles(6, 4)
        assert_equal(parallel(input), plain(input))
    with torch.no_grad():
        assert_equal(parallel(input), plain(input))


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


RETURNED = [(0, lambda x: x), (1, lambda x: None if x[0, 0] < 0 else x)]  # by replicas in place of the error


@pytest.mark.parametrize(("replica", "instead"), RETURNED, ids=["input", "input-or-None"])
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
    message = rf"expected every ReplicaSyncError to leave .*every replica to call head .*replica {replica} on dev"
    x, numbers = batch()
    x[:2] = -x[:2].abs()
    x[2:] = x[2:].abs()
    with pytest.raises(ReplicaSyncError, match=message):
        parallel(x, numbers)
    model.steps = {}
    parallel(*batch())


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda t: t.__name__)
def test_wrapper_inside_of_a_transform_is_refused_with_the_remedy(transform):
    _, parallel = twins(nn.BatchNorm1d(3), ["cpu"] * 2)
    data = torch.randn(2, 4, 3) if transform is torch.func.vmap else torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="expected replicas outside the transforms") as error:
        transform(lambda x: parallel(x).square().sum())(data)
    assert "use torch.autograd.grad" in str(error.value)
    assert parallel.module.num_batches_tracked == 0
    assert parallel(torch.randn(4, 3)).shape == (4, 3)
