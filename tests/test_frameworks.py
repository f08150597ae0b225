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
from helpers import assert_same_state
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
