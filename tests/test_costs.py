"""What a layer costs, counted: bytes that it saves and allocates, meetings, and the tensors that replicas exchange."""

import pytest
import torch
from conftest import KERNELS
from helpers import saved_bytes, twins
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sync_batchnorm import batchnorm
from sync_batchnorm.messages import merge_messages
from sync_batchnorm.roster import Roster

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
on_every_kernel = pytest.mark.parametrize("kernel", list(KERNELS), indirect=True)
SHAPES = [(4, 8, 4, 4), (8, 512, 7, 7), (4, 64, 28, 28)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_every_kernel
@pytest.mark.usefixtures("kernel")
def test_layer_saves_no_more_bytes_than_that_of_torch(shape, kind):
    plain, parallel = twins(nn.BatchNorm2d(shape[1]), ["cpu"] * 2)
    data = torch.randn(shape).contiguous(memory_format=FORMATS[kind]).requires_grad_()
    expected = saved_bytes(torch.cat([plain(part) for part in data.chunk(2)]))
    input = data.numel() * data.element_size()
    assert input <= saved_bytes(parallel(data)) <= expected


class Allocations(TorchDispatchMode):
    """Notes the memory of the size of `input`, or more, that operators take; holds it, so that none is taken twice."""

    def __init__(self, input):
        super().__init__()
        self.input, self.taken = input, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.input.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self.taken[storage.data_ptr()] = (func, storage)
        return result


class Allocating(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(8)
        self.counts = []

    def forward(self, input):
        with Allocations(input) as allocations:
            output = self.bn(input)
        self.counts.append(len(allocations.taken))
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "general"], indirect=True)
def test_large_inputs_take_no_memory_but_that_of_the_output(kind, dtype, kernel):
    _, parallel = twins(Allocating(), ["cpu"] * 2)
    size = 24 if kernel == "float64" else 150
    data = torch.randn(4, 8, size, size, dtype=dtype).contiguous(memory_format=FORMATS[kind]).requires_grad_()
    output = parallel(data)
    copy = 1 if kernel == "float64" else 0
    assert parallel.module.counts == [1 + copy, 1 + copy]
    output.backward(torch.randn_like(output))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("kernel", ["joined-float64", "joined"], indirect=True)
@pytest.mark.usefixtures("kernel")
def test_master_takes_memory_for_the_joined_batch_and_the_output(kind):
    _, parallel = twins(Allocating(), ["cpu"] * 2)
    parallel(torch.randn(4, 8, 70, 70).contiguous(memory_format=FORMATS[kind]))
    assert sorted(parallel.module.counts) == [0, 2]


class TwoCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, input):
        return self.second(self.first(input))


@pytest.mark.parametrize("replicas", [2, 3])
@on_every_kernel
@pytest.mark.usefixtures("kernel")
def test_each_call_of_a_layer_is_one_meeting(replicas, monkeypatch):
    _, parallel = twins(TwoCalls(), ["cpu"] * replicas)
    meet, met = Roster.meet, []

    def note_and_meet(roster, circle, *args):
        met.append(circle.name)
        return meet(roster, circle, *args)

    monkeypatch.setattr(Roster, "meet", note_and_meet)
    output = parallel(torch.randn(6, 4, 5, 5, requires_grad=True))
    output.backward(torch.randn_like(output))
    assert sorted(met) == ["first"] * replicas + ["second"] * replicas


@pytest.mark.parametrize("replicas", [2, 3])
@on_every_kernel
def test_replicas_exchange_one_pair_of_vectors_each_way(replicas, kernel, monkeypatch):
    exchanged = []

    def note_and_merge(messages):
        answers = merge_messages(messages)
        exchanged.append(([message for _, message in messages], [answer for _, answer in answers]))
        return answers

    monkeypatch.setattr(batchnorm, "merge_messages", note_and_merge)
    _, parallel = twins(nn.BatchNorm2d(4), ["cpu"] * replicas)
    parallel(torch.randn(6, 4, 5, 5, requires_grad=True))
    ((sent, received),) = exchanged
    if kernel in ("joined-float64", "joined"):
        assert all(isinstance(message, Whole) for message in sent)
        return
    for message in sent:
        own = {id(message.weight), id(message.bias)}
        vectors = [t for t in message if isinstance(t, torch.Tensor) and id(t) not in own]
        assert len({t.untyped_storage().data_ptr() for t in vectors}) == 1
        assert vectors[0].shape == (2, 4)
    assert len({id(answer) for answer in received}) == 1  # shared by all replicas of the device
    merged = received[0]
    across = {merged.normalizer.untyped_storage().data_ptr(), merged.constant.untyped_storage().data_ptr()}
    assert len(across | {merged.carrier.untyped_storage().data_ptr()}) == 1
    assert merged.normalizer.shape == (2, 4)
