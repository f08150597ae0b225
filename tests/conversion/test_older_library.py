"""What was written for the older library, or for a copied folder, works here, or is refused in one sentence."""

import ast
import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from helpers import TwoLayers, are_distinct_gpus, as_devices, assert_equal, assert_same_state, assert_same_step, doubles
from repository import PACKAGE, ROOT, copy_without_caches
from scripted import TorchStyle, of_class
from torch import nn

import sync_batchnorm
from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    SyncMaster,
    convert_model,
    patch_replication_callback,
)

LAYERS = "SynchronizedBatchNorm1d SynchronizedBatchNorm2d SynchronizedBatchNorm3d"
WRAPPER = "DataParallelWithCallback patch_replication_callback"
NAMES = {  # what the modules of the older library have in their `__all__`, and its package by its imports
    "sync_batchnorm": f"{LAYERS} set_sbn_eps_mode patch_sync_batchnorm convert_model {WRAPPER}",
    "sync_batchnorm.batchnorm": f"{LAYERS} set_sbn_eps_mode patch_sync_batchnorm convert_model",
    "sync_batchnorm.replicate": f"{WRAPPER} CallbackContext execute_replication_callbacks",
    "sync_batchnorm.comm": "SlavePipe SyncMaster",
}


@pytest.mark.smoke
@pytest.mark.parametrize("module", NAMES)
def test_modules_give_all_that_those_of_the_older_library_list(module):
    found: dict[str, Any] = {}
    exec(f"from {module} import *", found)
    assert all(found[name] is getattr(sync_batchnorm, name) for name in NAMES[module].split())
    assert found.get("DataParallel", nn.DataParallel) is nn.DataParallel  # which projects import from `replicate`


def test_page_says_what_to_write_instead_of_what_is_not_here():
    table = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8").split("### What to write instead")[1]
    for name in ("TorchTestCase", "BatchNorm2dReimpl", "_SynchronizedBatchNorm", "_ChildMessage", "_sum_ft"):
        assert re.search(rf"^\| .*`{name}\b.* \| .+ \|$", table.split("###")[0], re.M), name
        assert not hasattr(sync_batchnorm, name)


# Imports that cannot work: what stands before the import, the torch that is there, the error.

HERE = rf"for sync_batchnorm {re.escape(sync_batchnorm.__version__)}, but got"
OLD_PYTHON = 'import sys; sys.version_info, sys.version = (3, 9, 18), "3.9.18 (main)"'
PYTHON = rf"ImportError: expected Python 3.11 or newer {HERE} Python 3.9.18 \(\S+\); run it with a newer Python"
TORCH = rf"ImportError: expected torch 2.8 or newer {HERE} torch {{}} \(\S+torch/__init__.py\); run: pip install .*8'"
ACCEPTED = r"ImportError: cannot import name .+|ModuleNotFoundError: No module named 'torch\..+"  # in the next import
BROKEN = "libcudart.so.12: cannot open shared object file"
IMPORTS = [
    (OLD_PYTHON, "", PYTHON),
    *(("", f"__version__ = '{old}'", TORCH.format(re.escape(old))) for old in ("1.13.1+cu117", "2.7.1")),
    *(("", f"__version__ = '{new}'", ACCEPTED) for new in ("2.8.0a0+git1a2b3c4", "2.10.1+cpu")),
    ("", f"raise ImportError('{BROKEN}')", f"ImportError: {BROKEN}"),
]


@pytest.mark.parametrize(("before", "torch_file", "error"), IMPORTS)
def test_import_that_cannot_work_ends_with_one_sentence(before, torch_file, error, tmp_path):
    copy_without_caches(PACKAGE, tmp_path / "sync_batchnorm")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch_file)
    command = [sys.executable, "-B", "-S", "-c", f"{before}\nimport sync_batchnorm"]  # without installed packages
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.fullmatch(error, result.stderr.splitlines()[-1])
    if " expected " in error:
        files = [file for file in re.findall(r'^  File "(.+?)"', result.stderr, re.M) if "importlib" not in file]
        assert files == ["<string>", str(tmp_path / "sync_batchnorm" / "__init__.py")]
        assert result.stderr.count("Traceback") == 1


