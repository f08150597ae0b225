"""Processes compute what one process computes on the whole batch; what they exchange, and how that fails.

The checks themselves are in `distributed_worker.py`. Each world of processes is started once, and runs all of them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import distributed_worker
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_step, randomize, twins
from torch import nn

from sync_batchnorm import SynchronizedBatchNorm, SynchronizedBatchNorm2d, convert_model, distributed

ROOT = Path(__file__).parents[2]
SECONDS = 240.0  # in which a world must have ended
GATHERS = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]  # one in torch 2.8


def run_world(size: int, what: str, folder: Path) -> list[dict[str, str]]:
    """Run `distributed_worker.py` in `size` processes; return the outcomes in each: empty where a check succeeded."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("distributed_worker.py"))]
    processes = []
    for rank in range(size):
        with (folder / f"stderr.{rank}").open("w") as stderr:
            process = subprocess.Popen(
                [*command, str(rank), str(size), str(folder), what],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        processes.append(process)
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for rank in range(size):
        results = folder / f"results.{rank}"
        if results.exists():
            found.append(json.loads(results.read_text(encoding="utf-8")))
        else:
            errors = (folder / f"stderr.{rank}").read_text(encoding="utf-8")
            found.append(dict.fromkeys(distributed_worker.CHECKS, f"did not end:\n{errors}"))
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[dict[str, str]]]:
    """Return the outcomes of a world of processes, which is started when it is first asked for."""

    @functools.cache
    def outcomes(size: int, what: str) -> list[dict[str, str]]:
        return run_world(size, what, tmp_path_factory.mktemp(what))

    return outcomes


GPUS = [pytest.mark.cuda, pytest.mark.simulated, pytest.mark.slow]
CASES = [
    *((2, "quick", name) for name in distributed_worker.CHECKS if name not in distributed_worker.SLOW),
    *(pytest.param(3, "all", name, marks=pytest.mark.slow) for name in distributed_worker.CHECKS),
    *(pytest.param(2, "gpus", name, marks=GPUS) for name in distributed_worker.ON_GPUS),
]


@pytest.mark.watchdog(SECONDS)
@pytest.mark.parametrize(("size", "what", "name"), CASES)
def test_in_a_world_of_processes(size, what, name, world):
    for rank, outcomes in enumerate(world(size, what)):
        outcome = outcomes.get(name, "did not run, because an earlier check broke the world")
        assert not outcome, f"rank {rank} of {size}:\n{outcome}"


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
        return distributed.merge_over_processes(*vectors, count, distributed.Peers(None, 0, ["bn"]))

    return merged


@pytest.mark.cuda
@pytest.mark.parametrize(("counts", "kind"), [((2, 3), torch.Tensor), ((1, 3), int), ((1, 0), int), ((0, 1), int)])
def test_host_waits_for_the_count_only_where_it_may_be_one(merged, counts, kind):
    *_, count = merged(counts[0], counts[1], "cuda")
    assert type(count) is kind
    assert int(count) == sum(counts)


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
