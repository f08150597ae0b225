"""A replica is an object of the user's class, whatever that does: calls, attributes, copies of its own, modes."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, assert_equal, assert_same_step, doubles, randomize, twins
from scripted import WRAPPERS, R
from torch import Tensor, fx, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, convert_model

DEVICES = ["cpu"] * R


def looking(look: Callable[[Any, Tensor], Any]) -> Net:
    """Return a model that has a function look at it, and at its input, after its layer."""
    return Net(lambda net, input: (net.bn(input), look(net, input))[0], bn=SynchronizedBatchNorm1d(3))


@pytest.mark.parametrize("name", WRAPPERS)
def test_replica_has_the_class_of_the_module(name):
    seen = []
    parallel = WRAPPERS[name](looking(lambda net, input: seen.append((type(net), net.__class__))))
    parallel(torch.randn(2 * R, 3))
    assert seen == [(Net, Net)] * R


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("replica", range(2))
def test_copy_of_a_layer_that_is_made_in_a_forward_is_refused(copied, replica):
    def copies_its_layer(net, input, number):
        return copied(net.bn)(input) if int(number[0]) == replica else input

    parallel = DataParallelWithCallback(Net(copies_its_layer, bn=SynchronizedBatchNorm1d(3)), ["cpu"] * 2)
    message = r"called Sync\w+, which belongs to no replica|replica 1 on device cpu waits"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        parallel(torch.randn(6, 3), torch.arange(2).repeat_interleave(3))


def test_replicas_end_without_a_garbage_collection():
    replicas: list[Any] = []
    parallel = DataParallelWithCallback(looking(lambda net, input: replicas.append(weakref.ref(net))), DEVICES)
    gc.disable()
    try:
        parallel(torch.randn(2 * R, 3)).backward(torch.randn(2 * R, 3))
        assert [replica() for replica in replicas] == [None] * R
    finally:
        gc.enable()


class OwnCall(Net):
    def __call__(self, input: Tensor) -> Tensor:
        return self.forward(input)


class Converting(Net):
    def __call__(self, input: Tensor) -> Tensor:
        return nn.Module.__call__(self, input * 2) * 3


@pytest.mark.parametrize("cls", [OwnCall, Converting])
@pytest.mark.parametrize("name", WRAPPERS)
def test_root_with_a_call_of_its_own_is_called_by_it(name, cls):
    plain = randomize(cls(lambda net, input: net.bn(input), bn=nn.BatchNorm1d(3)).double())
    parallel = WRAPPERS[name](convert_model(copy.deepcopy(plain)))
    data = doubles(2 * R, 3)
    assert_equal(parallel(data), plain(data))
    with torch.no_grad():
        assert not parallel(data).requires_grad


class Names(nn.Module):
    """Has attributes with the names of what a wrapper may have of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.replica, self.module = nn.Linear(3, 3), nn.Linear(3, 3)
        self.original = nn.BatchNorm1d(3)
        self.modes = nn.Parameter(torch.randn(3))
        self.register_buffer("coordinator", torch.randn(3))
        self.replica_id = 5

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.original(self.module(self.replica(input)) * self.modes + self.coordinator)
        return hidden * self.replica_id


def test_model_may_have_attributes_of_any_name():
    plain, parallel = twins(Names().double(), DEVICES)
    assert_same_step(plain, parallel, doubles(7, 3))
    names = ("replica", "module", "original", "modes", "coordinator", "replica_id", "forward")
    replica = parallel.replicate(parallel.module, parallel.device_ids)[1]
    found = {name: type(getattr(replica, name)) for name in names}
    expected = {name: type(getattr(parallel.module, name)) for name in names}
    assert found == expected | {"modes": Tensor}  # no parameter, as in torch
    assert list(map(type, replica.modules())) == list(map(type, parallel.module.modules()))


def scaling():
    return Net(lambda net, input: net.bn(input) * net.factor, bn=nn.BatchNorm1d(3), factor=1.0)


def test_replicas_may_be_made_and_run_by_hand():
    plain, parallel = twins(scaling().double(), DEVICES)
    data = doubles(7, 3)
    replicas = parallel.replicate(parallel.module, parallel.device_ids)
    for i, replica in enumerate(replicas):
        replica.factor = i + 2.0
    outputs = parallel.parallel_apply(replicas[::-1], list(data.chunk(R))[::-1], [{}] * R)[::-1]
    expected = [chunk * (i + 2.0) for i, chunk in enumerate(plain(data).chunk(R))]
    assert_equal(torch.cat(outputs), torch.cat(expected))
    assert parallel.module.factor == 1.0


@pytest.mark.parametrize("where", ["after a forward pass", "in a replica"])
def test_replicas_of_the_users_are_not_taken_for_those_of_an_earlier_forward_pass(where):
    def calls_replicas(net, input):
        twice = parallel.parallel_apply([nn.Softsign(), nn.Softsign()], [(input,)] * 2, [{}] * 2)
        return torch.stack(twice).sum(0)

    parallel = DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)
    input = torch.randn(4, 3)
    if where == "in a replica":
        outputs = DataParallelWithCallback(Net(calls_replicas), ["cpu"] * 2)(input)
    else:
        replicas = parallel.replicate(parallel.module, parallel.device_ids)
        parallel.parallel_apply(replicas, [(input,)] * 2, [{}] * 2)
        outputs = calls_replicas(None, input)
    assert_equal(outputs, 2 * nn.functional.softsign(input))


def test_traced_graph_runs_as_a_root():
    plain = randomize(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double())
    root = convert_model(fx.symbolic_trace(copy.deepcopy(plain)))
    assert type(root).__call__ is not nn.Module.__call__
    assert_same_step(plain, DataParallelWithCallback(root, DEVICES), doubles(2 * R, 3))


MODES = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
    "without-cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


def observer():
    def observe(net, input):
        net.seen.append(modes())
        return input * net.weight

    return Net(observe, weight=nn.Parameter(torch.ones(1)), seen=[])


def modes():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled(),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["wrapper", "own-forward"])
def test_replicas_run_in_the_modes_of_the_caller(mode, name):
    parallel = WRAPPERS[name](observer())
    with MODES[mode]():
        parallel(torch.randn(2 * R, 2))
        assert parallel.module.seen == [modes()] * R
    assert modes()[:2] == (True, False)


@pytest.mark.parametrize("name", WRAPPERS)
def test_end_of_an_iterator_in_a_replica_is_an_error_of_the_caller_and_ends_no_loop_of_it(name):
    def look(net: nn.Module, input: Tensor) -> None:
        if input.max() > 10:
            next(iter([]))

    parallel = WRAPPERS[name](looking(look))
    batches = [torch.randn(2 * R, 3), torch.cat([torch.randn(2 * R - 1, 3), torch.full((1, 3), 11.0)])]
    with pytest.raises(RuntimeError, match=rf"^replica {R - 1} on device cpu raised StopIteration") as caught:
        list(map(parallel, batches))
    assert isinstance(caught.value.__cause__, StopIteration)
    assert parallel(batches[0]).shape == (2 * R, 3)
