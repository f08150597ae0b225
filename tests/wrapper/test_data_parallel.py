"""The wrapper is a `DataParallel`: buffers, devices, hooks, attributes, errors and copies."""

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CUDA_COUNT, device_lists, needs_two_gpus
from helpers import Named, Net, TwoLayers, are_distinct_gpus, as_devices, assert_equal, assert_same_step, doubles, twins
from scripted import TorchStyle, of_class
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
from sync_batchnorm.wrapper.data_parallel import check_transfers


@pytest.mark.smoke
def test_buffers_of_the_wrapped_module_change_in_place_and_once(devs):
    _, parallel = twins(TwoLayers().double(), devs)
    before = {name: (buffer, buffer.data_ptr()) for name, buffer in parallel.module.named_buffers()}
    parallel(doubles(8, 3, 6, 6, devices=devs))
    for name, buffer in parallel.module.named_buffers():
        assert (buffer, buffer.data_ptr()) == before[name]
    assert parallel.state_dict()["module.bn1.num_batches_tracked"] == 1


def with_weight(*shape):
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
    "patch": (lambda: patch_replication_callback(OF_TWO.module), TypeError, r"got torch\.nn\..*Identity; \(1\) if"),
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
    for module in (parallel, inside, patch_replication_callback(of_class(nn.DataParallel, parallel.module, devices))):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"outside torch.jit.trace.*; trace parallel.module"):
            torch.jit.trace(module, input)
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6, devices=devices))


class Backbone(nn.Linear):
    """Has an attribute of every kind."""

    kind = "class"

    def __init__(self):
        super().__init__(2, 2)
        self.body, self.mean, self.number = nn.ReLU(), nn.Buffer(torch.ones(2)), 3

    @property
    def costly(self):
        raise AssertionError("the property was evaluated")

    def encode(self, input):
        return input


WRAPS = {
    "ours": lambda module: DataParallelWithCallback(module, ["cpu"] * 2),
    "patched": lambda module: patch_replication_callback(of_class(nn.DataParallel, module, ["cpu"] * 2)),
}


@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("name", ["body", "mean", "kind", "costly"])
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


def test_single_chunk_runs_the_module_itself(monkeypatch):
    def refuse(*_):
        raise AssertionError("a thread was started")

    plain, parallel = twins(nn.BatchNorm1d(3).double(), ["cpu"] * 4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert_same_step(plain, parallel, doubles(1, 3, 2))


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


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=str)
def test_errors_name_the_replica_and_show_its_traceback(devices, failing):
    def forward(net, number):
        if int(number) in failing:
            raise KeyError("no such key")

    first, *_ = of_replicas = as_devices(devices)
    with pytest.raises(KeyError, match="no such key") as caught:
        DataParallelWithCallback(Net(forward), devices)(torch.arange(2, device=first))
    (note,) = caught.value.__notes__
    who = f"replica {min(failing)} on device {of_replicas[min(failing)]}"
    cut = "The wrapper cut along dimension 0, as in_dims names no other: args[0] of shape (2,) into 1 + 1."
    assert note.startswith(f"Caught KeyError in {who}.\n{cut}\nTraceback (most recent call last):\n")
    assert 'raise KeyError("no such key")' in note


