"""The examples do what their page says: they show what they promise, and fail when that is not so."""

from __future__ import annotations

import importlib
import importlib.util
import re
import types
from collections.abc import Iterator

import pytest
import torch
from conftest import slow
from helpers import skip_module_without
from repository import ROOT, TINY

skip_module_without("matplotlib", "sklearn", "tqdm")

EXAMPLES = ROOT / "docs" / "examples"
COLUMN = {"train_digits": 2, "segment_digits": -1, "train_gan": -1}  # the difference from the run on one device
needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
SEGMENTS = pytest.param("segment_digits", marks=[pytest.mark.slow, needs_torchvision])

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(params=["train_digits", *slow("train_gan"), SEGMENTS])
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An example as a module, without the thread of its progress bar."""
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
    assert example.main([*TINY[name].split(), "--output", str(folder)]) == 0
    rows = re.findall(r"^(one device|unsynchronized|synchronized) +(.+)$", capsys.readouterr().out, re.MULTILINE)
    differences = {run: columns.split()[COLUMN[name]] for run, columns in rows}
    assert differences["one device"] == "-"
    assert float(differences["synchronized"]) <= 1e-8
    assert float(differences["unsynchronized"]) > 1e-3
    assert (folder / f"{name}.png").stat().st_size > 5000


@pytest.mark.filterwarnings(r"ignore:\d+ BatchNorm")
@pytest.mark.parametrize("example", ["caption_digits"], indirect=True)
@pytest.mark.parametrize("devices", [[], ["--devices", "0,1"]][: 1 + (torch.cuda.device_count() > 1)], ids=str)
def test_captions_and_states_named_by_dimension_train_as_on_one_device(example, devices, monkeypatch, capsys):
    assert example.main([*TINY["caption_digits"].split(), *devices]) == 0
    assert len(re.findall("^As expected: ", capsys.readouterr().out, re.MULTILINE)) == 2
    monkeypatch.setattr(example, "convert_model", lambda model: model)
    assert example.main([*TINY["caption_digits"].split(), *devices]) == 1
    assert re.search(r"NOT as expected: .* the synchronized .* differ", capsys.readouterr().out)


@pytest.mark.parametrize("example", ["draw_means"], indirect=True)
def test_drawing_of_the_readme_is_what_the_layers_compute(example: types.ModuleType):
    assert (EXAMPLES / "means.svg").read_text(encoding="utf-8") == example.drawing()
