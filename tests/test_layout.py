"""The layout of the package: imports go down in floors, and what one file does, such as to block, no other does."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import sync_batchnorm

PACKAGE = Path(sync_batchnorm.__file__).parent
PAGE = PACKAGE.parent / "docs" / "contributing.md"


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
            base = ["<own>", *parts[: len(parts) - node.level + 1]] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


def own_imports(file: str) -> set[str]:
    """Return the files of the package that a file imports."""
    found = set()
    for module, name in imported_from(file):
        if module == "<own>" or module.startswith("<own>."):
            module = module.removeprefix("<own>").removeprefix(".")
            inside = f"{module}.{name}".removeprefix(".")
            found.add(inside if inside in TREES else module)
    return found - {file}


@functools.cache
def floor(file: str) -> int:
    """Return the number of the floor of a file; a circle of imports is a RecursionError."""
    return 1 + max(map(floor, own_imports(file)), default=0)


def test_imports_go_down_in_at_most_nine_floors():
    assert max(map(floor, TREES)) <= 9


@every_file
def test_imports_of_the_package_are_relative(file):
    assert not [module for module, _ in imported_from(file) if module.partition(".")[0] == "sync_batchnorm"]
    assert own_imports(file) <= set(TREES)


def test_documented_table_has_every_file_behind_those_that_it_imports():
    table = PAGE.read_text(encoding="utf-8").split("\n## The files\n")[1].split("\n## ")[0]
    rows = [name_of(PACKAGE / path) for path in re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE)]
    assert sorted(rows) == sorted(TREES)
    for i, file in enumerate(rows):
        assert own_imports(file) <= set(rows[:i]), f"{file} stands above what it imports"


@pytest.mark.parametrize("file", ["errors", "coordinator", "comm"])
def test_threads_meet_without_torch(file):
    assert not [module for module, _ in imported_from(file) if module.partition(".")[0] == "torch"]
    assert own_imports(file) <= {"errors", "coordinator"}


# What each file uses of `threading` and `queue`.
WAITING = {
    "coordinator": {"Empty", "Lock", "SimpleQueue"},
    "parallel.data_parallel": {"Thread"},
    "conversion": {"Lock"},  # around the names in torch.nn that are replaced for a while
    "replicate": {"TIMEOUT_MAX"},
}


@every_file
def test_only_one_file_blocks(file):
    used = {name for module, name in imported_from(file) if module in ("threading", "queue")}
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("threading", "queue"):
            used.add(node.attr)
    assert used - {""} == WAITING.get(file, set())


# Files that may ask of what kind a device is; all others leave that to `backend_for`, or ask a place.
KINDS_OF_DEVICES = {
    "backends",  # which backend a device has
    "backends.base",  # whether the host can read a tensor without a wait
    "backends.places",  # whether a device has streams
    "parallel.data_parallel",  # what `torch.nn.parallel` does for accelerators alone
    "replica",  # the autocast of each kind is on or off by itself
    "conversion",  # which devices the plain wrapper of a reverted model can have
    "__main__",  # whether a device that the user names is there, and whether a check can hang in it
}
KIND = re.compile(r"cpu|cuda|mps|xpu|xla|hpu|mtia|meta")


def asks_for_kind(tree: ast.AST) -> list[ast.AST]:
    """Return where the kind of a device decides.

    That is where a device type is used, but to call torch with it or to name it; a tensor asked whether it is on some
    kind of device; a value compared with the name of one; or `BACKENDS` looked at.
    """
    passed_on = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.autocast", "torch.is_autocast_enabled"):
            passed_on.update(node.args)
        elif isinstance(node, ast.Assign) and "device_type" in ast.unparse(node.targets[0]):
            passed_on.update(ast.walk(node.value))
    found = []
    for node in set(ast.walk(tree)) - passed_on:
        name = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(node, ast.Attribute):
            asks = node.attr == "type" or (node.attr.startswith("is_") and KIND.fullmatch(node.attr[3:]) is not None)
        else:
            compared = isinstance(node, (ast.Compare, ast.MatchValue))
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)] if compared else []
            asks = any(KIND.match(text) for text in texts if isinstance(text, str))
        if asks or name == "BACKENDS":
            found.append(node)
    return found


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ('input.device.type == "cuda"', True),
        ('kind in ("cpu", "cuda")', True),
        ('str(device) == "cuda:0"', True),
        ("input.is_cuda", True),
        ("RULES[device.type]", True),
        ('backends.BACKENDS["cpu"]', True),
        ("torch.autocast(device.type == kind)", True),
        ('match kind:\n    case "cuda":\n        pass', True),
        ("torch.autocast(device.type, enabled=False)", False),
        ("device_type = input.device.type", False),
        ('torch.empty(0, device="cpu")', False),
        ("f.is_leaf", False),
    ],
)
def test_question_for_a_kind_of_device_is_found(source, asks):
    assert bool(asks_for_kind(ast.parse(source))) == asks


@every_file
def test_only_few_files_ask_for_a_kind_of_device(file):
    asked = [f"line {node.lineno}: {ast.unparse(node)}" for node in asks_for_kind(TREES[file])]
    assert bool(asked) == (file in KINDS_OF_DEVICES), asked


# What is private to torch, mostly attributes of modules and tensors, and used outside of `torch_private.py`.
ATTRIBUTES = {
    "_buffers": {"parallel.copies"},
    "_check_input_dim": {"layers"},
    "_dynamo": {"glue"},  # whether it was imported
    "_former_parameters": {"layers", "parallel.copies"},
    "_forward_hooks": {"glue"},
    "_is_profiler_enabled": {"glue"},  # a variable of a module
    "_is_replica": {"layers", "parallel.copies", "replicate"},
    "_modules": {"parallel.copies", "replica"},
    "_parameters": {"parallel.copies"},
    "_replicate_for_data_parallel": {"parallel.copies"},
    "_version": {"parallel.data_parallel"},
}
OF_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
OWN_KEYS = {"_former_class", "_former_process_group"}  # of dictionaries of attributes
OF_OLDER_LIBRARY = {"_is_parallel", "_parallel_id", "_slave_pipe", "_sync_master"}


def names_in(file: str) -> Iterator[str]:
    """Yield all names of other objects: what is imported, attributes, keywords, and strings that may be looked up."""
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
            yield from str(node.value).split(".")
    for module, name in imported_from(file):
        yield from f"{module}.{name}".split(".")


def own_names(file: str) -> Iterator[str]:
    """Yield the names that a file gives to what it defines, in classes too, and to attributes of `self`."""
    for node in ast.walk(TREES[file]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


OBJECTS_OF_TORCH = [nn.BatchNorm2d(1), nn.DataParallel(nn.Identity())]
OTHERS = [file for file in TREES if file != "torch_private"]
OWN = {
    name for file in OTHERS for name in own_names(file) if not any(hasattr(owner, name) for owner in OBJECTS_OF_TORCH)
}
PRIVATE = re.compile("_[^_]|DisableTorchFunctionSubclass$|OptimizedModule$")


@pytest.mark.parametrize("file", OTHERS)
def test_only_one_file_names_what_is_private_to_torch(file):
    found = {name for name in names_in(file) if PRIVATE.match(name)}
    allowed = {name for name, files in ATTRIBUTES.items() if file in files}
    assert found - OWN - OWN_KEYS - OF_OLDER_LIBRARY - OF_PYTHON == allowed


@every_file
def test_first_line_says_what_the_file_is_for(file):
    first = (ast.get_docstring(TREES[file]) or "").split("\n")[0]
    assert first.endswith((".", ":"))
    assert len(first) > 20


@every_file
def test_public_names_are_listed_and_have_docstrings(file):
    if file == "timm":
        pytest.importorskip("timm")
    module = importlib.import_module(f"sync_batchnorm.{file}".removesuffix("."))
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert all(getattr(module, name).__doc__ for name in module.__all__)
    if file != "timm":
        assert set(module.__all__) <= set(sync_batchnorm.__all__)


@every_file
def test_mistakes_of_users_are_no_assertions(file):
    assert not [node.lineno for node in ast.walk(TREES[file]) if isinstance(node, ast.Assert)]
