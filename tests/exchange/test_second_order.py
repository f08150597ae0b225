"""Derivatives of derivatives: what gradient penalties differentiate is what one device would."""

import pytest
import torch
from conftest import device_lists, first_in_smoke, slow, usual_kernels
from helpers import (
    WITHOUT_BIAS,
    are_distinct_gpus,
    as_devices,
    assert_equal,
    assert_same_results,
    assert_same_state,
    assert_same_step,
    doubles,
    randomize,
    run_parts,
    twins,
)
from torch import nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, SynchronizedBatchNorm2d

pytestmark = usual_kernels

RELATIVE = 1e-8  # of second derivatives, whose values are differences of large ones


SIZES = {"uneven": (3, 2, 1), "first empty": (0, 3, 1)}  # of the parts of replicas
SLOW_SIZES = {"even": (2, 2, 2), "middle empty": (2, 0, 1)}


@pytest.mark.parametrize("training", [True, *slow(False)], ids=["train", "eval"])
@pytest.mark.parametrize("sizes", [*SIZES, *slow(*SLOW_SIZES)])
@pytest.mark.parametrize("options", [{}, *slow({"affine": False}, *WITHOUT_BIAS)], ids=str)
@pytest.mark.parametrize("devices", device_lists(2, slow=[3]))
def test_gradgradcheck_passes(devices, options, sizes, training):
    _, parallel = twins(nn.BatchNorm1d(2, **options).double(), devices)
    parallel.train(training)
    sizes = (SIZES | SLOW_SIZES)[sizes][: len(devices)]
    parts = [doubles(size, 2, devices=[device]).requires_grad_() for size, device in zip(sizes, devices, strict=True)]
    inputs = [*parts, *parallel.module.parameters()]
    step = lambda *inputs: tuple(run_parts(parallel, inputs[: len(sizes)]))  # noqa: E731
    # Neither the copies of torch between devices nor the gradients of empty parts can be batched.
    batched = not are_distinct_gpus(devices) and 0 not in sizes
    assert torch.autograd.gradcheck(step, inputs, check_batched_grad=batched)
    # The threads of several devices add up gradients of gradients in any order, as those of PyTorch.
    nondet = 1e-12 if are_distinct_gpus(devices) else 0.0
    assert torch.autograd.gradgradcheck(step, inputs, check_batched_grad=batched, nondet_tol=nondet)


def critic():
    """A net that is smooth, so that its second derivatives are not zero almost everywhere."""
    first = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh())
    second = (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Softplus())
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4 * 3 * 2, 1)).double()


def wgan_gp(model, real, fake, mix):
    """Gulrajani et al., "Improved Training of Wasserstein GANs", 2017, equation 3."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    score = model(between)
    (grad,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    penalty = (grad.flatten(1).norm(dim=1) - 1).square().mean()
    return model(fake).mean() - model(real).mean() + 10 * penalty


@pytest.mark.parametrize("rows", first_in_smoke([6, 5]), ids=["even", "uneven"])
@pytest.mark.parametrize("devices", device_lists(3, slow=[1, 2, 4]))
def test_gradient_penalty_is_that_of_one_device(devices, rows):
    plain, parallel = twins(critic(), devices)
    real, fake = (doubles(rows, 3, 5, 4, devices=devices) for _ in range(2))
    mix = torch.rand(rows, 1, 1, 1, dtype=torch.float64, device=real.device)
    for _ in range(2):
        losses = [wgan_gp(model, real, fake, mix) for model in (plain, parallel)]
        assert_equal(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        assert_same_state(parallel, plain, RELATIVE)


def test_penalty_alone_gives_the_parameters_of_the_last_layer_what_one_device_does(devices):
    plain, parallel = twins(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double(), devices)
    data, weights = doubles(6, 3, devices=devices), doubles(6, 3, devices=devices)

    def step(model):
        input = data.clone().requires_grad_()
        (grad,) = torch.autograd.grad((model(input) * weights).sum(), input, create_graph=True)
        grad.square().sum().backward()
        return [input.grad]

    assert_same_results(plain, parallel, step, RELATIVE)  # None for the bias, which an optimizer then leaves alone


def test_penalty_of_an_empty_batch_is_zero(devices):
    _, parallel = twins(nn.BatchNorm1d(3).double(), devices)
    input = doubles(0, 3, devices=devices).requires_grad_()
    (grad,) = torch.autograd.grad(parallel(input), input, torch.empty_like(input), create_graph=True)
    (of_weight,) = torch.autograd.grad(grad.square().sum(), parallel.module.weight)
    assert_equal(of_weight, torch.zeros_like(of_weight))


@pytest.mark.parametrize("eps", [1e-5, 0.5, 100.0])
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_output_gradients_and_penalty_with_a_clamped_variance_are_those_of_the_formula(devices, eps):
    bn = randomize(SynchronizedBatchNorm2d(4, eps=eps, eps_mode="clamp").double().to(devices[0]))
    parallel = DataParallelWithCallback(bn, devices, timeout=5.0)
    data = doubles(5, 4, 2, 3, devices=devices) * torch.tensor([3.0, 1.0, 0.3, 0.0], device=devices[0]).view(-1, 1, 1)
    weights = torch.randn_like(data)
    variance = data.var((0, 2, 3))  # which is not clamped where it is averaged

    def formula(x):
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        invstd = var.clamp(min=eps).rsqrt()
        return (x - mean) * invstd * bn.weight.view(-1, 1, 1) + bn.bias.view(-1, 1, 1)

    results = []
    for model in (formula, parallel):
        input = data.clone().requires_grad_()
        output = model(input)
        loss = (torch.tanh(output) * weights).sum()
        first = torch.autograd.grad(loss, [input, bn.weight, bn.bias], create_graph=True)
        penalty = (first[0] * weights.sin()).sum() + loss
        results.append([output, *first, *torch.autograd.grad(penalty, [input, bn.weight, bn.bias])])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_equal(actual, expected, tolerance=RELATIVE)
    assert_equal(bn.running_var, 0.9 + 0.1 * variance)


def test_variance_that_equals_eps_is_not_clamped(devices):
    data = torch.tensor([[-1.0], [1.0]], dtype=torch.float64, device=as_devices(devices)[0])  # of variance one
    layers = nn.BatchNorm1d(1, eps=1e-12).to(data), SynchronizedBatchNorm1d(1, eps=1.0, eps_mode="clamp").to(data)
    assert_same_step(layers[0], DataParallelWithCallback(layers[1], devices), data, data * 3 + 1)
