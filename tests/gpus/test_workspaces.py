"""Memory of exchanges that is kept between steps: it is never written while somebody needs it, and it ends in time.

What is given back too early makes wrong numbers, which these tests compare with one GPU. What is used on other streams
makes a race, which simulated GPUs report. Both mistakes are made on purpose at the end: these tests can fail.
"""

import functools
import gc
import itertools
import sys
import weakref
from pathlib import Path

import pytest
import simulated_gpus
import torch
from conftest import CUDA_COUNT, device_lists, needs_two_gpus
from helpers import (
    Net,
    TwoLayers,
    are_distinct_gpus,
    as_devices,
    assert_equal,
    assert_same_results,
    assert_same_state,
    assert_same_step,
    doubles,
    in_threads,
    run_parts,
    twins,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, convert_model
from sync_batchnorm.backends import workspaces
from sync_batchnorm.backends.workspaces import Lease, Workspace, WorkspacePool, pools_of

pytestmark = pytest.mark.cuda

several_gpus = pytest.mark.parametrize(
    "devices", [devices for devices in device_lists(2, 4) if are_distinct_gpus(devices.values[0])]
)


def batches(devices, number=2):
    return [doubles(2 * len(devices), 3, 7, 6, devices=devices) for _ in range(number)]


def in_kept_memory(parallel, devices):
    """Run two steps, so that everything that may be kept is there."""
    for data in batches(devices):
        parallel(data).sin().sum().backward()


def pair_of(devices, module=None):
    """Return twins whose wrapper has memory that is kept."""
    plain, parallel = twins((module or TwoLayers()).double(), devices)
    for data in batches(devices):
        assert_same_step(plain, parallel, data)
    return plain, parallel


def leaves(data):
    return [data.clone().requires_grad_() for _ in range(2)]


def assert_same_grads(plain, parallel, ours, theirs):
    assert_equal(ours.grad, theirs.grad, "input gradient")
    assert_same_state(parallel, plain)


# Who needs memory, keeps it


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
@several_gpus
def test_backward_passes_of_several_forward_passes_may_come_in_any_order(devices, order):
    plain, parallel = pair_of(devices)
    steps = []
    for data in batches(devices, 3):
        ours, theirs = leaves(data)
        steps.append((ours, parallel(ours), theirs, plain(theirs)))
    for i in order:
        ours, output, theirs, expected = steps[i]
        grad = torch.randn_like(expected)
        output.backward(grad)
        expected.backward(grad)
        assert_same_grads(plain, parallel, ours, theirs)


@several_gpus
def test_one_backward_pass_of_two_forward_passes_and_one_that_nobody_wants(devices):
    plain, parallel = pair_of(devices)
    first, second, third = batches(devices, 3)
    (a, b), (c, d) = leaves(first), leaves(second)
    for net, x, y in ((plain, b, d), (parallel, a, c)):
        one = net(x)
        net(third)
        with torch.no_grad():
            net(third)
        (one.sin() * net(y).cos()).sum().backward()
    assert_same_grads(plain, parallel, a, b)
    assert_same_grads(plain, parallel, c, d)


@several_gpus
def test_graph_that_is_retained_has_the_same_gradients_again_after_other_passes(devices):
    plain, parallel = pair_of(devices)
    ours, theirs = leaves(batches(devices)[0])
    output, expected = parallel(ours), plain(theirs)
    grad = torch.randn_like(expected)
    for _ in range(3):
        output.backward(grad, retain_graph=True)
        expected.backward(grad, retain_graph=True)
        assert_same_step(plain, parallel, batches(devices)[0])
    assert_equal(ours.grad, theirs.grad)


@several_gpus
def test_second_derivatives_may_be_taken_after_other_passes(devices):
    plain, parallel = pair_of(devices)
    data, grad = batches(devices)

    def penalized(model):
        input = data.clone().requires_grad_()
        parameters = list(getattr(model, "module", model).parameters())
        output = model(input)
        first = torch.autograd.grad(output, [input, *parameters], torch.ones_like(output).cos(), create_graph=True)
        model(grad)[:, 0].sin().sum().backward()
        return [*first, *torch.autograd.grad(sum(tensor.sin().sum() for tensor in first), [input])]

    assert_same_results(plain, parallel, penalized)


@several_gpus
def test_checkpoint_recomputes_after_other_passes(devices):
    net = Net(lambda net, x: checkpoint(net.net, x, use_reentrant=False) if net.again else net.net(x), net=TwoLayers())
    net.again = True
    plain, parallel = twins(net.double(), devices)
    in_kept_memory(parallel, devices)
    in_kept_memory(plain, devices)
    plain.load_state_dict(parallel.module.state_dict())
    ours, theirs = leaves(batches(devices)[0])
    output, expected = parallel(ours), plain(theirs)
    for data in batches(devices):
        parallel(data).sum().backward()
        plain(data).sum().backward()
    plain.zero_grad()
    parallel.zero_grad()
    grad = torch.randn_like(expected)
    output.backward(grad)
    expected.backward(grad)
    assert_same_grads(plain, parallel, ours, theirs)
    assert_same_state(parallel, plain)


@several_gpus
def test_replicas_without_samples_come_and_go(devices):
    plain, parallel = pair_of(devices, nn.BatchNorm2d(3))
    for empty in range(len(devices)):
        sizes = [0 if i == empty else 2 for i in range(len(devices))]
        parts = [doubles(size, 3, 4, 5, devices=[device]) for size, device in zip(sizes, devices, strict=True)]
        found = torch.cat([output.to(as_devices(devices)[0]) for output in run_parts(parallel, parts)])
        assert_equal(found, plain(torch.cat([part.to(as_devices(devices)[0]) for part in parts])))
        assert_same_state(parallel, plain)
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


@several_gpus
def test_modes_of_passes_may_change(devices):
    plain, parallel = twins(TwoLayers().double(), devices)
    data, other = batches(devices)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert_equal(parallel(data).clone(), plain(data).clone())
        assert_same_step(plain, parallel, other)
    ours, theirs = leaves(data)
    output, expected = parallel(ours), plain(theirs)
    with torch.inference_mode():  # where the memory that a backward pass makes is of no use outside
        torch.autograd.backward(output, expected.cos(), retain_graph=True)
        torch.autograd.backward(expected, expected.cos(), retain_graph=True)
    assert_same_step(plain, parallel, other)


# What goes wrong


def between(net, input):
    """Do something between two layers."""
    middle = net.first(input)
    net.do(input)
    return net.second(torch.tanh(middle))


@several_gpus
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_pass_after_one_that_failed_in_the_middle_is_right(devices, error):
    net = Net(between, first=nn.BatchNorm2d(3), second=nn.BatchNorm2d(3), do=lambda input: None)
    plain, parallel = pair_of(devices, net)
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}

    def fail(input):
        if input.device.index == 1:
            raise error

    for _ in range(3):
        parallel.module.do = fail
        with pytest.raises(error):
            parallel(batches(devices)[0])
        parallel.module.do = lambda input: None
        parallel.module.load_state_dict(state)
        plain.load_state_dict(state)
        assert_same_step(plain, parallel, batches(devices)[0])


