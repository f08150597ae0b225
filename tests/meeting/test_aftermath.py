"""After a failure nothing is left: no thread, no tensor, no state on wrapper or module; and Ctrl-C ends the program."""

import contextlib
import copy
import functools
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import first_in_smoke, slow
from forks import forked, let_python_swallow, needs_fork
from helpers import assert_equal, end_from_outside
from scripted import WRAPPERS, R, Scripted, TorchStyle, assert_next_forward_is_right, batch, raising, scripted
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm1d,
    patch_replication_callback,
)
from sync_batchnorm.meeting import Coordinator
from sync_batchnorm.meeting.errors import ReplicaTimeoutError

FAILURES = {
    "raises": (0, "between", raising(LookupError("the cause"))),
    "interrupted": (1, "between", raising(KeyboardInterrupt())),
    "leaves": (1, "between", lambda model, x: x),
    "no failure": (1, "nowhere", raising(LookupError())),
}


def _step(parallel: nn.DataParallel) -> None:
    """Run a forward, which may fail, and a backward."""
    with contextlib.suppress(LookupError, KeyboardInterrupt, ReplicaSyncError):
        output = parallel(*batch())
        output.backward(torch.randn_like(output))


@pytest.mark.parametrize("failure", first_in_smoke(FAILURES))
@pytest.mark.parametrize("name", ["wrapper", *slow("patched")])
def test_steps_leave_nothing_behind(name, failure):
    def numbers() -> tuple[int, int]:
        objects = gc.get_objects()
        return len(objects), sum(issubclass(type(thing), Tensor) for thing in objects)

    parallel = WRAPPERS[name](scripted(FAILURES[failure]))
    _step(parallel)
    while gc.collect():  # what a compilation of another test left takes several passes
        pass
    gc.disable()
    try:
        objects, tensors = numbers()
        for _ in range(20):
            _step(parallel)
        end = time.monotonic() + 60
        while numbers()[0] - objects >= 20 and time.monotonic() < end:  # Threads end a moment later.
            time.sleep(0.001)
        assert numbers()[1] == tensors
        assert numbers()[0] - objects < 20
        assert gc.collect() == 0
    finally:
        gc.enable()


def _stands_still(model: Scripted, x: Tensor) -> None:
    print("ready", flush=True)
    threading.Event().wait()


@needs_fork
def test_control_c_while_replicas_wait_reaches_the_caller(monkeypatch):
    monkeypatch.setattr("sync_batchnorm.wrapper.parallel_apply.PATIENCE", 0.01)  # In vain: one replica never leaves.

    def forward() -> None:
        try:
            WRAPPERS["wrapper"](scripted((1, "between", _stands_still)))(*batch())
        finally:
            others = {*threading.enumerate()} - {threading.current_thread()}
            print("Python waits for", [thread for thread in others if not thread.daemon])

    status, output = forked(forward, interrupt_at="ready")
    assert status == 1
    assert output.startswith("ready\nPython waits for []\n")
    assert output.endswith("\nKeyboardInterrupt\n")


@pytest.mark.parametrize("kind", [ReplicaSyncError, ReplicaTimeoutError])
def test_errors_pickle(kind):
    error = pickle.loads(pickle.dumps(kind("text")))
    assert (type(error), str(error)) == (kind, "text")


def test_interrupt_of_the_caller_is_raised_even_if_a_replica_has_failed():
    class Interrupted(TorchStyle):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            with contextlib.suppress(OSError, ReplicaSyncError):
                super().parallel_apply(replicas, inputs, kwargs)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        patch_replication_callback(Interrupted(scripted((1, "before", raising(OSError()))), R))(*batch())


class GivesUp(TorchStyle):
    """Starts the first replica, which waits for others in vain, and then raises an error, if it has one."""

    error: BaseException | None
    begun = threading.Event()  # which the first replica sets

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        if self.error is None:
            return super().parallel_apply(replicas, inputs, kwargs)
        self.thread = threading.Thread(target=self.work, args=(replicas[0], inputs[0]))
        self.thread.start()
        self.begun.wait()
        self.begun.clear()
        raise self.error

    def work(self, replica: nn.Module, inputs: Any) -> None:
        with pytest.raises(ReplicaSyncError, match="in its thread; this replica was stopped"):
            replica(*inputs)
        self.released = True


def test_replica_that_fails_late_leaves_the_next_forward_alone(monkeypatch):
    monkeypatch.setattr("sync_batchnorm.wrapper.parallel_apply.PATIENCE", 0.01)  # In vain: one replica is later.
    late = threading.Event()

    def is_late(model: Scripted, x: Tensor) -> None:
        GivesUp.begun.set()
        late.wait()

    def ends_it(model: Scripted, x: Tensor) -> None:
        late.set()
        parallel.thread.join()

    parallel = patch_replication_callback(GivesUp(scripted((0, "before", is_late)), R))
    parallel.error = OSError("the caller")
    with pytest.raises(OSError, match="the caller"):
        parallel(*batch())
    parallel.error, model, inputs = None, parallel.module, batch()
    model.steps = {}
    expected = copy.deepcopy(model)(*inputs)
    model.steps = {(1, "between"): ends_it}
    assert_equal(parallel(*inputs), expected)
    assert parallel.released


