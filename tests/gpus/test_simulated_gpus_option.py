"""The option `--simulated-gpus`: what it selects, and the one sentence with which it stops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_gpus import build, plugin

TESTS = """
import pytest
import torch

@pytest.mark.cuda
def test_gpu(): assert torch.cuda.device_count() == 3

@pytest.mark.cuda
@pytest.mark.simulated
def test_simulator(): pass

def test_cpu(): pass

@pytest.mark.cuda
@pytest.mark.simulated
def test_race():
    x = torch.ones(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x + 1
"""


def refusal(number: int) -> str:
    """Return the sentence with which the option stops pytest, in this process, which has torch."""
    config: Any = SimpleNamespace(known_args_namespace=SimpleNamespace(simulated_gpus=number))
    with pytest.raises(pytest.UsageError) as error:
        plugin.pytest_load_initial_conftests(config)
    return str(error.value)


@pytest.mark.parametrize("number", [0, 65, -1, 2])
def test_number_out_of_range_and_process_that_has_torch_already_are_refused(number):
    text = f"expected between 1 and 64 simulated GPUs, but got {number}"
    if number == 2:
        text = "GPUs must be simulated before torch is imported, and something has imported it already"
    assert refusal(number) == f"--simulated-gpus: {text}"


def test_machine_without_a_compiler_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_folder_of_torch", lambda: tmp_path)
    for name, value in {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(build.NotPossible, match=r"a C\+\+ compiler, and neither g\+\+ nor clang\+\+ is on the PATH$"):
        build.built_extension()


def test_torch_that_is_built_for_gpus_is_refused(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(build, "_folder_of_torch", lambda: tmp_path)
    with pytest.raises(build.NotPossible, match="GPUs can only be simulated with a build of torch for the CPU"):
        build.built_extension()


@pytest.mark.cuda
@pytest.mark.simulated
@pytest.mark.watchdog(120)
def test_option_selects_tests_of_gpus_and_fails_them_on_a_report(tmp_path):
    (tmp_path / "test_of_its_own.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = -p no:cacheprovider -p simulated_gpus.plugin\npythonpath = {Path(__file__).parents[1]}\n"
        "markers =\n    cuda\n    simulated\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "--simulated-gpus", "3"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    for passed in ("test_gpu PASSED", "test_simulator PASSED"):
        assert passed in result.stdout
    assert "test_cpu" not in result.stdout
    assert "test_race ERROR" in result.stdout
    assert "the simulated GPUs report" in result.stdout
    assert "reads what" in result.stdout
