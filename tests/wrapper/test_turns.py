"""Replicas that share a device run one at a time, each with a random state of its own."""

import contextlib
import faulthandler
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CUDA_COUNT, INTERLEAVED, device_lists, needs_two_gpus
from forks import forked, needs_fork
from helpers import Net, Numbered, as_devices, assert_equal, doubles, in_threads, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, ReplicaSyncError, SynchronizedBatchNorm1d
from sync_batchnorm.wrapper.random_states import RandomStates

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

    def inner(self, x: Tensor) -> Tensor:
        return self.bn1(self.draw(x)).tanh()

    def body(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.inner, x, use_reentrant=False) if self.how == "nested" else self.inner(x)
        return self.draw(self.bn2(self.draw(inner)))

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
def test_replicas_on_distinct_accelerators_run_at_the_same_time():
    barrier = threading.Barrier(2, timeout=5.0)
    parallel = DataParallelWithCallback(Net(lambda net, x: x * (barrier.wait() >= 0)).cuda(), [0, 1])
    assert parallel(torch.ones(4, 3, device="cuda")).sum() == 12


@pytest.mark.smoke
def test_one_replica_runs_at_a_time_the_lowest_that_can_first():
    def forward(net: Any, x: Tensor) -> Tensor:
        for place in range(4):
            log.append((place, net.number))
            running.add(net.number)
            torch.ones(2000).sum()  # gives up the interpreter lock
            assert running == {net.number}
            running.discard(net.number)
            x = net.bn(x)
        return x

    log, running = list[Any](), set[int]()
    DataParallelWithCallback(Numbered(forward, bn=SynchronizedBatchNorm1d(3)), ["cpu"] * 3)(torch.randn(6, 3))
    assert log == [(place, replica) for place in range(4) for replica in range(3)]


def test_replica_that_is_stuck_in_its_first_turn_loses_it_at_the_timeout():
    release, x = threading.Event(), torch.randn(6, 3)
    net = Numbered(lambda net, x: net.number > 0 or release.wait())
    parallel = DataParallelWithCallback(net, ["cpu"] * 3, timeout=0.2)
    text = r"replica \d on device cpu waits for its turn while replica 0 on device cpu is still running; pass a longer"
    with pytest.raises(ReplicaSyncError, match=text) as caught:
        parallel(x)
    assert caught.value.__notes__[0].startswith("Stack of replica 0 on device cpu at the timeout:\n")
    users = [nn.Softsign()] * 3  # no replicas of the pass that has not ended
    try:
        outputs = parallel.parallel_apply(users, [(x,)] * 3, None)
    finally:
        release.set()  # A thread that waits on would keep the process from ending.
    assert torch.equal(torch.stack(outputs), F.softsign(x).expand(3, 6, 3))


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