class Drops(nn.Module):
    """Drops values, and writes into a buffer what it has left, before and after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(4).double()
        self.register_buffer("left", torch.zeros((), dtype=torch.float64))
        self.between: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in (nn.Identity(), self.bn):
            x = F.dropout(layer(x), 0.5)
            self.left.add_((x != 0).sum())
            self.between()
        return x


def _seeded_step(parallel: nn.DataParallel, x: Tensor) -> list[Tensor]:
    """Return all that a step gives that begins with the state of the model and a seed that is its own."""
    torch.manual_seed(3)
    output = parallel(x)
    gradients = torch.autograd.grad(output.sin().sum(), parallel.parameters())
    return [output, parallel.module.left.clone(), torch.rand(3), *gradients]


@needs_fork
@pytest.mark.parametrize("error", [TimeoutError("an alarm"), KeyboardInterrupt()])
def test_exception_in_the_caller_leaves_its_generator_and_the_buffers_alone(error):
    assert forked(functools.partial(_interrupt_while_replicas_draw, error)) == (0, "")


def _interrupt_while_replicas_draw(error: BaseException) -> None:
    parallel, x = DataParallelWithCallback(Drops(), ["cpu"] * R), torch.randn(2 * R, 4, dtype=torch.float64)
    expected = _seeded_step(copy.deepcopy(parallel), x)
    aborts, abort, raised = threading.Event(), Coordinator.abort, threading.Event()

    def interrupted(number: int, frame: Any) -> None:
        if not raised.is_set():
            raised.set()
            raise error

    def noting(coordinator: Coordinator, error: BaseException, seconds: float) -> None:
        aborts.set()
        abort(coordinator, error, seconds)

    def is_late() -> None:
        # Again and again: a child that another thread has forked may miss a signal (Python 3.13).
        while not aborts.wait(0.1):
            os.kill(os.getpid(), signal.SIGALRM)
        for _ in range(1000):
            torch.rand(10)

    signal.signal(signal.SIGALRM, interrupted)
    Coordinator.abort = noting
    parallel.module.between = is_late
    state = torch.get_rng_state()
    with pytest.raises(type(error)):
        parallel(x)
    assert torch.equal(torch.get_rng_state(), state)
    left = parallel.module.left.item()
    while any("replicas" in thread.name for thread in threading.enumerate()):
        time.sleep(0.001)  # They have told the caller, and end.
    assert left > 0  # by the first replica, before its layer
    parallel.module.left.zero_()
    parallel.module.between = lambda: None
    assert all(map(torch.equal, _seeded_step(parallel, x), expected))


def test_caller_starts_and_waits_for_threads_in_no_python_code():
    """An exception of a signal would become another one there, or break a lock."""
    parallel, inputs, calls = WRAPPERS["wrapper"](scripted()), batch(), set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code.co_filename == threading.__file__:
            calls.add(frame.f_code.co_name)

    parallel(*inputs)
    sys.setprofile(note)
    parallel(*inputs)
    sys.setprofile(None)
    assert calls & {"__init__", "start", "join", "wait", "is_alive", "_wait_for_tstate_lock"} == {"__init__"}


@needs_fork
def test_alarms_at_any_moment_leave_the_next_step_as_it_is():
    def ring(number: int, frame: Any) -> None:
        raise TimeoutError("an alarm")

    def alarmed() -> None:
        let_python_swallow(TimeoutError)
        signal.signal(signal.SIGALRM, ring)
        x = torch.randn(2 * R, 4, dtype=torch.float64)
        parallel = DataParallelWithCallback(Drops(), ["cpu"] * R)
        expected, interrupted = _seeded_step(copy.deepcopy(parallel), x), 0
        seconds = float("inf")  # what a call takes, at least
        for _ in range(5):
            other = copy.deepcopy(parallel)
            start = time.perf_counter()
            other(x)
            seconds = min(seconds, time.perf_counter() - start)
        moments = random.Random(0)
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, seconds))
                parallel(x)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeoutError:
                interrupted += 1
            again = copy.deepcopy(parallel)
            again.load_state_dict(DataParallelWithCallback(Drops(), ["cpu"] * R).state_dict())
            assert all(map(torch.equal, _seeded_step(again, x), expected))
        assert interrupted > 5

    assert forked(alarmed) == (0, "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_replica_whose_thread_ends_without_a_word_is_an_error(monkeypatch):
    def leave(coordinator: Coordinator, number: int, failure: BaseException | None = None) -> None:
        if isinstance(failure, SystemExit):  # as if it were ended here a second time
            raise failure
        tell(coordinator, number, failure)

    tell = Coordinator.leave
    monkeypatch.setattr(Coordinator, "leave", leave)
    step = (1, "between", lambda model, x: end_from_outside(threading.current_thread()))
    with pytest.raises(RuntimeError, match=r"forward\(\) ends, but its thread was ended"):
        WRAPPERS["wrapper"](scripted(step))(*batch())


@needs_fork
def test_forked_child_uses_the_wrapper_and_its_own():
    parallel = WRAPPERS["wrapper"](scripted((1, "between", raising(LookupError()))))
    with pytest.raises(LookupError):
        parallel(*batch())

    def use_both() -> None:
        assert_next_forward_is_right(parallel, (1, 0))
        assert_next_forward_is_right(WRAPPERS["wrapper"](scripted()), (0, 0))

    assert forked(use_both) == (0, "")
    use_both()
