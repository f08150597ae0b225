"""What the page on usage says that works: methods of training, parametrizations and exports, against one device."""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_equal, assert_same_results, doubles, twins
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.utils import parametrizations, prune

from sync_batchnorm import DataParallelWithCallback, assert_synchronized, convert_model, revert_model

CPUS = ["cpu"] * 3


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


class Mixed(nn.Module):
    """An edge of DARTS: a mixture of operations, whose weights are trained too."""

    def __init__(self) -> None:
        super().__init__()
        operations = [nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(6, 4)]
        self.operations, self.alphas = nn.ModuleList(operations), nn.Parameter(torch.randn(2))

    def forward(self, input: Tensor) -> Tensor:
        weights = self.alphas.softmax(0)
        return sum(weight * operation(input) for weight, operation in zip(weights, self.operations, strict=True))


def sharpness_aware(model: nn.Module, batch: Tensor, labels: Tensor) -> list[Tensor]:
    """A step of SAM: the gradient is taken where a first step upwards leads."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(cross_entropy(model(batch), labels), parameters)
    scale = 0.05 / torch.stack([gradient.norm() for gradient in first]).norm()
    with torch.no_grad():
        torch._foreach_add_(parameters, [gradient * scale for gradient in first])
    second = torch.autograd.grad(cross_entropy(model(batch), labels), parameters)
    with torch.no_grad():
        torch._foreach_sub_(parameters, [gradient * scale for gradient in first])
        torch._foreach_sub_(parameters, [gradient * 0.1 for gradient in second])
    return [*first, *second]


def virtual_adversarial(model: nn.Module, batch: Tensor, labels: Tensor) -> list[Tensor]:
    """A step of VAT: the direction in which the output changes most is a gradient with respect to the input."""
    expected = model(batch).softmax(1).detach()
    direction = batch.sin().div(10).requires_grad_()
    distance = kl_div(model(batch + direction).log_softmax(1), expected, reduction="batchmean")
    (gradient,) = torch.autograd.grad(distance, direction)
    kl_div(model(batch + gradient.sign() * 0.1).log_softmax(1), expected, reduction="batchmean").backward()
    return [gradient]


def architecture(model: nn.Module, batch: Tensor, labels: Tensor) -> list[Tensor]:
    """A step of DARTS of second order: the loss of weights that have made a step, with respect to `alphas`."""
    mixed = getattr(model, "module", model)
    weights = [parameter for name, parameter in mixed.named_parameters() if name != "alphas"]
    gradients = torch.autograd.grad(cross_entropy(model(batch), labels), weights, create_graph=True)
    ahead = sum((weight - 0.1 * gradient).square().sum() for weight, gradient in zip(weights, gradients, strict=True))
    return list(torch.autograd.grad(ahead, [mixed.alphas, *weights]))


def plain_step(model: nn.Module, batch: Tensor, labels: Tensor) -> list[Tensor]:
    cross_entropy(model(batch), labels).backward()
    return []


def _normed(norm: Callable[[nn.Module], Any]) -> nn.Module:
    net = _net()
    norm(net[0])
    return net


METHODS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Sequence[Tensor]]]] = {
    "SAM": (_net, sharpness_aware),
    "VAT": (_net, virtual_adversarial),
    "DARTS": (Mixed, architecture),
    "spectral norm": (lambda: _normed(parametrizations.spectral_norm), plain_step),
    "weight norm": (lambda: _normed(parametrizations.weight_norm), plain_step),
}


@pytest.mark.parametrize("method", METHODS)
def test_method_trains_as_on_one_device(method: str):
    make, step = METHODS[method]
    plain, parallel = twins(make().double(), CPUS)
    for _ in range(2):
        batch, labels = doubles(5, 6), torch.randint(4, (5,))
        assert_same_results(plain, parallel, lambda model, batch=batch, labels=labels: step(model, batch, labels))


def test_pruned_model_trains_as_on_one_device():
    models = twins(_net().double(), CPUS)
    for model in models:
        prune.l1_unstructured(getattr(model, "module", model)[0], "weight", 0.5)
    batch, labels = doubles(5, 6), torch.randint(4, (5,))
    assert_same_results(*models, lambda model: plain_step(model, batch, labels))


@pytest.mark.slow
def test_trained_model_is_exported_to_onnx(tmp_path, monkeypatch):
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    # The exporter starts the thread that watches the bars of tqdm, which would outlive the test.
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    parallel = DataParallelWithCallback(convert_model(_net()), CPUS)
    batch = torch.randn(5, 6)
    parallel(batch)
    plain = revert_model(copy.deepcopy(parallel.module)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(plain, (batch,), tmp_path / "model.onnx", verbose=False)
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(str(tmp_path / "model.onnx"))
        (output,) = evaluator.run(None, {evaluator.input_names[0]: batch.numpy()})
    assert_equal(torch.from_numpy(output), parallel.module.eval()(batch))


@pytest.mark.slow
def test_detector_of_torchvision_trains_with_losses_that_are_weighted_by_rows():
    zoo = pytest.importorskip("zoo")
    torch.manual_seed(0)
    net = zoo.build("retinanet_resnet50_fpn", num_classes=3, min_size=64, max_size=64).double()
    plain, parallel = twins(net, CPUS[:2], 60.0, in_dims={"images": 0, "targets": 0}, out_dims=0)
    assert_synchronized(parallel, replicas=2)
    images, boxes = list(torch.rand(3, 3, 64, 64).double()), torch.tensor([[5.0, 5, 40, 40], [20, 10, 60, 50]]).double()
    targets = [{"boxes": boxes[:number], "labels": torch.tensor([1, 2])[:number]} for number in (1, 2, 1)]
    rows = torch.tensor([len(chunk) for chunk in torch.arange(len(images)).chunk(2)]).double()

    def step(model: nn.Module) -> list[Tensor]:
        loss = sum((losses * rows).sum() / rows.sum() for losses in model(images, targets).values())
        loss.backward()
        return [loss]

    assert_same_results(plain, parallel, step, 1e-8)
