"""What threads share is right whichever of them comes first; on a free-threaded Python, also without the lock."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import FREE_THREADED
from helpers import doubles, run_parts, twins
from torch import nn

from sync_batchnorm import SynchronizedBatchNorm1d, recompute
from sync_batchnorm.backends.base import cached_constants
from sync_batchnorm.warning import ModuleSet

THREADS = 8


def at_once(*bodies: Callable[[], Any]) -> list[Any]:
    """Run each body in a thread, all of them from the same moment on; return what they return."""
    barrier, results = threading.Barrier(len(bodies)), [None] * len(bodies)

    def run(i: int) -> None:
        barrier.wait()
        results[i] = bodies[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.skipif(not FREE_THREADED, reason="this Python has its lock")
def test_lock_is_off_while_tests_run():
    assert not sys._is_gil_enabled()


class Chain(nn.Module):
    """Twenty layers; each replica takes a gradient through them in its forward, and drops them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.BatchNorm2d(3) for _ in range(20)])

    def forward(self, input):
        input = input.detach().requires_grad_()
        return torch.autograd.grad(self.layers(input).sum(), input, retain_graph=True)[0]


@pytest.mark.slow
@pytest.mark.watchdog(120)
@pytest.mark.skipif(not FREE_THREADED, reason="this Python has its lock")
def test_replicas_that_drop_what_others_made_do_not_meet_their_end():
    """When threads ended as soon as they were through, a thousand of these forwards hung or crashed the process."""
    _, parallel = twins(Chain(), ["cpu"] * 2)
    data = torch.randn(4, 3, 4, 5)
    for _ in range(1000):
        assert parallel(data).shape == data.shape


def test_layer_is_added_by_one_thread_alone():
    for _ in range(50):
        layers, layer = ModuleSet(), SynchronizedBatchNorm1d(1)
        assert sum(at_once(*[partial(layers.add, layer)] * THREADS)) == 1
        assert layer in layers


def test_layers_that_die_leave_a_set_to_which_others_are_added():
    layers = ModuleSet()

    def add_many() -> None:
        for _ in range(50):
            layers.add(SynchronizedBatchNorm1d(1))  # and no reference is kept

    at_once(*[add_many] * THREADS)
    gc.collect()
    assert len(layers) == 0


def test_constants_that_threads_ask_for_at_once_are_their_own():
    @cached_constants
    def filled(value):
        return (torch.full((2,), value),)

    def ask() -> bool:
        return all(filled(value)[0].tolist() == [value, value] for value in [*range(600), *range(1200)])

    assert at_once(*[ask] * THREADS) == [True] * THREADS


def test_checkpoints_of_threads_do_not_mix_their_calls():
    def body(number: int) -> bool:
        def function(x):
            kept = recompute.recall(owner) if recompute.has_hooks() else None
            if kept is None:
                recompute.keep(owner, lambda: number)
            seen.append(kept)
            return x * x

        owner, seen = object(), []
        for _ in range(20):
            x = torch.ones(2, requires_grad=True)
            torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
        return seen == [None, number] * 20

    assert at_once(*[lambda i=i: body(i) for i in range(THREADS)]) == [True] * THREADS


def test_parts_that_go_backward_at_once_leave_nothing_behind():
    _, parallel = twins(nn.BatchNorm2d(3).double(), ["cpu"] * 4)
    for _ in range(20):
        parts = [doubles(2, 3, 4, 5).requires_grad_() for _ in range(4)]
        inner = [part * 1 for part in parts]
        outputs = run_parts(parallel, inner)
        kept = [weakref.ref(tensor) for tensor in inner]
        del inner
        pairs = [(output, part) for output, part in zip(outputs, parts, strict=True)]
        grads = at_once(*[lambda pair=pair: torch.autograd.grad(*pair, torch.ones_like(pair[0])) for pair in pairs])
        assert all(grad[0].shape == part.shape for grad, part in zip(grads, parts, strict=True))
        assert [reference() for reference in kept] == [None] * 4
