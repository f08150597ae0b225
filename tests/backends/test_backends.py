"""The kinds of devices: what each needs, strides as those of torch, and what a new kind has to bring."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import device_lists
from helpers import (
    Net,
    Operators,
    as_devices,
    assert_equal,
    assert_same_parts,
    assert_same_results,
    assert_same_step,
    doubles,
    twins,
)
from torch import nn

from sync_batchnorm.backends import base, cpu
from sync_batchnorm.backends.base import GENERAL, Backend


def refuse_float64(operator, args, result):
    assert not isinstance(result, torch.Tensor) or result.dtype != torch.float64, operator


def without_float64(net, input):
    """Calls its layer, in the thread of each replica, on a device that has no float64, as some kinds of devices."""
    with Operators(refuse_float64):
        return net.bn(input)


@pytest.mark.parametrize("kernel", ["general"], indirect=True)
def test_device_without_operators_and_without_float64_normalizes_and_differentiates(kernel, monkeypatch):
    _, parallel = twins(Net(without_float64, bn=nn.BatchNorm1d(3)), ["cpu"] * 3)
    layer, exact = parallel.module.bn, copy.deepcopy(parallel.module.bn).double()
    data, grad = torch.randn(7, 3, 4), torch.randn(7, 3, 4)
    leaf, input = data.double().requires_grad_(), data.requires_grad_()
    expected = nn.BatchNorm1d.forward(exact, leaf)
    expected.backward(grad.double())
    for name in vars(torch):
        if name.startswith(("batch_norm", "native_batch_norm", "native_group_norm")):
            monkeypatch.setattr(torch, name, None)
    output = parallel(input)
    with Operators(refuse_float64):
        output.backward(grad)
    assert_equal(output.double(), expected, "output", tolerance=1e-5)
    assert_equal(input.grad.double(), leaf.grad, "input gradient", tolerance=1e-5)
    for name in ("weight", "bias"):
        assert_equal(getattr(layer, name).grad.double(), getattr(exact, name).grad, name, tolerance=1e-5)
    assert_equal(layer.running_var.double(), exact.running_var, "running variance", tolerance=1e-5)


def test_output_of_a_contiguous_or_channels_last_input_has_the_strides_of_torch():
    random, formats = torch.Generator().manual_seed(0), set()
    for _ in range(2000):
        sizes = torch.randint(1, 4, (4,), generator=random).tolist()
        strides = torch.tensor([0, 1, 2, 3, 4, 6, 9, 12, 18, 27])[torch.randint(10, (4,), generator=random)].tolist()
        input = torch.zeros(200, dtype=torch.float64).as_strided(sizes, strides)
        found = base.memory_for_output(input)
        if not input.is_contiguous() and not input.is_contiguous(memory_format=torch.channels_last):
            assert found.is_contiguous(), (sizes, strides)
            continue
        expected = F.batch_norm(input, torch.zeros(sizes[1]).double(), torch.ones(sizes[1]).double())
        assert found.stride() == expected.stride(), (sizes, strides)
        formats.add(expected.is_contiguous())
    assert formats == {True, False}


@pytest.mark.parametrize(("rows", "channels", "pieces"), [(10, 700, 2), (12, 300, 6), (7, 1000, 1), (5, 4096, 1)])
def test_rows_are_summed_side_by_side_as_far_as_they_fit(rows, channels, pieces):
    assert cpu._number_of_pieces(rows, channels) == pieces


# A new kind of device.


class Plain(Backend):
    """A kind of device that nobody knows, with an arithmetic of its own for the statistics and the outputs."""

    def statistics(self, input, eps):
        values = input.transpose(0, 1).flatten(1)
        mean = values.mean(1, keepdim=True)
        return (mean.view(1, -1), (values - mean).square().mean(1)[None]), None

    def normalize(self, calls, batch):
        outputs = []
        for call in calls:
            mean, invstd = (base.per_channel(v, call.input) for v in batch.mean_invstd[call.input.device])
            output = (call.input - mean) * invstd
            for vector, operation in ((call.layer.weight, torch.mul), (call.layer.bias, torch.add)):
                output = output if vector is None else operation(output, base.per_channel(vector, output))
            outputs.append(base.memory_for_output(call.input).copy_(output))
        return outputs


OPERATIONS = {name for name, operation in vars(Backend).items() if callable(operation) and name[:2] != "__"}


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"eps": 0.3, "momentum": None}], ids=str)
@pytest.mark.parametrize("devices", device_lists(3, slow=[2]))
def test_new_kind_of_device_is_one_class_and_one_row(devices, options, monkeypatch):
    kind, called = Plain(), []
    for name in OPERATIONS:
        operation = getattr(kind, name)
        setattr(kind, name, lambda *args, name=name, operation=operation: called.append(name) or operation(*args))
        if name != "gradients":  # which is that of all kinds where gradients are differentiated
            monkeypatch.setattr(GENERAL, name, None, raising=False)
    monkeypatch.setattr("sync_batchnorm.backends.BACKENDS", {as_devices(devices)[0].type: kind})
    data = doubles(5, 3, 2, 4, devices=devices)

    def penalized(model):
        input = data.clone().requires_grad_()
        inputs = [input, *getattr(model, "module", model).parameters()]
        first = torch.autograd.grad(torch.tanh(model(input)), inputs, data.sin(), create_graph=True)
        return [*first, *torch.autograd.grad(sum(tensor.square().sum() for tensor in first), inputs[:2])]

    plain, parallel = twins(nn.BatchNorm2d(3, **options).double(), devices)
    for size in (7, 6):
        assert_same_step(plain, parallel, doubles(size, 3, 4, 5, devices=devices))
    assert set(called) == OPERATIONS - {"empty_statistics"}
    assert called.count("statistics") == 2 * len(devices)
    assert called.count("merge") == called.count("normalize") == called.count("gradients") == 2
    assert_same_results(plain, parallel, penalized)
    parts = [doubles(size, 3, 2, 2, devices=devices) for size in (4, 0, 3)[: len(devices)]]
    assert_same_parts(plain, parallel, parts)
    assert set(called) == OPERATIONS
