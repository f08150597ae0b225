"""The examples do what their pages say: they run from a shell, show what they promise, and fail when that is not so."""

from __future__ import annotations

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

skip_module_without("matplotlib", "sklearn", "tqdm")

DIGITS = Path(__file__).parents[1] / "docs" / "examples" / "train_digits.py"
TINY = ["--epochs", "1", "--batch", "96", "--replicas", "3"]


@contextmanager
def digits_as_a_module() -> Iterator[types.ModuleType]:
    """Import the digits example, without the thread that its progress bar would leave behind."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(DIGITS.parent)  # where Python looks first when it runs the example
        spec = importlib.util.spec_from_file_location("train_digits", DIGITS)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module.tqdm, "monitor_interval", 0)
        threads = torch.get_num_threads()
        yield module
        torch.set_num_threads(threads)


@pytest.fixture
def digits() -> Iterator[types.ModuleType]:
    """The digits example as a module, for what a shell cannot reach."""
    with digits_as_a_module() as module:
        yield module


class TinyRun(NamedTuple):
    status: int
    output: str
    errors: str
    picture: Path


@pytest.fixture(scope="module", params=["imported", pytest.param("from-a-shell", marks=pytest.mark.slow)])
def tiny_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """One run of the digits example, in this process or from a shell, and the picture that it made."""
    folder = tmp_path_factory.mktemp("digits") / "new" / "folder"
    options = [*TINY, "--output", str(folder)]
    if request.param == "imported":
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors), digits_as_a_module() as module:
            status = module.main(options)
        return TinyRun(status, output.getvalue(), errors.getvalue(), folder / "train_digits.png")
    # The package that is tested here, wherever it was imported from.
    environment = {**os.environ, "PYTHONPATH": str(Path(sync_batchnorm.__file__).parents[1])}
    command = [sys.executable, str(DIGITS), *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return TinyRun(finished.returncode, finished.stdout, finished.stderr, folder / "train_digits.png")


def rows_of(output: str) -> dict[str, list[str]]:
    """Return the table that the digits example prints, by the name of the run."""
    rows = re.findall(r"^(one device|unsynchronized|synchronized) +(.+)$", output, re.MULTILINE)
    return {name: columns.split() for name, columns in rows}


@pytest.mark.watchdog(60)
def test_digits_example_ends_well_and_prints_a_row_for_each_run(tiny_run):
    assert tiny_run.status == 0, tiny_run.output + tiny_run.errors
    rows = rows_of(tiny_run.output)
    assert list(rows) == ["one device", "unsynchronized", "synchronized"]
    for accuracy, loss, _, seconds in rows.values():
        assert 0 < float(accuracy.rstrip("%")) <= 100
        assert float(loss) > 0
        assert float(seconds) > 0


@pytest.mark.watchdog(60)
def test_digits_example_in_float64_ends_with_the_parameters_of_one_device(tiny_run):
    rows = rows_of(tiny_run.output)
    assert float(rows["synchronized"][2]) <= 1e-8
    assert rows["synchronized"][:2] == rows["one device"][:2]


@pytest.mark.watchdog(60)
def test_digits_example_without_synchronization_ends_elsewhere(tiny_run):
    assert float(rows_of(tiny_run.output)["unsynchronized"][2]) > 1e-3


@pytest.mark.watchdog(60)
def test_digits_example_shows_progress_through_all_of_its_steps(tiny_run):
    num_steps = 3 * 15  # three runs over 1437 samples in batches of 96
    assert f"{num_steps}/{num_steps}" in tiny_run.errors


@pytest.mark.watchdog(60)
def test_digits_example_saves_a_picture(tiny_run):
    from matplotlib import colors, image

    pixels = image.imread(tiny_run.picture)  # (H, W, RGBA)
    assert min(pixels.shape[:2]) >= 400
    for colour in ("#D55E00", "#0072B2"):  # of the unsynchronized and the synchronized curve
        distances = abs(pixels[..., :3] - colors.to_rgb(colour)).max(axis=-1)
        assert (distances < 0.02).sum() > 100


@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_digits_example_fails_when_its_replicas_do_not_synchronize(digits, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(digits, "convert_model", lambda model: model)
    assert digits.main([*TINY, "--output", str(tmp_path)]) == 1
    assert "NOT as expected: after the whole training the synchronized run differs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_digits_example_in_float32_claims_no_equality(digits, tmp_path, capsys):
    assert digits.main([*TINY, "--dtype", "float32", "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "checked with --dtype float64 only" in output
    assert "expected:" not in output


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--replicas", "1"], "expected at least 2 replicas, but got 1"),
        (["--batch", "3"], "expected a batch of 4 samples (one per replica) to 1437"),
        (["--batch", "1438"], "but got 1438"),
        (["--epochs", "0"], "expected --epochs of at least 1, but got 0"),
        (["--devices", "toaster"], "expected devices of this machine, but got 'toaster'"),
        (["--devices", "cuda:99"], "expected devices of this machine, but got 'cuda:99'"),
        (["--devices", "cpu,"], "expected devices of this machine, but got 'cpu,'"),
        (["--seed", str(2**64)], "expected a seed of 64 bits"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--output", str(DIGITS)], "expected an output folder that can be written to"),
    ],
)
def test_digits_example_answers_a_bad_option_with_a_sentence(digits, capsys, options: list[str], sentence: str):
    with pytest.raises(SystemExit, match="2"):
        digits.main(options)
    assert sentence in capsys.readouterr().err
