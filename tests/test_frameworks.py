"""The recipes of docs/frameworks.md, run with the real frameworks: each trains to the numbers of one device.

Needs the extra `frameworks`; a test skips where its framework is not installed.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CUDA_COUNT
from helpers import assert_equal, assert_same_state, doubles, twins
from test_docs import blocks_of, section_of
from torch import Tensor, nn

from sync_batchnorm import convert_model, revert_model

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"

pytestmark = [
    pytest.mark.watchdog(120.0),
    # What frameworks use of others, and do with their default options.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
]


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


# Simulated GPUs


@pytest.mark.cuda
@pytest.mark.simulated
@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_unet_of_monai_trains_on_all_gpus_as_on_one(spatial_dims: int) -> None:
    """Transposed convolutions, and batches of a subclass of Tensor."""
    monai = pytest.importorskip("monai")
    from monai.data import MetaTensor
    from monai.losses import DiceCELoss

    net = monai.networks.nets.UNet(
        spatial_dims, 1, 2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, norm="batch"
    ).double()
    parallel = convert_model(nn.DataParallel(copy.deepcopy(net).cuda()))
    assert len(parallel.device_ids) == torch.cuda.device_count()
    shape = (1, *[8] * spatial_dims)
    batches = [torch.randn(size, *shape, dtype=torch.float64) for size in (8, 7)]
    for model, device in ((net, "cpu"), (parallel, "cuda")):
        optimizer, loss = (
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            DiceCELoss(to_onehot_y=True, softmax=True),
        )
        for batch in batches:
            optimizer.zero_grad()
            loss(model(MetaTensor(batch).to(device)), (batch > 0).to(device)).backward()
            optimizer.step()
        torch.cuda.empty_cache()
    assert_same_state(parallel, net)


class OfTinyImages(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images of noise, with labels, as models of transformers take them."""

    def __init__(self, length: int) -> None:
        self.images, self.labels = torch.randn(length, 3, 32, 32, dtype=torch.float64), torch.arange(length) % 3

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


@pytest.mark.cuda
@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0, but all input tensors were scalars")
def test_trainer_of_transformers_trains_on_all_gpus_as_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)  # no thread that stays

    class SynchronizedTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _wrap_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            return convert_model(super()._wrap_model(*args, **kwargs))

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config).double()
    data, number = OfTinyImages(32), torch.cuda.device_count()
    states = []
    for on_cpu in (True, False):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(on_cpu)),
            per_device_train_batch_size=8 if on_cpu else 8 // number,
            per_device_eval_batch_size=8 if on_cpu else 8 // number,
            num_train_epochs=2,
            torch_empty_cache_steps=1,
            skip_memory_metrics=False,
            average_tokens_across_devices=False,  # which multiplies a loss that is a mean by the number of GPUs
            report_to=[],
            disable_tqdm=True,
            use_cpu=on_cpu,
        )
        trainer = SynchronizedTrainer(copy.deepcopy(model), arguments, train_dataset=data, eval_dataset=data)
        assert trainer.args.n_gpu == (0 if on_cpu else number)
        trained = trainer.train()
        assert on_cpu or trained.metrics["train_mem_gpu_alloc_delta"] > 0  # the state of the optimizer
        losses = trained.training_loss, trainer.evaluate()["eval_loss"]
        states.append((trainer.model.cpu(), *losses))
    (plain, *expected), (parallel, *actual) = states
    assert_same_state(parallel, plain)
    assert actual == pytest.approx(expected, rel=1e-6)  # which the Trainer computes in float32


# transformers


