"""The wrapper is a `DataParallel`: its buffers, chunks, hooks and state."""

import copy
import pickle
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import device_lists
from helpers import Net, TwoLayers, assert_equal, assert_same_step, doubles, twins
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sync_batchnorm import (
    DataParallelWithCallback,
    SyncMaster,
    assert_synchronized,
    convert_model,
    patch_replication_callback,
    revert_model,
    sync_moments,
)
from sync_batchnorm.wrapper.data_parallel import AnyDeviceDataParallel


@pytest.mark.smoke
def test_buffers_of_the_wrapped_module_change_in_place_and_once(devs):
    _, parallel = twins(TwoLayers().double(), devs)
    before = {name: (buffer, buffer.data_ptr()) for name, buffer in parallel.module.named_buffers()}
    parallel(doubles(8, 3, 6, 6, devices=devs))
    for name, buffer in parallel.module.named_buffers():
        assert (buffer, buffer.data_ptr()) == before[name]
    assert parallel.state_dict()["module.bn1.num_batches_tracked"] == 1


def with_weight(*shape):
    """Call a layer in replicas whose weight has a shape of its own."""
    layer = convert_model(nn.BatchNorm2d(4))
    layer.weight = nn.Parameter(torch.ones(shape))
    return DataParallelWithCallback(layer, ["cpu"] * 2)(torch.zeros(4, 4, 5, 5))


OF_TWO = DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)
ON_META = DataParallelWithCallback(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)
OF_CHANNELS = DataParallelWithCallback(convert_model(nn.BatchNorm2d(4)), ["cpu"] * 2, dim=1)
MIXED = ["cpu", "cuda:0"]
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "device": (lambda: DataParallelWithCallback(nn.Identity(), "cpu"), TypeError, "must be a list, got 'cpu'; pass"),
    "number": (lambda: DataParallelWithCallback(nn.Identity(), 0), TypeError, "device_ids must be a list, got 0; pass"),
    "name": (lambda: DataParallelWithCallback(nn.Identity(), ["nowhere"]), RuntimeError, "Expected one of cpu"),
    "kinds": (lambda: DataParallelWithCallback(nn.Identity(), MIXED), ValueError, re.escape(f"not both, got {MIXED}")),
    "other device": (lambda: ON_META(torch.zeros(4, 2)), RuntimeError, "have its parameters and buffers on device cpu"),
    "channels": (lambda: OF_CHANNELS(torch.zeros(4, 4, 5, 5)), RuntimeError, "should contain 2 elements not 4"),
    "weight": (lambda: with_weight(4, 2), RuntimeError, "weight should contain 4 elements not 8"),
    "scalar weight": (lambda: with_weight(), RuntimeError, "weight should contain 4 elements not 1"),
    "scalar": (lambda: OF_TWO(torch.tensor(1.0)), TypeError, "got arguments of whole Tensor only, of which"),
    "module": (lambda: DataParallelWithCallback([nn.Identity()], ["cpu"]), TypeError, "torch.nn.Module, but got list"),
    "patch": (
        lambda: patch_replication_callback(OF_TWO.module),
        TypeError,
        r"nn.DataParallel, got torch\.nn\.modules\.linear\.Identity; \(1\) if that is a wrapper, derive its class from",
    ),
    "convert": (lambda: convert_model([nn.Identity()]), TypeError, "a torch.nn.Module, but got list; pass the model"),
    "revert": (lambda: revert_model(None), TypeError, "a torch.nn.Module, but got NoneType; pass the model itself"),
    "check": (lambda: assert_synchronized([nn.Identity()]), TypeError, "expected a torch.nn.Module, but got list"),
    "none": (lambda: assert_synchronized(OF_TWO, replicas=0), ValueError, "replicas of at least 1, but got 0"),
    "bool": (lambda: assert_synchronized(OF_TWO, replicas=True), TypeError, "as a number of replicas, but got True"),
    "classes": (lambda: convert_model(OF_TWO, classes=[1]), TypeError, r"classes as a dict .*, but got \[1\]; pass"),
    "callback": (lambda: SyncMaster(3), TypeError, "expected master_callback as a function, but got 3"),
    "vector": (lambda: sync_moments(torch.randn(5), None), ValueError, r"input \(N, C, \+\), but got 1 dimensions"),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_cannot_be_right_are_refused_in_words(what):
    call, error, text = WRONG[what]
    with pytest.raises(error, match=text):
        call()


