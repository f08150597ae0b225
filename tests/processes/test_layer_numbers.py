"""Processes call the same layers in the same order, whichever objects these are; otherwise, they are told."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import worlds
from helpers import randomize
from torch import nn
from worlds import GATHER, WITHOUT_NAME, Collectives, assert_same_step, conv_net, each_process, images, residual, twins

from sync_batchnorm import SynchronizedBatchNorm2d, convert_model


def named_layers(device: str = "cpu") -> list[nn.Module]:
    models = [nn.Sequential(OrderedDict([(name, nn.BatchNorm2d(3, device=device))])) for name in ("stem", "head")]
    return [convert_model(model)[0] for model in models]


def assert_all_are_told(layers: Sequence[nn.Module], names: Sequence[str]) -> list[str]:
    """Call a layer in each rank, the last one also in those after it; return the numbers that all tell."""
    own = dist.get_rank()
    called, name = layers[min(own, len(layers) - 1)], names[min(own, len(names) - 1)]
    before = copy.deepcopy(called.state_dict())
    each = [rf"{name if i == own else 'a layer'} \((.*?)\) in rank {i}" for i in range(dist.get_world_size())]
    text = f"expected all processes to call the same synchronized batch norm, but got {', '.join(each)}; make every"
    with Collectives() as collectives, pytest.raises(RuntimeError, match=text) as caught:
        called(torch.randn(2, called.num_features, 4, 4))
    assert collectives.found == [GATHER]
    assert all(torch.equal(value, before[name]) for name, value in called.state_dict().items())
    return list(re.search(text, str(caught.value)).groups())


@each_process(2, 3)
def test_processes_that_call_different_layers_after_a_right_call_are_told_which(rank):
    loaded, copied = named_layers(), named_layers()
    if rank == 0:  # which has copies as well, such as an average that it evaluates
        [layer.eval()(torch.ones(2, 3, 4, 4)) for layer in copy.deepcopy(copied)]
    for layers, names in (
        (loaded if rank != 1 else pickle.loads(pickle.dumps(loaded)), ["stem", "head"]),
        (copied, ["stem", "head"]),
        (convert_model(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))), ["0", "1"]),
        ([layer := SynchronizedBatchNorm2d(3), copy.deepcopy(layer)], [WITHOUT_NAME] * 2),
    ):
        for layer in layers:
            layer(torch.randn(2, 3, 4, 4))
        one, other, *_ = [int(told.removeprefix("number ")) for told in assert_all_are_told(layers, names)]
        assert other == one + 1
        for layer in layers:
            layer.reset_running_stats()
            assert_same_step(nn.BatchNorm2d(3).double(), layer.double(), images())


@each_process(2, 3)
def test_a_process_is_told_the_name_of_its_own_layer_only(rank, size):
    name = "head" if rank == 1 else "stem"
    first, second, third = named_layers()[rank == 1], *(SynchronizedBatchNorm2d(3) for _ in range(2))
    for layer in (first, second):  # No process notices that rank 1 begins with another layer.
        layer(torch.randn(2, 3, 4, 4))
    one, other, *rest = assert_all_are_told([second, first, third], [WITHOUT_NAME, name, WITHOUT_NAME])
    assert (int(one[7:]), rest) == (int(other[7:]) + 1, ["not yet numbered"] * (size - 2))


@each_process(2, 3, "gpus")
def test_one_process_goes_on_with_another_object(rank, size):
    for make in (
        copy.deepcopy,
        lambda model: torch.optim.swa_utils.AveragedModel(model, use_buffers=True).module,
        lambda model: pickle.loads(pickle.dumps(model)),
    ):
        plain, model = twins(residual())
        first = model
        for one in [*range(size)] * 2:  # each in turn goes on with another one, then with the first one again
            assert_same_step(plain, model, images())
            if one == rank:
                first.load_state_dict(model.state_dict())
                model = make(model) if model is first else first
        assert_same_step(plain, model, images())


def first_in_eval(*nets: nn.Module) -> nn.Module:
    """Return the first of some nets, after each process has evaluated all, in an order of its own."""
    for net in nets[:: 1 if dist.get_rank() else -1]:
        net.eval()(images())
    return nets[0].train()


@each_process(2, 3, "gpus")
def test_processes_that_make_their_layers_in_ways_of_their_own_equal_one_process(rank, size):
    for make in (
        lambda net: [convert_model(copy.deepcopy(net)) for _ in range(size)][rank],
        lambda net: convert_model(nn.ModuleList([net, copy.deepcopy(net).eval()][: 1 + rank]))[0],
        lambda net: convert_model(nn.ModuleDict({str(i): copy.deepcopy(net) for i in range(size)}))[str(rank)],
        lambda net: first_in_eval(*[convert_model(copy.deepcopy(net)) for _ in range(2)]),
    ):
        plain = randomize(conv_net()).to(worlds.DEVICE, torch.float64)
        model = make(copy.deepcopy(plain))
        for step in range(4):
            if step == rank + 1:
                copy.deepcopy(model)  # in the middle of a training, and at another step in each process
            assert_same_step(plain, model, images())


@each_process(2, 3)
def test_a_new_group_has_numbers_of_its_own():
    layers = named_layers()
    for order, names in ((layers, ["stem", "head"]), (layers[::-1], ["head", "stem"])):
        group = dist.new_group()
        for layer in order:
            layer.process_group = group
            layer(torch.randn(2, 3, 4, 4))
        assert assert_all_are_told(order, names)[:2] == ["number 1", "number 2"]
        dist.destroy_process_group(group)


@each_process(2, 3)
def test_a_layer_that_is_gone_in_some_processes_keeps_its_number(rank):
    first, input = SynchronizedBatchNorm2d(3), torch.randn(2, 3, 4, 4, requires_grad=True)
    output, gone = first(input), weakref.ref(first)
    kept = first if rank else None
    del first
    gc.collect()
    assert gone() is kept  # the graph keeps no layer alive
    output.sum().backward()
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    for _ in range(2):  # Processes have agreed on numbers, although they have others free.
        for layer in layers:
            layer.reset_running_stats()
            assert_same_step(nn.BatchNorm2d(3).double(), layer, images())
    assert_all_are_told([layers[0].float(), kept], [WITHOUT_NAME] * 2)  # Its number is free in one process only.


@each_process("gpus")
def test_on_gpus_nothing_is_compared(rank):
    layers = named_layers(worlds.DEVICE)
    for called in (layers[0], layers[1], layers[rank]):
        called.reset_running_stats()
        plain = nn.BatchNorm2d(3, device=worlds.DEVICE, dtype=torch.float64)
        with Collectives() as collectives:
            assert_same_step(plain, called.double(), images())
        assert collectives.found.count(GATHER) == 1