@pytest.fixture(autouse=True)
def _no_monitor_of_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tqdm start no thread, which would stay."""
    with suppress(ImportError):  # where no framework that uses it is installed
        monkeypatch.setattr(importlib.import_module("tqdm").tqdm, "monitor_interval", 0)


several_gpus = [pytest.mark.cuda, pytest.mark.skipif(CUDA_COUNT < 2, reason="needs several GPUs")]
WHERE = [True, pytest.param(False, marks=several_gpus)]  # whether replicas are on the CPU, or on all GPUs


def trained_by(trainer: type, recipe: types.ModuleType, folder: Path, use_cpu: bool, **options: Any) -> Any:
    """Train a ResNet with batches of 12, of which the last is one of 5, and evaluate and save after each epoch."""
    torch.manual_seed(1)
    data = [{"pixel_values": doubles(3, 32, 32), "labels": i % 3} for i in range(29)]
    torch.manual_seed(0)
    model = recipe.ResNetForImageClassification(recipe.config).double()
    devices = 1 if use_cpu else torch.cuda.device_count()
    arguments = recipe.TrainingArguments(
        str(folder),
        use_cpu=use_cpu,
        per_device_train_batch_size=12 // devices,
        num_train_epochs=2,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    built = trainer(model, arguments, train_dataset=data, eval_dataset=data[:7])
    built.train(**options)
    return built


def losses_of_evaluations(trainer: Any) -> torch.Tensor:
    return torch.tensor([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]).double()


@pytest.mark.parametrize("use_cpu", WHERE)
@pytest.mark.parametrize("recipe", [("transformers", "transformers")], indirect=True)
def test_a_trainer_trains_and_resumes_to_the_numbers_of_one_device(recipe, use_cpu, tmp_path):
    class OneDevice(recipe.SynchronizedTrainer):
        def _wrap_model(self, model, *args, **kwargs):
            return model

    plain = trained_by(OneDevice, recipe, tmp_path / "plain", use_cpu=True)
    ours = trained_by(recipe.SynchronizedTrainer, recipe, tmp_path / "ours", use_cpu)
    assert len(ours.model_wrapped.device_ids) > 1
    assert_same_state(ours.model, plain.model)
    assert_equal(losses_of_evaluations(ours), losses_of_evaluations(plain))
    first, last = sorted((tmp_path / "ours").iterdir(), key=lambda folder: int(folder.name.partition("-")[2]))
    assert_same_state(recipe.ResNetForImageClassification.from_pretrained(last, dtype=torch.float64), plain.model)
    resumed = trained_by(
        recipe.SynchronizedTrainer, recipe, tmp_path / "resumed", use_cpu, resume_from_checkpoint=str(first)
    )
    assert resumed.state.global_step == plain.state.global_step == 6
    assert_same_state(resumed.model, plain.model)


@pytest.mark.parametrize("use_cpu", WHERE)
@pytest.mark.parametrize("recipe", [("transformers", "transformers")], indirect=True)
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0, but all input tensors were:UserWarning")
def test_bf16_of_a_trainer_takes_effect_in_compute_loss_alone(recipe, use_cpu, tmp_path):
    arguments = recipe.TrainingArguments(str(tmp_path), use_cpu=use_cpu, bf16=True, report_to="none", disable_tqdm=True)
    trainer = recipe.SynchronizedTrainer(recipe.model, arguments, train_dataset=recipe.data)
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    _, theirs = recipe.Trainer.compute_loss(trainer, trainer.model_wrapped, batch, return_outputs=True)
    assert theirs.logits.dtype == torch.float32
    loss, ours = trainer.compute_loss(trainer.model_wrapped, batch, return_outputs=True)
    assert (loss.dtype, ours.logits.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("use_cpu", WHERE[1:])
@pytest.mark.parametrize("recipe", [("transformers", "transformers")], indirect=True)
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0, but all input tensors were:UserWarning")
def test_the_loss_of_a_trainer_is_multiplied_by_the_number_of_gpus(recipe, use_cpu, tmp_path):
    losses = []
    for averages in (True, False):
        torch.manual_seed(0)
        arguments = recipe.TrainingArguments(
            str(tmp_path),
            use_cpu=use_cpu,
            average_tokens_across_devices=averages,
            num_train_epochs=1,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        model = recipe.ResNetForImageClassification(recipe.config)
        trainer = recipe.Trainer(model, arguments, train_dataset=recipe.data)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(torch.cuda.device_count() * losses[1])


def test_hooks_for_hidden_states_are_installed_before_a_forward_of_replicas():
    transformers = pytest.importorskip("transformers")
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        decoder_hidden_size=8,
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
    )
    data = doubles(5, 3, 32, 32)
    plain, parallel = twins(transformers.SegformerForSemanticSegmentation(config).double(), ["cpu"] * 2)
    with pytest.raises(RuntimeError):  # the head gets hidden states twice
        parallel(data)
    plain, parallel = twins(transformers.SegformerForSemanticSegmentation(config).double(), ["cpu"] * 2)
    maybe_install_capturing_hooks(parallel.module)
    expected, actual = (model(data, output_hidden_states=True) for model in (plain, parallel))
    assert_equal(actual.logits, expected.logits)
    assert len(actual.hidden_states) == len(expected.hidden_states) == 2


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


def fit(learn: Any, epochs: int = 2) -> None:
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs, 0.01)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("is_cast", [True, False])
@pytest.mark.parametrize("recipe", [("fastai", "fastai")], indirect=True)
def test_a_learner_trains_to_the_numbers_of_one_device(recipe, is_cast, devices):
    from fastai.callback.core import Callback
    from fastai.learner import CastToTensor

    class Seen(Callback):
        def after_batch(self):
            seen.add((type(self.x), type(self.model)))

    seen: set[Any] = set()
    plain = learner_of(recipe, devices[0])
    ours = learner_of(recipe, devices[0], recipe.SynchronizedTrainer(devices), Seen())
    if not is_cast:
        ours.remove_cb(CastToTensor)
    fit(plain)
    fit(ours)
    assert seen == {(torch.Tensor if is_cast else recipe.TensorImage, recipe.DataParallelWithCallback)}
    assert_same_state(ours.model, plain.model)
    ours.save("saved")
    fit(plain, 1)
    resumed = learner_of(recipe, devices[0], recipe.SynchronizedTrainer(devices)).load("saved")
    fit(resumed, 1)
    assert_same_state(resumed.model, plain.model)
    losses = [torch.tensor(learn.recorder.values).double() for learn in (resumed, plain)]
    assert_equal(*losses)  # in training, and of the validation


@pytest.mark.parametrize("recipe", [("fastai", "fastai")], indirect=True)
def test_an_interrupted_fit_of_fastai_can_be_repeated(recipe):
    from fastai.callback.core import Callback

    class Interrupt(Callback):
        def before_fit(self):
            raise KeyboardInterrupt

    learn = learner_of(recipe, "cpu", recipe.SynchronizedTrainer(["cpu"] * 2))
    learn.add_cb(interrupt := Interrupt())
    with pytest.raises(KeyboardInterrupt):
        fit(learn)
    assert type(learn.model) is recipe.DataParallelWithCallback
    learn.remove_cb(interrupt)
    fit(learn, 1)
    assert type(learn.model) is nn.Sequential


@pytest.mark.parametrize("devices", DEVICES[1:])
@pytest.mark.parametrize("recipe", [("fastai", "fastai")], indirect=True)
def test_what_to_parallel_has_wrapped_can_be_converted(recipe, devices):
    from fastai.callback.core import Callback

    class Convert(Callback):
        order = recipe.ParallelTrainer.order + 1

        def before_fit(self):
            recipe.convert_model(self.learn.model)

    plain, ours = learner_of(recipe, devices[0]), learner_of(recipe, devices[0], Convert()).to_parallel(devices)
    fit(plain)
    fit(ours)
    assert_same_state(ours.model, plain.model)


# skorch


@pytest.fixture
def _in_float64(recipe: types.ModuleType) -> Iterator[None]:
    """Build models in float64, once the code of the page has run."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def samples() -> tuple[Any, Any]:
    inputs = doubles(29, 6).numpy()
    return inputs, (inputs[:, 0] > 0).astype("int64")


