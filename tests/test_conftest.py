"""What every test runs under works: a hang is a failure that shows where, and so is a thread that is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest

TESTS = Path(__file__).parent
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


def config_of(*, xdist: bool = True, is_worker: bool = False, **options: Any) -> Any:
    config = SimpleNamespace(pluginmanager=SimpleNamespace(hasplugin=lambda name: xdist), option=SimpleNamespace())
    if xdist:
        vars(config.option).update({"numprocesses": None, "dist": "no"} | options)
    if is_worker:
        config.workerinput = {}
    return config


def test_pytest_without_xdist_is_given_no_option_of_it():
    config = config_of(xdist=False)
    conftest.pytest_cmdline_main(config)
    assert vars(config.option) == {}


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, ("auto", "worksteal")),
        ({"numprocesses": 0}, (0, "worksteal")),
        ({"numprocesses": 8}, (8, "worksteal")),
        ({"dist": "loadfile"}, ("auto", "loadfile")),
        ({"is_worker": True}, (None, "no")),
    ],
    ids=str,
)
def test_command_line_decides_how_many_processes_there_are(given, used):
    config = config_of(**given)
    conftest.pytest_cmdline_main(config)
    assert (config.option.numprocesses, config.option.dist) == used


@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_pytest_alone_runs_the_tests():
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_comm.py", "tests/test_pairwise.py"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


@pytest.mark.parametrize(
    ("named", "cores", "workers"), [(True, 8, 0), (False, 1, 0), (False, 2, 2), (False, 4, 4), (False, 64, 4)]
)
def test_whole_suite_is_spread_and_named_files_are_not(monkeypatch, named, cores, workers):
    monkeypatch.setattr(conftest.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    source = pytest.Config.ArgsSource
    config = SimpleNamespace(args_source=source.ARGS if named else source.TESTPATHS, ArgsSource=source)
    assert conftest.pytest_xdist_auto_num_workers(config) == workers


@pytest.mark.parametrize(
    ("params", "repeats"),
    [
        ({"kernel": "exact", "devs": ["cpu"]}, True),
        ({"kernel": "exact", "devices": ["cpu"]}, True),
        ({"kernel": "exact", "devs": ["cpu"] * 2}, False),
        ({"kernel": "exact", "devs": ["cpu"] * 2, "training": False}, True),
        ({"kernel": "fast", "devs": ["cpu"]}, False),
        ({"devs": ["cpu"]}, False),
    ],
)
def test_kernels_that_are_not_used_are_no_test_of_their_own(params, repeats):
    assert conftest.is_repetition(SimpleNamespace(callspec=SimpleNamespace(params=params))) is repeats
    assert not conftest.is_repetition(SimpleNamespace())
