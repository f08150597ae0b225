"""Models of timm: most of them normalize and activate in one layer, which has a forward of its own."""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import torch
from conftest import slow
from helpers import assert_converts_and_reverts, assert_same_state, classes, skip_module_without
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    assert_synchronized,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
)

zoo = pytest.importorskip("zoo")  # which needs torchvision
skip_module_without("timm")  # Some Python has no wheel of what it needs.

pytestmark = pytest.mark.timeout(900)
NAME = "mobilenetv3_small_050"
QUICK = ["efficientnet_b0", "regnety_002", "mobilenetv3_small_050", "cspresnet50"]


def build() -> nn.Module:
    import timm

    return timm.create_model(NAME, num_classes=3)


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in zoo.TIMM if name not in QUICK))])
def test_every_batch_norm_of_a_family_converts_and_reverts_to_what_it_was(name):
    assert_converts_and_reverts(zoo.build_timm(name), name)


@pytest.mark.parametrize("name", [NAME, *slow("regnety_002")])
def test_a_family_trains_on_three_uneven_replicas_as_on_one_device(name):
    largest = zoo.train_both(*zoo.small_timm(name))
    assert max(largest.values()) < 1e-8, largest  # see `TOLERANCE` in test_torchvision.py


def test_a_net_built_in_the_context_is_the_converted_one():
    with patch_sync_batchnorm():
        net = build()
    assert classes(net) == classes(convert_model(build())) != classes(build())
    assert_synchronized(DataParallelWithCallback(net, ["cpu"] * 2))


def test_a_net_is_copied_pickled_and_loaded_as_before():
    plain, net = build(), convert_model(build())
    net.load_state_dict(plain.state_dict())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)):
        assert classes(copied) == classes(net)
        assert_same_state(copied, plain)
        assert classes(revert_model(copied)) == classes(plain)


@pytest.mark.parametrize("module", ["timmy.layers.norm_act", "timm.models.layers.norm_act"], ids=["other", "timm 0.6"])
def test_a_class_of_that_name_from_elsewhere_is_left(module):
    namespace = {"__module__": module, "forward": lambda self, input: input}
    stranger = types.new_class("BatchNormAct2d", (nn.BatchNorm2d,), {}, lambda found: found.update(namespace))
    net = nn.Sequential(nn.BatchNorm2d(3), stranger(3), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match="- 1: BatchNormAct2d has a forward of its own"):
        convert_model(net)
    assert [isinstance(layer, SynchronizedBatchNorm2d) for layer in net] == [True, False, True]
