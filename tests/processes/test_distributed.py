"""Worlds of processes, of one process and of threads; and programs that `torchrun` starts."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import worlds
from conftest import slow
from forks import fork, forked, needs_fork
from helpers import assert_equal, assert_trains_as_one_device, in_threads
from repository import ROOT, blocks_of
from torch import nn
from worlds import GATHERS, PATH

from sync_batchnorm import SynchronizedBatchNorm2d, convert_model

SECONDS = 600.0  # in which a program must have ended


# What happens when a rank fails, to the others and in the tests.


def call_while_rank_1(how: str, rank: int) -> None:
    if rank == 1:
        if how == "dies":
            fork(lambda: time.sleep(0.3), os.dup(2))  # which lives longer
        {"raises": lambda: 1 / 0, "dies": lambda: os._exit(3), "hangs": threading.Event().wait}[how]()
    with pytest.raises(RuntimeError, match="Connection") as caught:
        SynchronizedBatchNorm2d(3)(torch.randn(2, 3, 4, 4))
    assert caught.value.__notes__ == [f"Raised in the exchange of {worlds.WITHOUT_NAME} between processes."]


ENDS = {"raises": r"fails:\n.*ZeroDivisionError.*", "dies": r"has ended with 3, [^\n]*", "hangs": r"has ended with -.*"}


@needs_fork
@pytest.mark.parametrize("how", ["dies", *slow("raises", "hangs")])
def test_a_rank_that_fails_ends_the_others_with_an_error_and_is_named(how, monkeypatch):
    monkeypatch.setattr(worlds, "SECONDS", 1 if how == "hangs" else 100)
    world = worlds.World(2)
    with pytest.raises(pytest.fail.Exception, match=rf"(?s)^{'.*' * (how == 'hangs')}rank 1 of 2 {ENDS[how]}\Z"):
        world.run(call_while_rank_1, how=how)
    world.run(dist.barrier)  # in new processes
    world.stop()


# A world of one, ranks in threads, and a torch without any.


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_alone(layer: nn.Module) -> None:
    batch, plain = torch.randn(4, 3, 2, 2), nn.BatchNorm2d(3)
    assert torch.equal(layer(batch), plain(batch))
    assert torch.equal(layer.running_var, plain.running_var)


def test_world_of_one_has_no_peers(world_of_one, monkeypatch):
    for name in (*GATHERS, "all_reduce"):
        monkeypatch.setattr(dist, name, None)
    assert_alone(SynchronizedBatchNorm2d(3))
    if hasattr(os, "fork"):
        assert forked(lambda: assert_alone(SynchronizedBatchNorm2d(3))).status == 0


def test_replicas_in_a_world_of_one_are_unaffected(world_of_one):
    assert_trains_as_one_device(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), ["cpu"] * 2, 5, 2, 6, 6)


def test_layer_of_a_world_that_is_gone_is_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer = SynchronizedBatchNorm2d(3, process_group=dist.group.WORLD)
    dist.destroy_process_group()
    assert_alone(layer)


def train_ranks_in_threads() -> None:
    """Train a net in a world of two ranks that are threads, and compare with one rank."""
    from torch.testing._internal.distributed import multi_threaded_pg

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # Each thread has groups of its own.
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3)).double()
    models = convert_model(nn.ModuleList(copy.deepcopy(plain) for _ in range(2)))
    batch, store = torch.randn(6, 3, 4, 4).double(), dist.HashStore()

    def train(rank: int) -> torch.Tensor:
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        for _ in range(2):
            output = models[rank](batch[3 * rank :][:3])
            output.square().mean().backward()
        return output

    assert_equal(torch.cat(in_threads(partial(train, 0), partial(train, 1))), plain(batch))


@needs_fork
def test_ranks_that_are_threads_of_one_process_equal_one_rank():
    ended = forked(train_ranks_in_threads)
    assert ended.status == 0, ended.output


def test_torch_without_distributed_has_no_peers(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", None)  # which such a torch does not have
    assert_alone(SynchronizedBatchNorm2d(3, group_size=2))


# What comes after its last line is torch's: threads of gloo may crash Python then, and make 3.14 hang.
RUN = "import os, runpy, sys; runpy.run_path(sys.argv.pop(1), None, '__main__'); sys.stdout.flush(); os._exit(0)"


def torchrun(folder: Path, *command: str, nodes: int = 1) -> str:
    """Run a program with `torchrun`, up to its last line, once for each node; return what it prints."""
    *arguments, program, options = command
    launcher = [sys.executable, "-m", "torch.distributed.run", *arguments, "--no-python"]
    env = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    popen = partial(subprocess.Popen, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    runs = [popen([*launcher, sys.executable, "-c", RUN, program, *options.split()]) for _ in range(nodes)]
    outputs = [run.communicate(timeout=SECONDS) for run in runs]
    assert [run.returncode for run in runs] == [0] * nodes, outputs
    return outputs[0][0]


EXAMPLE = "--epochs 1 --batch 96"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_example_prints_the_same_digits_in_two_processes_as_in_one(monkeypatch, capsys, tmp_path):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    importlib.import_module("train_digits_ddp").main(EXAMPLE.split())
    alone = capsys.readouterr().out
    assert re.search(r"^epoch 1: loss \d\.\d{10}, test accuracy 0\.\d{4}\nnorm of .*: \d+\.\d{8}\n$", alone)
    program = str(ROOT / "docs" / "examples" / "train_digits_ddp.py")
    text = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", program, EXAMPLE)
    assert text.endswith(alone)  # With torch 2.8, both processes tell first that they are connected.
    assert text.count("epoch 1:") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the program needs a GPU for each process, where there is one")
def test_commands_of_the_page_save_the_same_weights_as_one_process(tmp_path):
    blocks = list(blocks_of(ROOT / "docs" / "processes.md"))
    (program,) = [block.code for block in blocks if "def main" in block.code]
    (commands,) = [block.code.splitlines() for block in blocks if block.language == "bash"]
    (tmp_path / "train.py").write_text(program)
    torchrun(tmp_path, "--standalone", "train.py", "")
    expected = torch.load(tmp_path / "checkpoint.pt")
    assert expected["1.num_batches_tracked"] == 16
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    assert commands[1] == commands[0].replace("2", "8")  # This machine has no 8 GPUs.
    for command in (commands[0], commands[2].replace("8", "1").replace("first-machine:29400", address)):
        name, *arguments, file = shlex.split(command)
        assert (name, file) == ("torchrun", "train.py")
        nodes = int(arguments[1]) if arguments[0] == "--nnodes" else 1
        (tmp_path / "checkpoint.pt").unlink()
        torchrun(tmp_path, *arguments, file, "", nodes=nodes)
        saved = torch.load(tmp_path / "checkpoint.pt")
        for key, value in expected.items():
            torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=1e-5)
