"""Tests that run in every process of a small world, and what they compare.

A world starts with the first test that needs it, and stays: a fork and a connection cost more than most tests. It gets
the name of each test over a pipe, and ends when a test fails.
"""

from __future__ import annotations

import atexit
import copy
import faulthandler
import functools
import importlib
import inspect
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import fork, needs_fork
from helpers import Net, assert_equal, assert_same_gradient, randomize
from repository import ROOT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import convert_model

SECONDS = 300  # for a test, less than pytest waits; a collective that nobody joins ends earlier, with its own timeout
PATH = os.pathsep.join([*(str(ROOT / folder) for folder in ("", "tests", "tests/processes")), *sys.path])
SERVE_ON_GPU = "import simulated_gpus; simulated_gpus.simulate(1); import worlds; worlds.serve_on_gpu()"

DEVICE = "cpu"  # "cuda" in the processes of a world with GPUs
ROWS = [3, 1, 2]  # of the process of that rank, in most tests
WITHOUT_NAME = "a SynchronizedBatchNorm2d without a name"
GATHER, REDUCE = "_allgather_base_", "allreduce_"
GATHERS = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]  # one in torch 2.8


# A world, and its processes.


class World:
    def __init__(self, kind: Any) -> None:
        """Prepare a world of `kind` processes; if it is "gpus", of two with a simulated GPU each."""
        self.size, self.on_gpus = (2, True) if kind == "gpus" else (kind, False)
        self.processes: list[tuple[int, Connection]] = []
        self.store = tempfile.mktemp(prefix="world")
        atexit.register(self.stop)

    def run(self, test: Callable[..., None], **arguments: Any) -> None:
        """Run a function in each process; fail with the traceback, or the end, of each rank that fails."""
        try:
            if not self.processes:
                self.start()
            for _, connection in self.processes:
                connection.send((test.__module__, test.__name__, arguments))
            ends = [self.end_of_test(*process) for process in self.processes]
            failed = [f"rank {rank} of {self.size} {end}" for rank, end in enumerate(ends) if end]
            if failed:
                pytest.fail("\n".join(failed), pytrace=False)
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        importlib.import_module("torch._dynamo")  # as checkpoints do, once and not in each process
        for rank in range(self.size):
            ours, theirs = Pipe()
            if self.on_gpus:
                os.set_inheritable(theirs.fileno(), True)
                arguments = [sys.executable, "-c", SERVE_ON_GPU, str(theirs.fileno()), str(rank), self.store]
                process = os.posix_spawn(sys.executable, arguments, {**os.environ, "PYTHONPATH": PATH})
            else:
                # A process that has the other end as well would not notice the end of this one.
                body = lambda ours=ours, *args: (ours.close(), serve(*args))  # noqa: E731
                process = fork(functools.partial(body, ours, theirs, rank, self.size, self.store), os.dup(2))
            theirs.close()
            self.processes.append((process, ours))

    def end_of_test(self, process: int, connection: Connection) -> str:
        """Wait until a process has run the test, or has ended; return how it failed, or nothing."""
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)  # A child of its own may keep the connection open.
            with suppress(EOFError, ConnectionError):
                if connection.poll(0 if ended else 0.1):
                    return connection.recv()
            if ended:
                return f"has ended with {os.waitstatus_to_exitcode(status)}, see what it has written to stderr"

    def stop(self) -> None:
        for process, connection in self.processes:
            with suppress(ProcessLookupError, ChildProcessError):  # It has ended.
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            connection.close()
        self.processes = []
        Path(self.store).unlink(missing_ok=True)


def serve(connection: Connection, rank: int, size: int, store: str) -> None:
    """Be the process of a rank: run each test that the connection names, and send its traceback, or nothing."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGALRM, sys.stderr, chain=True)  # A test that hangs ends its process.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # Torch 2.13 has another name for it.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # of the compiler
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    failure = ""
    with suppress(EOFError):  # when the process that runs the tests has ended
        while not failure:  # Otherwise this process ends, and no other one waits for it.
            module, name, arguments = connection.recv()
            signal.alarm(SECONDS)
            torch.manual_seed(0)  # the same in every process
            try:
                test = inspect.unwrap(getattr(importlib.import_module(module), name))
                own = {"rank": rank, "size": size}
                test(**arguments, **{name: own[name] for name in own.keys() & inspect.signature(test).parameters})
            except BaseException:
                failure = f"fails:\n{traceback.format_exc()}"
            signal.alarm(0)
            connection.send(failure)


def serve_on_gpu() -> None:
    global DEVICE
    DEVICE = "cuda"
    for function in [*GATHERS, "all_reduce"]:
        setattr(dist, function, on_the_host(getattr(dist, function)))
    descriptor, rank, store = sys.argv[1:]
    serve(Connection(int(descriptor)), int(rank), 2, store)


def on_the_host(collective: Callable[..., object]) -> Callable[..., object]:
    """Return a collective that takes tensors of simulated GPUs, for which there is no backend."""

    def run(*tensors: Tensor, group: Any) -> None:
        copies = [tensor.cpu() for tensor in tensors]
        collective(*copies, group=group)
        tensors[0].copy_(copies[0])

    return run


# Worlds for tests.

MARKS = {2: [pytest.mark.smoke], 3: [pytest.mark.slow]}
MARKS["gpus"] = [pytest.mark.cuda, pytest.mark.simulated, pytest.mark.slow]
world_of = functools.cache(World)  # for each kind, once; its processes end with the one that runs the tests


def each_process(*kinds: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in each process of worlds, which may ask for its `rank` and the `size` of its world."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @needs_fork
        @pytest.mark.timeout(600)
        @pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS[kind]) for kind in kinds])
        @functools.wraps(test)
        def run(kind: Any) -> None:
            world_of(kind).run(test)

        run.__signature__ = inspect.signature(lambda kind: None)  # what pytest has to give it
        return run

    return decorate


class Collectives(TorchDispatchMode):
    """Lists the collectives of its body, by their operators, and how many numbers the gathers send."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found.append(func.overloadpacket.__name__)
            if self.found[-1] == GATHER:
                self.lengths.append(args[1].numel())
        return func(*args, **(kwargs or {}))


