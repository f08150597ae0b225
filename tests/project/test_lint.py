"""What a linter for this repository says: which file may import and do what; notes and versions that are claimed."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import resolve_name

import pytest
from repository import PACKAGE, ROOT

import sync_batchnorm

HERE = "<package>"
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
FILES = {  # by the name to import, without that of the package: "backends.cpu"; "backends", "" for the `__init__.py`
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {file: ast.parse(path.read_text(encoding="utf-8")) for file, path in FILES.items()}
FOLDERS = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]


def folder_of(file: str) -> str:
    return file.partition(".")[0]


def section(title: str) -> str:
    """Return a section of the page for contributors."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def imports_of(file: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of a file, also of those in functions; relative ones begin with `HERE`."""
    package = file if FILES[file].name == "__init__.py" else file.rpartition(".")[0]
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            module = resolve_name(module, f"{HERE}.{package}".removesuffix("."))
            yield from ((module, alias.name) for alias in node.names)


def files_imported_by(file: str) -> set[str]:
    """Return the files of the package that a file imports."""
    files = set()
    for module, name in imports_of(file):
        if module.partition(".")[0] == HERE:
            module = module.removeprefix(HERE).removeprefix(".")
            inside = f"{module}.{name}".removeprefix(".")
            files.add(inside if inside in TREES else module)
    return files - {file}


IMPORTED = {file: files_imported_by(file) for file in TREES}


def test_imports_of_the_package_are_relative_and_of_files_that_exist():
    for file in TREES:
        assert not [module for module, _ in imports_of(file) if folder_of(module) == "sync_batchnorm"], file
        assert IMPORTED[file] <= set(TREES), file


@pytest.mark.smoke
def test_no_file_imports_itself_through_others():
    above: dict[str, set[str]] = {}  # of each file that was visited: all that it imports, also through others

    def visit(file: str, path: tuple[str, ...]) -> set[str]:
        assert file not in path, f"{' imports '.join((*path, file))}"
        if file not in above:
            above[file] = set().union(*[{other} | visit(other, (*path, file)) for other in IMPORTED[file]])
        return above[file]

    assert len(visit("", ())) > len(TREES) // 2


def test_documented_folders_import_only_from_folders_above_them_and_entrances_have_no_code():
    rows = re.findall(r"^\| `(\w+)/` \|", section("The folders"), re.MULTILINE)
    assert sorted(rows) == sorted(FOLDERS)
    for i, folder in enumerate(rows):
        imported = {folder_of(name) for file in TREES if folder_of(file) == folder for name in IMPORTED[file]}
        assert imported & set(rows) <= set(rows[: i + 1]), f"{folder} imports from a folder below it"
        assert not [node for node in ast.walk(TREES[folder]) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def test_threads_meet_without_torch_and_others_take_names_of_the_meeting_from_its_folder():
    for file in TREES:
        if folder_of(file) == "meeting":
            assert not [module for module, _ in imports_of(file) if folder_of(module) == "torch"], file
            assert {folder_of(imported) for imported in IMPORTED[file]} <= {"meeting"}, file
        else:
            assert not [imported for imported in IMPORTED[file] if imported.startswith("meeting.")], file


def test_only_one_file_blocks_and_one_takes_what_is_private_out_of_torch():
    # those of a thread that stays, and of its caller
    allowed = {"wrapper.parallel_apply": {"Thread", "current_thread", "start_new_thread", "SimpleQueue", "Empty"}}
    allowed["wrapper.data_parallel"] = {"TIMEOUT_MAX"}
    allowed["meeting.records"] = {"SimpleQueue"}  # the type of a field
    allowed["wrapper.random_states"] = {"RLock"}  # around two operators of torch
    for file, tree in TREES.items():
        imported = {f"{module}.{name}" for module, name in imports_of(file)}
        used = imported | {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        blocking = {name.partition(".")[2] for name in used if re.match(r"(threading|_thread|queue)\.\w+$", name)}
        assert file == "meeting.coordinator" or blocking <= allowed.get(file, set()), file
        private = [name for name in used if re.match(r"(torch|nn)\.(?!Module\.)([\w.]+\.)?_[^_]", name)]
        assert file == "torch_private" or not private, file


def test_public_names_are_listed_and_have_docstrings_and_mistakes_of_users_are_no_assertions():
    for file, tree in TREES.items():
        module = importlib.import_module(f"sync_batchnorm.{file}".removesuffix("."))
        # What `import *` takes. Files without a list only hand names on; for older code, a class of torch among them.
        listed = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        assert sorted(set(listed)) == sorted(listed), file
        assert all(getattr(module, name).__doc__ for name in listed), file
        assert set(listed) <= {*sync_batchnorm.__all__, "DataParallel"}, file
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], file


def test_notes_that_are_cited_exist_once():
    notes, cited = Counter[str](), dict[str, str]()
    files = [ROOT / "setup.py", ROOT / "README.md"]
    for folder in ("sync_batchnorm", "tests", ".ci", "docs"):
        files += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".h", ".cpp", ".md")]
    for path in files:
        text = re.sub(r"\n[ /#>]*", "\n", path.read_text(encoding="utf-8"))  # without what begins a line of a comment
        if path.suffix != ".md":
            # A note begins a line with its name and a colon, or in C++ what it says.
            notes.update(re.findall(r"^NOTE \[([^]]+)\](?::|$|(?= [A-Z]))", text, re.MULTILINE))
        cited |= {" ".join(name.split()): path.name for name in re.findall(r"NOTE\s+\[([^]]+)\]", text)}
    assert len(cited) > 10
    assert not [f"{name}, in {file}" for name, file in cited.items() if notes[name] != 1]


def test_versions_that_are_claimed_have_passed_and_are_those_of_workflow_and_command():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    oldest = re.search(r'"torch>=([\d.]+)"', setup)[1]
    pythons = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup))
    table = [re.split(r" *\| *", line.strip("| ")) for line in section("Versions").splitlines() if line.startswith("|")]
    rows = [dict(zip(table[0], row, strict=True)) for row in table[2:]]
    assert not [row for row in rows if row["failed"] != "0" or int(row["passed"]) < 1000]
    assert min((row["torch"] for row in rows), key=lambda torch: [*map(int, torch.split("."))]) == oldest
    assert {row["Python"].rpartition(".")[0] for row in rows} == pythons
    assert "Free Threading" not in setup
    for file in (".github/workflows/ci.yml", "noxfile.py"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"torch=={oldest} " in text
        assert set(re.findall(r'"(3\.\d+)"', text)) == pythons
    assert all(f'"{pin}"' in setup for pin in re.search(r'"pinned": "(.+)"', text)[1].split())