def test_older_python_can_parse_the_file_that_refuses_it():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(), feature_version=(3, 7))  # the oldest that can be asked for
    first = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.If))
    assert "version_info" in ast.unparse(tree.body[first].test)
    assert [ast.unparse(node) for node in tree.body[1:first]] == ["import sys", ast.unparse(tree.body[2])]


# A copy of the folder, inside of a package of a project.

INSIDE = "models.networks.sync_batchnorm"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A copy, imported as where this package is not."""
    root = tmp_path_factory.mktemp("project")
    copy_without_caches(PACKAGE, root / "models" / "networks" / "sync_batchnorm")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sync_batchnorm"]:
            patch.setitem(sys.modules, name, None)
        package = importlib.import_module(INSIDE)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        del sys.modules[name]


def test_copy_inside_of_a_package_has_a_version_and_the_modules_that_older_code_imports(copied):
    assert copied.__version__ == sync_batchnorm.__version__
    for module, names in NAMES.items():
        older = importlib.import_module(module.replace("sync_batchnorm", INSIDE))
        assert all(getattr(copied, name) is getattr(older, name) for name in names.split())


def test_pickles_of_a_copy_name_its_place_and_its_state_is_that_of_torch(copied):
    plain, model = (nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()).double() for _ in range(2))
    copied.convert_model(model).load_state_dict(plain.state_dict())
    parallel = copied.DataParallelWithCallback(model, ["cpu"] * 2)
    assert_same_step(plain, parallel, doubles(4, 3))
    layers, wrapper = f"{INSIDE}.layers.layer".encode(), f"{INSIDE}.wrapper.data_parallel".encode()
    for module, places in ((model, {layers}), (parallel, {layers, wrapper})):
        pickled = pickle.dumps(module)
        assert set(re.findall(rb"[a-z_.]*sync_batchnorm[\w.]*", pickled)) == places
        loaded = pickle.loads(pickled)
        assert type(loaded) is type(module)
        assert all(map(torch.equal, loaded.buffers(), model.buffers()))


class OlderLayer(nn.BatchNorm1d):
    """Puts a master into the context as a layer of the older library does."""

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        ctx.sync_master = type("SyncMaster", (), {"__module__": "their.norms.comm"})()


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(
    ("named", "package", "other"),  # the layer, its package, and the package of the wrapper
    [
        ("1 (SynchronizedBatchNorm1d)", "sync_batchnorm", INSIDE),
        ("the module itself (SynchronizedBatchNorm1d)", INSIDE, "sync_batchnorm"),
        ("1 (OlderLayer)", "their.norms", "sync_batchnorm"),
    ],
)
def test_layers_of_another_package_are_refused_at_once_where_replicas_take_turns(named, package, other):
    layer = OlderLayer(3) if package == "their.norms" else sys.modules[package].convert_model(nn.BatchNorm1d(3))
    model = layer if "itself" in named else nn.Sequential(nn.Linear(3, 3), layer)
    parallel, batch, called = sys.modules[other].DataParallelWithCallback(model, ["cpu"] * 2), torch.randn(6, 3), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: called.append(1))
    text = f"expected layers and wrapper of one package, but got {named} of {package} in a wrapper of {other}, whose "
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}replicas on one device run one at a time"):
        parallel(batch)
    assert (called, layer.num_batches_tracked) == ([], 0)  # A layer that has begun could wait.
    assert_equal(parallel.eval()(batch), model.eval()(batch))  # Then nothing is exchanged.


def test_layers_of_a_copy_train_in_replicas_that_run_at_once(copied):
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    parallel = patch_replication_callback(TorchStyle(copied.convert_model(copy.deepcopy(plain)), 2))
    assert_same_step(plain, parallel, doubles(5, 3))


class OwnCallbacks(TorchStyle):
    def replicate(self, module, device_ids):
        replicas = super().replicate(module, device_ids)
        sync_batchnorm.execute_replication_callbacks(replicas)
        return replicas


CONNECTED = {
    "patched": lambda parallel: [parallel, patch_replication_callback(parallel)][0],  # The older one returns nothing.
    "converted": convert_model,
    "callbacks of its own": lambda parallel: OwnCallbacks(parallel.module, 2),
}


@pytest.mark.smoke
@pytest.mark.parametrize("way", CONNECTED)
def test_data_parallel_that_is_connected_trains_as_on_one_device(way, devices):
    devices = devices if are_distinct_gpus(devices) and way in ("patched", "converted") else ["cpu"] * 2
    plain = TwoLayers().double().to(as_devices(devices)[0])
    model = convert_model(copy.deepcopy(plain))
    parallel = CONNECTED[way](of_class(nn.DataParallel, model, devices))
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, 6, 6, devices=devices))


# What the older library has saved.


def bare(cls: type) -> Any:
    return cls.__new__(cls)  # which the rest of a pickle fills


class OldMaster(NamedTuple):
    """Pickled as a `SyncMaster` of the older library is: with the method of the layer that it calls."""

    layer: Any

    def __reduce__(self) -> Any:
        return bare, (SyncMaster,), {"master_callback": self.layer._data_parallel_master}


class OldLayer(SynchronizedBatchNorm2d):
    """Pickled as a layer of the older library is, with the attributes by which that one synchronizes."""

    def _data_parallel_master(self, intermediates: Any) -> None: ...

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes = {"_sync_master": OldMaster(self), "_is_parallel": False, "_parallel_id": None, "_slave_pipe": None}
        return bare, (SynchronizedBatchNorm2d,), self.__dict__ | attributes


def convolution(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm).double()


@pytest.mark.parametrize("package", ["sync_batchnorm", "modeling.sync_batchnorm"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_whole_model_of_the_older_library_loads_and_trains_on(wrapped, package, monkeypatch):
    plain, old = convolution(nn.BatchNorm2d(4)), convolution(OldLayer(4))
    plain(doubles(4, 3, 5, 5))
    old.load_state_dict(plain.state_dict())
    data = pickle.dumps(DataParallelWithCallback(old, []) if wrapped else old, protocol=2)  # that of `torch.save`
    places = {"layers.layer": "batchnorm", "meeting.pipes": "comm", "wrapper.data_parallel": "replicate"}
    for place, older in places.items():  # of the classes here, and in the older library
        assert (f"csync_batchnorm.{place}".encode() in data) is (wrapped or older != "replicate")
        data = data.replace(f"csync_batchnorm.{place}".encode(), f"c{package}.{older}".encode())
        monkeypatch.setitem(sys.modules, f"modeling.sync_batchnorm.{older}", sys.modules[f"sync_batchnorm.{older}"])
    monkeypatch.setitem(sys.modules, "modeling", ModuleType("modeling"))
    model = pickle.loads(data)
    model = model.module if wrapped else model
    assert type(model[1]) is SynchronizedBatchNorm2d
    assert_same_step(plain, DataParallelWithCallback(model, ["cpu"] * 2), doubles(5, 3, 5, 5))
    assert b"sync_batchnorm" not in pickle.dumps(sync_batchnorm.revert_model(model))


def test_checkpoint_with_the_sums_of_an_older_layer_loads_strictly():
    plain, model = convolution(nn.BatchNorm2d(4)), convert_model(convolution(nn.BatchNorm2d(4)))
    sums = {f"1.{name}": torch.ones(4) for name in ("_tmp_running_mean", "_tmp_running_var", "_running_iter")}
    checkpoint = plain.state_dict() | sums
    model.load_state_dict(checkpoint)
    assert len(checkpoint) == 10
    assert_same_state(model, plain)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"1._tmp\""):
        model.load_state_dict(checkpoint | {"1._tmp": torch.ones(4)})
