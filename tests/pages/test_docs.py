"""What the pages say is true: their code runs, and the reference is made from the docstrings of today."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
import socket
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from conftest import first_in_smoke, slow
from repository import PACKAGE, PAGES, ROOT, blocks_of

import sync_batchnorm


@pytest.fixture
def _clean_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run code of a page in an empty folder, without a network."""

    def refuse(*args: Any) -> NoReturn:
        raise OSError(f"expected code that needs no network, but got a connection to {args[1:]}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    sync_batchnorm.set_sbn_eps_mode("plus")


KEPT: list[types.ModuleType] = []  # a group of gloo that ends while its thread waits for the GIL hangs (torch 2.13)
OF_FRAMEWORKS = ROOT / "docs" / "frameworks.md"  # which test_frameworks.py runs
SLOW = [ROOT / "docs" / name for name in ("usage.md", "diagnosing.md")]
QUICK_FIRST = [*first_in_smoke(page for page in PAGES if page not in (*SLOW, OF_FRAMEWORKS)), *slow(*SLOW)]
OPTIONAL = {"matplotlib", "sklearn", "timm", "torchvision", "tqdm"}  # what a page may use without saying so


@pytest.mark.parametrize("page", QUICK_FIRST, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("_clean_room")
@pytest.mark.filterwarnings("ignore:PyTorch finds no accelerator")  # what a page says for GPUs
def test_python_blocks_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    KEPT.append(module)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes that a page defines can be pickled
    for block in blocks_of(page):
        try:
            if block.language == "python":
                block.run(vars(module))
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in OPTIONAL:
                raise
            pytest.skip(f"the code of line {block.line} needs {error.name}, which is not installed")


WITHOUT_EXAMPLE = {  # each is a part of one that docs/extending.md has, or nothing that a user calls
    *("SyncMaster", "SlavePipe", "CallbackContext", "execute_replication_callbacks", "merge_messages"),
    *("ReplicaSyncError", "SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d"),
}


@pytest.mark.filterwarnings("ignore:PyTorch finds no accelerator")
@pytest.mark.parametrize("name", [name for name in sync_batchnorm.__all__ if name not in WITHOUT_EXAMPLE])
def test_example_of_a_docstring_runs(name: str):
    names = {"torch": torch, "nn": torch.nn, **vars(sync_batchnorm)}
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(sync_batchnorm, name), name, globs=names)
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed


def test_readme_shows_code_within_its_first_words():
    before_the_code = (ROOT / "README.md").read_text(encoding="utf-8").partition("```")[0]
    assert len(before_the_code.split()) <= 80


@pytest.mark.parametrize("removed", ["+", "-"], ids=["before", "after"])
def test_training_loop_of_the_readme_runs_before_and_after_the_change(removed: str):
    (diff,) = [block.code for block in blocks_of(ROOT / "README.md") if block.language == "diff"]
    code = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(removed))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(device)
    batches = [(torch.randn(6, 3, device=device), torch.randint(4, (6,), device=device))] * 2
    names = {"nn": torch.nn, "cross_entropy": torch.nn.functional.cross_entropy, "model": net, "batches": batches}
    exec(code, names | {"optimizer": torch.optim.SGD(net.parameters(), 0.1)})
    assert net[1].num_batches_tracked == 2
    assert isinstance(net[1], sync_batchnorm.SynchronizedBatchNorm1d) == (removed == "-")


@pytest.mark.smoke
def test_reference_is_what_the_docstrings_say():
    reference = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["reference"]()
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == reference, "run: python docs/make_api.py"


def calls_of_a_step() -> set[str]:
    """Return which functions of the package and its base a training step on two replicas calls, as "file:name"."""
    calls, base = set(), Path(inspect.getfile(torch.nn.DataParallel))

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and (PACKAGE in path.parents or path == base):
            folder = base.parents[3] if path == base else PACKAGE
            calls.add(f"{path.relative_to(folder).as_posix()}:{frame.f_code.co_qualname}")

    parallel = sync_batchnorm.DataParallelWithCallback(sync_batchnorm.SynchronizedBatchNorm2d(3), ["cpu"] * 2)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        parallel(torch.randn(4, 3, 2, 2, requires_grad=True)).square().sum().backward()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def test_drawings_of_a_step_name_what_runs_on_two_replicas():
    called = calls_of_a_step()
    drawings = [block.code for block in blocks_of(ROOT / "docs" / "how-it-works.md") if ".py" in block.code]
    drawn = re.findall(r"^(.+) ([\w/]+\.py)", "".join(drawings), re.MULTILINE)
    assert len(drawn) > 30
    for names, file in drawn:
        for name in re.findall(r"(?:^|  )(\w[\w.]*)", names):
            assert any(re.fullmatch(rf"{file}:(.*\.)?{re.escape(name)}", call) for call in called), f"{name} in {file}"


@pytest.mark.parametrize("name", ["how-it-works.md", "contributing.md"])
def test_files_and_notes_that_the_inner_pages_name_exist(name: str):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert set(re.findall(r"\b(\w+\.py)\b", text)) <= {file.name for file in ROOT.rglob("*.py")}
    for note, file in re.findall(r"(NOTE \[[^\]]+\])\s+in\s+`([\w/]+\.py)`", text):
        assert note in (ROOT / "sync_batchnorm" / file).read_text(encoding="utf-8"), f"{note} in {file}"
