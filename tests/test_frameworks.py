"""The recipes of docs/frameworks.md, run with the real frameworks: each trains to the numbers of one device.

Needs the extra `frameworks`; a test skips where its framework is not installed.
"""

from __future__ import annotations

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CUDA_COUNT
from helpers import assert_equal, assert_same_state, doubles, twins
from test_docs import blocks_of, section_of
from torch import Tensor, nn

from sync_batchnorm import convert_model

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"

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
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)


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
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
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
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
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
