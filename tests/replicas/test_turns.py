"""Replicas that share a device run one at a time, each with a random state of its own."""

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CUDA_COUNT, INTERLEAVED, device_lists, needs_two_gpus
from forks import forked, let_python_swallow, needs_fork
from helpers import Net, TwoLayers, as_devices, assert_equal, assert_same_step, doubles, in_threads, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, ReplicaSyncError
from sync_batchnorm.meeting import Coordinator
from sync_batchnorm.wrapper.random_states import RandomStates
from sync_batchnorm.wrapper.run import prepared_runs

ONE_DEVICE = [param for param in device_lists(4) if len(set(param.values[0])) == 1]
shared_devices = pytest.mark.parametrize("devices", [*ONE_DEVICE, *INTERLEAVED])

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.Dropout(0.4),
    "function": F.dropout,
    "stochastic depth": lambda x: x if torch.rand((), device=x.device) < 0.5 else 3 * x,
    "rrelu": lambda x: F.rrelu(x * 1, training=True, inplace=True),  # else wrong in any checkpoint (torch 2.13)
    "generator of the CPU": lambda x: x * torch.rand(x.shape[0], 1).to(x),
}


class Random(nn.Module):
    """Draws random numbers before, between and after two layers, in checkpoints or not."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.how = draw, "plain"
        self.first, self.bn1, self.bn2 = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def body(self, x: Tensor) -> Tensor:
        return self.draw(self.bn2(self.draw(self.inner(x))))

    def inner(self, x: Tensor) -> Tensor:
        if self.how == "nested":
            return checkpoint(lambda x: self.bn1(self.draw(x)).tanh(), x, use_reentrant=False)
        return self.bn1(self.draw(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autograd.graph.save_on_cpu() if self.how == "save_on_cpu" else contextlib.nullcontext():
            return self.body(x) if self.how == "plain" else checkpoint(self.body, x, use_reentrant=False)


def seeded_step(parallel: nn.DataParallel, how: str, data: Tensor, grad: Tensor) -> list[Tensor]:
    """Return output and gradients of a step, and a number that the caller draws after it."""
    parallel.zero_grad()
    parallel.module.how = how
    torch.manual_seed(3)
    output = parallel(data)
    output.backward(grad)
    return [output.detach(), *(p.grad for p in parallel.parameters()), torch.rand(3), torch.rand(3).to(data)]


@pytest.mark.parametrize("how", ["checkpoint", "nested", "save_on_cpu"])
@pytest.mark.parametrize("draw", RANDOM.values(), ids=list(RANDOM))
@pytest.mark.parametrize("devices", ONE_DEVICE)  # Of several devices, autograd runs recomputations at the same time.
def test_recomputation_draws_what_its_forward_pass_has_drawn(devices, draw, how):
    _, parallel = twins(Random(draw).double(), devices)
    data, grad = doubles(16, 6, devices=devices), doubles(16, 5, devices=devices)
    plain, recomputed = (seeded_step(parallel, each, data, grad) for each in ("plain", how))
    for ours, expected in zip(recomputed, plain, strict=True):
        assert_equal(ours, expected, tolerance=1e-12)


@pytest.mark.smoke
@pytest.mark.usefixtures("many_switches")
@shared_devices
def test_one_seed_gives_one_result(devices):
    _, parallel = twins(Random(F.dropout), devices)
    data, grad = torch.randn(16, 6).to(devices[0]), torch.randn(16, 5).to(devices[0])
    # Autograd numbers nodes, and orders by that, from zero in each thread, and so in the first step of this one.
    first = seeded_step(parallel, "plain", data, grad)
    for _ in range(30):
        assert all(map(torch.equal, seeded_step(parallel, "plain", data, grad), first))
    masks = (first[0] == 0).float().view(len(devices), -1)
    assert not any(torch.equal(masks[0], other) for other in masks[1:])


def drawing(net, x: Tensor, number: Tensor) -> Tensor:
    torch.rand(int(number))
    torch.rand(int(number), device=x.device)
    return x


@shared_devices
def test_generators_of_the_caller_move_on_alike_however_much_replicas_draw_and_not_if_none_draws(devices):
    parallel = DataParallelWithCallback(Net(drawing).to(as_devices(devices)[0]), devices)

    def states_after(numbers: Tensor) -> list[Tensor]:
        torch.manual_seed(5)
        parallel(torch.ones(len(devices), 1), numbers)
        return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]

    few, many, none = map(states_after, torch.tensor([[0, 1, 2, 3], [1000] * 4, [0] * 4])[:, : len(devices)])
    assert all(map(torch.equal, few, many))
    assert list(map(torch.equal, few, none)) == [False, *[True] * CUDA_COUNT]
    torch.manual_seed(5)
    assert torch.equal(none[0], torch.get_rng_state())


@needs_two_gpus
def test_distinct_accelerators_take_no_turns(monkeypatch):
    monkeypatch.delattr(RandomStates, "__init__")
    plain, parallel = twins(TwoLayers().double(), [0, 1])
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6, devices=[0, 1]))


class Logging(nn.Module):
    """Notes which replica begins and ends to run between exchanges; a step may do something else in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.log, self.steps, self.running = nn.BatchNorm1d(3), [], {}, set()

    def runs(self, replica: int, place: int) -> None:
        self.log.append((place, replica))
        self.running.add(replica)
        assert self.running == {replica}, self.running
        torch.ones(2000).sum()  # gives up the interpreter lock
        self.steps.get((replica, place), lambda: None)()
        assert self.running == {replica}, self.running
        self.running.discard(replica)

    def forward(self, x: Tensor, replica: Tensor) -> Tensor:
        for place in range(3):
            self.runs(int(replica[0]), place)
            x = self.bn(x)
        self.runs(int(replica[0]), 3)
        return x


