"""Processes with simulated GPUs: what the option `--simulated-gpus` selects and fails, and how they end."""

from __future__ import annotations

import os
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


PROGRAM = """
import atexit, os, queue, sys, threading
import simulated_gpus
simulated_gpus.simulate(1)
import torch

sys.setswitchinterval(1000)  # a thread gets the GIL only where another one waits
droppers, at_exit, dropped = queue.SimpleQueue(), threading.Lock(), threading.Lock()
at_exit.acquire()
dropped.acquire()
main = threading.get_ident()


class Held:  # a backward pass has it, and the thread that drops the pass last runs this
    def __del__(self):
        droppers.put(threading.get_ident())
        if threading.get_ident() != main:
            at_exit.acquire()
            for _ in range(1000):
                os.stat("/")  # gives the GIL up and takes it again: the thread ends only where others wait for it
            dropped.release()


class Last:  # deleted when Python no longer gives the GIL to other threads
    def __del__(self, wait=dropped.acquire):
        wait(timeout=10)


sys.deleted_late = Last()
weight = torch.ones(3, device="cuda", requires_grad=True)
dropper = main
while dropper == main:
    torch._C._stash_obj_in_tls("held", Held())
    weight.sum().backward()
    torch._C._stash_obj_in_tls("held", None)
    dropper = droppers.get()
atexit.register(at_exit.release)
print("dropped by a thread of the engine")
"""


def test_thread_of_autograd_that_drops_a_backward_pass_late_does_not_end_the_process():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "dropped by a thread of the engine\n", "")
