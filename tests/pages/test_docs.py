"""What the pages say is true: their code runs, their links lead somewhere, and the reference has every public name."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import socket
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import blocks_of

import sync_batchnorm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
API = ROOT / "docs" / "api.md"


def prose_of(page: Path) -> str:
    """Return the text of a page without its blocks and inline code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^(```+).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^(```+).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"[`*]", "", heading) for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)]
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
    seen: Counter[str] = Counter()
    anchors = set()
    for slug in slugs:
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(params=PAGES, ids=relative)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def _clean_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run code of a page in an empty folder, without a display or network; put back what it sets for the process."""

    def refuse(*args: Any) -> NoReturn:
        raise OSError(f"expected code that needs no network, but got a connection to {args[1:]}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    matplotlib = None
    with suppress(ImportError):  # which only some pages need
        matplotlib = importlib.import_module("matplotlib")
        backend = matplotlib.get_backend()
        matplotlib.use("Agg")
    yield
    if matplotlib is not None:
        matplotlib.use(backend)
    sync_batchnorm.set_sbn_eps_mode("plus")


ELSEWHERE = {"frameworks.md"}  # run by test_frameworks.py, with the frameworks
KEPT: list[types.ModuleType] = []  # a group of gloo that ends while its thread waits for the GIL hangs (torch 2.13)
OPTIONAL = {"matplotlib", "sklearn", "timm", "torchvision", "tqdm"}  # what a page may use without saying so


@pytest.mark.usefixtures("_clean_room")
@pytest.mark.watchdog(60)
@pytest.mark.filterwarnings("ignore:PyTorch finds no accelerator")  # what a page says for GPUs
def test_python_blocks_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    if page.name in ELSEWHERE:
        pytest.skip("needs the frameworks that it is about")
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    KEPT.append(module)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes that a page defines can be pickled
    for block in blocks_of(page):
        if block.language == "python":
            # The empty lines make a traceback name the line of the page.
            code = "\n" * (block.line - 1) + block.code
            try:
                exec(compile(code, str(page), "exec"), module.__dict__)
            except ModuleNotFoundError as error:
                if str(error.name).partition(".")[0] not in OPTIONAL:
                    raise
                pytest.skip(f"the code of line {block.line} needs {error.name}, which is not installed")


@pytest.mark.filterwarnings("ignore:PyTorch finds no accelerator")
@pytest.mark.parametrize(
    "name",
    [
        *("SynchronizedBatchNorm", "convert_model", "DataParallelWithCallback", "patch_replication_callback"),
        *("assert_synchronized", "assert_matches_one_device"),
    ],
)
def test_example_of_a_docstring_runs(name: str):
    names = {"torch": torch, "nn": torch.nn, **vars(sync_batchnorm)}
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(sync_batchnorm, name), name, globs=names)
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed


def test_blocks_of_a_page_say_what_they_are(page: Path):
    languages = {"python", "bash", "text", "diff"}
    wrong = [f"line {block.line}: {block.language!r}" for block in blocks_of(page) if block.language not in languages]
    assert not wrong, f"{relative(page)}: expected one of {languages}, but got {wrong}"


def test_local_links_of_a_page_lead_somewhere(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    assert not broken, f"{relative(page)}: broken links {broken}"


def test_every_page_of_docs_is_on_the_map():
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", prose_of(ROOT / "README.md"))}
    missing = [relative(page) for page in (ROOT / "docs").glob("*.md") if page not in linked]
    assert not missing


def signature_of(qualified_name: str) -> str:
    """Return how a public name, or a method of one, is called: the signature of its object without annotations."""
    name, _, method = qualified_name.partition(".")
    owner = getattr(sync_batchnorm, name)
    if not method and isinstance(owner, type) and issubclass(owner, BaseException):
        return f"{name}(message)"  # Exceptions that are written in C have no signature to inspect.
    found = inspect.signature(getattr(owner, method) if method else owner)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()][1 if method else 0 :]
    return f"{qualified_name}{inspect.Signature(parameters)}"


def sections_of_the_reference() -> list[tuple[list[str], str]]:
    """Return the names in the heading of each section, of which all have the signatures of the first, and its text."""
    parts = re.split(r"^## (.+)$", API.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [(re.findall(r"\w+", heading), text) for heading, text in zip(parts[::2], parts[1::2], strict=True)]


def test_reference_has_one_section_for_each_public_name():
    assert sorted(name for names, _ in sections_of_the_reference() for name in names) == sorted(sync_batchnorm.__all__)


@pytest.mark.parametrize("name", sync_batchnorm.__all__)
def test_signatures_in_the_reference_are_those_of_the_code(name: str):
    first, section = next((names[0], text) for names, text in sections_of_the_reference() if name in names)
    block = re.search(r"^```text\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert block, f"the section {name} of {relative(API)} begins with no block of signatures"
    # A signature may go on in lines that are indented.
    text = re.sub(r"\n +", " ", block[1]).replace("( ", "(")
    signatures = re.sub(rf"^{first}\b", name, text, flags=re.MULTILINE).splitlines()
    expected = [signature_of(signature.partition("(")[0]) for signature in signatures]
    assert signatures == expected
    assert all(signature.startswith((f"{name}(", f"{name}.")) for signature in signatures)


def calls_of_a_step() -> set[str]:
    """Return which functions of the package and its base a training step on two replicas calls, as "file:name"."""
    calls, package, base = set(), Path(sync_batchnorm.__file__).parent, Path(inspect.getfile(torch.nn.DataParallel))

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and (package in path.parents or path == base):
            folder = base.parents[3] if path == base else package
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


def test_files_that_the_inner_pages_name_exist():
    files = {file.name for pattern in ("*.py", "*/**/*.py") for file in ROOT.glob(pattern)}
    for page in (ROOT / "docs" / "how-it-works.md", ROOT / "docs" / "contributing.md"):
        named = set(re.findall(r"\b(\w+\.py)\b", page.read_text(encoding="utf-8")))
        assert named <= files, f"{relative(page)}: no such files {sorted(named - files)}"


def test_notes_that_a_page_names_stand_in_their_file(page: Path):
    for note, file in re.findall(r"(NOTE \[[^\]]+\])\s+in\s+`(\w+\.py)`", page.read_text(encoding="utf-8")):
        assert note in (ROOT / "sync_batchnorm" / file).read_text(encoding="utf-8"), f"{relative(page)}: {note}, {file}"
