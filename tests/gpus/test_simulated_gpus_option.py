"""The option `--simulated-gpus`: what it selects, and the one sentence with which it stops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpus import NotPossible, build, plugin

ROOT = Path(__file__).parents[2]
CONFTEST = """
import torch

def pytest_report_header():
    return f"devices: {torch.cuda.device_count()}"
"""
TESTS = """
import pytest

@pytest.mark.cuda
def test_gpu(): pass

@pytest.mark.cuda
@pytest.mark.simulated
def test_simulator(): pass

def test_cpu(): pass

@pytest.mark.cuda
@pytest.mark.simulated
def test_race():
    import torch
    x = torch.ones(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x + 1
"""

pytestmark = pytest.mark.watchdog(120)
needs_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch is built for GPUs, which is refused before anything else"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with tests of its own and the settings of this project."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_of_its_own.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = -p no:cacheprovider -p simulated_gpus.plugin\npythonpath = {ROOT / 'tests'}\n"
        "markers =\n    cuda\n    simulated\n"
    )
    return tmp_path


def run(project: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run pytest in a process of its own; return its status and what it prints."""
    command = [sys.executable, "-m", "pytest", *arguments]
    result = subprocess.run(
        command, cwd=project, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
    return result.returncode, result.stdout + result.stderr


def refusal(number: int) -> str:
    """Return the sentence with which the option stops pytest, in this process, which has torch."""
    config: Any = SimpleNamespace(known_args_namespace=SimpleNamespace(simulated_gpus=number))
    with pytest.raises(pytest.UsageError) as error:
        plugin.pytest_load_initial_conftests(config)
    return str(error.value)


@pytest.mark.parametrize("number", [0, 65, -1])
def test_number_out_of_range_is_refused(number):
    expected = f"--simulated-gpus: expected between 1 and 64 simulated GPUs, but got {number}"
    assert refusal(number) == expected


@needs_cpu_build
def test_machine_without_a_compiler_is_told_so_in_one_sentence(project, tmp_path):
    status, output = run(project, "--simulated-gpus", "2", PATH="", CXX="", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert status == pytest.ExitCode.USAGE_ERROR
    (line,) = output.strip().splitlines()
    assert line == (
        "ERROR: --simulated-gpus: GPUs can only be simulated with a C++ compiler, "
        "and neither g++ nor clang++ is on the PATH"
    )


def test_process_that_has_torch_already_is_refused():
    assert refusal(2) == (
        "--simulated-gpus: GPUs must be simulated before torch is imported, and something has imported it already"
    )


def test_torch_that_is_built_for_gpus_is_refused(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(build, "_folder_of_torch", lambda: tmp_path)
    with pytest.raises(NotPossible, match="GPUs can only be simulated with a build of torch for the CPU"):
        build.built_extension()


@pytest.mark.cuda
@pytest.mark.simulated
def test_option_selects_tests_of_gpus_and_fails_them_on_a_report(project):
    status, output = run(project, "-v", "--simulated-gpus", "3")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "devices: 3" in output
    for passed in ("test_gpu PASSED", "test_simulator PASSED"):
        assert passed in output
    assert "test_cpu" not in output
    assert "test_race ERROR" in output
    assert "the simulated GPUs report" in output
    assert "reads what" in output
