"""The recipes of docs/frameworks.md, run with the real frameworks: each trains to the numbers of one device.

Needs the extra `frameworks`; a test skips where its framework is not installed.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import device_lists
from helpers import as_devices, assert_equal, assert_same_state, classes, doubles, twins
from test_docs import blocks_of, section_of
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks.md"

pytestmark = pytest.mark.watchdog(120.0)


@pytest.fixture
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """Run the Python blocks of a section of the page as one module, in an empty folder, and return the module.

    The test names the section and what has to be installed: ``@pytest.mark.parametrize("recipe", [("fastai",
    "fastai")], indirect=True)``.
    """
    heading, package = request.param
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"recipe_of_{package}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes that a page defines can be pickled
    for block in blocks_of(PAGE):
        if block.language == "python" and section_of(PAGE, block) == heading:
            exec(compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec"), module.__dict__)
    return module


# timm, MONAI, segmentation_models_pytorch, ultralytics, pytorch-metric-learning: the wrapper goes where a module does


def images_and_labels(devices: Sequence[Any], size: int, labels: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 4, 4 and 3 images of three channels, and integers below 2 of a certain shape for each image."""
    first = as_devices(devices)[0]
    shapes = [(rows, 3, size, size) for rows in (4, 4, 3)]
    return [(doubles(*s, devices=devices), torch.randint(2, (s[0], *labels), device=first)) for s in shapes]


@pytest.mark.parametrize("devices", device_lists(2))
@pytest.mark.parametrize("recipe", [("timm", "timm")], indirect=True)
def test_timm_trains_freezes_and_averages_as_on_one_device(recipe, devices):
    from timm.utils import freeze

    plain, parallel = twins(recipe.timm.create_model("regnety_002", num_classes=3).double(), devices)
    batches = images_and_labels(devices, 64)
    for first_frozen in (False, True):
        for model in (plain, parallel.module) if first_frozen else ():
            model.zero_grad()
            freeze(model, ["s1"])
        expected = recipe.ModelEmaV3(plain, decay=0.9)
        for images, labels in batches:
            plain.zero_grad()
            recipe.cross_entropy(plain(images), labels).backward()
            torch.optim.SGD(plain.parameters(), lr=0.01).step()
            expected.update(plain)
        average = recipe.train(parallel.module, devices, batches)
        assert_same_state(parallel, plain)
        assert_same_state(average, expected.module)
    kinds = classes(parallel.module).values()
    assert {kind.__name__ for kind in kinds if "BatchNorm" in kind.__name__} == {
        "FrozenBatchNormAct2d",
        "SynchronizedBatchNormAct2d",
    }


@pytest.mark.parametrize("recipe", [("timm", "timm")], indirect=True)
def test_timm_builds_in_the_context_what_the_recipe_converts(recipe):
    with patch_sync_batchnorm():
        built = recipe.timm.create_model("regnety_002", num_classes=3)
    assert classes(built) == classes(recipe.model)


@pytest.fixture
def items() -> list[dict[str, Tensor]]:
    """Seven images, of which two batches are made."""
    from monai.data import MetaTensor

    values = [(doubles(1, 32, 32), doubles(1, 32, 32).gt(0).double()) for _ in range(7)]
    return [
        {"image": MetaTensor(image, meta={"filename_or_obj": f"image {i}"}), "label": MetaTensor(label)}
        for i, (image, label) in enumerate(values)
    ]


