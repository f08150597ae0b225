"""Every torchvision model converts and reverts without a trace, and many of them train to the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import WARNING_OF_BASELINES, anatomy, classes
from torch import nn

from sync_batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    revert_model,
)

zoo = pytest.importorskip("zoo")  # which needs torchvision

KINDS = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}


@pytest.fixture(autouse=True)
def _one_thread_a_replica() -> Iterator[None]:
    """With several threads per operator, three replicas wait for each other's threads: it took 27 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _metadata(model: nn.Module) -> dict[str, object]:
    return dict(model.state_dict()._metadata)


@pytest.mark.watchdog(240.0)
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["inception_v3", "mobilenet_v3_small", "quantized_resnet18", "r3d_18"], 4),
        pytest.param(None, 81, id="all", marks=pytest.mark.slow),
    ],
)
def test_every_model_converts_and_reverts_to_what_it_was(names, expected):
    converted = 0
    for name, model in zoo.models_with_batch_norm(names):
        for flag, layer in enumerate(zoo.batch_norms(model)):
            layer.train(flag % 3 > 0).requires_grad_(flag % 2 > 0)
        layer.register_forward_hook(lambda *_: None)
        parts, kinds, metadata = anatomy(model), classes(model), _metadata(model)

        assert convert_model(model) is model
        assert anatomy(model) == parts, name
        assert classes(model) == {part: KINDS.get(cls, cls) for part, cls in kinds.items()}, name
        assert _metadata(model) == metadata, name

        assert revert_model(model) is model
        assert anatomy(model) == parts, name
        assert classes(model) == kinds, name
        assert _metadata(model) == metadata, name
        converted += 1
    assert converted >= expected


# What rounding makes of deep nets on five tiny images; the numbers are in docs/benchmarks/conversion. Replicas that do
# not synchronize differ by more than a million times as much.
TOLERANCE = 1e-8

# Together they have most of what the others have: branches that are added or concatenated, depthwise convolutions,
# squeeze and excitation.
QUICK = {"mobilenet_v3_small"}


@pytest.mark.watchdog(120.0)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in zoo.FAMILIES]
)
def test_a_family_trains_on_three_uneven_replicas_as_on_one_device(family):
    largest = zoo.train_both(*zoo.FAMILIES[family]())
    assert max(largest.values()) < TOLERANCE, largest


@pytest.mark.slow
@pytest.mark.watchdog(120.0)
@pytest.mark.filterwarnings(WARNING_OF_BASELINES)
def test_the_comparison_sees_replicas_that_do_not_synchronize(monkeypatch):
    monkeypatch.setattr(zoo, "convert_model", lambda model: model)
    largest = zoo.train_both(*zoo.FAMILIES["mobilenet_v3_small"]())
    assert min(largest.values()) > 1e-2, largest


@pytest.fixture
def timm() -> Any:
    """Return the module; some Python has no wheel of what it needs."""
    return pytest.importorskip("timm")


def _timm_net(timm: Any) -> nn.Module:
    return timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=3)


@pytest.mark.watchdog(120.0)
def test_a_timm_net_keeps_its_own_layers_and_is_told(timm):
    net = _timm_net(timm)
    own = [name for name, module in net.named_modules() if isinstance(module, timm.layers.BatchNormAct2d)]
    assert own
    parts, kinds = anatomy(net), classes(net)
    with pytest.warns(
        UserWarning, match="BatchNormAct2d has a forward of its own; .* SynchronizedBatchNorm2d"
    ) as caught:
        convert_model(net)
    assert len(caught) == 1
    assert f"- {', '.join(own)}: " in str(caught[0].message)
    assert anatomy(net) == parts
    assert classes(net) == {name: KINDS.get(cls, cls) for name, cls in kinds.items()}


@pytest.mark.watchdog(120.0)
def test_a_timm_net_with_most_layers_left_computes_in_eval_what_it_did(timm):
    net = _timm_net(timm).eval()
    input = torch.randn(2, 3, 32, 32)
    expected = net(input)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert_model(net)
    assert torch.equal(net(input), expected)


class SynchronizedBatchNormAct2d(SynchronizedBatchNorm2d):
    """What the warning advises."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


@pytest.mark.watchdog(120.0)
def test_a_timm_net_trains_as_on_one_device_with_the_class_that_the_warning_advises(monkeypatch, timm):
    def convert(net: nn.Module) -> nn.Module:
        for layer in net.modules():
            if type(layer) is timm.layers.BatchNormAct2d:
                layer.__class__ = SynchronizedBatchNormAct2d
        return convert_model(net)

    monkeypatch.setattr(zoo, "convert_model", convert)
    largest = zoo.train_both(_timm_net(timm), torch.randn(5, 3, 33, 33, dtype=torch.float64))
    assert max(largest.values()) < TOLERANCE, largest