def deep_net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("recipe", [("skorch", "skorch")], indirect=True)
def test_a_net_its_clone_and_its_pickle_train_to_the_numbers_of_one_device(recipe, devices):
    from sklearn.base import clone

    # The last batch of an epoch has 5 samples.
    options = recipe.options | {"batch_size": 12, "optimizer": torch.optim.Adam, "lr": 0.01, "max_epochs": 3}
    options["device"] = torch.device("cpu" if devices[0] == "cpu" else "cuda")
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
@pytest.mark.parametrize("recipe", [("skorch", "skorch")], indirect=True)
def test_a_grid_search_finds_the_scores_of_one_device(recipe, devices):
    def alone(width: int, devices: list[Any]) -> nn.Module:
        return revert_model(recipe.parallel(width, devices).module)

    # The parts of 19 or 20 samples make a last batch of 7 or 8.
    options = recipe.options | {"batch_size": 12, "device": torch.device("cpu" if devices[0] == "cpu" else "cuda")}
    X, y = samples()
    found = []
    for function in (alone, recipe.parallel):
        torch.manual_seed(0)
        net = recipe.NeuralNetClassifier(function, module__width=8, module__devices=devices, **options)
        search = recipe.GridSearchCV(net, {"module__width": [4, 8]}, cv=3, scoring="neg_log_loss")
        found.append(search.fit(X, y))
    expected, actual = found
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


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.DataParallel) else model


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("buffers", ["copy", "update"])
@pytest.mark.parametrize("recipe", [("Ignite", "ignite")], indirect=True)
def test_an_engine_trains_averages_and_resumes_to_the_numbers_of_one_device(recipe, buffers, devices):
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Loss

    device = torch.device("cpu" if devices[0] == "cpu" else "cuda")
    data = [(doubles(size, 3, 9, 9), torch.arange(size) % 3) for size in (12, 12, 5)]

    def parallel() -> nn.Module:
        if device.type == "cpu":
            return recipe.DataParallelWithCallback(recipe.convert_model(small_net()), devices)
        return recipe.convert_model(recipe.idist.auto_model(small_net()))

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
            assert_same_state(unwrapped(found[name]), plain[name])
            assert_equal(loss_of(found[name]), loss_of(plain[name]))
    recipe.Checkpoint.load_objects({"model": small_net()}, torch.load(saver.last_checkpoint))