def stateless(net, input):
    return torch.tanh(net.bn(input))


@pytest.mark.parametrize("wrappers", [1, 2])
@several_gpus
def test_passes_in_two_threads_are_right(devices, wrappers):
    net = Net(stateless, bn=nn.BatchNorm2d(3, affine=False, track_running_stats=False))
    pairs = [pair_of(devices, net) for _ in range(wrappers)] * (3 - wrappers)

    def train(i):
        plain, parallel = pairs[i]
        for _ in range(20):
            ours, theirs = leaves(data[i])
            parallel(ours).sin().sum().backward()
            plain(theirs).sin().sum().backward()
            assert_equal(ours.grad, theirs.grad)

    data = batches(devices)
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
def test_three_hundred_steps_make_no_more_memory_than_three(devices, alive):
    parallel = twins(TwoLayers().double(), devices)[1]
    numbers = []
    for i in range(300):
        parallel(batches(devices)[0]).sin().sum().backward()
        if i in (2, 99, 299):
            numbers.append(len(alive))
    assert numbers == [numbers[0]] * 3
    assert 0 < numbers[0] <= 2 * (1 + len(devices))  # for two layers: both passes; and what other replicas send


def widths_of_resnet50():
    stages = {64: 3, 128: 4, 256: 6, 512: 3}  # blocks by width
    return [64, *itertools.chain(*([n, n, 4 * n] * blocks + [4 * n] for n, blocks in stages.items()))]


