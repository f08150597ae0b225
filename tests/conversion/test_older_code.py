"""Code that was written for a copied folder of the older library trains here as on one device."""

import copy
import functools
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import TwoLayers, are_distinct_gpus, as_devices, assert_equal, assert_same_step, doubles, in_threads
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    convert_model,
    execute_replication_callbacks,
    patch_replication_callback,
    revert_model,
)
from sync_batchnorm.comm import SyncMaster
from sync_batchnorm.wrapper.data_parallel import AnyDeviceDataParallel


def data_parallel(module: nn.Module, devices: Sequence[Any]) -> nn.DataParallel:
    """Return the `nn.DataParallel` that is there before it is patched."""
    if are_distinct_gpus(devices):
        return nn.DataParallel(module, devices)
    parallel, synchronized = nn.DataParallel(nn.Identity()), DataParallelWithCallback(module, devices)
    for name in ("module", "device_ids", "output_device", "dim", "src_device_obj"):
        setattr(parallel, name, getattr(synchronized, name))
    return parallel


def patched(module: nn.Module, devices: Sequence[Any]) -> nn.DataParallel:
    parallel = data_parallel(module, devices)
    patch_replication_callback(parallel)  # The older one returns nothing.
    return parallel


WAYS: dict[str, Callable[[nn.Module, Sequence[Any]], nn.DataParallel]] = {
    "wrapped": lambda module, devices: DataParallelWithCallback(module, device_ids=devices),
    "patched": patched,
    "converted": lambda module, devices: convert_model(data_parallel(module, devices)),
}


def on(devices: Sequence[Any], module: nn.Module) -> nn.Module:
    return module.double().to(as_devices(devices)[0])


# What public projects do with it.


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_model_trains_in_every_wrapper_as_on_one_device(devices, way):
    plain = on(devices, TwoLayers())
    parallel = way(convert_model(copy.deepcopy(plain)), devices)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(5, 3, 6, 6, devices=devices))


def base_of(devices: Sequence[Any]) -> type[nn.DataParallel]:
    """Return the base class for wrappers of a project's own: that of torch needs distinct GPUs."""
    return nn.DataParallel if are_distinct_gpus(devices) else AnyDeviceDataParallel


def test_patched_wrapper_with_a_scatter_and_gather_of_its_own_synchronizes(devices):
    class Wrapper(base_of(devices)):
        def scatter(self, inputs, kwargs, device_ids):
            used.append("scatter")
            parts = inputs[0].split([5, 2])
            return [[part.to(device)] for part, device in zip(parts, as_devices(device_ids), strict=True)], [{}, {}]

        def gather(self, outputs, output_device):
            used.append("gather")
            return torch.cat([output.to(as_devices([output_device])[0]) for output in outputs])

    used: list[str] = []
    plain = on(devices, nn.BatchNorm1d(3))
    parallel = Wrapper(convert_model(copy.deepcopy(plain)), devices)
    patch_replication_callback(parallel)
    assert_same_step(plain, parallel, doubles(7, 3, devices=devices))
    assert used == ["scatter", "gather"]


def test_wrapper_that_calls_the_callbacks_itself_synchronizes(devices):
    class OwnReplicate(base_of(devices)):
        def replicate(self, module, device_ids):
            modules = super().replicate(module, device_ids)
            execute_replication_callbacks(modules)
            return modules

        def parallel_apply(self, replicas, inputs, kwargs):  # as torch does, which needs distinct GPUs
            if are_distinct_gpus(devices):
                return super().parallel_apply(replicas, inputs, kwargs)
            return in_threads(
                *[functools.partial(replica, *args) for replica, args in zip(replicas, inputs, strict=True)]
            )

    plain = on(devices, nn.BatchNorm1d(3))
    parallel = OwnReplicate(convert_model(copy.deepcopy(plain)), devices)
    assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


# Whole models that the older library has saved.


def bare(cls: type) -> Any:
    """Make the object that the rest of a pickle fills."""
    return cls.__new__(cls)


class OldMaster:
    """Pickled as a `SyncMaster` of the older library is: with the method of the layer that it calls."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __reduce__(self) -> Any:
        return bare, (SyncMaster,), {"master_callback": self.layer._data_parallel_master}


class OldLayer(SynchronizedBatchNorm2d):
    """Pickled as a layer of the older library is, with the attributes by which that one synchronizes."""

    def _data_parallel_master(self, intermediates: Any) -> None:
        """Only its name is in the pickle."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes = {"_sync_master": OldMaster(self), "_is_parallel": False, "_parallel_id": None, "_slave_pipe": None}
        return bare, (SynchronizedBatchNorm2d,), self.__dict__ | attributes


@pytest.mark.parametrize("wrapped", [False, True])
def test_whole_model_of_the_older_library_loads_and_trains_on(wrapped):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    plain(doubles(4, 3, 5, 5))
    old = nn.Sequential(nn.Conv2d(3, 4, 3), OldLayer(4)).double()
    old.load_state_dict(plain.state_dict())
    file = io.BytesIO()
    torch.save(DataParallelWithCallback(old, []) if wrapped else old, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    model = model.module if wrapped else model
    assert type(model[1]) is SynchronizedBatchNorm2d
    assert_same_step(plain, DataParallelWithCallback(model, ["cpu"] * 2), doubles(5, 3, 5, 5))
    assert b"sync_batchnorm" not in pickle.dumps(revert_model(model))


def test_checkpoint_with_the_sums_of_an_older_layer_loads_strictly():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    checkpoint = plain.state_dict()
    for name in ("_tmp_running_mean", "_tmp_running_var", "_running_iter"):
        checkpoint[f"1.{name}"] = torch.ones(4)
    model = convert_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    model.load_state_dict(checkpoint)
    assert len(checkpoint) == 10
    for name, tensor in plain.state_dict().items():
        assert_equal(model.state_dict()[name], tensor)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"1._tmp\""):
        model.load_state_dict(checkpoint | {"1._tmp": torch.ones(4)})


def test_whole_model_from_a_folder_inside_of_a_package_loads_under_its_name(monkeypatch):
    data = pickle.dumps(nn.Sequential(OldLayer(4)), protocol=2)  # that of `torch.save`
    older = data.replace(b"csync_batchnorm.layers.layer", b"csync_batchnorm.batchnorm")  # where that one has its layers
    older = older.replace(b"csync_batchnorm.meeting.pipes", b"csync_batchnorm.comm")  # and its pipes
    inside = older.replace(b"csync_batchnorm.", b"cmodeling.sync_batchnorm.")
    assert len({data, older, inside}) == 3
    monkeypatch.setitem(sys.modules, "modeling", types.ModuleType("modeling"))
    for name in ("batchnorm", "comm", "replicate"):
        module = importlib.import_module(f"sync_batchnorm.{name}")
        monkeypatch.setitem(sys.modules, f"modeling.sync_batchnorm.{name}", module)
    assert type(pickle.loads(inside)[0]) is SynchronizedBatchNorm2d