@pytest.mark.parametrize("devices", device_lists(2))
@pytest.mark.parametrize("name", ["UNet", "SegResNet"])
@pytest.mark.parametrize("recipe", [("MONAI", "monai")], indirect=True)
def test_monai_trains_with_its_tensors_as_on_one_device(recipe, name, items, devices):
    from monai.networks.nets import SegResNet

    if name == "UNet":
        options = {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1, "norm": "batch"}
        net = recipe.UNet(2, in_channels=1, out_channels=1, **options)
    else:
        net = SegResNet(2, init_filters=4, norm="batch", out_channels=1, blocks_down=(1, 1), blocks_up=(1,))
    plain, parallel = twins(net.double(), devices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the framework's own calls
        for network in (plain, parallel):
            trainer = recipe.train(network, items, as_devices(devices)[0])
            output = trainer.state.output[-1]  # of the last item of the last batch
            assert (type(output["pred"]) is recipe.MetaTensor) == (network is plain)
            assert output["image"].meta["filename_or_obj"] == "image 6"
            described = recipe.MetaTensor(output["pred"]).copy_meta_from(output["image"])
            assert described.meta["filename_or_obj"] == "image 6"
            assert torch.equal(described.as_tensor(), torch.as_tensor(output["pred"]))
    assert_same_state(parallel, plain)


@pytest.mark.parametrize("recipe", [("MONAI", "monai")], indirect=True)
def test_monai_gets_plain_tensors_from_any_number_of_chunks(recipe):
    network = DataParallelWithCallback(recipe.net.cpu(), ["cpu"] * 2)
    for rows in (1, 2):
        batch = recipe.MetaTensor(torch.randn(rows, 1, 16, 16))
        assert type(network.module(batch)) is recipe.MetaTensor
        assert type(network(batch)) is Tensor


ENCODERS = [
    "resnet18",
    "tu-mobilenetv3_small_050",
    *[pytest.param(n, marks=pytest.mark.slow) for n in ("timm-regnetx_002", "timm-efficientnet-b0", "tu-regnety_002")],
]


@pytest.mark.parametrize("devices", device_lists(2))
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("recipe", [("segmentation_models_pytorch", "segmentation_models_pytorch")], indirect=True)
def test_segmentation_models_train_as_on_one_device(recipe, name, devices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older encoders of timm are to be replaced by the newer ones
        net = recipe.smp.Unet(name, encoder_weights=None, classes=2, decoder_channels=(32, 16, 8, 8, 8))
    for module in net.modules():
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    plain, parallel = twins(net.double(), devices)
    layers = [module for module in parallel.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(layers) > 18
    assert all(isinstance(layer, SynchronizedBatchNorm2d) for layer in layers)
    batches = images_and_labels(devices, 64, (64, 64))
    for network in (plain, parallel):
        recipe.train(network, batches)
    assert_same_state(parallel, plain)


@pytest.mark.parametrize("recipe", [("segmentation_models_pytorch", "segmentation_models_pytorch")], indirect=True)
def test_one_image_for_each_replica_needs_synchronization(recipe):
    net = recipe.smp.Unet("resnet18", encoder_weights=None)
    batch = torch.randn(2, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a net that nobody has converted
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            DataParallelWithCallback(net, ["cpu"] * 2)(batch)
    assert DataParallelWithCallback(convert_model(net), ["cpu"] * 2)(batch).shape == (2, 1, 32, 32)


@pytest.fixture
def _defaults_to_float64() -> Iterator[None]:
    """Give what code makes without a dtype, such as the targets of a loss, that of the model."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def _settings_in_this_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))


@pytest.mark.usefixtures("_settings_in_this_folder", "_defaults_to_float64")
@pytest.mark.parametrize("devices", device_lists(2))
@pytest.mark.parametrize("recipe", [("ultralytics", "ultralytics")], indirect=True)
def test_ultralytics_trains_as_on_one_device(recipe, devices):
    net = recipe.DetectionModel("yolo11n.yaml", nc=2, verbose=False)
    net.args = recipe.get_cfg()
    plain, parallel = twins(net.double(), devices)
    batches = [recipe.random_batch(images, as_devices(devices)[0]) for images in (4, 4, 3)]
    for batch in batches:
        batch["cls"], batch["batch_idx"] = batch["cls"].double(), batch["batch_idx"].double()
    expected, actual = recipe.train(plain, plain, batches), recipe.train(parallel, parallel.module, batches)
    assert_equal(actual, expected)
    assert_same_state(parallel, plain)
    for model in (plain, parallel.module):
        model.eval()
    assert_equal(parallel(batches[0]["img"])[0], plain(batches[0]["img"])[0], "in eval mode", 1e-9)  # in pixels
    fused = [copy.deepcopy(model).fuse(verbose=False) for model in (plain, parallel.module)]
    assert not any(isinstance(module, nn.BatchNorm2d) for model in fused for module in model.modules())
    assert_equal(fused[1](batches[0]["img"])[0], fused[0](batches[0]["img"])[0], "fused", 1e-9)


@pytest.mark.usefixtures("_settings_in_this_folder")
@pytest.mark.parametrize("recipe", [("ultralytics", "ultralytics")], indirect=True)
def test_ultralytics_sets_what_layers_do_by_their_class(recipe):
    first = next(module for module in recipe.model.modules() if isinstance(module, nn.BatchNorm2d))
    assert isinstance(first, SynchronizedBatchNorm2d)
    assert (first.eps, first.momentum) == (0.001, 0.03)
    with patch_sync_batchnorm():
        model = recipe.DetectionModel("yolo11n.yaml", nc=2, verbose=False)
    first = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    assert (first.eps, first.momentum) == (1e-5, 0.1)  # If not, the page warns of what is no more.


@pytest.mark.parametrize("devices", device_lists(2))
@pytest.mark.parametrize("recipe", [("pytorch-metric-learning", "pytorch_metric_learning")], indirect=True)
def test_embeddings_train_as_on_one_device(recipe, devices):
    plain, parallel = twins(recipe.make_trunk().double(), devices)
    batches = [
        (doubles(rows, 1, 8, 8, devices=devices), torch.arange(rows, device=as_devices(devices)[0]) % 3)
        for rows in (8, 8, 5)
    ]
    for trunk in (plain, parallel):
        recipe.train(trunk, batches)
    assert_same_state(parallel, plain)


# Accelerate, Lightning: a process for each device

ENGINE = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from common import import_torchvision

import_torchvision()
code, calls, rank, size, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
torch.set_num_threads(1)
if size > 1:  # as the launcher of the framework would
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {**ranks, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    store = dist.FileStore(str(folder / "world"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
recipe = {"__name__": "recipe"}
exec(code, recipe)
for name, call in json.loads(calls).items():
    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 8, 8, dtype=torch.float64), torch.randint(3, (24,))
    names = {"net": recipe["make_net"]().double(), "data": TensorDataset(images, labels), "size": size}
    try:
        torch.save(eval(call, recipe, names).state_dict(), folder / f"{name}.{rank}")
    except ValueError as error:
        if name != "its own":
            raise
        (folder / f"{name}.{rank}").write_text(str(error))
if size > 1:
    dist.destroy_process_group()
"""

CALLS = {
    "Accelerate": {"accelerate": "train(net, data, 8)"},
    "Lightning": {
        "fabric": "train_with_fabric(net, data, 8, size)",
        "trainer": "train_with_trainer(net, data, 8, size)",
        "its own": "train_with_trainer(net, data, 8, size, sync_batchnorm=True)",
    },
}


def run_engine(heading: str, size: int, folder: Path) -> Path:
    """Train nets with the code of a section in `size` processes, and return the folder with what these have saved."""
    code = "".join(b.code for b in blocks_of(PAGE) if b.language == "python" and section_of(PAGE, b) == heading)
    folder.mkdir()
    path = [str(ROOT), str(ROOT / "docs" / "examples"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(size):
        arguments = [code, json.dumps(CALLS[heading]), str(rank), str(size), str(folder)]
        with (folder / f"stderr.{rank}").open("w") as stderr:
            command = [sys.executable, "-c", ENGINE, *arguments]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stderr, stderr=stderr)
        processes.append(process)
    try:
        codes = [process.wait(100.0) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(codes), "\n".join((folder / f"stderr.{rank}").read_text() for rank in range(size))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("heading", "package"), [("Accelerate", "accelerate"), ("Lightning", "lightning")])
def test_two_processes_of_an_engine_are_one_process(heading, package, tmp_path):
    pytest.importorskip(package)
    one, two = [run_engine(heading, size, tmp_path / str(size)) for size in (1, 2)]
    for name in CALLS[heading]:
        if name == "its own":
            for rank in range(2):
                assert (two / f"{name}.{rank}").read_text() == "SyncBatchNorm layers only work with GPU modules"
            continue
        expected = torch.load(one / f"{name}.0")
        assert int(expected["1.num_batches_tracked"]) == 3
        for rank in range(2):
            state = torch.load(two / f"{name}.{rank}")
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert_equal(state[key], value, f"{key} of {name}")


# What to give `parallel.module` to

TOOLS = "What to give `parallel.module` to"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", [(TOOLS, "torch")], indirect=True)
def test_counters_and_exports_take_the_module_of_a_wrapper(recipe):
    plain = revert_model(copy.deepcopy(recipe.net))
    with recipe.FlopCounterMode(display=False) as counter:
        plain(recipe.batch)
    assert counter.get_total_flops() == recipe.flops > 0
    with recipe.FlopCounterMode(display=False) as counter:
        recipe.parallel.train()(recipe.batch)
    assert counter.get_total_flops() < recipe.flops
    recipe.parallel.eval()
    assert_equal(recipe.program.module()(recipe.batch), recipe.net(recipe.batch))
    for export in (torch.export.export, torch.onnx.export):
        with pytest.raises(Exception, match=r"replica|Failed to export"):
            export(recipe.parallel, (recipe.batch,))


@pytest.mark.parametrize("recipe", [(TOOLS, "torchinfo")], indirect=True)
def test_a_summary_takes_the_module_of_a_wrapper(recipe):
    from torchinfo import summary

    plain = revert_model(copy.deepcopy(recipe.net))
    wanted = summary(plain, input_data=recipe.batch, verbose=0)
    found = summary(recipe.parallel.module, input_data=recipe.batch, verbose=0)
    assert (found.total_params, found.total_mult_adds) == (wanted.total_params, wanted.total_mult_adds)
    assert not summary(recipe.parallel, input_data=recipe.batch, verbose=0).total_mult_adds
    recipe.net.eval()
    recipe.parallel.training = True  # what `parallel.module.eval()` leaves behind
    summary(recipe.parallel, input_data=recipe.batch, verbose=0)
    assert recipe.net[1].training


@pytest.mark.parametrize("recipe", [(TOOLS, "captum")], indirect=True)
def test_attributions_are_those_of_the_module_of_a_wrapper(recipe):
    from captum.attr import DeepLift, IntegratedGradients, LayerGradCam

    parallel = recipe.parallel.double()
    plain = revert_model(copy.deepcopy(recipe.net))
    batch = recipe.batch.double().requires_grad_()
    for method in (IntegratedGradients, DeepLift, LayerGradCam):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its hooks
            values = [
                method(model, *([layers[0]] if method is LayerGradCam else [])).attribute(batch, target=1)
                for model, layers in ((plain, plain), (recipe.net, recipe.net), (parallel, recipe.net))
            ]
        expected, of_module, of_wrapper = values
        assert_equal(of_module, expected, method.__name__)
        if method is LayerGradCam:
            assert len(of_wrapper) == 2  # of the four in the batch
        else:
            assert_equal(of_wrapper, expected, method.__name__)


@pytest.mark.parametrize("recipe", [(TOOLS, "opacus")], indirect=True)
def test_opacus_finds_no_fault_with_converted_layers_until_it_trains(recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        net, plain = recipe.net.train(), revert_model(copy.deepcopy(recipe.net)).train()
        assert ModuleValidator.validate(plain, strict=False)
        assert not ModuleValidator.validate(net, strict=False)
        assert not any(isinstance(m, nn.BatchNorm2d) for m in ModuleValidator.fix(plain).modules())
        assert any(isinstance(m, SynchronizedBatchNorm2d) for m in ModuleValidator.fix(net).modules())
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(recipe.batch))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(NotImplementedError, match="SynchronizedBatchNorm2d"):
            PrivacyEngine().make_private(
                module=net, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
            )
