"""Memory of exchanges that is kept between steps: it is never written while somebody needs it, and it ends in time.

What is given back too early makes wrong numbers, which these tests compare with one GPU. What is used on other streams
makes a race, which simulated GPUs report.
"""

import copy
import functools
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import CUDA_COUNT, device_lists, needs_two_gpus
from helpers import (
    Net,
    TwoLayers,
    are_distinct_gpus,
    assert_equal,
    assert_same_parts,
    assert_same_results,
    assert_same_step,
    doubles,
    in_threads,
    run_parts,
    twins,
)
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, convert_model
from sync_batchnorm.backends.workspaces import Workspace

pytestmark = pytest.mark.cuda

several_gpus = pytest.mark.parametrize(
    "devices", [devices for devices in device_lists(2, 4) if are_distinct_gpus(devices.values[0])]
)


def batches(devices, number=2):
    return [doubles(2 * len(devices), 3, 7, 6, devices=devices) for _ in range(number)]


def pair_of(devices, module=None):
    """Return twins whose wrapper has memory that is kept."""
    plain, parallel = twins((module or TwoLayers()).double(), devices)
    for data in batches(devices):
        assert_same_step(plain, parallel, data)
    return plain, parallel


# Who needs memory, keeps it


def in_order(*order):
    def step(model, *inputs):
        outputs = [model(input) for input in inputs]
        for i in order:
            outputs[i].backward(outputs[i].detach().cos())
        return outputs

    return step


def one_backward_of_two_forwards(model, first, second, unwanted):
    output = model(first)
    model(unwanted)
    with torch.no_grad():
        model(unwanted)
    (output.sin() * model(second).cos()).sum().backward()
    return []


def retained(model, input, other, _):
    output = model(input)
    for _ in range(3):
        output.backward(output.detach().cos(), retain_graph=True)
        model(other).sin().sum().backward()
    return [output]


def penalized(model, input, other, _):
    output = model(input)
    wanted = [input, *getattr(model, "module", model).parameters()]
    first = torch.autograd.grad(output, wanted, output.detach().cos(), create_graph=True)
    model(other).sin().sum().backward()
    return [*first, *torch.autograd.grad(sum(tensor.sin().sum() for tensor in first), [input])]


def in_other_modes(model, input, other, _):
    results = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            results.append(model(input.detach()).clone())
        model(other).sin().sum().backward()
    output = model(input)
    with torch.inference_mode():  # where the memory that a backward pass makes is of no use outside
        output.backward(output.cos(), retain_graph=True)
    model(other).sin().sum().backward()
    return results


PASSES = {"first to last": in_order(0, 1, 2), "last to first": in_order(2, 1, 0), "middle first": in_order(1, 0, 2)}
PASSES |= {"one backward": one_backward_of_two_forwards, "retained": retained}
PASSES |= {"second derivatives": penalized, "modes": in_other_modes}


def assert_same_passes(plain, parallel, devices, step):
    def results(model):
        inputs = [data.clone().requires_grad_() for data in given]
        return [*step(model, *inputs), *(input.grad for input in inputs if input.grad is not None)]

    given = batches(devices, 3)
    assert_same_results(plain, parallel, results)


@pytest.mark.parametrize("step", PASSES.values(), ids=PASSES)
@several_gpus
def test_passes_in_any_order_and_mode_have_the_results_of_one_gpu(devices, step):
    assert_same_passes(*pair_of(devices), devices, step)


@several_gpus
def test_checkpoint_recomputes_after_other_passes(devices):
    net = Net(lambda net, x: checkpoint(net.net, x, use_reentrant=False), net=TwoLayers())
    assert_same_passes(*pair_of(devices, net), devices, PASSES["middle first"])


@several_gpus
def test_replicas_without_samples_come_and_go(devices):
    plain, parallel = pair_of(devices, nn.BatchNorm2d(3))
    for empty in range(len(devices)):
        sizes = [0 if i == empty else 2 for i in range(len(devices))]
        assert_same_parts(plain, parallel, [doubles(size, 3, 4, 5, devices=devices) for size in sizes])
        assert_same_step(plain, parallel, batches(devices)[0])


@several_gpus
def test_batched_gradients_are_those_of_single_ones(devices):
    parallel = pair_of(devices, nn.BatchNorm2d(3))[1]
    parts = [doubles(2, 3, 4, 5, devices=[device]).requires_grad_() for device in devices]
    outputs = run_parts(parallel, parts)
    grads = [torch.stack([torch.randn_like(output) for _ in range(3)]) for output in outputs]
    found = torch.autograd.grad(outputs, parts, grads, is_grads_batched=True, retain_graph=True)
    for i, single in enumerate(zip(*grads, strict=True)):
        for ours, theirs in zip(found, torch.autograd.grad(outputs, parts, single, retain_graph=True), strict=True):
            assert_equal(ours[i], theirs)


# What goes wrong


