"""After a failure nothing is left: no thread, no tensor, no state on wrapper or module; and Ctrl-C ends the program."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked, needs_fork
from helpers import assert_equal
from scripted import WRAPPERS, R, Scripted, TorchStyle, assert_next_forward_is_right, batch, raising, scripted
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    patch_replication_callback,
)
from sync_batchnorm.coordinator import Coordinator

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=list(WRAPPERS))
def wrap(request: pytest.FixtureRequest) -> Any:
    """Every way to run replicas."""
    return WRAPPERS[request.param]


def _live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def _leaves(model: Scripted, x: Tensor) -> Tensor:
    return x


FAILURES = {
    "raises": (0, "between", raising(LookupError("the cause"))),
    "interrupted": (1, "between", raising(KeyboardInterrupt())),
    "leaves": (1, "between", _leaves),
    "no failure": (1, "nowhere", _leaves),
}


def _fail(parallel: nn.DataParallel) -> None:
    try:
        parallel(*batch())
    except (LookupError, KeyboardInterrupt, ReplicaSyncError):
        return


@pytest.mark.parametrize("failure", list(FAILURES))
@pytest.mark.parametrize("name", ["wrapper", "patched"])
def test_failing_forward_leaves_no_cycle_behind(name, failure):
    parallel = WRAPPERS[name](scripted(FAILURES[failure]))
    _fail(parallel)
    gc.collect()
    gc.disable()
    try:
        before = _live_tensors()
        _fail(parallel)
        after = _live_tensors()
        unreachable = gc.collect()
    finally:
        gc.enable()
    assert after == before
    assert unreachable == 0


@pytest.mark.watchdog(60)
@pytest.mark.parametrize("forwards", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_many_failing_forwards_leave_nothing_behind(forwards):
    parallel = WRAPPERS["wrapper"](scripted())
    steps = list(FAILURES.values())
    _fail(parallel)
    gc.collect()
    before = threading.active_count(), _live_tensors(), len(os.listdir("/proc/self/fd")) if os.name == "posix" else 0
    for i in range(forwards):
        replica, place, step = steps[i % len(steps)]
        parallel.module.steps = {(replica, place): step}
        _fail(parallel)
    gc.collect()
    after = threading.active_count(), _live_tensors(), len(os.listdir("/proc/self/fd")) if os.name == "posix" else 0
    assert after == before


SIGINT_PROGRAM = """
import signal, sys, threading
sys.path.insert(0, {tests!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell lets what it runs in the background ignore it.
from scripted import *

def stands_still(model, x):
    print("ready", flush=True)
    threading.Event().wait({seconds})

parallel = WRAPPERS[{name!r}](scripted((1, {place!r}, stands_still)))
try:
    parallel(*batch())
finally:
    print("ended", flush=True)
"""


def _stands_still(model: Scripted, x: Tensor) -> None:
    print("ready", flush=True)
    threading.Event().wait()


@needs_fork
def test_control_c_while_replicas_wait_reaches_the_caller():
    def forward() -> None:
        drain = Coordinator.drain
        Coordinator.drain = lambda coordinator, seconds: drain(coordinator, 0.01)  # In vain: one replica never leaves.
        try:
            WRAPPERS["wrapper"](scripted((1, "between", _stands_still)))(*batch())
        finally:
            others = {*threading.enumerate()} - {threading.current_thread()}
            print("Python waits for", [thread for thread in others if not thread.daemon])

    status, output = forked(forward, interrupt_at="ready")
    assert status == 1
    assert output.startswith("ready\nPython waits for []\n")
    assert output.endswith("\nKeyboardInterrupt\n")


@pytest.mark.slow
@pytest.mark.watchdog(60)
@pytest.mark.parametrize(("name", "seconds"), [("wrapper", None), ("own-parallel_apply", 0.5), ("own-forward", 0.5)])
def test_control_c_while_replicas_wait_ends_the_program(name, seconds):
    """A replica blocks, for ever or, where the threads are the user's own and keep the process alive, for a moment."""
    program = SIGINT_PROGRAM.format(tests=str(ROOT / "tests"), seconds=seconds, name=name, place="between")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert output == "ended\n"
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode not in (0, None)


def test_error_of_the_caller_releases_the_replicas_of_a_forward_of_its_own():
    released: list[BaseException] = []

    class GivesUp(TorchStyle):
        """Starts all replicas but the last, and fails before it waits for them."""

        def forward(self, *inputs: Any) -> Any:
            x, replica = inputs
            self.replicas = self.replicate(self.module, self.device_ids)
            self.threads = [threading.Thread(target=self._work, args=(i, x, replica)) for i in range(R - 1)]
            for thread in self.threads:
                thread.start()
            raise OSError("the caller")

        def _work(self, i: int, x: Tensor, replica: Tensor) -> None:
            try:
                self.replicas[i](x[2 * i : 2 * i + 2], replica[2 * i : 2 * i + 2])
            except ReplicaSyncError as error:
                released.append(error)

    parallel = patch_replication_callback(GivesUp(scripted(), R))
    with pytest.raises(OSError, match="the caller"):
        parallel(*batch())
    for thread in parallel.threads:
        thread.join()
    assert len(released) == R - 1
    assert all("got OSError in its thread; this replica was only released" in str(error) for error in released)


class Interrupting(nn.Module):
    def forward(self, input, interrupts):
        if interrupts:
            raise KeyboardInterrupt
        return input


def test_replica_that_is_kept_is_interrupted_as_itself():
    parallel = DataParallelWithCallback(Interrupting(), ["cpu"] * 2)
    replicas = parallel.replicate(parallel.module, parallel.device_ids)
    inputs = torch.randn(4, 2).chunk(2)
    parallel.parallel_apply(replicas, [(part, False) for part in inputs], [{}] * 2)
    with pytest.raises(KeyboardInterrupt):
        replicas[0](inputs[0], True)


def test_interrupted_caller_waits_until_the_replicas_have_left(monkeypatch):
    begun, drains = threading.Event(), threading.Event()
    drain = Coordinator.drain

    def drain_for_long(coordinator: Coordinator, seconds: float) -> None:
        drains.set()
        drain(coordinator, 1000.0)  # Much longer than the watchdog waits.

    def is_busy(model: Scripted, x: Tensor) -> None:
        begun.set()
        drains.wait()

    class Interrupted(TorchStyle):
        def forward(self, *inputs: Any) -> Any:
            self.replicas = self.replicate(self.module, self.device_ids)
            self.thread = threading.Thread(target=self._work, args=[rows[:2] for rows in inputs])
            self.thread.start()
            begun.wait()
            raise KeyboardInterrupt

        def _work(self, *inputs: Any) -> None:
            with contextlib.suppress(ReplicaSyncError):
                self.replicas[0](*inputs)

    monkeypatch.setattr(Coordinator, "drain", drain_for_long)
    parallel = patch_replication_callback(Interrupted(scripted((0, "before", is_busy)), R))
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel(*batch())
        assert "0 failed with ReplicaSyncError" in repr(parallel.replicas[0]._compiled_call_impl.coordinator)
    finally:
        drains.set()
        parallel.thread.join()


class Interrupted(TorchStyle):
    """Is interrupted while replicas of several kinds run."""

    def forward(self, input: Tensor) -> Any:
        kinds = [self.replicate(self.module, self.device_ids) for _ in range(3)]
        return self.parallel_apply(kinds[1], [(input,)] * R, [{}] * R)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        raise KeyboardInterrupt


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Coordinator, float]]:
    """Whom an interrupted caller waits for, and for how many seconds, which pass at once."""
    found: list[tuple[Coordinator, float]] = []

    def drain(coordinator: Coordinator, seconds: float) -> None:
        found.append((coordinator, seconds))

    monkeypatch.setattr(Coordinator, "drain", drain)
    monkeypatch.setattr("sync_batchnorm.replicate.monotonic", lambda: sum(seconds for _, seconds in found))
    return found


