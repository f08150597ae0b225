"""Replicas run in the context of their caller, in threads of whose state nothing is shared, and may start others."""

import copy
import functools
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import ContextVar, copy_context
from typing import Any
from weakref import ref

import pytest
import torch
from conftest import INTERLEAVED, device_lists
from helpers import Net, Numbered, as_devices, assert_equal, assert_trains_as_one_device, in_threads
from scripted import WRAPPERS, R, Scripted, assert_next_forward_is_right, batch, scripted
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm1d,
    SyncMaster,
    patch_replication_callback,
)

variable: ContextVar[int] = ContextVar("variable", default=0)  # Every test runs in a thread, and context, of its own.


def noting(net: nn.Module, input: Tensor) -> Tensor:
    net.seen.append(variable.get())
    output = net.bn(input)
    net.seen.append(variable.get())
    variable.set(variable.get() + 1)
    net.seen.append(variable.get())
    return output


@pytest.mark.smoke
@pytest.mark.parametrize("way", WRAPPERS)
def test_replicas_see_the_variables_of_their_caller_and_set_their_own(way):
    variable.set(5)
    parallel = WRAPPERS[way](Net(noting, bn=SynchronizedBatchNorm1d(3), seen=[]))
    for _ in range(2):
        parallel(torch.randn(2 * R, 3))
    assert sorted(parallel.module.seen) == [5] * 4 * R + [6] * 2 * R
    assert variable.get() == 5


def test_variables_scale_what_replicas_compute_on_all_devices(devices):
    variable.set(5)
    net = Net(lambda net, x: net.bn(x) * variable.get(), bn=nn.BatchNorm1d(3))
    assert_trains_as_one_device(net, devices, 7, 3)


def test_single_chunk_runs_in_the_context_of_the_caller_itself():
    variable.set(5)
    parallel = DataParallelWithCallback(Net(noting, bn=nn.BatchNorm1d(3).eval(), seen=[]), ["cpu"] * 2)
    parallel(torch.randn(1, 3))
    assert variable.get() == 6


def test_replicas_of_a_wrapper_in_a_replica_see_its_variables():
    variable.set(5)
    inner = DataParallelWithCallback(Net(noting, bn=nn.BatchNorm1d(3).eval(), seen=[]), ["cpu"] * 2)

    def forward(net: nn.Module, input: Tensor) -> Tensor:
        variable.set(7)
        return net.bn(net.inner[0](input))

    parallel = DataParallelWithCallback(Net(forward, bn=SynchronizedBatchNorm1d(3), inner=[inner]), ["cpu"] * 2)
    parallel(torch.randn(8, 3))
    assert sorted(inner.module.seen) == [7] * 8 + [8] * 4
    assert variable.get() == 5


class Wrapper(nn.DataParallel):
    """A wrapper of the user's own, whose threads are those of torch."""


def where(net: nn.Module, input: Tensor) -> Tensor:
    made = torch.arange(3)
    net.seen.append((made.device, input.device))
    return net.bn(input) + made


@pytest.mark.cuda
@pytest.mark.parametrize("wrapper", [DataParallelWithCallback, Wrapper])
@pytest.mark.parametrize("way", ["set", "with"])
@pytest.mark.parametrize("devices", [it for it in [*device_lists(2), *INTERLEAVED] if it.values[0][0] != "cpu"])
def test_default_device_of_the_kind_of_the_replicas_is_that_of_each(devices, way, wrapper):
    if wrapper is Wrapper and len(set(devices)) < len(devices):
        pytest.skip("torch refuses replicas that share a device")
    model = Net(where, bn=SynchronizedBatchNorm1d(3), seen=[]).to(as_devices(devices)[0])
    parallel = wrapper(model, devices)
    if wrapper is Wrapper:
        patch_replication_callback(parallel)
    input = torch.randn(8, 3, device=as_devices(devices)[0])
    if way == "set":
        torch.set_default_device("cuda")
    try:
        with torch.device("cuda") if way == "with" else nullcontext():
            output = parallel(input)
    finally:
        torch.set_default_device(None)
    output.backward(torch.randn_like(output))
    assert sorted(str(given) for _, given in model.seen) == sorted(map(str, as_devices(devices)))
    assert all(made == given for made, given in model.seen)
    assert torch.empty(()).device.type == "cpu"


@pytest.mark.parametrize("way", WRAPPERS)
def test_another_default_device_is_that_of_the_caller(way):
    model = Net(lambda net, x: net.bn(x) + (torch.empty(3).device.type == "meta"), bn=SynchronizedBatchNorm1d(3))
    parallel, input = WRAPPERS[way](model), torch.randn(2 * R, 3)
    with torch.device("meta"):
        assert parallel(input).mean() > 0.9
    assert parallel(input).mean() < 0.1


