"""Processes compute what one process computes on the whole batch; what they exchange, and how that fails.

The checks themselves are in `distributed_worker.py`. Each world of processes is started once, and runs all of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import distributed_worker
import pytest
import torch
import torch.distributed as dist
from forks import fork
from helpers import assert_same_step, randomize, twins
from torch import nn

from sync_batchnorm import SynchronizedBatchNorm, SynchronizedBatchNorm2d, convert_model, distributed

ROOT = Path(__file__).parents[1]
SECONDS = 240.0  # in which a world must have ended
GATHERS = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]  # one in torch 2.8


class World:
    """Processes that run `distributed_worker.py`, and what they leave behind."""

    def __init__(self, size: int, folder: Path, what: str) -> None:
        self.folder = folder
        self.codes: list[int] = []
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(Path(__file__).with_name("distributed_worker.py"))]
        self.processes = []
        for rank in range(size):
            with (folder / f"stderr.{rank}").open("w") as stderr:
                process = subprocess.Popen(
                    [*command, str(rank), str(size), str(folder), what],
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                )
            self.processes.append(process)

    def join(self) -> list[int]:
        """Wait for all processes, end those that hang, and return the exit codes."""
        try:
            return [process.wait(SECONDS) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def stderr(self, rank: int) -> str:
        return (self.folder / f"stderr.{rank}").read_text(encoding="utf-8")

    def outcome(self, name: str, rank: int) -> str:
        path = self.folder / f"{name}.{rank}"
        assert path.exists(), f"rank {rank} did not end {name}:\n{self.stderr(rank)}"
        return json.loads(path.read_text(encoding="utf-8"))


class ForkedWorld(World):
    """The same in children of this process, which have imported everything."""

    def __init__(self, size: int, folder: Path, what: str) -> None:
        self.folder = folder
        self.children = []
        for rank in range(size):
            with (folder / f"stderr.{rank}").open("w") as stderr:
                body = functools.partial(distributed_worker.main, rank, size, folder, what)
                self.children.append(fork(body, stderr.fileno()))

    def join(self) -> list[int]:
        timer = threading.Timer(SECONDS, self.kill)
        timer.start()
        try:
            return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in self.children]
        finally:
            timer.cancel()
            timer.join()

    def kill(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(child, signal.SIGKILL)


# A child of a process that has used a GPU can run no backward.
CAN_FORK = hasattr(os, "fork") and not torch.cuda.device_count()


def outcomes_of(world: World, size: int) -> list[dict[str, str]]:
    """Return the outcome of every check in each process of a world: empty if it succeeded."""
    world.join()
    found = []
    for rank in range(size):
        try:
            found.append(world.outcome("results", rank))
        except AssertionError as error:
            found.append(dict.fromkeys(distributed_worker.CHECKS, str(error)))
    return found


def assert_right(name: str, results: list[dict[str, str]]) -> None:
    for rank, outcomes in enumerate(results):
        outcome = outcomes.get(name, "did not run, because an earlier check broke the world")
        assert not outcome, f"rank {rank} of {len(results)}:\n{outcome}"


@pytest.fixture(scope="module")
def results_of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    start = ForkedWorld if CAN_FORK else World
    return outcomes_of(start(2, tmp_path_factory.mktemp("two"), "quick"), 2)


@pytest.mark.parametrize("name", [name for name in distributed_worker.CHECKS if name not in distributed_worker.SLOW])
def test_in_a_world(name, results_of_two):
    assert_right(name, results_of_two)


@pytest.fixture(scope="module")
def thorough_worlds() -> dict[int, list[dict[str, str]]]:
    """The results by size: tests of two sizes may take turns, and each world starts once."""
    return {}


@pytest.fixture
def results_of_all(
    request: pytest.FixtureRequest, thorough_worlds: dict[int, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    size = request.param
    if size not in thorough_worlds:
        thorough_worlds[size] = outcomes_of(World(size, tmp_path_factory.mktemp("all"), "checks"), size)
    return thorough_worlds[size]


@pytest.mark.slow
@pytest.mark.parametrize("results_of_all", [2, 3], indirect=True)
@pytest.mark.parametrize("name", distributed_worker.CHECKS)
def test_thoroughly_in_a_world(name, results_of_all):
    assert_right(name, results_of_all)


@pytest.fixture(scope="module")
def results_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes_of(World(2, tmp_path_factory.mktemp("gpus"), "gpus"), 2)


@pytest.mark.cuda
@pytest.mark.simulated
@pytest.mark.slow
@pytest.mark.parametrize("name", distributed_worker.ON_GPUS)
def test_with_a_gpu_in_each_process(name, results_on_gpus):
    assert_right(name, results_on_gpus)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow)])
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(request.param, tmp_path_factory.mktemp("failures"), "failures")
    world.codes = world.join()
    return world


def test_training_beside_a_process_in_eval_ends_with_the_timeout_of_torch(failures):
    assert failures.outcome("train_beside_eval", 1) == "no error"
    assert "Timed out waiting 2000ms" in failures.outcome("train_beside_eval", 0)


def test_channels_that_differ_between_processes_end_all_of_them(failures):
    # Gloo ends the process that receives more than it expects. The other one has a broken connection, or too few bytes.
    assert failures.codes[0]
    words = r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes"  # torch 2.13 and 2.8
    assert re.search(words, failures.stderr(0))
    too_little = "ValueError: expected inputs of one number of channels in all processes, but got 4 in this one"
    assert failures.outcome("channels_differ", 1).startswith(("RuntimeError: ", too_little))


def test_process_that_has_left_ends_the_others_with_the_error_of_torch(failures):
    assert failures.outcome("a_process_has_left", 1).startswith("RuntimeError: ")


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_world_of_one_has_no_peers(world_of_one, monkeypatch):
    for name in (*GATHERS, "all_reduce"):
        monkeypatch.setattr(dist, name, None)
    layer, plain = SynchronizedBatchNorm2d(3), nn.BatchNorm2d(3)
    batch = torch.randn(4, 3, 2, 2)
    assert torch.equal(layer(batch), plain(batch))
    assert torch.equal(layer.running_var, plain.running_var)


def test_replicas_in_a_world_of_one_are_unaffected(world_of_one):
    plain, parallel = twins(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double(), ["cpu"] * 2)
    assert_same_step(plain, parallel, torch.randn(5, 2, 6, 6, dtype=torch.float64))


def test_layer_of_a_world_that_is_gone_is_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer = SynchronizedBatchNorm2d(3, process_group=dist.group.WORLD)
    dist.destroy_process_group()
    batch = torch.randn(4, 3, 2, 2)
    assert torch.equal(layer(batch), nn.BatchNorm2d(3)(batch))


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Merge moments with those of another process, which sends the same but for one number."""

    def merged(count: int, other: float, device: str = "cpu") -> Any:
        def gather(gathered: torch.Tensor, packed: torch.Tensor, group: object) -> None:
            rows = gathered.view(2, -1)
            rows.copy_(packed)
            rows[1, 0] = other

        for name in GATHERS:
            monkeypatch.setattr(dist, name, gather)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        vectors = torch.randn(2, 3, dtype=torch.float64, device=device).unbind()
        return distributed.merge_over_processes(*vectors, count, None)

    return merged


