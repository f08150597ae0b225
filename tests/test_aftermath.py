"""After a failure nothing is left: no thread, no tensor, no state on wrapper or module; and Ctrl-C ends the program."""

from __future__ import annotations

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
from helpers import assert_equal
from scripted import WRAPPERS, R, Scripted, TorchStyle, assert_next_forward_is_right, batch, raising, scripted
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, ReplicaSyncError, SynchronizedBatchNorm1d

ROOT = Path(__file__).parents[1]


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
def test_two_hundred_failing_forwards_leave_nothing_behind():
    parallel = WRAPPERS["wrapper"](scripted())
    steps = list(FAILURES.values())
    _fail(parallel)
    gc.collect()
    before = threading.active_count(), _live_tensors(), len(os.listdir("/proc/self/fd")) if os.name == "posix" else 0
    for i in range(200):
        replica, place, step = steps[i % len(steps)]
        parallel.module.steps = {(replica, place): step}
        _fail(parallel)
    gc.collect()
    after = threading.active_count(), _live_tensors(), len(os.listdir("/proc/self/fd")) if os.name == "posix" else 0
    assert after == before


SIGINT_PROGRAM = """
import sys, threading
sys.path.insert(0, {tests!r})
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


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(
    ("name", "seconds"),
    [("wrapper", None), ("own-parallel_apply", 0.5), ("own-forward", 0.5)],
)
def test_control_c_while_replicas_wait_ends_the_program(name, seconds):
    """A replica stands still, for ever or, where its threads are the user's and keep the process, for a moment."""
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
        """Starts all replicas but the last, and fails before it has looked after them."""

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

    from sync_batchnorm import patch_replication_callback

    parallel = patch_replication_callback(GivesUp(scripted(), R))
    with pytest.raises(OSError, match="the caller"):
        parallel(*batch())
    for thread in parallel.threads:
        thread.join()
    assert len(released) == R - 1
    assert all("got OSError in its thread; this replica was only released" in str(error) for error in released)


def test_replicas_may_be_called_in_rounds_and_still_fail_at_once():
    parallel = WRAPPERS["wrapper"](scripted())
    replicas = parallel.replicate(parallel.module, ["cpu"] * R)
    x, replica = batch()
    parts = list(zip(x.chunk(R), replica.chunk(R), strict=True))
    for _ in range(20):
        parallel.parallel_apply(replicas, parts, [{}] * R)
    assert int(parallel.module.head.num_batches_tracked) == 20
    parallel.module.steps[1, "between"] = _leaves
    with pytest.raises(ReplicaSyncError, match="replica 1 on device cpu, which left its forward"):
        parallel.parallel_apply(replicas, parts, [{}] * R)


def test_replica_that_is_given_no_input_is_named_at_once():
    parallel = WRAPPERS["wrapper"](scripted())
    replicas = parallel.replicate(parallel.module, ["cpu"] * R)
    x, replica = batch()
    parts = list(zip(x.chunk(R), replica.chunk(R), strict=True))[:2]
    text = r"to call stem\.0 equally often, but got replica 2 on device cpu, which was given no input, while"
    with pytest.raises(ReplicaSyncError, match=text):
        parallel.parallel_apply(replicas[:2], parts, [{}] * 2)


