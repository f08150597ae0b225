"""Random small nets whose replicas and callers use random streams, with first and second derivatives.

On simulated GPUs each of these tests also fails on a race, and on memory that is reused while a stream still uses it.
"""

import contextlib
import copy
import functools
import random

import pytest
import torch
from conftest import CUDA_COUNT, slow
from helpers import as_devices, assert_equal, assert_same_state, doubles, randomize
from streams import on_a_side_stream, on_stream
from torch import nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, convert_model

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")]

DEVICES = [[0, 1], [0, 0], [0, 1, 0, 1], [0, 1, 2], [1, 0], [0, 1, 2, 3]]


class RandomNet(nn.Module):
    """Layers in random order, some of them on a stream of the replica, some in a checkpoint."""

    def __init__(self, choose):
        super().__init__()
        kinds = [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), nn.Tanh()]
        self.layers = nn.ModuleList(copy.deepcopy(choose.choice(kinds)) for _ in range(choose.randint(1, 4)))
        self.layers.append(nn.BatchNorm2d(3))
        self.checkpointed = [choose.random() < 0.25 for _ in self.layers]
        self.aside = [choose.random() < 0.5 for _ in self.layers]
        self.replicas_with_streams = choose.choice([(), (0,), (1, 2, 3), (0, 1, 2, 3)])

    def forward(self, input, number):
        for layer, checkpointed, aside in zip(self.layers, self.checkpointed, self.aside, strict=True):
            function = functools.partial(checkpoint, layer, use_reentrant=False) if checkpointed else layer
            is_aside = aside and number in self.replicas_with_streams
            input = on_a_side_stream(function, input) if is_aside else function(input)
        return input


def gradients(outputs, inputs, grads, others):
    first = torch.autograd.grad(outputs, inputs, grads, create_graph=others is not None)
    return first if others is None else torch.autograd.grad(first, inputs, others)


def go_aside(stack, aside, current):
    """Use new streams on some devices until `stack` is closed; the current device stays what it is."""
    for device in aside:
        stack.enter_context(on_stream(torch.cuda.Stream(device)))
    stack.enter_context(torch.cuda.device(current))


@pytest.mark.parametrize("seed", [*range(20), *slow(*range(20, 100))])
def test_random_net_on_random_streams_computes_what_one_gpu_computes(seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    ids = choose.choice([ids for ids in DEVICES if max(ids) < CUDA_COUNT])
    devices = as_devices(ids)
    plain = randomize(RandomNet(choose)).double().to(devices[0])
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ids)
    parts = [doubles(2 + i % 2, 3, 3, 2, devices=[device]).requires_grad_() for i, device in enumerate(devices)]
    grads, others = ([torch.randn_like(part) for part in parts] for _ in range(2))
    others = others if choose.random() < 0.5 else None
    aside = [device for device in dict.fromkeys(devices) if choose.random() < 0.5]
    where = choose.choice(["forward", "backward", "both"])
    torch.cuda.synchronize()  # The engine orders upstream gradients of the first device alone.
    with contextlib.ExitStack() as stack:
        if where != "backward":
            go_aside(stack, aside, devices[0])
        replicas = parallel.replicate(parallel.module, ids)
        outputs = parallel.parallel_apply(replicas, list(zip(parts, range(len(ids)), strict=True)), [{} for _ in ids])
        if where == "forward":
            stack.close()
        elif where == "backward":
            go_aside(stack, aside, devices[0])
        found = gradients(outputs, parts, grads, others)
        for tensor in (*outputs, *found):
            tensor.record_stream(torch.cuda.default_stream(tensor.device))
    first = [part.detach().to(devices[0]).requires_grad_() for part in parts]
    expected = plain(torch.cat(first), None)
    on_first = [tensors and [tensor.to(devices[0]) for tensor in tensors] for tensors in (grads, others)]
    wanted = gradients([expected], first, [torch.cat(on_first[0])], on_first[1])
    assert_equal(torch.cat([output.to(devices[0]) for output in outputs]), expected, f"output, seed {seed}")
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert_equal(ours, theirs, f"gradient of replica {i}, seed {seed}")
    assert_same_state(parallel, plain)
