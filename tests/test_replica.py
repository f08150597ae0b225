"""The root of a replica is an object of the user's class: what its forward may do with itself, and what torch does."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, assert_same_step, doubles, randomize, run_parts, twins
from scripted import WRAPPERS, R
from torch import Tensor, fx, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, convert_model
from sync_batchnorm.torch_private import refuse_other_calls

DEVICES = ["cpu"] * R


class Looking(nn.Module):
    """Has a function look at it in its forward, whose result replaces the output if there is one."""

    factor = 1.0

    def __init__(self, look: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.bn, self.look = nn.BatchNorm1d(3), look

    def forward(self, input: Tensor) -> Tensor:
        output = self.bn(input) * self.factor
        if self.look is None:
            return output
        other = self.look(self, input)
        return output if other is None else other


class OwnState(Looking):
    """Hands out its attributes as they are."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class TwoTuple(Looking):
    """Is made anew from its arguments."""

    def __reduce__(self) -> Any:
        return type(self), (None,)


CLASSES = [Looking, OwnState, TwoTuple]


def run(look: Callable[[Any, Tensor], Any], cls: type[Looking] = Looking) -> Tensor:
    """Call `look` in the forward of every replica; return their outputs."""
    parallel = DataParallelWithCallback(convert_model(cls(look).double()), DEVICES)
    with torch.no_grad():
        return parallel(doubles(2 * R, 3))


@pytest.mark.parametrize("name", WRAPPERS)
def test_replica_has_the_class_of_the_module(name):
    seen = []
    parallel = WRAPPERS[name](convert_model(Looking(lambda self, input: seen.append((type(self), self.__class__)))))
    parallel(torch.randn(2 * R, 3))
    assert seen == [(Looking, Looking)] * R


def test_forward_makes_another_module_of_its_class():
    def look(self: Looking, input: Tensor) -> Tensor:
        return self.__class__().double()(input)

    data = doubles(2 * R, 3)
    parallel = DataParallelWithCallback(convert_model(Looking(look).double()), DEVICES)
    expected = [nn.BatchNorm1d(3).double()(part) for part in data.chunk(R)]
    assert_equal(parallel(data), torch.cat(expected))


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled, saved])
def test_copy_that_is_made_in_a_forward_is_a_module_of_its_own(cls, copied):
    copies, data = [], doubles(4, 3)

    def look(self: Looking, input: Tensor) -> None:
        self.look = None  # which cannot be pickled
        copies.append(copied(self))

    run(look, cls)
    assert len(copies) == R
    for twin in copies:
        assert type(twin) is cls
        twin.double().eval().factor = 2.0
        assert_equal(twin(data), 2 * twin.bn(data))


def clone_by_hand(module: nn.Module) -> nn.Module:
    twin = type(module).__new__(type(module))
    twin.__dict__ = module.__dict__.copy()
    return twin


@pytest.mark.parametrize("cls", [Looking, OwnState])
@pytest.mark.parametrize("copied", [copy.copy, clone_by_hand, nn.Module._replicate_for_data_parallel])
def test_shallow_copy_that_is_called_in_a_forward_runs_itself(cls, copied):
    def look(self: Looking, input: Tensor) -> Tensor:
        twin = copied(self)
        twin.look, twin.factor = None, 2.0
        return twin(input)

    plain = cls(look).double()
    parallel = DataParallelWithCallback(convert_model(cls(look).double()), DEVICES)
    assert_same_step(plain, parallel, doubles(2 * R, 3))


@pytest.mark.parametrize("copied", [copy.copy, clone_by_hand])
def test_shallow_copy_of_a_layer_is_the_layer_of_its_replica(copied):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(3)

        def forward(self, input):
            return copied(self.bn)(self.bn(input).tanh())

    assert_same_step(*twins(Net().double(), DEVICES), doubles(2 * R, 3))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("replica", range(2))
def test_deep_copy_of_a_layer_is_no_part_of_a_replica(copied, replica):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = SynchronizedBatchNorm1d(3)

        def forward(self, input, number):
            return copied(self.bn)(input) if int(number[0]) == replica else input

    with torch.no_grad(), pytest.raises(RuntimeError, match="that is registered in the wrapped module, but got a Sync"):
        DataParallelWithCallback(Net(), ["cpu"] * 2)(torch.randn(6, 3), torch.arange(2).repeat_interleave(3))


