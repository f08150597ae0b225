"""The examples of a segmentation net and of a GAN do what their page says, from a shell and with wrong options."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import skip_module_without

import sync_batchnorm
from sync_batchnorm import DataParallelWithCallback, convert_model

torchvision = pytest.importorskip("torchvision")
skip_module_without("matplotlib", "sklearn", "tqdm")

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
TINY = {
    "segment_digits": ["--steps", "8", "--replicas", "2"],
    "train_gan": ["--steps", "9", "--compared", "8", "--replicas", "3"],
}
RUNS = {"one device", "unsynchronized", "synchronized"}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in TINY])
def tiny_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """One run of an example from a shell, with warnings as errors."""
    return TinyRun(request.param, tmp_path_factory.mktemp(request.param) / "new" / "folder")


class TinyRun:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.picture = name, folder / f"{name}.png"
        command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *TINY[name], "--output", str(folder)]
        # The package that is tested here, wherever it was imported from.
        environment = {**os.environ, "PYTHONPATH": str(Path(sync_batchnorm.__file__).parents[1])}
        self.finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)

    def rows(self) -> dict[str, list[str]]:
        """Return the table, by the name of the run."""
        rows = re.findall(r"^(one device|unsynchronized|synchronized) +(.+)$", self.finished.stdout, re.MULTILINE)
        return {name: columns.split() for name, columns in rows}


@pytest.fixture(params=list(TINY))
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An example as a module, for what a shell cannot reach; without its progress bar, which keeps a thread."""
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module(request.param)
    monkeypatch.setattr(module.tqdm, "monitor_interval", 0)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.mark.watchdog(90)
def test_example_ends_well_and_prints_a_row_for_each_run(tiny_run: TinyRun):
    assert tiny_run.finished.returncode == 0, tiny_run.finished.stdout + tiny_run.finished.stderr
    assert tiny_run.rows().keys() == RUNS


@pytest.mark.watchdog(90)
def test_example_in_float64_equals_one_device_only_when_synchronized(tiny_run: TinyRun):
    rows = tiny_run.rows()
    assert rows["one device"][-1] == "-"
    assert float(rows["synchronized"][-1]) <= 1e-8
    assert float(rows["unsynchronized"][-1]) > 1e-3


@pytest.mark.watchdog(90)
def test_example_shows_progress_through_all_of_its_steps(tiny_run: TinyRun):
    num_steps = {"segment_digits": 3 * 8, "train_gan": 9}[tiny_run.name]
    assert f"{num_steps}/{num_steps}" in tiny_run.finished.stderr


@pytest.mark.watchdog(90)
def test_example_saves_a_picture_with_the_colours_of_its_runs(tiny_run: TinyRun):
    from matplotlib import colors, image

    pixels = image.imread(tiny_run.picture)  # (H, W, RGBA)
    assert min(pixels.shape[:2]) >= 400
    for colour in ("#D55E00", "#0072B2"):  # of the unsynchronized and the synchronized curve
        distances = abs(pixels[..., :3] - colors.to_rgb(colour)).max(axis=-1)
        assert (distances < 0.02).sum() > 100


@pytest.mark.watchdog(60)
@pytest.mark.slow
def test_example_fails_when_its_replicas_do_not_synchronize(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(example, "convert_model", lambda model: model)
    if hasattr(example, "TEST_SCENES"):
        monkeypatch.setattr(example, "TEST_SCENES", example.SHOWN)
    assert example.main([*TINY[example.__name__], "--output", str(tmp_path)]) == 1
    assert re.search(r"NOT as expected: .* the synchronized .* differ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--replicas", "1"], "expected at least 2 replicas, but got 1"),
        (["--steps", "0"], "expected --steps of at least "),
        (["--devices", "toaster"], "expected devices of this machine, but got 'toaster'"),
        (["--devices", "cpu,"], "expected devices of this machine, but got 'cpu,'"),
        (["--seed", str(2**64)], "expected a seed of 64 bits"),
        (["--output", __file__], "expected an output folder that can be written to"),
    ],
)
@pytest.mark.watchdog(60)
def test_example_answers_a_bad_option_with_a_sentence(
    example: types.ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
):
    with pytest.raises(SystemExit, match="2"):
        example.main(options)
    assert sentence in capsys.readouterr().err


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--replicas", "33"], "expected at most 32 replicas, but got 33"),
        (["--compared", "0"], "expected --compared of at least 1, but got 0"),
        (["--compared", "9", "--steps", "8"], "expected --steps of at least 9, but got 8"),
    ],
)
@pytest.mark.parametrize("example", ["train_gan"], indirect=True)
def test_gan_example_answers_numbers_that_do_not_fit_with_a_sentence(
    example: types.ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
):
    with pytest.raises(SystemExit, match="2"):
        example.main(options)
    assert sentence in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:expected batch norms that synchronize")  # The test is to see what goes wrong.
def test_deeplab_with_one_image_a_replica_trains_only_when_synchronized():
    net = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
    images = torch.randn(2, 3, 64, 64)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        DataParallelWithCallback(net, ["cpu"] * 2)(images)
    assert DataParallelWithCallback(convert_model(net), ["cpu"] * 2)(images)["out"].shape == (2, 21, 64, 64)


def test_torchvision_that_fails_otherwise_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    common = importlib.import_module("common")

    def fail(name: str) -> types.ModuleType:
        raise RuntimeError(f"{name} is broken")

    monkeypatch.setattr(common.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="torchvision is broken"):
        common.import_torchvision()


def test_scenes_to_test_on_share_no_digit_with_those_to_train_on(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("segment_digits")
    written = []
    monkeypatch.setattr(example, "write_digits", lambda count, inks, labels, *rest: written.append(inks))
    example.make_scenes(example.Options([torch.device("cpu")] * 2, 8, 0, Path("unused.png")))
    train, test = ({ink.numpy().tobytes() for ink in inks} for inks in written)
    assert train
    assert test
    assert not train & test
