"""The recipes of docs/frameworks.md and docs/examples/frameworks, with the real frameworks: all train as one device.

Needs the extra `frameworks`; a test skips where its framework is not installed.
"""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import CUDA_COUNT, slow
from helpers import as_devices, assert_equal, assert_same_state, assert_same_tree, classes, doubles, twins
from repository import ROOT, blocks_of
from torch import Tensor, nn

from sync_batchnorm import SynchronizedBatchNorm2d, patch_sync_batchnorm, revert_model

PAGE = ROOT / "docs" / "frameworks.md"
PROGRAMS = ROOT / "docs" / "examples" / "frameworks"

pytestmark = [
    pytest.mark.timeout(900),
    # What frameworks use of others, and do with their default options.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
]


def code_of(name: str) -> str:
    """Return a program, or the Python blocks of a section of the page, each on the lines where it stands."""
    program, code = PROGRAMS / f"with_{name}.py", ""
    if program.exists():
        return program.read_text(encoding="utf-8")
    for block in blocks_of(PAGE):
        if block.language == "python" and block.section.lower() == name:
            code += "\n" * (block.line - 1 - code.count("\n")) + block.code
    return code


@pytest.fixture
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """Run the recipe for a package, if that is installed, in an empty folder, and return it as a module."""
    pytest.importorskip(request.param)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    module = types.ModuleType(f"recipe_of_{request.param}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes that a recipe defines can be pickled
    code = code_of(request.param) or code_of("tools that need `parallel.module`")
    program = PROGRAMS / f"with_{request.param}.py"
    exec(compile(code, str(program if program.exists() else PAGE), "exec"), module.__dict__)
    return module


def test_page_has_all_programs_and_the_versions_that_tests_install():
    page, setup = PAGE.read_text(encoding="utf-8"), (ROOT / "setup.py").read_text(encoding="utf-8")
    programs = {program.name: program.read_text(encoding="utf-8") for program in PROGRAMS.glob("*.py")}
    assert set(re.findall(r"\[`(with_\w+\.py)`\]", page)) == set(programs)
    versions = re.findall(r"\b\d+\.\d+\.\d+\b", "".join([page, *programs.values()]))
    assert len(versions) > 2 * len(programs)
    assert set(versions) <= set(re.findall(r"==([\d.]+)", setup))


@pytest.fixture(autouse=True)
def _no_monitor_of_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tqdm start no thread, which would stay."""
    with suppress(ImportError):  # where no framework that uses it is installed
        monkeypatch.setattr(importlib.import_module("tqdm").tqdm, "monitor_interval", 0)


# transformers

several_gpus = [pytest.mark.cuda, pytest.mark.skipif(CUDA_COUNT < 2, reason="needs several GPUs")]
QUIET = {"report_to": "none", "disable_tqdm": True}
WHERE = [True, pytest.param(False, marks=several_gpus)]  # whether replicas are on the CPU, or on all GPUs


def trained_by(trainer: type, recipe: types.ModuleType, folder: Path, use_cpu: bool, **options: Any) -> Any:
    """Train a ResNet with batches of 12, of which the last is one of 5, and evaluate and save after each epoch."""
    torch.manual_seed(1)
    data = [{"pixel_values": doubles(3, 32, 32), "labels": i % 3} for i in range(29)]
    torch.manual_seed(0)
    model = recipe.ResNetForImageClassification(recipe.config).double()
    devices = 1 if use_cpu else torch.cuda.device_count()
    options_of_training = {"per_device_train_batch_size": 12 // devices, "num_train_epochs": 2, "learning_rate": 0.01}
    options_of_training |= {"eval_strategy": "epoch", "save_strategy": "epoch", **QUIET}
    arguments = recipe.TrainingArguments(str(folder), use_cpu=use_cpu, **options_of_training)
    built = trainer(model, arguments, train_dataset=data, eval_dataset=data[:7])
    built.train(**options)
    return built


@pytest.mark.parametrize("use_cpu", WHERE)
@pytest.mark.parametrize("recipe", ["transformers"], indirect=True)
def test_a_trainer_trains_and_resumes_to_the_numbers_of_one_device(recipe, use_cpu, tmp_path):
    one_device = type("OneDevice", (recipe.SynchronizedTrainer,), {"_wrap_model": lambda self, model, **kwargs: model})
    plain = trained_by(one_device, recipe, tmp_path / "plain", use_cpu=True)
    ours = trained_by(recipe.SynchronizedTrainer, recipe, tmp_path / "ours", use_cpu)
    assert len(ours.model_wrapped.device_ids) > 1
    assert_same_state(ours.model, plain.model)
    losses = [[entry["eval_loss"] for entry in of.state.log_history if "eval_loss" in entry] for of in (ours, plain)]
    assert_equal(*torch.tensor(losses).double())
    first, last = sorted((tmp_path / "ours").iterdir(), key=lambda folder: int(folder.name.partition("-")[2]))
    assert_same_state(recipe.ResNetForImageClassification.from_pretrained(last, dtype=torch.float64), plain.model)
    again = {"resume_from_checkpoint": str(first)}
    resumed = trained_by(recipe.SynchronizedTrainer, recipe, tmp_path / "resumed", use_cpu, **again)
    assert resumed.state.global_step == plain.state.global_step == 6
    assert_same_state(resumed.model, plain.model)


@pytest.mark.parametrize("use_cpu", WHERE)
@pytest.mark.parametrize("recipe", ["transformers"], indirect=True)
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0, but all input tensors were:UserWarning")
def test_bf16_of_a_trainer_takes_effect_in_compute_loss(recipe, use_cpu, tmp_path):
    arguments = recipe.TrainingArguments(str(tmp_path), use_cpu=use_cpu, bf16=True, **QUIET)
    trainer = recipe.SynchronizedTrainer(recipe.model, arguments, train_dataset=recipe.data)
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    loss, outputs = trainer.compute_loss(trainer.model_wrapped, batch, return_outputs=True)
    assert (loss.dtype, outputs.logits.dtype) == (torch.float32, torch.bfloat16)


# fastai

DEVICES = [["cpu"] * 2, pytest.param([0, 1], marks=several_gpus)]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()
    second = nn.Conv2d(6, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(4, 3)).double()


def learner_of(recipe: types.ModuleType, device: Any, *callbacks: Any) -> Any:
    """Return a learner with batches of 12, of which the last is one of 5, and a batch to validate with."""
    images = torch.randn(36, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def image_of(i: int) -> Any:
        return images[i].as_subclass(recipe.TensorImage)  # whose constructor would make it float32

    datasets = recipe.Datasets(range(36), [[image_of], [recipe.label_of]], splits=[range(29), range(29, 36)])
    dls = datasets.dataloaders(bs=12, num_workers=0, shuffle=False, drop_last=False, device=torch.device(device))
    # The recorder of fastai averages losses of float32.
    return recipe.Learner(dls, small_net(), lambda p, y: nn.functional.cross_entropy(p, y).float(), cbs=callbacks)


def callback(**attributes: Any) -> Any:
    core = importlib.import_module("fastai.callback.core")
    return type("OfATest", (core.Callback,), attributes)()


def fit(learn: Any, epochs: int = 2) -> None:
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs, 0.01)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("recipe", ["fastai"], indirect=True)
def test_a_learner_trains_to_the_numbers_of_one_device(recipe, devices):
    seen: set[Any] = set()
    see = callback(after_batch=lambda self: seen.add(type(self.model)))
    plain = learner_of(recipe, devices[0])
    ours = learner_of(recipe, devices[0], recipe.SynchronizedTrainer(devices), see)
    [fit(learn) for learn in (plain, ours)]
    assert seen == {recipe.DataParallelWithCallback}
    assert_same_state(ours.model, plain.model)
    ours.save("saved")
    fit(plain, 1)
    resumed = learner_of(recipe, devices[0], recipe.SynchronizedTrainer(devices)).load("saved")
    fit(resumed, 1)
    assert_same_state(resumed.model, plain.model)
    losses = [torch.tensor(learn.recorder.values).double() for learn in (resumed, plain)]
    assert_equal(*losses)  # in training, and of the validation


@pytest.mark.parametrize("recipe", ["fastai"], indirect=True)
def test_an_interrupted_fit_of_fastai_can_be_repeated(recipe):
    interrupt = callback(before_fit=Mock(side_effect=KeyboardInterrupt))
    learn = learner_of(recipe, "cpu", recipe.SynchronizedTrainer(["cpu"] * 2), interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(learn)
    assert type(learn.model) is recipe.DataParallelWithCallback
    learn.remove_cb(interrupt)
    fit(learn, 1)
    assert type(learn.model) is nn.Sequential


@pytest.mark.parametrize("devices", DEVICES[1:])
@pytest.mark.parametrize("recipe", ["fastai"], indirect=True)
def test_what_to_parallel_has_wrapped_can_be_converted(recipe, devices):
    def convert(self: Any) -> None:
        recipe.convert_model(self.learn.model)

    converting = callback(order=recipe.ParallelTrainer.order + 1, before_fit=convert)
    plain, ours = learner_of(recipe, devices[0]), learner_of(recipe, devices[0], converting).to_parallel(devices)
    fit(plain)
    fit(ours)
    assert_same_state(ours.model, plain.model)


# skorch


@pytest.fixture
def _in_float64(recipe: types.ModuleType) -> Iterator[None]:
    """Build models, and what a loss makes without a dtype, in float64, once the code of the page has run."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def samples() -> tuple[Any, Any]:
    inputs = doubles(29, 6).numpy()
    return inputs, (inputs[:, 0] > 0).astype("int64")


def options_of(recipe: types.ModuleType, devices: Sequence[Any]) -> dict[str, Any]:
    """Return options with batches of 12, so that the last of an epoch is smaller."""
    return recipe.options | {"batch_size": 12, "device": "cpu" if devices[0] == "cpu" else "cuda"}


def deep_net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("recipe", ["skorch"], indirect=True)
def test_a_net_its_clone_and_its_pickle_train_to_the_numbers_of_one_device(recipe, devices):
    from sklearn.base import clone

    options = options_of(recipe, devices) | {"optimizer": torch.optim.Adam, "lr": 0.01, "max_epochs": 3}
    X, y = samples()
    plain = recipe.NeuralNetClassifier(deep_net(), **options).fit(X, y)
    wrapper, model = recipe.DataParallelWithCallback, recipe.convert_model(deep_net())
    net = recipe.NeuralNetClassifier(wrapper, module__module=model, module__device_ids=devices, **options)
    copied = clone(net)
    for fitted in (net.fit(X, y), copied.fit(X, y)):
        assert_same_state(fitted.module_.module, plain.module_)
        assert_equal(*(torch.tensor(n.predict_proba(X)) for n in (fitted, plain)))
    assert net.module_.module is not copied.module_.module
    loaded = pickle.loads(pickle.dumps(net))
    for more in (plain, loaded):
        more.partial_fit(X, y)
    assert_same_state(loaded.module_.module, plain.module_)


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("recipe", ["skorch"], indirect=True)
def test_a_grid_search_finds_the_scores_of_one_device(recipe, devices):
    def fitted(function: Any) -> Any:
        torch.manual_seed(0)
        options = options_of(recipe, devices) | {"module__width": 8, "module__devices": devices}
        net = recipe.NeuralNetClassifier(function, **options)
        return recipe.GridSearchCV(net, {"module__width": [4, 8]}, cv=3, scoring="neg_log_loss").fit(*data)

    data = samples()
    expected = fitted(lambda width, devices: revert_model(recipe.parallel(width, devices).module))
    actual = fitted(recipe.parallel)
    assert type(actual.best_estimator_.module_) is recipe.DataParallelWithCallback
    assert actual.best_params_ == expected.best_params_
    assert_equal(*(torch.tensor(search.cv_results_["mean_test_score"]) for search in (actual, expected)))
    assert_same_state(actual.best_estimator_.module_.module, expected.best_estimator_.module_)


# Ignite


def engine_of(recipe: types.ModuleType, model: nn.Module, device: Any, buffers: str) -> dict[str, Any]:
    """Return what the page saves in a checkpoint."""
    optimizer = recipe.idist.auto_optim(torch.optim.Adam(model.parameters(), 0.01))
    trainer = recipe.create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=device)
    ema = recipe.EMAHandler(model, momentum=0.1, handle_buffers=buffers)
    ema.attach(trainer)
    return {"model": model, "optimizer": optimizer, "trainer": trainer, "ema": ema.ema_model}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("buffers", ["copy", "update"])