@several_gpus
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_pass_after_one_that_failed_in_the_middle_is_right(devices, error):
    def fail(net, input):
        if net.fails and input.device.index == 1:
            raise error
        return input

    middle = Net(fail, fails=False)
    plain, parallel = pair_of(devices, nn.Sequential(nn.BatchNorm2d(3), middle, nn.Tanh(), nn.BatchNorm2d(3)))
    for _ in range(3):
        parallel.module[1].fails = True
        with pytest.raises(error):
            parallel(batches(devices)[0])
        parallel.module[1].fails = False
        parallel.module.load_state_dict(plain.state_dict())
        assert_same_step(plain, parallel, batches(devices)[0])


@pytest.mark.parametrize("wrappers", [1, 2])
@several_gpus
def test_passes_in_two_threads_are_right(devices, wrappers):
    net = nn.Sequential(nn.BatchNorm2d(3, affine=False, track_running_stats=False), nn.Tanh())
    pairs = [pair_of(devices, net) for _ in range(wrappers)] * (3 - wrappers)

    def train(i):
        for _ in range(10):
            assert_same_passes(*pairs[i], devices, in_order(1))

    in_threads(functools.partial(train, 0), functools.partial(train, 1))


# What is kept, and for how long


@pytest.fixture
def alive(monkeypatch):
    """Return the workspaces that are alive."""
    made = weakref.WeakSet()
    init = Workspace.__init__

    def noting(self):
        init(self)
        made.add(self)

    monkeypatch.setattr(Workspace, "__init__", noting)
    return made


@several_gpus
def test_thirty_steps_make_no_more_memory_than_three(devices, alive):
    parallel = twins(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).double(), devices)[1]
    numbers = []
    for _ in range(30):
        parallel(batches(devices)[0]).sin().sum().backward()
        numbers.append(len(alive))
    assert numbers[2:] == numbers[2:3] * 28
    # For the statistics of two layers, for the sums of a backward pass, and for the messages of each other replica.
    assert numbers[2] == 3 + (len(devices) - 1)


@pytest.mark.skipif(CUDA_COUNT < 8, reason="needs eight GPUs")
def test_page_has_the_bytes_of_resnet50_on_eight_gpus(alive):
    def on_slices(net, input):
        return sum(layer(input[:, : layer.num_features] * 1).sum(1) for layer in net.layers)

    stages = {64: 3, 128: 4, 256: 6, 512: 3}  # blocks by width
    widths = [64, *(width for n, blocks in stages.items() for width in [n, n, 4 * n] * blocks + [4 * n])]
    layers = nn.ModuleList(map(nn.BatchNorm1d, widths))
    parallel = DataParallelWithCallback(convert_model(Net(on_slices, layers=layers)).cuda(), list(range(8)))
    for _ in range(2):
        parallel(torch.randn(16, 2048, device="cuda", requires_grad=True)).sum().backward()
    storages = [tensor.untyped_storage() for kept in alive for tensor in tree_leaves(vars(kept))]
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    page = Path(__file__).parents[2] / "docs" / "how-it-works.md"
    words = " ".join(page.read_text(encoding="utf-8").split())
    assert f"for ResNet-50 on eight GPUs {size / 1e6:.1f} MB in all" in words


@needs_two_gpus
def test_memory_ends_with_the_wrapper_and_with_the_graphs_that_need_it(alive):
    plain, parallel = pair_of([0, 1])
    other = DataParallelWithCallback(copy.deepcopy(parallel.module), [0, 1])
    for batch in batches([0]):  # after which everything that may be kept is there
        other(batch).sin().sum().backward()
    of_one, data = len(alive) // 2, batches([0])[0]
    ours, theirs = (data.clone().requires_grad_() for _ in range(2))
    output, expected = parallel(ours), plain(theirs)
    del parallel
    gc.collect()
    assert len(alive) == of_one + 2  # those of the graph
    grad = torch.randn_like(expected)
    output.backward(grad)
    expected.backward(grad)
    assert_equal(ours.grad, theirs.grad)
    del output
    gc.collect()
    assert len(alive) == of_one
    del other
    gc.collect()
    assert not alive


@needs_two_gpus
@pytest.mark.parametrize("lasts", [True, False], ids=["wrapper lasts", "wrapper ends first"])
def test_no_python_code_runs_where_memory_is_given_back(lasts):
    """An exception of a signal, such as Ctrl-C, would be lost there."""
    parallel, calls = pair_of([0, 1])[1], []
    output = parallel(batches([0, 1])[0])
    if not lasts:
        del parallel
        gc.collect()
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    del output
    sys.setprofile(None)
    assert calls == ["c_call"]  # of `setprofile` itself


@needs_two_gpus
def test_memory_is_given_back_by_a_graph_that_only_the_garbage_collector_finds(alive):
    parallel = twins(TwoLayers().double(), [0, 1])[1]
    numbers = []
    for _ in range(6):
        cycle = [parallel(batches([0, 1])[0])]
        cycle.append(cycle)
        del cycle
        gc.collect()
        numbers.append(len(alive))
    assert numbers[1:] == numbers[1:2] * 5


@pytest.mark.parametrize("devices", [[0, 0], [0]], ids=str)
def test_nothing_is_kept_for_one_device(devices, alive):
    _pair = pair_of(devices)
    gc.collect()
    assert not alive
