"""What a user installs: the archive of sources makes a complete wheel, and the installed copy runs and has types."""

from __future__ import annotations

import email
import os
import re
import runpy
import shutil
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT, copy_without_caches, output_of

import sync_batchnorm

USER = Path(__file__).with_name("typing_user.py")
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.py", "sync_batchnorm")
BUILD = "import setuptools.build_meta, sys; setuptools.build_meta.{}(sys.argv[1])"

pytestmark = pytest.mark.timeout(900)  # A type check that has nothing in its cache reads all of torch.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an archive of the sources, and the wheel from the archive."""
    sources, dist = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            copy_without_caches(ROOT / name, sources / name)
        else:
            shutil.copy(ROOT / name, sources)
    output_of([sys.executable, "-c", BUILD.format("build_sdist"), dist], sources)
    (archive,) = dist.glob("*.tar.gz")
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in Python 3.11.2, that of Debian 12
    shutil.unpack_archive(archive, sources / "unpacked", **options)
    (unpacked,) = (sources / "unpacked").iterdir()
    output_of([sys.executable, "-c", BUILD.format("build_wheel"), dist], unpacked)
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment with the wheel, and torch from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts" if os.name == "nt" else "bin") / Path(sys.executable).name
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(output_of([python, "-c", where], folder).strip())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    output_of([*pip, "--target", packages, wheel], folder)
    (packages / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def test_wheel_has_the_package_its_types_and_the_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = {name for name in names if ".dist-info/" in name}
    files = [path for path in (ROOT / "sync_batchnorm").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert names - information == {str(path.relative_to(ROOT)) for path in files}
    assert {"sync_batchnorm/py.typed", "sync_batchnorm/LICENSE"} <= names
    assert (ROOT / "sync_batchnorm/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert any(name.endswith("/LICENSE") for name in information)
    assert wheel.name.endswith("-py3-none-any.whl")


def test_metadata_says_what_the_package_is(metadata):
    assert metadata["Name"] == "synchronized-batchnorm"
    assert metadata["License-Expression"] == "MIT"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "](docs/" not in metadata.get_payload()


def arguments_of_setup(monkeypatch: pytest.MonkeyPatch, repository: str) -> dict[str, Any]:
    """Return what `setup.py` passes on where a repository builds a release; an empty one is none."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", passed.update)
    monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    runpy.run_path(str(ROOT / "setup.py"))
    return passed


def test_links_are_those_of_the_repository_that_builds_or_none(monkeypatch):
    passed = [arguments_of_setup(monkeypatch, repository) for repository in ("someone/fork", "")]
    repository, site = "https://github.com/someone/fork", "https://someone.github.io/fork/"
    page = f"{repository}/{{}}/v{sync_batchnorm.__version__}/docs/"
    links = {"Source": repository, "Documentation": site, "Changelog": f"{page.format('blob')}changelog.md"}
    assert links.items() <= passed[0]["project_urls"].items()
    assert passed[1]["project_urls"] == {}
    described = [arguments["long_description"] for arguments in passed]
    assert f"]({page.format('raw')}examples/segment_digits.png)" in described[0]
    for name, link in (("usage", f"{page.format('blob')}usage.md"), ("issues", f"{repository}/issues"), ("site", site)):
        assert f"[{name}]({link})" in described[0]
    assert not re.search(r"\[(site|issues)\]", described[1])
    for text in described:  # neither relative, nor to a section of no file
        assert not re.search(r"\]\((?!https:)|v[\d.]+/#", text)


def test_version_is_that_of_the_package_the_readme_and_the_newest_of_the_changelog(metadata):
    assert f"\nVersion {sync_batchnorm.__version__} · " in (ROOT / "README.md").read_text(encoding="utf-8")
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert changelog.split("\n## ")[1].split()[0] == metadata["Version"] == sync_batchnorm.__version__


def test_import_asks_for_the_python_and_the_torch_that_are_the_only_requirements(metadata):
    said = re.findall(r"expected (Python|torch) ([\d.]+) or newer", (ROOT / "sync_batchnorm/__init__.py").read_text())
    required = [line.split(">=") for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [(name, version.removesuffix(".0")) for name, version in required] == said[1:]
    assert said[0] == ("Python", metadata["Requires-Python"].removeprefix(">="))


@pytest.mark.slow
def test_installed_copy_checks_the_machine_and_knows_its_version(python, metadata, tmp_path):
    report = output_of([python, "-m", "sync_batchnorm", "--devices", "cpu,cpu"], tmp_path)
    assert "\nAll is right, " in report
    assert report.split()[:2] == ["sync_batchnorm", metadata["Version"]]


@pytest.mark.slow
def test_code_of_a_user_has_the_right_types_with_the_installed_copy(python, tmp_path):
    pytest.importorskip("mypy")
    cache = ROOT / ".mypy_cache"  # that of the usual type check, which has read torch if it ran before
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", cache]
    assert "Success" in output_of([*mypy, shutil.copy(USER, tmp_path)], tmp_path)


@pytest.mark.filterwarnings("ignore:PyTorch finds no accelerator")
def test_code_of_a_user_runs():
    runpy.run_path(str(USER), run_name="__main__")
