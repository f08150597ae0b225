"""The callback protocol, the wrapper and the patched wrapper: what a `DataParallel` user relies on."""

import copy
import pickle
import re
import threading
from collections import Counter

import pytest
import torch
from conftest import slow
from helpers import Net, as_devices, assert_same_step, doubles, twins
from scripted import TorchStyle, of_class
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    convert_model,
    execute_replication_callbacks,
    patch_replication_callback,
)


class Registering(nn.Identity):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __data_parallel_replicate__(self, ctx, copy_id):
        ctx.latest = copy_id
        self.calls.append((id(ctx), ctx.latest, self))


@pytest.mark.smoke
def test_callbacks_run_on_every_copy_and_share_a_context_with_their_copies(devs):
    calls = []
    net = nn.Sequential(Registering(calls), nn.Linear(3, 3), nn.ModuleDict({"inner": Registering(calls)})["inner"])
    net.append(net[0])  # under another name
    parallel = DataParallelWithCallback(net.to(as_devices(devs)[0]), devs)
    for _ in range(2):
        calls.clear()
        parallel(torch.randn(8, 3, device=as_devices(devs)[0]))
        copies = len(devs) if len(devs) > 1 else 0
        assert [copy_id for _, copy_id, _ in calls] == [i for i in range(copies) for _ in range(2)]
        assert list(Counter(ctx for ctx, _, _ in calls).values()) == ([copies, copies] if copies else [])
        assert len({module for _, _, module in calls}) == 2 * copies