def test_fake_tensors_are_refused_and_leave_nothing_behind():
    plain, parallel = twins(TwoLayers().double(), ["cpu"] * 2)
    text = "outside torch.export and FakeTensorMode, which their threads do not know, but got a call of DataParallelW"
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=text):
        parallel(torch.randn(4, 3, 6, 6))
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("rows", [1, 4])
def test_tracing_is_refused_before_anything_runs(devices, rows):
    plain, parallel = twins(TwoLayers().double(), devices)
    input = doubles(rows, 3, 6, 6, devices=devices)
    inside = Net(lambda net, input: net.parallel(input), parallel=parallel)
    for module in (parallel, inside, patch_replication_callback(Wrapper(parallel.module, devices))):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"outside torch.jit.trace.*; trace parallel.module"):
            torch.jit.trace(module, input)
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6, devices=devices))


class Wrapper(AnyDeviceDataParallel):
    """A subclass that is patched."""


class Backbone(nn.Module):
    """Has an attribute of every kind."""

    kind = "class"

    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.number = 3

    @property
    def costly(self):
        raise AssertionError("the property was evaluated")

    def encode(self, input):
        return input

    def forward(self, input):
        return self.body(input) * self.scale


WRAPS = {
    "ours": lambda module: DataParallelWithCallback(module, ["cpu"] * 2),
    "patched": lambda module: patch_replication_callback(Wrapper(module, ["cpu"] * 2)),
}


@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("name", ["body", "scale", "mean", "number", "kind", "costly", "encode"])
def test_attribute_of_the_module_is_hinted_at(way, name):
    parallel = WRAPS[way](Backbone())
    message = f"object has no attribute '{name}'; the module has it: parallel.module.{name}$"
    with pytest.raises(AttributeError, match=message):
        getattr(parallel, name)
    assert not hasattr(parallel, name)


def test_attribute_that_nobody_has_gets_no_hint():
    parallel = DataParallelWithCallback(Backbone(), ["cpu"] * 2)
    with pytest.raises(AttributeError, match=r"'DataParallelWithCallback' object has no attribute 'nothing'$"):
        parallel.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'weight'$"):
        DataParallelWithCallback.__new__(DataParallelWithCallback).weight  # noqa: B018
    with pytest.raises(AttributeError, match=r"'fc'; the module has it: parallel\.module\.fc$"):
        DataParallelWithCallback(scripted(), ["cpu"] * 2).fc  # noqa: B018


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a future without TorchScript
        return torch.jit.script(nn.Sequential(OrderedDict(fc=nn.Linear(2, 2))))


@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda parallel: pickle.loads(pickle.dumps(parallel))])
def test_copies_of_a_wrapper_run(way, copied):
    parallel, input = WRAPS[way](Backbone()), torch.randn(4, 2)
    other = copied(parallel)
    assert type(other) is type(parallel)
    assert_equal(other(input), parallel(input))
    with pytest.raises(AttributeError, match="the module has it"):
        other.number  # noqa: B018


def test_single_chunk_runs_the_module_itself(monkeypatch):
    def refuse(*_):
        raise AssertionError("a thread was started")

    plain, parallel = twins(nn.BatchNorm1d(3).double(), ["cpu"] * 4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert_same_step(plain, parallel, doubles(1, 3, 2))


def test_hooks_run_once_a_replica_with_its_chunk(devices):
    _, parallel = twins(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), devices)
    seen = []
    layer = parallel.module[1]
    layer.register_forward_pre_hook(lambda _, args: seen.append(("before", len(args[0]))))
    layer.register_forward_hook(lambda _, args, output: seen.append(("after", len(output))))
    layer.register_full_backward_hook(lambda _, grad_input, grad: seen.append(("gradient", len(grad[0]))))
    parallel.register_forward_hook(lambda _, args, output: seen.append(("wrapper", len(output))))
    output = parallel(doubles(5, 3, devices=devices))
    output.backward(torch.randn_like(output))
    chunks = [(name, rows) for name in ("after", "before", "gradient") for rows in (2, 3)]
    assert sorted(seen) == [*chunks, ("wrapper", 5)]


@pytest.mark.parametrize("devices", device_lists(4))
def test_one_module_serves_several_wrappers_in_turn(devices):
    plain, parallel = twins(TwoLayers().double(), devices)
    others = [DataParallelWithCallback(parallel.module, devices[:number]) for number in (2, 1)]
    for wrapper in (parallel, *others, parallel, *others):
        assert_same_step(plain, wrapper, doubles(5, 3, 6, 6, devices=devices))


def named(net, *, input, inputs, kwargs, module, replicas, device_ids):
    return net.bn(input) + inputs + kwargs + module + replicas + device_ids


def test_keyword_arguments_may_have_any_names():
    plain, parallel = twins(Net(named, bn=nn.BatchNorm1d(3)).double(), ["cpu"] * 2)
    names = ("input", "inputs", "kwargs", "module", "replicas", "device_ids")
    given = {name: doubles(5, 3) for name in names}
    assert_equal(parallel(**given), plain(**given))
