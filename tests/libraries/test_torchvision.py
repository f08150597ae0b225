"""Every torchvision model converts and reverts without a trace, and many of them train to the numbers of one device."""

from __future__ import annotations

import pytest
import torch
from conftest import slow
from helpers import assert_converts_and_reverts, assert_same_results, twins

from sync_batchnorm import assert_matches_one_device, convert_model

zoo = pytest.importorskip("zoo")  # which needs torchvision

pytestmark = pytest.mark.timeout(900)
SOME = ["inception_v3", "mobilenet_v3_small", "quantized_resnet18", "r3d_18"]


@pytest.mark.parametrize("names", [SOME, *slow(None)], ids=["some", "all"])
def test_every_model_converts_and_reverts_to_what_it_was(names):
    converted = 0
    for name, model in zoo.models_with_batch_norm(names):
        for flag, layer in enumerate(zoo.batch_norms(model)):
            layer.train(flag % 3 > 0).requires_grad_(flag % 2 > 0)
        layer.register_forward_hook(lambda *_: None)
        assert_converts_and_reverts(model, name)
        converted += 1
    assert converted >= (4 if names else 81)


# What rounding makes of deep nets on five tiny images, see docs/benchmarks/conversion. Replicas that do not synchronize
# differ by more than a million times as much.
TOLERANCE = 1e-8

# Together they have most of what the others have; docs/benchmarks/conversion trains all of `zoo.FAMILIES`.
TRAINED = ["mobilenet_v3_small", "resnet18", "densenet121", "shufflenet_v2_x0_5", "faster R-CNN's backbone"]
TRAINED += ["deeplabv3_mobilenet_v3_large"]


@pytest.mark.parametrize("family", [TRAINED[0], *slow(*TRAINED[1:])])
def test_a_family_trains_on_three_uneven_replicas_as_on_one_device(family):
    largest = zoo.train_both(*zoo.FAMILIES[family]())
    assert max(largest.values()) < TOLERANCE, largest


@pytest.mark.slow
@pytest.mark.parametrize("family", TRAINED[3:5])
def test_a_family_matches_one_device(family):
    model, input = zoo.FAMILIES[family]()
    assert_matches_one_device(convert_model(model), input, replicas=3)


@pytest.mark.slow
def test_a_detector_trains_with_losses_that_are_weighted_by_rows():
    net = zoo.build("retinanet_resnet50_fpn", num_classes=3, min_size=64, max_size=64).double()
    plain, parallel = twins(net, ["cpu"] * 2, 60.0, in_dims={"images": 0, "targets": 0}, out_dims=0)
    images, boxes = list(torch.rand(3, 3, 64, 64).double()), torch.tensor([[5.0, 5, 40, 40], [20, 10, 60, 50]]).double()
    targets = [{"boxes": boxes[:number], "labels": torch.tensor([1, 2])[:number]} for number in (1, 2, 1)]
    rows = torch.tensor([2.0, 1.0]).double()

    def step(model):
        loss = sum((losses * rows).sum() / rows.sum() for losses in model(images, targets).values())
        loss.backward()
        return [loss]

    assert_same_results(plain, parallel, step, 1e-8)
