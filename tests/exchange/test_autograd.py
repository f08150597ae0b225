"""The autograd node of a call: the graph around it, what that keeps alive, and its backward in all its forms."""

import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from conftest import device_lists, slow, usual_kernels
from helpers import (
    FORMATS,
    Net,
    TwoLayers,
    WithPipe,
    as_devices,
    assert_equal,
    assert_same_results,
    assert_same_state,
    assert_same_step,
    doubles,
    run_parts,
    twins,
)
from torch import nn

from sync_batchnorm import sync_moments

pytestmark = usual_kernels
SECOND_TIME = "Trying to backward through the graph a second time"


def test_output_that_is_deleted_frees_the_inputs():
    _, parallel = twins(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ["cpu"] * 2)
    data = torch.randn(6, 3)
    kept = []
    parallel.module[1].register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
    output = parallel(data)
    assert all(reference() is not None for reference in kept)
    del output
    assert [reference() for reference in kept] == [None, None]


@pytest.mark.parametrize("multithreading", [True, False], ids=["default", "single-threaded"])
def test_backward_runs_in_the_thread_of_the_caller_and_waits_for_nobody(devs, multithreading):
    plain, parallel = twins(TwoLayers().double(), devs)
    threads = set()
    if devs[0] == "cpu":
        parallel.module.bn2.register_full_backward_hook(lambda *_: threads.add(threading.get_ident()))
    with torch.autograd.set_multithreading_enabled(multithreading):
        assert_same_step(plain, parallel, doubles(8, 3, 6, 6, devices=devs))
    assert threads <= {threading.get_ident()}


def test_nothing_gets_a_gradient_where_what_follows_has_none():
    def step(model):
        product = model(data) * 2
        product.grad_fn.register_hook(lambda *_: (None, None))
        product.sum().backward()
        return []

    data = doubles(6, 3)
    assert_same_results(*twins(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), ["cpu"] * 2), step)


@pytest.mark.parametrize("replica", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"eps": 0.5}, {"eps": 0.5, "eps_mode": "clamp"}], ids=str)
def test_replicas_without_a_graph_are_constants_in_second_and_third_derivatives(replica, options):
    def forward(net, input, recorded):
        with torch.set_grad_enabled(recorded):
            return net.bn(input)

    _, parallel = twins(Net(forward, bn=nn.BatchNorm2d(4)).double(), ["cpu"] * 3)
    layer = parallel.module.bn
    vars(layer).update(options)
    parts = [doubles(2, 4, 3, 2) * torch.tensor([0.3, 0.6, 1, 2]).view(-1, 1, 1) + i for i in range(3)]
    leaf, grads = parts[replica].requires_grad_(), [doubles(2, 4, 3, 2) for _ in range(3)]
    found = run_parts(parallel, parts, [i == replica for i in range(3)])[replica]
    var, mean = torch.var_mean(torch.cat(parts), (0, 2, 3), correction=0, keepdim=True)
    invstd = (var.clamp(min=layer.eps) if "eps_mode" in options else var + layer.eps).rsqrt()
    weight, bias = layer.weight.view(-1, 1, 1), layer.bias.view(-1, 1, 1)
    expected = (leaf - mean) * invstd * weight + bias
    for grad in grads:
        assert_equal(found, expected)
        found, expected = (torch.autograd.grad(value, leaf, grad, create_graph=True)[0] for value in (found, expected))
    assert_equal(found, expected)


def in_its_mode(net, input, mode):
    """Calls its layer, and `sync_moments`, in inference mode, without gradients or as usual, as its number says."""
    with (torch.inference_mode, torch.no_grad, nullcontext)[mode]():
        mean, var, _ = sync_moments(input, net.pipe)
        net.results.append((mode, net.bn(input), mean, var))


MODES = {"inference": 0, "no-grad": 1, "usual": 2}


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("kind", ["contiguous", *slow("channels_last")])
def test_outputs_are_what_the_mode_of_their_replica_makes_them(devices, kind, first, second):
    _, parallel = twins(WithPipe(in_its_mode, bn=nn.BatchNorm2d(4), results=[]), devices)
    modes = [MODES[first], MODES[second]]
    parts = [torch.randn(2, 4, 5, 6).contiguous(memory_format=FORMATS[kind]).requires_grad_() for _ in devices]
    if modes.count(MODES["inference"]) == 1:  # Nobody could make what both of them ask for.
        with pytest.raises(ValueError, match="in inference mode"):
            run_parts(parallel, parts, modes)
        return
    run_parts(parallel, parts, modes)
    for mode, output, *moments in parallel.module.results:
        for result in (output, *moments):
            assert result.is_inference() == (mode == MODES["inference"])
            assert result.requires_grad == (mode == MODES["usual"])


TARGETS = [("input",), ("1.weight",), ("1.bias", "input"), ("0.weight",), ("2.weight",), ("0.bias", "1.bias")]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("create_graph", [False, True], ids=["once", "create-graph"])
def test_gradients_of_parts_of_the_graph_are_right(devices, create_graph, targets):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    data, grad = doubles(6, 3, devices=devices), doubles(6, 2, devices=devices)

    def step(model):
        named = dict(getattr(model, "module", model).named_parameters())
        named["input"] = data.clone().requires_grad_()
        output = model(named["input"])
        return torch.autograd.grad(output, [named[t] for t in targets], grad, create_graph=create_graph)

    assert_same_results(*twins(net, devices), step)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_saved_tensors_may_be_kept_elsewhere(devs, where):
    def forward(net, input):
        with torch.autograd.graph.save_on_cpu() if where == "inside" else nullcontext():
            return net.inner(input)

    plain, parallel = twins(Net(forward, inner=TwoLayers()).double(), devs)
    with torch.autograd.graph.save_on_cpu() if where == "around" else nullcontext():
        assert_same_step(plain, parallel, doubles(8, 3, 6, 6, devices=devs))


