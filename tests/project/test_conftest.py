"""What every test runs under works: a hang is a failure that shows where, and so is a thread that is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUITE = """
import threading
import pytest
from conftest import within

@pytest.mark.watchdog(0.2)
def test_hangs():
    wait_forever()

def wait_forever():
    threading.Event().wait()

def test_leaves_a_thread():
    threading.Thread(target=wait_forever, name="forgotten", daemon=True).start()

def test_fails_in_its_own_words():
    assert "one" == "other"

def test_is_right():
    pass
"""


ROOT = TESTS.parent


@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_hang_and_a_thread_left_behind_are_failures_that_say_where(tmp_path):
    (tmp_path / "conftest.py").symlink_to(TESTS / "conftest.py")
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    ran = subprocess.run([*command, tmp_path], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ran.returncode == 1
    assert "not back within 0.2 seconds, so something hangs:" in ran.stdout
    assert "in wait_forever" in ran.stdout
    assert "threads left behind: [<Thread(forgotten, started daemon" in ran.stdout
    assert "AssertionError: assert 'one' == 'other'" in ran.stdout
    assert "2 failed, 2 passed" in ran.stdout
    assert "1 error" in ran.stdout


@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_pytest_alone_runs_the_tests():
    command = [sys.executable, "-m", "pytest", "-q", "tests/exchange/test_comm.py", "tests/project/test_pairwise.py"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
