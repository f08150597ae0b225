"""The example of a profile: it blames the replica that is slow, and reads other profiles to the digit."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import skip_module_without

import sync_batchnorm

skip_module_without("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "profile_waits.py"
TINY = ["--replicas", "3", "--steps", "2", "--delay", "300"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The example as a module, for what a shell cannot reach."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    threads = torch.get_num_threads()
    yield importlib.import_module("profile_waits")
    torch.set_num_threads(threads)


def event(name: str, tid: int, start: float, end: float, **others: Any) -> dict[str, Any]:
    """Return an event of an exported profile, from milliseconds."""
    times = {"ts": 1000 * start, "dur": 1000 * (end - start)}
    return {"ph": "X", "cat": "user_annotation", "name": f"sync_batchnorm: {name}", "tid": tid, **times, **others}


def forward_of_two(begin: float, replicas: tuple[int, int], late: float) -> list[dict[str, Any]]:
    """Return a forward whose replica 1 comes `late` to the layer "a", and replica 0 one millisecond late to "b"."""
    first, second = replicas
    return [
        event("replica 0 on device cpu", first, begin, begin + late + 10),
        event("replica 1 on device cpu", second, begin, begin + late + 10),
        event("a, waiting", first, begin + 1, begin + late + 1),
        event("a, merging", first, begin + late + 1, begin + late + 2),
        event("a, waiting", second, begin + late + 1, begin + late + 2.5),
        event("b, waiting", second, begin + late + 4, begin + late + 6),
        event("b, waiting", first, begin + late + 5, begin + late + 5),
        event("b, merging", first, begin + late + 5, begin + late + 6),
    ]


@pytest.fixture
def two_forwards(tmp_path: Path) -> Path:
    """A profile as torch exports it, packed, of two forwards, with threads of their own, and what else is in one."""
    events = [
        {"ph": "M", "name": "thread_name", "tid": 7, "ts": 0, "args": {"name": "a thread"}},
        event("replica 0 on device cpu", 7, 0, 100, cat="gpu_user_annotation"),
        event("b, merging", 7, 1, 2),  # in no replica
        *forward_of_two(200, (3, 4), late=7),
        *forward_of_two(100, (1, 2), late=3),
    ]
    path = tmp_path / "profile.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
    return path


@pytest.mark.watchdog(60)
@pytest.mark.slow
def test_example_runs_from_a_shell_without_a_warning_and_blames_the_slow_replica(tmp_path):
    # The package that is tested here, wherever it was imported from.
    environment = {**os.environ, "PYTHONPATH": str(Path(sync_batchnorm.__file__).parents[1])}
    command = [sys.executable, "-W", "error", str(EXAMPLE), *TINY, "--output", str(tmp_path / "new" / "folder")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "As expected: features.1.1 waits for replica 2, and the slow one is replica 2." in finished.stdout


@pytest.mark.watchdog(60)
def test_profile_is_read_to_the_digit_and_drawn(example, two_forwards, tmp_path):
    forwards = example.read_profile(two_forwards)
    assert [[exchange.layer for exchange in forward.exchanges] for forward in forwards] == [["a", "b"]] * 2
    table = example.table_of(forwards)
    assert list(table) == ["a", "b"]
    for layer, blamed, waits in (("a", 1, {0: 5.0, 1: 0.0}), ("b", 0, {0: 0.0, 1: 1.0})):
        row = table[layer]
        assert (row.blamed, row.times_last, row.exchanges) == (blamed, 2, 2)
        assert row.mean_waits == pytest.approx(waits)
    assert example.main(["--profile", str(two_forwards), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "profile_waits.png").stat().st_size > 5000
