"""The layout of the package: imports go in one direction, and what one file does, such as to block, no other does."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from torch import nn

import sync_batchnorm

PACKAGE = Path(sync_batchnorm.__file__).parent


def name_of(path):
    """Return how a file is named here: "backends.cpu"; "backends" for the entrance of a subpackage."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

# What each file may import from the package, in an order in which every file comes after what it imports.
IMPORTS = {
    "torch_private": set(),
    "errors": set(),
    "warning": set(),
    "coordinator": {"errors"},
    "comm": {"coordinator"},
    "profiling": {"coordinator", "torch_private"},
    "compilation": {"torch_private"},
    "places": set(),
    "scatter_gather": {"torch_private", "warning"},
    "local_parallel": {"errors", "places", "scatter_gather", "torch_private"},
    "recompute": {"torch_private"},
    "backends.base": {"places"},
    "backends.cpu": {"backends.base"},
    "backends.joined": {"backends.base", "backends.cpu"},
    "backends.cuda": {"backends.base", "places"},
    "backends.general": {"backends.base"},
    "backends": {"backends.base", "backends.cpu", "backends.cuda", "backends.general", "backends.joined"},
    "distributed": {"backends.base", "places", "torch_private"},
    "saved": {"places", "recompute", "torch_private"},
    "autograd": {"backends", "backends.base", "distributed", "places", "recompute", "saved", "torch_private"},
    "functional": {
        "autograd",
        "backends",
        "backends.base",
        "comm",
        "compilation",
        "distributed",
        "places",
        "recompute",
        "saved",
        "torch_private",
    },
    "replica": {"compilation", "coordinator", "distributed", "errors", "torch_private"},
    "replicate": {
        "comm",
        "compilation",
        "coordinator",
        "distributed",
        "local_parallel",
        "profiling",
        "replica",
        "torch_private",
        "warning",
    },
    "layers": {
        "autograd",
        "backends.base",
        "comm",
        "compilation",
        "distributed",
        "functional",
        "places",
        "replica",
        "replicate",
        "torch_private",
        "warning",
    },
    "conversion": {"layers", "local_parallel", "replicate", "torch_private", "warning"},
    "check": {"distributed", "layers", "replicate", "torch_private"},
    "batchnorm": {"check", "conversion", "layers"},
    "timm": {"layers"},
}
# Imported in a function: by those who have installed what it is for, and by a method that torch's own layers have.
LATE = {"conversion": {"timm"}, "layers": {"conversion"}}
FOR_TYPES = {"backends.base": {"backends.joined"}}  # imported for the type checker alone
ENTRANCES = {"__init__", "__main__"}  # may import everything

WITHOUT_TORCH = ["errors", "warning", "coordinator", "comm"]

# What each file uses of `threading` and `queue` that waits, or makes a thread.
WAITING = {
    "coordinator": {"Empty", "Lock", "SimpleQueue"},
    "distributed": {"Lock"},  # around numbers alone
    "saved": {"Lock"},  # around what several backwards share, and never while anything is computed
    "conversion": {"Lock"},  # around the names in torch.nn that are replaced for a while
    "local_parallel": {"Lock", "SimpleQueue", "Thread"},  # threads that it has started, and their end
}
HARMLESS = {"TIMEOUT_MAX"}

# Private attributes of the modules and tensors of torch, and the files that use them. `torch_private.py` says what for.
ATTRIBUTES = {
    "_buffers": {"local_parallel"},
    "_call_impl": {"replica"},
    "_check_input_dim": {"layers"},
    "_compiled_call_impl": {"replica", "replicate"},
    "_former_parameters": {"layers", "local_parallel"},
    "_forward_hooks": {"warning"},
    "_is_replica": {"layers", "replicate"},
    "_modules": {"local_parallel"},
    "_parameters": {"local_parallel"},
    "_replicate_for_data_parallel": {"local_parallel"},
    "_version": {"local_parallel"},
    "_wrapped_call_impl": {"replica"},
}
PRIVATE_TOO = {"DisableTorchFunctionSubclass", "OptimizedModule", "maybe_clear_saved_tensors"}  # documented nowhere
OF_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
OWN_KEYS = {"_former_class", "_former_process_group"}  # of dictionaries of attributes
OF_OLDER_LIBRARY = {"_is_parallel", "_parallel_id", "_slave_pipe", "_sync_master"}


