"""A test that hangs: it fails, its process ends with the stacks of all threads, and other processes go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

HANGS = """
import ctypes, threading

def test_before(): pass
def peer(): threading.Event().wait()
def test_hang():
    threading.Thread(target=peer).start()
    {}()
def test_after(): pass
"""


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has no alarm")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hang", ["threading.Event().wait", "ctypes.PyDLL(None).pause"], ids=["waits", "holds the GIL"])
@pytest.mark.parametrize("options", ["-p no:xdist", pytest.param("-n1", marks=pytest.mark.slow)])
def test_hang_fails_with_all_stacks_and_its_process_ends(hang, options, tmp_path: Path):
    for plugin in ("pytest_timeout", "xdist"):
        pytest.importorskip(plugin)
    (tmp_path / "test_of_its_own.py").write_text(HANGS.format(hang))
    command = f"{sys.executable} -m pytest -c {ROOT / 'pyproject.toml'} -p conftest -o timeout=1 {options} {tmp_path}"
    run = subprocess.run(command.split(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == (pytest.ExitCode.TESTS_FAILED if options == "-n1" else -signal.SIGALRM), run.stdout
    assert " in test_hang\n" in run.stdout
    assert " in peer\n" in run.stdout
    assert ("1 failed, 2 passed in " in run.stdout) == (options == "-n1")