def test_interrupted_caller_waits_for_one_second(waits):
    with pytest.raises(KeyboardInterrupt):
        patch_replication_callback(Interrupted(nn.Identity(), R))(torch.zeros(1))
    assert len({id(coordinator) for coordinator, _ in waits}) == 3
    assert [seconds for _, seconds in waits] == [1.0, 0.0, 0.0]


def test_interrupted_caller_of_kept_replicas_waits_for_one_second(waits):
    parallel = patch_replication_callback(Interrupted(nn.Identity(), R))
    replicas = parallel.replicate(parallel.module, parallel.device_ids)
    with pytest.raises(KeyboardInterrupt):
        parallel.parallel_apply(replicas, [(torch.zeros(1),)] * R, [{}] * R)
    assert [seconds for _, seconds in waits] == [1.0]


def test_copy_after_a_failure_is_independent_and_works(wrap):
    parallel = wrap(scripted((1, "between", raising(LookupError()))))
    with pytest.raises(LookupError):
        parallel(*batch())
    twin = copy.deepcopy(parallel)
    assert_next_forward_is_right(twin, (1, 0))
    assert_next_forward_is_right(parallel, (1, 0))
    assert type(twin) is type(parallel)
    assert twin.module.head.running_mean.data_ptr() != parallel.module.head.running_mean.data_ptr()


def test_pickle_after_a_failure_works(wrap):
    parallel = wrap(scripted(), timeout=7.0)
    parallel.module.steps = {(1, "between"): _leaves}
    with pytest.raises(ReplicaSyncError):
        parallel(*batch())
    twin = pickle.loads(pickle.dumps(parallel))
    assert type(twin) is type(parallel)
    assert twin._sync_timeout == 7.0
    assert_next_forward_is_right(twin, (1, 0))


def test_saved_wrapper_loads_and_trains_on_equally(wrap):
    parallel = wrap(scripted())
    parallel(*batch())
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    inputs = batch()
    assert_equal(twin(*inputs), parallel(*inputs), "output")
    for name, value in parallel.state_dict().items():
        assert_equal(twin.state_dict()[name], value, name)


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
