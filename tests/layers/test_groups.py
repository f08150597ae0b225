"""`group_size`: replicas synchronize among themselves, and only that."""

import copy
import re

import pytest
import torch
from conftest import device_lists, usual_kernels
from helpers import Net, as_devices, assert_equal, doubles, randomize, run_parts
from torch import nn

from sync_batchnorm import DataParallelWithCallback, convert_model

pytestmark = usual_kernels


def grouped(module, devices, group_size):
    """Return a copy of `module` for each group, and a synchronized one on `devices`."""
    plain = randomize(module)
    model = convert_model(copy.deepcopy(plain), group_size=group_size).to(as_devices(devices)[0])
    parallel = DataParallelWithCallback(model, devices, timeout=5.0)
    groups = [copy.deepcopy(plain) for _ in range(-(-len(devices) // group_size))]
    return groups, parallel


SIZES = [(4, 2), (4, 3), (3, 2), (5, 2), (3, 3), (4, 1), (2, 4), (8, 4)]
CASES = [(["cpu"] * replicas, group_size) for replicas, group_size in SIZES]
CASES += [pytest.param(p.values[0], 2, marks=p.marks, id=p.id) for p in device_lists(4) if p.id.startswith("cuda")]


@pytest.mark.smoke
@pytest.mark.parametrize(("devices", "group_size"), CASES)
def test_each_group_is_one_device_for_its_rows(devices, group_size):
    groups, parallel = grouped(nn.BatchNorm2d(3).double(), devices, group_size)
    replicas = len(devices)
    for _ in range(2):
        parts = [doubles(1 + i % 3, 3, 4, 2).requires_grad_() for i in range(replicas)]
        outputs = [output.cpu() for output in run_parts(parallel, parts)]
        grads = [torch.randn_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, [*parts, *parallel.module.parameters()], grads)
        totals = [torch.zeros_like(p, device="cpu") for p in parallel.module.parameters()]
        for number, group in enumerate(groups):
            members = slice(number * group_size, (number + 1) * group_size)
            rows = [part.detach().requires_grad_() for part in parts[members]]
            expected = group(torch.cat(rows))
            assert_equal(torch.cat(outputs[members]), expected, f"output of group {number}")
            wanted = torch.autograd.grad(expected, [*rows, *group.parameters()], torch.cat(grads[members]))
            for actual, reference in zip(gradients[:replicas][members], wanted, strict=False):
                assert_equal(actual, reference, f"input gradient in group {number}")
            totals = [total + reference for total, reference in zip(totals, wanted[len(rows) :], strict=True)]
        for actual, reference in zip(gradients[replicas:], totals, strict=True):
            assert_equal(actual.cpu(), reference, "gradient of the parameters")
        for name, buffer in parallel.module.named_buffers():  # of the group of replica 0
            assert_equal(buffer.cpu(), groups[0].get_buffer(name), name)


@pytest.mark.parametrize("other", [2, 3])
def test_error_for_unlike_inputs_names_the_replicas_of_the_group(other):
    def forward(net, input, number):
        return net.bn(input.half() if number[0] == other else input)

    model = convert_model(Net(forward, bn=nn.BatchNorm1d(3)), group_size=2)
    parallel = DataParallelWithCallback(model, ["cpu"] * 4, timeout=5.0)
    kinds = [f"(2, 3) of torch.{'float16' if number == other else 'float32'} (eps=1e-05)" for number in (2, 3)]
    text = re.escape(f"but got {kinds[0]} on cpu in replica 2, {kinds[1]} on cpu in replica 3; give every")
    with pytest.raises(ValueError, match=text):
        parallel(torch.randn(8, 3), torch.arange(4).repeat_interleave(2))


def test_fewer_chunks_than_devices_make_fewer_groups():
    groups, parallel = grouped(nn.BatchNorm1d(3).double(), ["cpu"] * 4, 2)
    data = doubles(5, 3)  # chunks of 2, 2 and 1 row: the third is a group of its own
    data[4] = data[3]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        parallel(data)
    assert_equal(parallel(data[:4]), torch.cat([groups[0](data[:2]), groups[1](data[2:4])]))


def test_replicas_of_other_groups_see_the_buffers_from_before_the_forward():
    net = Net(lambda net, input: (net.bn(input), net.bn.running_mean.expand(len(input), -1))[1], bn=nn.BatchNorm1d(3))
    _, parallel = grouped(net.double(), ["cpu"] * 4, 2)
    before = parallel.module.bn.running_mean.clone()
    means = parallel(doubles(8, 3))
    assert_equal(means, torch.stack([parallel.module.bn.running_mean] * 2 + [before] * 6))
    assert not torch.equal(means[0], means[2])
