"""The examples do what their page says: they run from a shell, show what they promise, and fail when that is not so."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import skip_module_without

import sync_batchnorm
from sync_batchnorm import DataParallelWithCallback, convert_model

skip_module_without("matplotlib", "sklearn", "tqdm")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TINY = {
    "train_digits": ["--epochs", "1", "--batch", "96", "--replicas", "3"],
    "segment_digits": ["--steps", "8", "--replicas", "2"],
    "train_gan": ["--steps", "9", "--compared", "8", "--replicas", "3"],
    "profile_waits": [],  # as it is: who is slow is not who comes last
}
COLUMN = {"train_digits": 2, "segment_digits": -1, "train_gan": -1}  # the difference from the run on one device
needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
NAMES = [pytest.param(name, marks=needs_torchvision if name == "segment_digits" else ()) for name in COLUMN]

pytestmark = pytest.mark.watchdog(90)


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An example as a module, without the thread that its progress bar would leave behind."""
    monkeypatch.syspath_prepend(EXAMPLES)  # where Python looks first when it runs the example
    module = importlib.import_module(request.param)
    if hasattr(module, "tqdm"):
        monkeypatch.setattr(module.tqdm, "monitor_interval", 0)
    if hasattr(module, "TEST_SCENES"):  # which take long to draw
        monkeypatch.setattr(module, "TEST_SCENES", module.SHOWN)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_example_in_float64_equals_one_device_only_when_synchronized(example: types.ModuleType, tmp_path, capsys):
    name, folder = example.__name__, tmp_path / "new" / "folder"
    assert example.main([*TINY[name], "--output", str(folder)]) == 0
    found = re.findall(r"^(one device|unsynchronized|synchronized) +(.+)$", capsys.readouterr().out, re.MULTILINE)
    differences = {run: columns.split()[COLUMN[name]] for run, columns in found}
    assert differences["one device"] == "-"
    assert float(differences["synchronized"]) <= 1e-8
    assert float(differences["unsynchronized"]) > 1e-3
    assert (folder / f"{name}.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "profile_waits"])
def test_example_runs_from_a_shell_without_a_warning(name: str, tmp_path):
    # The package that is tested here, wherever it was imported from.
    environment = {**os.environ, "PYTHONPATH": str(Path(sync_batchnorm.__file__).parents[1])}
    command = [
        sys.executable,
        "-W",
        "error",
        str(EXAMPLES / f"{name}.py"),
        *TINY[name],
        "--output",
        str(tmp_path / "new"),
    ]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=80)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
def test_example_fails_when_its_replicas_do_not_synchronize(example: types.ModuleType, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "convert_model", lambda model: model)
    assert example.main([*TINY[example.__name__], "--output", str(tmp_path)]) == 1
    assert re.search(r"NOT as expected: .* the synchronized .* differ", capsys.readouterr().out)


@pytest.mark.filterwarnings(r"ignore:\d+ BatchNorm")
@pytest.mark.parametrize("example", ["caption_digits"], indirect=True)
@pytest.mark.parametrize("devices", [[], ["--devices", "0,1"]][: 1 + (torch.cuda.device_count() > 1)], ids=str)
def test_captions_and_states_named_by_dimension_train_as_on_one_device(example, devices, monkeypatch, capsys):
    assert example.main(["--steps", "8", "--replicas", "3", *devices]) == 0
    assert len(re.findall("^As expected: ", capsys.readouterr().out, re.MULTILINE)) == 2
    monkeypatch.setattr(example, "convert_model", lambda model: model)
    assert example.main(["--steps", "8", "--replicas", "3", *devices]) == 1
    assert re.search(r"NOT as expected: .* the synchronized .* differ", capsys.readouterr().out)


@needs_torchvision
@pytest.mark.filterwarnings(r"ignore:\d+ BatchNorm")  # The test is to see what goes wrong.
def test_deeplab_with_one_image_a_replica_trains_only_when_synchronized():
    from torchvision.models import segmentation

    net = segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
    images = torch.randn(2, 3, 64, 64)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        DataParallelWithCallback(net, ["cpu"] * 2)(images)
    assert DataParallelWithCallback(convert_model(net), ["cpu"] * 2)(images)["out"].shape == (2, 21, 64, 64)


@pytest.mark.parametrize("example", ["draw_means"], indirect=True)
def test_drawing_of_the_readme_is_what_the_layers_compute(example: types.ModuleType):
    assert (EXAMPLES / "means.svg").read_text(encoding="utf-8") == example.drawing()


# The profile of `profile_waits.py`: it blames the replica that is slow, and reads other profiles to the digit.


def event(name: str, tid: int, start: float, end: float, **others: Any) -> dict[str, Any]:
    """Return an event of an exported profile, from milliseconds."""
    times = {"ts": 1000 * start, "dur": 1000 * (end - start)}
    return {"ph": "X", "cat": "user_annotation", "name": f"sync_batchnorm: {name}", "tid": tid, **times, **others}


def forward_of_two(begin: float, replicas: tuple[int, int], late: float) -> list[dict[str, Any]]:
    """Return a forward whose replica 1 comes `late` to the layer "a", and replica 0 takes longer to "b"."""
    first, second = replicas
    return [
        event("replica 0 on device cpu", first, begin, begin + late + 10),
        event("replica 1 on device cpu", second, begin, begin + late + 10),
        event("a, waiting", first, begin + 1, begin + late + 1),
        event("a, merging", first, begin + late + 1, begin + late + 2),
        event("a, waiting", second, begin + late + 1, begin + late + 2.5),
        event("b, waiting", second, begin + late + 4, begin + late + 6),
        event("b, waiting", first, begin + late + 5, begin + late + 5),
        event("b, merging", first, begin + late + 5, begin + late + 6),
    ]


@pytest.fixture
def two_forwards(tmp_path: Path) -> Path:
    """A profile as torch exports it, packed, of two forwards, with threads of their own, and what else is in one."""
    events = [
        {"ph": "M", "name": "thread_name", "tid": 7, "ts": 0, "args": {"name": "a thread"}},
        event("replica 0 on device cpu", 7, 0, 100, cat="gpu_user_annotation"),
        event("b, merging", 7, 1, 2),  # in no replica
        *forward_of_two(200, (3, 4), late=7),
        *forward_of_two(100, (1, 2), late=3),
    ]
    path = tmp_path / "profile.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
    return path


@pytest.mark.parametrize("example", ["profile_waits"], indirect=True)
def test_profile_is_read_to_the_digit_and_drawn(example, two_forwards, tmp_path):
    forwards = example.read_profile(two_forwards)
    assert [[exchange.layer for exchange in forward.exchanges] for forward in forwards] == [["a", "b"]] * 2
    table = example.table_of(forwards)
    assert list(table) == ["a", "b"]
    for layer, blamed, took in (("a", 1, {0: 1.0, 1: 6.0}), ("b", 0, {0: 3.0, 1: 1.5})):
        row = table[layer]
        assert (row.blamed, row.times_slowest, row.exchanges) == (blamed, 2, 2)
        assert row.mean_took == pytest.approx(took)
    assert example.main(["--profile", str(two_forwards), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "profile_waits.png").stat().st_size > 5000