class Widths(nn.Module):
    """Layers of some widths, each on a part of the input."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(map(nn.BatchNorm1d, widths))

    def forward(self, input):
        return sum(layer(input[:, : layer.num_features] * 1).sum(1) for layer in self.layers)


def bytes_on_first_and_in_all(parallel):
    tensors = []
    for workspace in itertools.chain(*[pool.workspaces.values() for pool in workspaces._pools[parallel].values()]):
        tensors += [value for value in vars(workspace).values() if isinstance(value, torch.Tensor)]
        tensors += getattr(workspace, "_copies", [])
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values()
    sizes = [(storage.device.index, storage.nbytes()) for storage in storages]
    return sum(size for index, size in sizes if index == 0), sum(size for _, size in sizes)


@pytest.mark.skipif(CUDA_COUNT < 8, reason="needs eight GPUs")
def test_page_has_the_bytes_of_resnet50_on_eight_gpus():
    parallel = DataParallelWithCallback(convert_model(Widths(widths_of_resnet50())).cuda(), list(range(8)))
    for _ in range(2):
        parallel(torch.randn(16, 2048, device="cuda", requires_grad=True)).sum().backward()
    first, total = (f"{number / 1e6:.1f} MB" for number in bytes_on_first_and_in_all(parallel))
    page = Path(__file__).parents[2] / "docs" / "how-it-works.md"
    words = " ".join(page.read_text(encoding="utf-8").split())
    assert f"for ResNet-50 on eight GPUs {total} in all, of which {first} are on the first" in words


@needs_two_gpus
def test_memory_ends_with_the_wrapper_and_with_the_graphs_that_need_it(alive):
    plain, parallel = twins(TwoLayers().double(), [0, 1])
    other = DataParallelWithCallback(parallel.module, [0, 1])
    in_kept_memory(other, [0])
    of_other = len(alive)
    in_kept_memory(parallel, [0])
    ours, theirs = leaves(batches([0])[0])
    other.load_state_dict(parallel.state_dict())
    plain.load_state_dict(parallel.module.state_dict())
    output, expected = parallel(ours), plain(theirs)
    assert len(alive) > of_other
    del parallel
    gc.collect()
    assert len(alive) == of_other + 2  # those of the graph
    assert len(workspaces._pools) == 1
    grad = torch.randn_like(expected)
    output.backward(grad)
    expected.backward(grad)
    assert_equal(ours.grad, theirs.grad)
    del output
    gc.collect()
    assert len(alive) == of_other
    del other
    gc.collect()
    assert not alive
    assert not len(workspaces._pools)


@needs_two_gpus
@pytest.mark.parametrize("lasts", [True, False], ids=["wrapper lasts", "wrapper ends first"])
def test_no_python_code_runs_where_memory_is_given_back(lasts):
    """An exception of a signal, such as Ctrl-C, would be lost there."""
    wrapper, calls = torch.nn.Identity(), []
    vector, devices = torch.ones(3, device="cuda:0"), tuple(map(torch.device, ("cuda:0", "cuda:1")))
    lease = Lease(pools_of(wrapper), devices, vector)
    workspace = lease.workspace
    if not lasts:
        del wrapper
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    del lease
    sys.setprofile(None)
    assert calls == ["c_call"]  # of `setprofile` itself
    if lasts:
        assert Lease(pools_of(wrapper), devices, vector).workspace is workspace


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
    parallel = twins(TwoLayers().double(), devices)[1]
    in_kept_memory(parallel, devices)
    gc.collect()
    assert not alive


# Mistakes on purpose


@needs_two_gpus
@pytest.mark.parametrize(
    "passes",
    [
        test_backward_passes_of_several_forward_passes_may_come_in_any_order,
        test_graph_that_is_retained_has_the_same_gradients_again_after_other_passes,
    ],
    ids=["several", "retained"],
)
def test_memory_that_is_given_back_too_early_is_noticed(passes, monkeypatch):
    def take_for_a_moment(pool, lease):
        return take(pool, Workspace())  # which ends here, and the lease does not

    take = WorkspacePool.take
    monkeypatch.setattr(WorkspacePool, "take", take_for_a_moment)
    order = {"order": (0, 1, 2)} if "several" in passes.__name__ else {}
    with pytest.raises(AssertionError, match="gradient"):
        passes([0, 1], **order)


@needs_two_gpus
@pytest.mark.simulated
@pytest.mark.parametrize(("method", "waits"), [("stack", "before"), ("stack", "after"), ("broadcast", "after")])
def test_memory_that_is_used_on_a_side_stream_is_noticed(method, waits, monkeypatch):
    def apart(workspace, *args):
        here = torch.cuda.current_stream()
        if waits == "before":
            side.wait_stream(here)
        with torch.cuda.stream(side):
            result = use(workspace, *args)
        if waits == "after":
            here.wait_stream(side)
        return result

    parallel = twins(TwoLayers().double(), [0, 1])[1]
    in_kept_memory(parallel, [0])
    assert simulated_gpus.reports() == []
    use, side = getattr(Workspace, method), torch.cuda.Stream()
    monkeypatch.setattr(Workspace, method, apart)
    in_kept_memory(parallel, [0])
    assert any(f"cuda:0 stream {side.stream_id}" in report for report in simulated_gpus.reports())
    del parallel
    simulated_gpus.settle()
