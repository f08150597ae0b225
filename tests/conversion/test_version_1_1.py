"""What version 1.1 has pickled loads here, and trains on: the files in `data/version_1_1`.

They were written with version 1.1.0 and torch 2.13.0, once: what a later version writes would prove nothing about that
one. `Net`, `Norm` and `Wrapper` are the classes in them.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal, assert_same_step, doubles
from scripted import TorchStyle
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
    revert_model,
)

DATA = Path(__file__).parent / "data" / "version_1_1"
DEVICES = ["cpu"] * 2


class Norm(nn.BatchNorm2d):
    label = "mine"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.bn, self.own, self.head = nn.BatchNorm2d(3), Norm(3), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12))

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.own(self.bn(self.conv(input)).relu()))


class Wrapper(TorchStyle):
    label = "theirs"


def load(name: str, weights_only: bool = False) -> Any:
    return torch.load(DATA / f"{name}.pt", weights_only=weights_only)


def plain_copy(module: nn.Module) -> nn.Module:
    return revert_model(copy.deepcopy(module))


def test_model_trains_on_as_on_one_device():
    net = load("model")
    assert type(net.bn) is SynchronizedBatchNorm2d
    assert type(net.head[1]) is SynchronizedBatchNorm1d
    assert int(net.bn.num_batches_tracked) == 1
    assert_same_step(plain_copy(net), DataParallelWithCallback(net, DEVICES), doubles(5, 2, 3, 3))


def test_converted_subclass_is_the_one_that_is_made_here():
    layer = load("subclass")
    assert type(layer) is type(convert_model(Norm(3)))
    assert isinstance(layer, Norm)
    assert layer.label == "mine"
    assert_same_step(plain_copy(layer), DataParallelWithCallback(layer, DEVICES), doubles(5, 3, 2, 2))
    assert type(revert_model(layer)) is Norm


def test_wrapper_trains_on_as_on_one_device():
    parallel = load("wrapper")
    assert type(parallel) is DataParallelWithCallback
    assert parallel._sync_timeout == 7.0
    assert [str(device) for device in parallel.device_ids] == DEVICES
    assert_same_step(plain_copy(parallel.module), parallel, doubles(5, 2, 3, 3))


@pytest.mark.parametrize(("name", "plain"), [("patched", nn.DataParallel), ("patched_subclass", Wrapper)])
def test_patched_wrapper_trains_on_as_on_one_device(name, plain):
    parallel = load(name)
    assert parallel._sync_timeout == 7.0
    assert_same_step(plain_copy(parallel.module), parallel, doubles(5, 12))
    assert type(revert_model(parallel)) is plain


def test_layer_keeps_its_options():
    layer = load("options")
    assert type(layer) is SynchronizedBatchNorm
    assert (layer.eps, layer.momentum, layer.eps_mode, layer.group_size) == (1e-3, None, "clamp", 2)
    assert layer.process_group is None


def test_run_goes_on_where_the_checkpoint_ended():
    saved = load("checkpoint", weights_only=True)
    parallel = DataParallelWithCallback(convert_model(Net().double()), DEVICES)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01, momentum=0.9)
    parallel.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for batch, expected in zip(saved["batches"], saved["losses"], strict=True):
        optimizer.zero_grad()
        loss = parallel(batch).tanh().mul(batch.flatten(1)[:, :12]).square().sum()
        assert_equal(loss, expected)
        loss.backward()
        optimizer.step()
    for name, value in saved["end"].items():
        assert_equal(parallel.state_dict()[name], value, name)
