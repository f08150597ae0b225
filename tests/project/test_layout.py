"""The layout of the package: a file imports those above it in a table, and only one blocks or knows torch's inside."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT

import sync_batchnorm

PAGE = ROOT / "docs" / "contributing.md"


def name_of(path: Path) -> str:
    """Return how a file is named here: "backends.cpu"; "backends" for the entrance of a folder, "" for that of all."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {file: ast.parse(path.read_text(encoding="utf-8")) for file, path in PATHS.items()}
every_file = pytest.mark.parametrize("file", TREES)


def imported_from(file: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of a file, also of those in functions; relative ones as names of files."""
    folder = file if PATHS[file].name == "__init__.py" else file.rpartition(".")[0]
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = folder.split(".") if folder else []
            base = ["<package>", *parts[: len(parts) - node.level + 1]] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


def files_imported_by(file: str) -> set[str]:
    """Return the files of the package that a file imports."""
    files = set()
    for module, name in imported_from(file):
        if module == "<package>" or module.startswith("<package>."):
            module = module.removeprefix("<package>").removeprefix(".")
            inside = f"{module}.{name}".removeprefix(".")
            files.add(inside if inside in TREES else module)
    return files - {file}


@every_file
def test_imports_of_the_package_are_relative(file):
    assert not [module for module, _ in imported_from(file) if module.partition(".")[0] == "sync_batchnorm"]
    assert files_imported_by(file) <= set(TREES)


@pytest.mark.smoke
def test_documented_table_has_every_file_behind_those_that_it_imports():
    table = PAGE.read_text(encoding="utf-8").split("\n## The files\n")[1].split("\n## ")[0]
    rows = [name_of(PACKAGE / path) for path in re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE)]
    assert sorted(rows) == sorted(TREES)
    for i, file in enumerate(rows):
        assert files_imported_by(file) <= set(rows[:i]), f"{file} stands above what it imports"


def test_documented_folders_import_only_from_folders_above_them():
    table = PAGE.read_text(encoding="utf-8").split("\n## The folders\n")[1].split("\n## ")[0]
    folders = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    assert sorted(folders) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    for i, folder in enumerate(folders):
        files = [file for file in TREES if file.partition(".")[0] == folder]
        imported = {name.partition(".")[0] for file in files for name in files_imported_by(file)}
        assert imported & set(folders) <= set(folders[: i + 1]), f"{folder} imports from a folder below it"


def test_entrances_of_folders_hand_on_names_or_have_code_as_documented():
    hand_on = re.findall(r"^\| `(\w+)/` \|.*\| hands on names \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for folder in (path.parent.name for path in PACKAGE.glob("*/__init__.py")):
        _, *body = TREES[folder].body  # without the docstring
        assert (folder in hand_on) is all(
            isinstance(node, ast.ImportFrom) or "__all__" in ast.unparse(node) for node in body
        ), folder


@pytest.mark.parametrize("file", [file for file in TREES if file.partition(".")[0] == "meeting"])
def test_threads_meet_without_torch(file):
    assert not [module for module, _ in imported_from(file) if module.partition(".")[0] == "torch"]
    assert {imported.partition(".")[0] for imported in files_imported_by(file)} <= {"meeting"}


@pytest.mark.parametrize("file", [file for file in TREES if file.partition(".")[0] != "meeting"])
def test_other_files_take_names_of_the_meeting_from_its_folder(file):
    assert not [imported for imported in files_imported_by(file) if imported.startswith("meeting.")]


@every_file
def test_only_one_file_blocks(file):
    used = {name for module, name in imported_from(file) if module in ("threading", "queue")}
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("threading", "queue"):
            used.add(node.attr)
    allowed = {"wrapper.run": {"Thread", "SimpleQueue", "Event"}}  # those of a thread that stays, and of its caller
    allowed["wrapper.data_parallel"] = {"TIMEOUT_MAX"}
    allowed["meeting.records"] = {"SimpleQueue"}  # the type of a field
    allowed["wrapper.random_states"] = {"RLock"}  # around two operators of torch
    assert file == "meeting.coordinator" or used - {""} <= allowed.get(file, set())


@pytest.mark.parametrize("file", [file for file in TREES if file != "torch_private"])
def test_only_one_file_takes_what_is_private_out_of_torch(file):
    imported = {f"{module}.{name}" for module, name in imported_from(file)}
    used = {ast.unparse(node) for node in ast.walk(TREES[file]) if isinstance(node, ast.Attribute)}
    assert not [name for name in imported | used if re.match(r"(torch|nn)\.(?!Module\.)([\w.]+\.)?_[^_]", name)]


@every_file
def test_public_names_are_listed_and_have_docstrings(file):
    module = importlib.import_module(f"sync_batchnorm.{file}".removesuffix("."))
    # What `import *` takes. Files without a list only hand names on; for older code, a class of torch among them.
    listed = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    assert sorted(set(listed)) == sorted(listed)
    assert all(getattr(module, name).__doc__ for name in listed)
    assert set(listed) <= {*sync_batchnorm.__all__, "DataParallel"}


@every_file
def test_mistakes_of_users_are_no_assertions(file):
    assert not [node.lineno for node in ast.walk(TREES[file]) if isinstance(node, ast.Assert)]