def differentiating_twice(net, input):
    """Takes the gradient of a gradient through its layer in the forward of each replica, all of them at once."""
    input = input.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net.bn(input), input, torch.cos(input.detach()), create_graph=True)
    return torch.autograd.grad(grad, input, torch.sin(input.detach()))[0]


@pytest.mark.usefixtures("many_switches")
def test_replicas_may_take_gradients_of_gradients_in_their_forward(devices):
    plain, parallel = twins(Net(differentiating_twice, bn=nn.BatchNorm2d(3)).double(), devices)
    data = doubles(4, 3, 2, 3, devices=devices)
    input, expected = data.clone().requires_grad_(), []
    output = plain.bn(input)
    for rows in (slice(0, 2), slice(2, 4)):  # each by its own rows, of the gradient of the loss of its own rows
        (grad,) = torch.autograd.grad(output[rows], input, torch.cos(data[rows]), create_graph=True)
        (second,) = torch.autograd.grad(grad[rows], input, torch.sin(data[rows]), retain_graph=True)
        expected.append(second[rows])
    for _ in range(20):
        assert_equal(parallel(data), torch.cat(expected))


def training_inside(net, input, weights):
    """Go backward from its own part of the loss in the forward of each replica, all of them at once."""
    output = net.net(input)
    (output * weights).sum().backward(retain_graph=True)
    return output.detach()


@pytest.mark.parametrize("devices", device_lists(1, 3))
def test_backward_in_the_forward_of_each_replica_is_that_of_the_sum_of_their_losses(devices):
    plain, parallel = twins(Net(training_inside, net=TwoLayers()).double(), devices)
    for _ in range(5):
        data, weights = doubles(6, 3, 6, 6, devices=devices), doubles(6, 4, 2, 2, devices=devices)
        expected = plain.net(data)
        (expected * weights).sum().backward()
        assert_equal(parallel(data, weights), expected)
        assert_same_state(parallel, plain)


def freeing_inside(net, input, weights):
    """Free the graph of all replicas by the backward pass in its forward."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if net.hooks else nullcontext():
        output = net.net(input)
    (output * weights).sum().backward()


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("devices", device_lists(3, slow=[2]))
@pytest.mark.usefixtures("many_switches")
def test_backward_that_frees_what_its_peers_need_is_always_told_in_the_words_of_torch(devices, hooks):
    _, parallel = twins(Net(freeing_inside, net=TwoLayers(), hooks=hooks).double(), devices)
    data, weights = doubles(6, 3, 6, 6, devices=devices), doubles(6, 4, 2, 2, devices=devices)
    for _ in range(10):
        with pytest.raises(RuntimeError, match=SECOND_TIME):
            parallel(data, weights)


class Outputs:
    """The outputs of raw replicas, each of a part of its own, whose layer saves a tensor between the two."""

    def __init__(self, devices=("cpu", "cpu")):
        self.plain, self.parallel = twins(nn.BatchNorm2d(3).double(), devices)
        self.parts = [doubles(2, 3, 4, 5).to(device).requires_grad_() for device in as_devices(devices)]
        self.grads = [torch.randn_like(part) for part in self.parts]
        self.inner = [part * 1 for part in self.parts]
        self.outputs = run_parts(self.parallel, self.inner)

    def grad(self, i, by=None, **options):
        """Return the gradient of one output by the input of its replica, or of another one."""
        return torch.autograd.grad(self.outputs[i], self.parts[i if by is None else by], self.grads[i], **options)[0]

    def expected(self, i, by=None):
        """Return the same of one device."""
        parts = [part.detach().cpu().requires_grad_() for part in self.parts]
        rows = self.plain.cpu()(torch.cat(parts)).split(2)[i]
        return torch.autograd.grad(rows, parts[i if by is None else by], self.grads[i].cpu())[0]


@pytest.mark.parametrize("devices", device_lists(3))
def test_inputs_are_freed_by_a_backward_although_the_outputs_are_kept(devices):
    raw = Outputs(devices)
    kept = [weakref.ref(tensor) for tensor in raw.inner]
    raw.inner.clear()
    torch.autograd.backward(raw.outputs, raw.grads)
    assert [reference() for reference in kept] == [None] * 3
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        torch.autograd.backward(raw.outputs, raw.grads)


@pytest.mark.parametrize("order", [[0, 0], [1, 1], [0, 1, 0], [1, 0, 0]], ids=str)
def test_output_is_differentiated_a_second_time_only_if_the_graph_was_retained(devices, order):
    raw = Outputs(devices)
    for i in order:
        assert_equal(raw.grad(i, retain_graph=True).cpu(), raw.expected(i))
    for i in order[:-1]:
        raw.grad(i)
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        raw.grad(order[-1])


def test_gradient_by_the_input_of_another_replica_needs_what_that_one_has_saved(devices):
    raw = Outputs(devices)
    assert_equal(raw.grad(0, by=1, retain_graph=True).cpu(), raw.expected(0, by=1))
    assert_equal(raw.grad(0, by=1).cpu(), raw.expected(0, by=1))
    with pytest.raises(RuntimeError, match=SECOND_TIME):  # as if each replica had a node of its own
        raw.grad(1)


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_change_in_place_between_forward_and_backward_is_refused_as_by_torch(devices, changed):
    raw = Outputs(["cpu"] * 2 if changed == "weight" else devices)  # Other GPUs have copies of the weight.
    raw.grad(0)
    with torch.no_grad():
        (raw.parallel.module.weight if changed == "weight" else raw.inner[1]).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        raw.grad(1)