@pytest.mark.parametrize("recipe", ["ignite"], indirect=True)
def test_an_engine_trains_averages_and_resumes_to_the_numbers_of_one_device(recipe, buffers, devices):
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Loss

    device = torch.device("cpu" if devices[0] == "cpu" else "cuda")
    data = [(doubles(size, 3, 9, 9), torch.arange(size) % 3) for size in (12, 12, 5)]

    def parallel() -> nn.Module:
        on_cpu = recipe.DataParallelWithCallback(small_net(), devices) if device.type == "cpu" else None
        return recipe.convert_model(on_cpu or recipe.idist.auto_model(small_net()))

    def loss_of(model: nn.Module) -> torch.Tensor:
        evaluator = create_supervised_evaluator(model, {"loss": Loss(nn.CrossEntropyLoss())}, device=device)
        return torch.tensor(evaluator.run(data).metrics["loss"]).double()

    plain = engine_of(recipe, small_net().to(device), device, buffers)
    plain["trainer"].run(data, max_epochs=3)
    ours = engine_of(recipe, parallel(), device, buffers)
    saver = recipe.Checkpoint(ours, recipe.DiskSaver("saved"))
    ours["trainer"].add_event_handler(recipe.Events.EPOCH_COMPLETED(once=2), saver)
    ours["trainer"].run(data, max_epochs=3)
    resumed = engine_of(recipe, parallel(), device, buffers)
    recipe.Checkpoint.load_objects(resumed, torch.load(saver.last_checkpoint))
    assert resumed["trainer"].state.epoch == 2
    resumed["trainer"].run(data, max_epochs=3)
    for found in (ours, resumed):
        for name in ("model", "ema"):
            assert type(found[name]) is recipe.DataParallelWithCallback
            assert_same_state(found[name], plain[name])
            assert_equal(loss_of(found[name]), loss_of(plain[name]))
    recipe.Checkpoint.load_objects({"model": small_net()}, torch.load(saver.last_checkpoint))


