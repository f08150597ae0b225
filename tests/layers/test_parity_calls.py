"""Several calls of one layer, several forwards, and several backwards stay apart or add up, as on one device."""

import os
import random

import pytest
import torch
from conftest import usual_kernels
from helpers import Net, TwoLayers, assert_equal, assert_same_state, assert_same_step, doubles, twins
from torch import nn

pytestmark = usual_kernels


def pyramid(net, input):
    """One layer for feature levels of three sizes, as detection heads share it."""
    levels = [input, input[..., ::2], input[..., 1:, ::3]]
    return torch.cat([net.bn(net.conv(level)).flatten(1) for level in levels], 1)


@pytest.mark.smoke
def test_one_layer_called_three_times_keeps_its_calls_apart(devs):
    plain, parallel = twins(Net(pyramid, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3)).double(), devs)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(6, 3, 5, 7, devices=devs))
    assert parallel.module.bn.num_batches_tracked == 6


def test_gradients_accumulate_over_micro_batches(devs):
    plain, parallel = twins(TwoLayers().double(), devs)
    for rows in (4, 3, 1, 8, 0, 5):
        assert_same_step(plain, parallel, doubles(rows, 3, 6, 6, devices=devs))


def test_eval_forward_between_two_training_forwards_changes_nothing(devs):
    plain, parallel = twins(TwoLayers().double(), devs)
    data = doubles(4, 3, 6, 6, devices=devs)
    grad = doubles(*plain.eval()(data).shape, devices=devs)
    for module in (plain, parallel):
        first, _, last = [module.train(training)(data) for training in (True, False, True)]
        torch.autograd.backward([first, last], [grad, 2 * grad])
    assert_same_state(parallel, plain)


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


def test_replicas_may_take_different_branches_with_equal_calls(devices):
    net = Net(branching, linear=nn.Linear(3, 3), bn=nn.BatchNorm1d(3)).double()
    _, parallel = twins(net, devices)
    data = doubles(6, 3, devices=devices)
    data[0, 0], data[3, 0] = 1.0, -1.0
    hidden = net.linear(data)
    expected = net.bn(torch.cat((hidden[:3], hidden[3:] * 2))) * torch.tensor([[1.0]] * 3 + [[-1.0]] * 3).to(data)
    output, grad = parallel(data), torch.randn_like(expected)
    assert_equal(output, expected)
    expected.backward(grad)
    output.backward(grad)
    assert_same_state(parallel, net)


def yielding(net, input):
    """Lets other threads run first, a random number of times."""
    for _ in range(random.randrange(4)):
        getattr(os, "sched_yield", lambda: None)()
    return input


def test_many_forwards_under_frequent_thread_switches_stay_equal(many_switches):
    net = nn.Sequential(*[layer for _ in range(3) for layer in (Net(yielding), nn.BatchNorm1d(3), nn.Linear(3, 3))])
    plain, parallel = twins(net.double(), ["cpu"] * 4)
    for i in range(40):
        data = doubles(4 + i % 7, 3)
        with torch.no_grad():
            assert_equal(parallel(data), plain(data), f"forward {i}")
    assert_same_state(parallel, plain)