@pytest.fixture
def _inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads start with a copy of the context of those that start them: the default of Python 3.14t."""
    start = threading.Thread.start

    def start_inheriting(thread: Any) -> None:
        context, run = copy_context(), thread.run
        thread.run = lambda: context.run(run)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_inheriting)


@pytest.mark.usefixtures("_inherits")
def test_thread_that_a_replica_has_started_is_in_no_replica(devices):
    other, data = SynchronizedBatchNorm1d(3), torch.randn(4, 3)

    def forward(net: nn.Module, input: Tensor) -> Tensor:
        made.append(ref(net))
        assert net.submit(other, data).result().shape == (4, 3)  # which would belong to no replica
        return net.bn(input)

    made: list[Any] = []
    device = as_devices(devices)[0]
    with ThreadPoolExecutor(2) as pool:
        model = Net(forward, bn=SynchronizedBatchNorm1d(3), submit=pool.submit).to(device)
        DataParallelWithCallback(model, devices)(data.to(device)).backward(data.to(device))
        assert pool.submit(other, data).result().shape == (4, 3)  # no layer of a replica
        gc.collect()
        assert [replica() for replica in made] == [None, None]  # though threads of the pool keep their contexts


def exchange(net: nn.Module, input: Tensor) -> Tensor:
    """Two threads of a replica exchange through a `SyncMaster` of their own."""
    master = SyncMaster(lambda messages: [(member, sum(one for _, one in messages)) for member, _ in messages])
    pipe, answers = master.register_slave(1), list[int]()
    in_threads(lambda: answers.append(master.run_master(1)), lambda: answers.append(pipe.run_slave(2)))
    assert answers == [3, 3]
    return net.bn(input)


@pytest.mark.usefixtures("_inherits")
def test_threads_of_a_replica_do_not_take_its_turns(devices):
    assert_trains_as_one_device(Net(exchange, bn=nn.BatchNorm1d(3)), devices, 4, 3)


def test_two_threads_of_a_replica_that_call_layers_at_once_are_told_what_to_do():
    def forward(net: Any, input: Tensor) -> Tensor:
        if net.number == 1:  # whose turn begins when a thread of replica 0 waits in the layer
            one_waits.set()
            assert other_called.wait(3.0)
            return net.bn(input)
        thread = threading.Thread(target=call_layer, args=(net, input), daemon=True)
        thread.start()
        assert one_waits.wait(3.0)
        try:
            return net.bn(input)
        finally:
            other_called.set()  # Before, replica 1 would end the call.
            thread.join()

    def call_layer(net: Any, input: Tensor) -> None:
        with suppress(RuntimeError):  # as it ends the thread, without a word to the caller
            net.bn(input)

    one_waits, other_called = threading.Event(), threading.Event()
    parallel = DataParallelWithCallback(Numbered(forward, bn=SynchronizedBatchNorm1d(3)), ["cpu"] * 2, timeout=5.0)
    text = "called bn in one thread while another one waits in bn, call 1; call synchronized layers in the thread"
    with pytest.raises(RuntimeError, match=text):
        parallel(torch.randn(4, 3))


def test_replica_that_is_given_no_input_is_named_at_once():
    parallel = WRAPPERS["wrapper"](scripted())
    replicas = parallel.replicate(parallel.module, ["cpu"] * R)
    parts = list(zip(*(inputs.chunk(R) for inputs in batch()), strict=True))
    text = r"to call stem\.0 the same number of times, but replica 2 on device cpu was given no input while"
    with pytest.raises(ReplicaSyncError, match=text):
        parallel.parallel_apply(replicas[:2], parts[:2], [{}] * 2)


def recursive(net, x: Tensor, depth: int = 2) -> Tensor:
    """Calls itself, as some models do at test time to average over a flipped input."""
    return net.bn(x + net(x, depth - 1)) if depth else net.bn(x)


def test_module_that_calls_itself_has_left_only_at_the_end(wrap):
    module = Net(recursive, bn=SynchronizedBatchNorm1d(4)).double()
    x, _ = batch()
    expected = copy.deepcopy(module)(x)
    assert_equal(wrap(module)(x), expected, "output")


def test_one_wrapper_in_several_user_threads_is_right(wrap):
    model = scripted()
    model.stem[0].track_running_stats = model.head.track_running_stats = False  # who comes last is up to the threads
    parallel, plain = wrap(model), copy.deepcopy(model)
    inputs = [batch() for _ in range(4)]

    def train(i: int) -> None:
        for _ in range(5):
            assert_equal(parallel(*inputs[i]), expected[i], f"output of thread {i}")

    expected = [plain(*pair).detach() for pair in inputs]
    in_threads(*[functools.partial(train, i) for i in range(4)])


def test_layer_in_a_thread_of_the_replica_meets_the_others():
    def in_a_thread(model: Scripted, x: Tensor) -> Tensor:
        (output,) = in_threads(lambda: model.head(model.stem(x) * 2))
        return output

    parallel = WRAPPERS["wrapper"](scripted(*[(i, "before", in_a_thread) for i in range(R)]))
    assert_next_forward_is_right(parallel, (0, 0))
    parallel.module.steps = {(i, "before"): in_a_thread for i in range(R)}
    x, replica = batch()
    expected = copy.deepcopy(parallel.module).stem[0](x).detach()
    assert_equal(parallel(x, replica), copy.deepcopy(parallel.module).head(expected * 2), "output")