class Balanced(TorchStyle):
    """Gives the first device fewer rows, with the signatures that several projects have for this."""

    def forward(self, input):
        rows = input.split([1, *[(len(input) - 1) // (len(self.device_ids) - 1)] * (len(self.device_ids) - 1)])
        replicas = self.replicate(self.module, self.device_ids)
        outputs = self.parallel_apply(replicas, self.device_ids, [(part,) for part in rows], [{}] * len(rows))
        return torch.cat(outputs)

    def parallel_apply(self, replicas, device_ids, inputs, kwargs):
        assert len(device_ids) == len(replicas)
        return super().parallel_apply(replicas, inputs, kwargs)


class Replicating(TorchStyle):
    """A wrapper whose `replicate` takes an argument of its own."""

    def forward(self, input):
        replicas = self.replicate(self.module, self.device_ids, False, note="mine")
        return torch.cat(self.parallel_apply(replicas, [(rows,) for rows in input.chunk(2)], [{}] * 2))

    def replicate(self, module, device_ids, detach, note=""):
        assert (detach, note) == (False, "mine")
        return super().replicate(module, device_ids)


CALLED = {  # what a `parallel_apply` hands on in place of the replicas
    "modules": lambda calls: calls,
    "functions": lambda calls: [call.forward for call in calls],
    "a function for the last": lambda calls: [*[call.replica for call in calls[:-1]], calls[-1].forward],
}


class Wrapping:
    called, step = staticmethod(CALLED["modules"]), staticmethod(lambda replica, number, input: replica(input))

    def parallel_apply(self, replicas, inputs, kwargs):
        calls = [
            Net(lambda net, input: self.step(net.replica, net.number, input), replica=replica, number=i)
            for i, replica in enumerate(replicas)
        ]
        return super().parallel_apply(self.called(calls), inputs, kwargs)


class WrappingSubclass(Wrapping, DataParallelWithCallback):
    pass


class WrappingForward(WrappingSubclass):
    """Passes None for the keyword arguments, as the function of torch takes it."""

    def forward(self, input):
        inputs, _ = self.scatter((input,), {}, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)


class WrappingPatched(Wrapping, nn.DataParallel):
    pass


every_wrapping = pytest.mark.parametrize("cls", [WrappingSubclass, WrappingForward, WrappingPatched])
every_call = pytest.mark.parametrize("called", CALLED)


def wrapping(cls, module, devices, called):
    parallel = patch_replication_callback(of_class(cls, module, devices))
    parallel.called = CALLED[called]
    return parallel


@every_wrapping
@every_call
def test_parallel_apply_may_call_replicas_in_modules_and_functions_of_its_own(cls, called, devices):
    plain, ours = twins(nn.BatchNorm1d(3).double(), devices)
    parallel = wrapping(cls, ours.module, devices, called)
    for rows in (7, 1):
        assert_same_step(plain, parallel, doubles(rows, 3, 2, devices=devices))


@every_wrapping
@every_call
def test_replicas_that_are_called_by_modules_and_functions_take_turns(cls, called):
    net = convert_model(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    running, outputs = [], []

    def step(replica, number, input):
        running.append(number)
        output = replica(input)
        running.append(number)
        return output

    for parallel in (DataParallelWithCallback(net, ["cpu"] * 3), wrapping(cls, net, ["cpu"] * 3, called)):
        parallel.step = step
        torch.manual_seed(0)
        outputs.append(parallel(torch.ones(9, 3)))
    assert torch.equal(*outputs)
    assert running == ([2, 2] if "last" in called else [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("place", ["before", "instead", *slow("after")])
@every_wrapping
@every_call
def test_failures_of_what_calls_a_replica_name_it_and_release_the_others(cls, called, place, devices):
    def step(replica, number, input):
        if number == 1 and place == "before":
            raise ArithmeticError
        output = input if number == 1 and place == "instead" else replica(input)
        if number == 1 and place == "after":
            raise ArithmeticError
        return output

    parallel = wrapping(cls, twins(nn.BatchNorm1d(3).double(), devices)[1].module, devices, called)
    parallel.step = step
    left = r"replica 1 on device \S+ left its forward while replica 0 on device \S+ waits"
    error, text = (ReplicaSyncError, left) if place == "instead" else (ArithmeticError, "in replica 1 on device")
    with pytest.raises(error) as caught:
        parallel(doubles(6, 3, devices=devices))
    assert re.search(text, f"{caught.value} {caught.value.__notes__[0]}")
    del parallel.step
    assert parallel(doubles(6, 3, devices=devices)).shape == (6, 3)


class Reducing(TorchStyle):
    def __reduce__(self):
        return type(self), (self.module, 2)


class Copying(TorchStyle):
    def __deepcopy__(self, memo):
        return Copying(copy.deepcopy(self.module, memo), 2)


COPIES = {
    "itself": lambda parallel: parallel,
    "copy": copy.deepcopy,
    "shallow copy": copy.copy,
    "pickle": lambda parallel: pickle.loads(pickle.dumps(parallel)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("cls", [Balanced, Replicating, Reducing, Copying])
def test_patched_wrapper_and_its_copies_synchronize_whatever_the_class_defines(cls, how):
    plain, ours = twins(nn.BatchNorm1d(3).double(), ["cpu"] * 2)
    parallel = COPIES[how](patch_replication_callback(cls(ours.module, 2)))
    assert isinstance(parallel, cls)
    assert_same_step(plain, parallel, doubles(6, 3))


@pytest.mark.parametrize("make", [DataParallelWithCallback, lambda net, devices: TorchStyle(net, len(devices))])
def test_object_is_patched_once_and_takes_options_that_are_given(make):
    event, x = threading.Event(), torch.arange(4.0).view(4, 1)
    net = Net(lambda net, x: (x[0, 0] or event.wait(0.3), net.bn(x))[1], bn=convert_model(nn.BatchNorm1d(1)))
    parallel = patch_replication_callback(make(net, ["cpu"] * 2), timeout=0.1)
    cls = type(parallel)
    assert type(patch_replication_callback(parallel)) is cls
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        patch_replication_callback(parallel, timeout="8")
    with pytest.raises(ReplicaSyncError, match=r"within 0\.1 seconds"):
        parallel(x)
    patch_replication_callback(parallel, timeout=5)
    parallel(x)
    for options in ({"in_dims": {"args": 0}}, {"timeout": 5}):
        assert "in_dims={'args': 0}" in repr(patch_replication_callback(parallel, **options))


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_timeouts_that_are_no_numbers_or_out_of_range_are_refused(timeout):
    is_number = type(timeout) in (int, float)
    text = f"timeout must be {'more than 0 and' if is_number else 'a number of seconds'}"
    for wrap in (DataParallelWithCallback, lambda net, **kw: patch_replication_callback(nn.DataParallel(net), **kw)):
        with pytest.raises(ValueError if is_number else TypeError, match=text):
            wrap(nn.Linear(2, 2), timeout=timeout)


NO_LIST = "expected a list with the replicas of one module, but got"
NO_REPLICAS = {
    "empty": ([], ValueError, r"expected the replicas of a module, but got an empty list; pass what replicate\(\)"),
    "none": (None, TypeError, rf"{NO_LIST} NoneType; pass what replicate\(\)"),
    "module": (nn.Sequential(nn.Identity()), TypeError, f"{NO_LIST} Sequential"),
    "number": ([nn.Identity(), 1], TypeError, f"{NO_LIST} a list with int"),
}


@pytest.mark.parametrize(("modules", "kind", "text"), NO_REPLICAS.values(), ids=NO_REPLICAS)
def test_callbacks_of_what_are_no_replicas_are_refused(modules, kind, text):
    with pytest.raises(kind, match=f"^{text}"):
        execute_replication_callbacks(modules)


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_callbacks_run_on_replicas_in_any_list(kind):
    calls = []
    execute_replication_callbacks(kind([Registering(calls), Registering(calls)]))
    assert [copy_id for _, copy_id, _ in calls] == [0, 1]
