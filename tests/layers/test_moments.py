"""`sync_moments`: mean and variance over all replicas, for a normalization of one's own."""

import pytest
import torch
import torch.nn.functional as F
from conftest import device_lists
from helpers import Net, WithPipe, as_devices, assert_equal, assert_same_step, doubles, run_parts
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, SyncMaster, merge_messages, sync_moments


def whitening(net, input):
    mean, var, count = sync_moments(input, net.pipe)
    shape = (-1, *[1] * (input.dim() - 2))
    return (input - mean.view(shape)) * (var.view(shape) + 0.1).rsqrt() + count


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(6, 3), (7, 3, 4, 2)], ids=str)
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_moments_build_a_normalization_of_ones_own(devices, shape):
    plain = Net(lambda net, input: F.batch_norm(input, None, None, training=True, eps=0.1) + input[:, 0].numel())
    parallel = DataParallelWithCallback(WithPipe(whitening), devices)
    assert_same_step(plain, parallel, doubles(*shape, devices=devices))


def test_moments_can_be_differentiated_any_number_of_times():
    parallel = DataParallelWithCallback(WithPipe(whitening), ["cpu"] * 2)
    assert torch.autograd.gradgradcheck(parallel, doubles(4, 2).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_autocast", [False, True])
@pytest.mark.parametrize("devices", device_lists(2, slow=[1]))
def test_moments_are_those_of_all_replicas_in_float32(devices, has_autocast, dtype):
    def noting(net, input):
        results.append(sync_moments(input, net.pipe))
        return input

    results, data = [], (doubles(5, 3, 2, devices=devices) * 3 + 2).to(dtype)
    with torch.autocast(data.device.type, enabled=has_autocast):
        DataParallelWithCallback(WithPipe(noting), devices)(data)
    assert len(results) == len(devices)
    for mean, var, count in results:
        assert count == 10
        assert_equal(mean.cpu(), data.double().mean((0, 2)).float().cpu())
        assert_equal(var.cpu(), data.double().var((0, 2), correction=0).float().cpu())


def test_moments_of_inputs_that_differ_in_channels_are_refused(devices):
    slicing = WithPipe(lambda net, input: whitening(net, input[:, 1:] if input[0, 0] < 0 else input))
    data = torch.ones(4, 3, dtype=torch.float64, device=as_devices(devices)[0])
    data[2:] = -1
    with pytest.raises(RuntimeError, match=r"got \[2, 3\] at entry 0 and \[2, 2\] at entry 1"):
        DataParallelWithCallback(slicing, devices, timeout=5.0)(data)


@pytest.mark.parametrize("rows", [1, 2])
def test_moments_of_a_single_value_are_refused_in_the_words_of_torch(rows):
    parallel = DataParallelWithCallback(WithPipe(whitening), ["cpu"] * rows)
    parts = [doubles(1, 3), doubles(0, 3)][:rows]
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training, got input size"):
        run_parts(parallel, parts)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_moments_in_a_checkpoint_are_computed_again_for_one_replica_and_refused_for_several(devices, use_reentrant):
    net = WithPipe(lambda net, input: checkpoint(whitening, net, input, use_reentrant=use_reentrant))
    input = doubles(6, 3, devices=devices).requires_grad_()
    for net.pipe in (None, SyncMaster(merge_messages)):  # of no other replica
        (expected,) = torch.autograd.grad(whitening(net, input).square().sum(), input)
        input.grad = None
        net(input).square().sum().backward()
        assert_equal(input.grad, expected)
    output = DataParallelWithCallback(net, devices)(input)
    with pytest.raises(RuntimeError, match=r"expected sync_moments outside checkpoints.*leave the norm out"):
        output.backward(torch.randn_like(output))


def test_gradient_penalty_without_a_single_sample_is_no_nan():
    scale, input = torch.ones(2, dtype=torch.float64, requires_grad=True), doubles(0, 2, 3).requires_grad_()
    mean, var, _ = sync_moments(input, None)
    loss = ((mean + var) * scale * scale).sum() + (scale * scale).sum()
    (grad,) = torch.autograd.grad(loss, input, create_graph=True)
    (loss + grad.square().sum()).backward()
    assert_equal(scale.grad, torch.full((2,), 2.0, dtype=torch.float64))


WRONG = [
    (torch.ones(3), ValueError, r"an input \(N, C, \+\), but got 1 dimensions; add one, as in input\[None\]"),
    (None, TypeError, r"^expected an input tensor \(N, C, \+\), but got NoneType; pass a tensor, for example of "),
    ([1.0, 2.0], TypeError, "but got list; pass a tensor"),
]


@pytest.mark.parametrize(("input", "error", "text"), WRONG)
def test_moments_of_what_is_no_batch_are_refused_with_the_remedy(input, error, text):
    with pytest.raises(error, match=text):
        sync_moments(input, None)
