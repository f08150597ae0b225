"""Models as people write them: each equals one device, or ends in an error that names the layer and the remedy."""

import copy
import functools
import types

import pytest
import torch
from conftest import device_lists
from helpers import (
    TwoLayers,
    as_devices,
    assert_equal,
    assert_same_step,
    doubles,
    twins,
)
from scripted import WRAPPERS, Scripted, batch, scripted
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm1d,
    assert_synchronized,
    convert_model,
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


ORIGINAL = r"expected the copy of bn that belongs to replica [0-9] on device cpu, but got the layer of the"


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


def test_layer_that_is_no_part_of_the_model_is_refused(wrap):
    class Borrowing(nn.Module):
        def forward(self, input):
            return borrowed(input)

    borrowed = SynchronizedBatchNorm1d(4)
    with pytest.raises(RuntimeError, match=r"expected a layer that is registered in the wrapped .* but got a Sync"):
        wrap(Borrowing())(torch.randn(6, 4))
    borrowed.eval()
    wrap(Borrowing())(torch.randn(6, 4))


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


def convert_and_keep(net):
    convert_model(net[1])
    return net


# Errors that a forward swallows


@pytest.mark.parametrize("replica", [0, 1])
def test_error_that_a_forward_swallows_reaches_the_caller(wrap, replica):
    class Swallowing(Scripted):
        def forward(self, x, replica):
            try:
                return super().forward(x, replica)
            except RuntimeError:
                return x

    def fails(model, x):
        raise RuntimeError("out of memory")

    model = Swallowing().double()
    model.steps = {(replica, "between"): fails}
    parallel = wrap(model)
    message = rf"expected errors of a meeting to leave .*every replica to call head .*replica {replica} on dev"
    with pytest.raises(ReplicaSyncError, match=message):
        parallel(*batch())
    model.steps = {}
    parallel(*batch())


def test_wrapper_that_skips_a_batch_by_itself_may_do_so():
    class Skipping(DataParallelWithCallback):
        def forward(self, *inputs):
            try:
                return super().forward(*inputs)
            except RuntimeError:
                return None

    def fails(model, x):
        raise RuntimeError("out of memory")

    parallel = Skipping(scripted((1, "between", fails)), ["cpu"] * 3)
    assert parallel(*batch()) is None