def imported(nodes):
    """Yield the names of modules that are imported, with the names taken from each."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield node.module, alias.name


def own_imports(nodes):
    """Return the files of the package that are imported."""
    found = set()
    for module, name in imported(nodes):
        if module == "sync_batchnorm":
            found.add(name)
        elif module.startswith("sync_batchnorm."):
            found.add(module.removeprefix("sync_batchnorm."))
    return found


def test_every_file_has_its_place():
    assert set(TREES) - ENTRANCES <= set(IMPORTS)


def test_the_order_of_the_files_has_no_cycle():
    above = set()
    for file, allowed in IMPORTS.items():
        assert allowed <= above
        above.add(file)


@pytest.mark.parametrize("file", sorted(set(TREES) - ENTRANCES))
def test_imports_go_in_one_direction(file):
    at_import, late, for_types = TREES[file].body, LATE.get(file, set()), FOR_TYPES.get(file, set())
    everywhere = own_imports(ast.walk(TREES[file]))
    assert everywhere - late - for_types <= IMPORTS[file]
    assert late | for_types <= everywhere - own_imports(at_import)
    unused = [node for node in at_import if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    assert own_imports(node for block in unused for node in ast.walk(block)) == for_types


def test_documented_table_has_every_file_behind_those_that_it_imports():
    page = (Path(__file__).parents[1] / "docs" / "contributing.md").read_text()
    table = page.split("\n## The files\n")[1].split("\n## ")[0]
    paths = re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE)
    rows = [file for file in (name_of(PACKAGE / path) for path in paths) if file not in ENTRANCES]
    assert sorted(rows) == sorted(set(TREES) - ENTRANCES)
    for i, file in enumerate(rows):
        assert IMPORTS[file] & set(TREES) <= set(rows[:i]), f"{file} stands above what it imports"


@pytest.mark.parametrize("file", WITHOUT_TORCH)
def test_threads_meet_without_torch(file):
    assert not [module for module, _ in imported(ast.walk(TREES[file])) if module.split(".")[0] == "torch"]


@pytest.mark.parametrize("file", TREES)
def test_only_one_file_blocks(file):
    tree = TREES[file]
    used = {name for module, name in imported(ast.walk(tree)) if module in ("threading", "queue")} - {"threading"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "threading":
            used.add(node.attr)
    assert used - HARMLESS <= WAITING.get(file, set())


# Files that may ask of what kind a device is; all others leave that to `backend_for`, or ask a place.
KINDS_OF_DEVICES = {
    "backends",  # which backend a device has
    "places",  # whether a device has streams, and whether the host can read what is there
    "local_parallel",  # what `torch.nn.parallel` does for accelerators alone
    "replica",  # the autocast of each kind is on or off by itself
    "conversion",  # which devices the plain wrapper of a reverted model can have
    "__main__",  # whether a device that the user names is there, and whether a check can hang in it
}
KIND = re.compile(r"cpu|cuda|mps|xpu|xla|hpu|mtia|meta")


def asks_for_kind(tree):
    """Return where the kind of a device decides.

    That is where a device type is used, but for those that are only passed on to torch; a tensor asked whether it is on
    some kind of device; a value compared with the name of one; or `BACKENDS` looked at.
    """
    to_torch = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.autocast", "torch.is_autocast_enabled"):
            to_torch.update(node.args)
    found = []
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(node, ast.Attribute) and node not in to_torch:
            asks = node.attr == "type" or (node.attr.startswith("is_") and KIND.fullmatch(node.attr[3:]) is not None)
        else:
            compared = isinstance(node, (ast.Compare, ast.MatchValue))
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)] if compared else []
            asks = any(KIND.match(text) for text in texts if isinstance(text, str))
        if asks or name == "BACKENDS":
            found.append(node)
    return found


@pytest.mark.parametrize(
    "source",
    [
        'input.device.type == "cuda"',
        'kind in ("cpu", "cuda")',
        'kind != "cpu"',
        'str(device) == "cuda:0"',
        "input.is_cuda",
        "device.type in FUSED",
        "RULES[device.type]",
        "RULES.get(device.type)",
        'BACKENDS["cpu"]',
        'backends.BACKENDS["cpu"]',
        "torch.autocast(device.type == kind)",
        'match kind:\n    case "cuda":\n        pass',
    ],
)
def test_question_for_a_kind_of_device_is_found(source):
    assert asks_for_kind(ast.parse(source))


@pytest.mark.parametrize(
    "source", ["torch.autocast(device.type, enabled=False)", 'torch.empty(0, device="cpu")', "f.is_leaf"]
)
def test_device_that_is_passed_on_is_no_question(source):
    assert not asks_for_kind(ast.parse(source))


@pytest.mark.parametrize("file", TREES)
def test_only_few_files_ask_for_a_kind_of_device(file):
    asked = [f"line {node.lineno}: {ast.unparse(node)}" for node in asks_for_kind(TREES[file])]
    assert bool(asked) == (file in KINDS_OF_DEVICES), asked


def names_in(tree):
    """Yield all names of other objects: what is imported, attributes, keywords, and strings that may be looked up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
            yield from str(node.value).split(".")
    for module, name in imported(ast.walk(tree)):
        yield from f"{module}.{name}".split(".")


