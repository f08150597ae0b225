"""Replicas compute what one device computes on the whole batch."""

import os
import random

import pytest
import torch
from conftest import device_lists, every_kernel, first_in_smoke, slow, usual_kernels
from helpers import (
    FORMATS,
    WITHOUT_BIAS,
    Net,
    TwoLayers,
    assert_equal,
    assert_same_parts,
    assert_same_state,
    assert_same_step,
    assert_trains_as_one_device,
    doubles,
    twins,
)
from torch import nn

BATCHES = {
    "rows": (nn.BatchNorm1d, (16, 10)),
    "single values": (nn.BatchNorm1d, (3, 2)),  # one in each of three replicas
    "1d": (nn.BatchNorm1d, (7, 4, 5)),
    "2d": (nn.BatchNorm2d, (6, 3, 5, 4)),
    "3d": (nn.BatchNorm3d, (5, 2, 3, 4, 3)),
}
OPTIONS = [
    *({"eps": 0.3}, {"affine": False}, {"track_running_stats": False}, *WITHOUT_BIAS),
    *({"momentum": momentum} for momentum in (0.3, None, 0.0, 1.0)),
]
ROWS = [(0, 3, 2), (3, 0, 2), (0, 0, 0), (2, 3, 4, 5), (1, 1, 9)]
PARTS = {f"rows {rows}": [(n, 3, 2, 2) for n in rows] for rows in ROWS}  # the shapes of parts
PARTS["other sizes"] = [(2, 3, 5, 5), (1, 3, 9, 2)]
PARTS["other heights"] = [(2, 3, 5, 5), (1, 3, 9, 5)]  # which in channels_last have equal strides inside of a sample


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32)], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", first_in_smoke(BATCHES))
@pytest.mark.parametrize("devs", device_lists(1, 3, slow=[2, 4]))
def test_step_is_that_of_the_whole_batch(devs, kind, dtype):
    layer, shape = BATCHES[kind]
    plain, parallel = twins(layer(shape[1]).to(dtype), devs)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(*shape, devices=devs).to(dtype))


@usual_kernels
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("devices", device_lists(1, 3))
def test_constructor_options_mean_what_they_mean_in_torch(devices, options):
    plain, parallel = twins(nn.BatchNorm2d(3, **options).double(), devices)
    for rows in (5, 0, 7):
        assert_same_step(plain, parallel, doubles(rows, 3, 4, 2, devices=devices))
    plain.reset_running_stats()
    parallel.module.reset_running_stats()
    assert_same_step(plain, parallel, doubles(5, 3, 4, 2, devices=devices))
    assert parallel.module.bias is None or options != {"bias": False}


@every_kernel
@pytest.mark.parametrize("parts", first_in_smoke(PARTS))
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("devices", device_lists(4))
def test_parts_of_any_sizes_are_weighted_by_elements(devices, kind, parts):
    plain, parallel = twins(nn.BatchNorm2d(3).double(), devices)
    parts = [doubles(*shape).contiguous(memory_format=FORMATS[kind]) for shape in PARTS[parts]]
    parts[0] *= 50
    assert_same_parts(plain, parallel, parts)
    assert_same_step(plain, parallel, doubles(2, 3, 0, 2, devices=devices))


@every_kernel
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_frozen_parameters_get_no_gradient(devices, frozen):
    plain, parallel = twins(nn.BatchNorm1d(3).double(), devices)
    for module in (plain, parallel.module):
        for name in frozen:
            getattr(module, name).requires_grad_(False)
    assert_same_step(plain, parallel, doubles(6, 3, devices=devices))
    assert all(getattr(parallel.module, name).grad is None for name in frozen)


@every_kernel
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("devs", device_lists(1, 3, slow=[2, 4]))
def test_training_mode_without_gradients_updates_running_statistics(devs, mode):
    plain, parallel = twins(nn.BatchNorm1d(3).double(), devs)
    data = doubles(6, 3, devices=devs)
    with mode():
        expected, output = plain(data), parallel(data)
    assert_equal(output, expected)
    assert not output.requires_grad
    assert not any(buffer.requires_grad or buffer.is_inference() for buffer in parallel.module.buffers())
    assert_same_state(parallel, plain)
    assert_same_step(plain, parallel, data)


# Several calls of one layer, several forwards, and several backwards stay apart or add up.


def pyramid(net, input):
    """One layer for feature levels of three sizes, as detection heads share it."""
    levels = [input, input[..., ::2], input[..., 1:, ::3]]
    return torch.cat([net.bn(net.conv(level)).flatten(1) for level in levels], 1)


@usual_kernels
@pytest.mark.smoke
def test_one_layer_called_three_times_keeps_its_calls_apart(devs):
    net = Net(pyramid, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))
    _, parallel = assert_trains_as_one_device(net, devs, 6, 3, 5, 7)
    assert parallel.module.bn.num_batches_tracked == 6


@usual_kernels
def test_gradients_accumulate_over_micro_batches_and_optimizers_use_them(devs):
    plain, parallel = twins(TwoLayers().double(), devs)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (plain, parallel)]
    for rows in (4, 3, 1, 8, 0, 5):
        assert_same_step(plain, parallel, doubles(rows, 3, 6, 6, devices=devs))
        for optimizer in optimizers if rows in (3, 0) else ():
            optimizer.step()
            optimizer.zero_grad()


@usual_kernels
def test_eval_forward_between_two_training_forwards_changes_nothing(devs):
    plain, parallel = twins(TwoLayers().double(), devs)
    data = doubles(4, 3, 6, 6, devices=devs)
    grad = doubles(*plain.eval()(data).shape, devices=devs)
    for module in (plain, parallel):
        first, _, last = [module.train(training)(data) for training in (True, False, True)]
        torch.autograd.backward([first, last], [grad, 2 * grad])
    assert_same_state(parallel, plain)


@usual_kernels
def test_training_forward_between_an_eval_forward_and_its_backward_is_no_error(devs):
    _, parallel = twins(TwoLayers().double(), devs)
    data = doubles(4, 3, 6, 6, devices=devs)
    output = parallel.eval()(data)
    parallel.train()(data)
    output.backward(torch.randn_like(output))
    assert parallel.module.bn1.weight.grad is not None


def branching(net, input):
    """Takes another branch by content, but calls its layer equally often in each."""
    return net.bn(net.linear(input)) if input[0, 0] > 0 else -net.bn(net.linear(input) * 2)


@usual_kernels
def test_replicas_may_take_different_branches_with_equal_calls(devices):
    plain, parallel = twins(Net(branching, linear=nn.Linear(3, 3), bn=nn.BatchNorm1d(3)).double(), devices)
    data = doubles(6, 3, devices=devices)
    data[:3, 0], data[3:, 0] = 1.0, -1.0
    plain.function = lambda net, x: x[:, :1].sign() * net.bn(net.linear(x) * (1.5 - x[:, :1].sign() / 2))
    assert_same_step(plain, parallel, data)


def yielding(net, input):
    """Lets other threads run first, a random number of times."""
    for _ in range(random.randrange(4)):
        getattr(os, "sched_yield", lambda: None)()
    return input


@usual_kernels
def test_many_forwards_under_frequent_thread_switches_stay_equal(many_switches):
    net = nn.Sequential(*[layer for _ in range(3) for layer in (Net(yielding), nn.BatchNorm1d(3), nn.Linear(3, 3))])
    plain, parallel = twins(net.double(), ["cpu"] * 4)
    for i in range(20):
        data = doubles(4 + i % 7, 3)
        with torch.no_grad():
            assert_equal(parallel(data), plain(data), f"forward {i}")
    assert_same_state(parallel, plain)
