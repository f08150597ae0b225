"""Methods of training, against one device: SAM, VAT, DARTS, averaged weights, teachers."""

from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import Net, assert_same_results, assert_same_state, doubles, twins
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from sync_batchnorm import DataParallelWithCallback

CPUS = ["cpu"] * 3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def mixture() -> nn.Module:
    """An edge of DARTS, which mixes operations with trained weights."""
    operations = nn.ModuleList([nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)), nn.Linear(6, 4)])

    def mix(net: Net, input: Tensor) -> Tensor:
        weights = net.alphas.softmax(0)
        return weights[0] * net.operations[0](input) + weights[1] * net.operations[1](input)

    return Net(mix, operations=operations, alphas=nn.Parameter(torch.randn(2))).double()


def sharpness_aware(model: nn.Module, batch: Tensor, labels: Tensor) -> Sequence[Tensor]:
    """SAM: the gradient is taken where a first step upwards leads."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(cross_entropy(model(batch), labels), parameters)
    scale = 0.05 / torch.stack([gradient.norm() for gradient in first]).norm()
    with torch.no_grad():
        torch._foreach_add_(parameters, [gradient * scale for gradient in first])
    return [*first, *torch.autograd.grad(cross_entropy(model(batch), labels), parameters)]


def virtual_adversarial(model: nn.Module, batch: Tensor, labels: Tensor) -> Sequence[Tensor]:
    """VAT: the direction in which the output changes most is a gradient by the input."""
    expected = model(batch).softmax(1).detach()
    direction = batch.sin().div(10).requires_grad_()
    distance = kl_div(model(batch + direction).log_softmax(1), expected, reduction="batchmean")
    (gradient,) = torch.autograd.grad(distance, direction)
    kl_div(model(batch + gradient.sign() * 0.1).log_softmax(1), expected, reduction="batchmean").backward()
    return [gradient]


def architecture(model: nn.Module, batch: Tensor, labels: Tensor) -> Sequence[Tensor]:
    """DARTS of second order: the loss of weights that have made a step, by `alphas`."""
    mixed = getattr(model, "module", model)
    weights = list(mixed.operations.parameters())
    gradients = torch.autograd.grad(cross_entropy(model(batch), labels), weights, create_graph=True)
    ahead = sum((weight - 0.1 * gradient).square().sum() for weight, gradient in zip(weights, gradients, strict=True))
    return torch.autograd.grad(ahead, [mixed.alphas, *weights])


def mean_teacher(model: nn.Module, batch: Tensor, labels: Tensor) -> Sequence[Tensor]:
    average_of_weights = get_ema_multi_avg_fn(0.99)
    teacher = AveragedModel(getattr(model, "module", model), multi_avg_fn=average_of_weights, use_buffers=True).eval()
    teacher = DataParallelWithCallback(teacher, CPUS) if isinstance(model, nn.DataParallel) else teacher
    with torch.no_grad():
        expected = teacher(batch)
    loss = (model(batch) - expected * labels[:, None]).square().mean()
    loss.backward()
    return [loss]


METHODS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Sequence[Tensor]]]] = {
    "SAM": (net, sharpness_aware),
    "VAT": (net, virtual_adversarial),
    "DARTS": (mixture, architecture),
    "mean teacher": (net, mean_teacher),
}


@pytest.mark.parametrize("method", METHODS)
def test_method_trains_as_on_one_device(method):
    make, step = METHODS[method]
    plain, parallel = twins(make(), CPUS)
    for _ in range(2):
        batch, labels = doubles(5, 6), torch.randint(4, (5,))
        assert_same_results(plain, parallel, lambda model, batch=batch, labels=labels: step(model, batch, labels))


@pytest.mark.parametrize("wraps", ["the average", "the model", "neither"])
def test_statistics_of_averaged_weights_are_those_of_one_device(wraps):
    plain, parallel = twins(net(), CPUS)
    batches = [doubles(5, 6) for _ in range(3)]
    expected = AveragedModel(plain)
    average = AveragedModel(parallel if wraps == "the model" else parallel.module)
    update_bn(batches, expected)
    update_bn(batches, DataParallelWithCallback(average, CPUS) if wraps == "the average" else average)
    assert_same_state(average.module, expected.module)