class Recursive(nn.Module):
    """Calls itself, as some models do at test time to average over a flipped input."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.bn(x + self(x, depth - 1)) if depth else self.bn(x)


def test_module_that_calls_itself_has_left_only_at_the_end(wrap):
    module = Recursive().double()
    x, _ = batch()
    expected = copy.deepcopy(module)(x)
    assert_equal(wrap(module)(x), expected, "output")


@pytest.fixture(params=list(WRAPPERS))
def wrap(request: pytest.FixtureRequest) -> Any:
    """Every way to run replicas."""
    return WRAPPERS[request.param]


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
    assert twin.timeout == 7.0
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


def test_batches_of_any_size_in_turn_meet_with_the_replicas_that_there_are(wrap):
    parallel = wrap(scripted())
    for step in range(20):
        rows = [8, 3, 2, 6, 4][step % 5]
        inputs = torch.randn(rows, 4, dtype=torch.float64), torch.arange(rows)
        plain = copy.deepcopy(parallel.module)
        assert_equal(parallel(*inputs), plain(*inputs), f"output of step {step}")
        assert_equal(parallel.module.head.running_var, plain.head.running_var, f"running_var of step {step}")


def _in_threads(bodies: list[Any]) -> None:
    errors: list[BaseException] = []

    def run(body: Any) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_one_wrapper_in_several_user_threads_is_right(wrap):
    model = scripted()
    model.stem[0].track_running_stats = model.head.track_running_stats = False  # who comes last is up to the threads
    parallel, plain = wrap(model), copy.deepcopy(model)
    inputs = [batch() for _ in range(4)]

    def train(i: int) -> None:
        for _ in range(5):
            assert_equal(parallel(*inputs[i]), expected[i], f"output of thread {i}")

    expected = [plain(*pair).detach() for pair in inputs]
    _in_threads([lambda i=i: train(i) for i in range(4)])


def test_failure_in_one_user_thread_leaves_another_alone(wrap):
    good, bad = wrap(scripted()), wrap(scripted((2, "between", raising(LookupError("the cause")))))
    plain = copy.deepcopy(good.module)
    inputs = [batch() for _ in range(10)]
    failures = []

    def train() -> None:
        for pair in inputs:
            assert_equal(good(*pair), plain(*pair), "output")

    def fail() -> None:
        for _ in range(10):
            with pytest.raises(LookupError, match="the cause") as caught:
                bad(*batch())
            failures.append(caught.type)

    _in_threads([train, fail])
    assert failures == [LookupError] * 10


def test_one_module_in_two_wrappers_works_in_turn():
    model = scripted()
    plain = copy.deepcopy(model)
    wrappers = [DataParallelWithCallback(model, ["cpu"] * number) for number in (2, 4, 1)]
    for step in range(6):
        inputs = torch.randn(8, 4, dtype=torch.float64), torch.arange(8)
        assert_equal(wrappers[step % 3](*inputs), plain(*inputs), "output")
    assert int(model.head.num_batches_tracked) == 6


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(4)
        self.inner = inner

    def forward(self, x: Tensor, replica: Tensor) -> Tensor:
        return self.inner(self.bn(x), replica)


def test_wrapper_inside_of_a_wrapper_synchronizes_its_own_replicas():
    model = Outer(DataParallelWithCallback(scripted(), ["cpu"] * 2)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4, dtype=torch.float64)
    actual = DataParallelWithCallback(model, ["cpu"] * 2)(x, torch.arange(8))
    between = plain.bn(x)
    halves = [copy.deepcopy(plain.inner.module)(half, torch.arange(4)) for half in between.chunk(2)]
    assert_equal(actual, torch.cat(halves), "output")


def test_failure_inside_of_an_inner_wrapper_reaches_the_outermost_caller():
    inner = scripted((3, "between", raising(LookupError("the cause"))))
    model = Outer(DataParallelWithCallback(inner, ["cpu"] * 2)).double()
    with pytest.raises(LookupError, match=r"(?s)in replica 1 on device cpu.*in replica 1 on device cpu.*the cause"):
        DataParallelWithCallback(model, ["cpu"] * 2)(torch.randn(4, 4, dtype=torch.float64), torch.arange(4))


def test_layer_in_a_thread_of_the_replica_meets_the_others():
    def in_a_thread(model: Scripted, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        _in_threads([lambda: outputs.append(model.head(model.stem(x) * 2))])
        return outputs[0]

    parallel = WRAPPERS["wrapper"](scripted(*[(i, "before", in_a_thread) for i in range(R)]))
    assert_next_forward_is_right(parallel, (0, 0))
    parallel.module.steps = {(i, "before"): in_a_thread for i in range(R)}
    x, replica = batch()
    expected = copy.deepcopy(parallel.module).stem[0](x).detach()
    assert_equal(parallel(x, replica), copy.deepcopy(parallel.module).head(expected * 2), "output")
