"""What the option `--simulated-gpus` selects and fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.simulated, pytest.mark.timeout(900)]

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
