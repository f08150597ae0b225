"""What version 1.1 has pickled loads here, and trains on: the files in `data/version_1_1`.

They were written by `write` with version 1.1.0 and torch 2.13.0, once: ``python -c "import test_version_1_1 as t;
t.write()"`` in this folder. What a later version writes would prove nothing about that one.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal, assert_same_step, doubles, randomize
from scripted import TorchStyle, stock
from torch import Tensor, nn

import sync_batchnorm
from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
    patch_replication_callback,
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


def run(parallel: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> Tensor:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = parallel(batch).tanh().mul(batch.flatten(1)[:, :12]).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def start() -> tuple[DataParallelWithCallback, torch.optim.Optimizer]:
    parallel = DataParallelWithCallback(convert_model(randomize(Net()).double()), DEVICES)
    return parallel, torch.optim.SGD(parallel.parameters(), 0.01, momentum=0.9)


def write() -> None:
    """Write all files, as it was done once."""
    assert sync_batchnorm.__version__ == "1.1.0"
    torch.manual_seed(0)
    net = convert_model(randomize(Net()).double())
    parallel = DataParallelWithCallback(net, DEVICES, timeout=7.0)
    parallel(doubles(4, 2, 3, 3))
    objects = {
        "model": net,
        "subclass": net.own,
        "wrapper": parallel,
        "patched": patch_replication_callback(stock(copy.deepcopy(net.head)), timeout=7.0),
        "patched_subclass": patch_replication_callback(Wrapper(copy.deepcopy(net.head), 2), timeout=7.0),
        "options": SynchronizedBatchNorm(3, eps=1e-3, momentum=None, eps_mode="clamp", group_size=2),
    }
    for name, saved in objects.items():
        torch.save(saved, DATA / f"{name}.pt")
    resumed, optimizer = start()
    batches = doubles(4, 5, 2, 3, 3)
    run(resumed, optimizer, batches[:2])
    state = copy.deepcopy({"model": resumed.state_dict(), "optimizer": optimizer.state_dict()})
    losses = run(resumed, optimizer, batches[2:])
    torch.save({**state, "batches": batches[2:], "losses": losses, "end": resumed.state_dict()}, DATA / "checkpoint.pt")


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
    parallel, optimizer = start()
    parallel.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert_equal(run(parallel, optimizer, saved["batches"]), saved["losses"])
    for name, value in saved["end"].items():
        assert_equal(parallel.state_dict()[name], value, name)
