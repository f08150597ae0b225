"""The folder of the package, copied into somebody's project: on the path, or inside of a package of the project."""

import importlib
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forks import forked, needs_fork
from repository import PACKAGE, copy_without_caches
from torch import nn

import sync_batchnorm

INSIDE = "models.networks.sync_batchnorm"
pytestmark = needs_fork


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the folder of a project that has two copies: on its path, and inside of a package."""
    for folder in ("", "models/networks"):
        copy_without_caches(PACKAGE, tmp_path / folder / "sync_batchnorm")
    for folder in ("models", "models/networks"):
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def in_project(project: Path, name: str, body: Callable[[ModuleType], object]) -> str:
    """Run `body` in a child with the copy of that name, without any other; return what it prints."""

    def run() -> None:
        for loaded in [name for name in sys.modules if {"sync_batchnorm", "models"} & set(name.split("."))]:
            del sys.modules[loaded]
        sys.path.insert(0, str(project))
        if name != "sync_batchnorm":
            sys.modules["sync_batchnorm"] = None  # type: ignore[assignment]
        body(importlib.import_module(name))

    status, output = forked(run)
    assert status == 0, output
    return output


@pytest.mark.parametrize("name", ["sync_batchnorm", INSIDE])
def test_copy_is_imported_from_where_it_is_and_knows_its_version(project, name):
    file = project / name.replace(".", "/") / "__init__.py"
    printed = in_project(project, name, lambda copied: print(copied.__file__, copied.__version__))
    assert printed == f"{file} {sync_batchnorm.__version__}\n"


def test_copy_inside_of_a_package_has_the_modules_that_older_code_imports(project):
    def body(copied: ModuleType) -> None:
        for name in ("batchnorm", "comm", "replicate"):
            older = importlib.import_module(f"{INSIDE}.{name}")
            public = set(copied.__all__) & set(dir(older))
            print(len(public), all(getattr(copied, each) is getattr(older, each) for each in public))
        print({name.partition(".")[0] for name, module in sys.modules.items() if "sync_batchnorm" in name and module})

    assert in_project(project, INSIDE, body) == "11 True\n3 True\n4 True\n{'models'}\n"


def test_pickles_of_a_copy_name_its_place_and_its_state_is_that_of_torch(project):
    def body(copied: ModuleType) -> None:
        plain = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
        model = copied.convert_model(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
        model.load_state_dict(plain.state_dict(), strict=True)
        parallel = copied.DataParallelWithCallback(model, ["cpu"] * 2)
        batch = torch.randn(4, 3)
        torch.testing.assert_close(parallel(batch), plain(batch))
        print(list(model.state_dict()) == list(plain.state_dict()))
        for module in (model, parallel):
            pickled = pickle.dumps(module)
            print(sorted(set(re.findall(rb"(?:models)?[a-z_.]*sync_batchnorm[\w.]*", pickled))))
            loaded = pickle.loads(pickled)
            print(type(loaded) is type(module), all(map(torch.equal, loaded.buffers(), model.buffers())))

    layers, wrapper = f"{INSIDE}.layers.layer".encode(), f"{INSIDE}.wrapper.data_parallel".encode()
    expected = f"True\n{[layers]}\nTrue True\n{[layers, wrapper]}\nTrue True\n"
    assert in_project(project, INSIDE, body) == expected