def test_pickle_of_a_replica_does_not_hold_its_exchange():
    pickles: list[bytes] = []

    def look(self: nn.Module, input: Tensor) -> None:
        look, self.look = self.look, None  # a function of a test has no pickle
        pickles.append(pickle.dumps(self))
        self.look = look

    with torch.no_grad():
        run(look)
    for name in (b"Pipe", b"Watch"):
        assert not any(name in pickled for pickled in pickles)


def test_replicas_end_without_a_garbage_collection():
    replicas: list[Any] = []
    gc.disable()
    try:
        run(lambda self, input: replicas.append(weakref.ref(self)))
        assert [replica() for replica in replicas] == [None] * R
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.watchdog(120)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler
def test_root_that_calls_itself_in_a_compiled_function_runs():
    def look(self: Looking, input: Tensor) -> Tensor:
        twin = copy.copy(self)
        self.look = twin.look = None
        twin.factor = 2.0
        return compiled(lambda x: self(x) - 3 * twin(x), input)

    def apply(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        return function(input * 2)

    compiled = torch.compile(apply, backend="eager")
    plain = Looking(look).double()
    parallel = DataParallelWithCallback(convert_model(Looking(look).double()), DEVICES)
    assert_same_step(plain, parallel, doubles(2 * R, 3))


class OwnCall(Looking):
    """Has a `__call__` of its own, which goes past that of torch."""

    def __call__(self, input: Tensor) -> Tensor:
        return self.forward(input)


class Converting(Looking):
    """Has a `__call__` around that of torch."""

    def __call__(self, input: Tensor) -> Tensor:
        if self.look is not None:
            self.look(self, input)
        return nn.Module.__call__(self, input * 2) * 3


@pytest.mark.parametrize("cls", [OwnCall, Converting])
@pytest.mark.parametrize("name", WRAPPERS)
def test_root_with_a_call_of_its_own_is_called_by_it(name, cls):
    plain = randomize(cls().double())
    parallel = WRAPPERS[name](convert_model(copy.deepcopy(plain)))
    data = doubles(2 * R, 3)
    assert_equal(parallel(data), plain(data))
    with torch.no_grad():
        assert not parallel(data).requires_grad


@pytest.mark.parametrize("cls", [OwnCall, Converting])
@pytest.mark.parametrize("name", WRAPPERS)
def test_failure_in_a_call_of_its_own_reaches_the_caller_at_once(name, cls):
    def look(self: Looking, input: Tensor) -> None:
        if input[0, 0] > 0:
            raise LookupError("the cause")

    parallel = WRAPPERS[name](convert_model(cls(look).double()))
    data = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64).view(-1, 1) * doubles(6, 3).abs()
    with pytest.raises(LookupError, match="the cause"):
        parallel(data)


class Returning(nn.Module):
    """Returns the output of a recurrent net, without its state."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.rnn = nn.BatchNorm1d(3), nn.GRU(3, 2, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.rnn(self.bn(input.transpose(1, 2)).transpose(1, 2))[0]


def test_recurrent_net_runs_as_a_root_and_in_one():
    rnn = nn.GRU(3, 2, batch_first=True).double()
    data = doubles(2 * R, 4, 3)
    parallel = DataParallelWithCallback(rnn, DEVICES)
    assert_equal(torch.cat([output for output, _ in run_parts(parallel, data.chunk(R))]), rnn(data)[0])
    assert_same_step(*twins(Returning().double(), DEVICES), data)


def test_traced_graph_runs_as_a_root():
    plain = randomize(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double())
    root = convert_model(fx.symbolic_trace(copy.deepcopy(plain)))
    assert type(root).__call__ is not nn.Module.__call__
    assert_same_step(plain, DataParallelWithCallback(root, DEVICES), doubles(2 * R, 3))


def test_compiled_root_runs_in_replicas():
    plain = randomize(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double())
    root = convert_model(copy.deepcopy(plain))
    root.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"but got \['the module itself'\] compiled by Module.compile\(\)"):
        assert_same_step(plain, DataParallelWithCallback(root, DEVICES), doubles(2 * R, 3))
    assert root._compiled_call_impl is not None


def test_torch_that_calls_its_modules_otherwise_is_refused(monkeypatch):
    parallel = DataParallelWithCallback(nn.Identity(), DEVICES)
    monkeypatch.setattr(nn.Module, "__call__", nn.Module._call_impl)
    monkeypatch.setattr("sync_batchnorm.replicate.refuse_other_calls", refuse_other_calls.__wrapped__)
    with pytest.raises(RuntimeError, match=r"expected modules that call .*, but got those of torch \d"):
        parallel(torch.randn(2 * R, 3))
