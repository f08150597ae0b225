"""The import lines of public repositories run, after the command of `docs/migrating.md`, or are named on that page."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from typing import Any

import pytest
from repository import ROOT
from torch import nn

import sync_batchnorm

TEXT = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
# Found on 2026-11-21 in an index of public GitHub files. These work here, without the folder in front of the name.
WORKING = [
    "from sync_batchnorm import DataParallelWithCallback",
    "from sync_batchnorm import SynchronizedBatchNorm2d as BatchNorm2d",
    "from sync_batchnorm import patch_sync_batchnorm, convert_model as convert_sync_batchnorm",
    "from sync_batchnorm import *",
    "import sync_batchnorm",
    "import sync_batchnorm as syncBN",
    "from . import sync_batchnorm as sync_bn",
    "from models.networks import sync_batchnorm  # noqa",
    "from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d",
    "from .sync_batchnorm import DataParallelWithCallback",
    "from models.networks.sync_batchnorm import DataParallelWithCallback",
    "from modeling.sync_batchnorm.batchnorm import patch_sync_batchnorm, convert_model",
    "from metrics.methods.opusDSD.cryodrgn.sync_batchnorm.batchnorm import set_sbn_eps_mode",
    "from net.sync_batchnorm.batchnorm import *",
    "from modeling.sync_batchnorm.replicate import DataParallelWithCallback, patch_replication_callback",
    "from networks.sync_batchnorm.replicate import DataParallelWithCallback, DataParallel",
    "from model.sync_batchnorm.replicate import *",
]
# These do not; the page says what to write instead.
OF_LIB = [
    "from lib.nn import SynchronizedBatchNorm2d",
    "from lib.nn import UserScatteredDataParallel, user_scattered_collate, patch_replication_callback",
]
ELSEWHERE = [
    "from sync_batchnorm.unittest import TorchTestCase",
    "from sync_batchnorm.batchnorm_reimpl import BatchNorm2dReimpl",
    "from sync_batchnorm import _SynchronizedBatchNorm as BatchNorm",
    "from models.modules.sync_batchnorm.batchnorm import _ChildMessage, _sum_ft, _unsqueeze_ft",
]

# What the modules of the older library have in their `__all__`, and its package by its imports.
LAYERS = ("SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d")
NAMES = {
    "sync_batchnorm.batchnorm": (*LAYERS, "set_sbn_eps_mode", "patch_sync_batchnorm", "convert_model"),
    "sync_batchnorm.replicate": (
        "CallbackContext",
        "execute_replication_callbacks",
        "DataParallelWithCallback",
        "patch_replication_callback",
    ),
    "sync_batchnorm.comm": ("SlavePipe", "SyncMaster"),
}
NAMES["sync_batchnorm"] = (*NAMES["sync_batchnorm.batchnorm"], "DataParallelWithCallback", "patch_replication_callback")


OTHERS = [
    "from .sync_batchnorm_kernel import f",
    "from utils import sync_batchnorm_2",
    "from models import resnet, sync_batchnorm",
    "from . import sync_batchnorm, resnet",
    "from apex.parallel.sync_batchnorm import SyncBatchNorm",
    "import torch",
]
ALONE = ["apex/parallel", ".venv", "env/lib/site-packages/other"]  # the folders that the command leaves as they are


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the command of the page on a file with all lines; return what it makes of each."""
    (command,) = re.findall(r"^```bash\n(grep .+?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    project = tmp_path_factory.mktemp("project")
    text = "".join(f"{line}\n" for line in [*WORKING, *OTHERS, *(f"    {line}" for line in WORKING)])
    files = [project / folder / "a net.py" for folder in ["", "models/networks", *ALONE]]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    result = subprocess.run(["bash", "-c", command], cwd=project, capture_output=True, text=True)
    if result.returncode and sys.platform != "linux":
        pytest.skip(f"the command wants GNU grep and sed: {result.stderr}")
    assert result.returncode == 0, result.stderr
    changed, *others = [file.read_text() for file in files]
    assert others == [changed, *[text] * len(ALONE)]
    lines = changed.splitlines()
    assert lines[len(WORKING) : -len(WORKING)] == OTHERS
    assert lines[-len(WORKING) :] == [f"    {line}" for line in lines[: len(WORKING)]]
    return dict(zip(WORKING, lines, strict=False))


@pytest.mark.parametrize("line", WORKING)
def test_line_works_without_the_folder_in_front(line, edited):
    without_folder = r"(from|import) sync_batchnorm"
    assert re.match(without_folder, edited[line])
    assert edited[line] == line or not re.match(without_folder, line)
    namespace: dict[str, Any] = {}
    exec(edited[line], namespace)
    assert namespace.get("DataParallel", nn.DataParallel) is nn.DataParallel


@pytest.mark.smoke
@pytest.mark.parametrize("module", NAMES)
def test_modules_give_all_that_those_of_the_older_library_list(module):
    namespace: dict[str, Any] = {}
    exec(f"from {module} import *", namespace)
    for name in NAMES[module]:
        assert namespace[name] is getattr(sync_batchnorm, name)


def test_lines_of_a_folder_with_another_name_work_behind_its_own_init(tmp_path, monkeypatch):
    row = r"^\| `lib.nn`, with the folder `lib/nn/modules` \| `(from .+?)` below `(from .+?)` in"
    ((import_line, line_below),) = re.findall(row, TEXT, re.MULTILINE)
    package = tmp_path / "lib" / "nn"
    (package / "modules").mkdir(parents=True)
    (package / "modules" / "__init__.py").write_text("SynchronizedBatchNorm2d = UserScatteredDataParallel = None\n")
    (package / "__init__.py").write_text(f"{line_below}\n{import_line}\nuser_scattered_collate = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, Any] = {}
    for line in OF_LIB:
        exec(line, namespace)
    for name in ("SynchronizedBatchNorm2d", "patch_replication_callback"):
        assert namespace[name] is getattr(sync_batchnorm, name)
    for name in ("lib", "lib.nn", "lib.nn.modules"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_is_not_here_is_named_with_what_to_write_instead(line):
    names = [alias.name for alias in ast.parse(line).body[0].names]
    old = re.findall(r"^\| (.+?) \| .+ \|$", TEXT.split("### What to write instead")[1].split("###")[0], re.M)
    assert all(any(f"`{name}" in cell for cell in old) for name in names)
    module = re.sub(r"^from .*?(sync_batchnorm\S*) .+$", r"\1", line)
    with pytest.raises(ImportError):
        exec(f"from {module} import {', '.join(names)}", {})
