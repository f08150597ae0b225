"""What an import says where it cannot work: one sentence, and nothing from inside of the package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import PACKAGE, copy_without_caches

import sync_batchnorm

# Pretends to be an older Python, in the two attributes that the package reads.
IN_OLD_PYTHON = 'import sys; sys.version_info, sys.version = (3, 9, 18), "3.9.18 (main)"; import sync_batchnorm'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder on the path with a copy of the package, and nothing else."""
    copy_without_caches(PACKAGE, tmp_path / "sync_batchnorm")
    return tmp_path


def imported_in(folder: Path, code: str = "import sync_batchnorm") -> str:
    """Import the package from `folder`, in a Python without installed packages; return what that prints to stderr."""
    command = [sys.executable, "-B", "-S", "-c", code]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    return result.stderr


def add_torch(folder: Path, code: str) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(code)


def assert_one_sentence(stderr: str, sentence: str) -> None:
    """Check that nothing but `__init__.py` is in the traceback, no other error, and `sentence` at its end."""
    assert stderr.rstrip().splitlines()[-1] == f"ImportError: {sentence}"
    frames = [line for line in stderr.splitlines() if line.startswith("  File ") and "importlib" not in line]
    assert len(frames) == 2
    assert "<string>" in frames[0]
    assert "__init__.py" in frames[1]
    assert stderr.count("Traceback") == 1


def test_older_python_is_refused(folder):
    assert_one_sentence(
        imported_in(folder, IN_OLD_PYTHON),
        f"expected Python 3.11 or newer for sync_batchnorm {sync_batchnorm.__version__}, but got Python 3.9.18 "
        f"({sys.executable}); run it with a newer Python",
    )


def test_older_python_can_parse_the_file_that_refuses_it():
    source = (PACKAGE / "__init__.py").read_text()
    ast.parse(source, feature_version=(3, 7))  # the oldest that can be asked for
    first = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    assert "version_info" in ast.unparse(first.test)
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    before = [ast.unparse(node) for node in imports if node.lineno < first.lineno]
    assert before == ["import sys"]


@pytest.mark.parametrize("version", ["0.4.1", "1.13.1+cu117", "2.7.1"])
def test_older_torch_is_refused(folder, version):
    add_torch(folder, f"__version__ = {version!r}")
    assert_one_sentence(
        imported_in(folder),
        f"expected torch 2.8 or newer for sync_batchnorm {sync_batchnorm.__version__}, but got torch {version} "
        f"({folder / 'torch' / '__init__.py'}); run: pip install --upgrade 'torch>=2.8'",
    )


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0a0+git1a2b3c4", "2.10.1+cpu", "3.0.0"])
def test_newer_torch_is_not_refused(folder, version):
    add_torch(folder, f"__version__ = {version!r}")
    last = imported_in(folder).splitlines()[-1]
    assert last.startswith(("ImportError: cannot import name", "ModuleNotFoundError: No module named 'torch."))


def test_torch_that_cannot_be_loaded_speaks_for_itself(folder):
    add_torch(folder, "raise ImportError('libcudart.so.12: cannot open shared object file')")
    assert imported_in(folder).splitlines()[-1] == "ImportError: libcudart.so.12: cannot open shared object file"
