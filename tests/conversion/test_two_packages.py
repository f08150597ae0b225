"""Layers of one package in the wrapper of another: of a copy of this one, and of the older library."""

import copy
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import are_distinct_gpus, as_devices, assert_same_step, doubles
from repository import PACKAGE, copy_without_caches
from scripted import WRAPPERS, TorchStyle
from torch import nn

import sync_batchnorm
from sync_batchnorm import DataParallelWithCallback, patch_replication_callback

PROJECT = "project_with_a_copy"
COPY = f"{PROJECT}.norms"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Import a copy of the package, inside of a package of a project."""
    root = tmp_path_factory.mktemp("root")
    (root / PROJECT).mkdir()
    copy_without_caches(PACKAGE, root / PROJECT / "norms")
    sys.path.insert(0, str(root))
    yield importlib.import_module(COPY)
    sys.path.remove(str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] == PROJECT]:
        del sys.modules[name]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()


def assert_names_both(parallel: nn.DataParallel, layer: str, package: str, wrapper: str, batch: torch.Tensor) -> None:
    text = (
        rf"^expected layers and wrapper of one package, but got {layer} of {package} in a wrapper of {wrapper}, whose "
        r"replicas on one device run one at a time, .* import both from the same package$"
    )
    before, called = copy.deepcopy(parallel.module.state_dict()), []
    hooks = [module.register_forward_pre_hook(lambda *_: called.append(1)) for module in parallel.module.modules()]
    with pytest.raises(RuntimeError, match=text):
        parallel(batch)
    assert called == []  # A layer that has begun could wait.
    for hook in hooks:
        hook.remove()
    for name, value in parallel.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("layers_are_copied", [False, True])
def test_layers_of_a_copy_are_refused_at_once_where_replicas_take_turns(devices, layers_are_copied, copied):
    layers, wrapper = (copied, sync_batchnorm) if layers_are_copied else (sync_batchnorm, copied)
    plain = net().to(as_devices(devices)[0])
    parallel = wrapper.DataParallelWithCallback(layers.convert_model(copy.deepcopy(plain)), devices)
    batch = doubles(5, 3, devices=devices)
    if are_distinct_gpus(devices):
        assert_same_step(plain, parallel, batch)
        return
    layer = r"1 \(SynchronizedBatchNorm1d\)"
    assert_names_both(parallel, layer, layers.__name__, wrapper.__name__, batch)
    torch.testing.assert_close(parallel.eval()(batch), plain.eval()(batch))  # Then nothing is exchanged.


def test_layers_of_a_copy_train_in_replicas_that_run_at_once(copied):
    plain = net()
    parallel = patch_replication_callback(TorchStyle(copied.convert_model(copy.deepcopy(plain)), 2))
    assert_same_step(plain, parallel, doubles(5, 3))


def test_root_that_is_a_layer_of_a_copy_is_named_in_a_patched_wrapper(copied):
    parallel = WRAPPERS["patched"](copied.SynchronizedBatchNorm1d(3))
    assert_names_both(parallel, "the module itself .*", COPY, "sync_batchnorm", torch.randn(6, 3))


# The pipes of the older library: the master waits on a queue of its own.


class OlderMaster:
    def __init__(self) -> None:
        self.slaves, self.messages, self.arrived = 0, list[Any](), threading.Semaphore(0)

    def register_slave(self, identifier: int) -> Any:
        self.slaves += 1
        return OlderPipe(self)

    def run_master(self, message: Any) -> Any:
        for _ in range(self.slaves):
            self.arrived.acquire()
        return [*self.messages, message]


class OlderPipe(tuple):
    """Is a tuple, as the older one is a named tuple."""

    def __new__(cls, master: OlderMaster) -> Any:
        return tuple.__new__(cls, (master,))

    def run_slave(self, message: Any) -> None:
        self[0].messages.append(message)
        self[0].arrived.release()


for cls, name in ((OlderMaster, "SyncMaster"), (OlderPipe, "SlavePipe")):
    cls.__name__, cls.__module__ = name, "their.norms.comm"


class OlderLayer(nn.BatchNorm1d):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.master = OlderMaster()

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.sync_master = self.master
        else:
            self.pipe = ctx.sync_master.register_slave(copy_id)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.pipe.run_slave(1) if hasattr(self, "pipe") else self.master.run_master(1)
        return input


def test_layers_of_the_older_library_are_refused_before_the_first_turn():
    parallel = DataParallelWithCallback(nn.Sequential(net(), OlderLayer(3)), ["cpu"] * 2, timeout=2)
    assert_names_both(parallel, r"1 \(OlderLayer\)", "their.norms", "sync_batchnorm", doubles(4, 3))
    parallel.module[1].eval()
    parallel(doubles(4, 3))
