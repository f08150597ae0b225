"""The models of torchvision and timm that have BatchNorm, those that train fast, and what is compared of them."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torchvision
from helpers import tensors_of
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


# Of timm 1.0.31: one model of each of its modules that has models with batch norm, and three more.
# fmt: off
TIMM = [
    "botnet26t_256", "bat_resnext26ts", "convmixer_768_32", "cpubone_b0_bfrobust", "cs3darknet_focus_l",
    "cspresnet50", "cspnext_l", "densenet121", "dla34", "dpn48b", "efficientformer_l1", "efficientformerv2_l",
    "efficientnet_b0", "efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "fasternet_l", "fastvit_ma36",
    "ghostnet_050", "hardcorenas_a", "hgnet_base", "hrnet_w18", "iformer_h", "inception_next_atto",
    "inception_resnet_v2", "inception_v3", "inception_v4", "lcnetv2_base", "levit_128", "lowformer_b0",
    "coatnet_0_224", "fbnetv3_b", "mobilenetv3_small_050", "mobilevit_s", "nasnetalarge", "nextvit_base",
    "pnasnet5large", "regnety_002", "regnetv_040", "repghostnet_050", "repvit_m0_9", "res2net50_14w_8s",
    "resnest14d", "ecaresnet26t", "resnet18", "resnetv2_18", "rexnet_100", "selecsls42", "legacy_senet154",
    "shvit_s1", "skresnet18", "starnet_s1", "swiftformer_l1", "tiny_vit_5m_224", "tresnet_l", "vgg11_bn",
    "visformer_small", "vit_base_mci_224", "volo_d1_224", "eca_vovnet39b", "legacy_xception", "xception41",
    "xcit_large_24_p8_224",
]
# fmt: on


TIMM_TRAINED = ["efficientnet_b0", "regnety_002", "mobilenetv3_small_050", "cspresnet50", "resnet18", "densenet121"]


def build_timm(name: str) -> nn.Module:
    """Build a model of timm on the meta device."""
    import timm

    with torch.device("meta"):
        return timm.create_model(name)


def small_timm(name: str) -> tuple[nn.Module, Tensor]:
    """Build a model of timm, and a batch to train it with."""
    import timm

    return timm.create_model(name, num_classes=3), torch.randn(5, 3, 33, 33, dtype=torch.float64)


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


def _detection_backbone() -> tuple[nn.Module, Tensor]:
    detector = build("fasterrcnn_mobilenet_v3_large_fpn", norm_layer=nn.BatchNorm2d)
    return detector.backbone, torch.randn(5, 3, 48, 48, dtype=torch.float64)


CLASSIFIERS = [
    *("resnet18", "densenet121", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "regnet_y_400mf"),
    *("shufflenet_v2_x0_5", "mnasnet0_5", "googlenet"),
]
SEGMENTATION = ["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"]
FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    **{name: _classifier(name, 33) for name in CLASSIFIERS + SEGMENTATION},
    "vgg11_bn": _vgg,
    "inception_v3": _classifier("inception_v3", 75, aux_logits=False),
    "r3d_18": lambda: (build("r3d_18", num_classes=3), torch.randn(5, 3, 2, 24, 24, dtype=torch.float64)),
    "faster R-CNN's backbone": _detection_backbone,
}


def train_both(model: nn.Module, input: Tensor) -> dict[str, float]:
    """Train `model` on one device and a converted copy of it on three CPU replicas, and return `differences`."""
    plain = without_chance(model.double())
    return differences(plain, DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 3), input)


def differences(plain: nn.Module, wrapper: nn.Module, input: Tensor, steps: int = 2) -> dict[str, float]:
    """Train `plain` and a `wrapper` of a copy alike; return how much outputs, gradients and state differ at most.

    Differences are relative to the largest value of each tensor, but at least to a millionth of the largest value of
    all tensors of its kind: gradients of biases before a normalization are zero but for rounding.
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
        expected, actual = tensors_of(plain(input)), tensors_of(wrapper(input))
        grads = [torch.randn_like(output) for output in expected]
        torch.autograd.backward(expected, grads)
        torch.autograd.backward(actual, grads)
        compare("outputs", actual, expected)
        actual, expected = ([parameter.grad for parameter in net.parameters()] for net in (module, plain))
        assert [grad is None for grad in actual] == [grad is None for grad in expected]
        compare("gradients", *([grad for grad in grads if grad is not None] for grads in (actual, expected)))
        for optimizer in optimizers:
            optimizer.step()
        assert list(module.state_dict()) == list(plain.state_dict())
        compare("state", list(module.state_dict().values()), list(plain.state_dict().values()))
    return largest
