"""The import lines of public repositories run, after the command of `docs/migrating.md`, or are named on that page."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sync_batchnorm

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
TEXT = PAGE.read_text(encoding="utf-8")
# Found on 2026-11-21 in an index of public GitHub files. These work here, without the folder in front of the name.
WORKING = [
    "from sync_batchnorm import DataParallelWithCallback",
    "from sync_batchnorm import SynchronizedBatchNorm1d as BatchNorm1d",
    "from sync_batchnorm import SynchronizedBatchNorm2d as BatchNorm2d",
    "from sync_batchnorm import SynchronizedBatchNorm3d as BatchNorm3d",
    "from sync_batchnorm import patch_replication_callback",
    "from sync_batchnorm import convert_model",
    "from sync_batchnorm import patch_sync_batchnorm, convert_model as convert_sync_batchnorm",
    "from sync_batchnorm import *",
    "import sync_batchnorm",
    "import sync_batchnorm as syncBN",
    "from . import sync_batchnorm as sync_bn",
    "from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d",
    "from sync_batchnorm.batchnorm import convert_model",
    "from sync_batchnorm.replicate import patch_replication_callback",
    "from .sync_batchnorm import DataParallelWithCallback",
    "from models.networks.sync_batchnorm import DataParallelWithCallback",
    "from .sync_batchnorm.batchnorm import SynchronizedBatchNorm2d",
    "from modeling.sync_batchnorm.batchnorm import SynchronizedBatchNorm2d",
    "from modeling.sync_batchnorm.batchnorm import patch_sync_batchnorm, convert_model",
    "from metrics.methods.opusDSD.cryodrgn.sync_batchnorm.batchnorm import set_sbn_eps_mode",
    "from net.sync_batchnorm.batchnorm import *",
    "from modeling.sync_batchnorm.replicate import patch_replication_callback",
    "from modeling.sync_batchnorm.replicate import DataParallelWithCallback, patch_replication_callback",
    "from networks.sync_batchnorm.replicate import DataParallelWithCallback, DataParallel",
    "from model.sync_batchnorm.replicate import *",
]
# These do not; the page says what to write instead.
ELSEWHERE = [
    "from lib.nn import SynchronizedBatchNorm2d",
    "from lib.nn import UserScatteredDataParallel, user_scattered_collate, patch_replication_callback",
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
NAMES["sync_batchnorm"] = (
    *NAMES["sync_batchnorm.batchnorm"],
    "DataParallelWithCallback",
    "patch_replication_callback",
)


def objects_of(line: str) -> dict[str, Any]:
    """Run an import line; return what it imports, under the names that the older library has for it."""
    namespace: dict[str, Any] = {}
    exec(line, namespace)
    (statement,) = ast.parse(line).body
    found = {}
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            module = namespace[alias.asname or alias.name]
            found |= {name: getattr(module, name) for name in NAMES[alias.name]}
        elif alias.name == "*":
            found |= {name: namespace[name] for name in NAMES[statement.module]}
        else:
            found[alias.name] = namespace[alias.asname or alias.name]
    return found


OTHERS = [
    "from .sync_batchnorm_kernel import f",
    "from utils import sync_batchnorm_2",
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
    made, *others = [file.read_text() for file in files]
    assert others == [made, *[text] * len(ALONE)]
    lines = made.splitlines()
    assert lines[len(WORKING) : -len(WORKING)] == OTHERS
    assert lines[-len(WORKING) :] == [f"    {line}" for line in lines[: len(WORKING)]]
    return dict(zip(WORKING, lines, strict=False))


def assert_is_ours(name: str, found: Any) -> None:
    assert found is (nn.DataParallel if name == "DataParallel" else getattr(sync_batchnorm, name))


@pytest.mark.parametrize("line", WORKING)
def test_line_works_without_the_folder_in_front(line, edited):
    ours = r"(from|import) sync_batchnorm"
    assert re.match(ours, edited[line])
    assert edited[line] == line or not re.match(ours, line)
    for name, found in objects_of(edited[line]).items():
        assert_is_ours(name, found)


@pytest.mark.parametrize("module", NAMES)
def test_modules_give_all_that_those_of_the_older_library_list(module):
    for name, found in objects_of(f"from {module} import {', '.join(NAMES[module])}").items():
        assert_is_ours(name, found)
    assert set(NAMES[module]) <= set(sys.modules[module].__all__)


def test_lines_of_a_folder_with_another_name_work_behind_its_own_init(tmp_path, monkeypatch):
    (edit,) = re.findall(r"^\| `lib.nn`, with the folder `lib/nn/modules` \| `(from .+?)` instead", TEXT, re.MULTILINE)
    package = tmp_path / "lib" / "nn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"{edit}\nUserScatteredDataParallel = user_scattered_collate = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = [line for line in ELSEWHERE if line.startswith("from lib.nn ")]
    assert len(lines) == 2
    for line in lines:
        for name, found in objects_of(line).items():
            if found is not None:
                assert_is_ours(name, found)
    for name in [name for name in sys.modules if name == "lib" or name.startswith("lib.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("line", [line for line in ELSEWHERE if "sync_batchnorm" in line])
def test_what_is_not_here_is_named_with_what_to_write_instead(line):
    names = [alias.name for alias in ast.parse(line).body[0].names]
    old = re.findall(r"^\| (.+?) \| .+ \|$", TEXT.split("### What to write instead")[1].split("###")[0], re.M)
    assert all(any(f"`{name}" in cell for cell in old) for name in names)
    module = re.sub(r"^from .*?(sync_batchnorm\S*) .+$", r"\1", line)
    with pytest.raises(ImportError):
        exec(f"from {module} import {', '.join(names)}", {})