# timm, MONAI, segmentation_models_pytorch, ultralytics, pytorch-metric-learning: the wrapper goes where a module does


def images_and_labels(devices: Sequence[Any], size: int, labels: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 4, 4 and 3 images, and integers below 2 of a shape for each image."""
    first = as_devices(devices)[0]
    shapes = [(rows, 3, size, size) for rows in (4, 4, 3)]
    return [(doubles(*s, devices=devices), torch.randint(2, (s[0], *labels), device=first)) for s in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["timm"], indirect=True)
def test_timm_trains_freezes_and_averages_as_on_one_device(recipe, devices):
    from timm.utils import freeze

    plain, parallel = twins(recipe.timm.create_model("regnety_002", num_classes=3).double(), devices)
    batches = images_and_labels(devices, 64)
    for model in (plain, parallel.module):
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
    kinds = {kind.__name__ for kind in classes(parallel.module).values() if "BatchNorm" in kind.__name__}
    assert kinds == {"FrozenBatchNormAct2d", "SynchronizedBatchNormAct2d"}


@pytest.mark.filterwarnings("ignore")  # of the framework's own calls
@pytest.mark.parametrize("recipe", ["monai"], indirect=True)
def test_monai_trains_with_its_tensors_as_on_one_device(recipe, devices):
    items = []
    for i in range(7):  # two batches
        image = recipe.MetaTensor(doubles(1, 32, 32), meta={"filename_or_obj": f"image {i}"})
        items.append({"image": image, "label": recipe.MetaTensor(doubles(1, 32, 32).gt(0).double())})
    options = {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1, "norm": "batch"}
    plain, parallel = twins(recipe.UNet(2, in_channels=1, out_channels=1, **options).double(), devices)
    for network in (plain, parallel):
        trainer = recipe.train(network, items, as_devices(devices)[0])
        output = trainer.state.output[-1]  # of the last item of the last batch
        assert (type(output["pred"]) is recipe.MetaTensor) == (network is plain)
        described = recipe.MetaTensor(output["pred"]).copy_meta_from(output["image"])
        assert [of.meta["filename_or_obj"] for of in (output["image"], described)] == ["image 6"] * 2
        assert torch.equal(described.as_tensor(), torch.as_tensor(output["pred"]))
    assert_same_state(parallel, plain)


ENCODERS = ["tu-mobilenetv3_small_050", *slow("mobilenet_v2", "timm-efficientnet-b0", "tu-regnety_002")]


@pytest.mark.filterwarnings("ignore")  # The older encoders of timm are to be replaced by the newer ones.
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("recipe", ["segmentation_models_pytorch"], indirect=True)
def test_segmentation_models_train_as_on_one_device(recipe, name, devices):
    net = recipe.smp.Unet(name, encoder_weights=None, classes=2, decoder_channels=(32, 16, 8, 8, 8))
    for module in net.modules():
        module.drop_prob = 0.0  # of its `DropPath`
    plain, parallel = twins(net.double(), devices)
    kinds = [kind for kind in classes(parallel.module).values() if issubclass(kind, nn.modules.batchnorm._BatchNorm)]
    assert len(kinds) > 18
    assert all(issubclass(kind, SynchronizedBatchNorm2d) for kind in kinds)
    batches = images_and_labels(devices, 64, (64, 64))
    for network in (plain, parallel):
        recipe.train(network, batches)
    assert_same_state(parallel, plain)


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("recipe", ["ultralytics"], indirect=True)
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


@pytest.mark.parametrize("recipe", ["ultralytics"], indirect=True)
def test_ultralytics_sets_what_layers_do_by_their_class(recipe):
    with patch_sync_batchnorm():
        model = recipe.DetectionModel("yolo11n.yaml", nc=2, verbose=False)
    # If the second is no more so, the page warns of what is gone.
    for net, options in ((recipe.model, (0.001, 0.03)), (model, (1e-5, 0.1))):
        first = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d))
        assert (type(first), first.eps, first.momentum) == (SynchronizedBatchNorm2d, *options)


@pytest.mark.parametrize("recipe", ["pytorch_metric_learning"], indirect=True)
def test_embeddings_train_as_on_one_device(recipe, devices):
    plain, parallel = twins(recipe.make_trunk().double(), devices)
    first = as_devices(devices)[0]
    batches = [(doubles(n, 1, 8, 8, devices=devices), torch.arange(n, device=first) % 3) for n in (8, 8, 5)]
    for trunk in (plain, parallel):
        recipe.train(trunk, batches)
    assert_same_state(parallel, plain)


# Accelerate, Fabric, Lightning: a process for each device

BEFORE = "from common import import_torchvision; import_torchvision()\n"


def run_program(folder: Path, code: str, *command: str) -> None:
    """Run a program in `folder`, on the CPU, by what stands between ``python`` and its name."""
    (folder / "program.py").write_text(BEFORE + code, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "docs" / "examples"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = (sys.executable, *command, "program.py")
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
AFTER = """
import copy, os
torch.manual_seed(0)
net, images, labels = make_net().double(), torch.randn(24, 3, 8, 8).double(), torch.randint(3, (24,))
untrained = copy.deepcopy(net)
trained = train(net, TensorDataset(images, labels), 8{})
torch.save((untrained, images, labels, trained.state_dict()), os.environ.get("LOCAL_RANK", "0"))
"""
TORCHRUN = "torchrun --nproc-per-node 2"
STARTED = [("accelerate", TORCHRUN), ("fabric", "python"), ("lightning", "python"), ("lightning", TORCHRUN)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), STARTED)
def test_the_command_of_a_recipe_starts_two_processes_that_are_one_device(name, command, tmp_path):
    pytest.importorskip("accelerate" if name == "accelerate" else "lightning")
    code = code_of(name)
    assert re.search(rf"[` ]{command}[` ]", code)
    code += AFTER.format("" if name == "accelerate" else ", processes=2")
    run_program(tmp_path, code, *((*LAUNCHER, "2") if command == TORCHRUN else ()))
    first = torch.Generator().manual_seed(0)  # that of the sampler of Lightning in the first epoch
    order = torch.randperm(24, generator=first) if name == "lightning" else torch.arange(24)
    for rank in range(2):
        net, images, labels, state = torch.load(tmp_path / str(rank), weights_only=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in order.split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
        assert_same_tree(dict(state), dict(net.state_dict()), f"process {rank}: ")


TRAIN = """
torch.manual_seed(0)
data = [{"pixel_values": torch.randn(3, 32, 32).double(), "labels": i % 3} for i in range(24)]
torch.save(train(ResNetForImageClassification(config).double(), data, 12).state_dict(), "rank" + os.environ["RANK"])
"""


@pytest.mark.slow
def test_a_plain_trainer_in_two_processes_trains_to_the_numbers_of_one(tmp_path):
    pytest.importorskip("transformers")
    assert f"{TORCHRUN} docs/examples" in code_of("transformers_in_processes")
    states = []
    for processes in ("1", "2"):
        run_program(tmp_path, code_of("transformers_in_processes") + TRAIN, *LAUNCHER, processes)
        states += [dict(torch.load(tmp_path / f"rank{rank}")) for rank in range(int(processes))]
    assert_same_tree(states[1:], states[:1] * 2)


# What to give `parallel.module` to


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recipe", ["torch"], indirect=True)
def test_counters_and_exports_take_the_module_of_a_wrapper(recipe):
    plain = revert_model(copy.deepcopy(recipe.net))
    with recipe.FlopCounterMode(display=False) as counter:
        plain(recipe.batch)
    assert counter.get_total_flops() == recipe.flops > 0
    with recipe.FlopCounterMode(display=False) as counter:
        recipe.parallel.train()(recipe.batch)
    assert counter.get_total_flops() < recipe.flops
    recipe.parallel.eval()
    program = torch.export.export(recipe.parallel.module, (recipe.batch,))
    assert_equal(program.module()(recipe.batch), recipe.net(recipe.batch))
    for export in (torch.export.export, torch.onnx.export):
        with pytest.raises(Exception, match=r"(?i)replica|failed to export|DataParallel is not supported|fake ?tensor"):
            export(recipe.parallel, (recipe.batch,))


@pytest.mark.parametrize("recipe", ["torchinfo"], indirect=True)
def test_a_summary_takes_the_module_of_a_wrapper(recipe):
    from torchinfo import summary

    plain = revert_model(copy.deepcopy(recipe.net))
    wanted = summary(plain, input_data=recipe.batch, verbose=0)
    found = summary(recipe.parallel.module, input_data=recipe.batch, verbose=0)
    assert (found.total_params, found.total_mult_adds) == (wanted.total_params, wanted.total_mult_adds)
    four = recipe.DataParallelWithCallback(recipe.net, ["cpu"] * 4)
    assert summary(four, input_data=recipe.batch, verbose=0).total_params > wanted.total_params  # those of two replicas


@pytest.mark.parametrize("recipe", ["thop"], indirect=True)
def test_counters_that_look_up_classes_take_a_reverted_copy(recipe):
    thop, ptflops = pytest.importorskip("thop"), pytest.importorskip("ptflops")
    image = recipe.batch[:1]
    options = {"print_per_layer_stat": False, "as_strings": False, "backend": "pytorch"}
    for count in (
        lambda net: ptflops.get_model_complexity_info(net, (3, 8, 8), **options)[0],
        lambda net: thop.profile(net, (image,), verbose=False)[0],
    ):
        converted, reverted = copy.deepcopy(recipe.net), revert_model(copy.deepcopy(recipe.net))
        assert count(converted) < count(reverted)
    assert any("total_ops" in name for name, _ in converted.named_buffers())


@pytest.mark.filterwarnings("ignore")  # of its hooks
@pytest.mark.parametrize("recipe", ["captum"], indirect=True)
def test_attributions_are_those_of_the_module_of_a_wrapper(recipe):
    from captum.attr import DeepLift, IntegratedGradients, LayerGradCam

    parallel = recipe.parallel.double()
    plain = revert_model(copy.deepcopy(recipe.net))
    batch = recipe.batch.double().requires_grad_()
    for method in (IntegratedGradients, DeepLift, LayerGradCam):
        expected, of_module, of_wrapper = (
            method(model, *([layers[0]] if method is LayerGradCam else [])).attribute(batch, target=1)
            for model, layers in ((plain, plain), (recipe.net, recipe.net), (parallel, recipe.net))
        )
        assert_equal(of_module, expected, method.__name__)
        if method is LayerGradCam:
            assert len(of_wrapper) == 2  # of the four in the batch
        else:
            assert_equal(of_wrapper, expected, method.__name__)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["opacus"], indirect=True)
def test_opacus_finds_no_fault_with_converted_layers_until_it_trains(recipe):
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    net, plain = recipe.net.train(), revert_model(copy.deepcopy(recipe.net)).train()
    assert ModuleValidator.validate(plain, strict=False)
    assert not ModuleValidator.validate(net, strict=False)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in ModuleValidator.fix(plain).modules())
    assert any(isinstance(m, SynchronizedBatchNorm2d) for m in ModuleValidator.fix(net).modules())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(recipe.batch))
    options = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(NotImplementedError, match="SynchronizedBatchNorm2d"):
        PrivacyEngine().make_private(module=net, data_loader=data, **options)
