"""All state belongs to one forward: several wrappers, threads, rounds, wrappers in wrappers, batches of any size."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from helpers import assert_equal
from scripted import WRAPPERS, R, Scripted, assert_next_forward_is_right, batch, raising, scripted
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm1d,
    SyncMaster,
)


@pytest.fixture(params=list(WRAPPERS))
def wrap(request: pytest.FixtureRequest) -> Any:
    """Every way to run replicas."""
    return WRAPPERS[request.param]


def _leaves(model: Scripted, x: Tensor) -> Tensor:
    return x


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


def test_wrapper_inside_of_a_wrapper_leaves_the_replicas_to_it():
    model = Outer(DataParallelWithCallback(scripted(), ["cpu"] * 2)).double()
    plain = Outer(copy.deepcopy(model.inner.module)).double()
    plain.bn.load_state_dict(model.bn.state_dict())
    inputs = torch.randn(8, 4, dtype=torch.float64), torch.arange(8)
    assert_equal(DataParallelWithCallback(model, ["cpu"] * 2)(*inputs), plain(*inputs), "output")
    assert int(model.inner.module.head.num_batches_tracked) == 1


def test_failure_inside_of_an_inner_wrapper_reaches_the_outermost_caller():
    inner = scripted((2, "between", raising(LookupError("the cause"))))
    model = Outer(DataParallelWithCallback(inner, ["cpu"] * 2)).double()
    with pytest.raises(LookupError, match=r"(?s)in replica 1 on device cpu.*the cause"):
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


class KeepsItsMaster(nn.Module):
    """Makes its `SyncMaster` once, as modules that were written for other libraries do, and averages its input."""

    def __init__(self) -> None:
        super().__init__()
        self.master = SyncMaster(_average)
        self.pipe: Any = None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.sync_master = self.master
        else:
            self.pipe = ctx.sync_master.register_slave(copy_id)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        if fails and self.pipe is not None:
            raise LookupError("the cause")
        mean = self.pipe.run_slave(x.mean()) if self.pipe is not None else self.master.run_master(x.mean())
        return x * 0 + mean


def _average(messages: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
    mean = torch.stack([message for _, message in messages]).mean()
    return [(identifier, mean) for identifier, _ in messages]


def test_master_that_a_module_keeps_serves_every_forward(wrap):
    parallel = wrap(KeepsItsMaster())
    for rows in (3, 2, 3, 6):
        x = torch.randn(rows, 2)
        chunks = x.chunk(R)
        expected = torch.stack([chunk.mean() for chunk in chunks]).mean().expand(rows, 2)
        assert_equal(parallel(x), expected, f"{rows} rows")
        with pytest.raises(LookupError, match="the cause"):
            parallel.parallel_apply(
                parallel.replicate(parallel.module, ["cpu"] * len(chunks)),
                [(c, True) for c in chunks],
                [{}] * len(chunks),
            )


def test_evaluation_with_more_replicas_than_training_leaves_nothing_behind(wrap):
    parallel = wrap(scripted())
    inputs = torch.randn(8, 4, dtype=torch.float64), torch.arange(8)
    for rows in (8, 2, 8):
        parallel.eval()
        assert_equal(parallel(*inputs), copy.deepcopy(parallel.module)(*inputs), "evaluation")
        parallel.train()
        few = inputs[0][:rows], inputs[1][:rows]
        plain = copy.deepcopy(parallel.module)
        assert_equal(parallel(*few), plain(*few), "training")
