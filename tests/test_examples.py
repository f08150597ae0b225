"""The examples do what their page says: they run from a shell, show what they promise, and fail when that is not so."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import skip_module_without

import sync_batchnorm
from sync_batchnorm import DataParallelWithCallback, convert_model

skip_module_without("matplotlib", "sklearn", "tqdm")

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
TINY = {
    "train_digits": ["--epochs", "1", "--batch", "96", "--replicas", "3"],
    "segment_digits": ["--steps", "8", "--replicas", "2"],
    "train_gan": ["--steps", "9", "--compared", "8", "--replicas", "3"],
}
STEPS = {"train_digits": 3 * 15, "segment_digits": 3 * 8, "train_gan": 9}  # 1437 digits in batches of 96
COLUMN = {"train_digits": 2, "segment_digits": -1, "train_gan": -1}  # the difference from the run on one device
needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
NAMES = [pytest.param(name, marks=needs_torchvision if name == "segment_digits" else ()) for name in TINY]


@contextmanager
def imported(name: str) -> Iterator[types.ModuleType]:
    """Import an example, without the thread that its progress bar would leave behind."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(EXAMPLES)  # where Python looks first when it runs the example
        module = importlib.import_module(name)
        monkeypatch.setattr(module.tqdm, "monitor_interval", 0)
        threads = torch.get_num_threads()
        yield module
        torch.set_num_threads(threads)


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """An example as a module, for what a shell cannot reach."""
    with imported(request.param) as module:
        yield module


class TinyRun(NamedTuple):
    name: str
    status: int
    output: str
    errors: str
    picture: Path

    def rows(self) -> dict[str, list[str]]:
        """Return the table that the example prints, by the name of the run."""
        rows = re.findall(r"^(one device|unsynchronized|synchronized) +(.+)$", self.output, re.MULTILINE)
        return {name: columns.split() for name, columns in rows}


@pytest.fixture(
    scope="module",
    params=["imported", *(pytest.param(*name.values, marks=[*name.marks, pytest.mark.slow]) for name in NAMES)],
)
def tiny_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """One run of an example from a shell, with warnings as errors; or of the digits example in this process."""
    name = "train_digits" if request.param == "imported" else request.param
    folder = tmp_path_factory.mktemp(name) / "new" / "folder"
    options, picture = [*TINY[name], "--output", str(folder)], folder / f"{name}.png"
    if request.param == "imported":
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors), imported(name) as module:
            status = module.main(options)
        return TinyRun(name, status, output.getvalue(), errors.getvalue(), picture)
    # The package that is tested here, wherever it was imported from.
    environment = {**os.environ, "PYTHONPATH": str(Path(sync_batchnorm.__file__).parents[1])}
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return TinyRun(name, finished.returncode, finished.stdout, finished.stderr, picture)


@pytest.mark.watchdog(90)
def test_example_ends_well_and_prints_a_row_for_each_run(tiny_run: TinyRun):
    assert tiny_run.status == 0, tiny_run.output + tiny_run.errors
    assert tiny_run.rows().keys() == {"one device", "unsynchronized", "synchronized"}
    for accuracy, loss, _, seconds in tiny_run.rows().values() if tiny_run.name == "train_digits" else ():
        assert 0 < float(accuracy.rstrip("%")) <= 100
        assert float(loss) > 0
        assert float(seconds) > 0


@pytest.mark.watchdog(90)
def test_example_in_float64_equals_one_device_only_when_synchronized(tiny_run: TinyRun):
    rows, column = tiny_run.rows(), COLUMN[tiny_run.name]
    assert rows["one device"][column] == "-"
    assert float(rows["synchronized"][column]) <= 1e-8
    assert float(rows["unsynchronized"][column]) > 1e-3


@pytest.mark.watchdog(90)
def test_example_shows_progress_through_all_of_its_steps(tiny_run: TinyRun):
    steps = STEPS[tiny_run.name]
    assert f"{steps}/{steps}" in tiny_run.errors