def logging(timeout: float = 5.0, **steps: Any) -> tuple[DataParallelWithCallback, tuple[Tensor, Tensor]]:
    _, parallel = twins(Logging(), ["cpu"] * 3, timeout)
    return parallel, (torch.randn(6, 3), torch.arange(3).repeat_interleave(2))


@pytest.mark.smoke
def test_one_replica_runs_at_a_time_the_lowest_that_can_first():
    parallel, inputs = logging()
    parallel(*inputs)
    assert parallel.module.log == [(place, replica) for place in range(4) for replica in range(3)]


@pytest.mark.parametrize("replica", range(3))
def test_replica_that_raises_ends_the_turns_and_nobody_waits_for_one(replica):
    def fail() -> None:
        parallel.module.steps.clear()
        parallel.module.running.clear()
        raise LookupError("the cause")

    parallel, inputs = logging()
    parallel.module.steps[replica, 1] = fail
    with pytest.raises(LookupError, match="the cause"):
        parallel(*inputs)
    assert [entry for entry in parallel.module.log if entry[0] > 1] == []
    parallel.module.log.clear()
    parallel(*inputs)
    assert len(parallel.module.log) == 12


def test_replica_that_is_stuck_in_its_first_turn_loses_it_at_the_timeout(monkeypatch):
    def is_stuck() -> None:
        stuck.set()
        release.wait()

    def begin_after_the_first(coordinator: Coordinator, replica: int) -> Any:
        if replica > 0:
            stuck.wait()
        return begin(coordinator, replica)

    stuck, release, begin = threading.Event(), threading.Event(), Coordinator.begin
    monkeypatch.setattr(Coordinator, "begin", begin_after_the_first)
    parallel, inputs = logging(timeout=0.2)
    parallel.module.steps[0, 0] = is_stuck
    text = (
        r"expected all replicas within 0\.2 seconds, but replica \d on device cpu waits for its turn while replica 0 "
        "on device cpu is still running; pass a longer timeout= if it is only slow; replicas on one device run one at"
    )
    with pytest.raises(ReplicaSyncError, match=text) as caught:
        parallel(*inputs)
    assert caught.value.__notes__[0].startswith("Stack of replica 0 on device cpu at the timeout:\n")
    assert prepared_runs() == []  # though this replica has not ended
    release.set()


@needs_fork
def test_threads_that_read_and_write_random_states_at_once_never_wait_for_each_other():
    def switch_states() -> None:
        faulthandler.dump_traceback_later(8, exit=True)  # A thread that waits in torch keeps the interpreter's lock.
        gc.set_threshold(50)

        def work() -> None:
            states = RandomStates({0: torch.device("cpu")})
            for _ in range(3000):
                cycle: list[object] = [torch.zeros(1)]
                cycle.append(cycle)  # The garbage collector gives up that lock when it frees a tensor.
                states.begin_turn(0)

        in_threads(work, work)
        faulthandler.cancel_dump_traceback_later()

    assert forked(switch_states) == (0, "")


@pytest.mark.slow
@needs_fork
@pytest.mark.timeout(900)
def test_control_c_at_any_moment_leaves_no_replica_waiting_for_its_turn():
    def interrupt_often() -> None:
        let_python_swallow(KeyboardInterrupt)
        plain, parallel = twins(TwoLayers().double(), ["cpu"] * 3)
        interrupted = 0
        for _ in range(200):
            timer = threading.Timer(random.uniform(1e-4, 4e-3), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                parallel(doubles(6, 3, 6, 6))
                timer.join()
                while True:  # Python 3.13 looks for signals only if asked, in a child that a thread has forked.
                    os.kill(os.getpid(), signal.SIGINT)  # again, as Python may have swallowed the first
            except (KeyboardInterrupt, RuntimeError) as error:  # `Thread.start` may turn the one into the other.
                interrupted += KeyboardInterrupt in (type(error), type(error.__context__))
        plain.load_state_dict(parallel.module.state_dict())
        assert_same_step(plain, parallel, doubles(6, 3, 6, 6))
        print(interrupted, len(sys._current_frames()))  # `active_count` has threads whose start was interrupted.

    assert forked(interrupt_often) == (0, "200 1\n")