@pytest.mark.cuda
@pytest.mark.parametrize(("counts", "kind"), [((2, 3), torch.Tensor), ((1, 3), int), ((1, 0), int), ((0, 1), int)])
def test_host_waits_for_the_count_only_where_it_may_be_one(merged, counts, kind):
    *_, count = merged(counts[0], counts[1], "cuda")
    assert type(count) is kind
    assert int(count) == sum(counts)


class _Mute(dist.ProcessGroup):
    """A backend that has no collective at all."""


def test_backend_without_the_collective_ends_with_the_error_of_torch():
    dist.Backend.register_backend("mute", lambda store, rank, size, timeout: _Mute(rank, size), devices=["cpu"])
    dist.init_process_group("mute", store=dist.HashStore(), rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            SynchronizedBatchNorm2d(3)(torch.randn(4, 3, 2, 2))
    finally:
        dist.destroy_process_group()


def test_torch_without_distributed_has_no_peers(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", None)  # which such a torch does not have
    batch = torch.randn(4, 3, 2, 2)
    assert torch.equal(SynchronizedBatchNorm2d(3)(batch), nn.BatchNorm2d(3)(batch))


# Copies and converters.


@pytest.fixture
def group(world_of_one: None) -> dist.ProcessGroup:
    return dist.new_group()


def test_convert_model_takes_the_group(group):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.SyncBatchNorm(2)))
    assert convert_model(model, process_group=group) is model
    assert [type(model[0]), type(model[1][0])] == [SynchronizedBatchNorm2d, SynchronizedBatchNorm]
    assert model[0].process_group is model[1][0].process_group is group


def test_converter_of_torch_takes_our_layers_and_the_group(group):
    model = randomize(nn.Sequential(SynchronizedBatchNorm2d(3, eps=0.5, momentum=0.3)))
    state = copy.deepcopy(model.state_dict())
    (converted,) = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    assert type(converted) is nn.SyncBatchNorm
    assert (converted.eps, converted.momentum, converted.process_group) == (0.5, 0.3, group)
    for name, value in converted.state_dict(prefix="0.").items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize(
    "make", [SynchronizedBatchNorm2d, lambda _, **options: convert_model(nn.BatchNorm2d(3), **options)]
)
def test_group_size_beside_a_group_is_refused(group, make):
    with pytest.raises(ValueError, match="expected group_size or process_group, but got 2 and"):
        make(3, group_size=2, process_group=group)


EXAMPLE = ["--epochs", "1", "--batch", "96"]


@pytest.mark.slow
@pytest.mark.watchdog(SECONDS)
def test_example_prints_the_same_digits_in_two_processes_as_in_one(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    importlib.import_module("train_digits_ddp").main(EXAMPLE)
    alone = capsys.readouterr().out
    assert re.search(r"^epoch 1: loss \d\.\d{10}, test accuracy 0\.\d{4}\nnorm of .*: \d+\.\d{8}\n$", alone)
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    example = [str(ROOT / "docs" / "examples" / "train_digits_ddp.py"), *EXAMPLE]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, "--nproc-per-node", "2", *example]
    run = subprocess.run(command, env=env, capture_output=True, timeout=SECONDS)
    text = run.stdout.decode() or run.stderr.decode()
    assert text.endswith(alone)  # With torch 2.8, both processes tell first that they are connected.
    assert text.count("epoch 1:") == 1