@pytest.mark.watchdog(90)
def test_example_saves_a_picture_with_the_colours_of_its_runs(tiny_run: TinyRun):
    from matplotlib import colors, image

    pixels = image.imread(tiny_run.picture)  # (H, W, RGBA)
    assert min(pixels.shape[:2]) >= 400
    for colour in ("#D55E00", "#0072B2"):  # of the unsynchronized and the synchronized curve
        distances = abs(pixels[..., :3] - colors.to_rgb(colour)).max(axis=-1)
        assert (distances < 0.02).sum() > 100


@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_example_fails_when_its_replicas_do_not_synchronize(example: types.ModuleType, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "convert_model", lambda model: model)
    if hasattr(example, "TEST_SCENES"):
        monkeypatch.setattr(example, "TEST_SCENES", example.SHOWN)
    assert example.main([*TINY[example.__name__], "--output", str(tmp_path)]) == 1
    assert re.search(r"NOT as expected: .* the synchronized .* differ", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.watchdog(60)
@pytest.mark.parametrize("example", ["train_digits"], indirect=True)
def test_digits_example_in_float32_claims_no_equality(example: types.ModuleType, tmp_path, capsys):
    assert example.main([*TINY["train_digits"], "--dtype", "float32", "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "checked with --dtype float64 only" in output
    assert "expected:" not in output


BAD_OPTIONS = [
    ("", ["--replicas", "1"], "expected at least 2 replicas, but got 1"),
    ("", ["--devices", "toaster"], "expected devices of this machine, but got 'toaster'"),
    ("", ["--devices", "cpu,"], "expected devices of this machine, but got 'cpu,'"),
    ("", ["--seed", str(2**64)], "expected a seed of 64 bits"),
    ("", ["--output", __file__], "expected an output folder that can be written to"),
    ("train_digits", ["--devices", "cuda:99"], "expected devices of this machine, but got 'cuda:99'"),
    ("train_digits", ["--batch", "3"], "expected a batch of 4 samples (one per replica) to 1437"),
    ("train_digits", ["--batch", "1438"], "but got 1438"),
    ("train_digits", ["--epochs", "0"], "expected --epochs of at least 1, but got 0"),
    ("train_digits", ["--dtype", "float16"], "invalid choice: 'float16'"),
    ("segment_digits", ["--steps", "0"], "expected --steps of at least "),
    ("train_gan", ["--steps", "0"], "expected --steps of at least "),
    ("train_gan", ["--replicas", "33"], "expected at most 32 replicas, but got 33"),
    ("train_gan", ["--compared", "0"], "expected --compared of at least 1, but got 0"),
    ("train_gan", ["--compared", "9", "--steps", "8"], "expected --steps of at least 9, but got 8"),
]


@pytest.mark.watchdog(60)
def test_example_answers_a_bad_option_with_a_sentence(example: types.ModuleType, capsys):
    for name, options, sentence in BAD_OPTIONS:
        if name in ("", example.__name__):
            with pytest.raises(SystemExit, match="2"):
                example.main(options)
            assert sentence in capsys.readouterr().err


@needs_torchvision
@pytest.mark.filterwarnings("ignore:expected batch norms that synchronize")  # The test is to see what goes wrong.
def test_deeplab_with_one_image_a_replica_trains_only_when_synchronized():
    from torchvision.models import segmentation

    net = segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
    images = torch.randn(2, 3, 64, 64)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        DataParallelWithCallback(net, ["cpu"] * 2)(images)
    assert DataParallelWithCallback(convert_model(net), ["cpu"] * 2)(images)["out"].shape == (2, 21, 64, 64)


def test_torchvision_that_fails_otherwise_is_not_tried_again(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    common = importlib.import_module("common")

    def fail(name: str) -> types.ModuleType:
        raise RuntimeError(f"{name} is broken")

    monkeypatch.setattr(common.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="torchvision is broken"):
        common.import_torchvision()


@pytest.mark.parametrize("example", [NAMES[1]], indirect=True)
def test_scenes_to_test_on_share_no_digit_with_those_to_train_on(example: types.ModuleType, monkeypatch):
    written = []
    monkeypatch.setattr(example, "write_digits", lambda count, inks, labels, *rest: written.append(inks))
    example.make_scenes(example.Options([torch.device("cpu")] * 2, 8, 0, Path("unused.png")))
    train, test = ({ink.numpy().tobytes() for ink in inks} for inks in written)
    assert train
    assert test
    assert not train & test
