"""The import lines of public repositories, from the table of `docs/migrating.md`: they run, and give what works."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TwoLayers, assert_same_step, doubles, twins
from torch import nn

import sync_batchnorm
from sync_batchnorm import SlavePipe, SynchronizedBatchNorm1d

PAGE = Path(__file__).parents[1] / "docs" / "migrating.md"
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


def use_layer(cls: type[nn.Module]) -> None:
    plain = {base.__name__: base for base in cls.__mro__}[cls.__name__.removeprefix("Synchronized")]
    sizes = (4,) * int(cls.__name__[-2])
    for make in (cls, functools.partial(cls, momentum=3e-4), lambda n: cls(n, 1e-3, 0.2, True)):
        ours = make(3).double()
        reference = plain(3, ours.eps, ours.momentum).double()
        ours.weight.data.fill_(2)
        ours.bias.data.zero_()
        reference.load_state_dict(ours.state_dict())
        parallel = sync_batchnorm.DataParallelWithCallback(ours, ["cpu"] * 2)
        assert_same_step(reference, parallel, doubles(5, 3, *sizes))


def use_wrapper(cls: type[nn.DataParallel]) -> None:
    plain, _ = twins(TwoLayers().double(), ["cpu"])
    ours = sync_batchnorm.convert_model(TwoLayers().double())
    ours.load_state_dict(plain.state_dict())
    assert_same_step(plain, cls(ours, device_ids=["cpu"] * 2), doubles(5, 3, 6, 6))


def use_patch(function: Callable[..., Any]) -> None:
    parallel = nn.DataParallel(nn.BatchNorm1d(3))
    function(parallel)
    assert isinstance(parallel, sync_batchnorm.DataParallelWithCallback)


def use_conversion(function: Callable[..., Any]) -> None:
    for model in (TwoLayers().double(), nn.DataParallel(TwoLayers().double())):
        converted = function(model)
        inner = converted.module if isinstance(converted, nn.DataParallel) else converted
        plain = TwoLayers().double()
        plain.load_state_dict(inner.state_dict())
        assert_same_step(plain, sync_batchnorm.DataParallelWithCallback(inner, ["cpu"] * 2), doubles(5, 3, 6, 6))


def use_context(function: Callable[..., Any]) -> None:
    with function():
        assert isinstance(nn.BatchNorm1d(3), SynchronizedBatchNorm1d)
    assert not isinstance(nn.BatchNorm1d(3), SynchronizedBatchNorm1d)


def use_eps_mode(function: Callable[..., Any]) -> None:
    outputs = {}
    for mode in ("clamp", "plus"):
        function(mode)
        parallel = sync_batchnorm.DataParallelWithCallback(SynchronizedBatchNorm1d(1, eps=1.0).double(), ["cpu"] * 2)
        outputs[mode] = parallel(torch.tensor([[-1.0], [1.0]], dtype=torch.float64)).flatten().tolist()
    assert outputs["clamp"] == pytest.approx([-1.0, 1.0])
    assert outputs["plus"] == pytest.approx([-(0.5**0.5), 0.5**0.5])


class Echo(nn.Module):
    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.found = getattr(ctx, "found", None)
        ctx.found = copy_id


def use_callbacks(function: Callable[..., Any]) -> None:
    copies = [Echo() for _ in range(3)]
    function(copies)
    assert [copy.found for copy in copies] == [None, 0, 1]


def use_master(cls: type[Any]) -> None:
    master = cls(lambda messages: [(k, sum(m for _, m in messages)) for k, _ in messages])
    pipes = [master.register_slave(k) for k in (1, 2)]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda p=p: results.append(p.run_slave(p.identifier))) for p in pipes]
    for thread in threads:
        thread.start()
    results.append(master.run_master(10))
    for thread in threads:
        thread.join()
    assert results == [13] * 3


def is_class(expected: type[Any]) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        assert found is expected

    return check


USES: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(LAYERS, use_layer),
    "DataParallelWithCallback": use_wrapper,
    "patch_replication_callback": use_patch,
    "convert_model": use_conversion,
    "patch_sync_batchnorm": use_context,
    "set_sbn_eps_mode": use_eps_mode,
    "execute_replication_callbacks": use_callbacks,
    "CallbackContext": lambda cls: setattr(cls(), "anything", 1),
    "SyncMaster": use_master,
    "SlavePipe": is_class(SlavePipe),
    "DataParallel": is_class(nn.DataParallel),
}


@pytest.fixture(autouse=True)
def _usual_eps_mode() -> Iterator[None]:
    yield
    sync_batchnorm.set_sbn_eps_mode("plus")


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


@pytest.mark.parametrize("line", [line for line in WORKING if re.match(r"(from|import) sync_batchnorm", line)])
def test_line_works_as_it_is(line, edited):
    assert edited[line] == line
    for name, found in objects_of(line).items():
        USES[name](found)


@pytest.mark.parametrize("line", [line for line in WORKING if not re.match(r"(from|import) sync_batchnorm", line)])
def test_line_with_a_folder_in_front_works_without_it(line, edited):
    assert re.match(r"(from|import) sync_batchnorm", edited[line])
    for name, found in objects_of(edited[line]).items():
        USES[name](found)


@pytest.mark.parametrize("module", NAMES)
def test_modules_give_all_that_those_of_the_older_library_list(module):
    for name, found in objects_of(f"from {module} import {', '.join(NAMES[module])}").items():
        USES[name](found)
    assert set(NAMES[module]) <= set(sys.modules[module].__all__)


def test_lines_of_a_folder_with_another_name_work_behind_its_own_init(tmp_path, monkeypatch):
    (edit,) = re.findall(r"^\| the folder `lib/nn/modules` behind `lib.nn` \| `(from .+?)` instead", TEXT, re.MULTILINE)
    package = tmp_path / "lib" / "nn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"{edit}\nfrom .parallel import UserScatteredDataParallel, user_scattered_collate\n"
    )
    (package / "parallel.py").write_text("class UserScatteredDataParallel: ...\nuser_scattered_collate = list\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = [line for line in ELSEWHERE if line.startswith("from lib.nn ")]
    assert len(lines) == 2
    for line in lines:
        for name, found in objects_of(line).items():
            if name in USES:
                USES[name](found)
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