# Batches of all processes, of which each has its rows; and the comparison with one process.


def twins(module: nn.Module, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return `module` with random parameters, and a synchronized copy of it."""
    plain = randomize(module).to(DEVICE, dtype)
    return plain, convert_model(copy.deepcopy(plain), **options)


def images(rows: Sequence[int] = ROWS) -> Tensor:
    """Return the random images of all processes, of which each has its rows."""
    return torch.randn(sum(rows[: dist.get_world_size()]), 3, 6, 5, dtype=torch.float64, device=DEVICE)


def cut(batch: Tensor, rows: Sequence[int] = ROWS) -> Tensor:
    return batch.split(rows[: dist.get_world_size()])[dist.get_rank()]


def as_inputs(batch: Tensor, rows: Sequence[int] = ROWS) -> list[Tensor]:
    """Return inputs that need gradients: that of one process, and that of this one."""
    return [tensor.clone().requires_grad_() for tensor in (batch, cut(batch, rows))]  # in the same memory format


def summed(tensor: Tensor) -> Tensor:
    result = tensor.detach().clone()
    dist.all_reduce(result, group=dist.group.WORLD)
    return result


def assert_same_buffers(actual: nn.Module, expected: nn.Module) -> None:
    for (name, buffer), reference in zip(actual.named_buffers(), expected.buffers(), strict=True):
        assert_equal(buffer, reference, name)


def assert_same_gradients(actual: nn.Module, expected: nn.Module, averaged: bool = False) -> None:
    """Compare the gradients of the parameters: those that are the same in all processes, or their sums."""
    grads = {name: parameter.grad for name, parameter in actual.named_parameters() if parameter.grad is not None}
    if grads and not averaged:  # in one collective
        sums = summed(torch.cat([grad.flatten() for grad in grads.values()])).split([g.numel() for g in grads.values()])
        grads = {name: total.view_as(grads[name]) for name, total in zip(grads, sums, strict=True)}
    for (name, _), reference in zip(actual.named_parameters(), expected.parameters(), strict=True):
        grad = grads.get(name)
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        assert_same_gradient(grad, reference.grad, f"gradient of {name}")


def assert_same_step(
    plain: nn.Module, model: nn.Module, batch: Tensor, rows: Sequence[int] = ROWS, averages=False, accumulates=False
) -> None:
    """Compare a step of `model` on the rows of each process with one of `plain` on all of them at once.

    With `averages`, gradients of parameters are averaged over the processes; with `accumulates`, more will be added.
    """
    whole, part = as_inputs(batch, rows)
    expected, actual = plain(whole), model(part)
    assert_equal(actual, cut(expected, rows), "output")
    grad, scale = torch.randn_like(expected), dist.get_world_size() if averages else 1
    expected.backward(grad)
    actual.backward(cut(grad, rows) * scale)
    assert_equal(part.grad / scale, cut(whole.grad, rows), "input gradient")
    assert_same_buffers(model, plain)
    if not accumulates:
        assert_same_gradients(model, plain, averages)
        for module in (plain, model):
            module.zero_grad()


# Nets, all for images with three channels.


def norm_conv(channels: int = 3, size: int = 1) -> nn.Sequential:
    # Without biases before a batch norm: their gradients are zero, and in half precision nothing but noise.
    return nn.Sequential(nn.Conv2d(3, channels, size, bias=False), nn.BatchNorm2d(channels))


def conv_net() -> nn.Sequential:
    return nn.Sequential(*norm_conv(4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3))


def add_shortcut(net: Net, input: Tensor) -> Tensor:
    return torch.tanh(net.shortcut(input) + net.path(input))  # the shortcut first


def residual() -> nn.Sequential:
    paths = [nn.Sequential(norm_conv(), nn.Tanh(), norm_conv()) for _ in range(2)]
    return nn.Sequential(*[Net(add_shortcut, shortcut=norm_conv(), path=path) for path in paths])


def partly_frozen() -> nn.Sequential:
    net = residual()
    for block in net:
        block.path[0].eval()
    return net


def ignore_head(net: Net, input: Tensor) -> Tensor:
    output = net.body(input)
    net.head(output)
    return net.body[0].shortcut(output)


def with_ignored_head() -> Net:
    """Return a net that ignores the outputs of an auxiliary head, whose layers it calls between others."""
    return Net(ignore_head, body=residual(), head=nn.Sequential(norm_conv(), nn.Tanh(), norm_conv()))


def checkpointed(module: nn.Module, reentrant: bool) -> Net:
    return Net(lambda net, input: checkpoint(net.module, input, use_reentrant=reentrant), module=module)