def own_names(tree):
    """Yield the names that a file gives to what it defines, in classes too, and to attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def is_private(name):
    return re.match("_[^_]", name) is not None or name in PRIVATE_TOO


OBJECTS_OF_TORCH = [nn.BatchNorm2d(1), nn.DataParallel(nn.Identity())]
OWN = {name for file in set(TREES) - {"torch_private"} for name in own_names(TREES[file])}
OWN -= {name for name in OWN if any(hasattr(owner, name) for owner in OBJECTS_OF_TORCH)}


@pytest.mark.parametrize("file", sorted(set(TREES) - {"torch_private"}))
def test_only_one_file_names_what_is_private_to_torch(file):
    found = {name for name in names_in(TREES[file]) if is_private(name)}
    allowed = {name for name, files in ATTRIBUTES.items() if file in files}
    assert found - OWN - OWN_KEYS - OF_OLDER_LIBRARY - OF_PYTHON <= allowed


def test_every_private_attribute_is_used_where_it_is_listed_and_is_explained():
    for name, files in ATTRIBUTES.items():
        assert all(name in names_in(TREES[file]) for file in files), name
    assert set(re.findall(r"``(_\w+)``", ast.get_docstring(TREES["torch_private"]))) == set(ATTRIBUTES)


@pytest.mark.parametrize("file", TREES)
def test_first_line_says_what_the_file_is_for(file):
    first = (ast.get_docstring(TREES[file]) or "").split("\n")[0]
    assert first.endswith((".", ":"))
    assert len(first) > 20


def module_of(file):
    if file == "timm":
        pytest.importorskip("timm")
    return importlib.import_module("sync_batchnorm" if file == "__init__" else f"sync_batchnorm.{file}")


@pytest.mark.parametrize("file", sorted(set(TREES) - {"__main__"}))
def test_public_names_are_listed_and_there(file):
    module = module_of(file)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_package_has_the_public_names_of_its_files():
    files = [importlib.import_module(f"sync_batchnorm.{file}") for file in set(TREES) - ENTRANCES - {"timm"}]
    assert set(sync_batchnorm.__all__) == {name for module in files for name in module.__all__}


@pytest.mark.parametrize("file", TREES)
def test_public_objects_have_docstrings(file):
    module = module_of(file)
    assert all(getattr(module, name).__doc__ for name in getattr(module, "__all__", ()))


@pytest.mark.parametrize("file", TREES)
def test_mistakes_of_users_are_no_assertions(file):
    assert not [node.lineno for node in ast.walk(TREES[file]) if isinstance(node, ast.Assert)]


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
