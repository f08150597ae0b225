"""A test that hangs: it fails, its process ends with the stacks of all threads, and other processes go on."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import slow
from forks import forked, needs_fork
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


@needs_fork
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hang", ["threading.Event().wait", "ctypes.PyDLL(None).pause"], ids=["waits", "holds the GIL"])
@pytest.mark.parametrize("options", ["-p no:xdist", *slow("-n1")])
def test_hang_fails_with_all_stacks_and_its_process_ends(hang, options, tmp_path: Path):
    for plugin in ("pytest_timeout", "xdist"):
        pytest.importorskip(plugin)
    (tmp_path / "test_of_its_own.py").write_text(HANGS.format(hang))

    def body() -> None:
        faulthandler.unregister(signal.SIGALRM)  # that of this process
        for descriptor in (1, 2):
            os.dup2(sys.stdout.fileno(), descriptor)
        command = f"-c {ROOT / 'pyproject.toml'} -p conftest -o timeout=1 {options} {tmp_path}"
        assert pytest.main(command.split()) == pytest.ExitCode.TESTS_FAILED

    status, output = forked(body)
    assert status == (0 if options == "-n1" else -signal.SIGALRM), output
    assert " in test_hang\n" in output
    assert " in peer\n" in output
    assert ("1 failed, 2 passed in " in output) == (options == "-n1")
