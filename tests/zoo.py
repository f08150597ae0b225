"""The models of torchvision: every one that has BatchNorm, those that train fast, and what is compared of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.regnet import BlockParams
from torchvision.ops import StochasticDepth

from sync_batchnorm import DataParallelWithCallback, convert_model

OLD_INITIALIZATION = ("googlenet", "inception_v3", "quantized_googlenet", "quantized_inception_v3")


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def build(name: str, **options: Any) -> nn.Module:
    """Build a model of `torchvision.models.list_models()` without weights."""
    builder = torchvision.models.get_model_builder(name)
    options["weights"] = None
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    if name in OLD_INITIALIZATION:  # Their default initialization is slow, and warns that it will change.
        options["init_weights"] = False
    return builder(**options)


@contextmanager
def on_meta() -> Iterator[None]:
    """Build without memory for parameters. RegNet computes its widths with tensors, which need values."""
    widths = BlockParams.from_init_params

    def with_values(*args: Any, **kwargs: Any) -> BlockParams:
        with torch.device("cpu"):
            return widths(*args, **kwargs)

    with mock.patch.object(BlockParams, "from_init_params", with_values), torch.device("meta"):
        yield


def models_with_batch_norm(names: Iterable[str] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Build torchvision models, all of them by default, on the meta device; yield those that have BatchNorm layers."""
    for name in torchvision.models.list_models() if names is None else names:
        with on_meta():
            model = build(name)
        if batch_norms(model):
            yield name, model


def without_chance(model: nn.Module) -> nn.Module:
    """Turn off what draws random numbers in a forward."""
    for module in model.modules():
        if isinstance(module, (nn.modules.dropout._DropoutNd, StochasticDepth)):
            module.p = 0.0
    return model


def _classifier(name: str, size: int, **options: Any) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (build(name, num_classes=3, **options), torch.randn(5, 3, size, size, dtype=torch.float64))


def _vgg() -> tuple[nn.Module, Tensor]:
    model = build("vgg11_bn")
    model.classifier = nn.Linear(512 * 7 * 7, 3)  # Its own has a hundred million parameters, and nothing to normalize.
    return model, torch.randn(5, 3, 33, 33, dtype=torch.float64)


def _video() -> tuple[nn.Module, Tensor]:
    return build("r3d_18", num_classes=3), torch.randn(5, 3, 2, 24, 24, dtype=torch.float64)


def _detection_backbone() -> tuple[nn.Module, Tensor]:
    detector = build("fasterrcnn_mobilenet_v3_large_fpn", norm_layer=nn.BatchNorm2d)
    return detector.backbone, torch.randn(5, 3, 48, 48, dtype=torch.float64)


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "resnet18": _classifier("resnet18", 33),
    "densenet121": _classifier("densenet121", 33),
    "mobilenet_v2": _classifier("mobilenet_v2", 33),
    "mobilenet_v3_small": _classifier("mobilenet_v3_small", 33),
    "efficientnet_b0": _classifier("efficientnet_b0", 33),
    "regnet_y_400mf": _classifier("regnet_y_400mf", 33),
    "shufflenet_v2_x0_5": _classifier("shufflenet_v2_x0_5", 33),
    "mnasnet0_5": _classifier("mnasnet0_5", 33),
    "vgg11_bn": _vgg,
    "inception_v3": _classifier("inception_v3", 75, aux_logits=False),
    "googlenet": _classifier("googlenet", 33),
    "fcn_resnet50": _classifier("fcn_resnet50", 33),
    "deeplabv3_mobilenet_v3_large": _classifier("deeplabv3_mobilenet_v3_large", 33),
    "lraspp_mobilenet_v3_large": _classifier("lraspp_mobilenet_v3_large", 33),
    "r3d_18": _video,
    "faster R-CNN's backbone": _detection_backbone,
}


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    children: Iterable[Any] = tree.values() if isinstance(tree, dict) else tree
    return [tensor for child in children if child is not None for tensor in tensors_in(child)]


def train_both(model: nn.Module, input: Tensor) -> dict[str, float]:
    """Train `model` on one device and a converted copy of it on three CPU replicas, and return `differences`."""
    plain = without_chance(model.double())
    return differences(plain, DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 3), input)


def differences(plain: nn.Module, wrapper: nn.Module, input: Tensor, steps: int = 2) -> dict[str, float]:
    """Train `plain` and a `wrapper` of a copy of it alike, and return how much they differ at most.

    A step is a forward, a backward with random upstream gradients for all outputs, and one of SGD. Differences are
    relative to the largest value of each tensor, but at least to a millionth of the largest value of all tensors of its
    kind, because a normalization leaves gradients behind, and so biases, that are zero but for rounding.

    Returns:
        The largest differences of outputs, of gradients, and of state (parameters and buffers).
    """
    module: nn.Module = wrapper.module
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (plain, module)]
    largest = dict.fromkeys(("outputs", "gradients", "state"), 0.0)

    def compare(what: str, actual: list[Tensor], expected: list[Tensor]) -> None:
        sizes = [float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0 for tensor in expected]
        for a, e, size in zip(actual, expected, sizes, strict=True):
            assert a.shape == e.shape
            if size:
                difference = float((a.detach().double() - e.detach().double()).abs().max())
                largest[what] = max(largest[what], difference / max(size, 1e-6 * max(sizes)))

    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, actual = tensors_in(plain(input)), tensors_in(wrapper(input))
        grads = [torch.randn_like(output) for output in expected]
        torch.autograd.backward(expected, grads)
        torch.autograd.backward(actual, grads)
        compare("outputs", actual, expected)
        pairs = list(zip(module.parameters(), plain.parameters(), strict=True))
        assert all((a.grad is None) == (e.grad is None) for a, e in pairs)
        trained = [(a.grad, e.grad) for a, e in pairs if a.grad is not None and e.grad is not None]
        compare("gradients", [a for a, _ in trained], [e for _, e in trained])
        for optimizer in optimizers:
            optimizer.step()
        assert list(module.state_dict()) == list(plain.state_dict())
        compare("state", list(module.state_dict().values()), list(plain.state_dict().values()))
    return largest