def test_errors_say_how_tensors_were_cut_that_in_dims_does_not_name():
    x, more, notes = torch.randn(5, 4), [torch.randn(3, 7)] * 6, []
    net = Named(lambda net, image, **others: net.linear(image), linear=nn.Linear(2, 2))
    for in_dims, given in (({"image": 0}, [x] * 6), ({"image": 0, "more": None}, more)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            DataParallelWithCallback(net, ["cpu"] * 2, in_dims=in_dims)(x, more=given, scale=2)
        notes += caught.value.__notes__
    shown = ", ".join([f"more[{i}] of shape (5, 4) into 3 + 2" for i in range(4)])
    assert f"\nThe wrapper cut along dimension 0, as in_dims names no other: {shown}, and 2 more tensors.\n" in notes[0]
    assert "The wrapper cut" not in notes[1]


def test_without_accelerator_and_devices_the_module_runs_directly(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    plain, parallel = TwoLayers(), DataParallelWithCallback(TwoLayers(), [])
    parallel.module.load_state_dict(plain.state_dict())
    assert_equal(parallel(torch.ones(2, 3, 6, 6)), plain(torch.ones(2, 3, 6, 6)))
    assert (parallel.device_ids, parallel.dim) == ([], 0)


@pytest.mark.parametrize("output_device", [None, "second", -1, "cpu", torch.device("cpu")], ids=repr)
def test_outputs_are_gathered_on_the_output_device_in_every_spelling(devices, output_device):
    first, second = as_devices(devices)
    module, data = nn.Linear(3, 2).to(first), torch.randn(4, 3, device=first)
    given = devices[1] if output_device == "second" else output_device
    output = DataParallelWithCallback(module, devices, given)(data)
    assert output.device == {None: first, "second": second}.get(output_device, torch.device("cpu"))
    assert_equal(output.cpu(), module(data).cpu())
    if are_distinct_gpus(devices) and output_device == -1:  # as torch spells it
        assert_equal(patch_replication_callback(nn.DataParallel(module, devices, -1))(data), module(data).cpu())


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_cpu_has_one_name(name):
    plain, parallel = twins(TwoLayers().double(), ["cpu", "cpu"])
    parallel = DataParallelWithCallback(parallel.module, [name, "cpu"])
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6))
    assert DataParallelWithCallback(nn.Identity(), ["cuda"] * 2).device_ids == [torch.device("cuda", 0)] * 2


def losing_copies(source, target):
    """Return a `Tensor.to` whose copies from one device to another leave zeros."""
    right = torch.Tensor.to

    def to(self, *args, **kwargs):
        copied = right(self, *args, **kwargs)
        return copied.zero_() if (self.device.index, copied.device.index) == (source, target) else copied

    return to


@needs_two_gpus
@pytest.mark.parametrize("pair", [(0, 1), (1, 0)], ids=str)
def test_copies_that_lose_data_are_refused_before_the_first_forward(pair, monkeypatch):
    check_transfers.cache_clear()
    parallel = DataParallelWithCallback(convert_model(nn.BatchNorm1d(3)).cuda(), [0, 1])
    before = copy.deepcopy(parallel.state_dict())
    with monkeypatch.context() as faulty:
        faulty.setattr(torch.Tensor, "to", losing_copies(*pair))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"a copy from cuda:{pair[0]} to cuda:{pair[1]} does not arrive"):
                parallel(torch.randn(4, 3, device="cuda"))
    for name, value in parallel.state_dict().items():
        assert torch.equal(value, before[name])
    parallel(torch.randn(4, 3, device="cuda"))


@pytest.mark.skipif(CUDA_COUNT > 0, reason="for machines without a GPU")
@pytest.mark.parametrize("ids", [[0, 0], [0, 1]], ids=str)
def test_patched_wrapper_of_gpus_runs_in_a_test_without_any_if_it_replaces_the_steps_on_devices(ids):
    class OnCpu(TorchStyle):
        """As somebody's test replaces what needs a GPU."""

        forward = nn.DataParallel.forward

        def scatter(self, inputs, kwargs, device_ids):
            chunks = [(chunk,) for chunk in inputs[0].chunk(len(device_ids))]
            return chunks, [kwargs] * len(chunks)

        def replicate(self, module, device_ids):
            return super().replicate(module, ["cpu"] * len(device_ids))

        def gather(self, outputs, output_device):
            return torch.cat(outputs)

    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    parallel = OnCpu(convert_model(copy.deepcopy(plain)), 2)
    parallel.device_ids = ids
    patch_replication_callback(parallel)
    assert_same_step(plain, parallel, doubles(5, 3))
