"""The import lines of public repositories, from the table of `docs/migrating.md`: they run, and give what works."""

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
ROWS = re.findall(r"^\| `((?:from|import) .+?)` \| (?:\d+)\+? \| (.+) \|$", TEXT, re.MULTILINE)
WORKING = [line for line, works in ROWS if works == "yes"]
ELSEWHERE = [line for line, works in ROWS if works != "yes"]

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


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the command of the page on a file with all lines; return what it makes of each."""
    (command,) = re.findall(r"^```bash\n(grep .+?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    folder = tmp_path_factory.mktemp("project")
    others = ["from .sync_batchnorm_kernel import f", "from utils import sync_batchnorm_2", "import torch"]
    file = folder / "net.py"
    file.write_text("".join(f"{line}\n" for line in [*WORKING, *others, *(f"    {line}" for line in WORKING)]))
    result = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    if result.returncode and sys.platform != "linux":
        pytest.skip(f"the command wants GNU sed: {result.stderr}")
    assert result.returncode == 0, result.stderr
    lines = file.read_text().splitlines()
    assert lines[len(WORKING) : -len(WORKING)] == others
    assert lines[-len(WORKING) :] == [f"    {line}" for line in lines[: len(WORKING)]]
    return dict(zip(WORKING, lines, strict=False))


def test_table_has_the_lines_that_matter():
    assert len(WORKING) > 20
    assert len(ELSEWHERE) == len(ROWS) - len(WORKING) == 6
    assert "from sync_batchnorm.batchnorm import convert_model" in WORKING
    assert len(set(WORKING)) == len(WORKING)


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
    (edit,) = re.findall(r"^\| the folder `lib/nn/modules` behind `lib.nn` \| `(from .+?)` instead", TEXT, re.MULTILINE)
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
    old = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", TEXT.split("### What to write instead")[1].split("###")[0], re.M)
    assert all(any(f"`{name}" in cell for cell in old) for name in names)
    module = re.sub(r"^from .*?(sync_batchnorm\S*) .+$", r"\1", line)
    with pytest.raises(ImportError):
        exec(f"from {module} import {', '.join(names)}", {})
