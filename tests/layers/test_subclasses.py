"""Inputs and activations that are a subclass of `Tensor`, as data loaders of MONAI and fastai make them."""

import pytest
import torch
from conftest import device_lists, usual_kernels
from helpers import Net, as_devices, assert_equal, assert_same_step, doubles, twins
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, sync_moments

pytestmark = usual_kernels


class WithMeta(Tensor):
    """Has an attribute, which the results of operations take over from the first of their arguments that has one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        metas = [arg.meta for arg in args if isinstance(arg, WithMeta) and "meta" in vars(arg)]
        if isinstance(result, WithMeta) and metas:
            result.meta = metas[0]
        return result


def with_meta(tensor):
    made = tensor.as_subclass(WithMeta)
    made.meta = {"spacing": 2}
    return made


def making(net, input):
    """Works on what `make` makes of an input, and notes what its layer gets and returns."""
    input = net.make(net.conv(input))
    output = net.bn(input)
    net.seen.append((type(input), type(output), getattr(output, "meta", None)))
    return net.last(net.activation(output))


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.ReLU(), nn.Identity()], ids=str)
@pytest.mark.parametrize("where", ["input", "model"])
@pytest.mark.parametrize("devices", device_lists(3, slow=[1, 2]))
def test_step_on_a_subclass_from_outside_or_inside_of_the_model_equals_one_device(devices, where, activation):
    outside, inside = (with_meta if where == place else nn.Identity() for place in ("input", "model"))
    parts = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "last": nn.Conv2d(4, 2, 3), "activation": activation}
    plain, parallel = twins(Net(making, make=inside, seen=[], **parts).double(), devices)
    for training in (True, False):
        data = outside(doubles(7, 3, 8, 8, devices=devices))
        assert_same_step(plain.train(training), parallel.train(training), data, doubles(7, 2, 4, 4, devices=devices))
    if where == "model":
        assert sorted(map(str, parallel.module.seen)) == sorted(map(str, plain.seen * len(devices)))


@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_replicas_get_plain_chunks_and_outputs_of_a_subclass_are_gathered_as_by_torch(devices):
    def look(net, input):
        seen.append(type(input))
        return with_meta(input * 2)

    seen = []
    _, parallel = twins(Net(look), devices)
    data = torch.randn(6, 3, device=as_devices(devices)[0])
    for input in (data, with_meta(data)):
        output = parallel(input)
        assert type(output) is Tensor
        assert_equal(output, data * 2)
    assert seen == [Tensor] * 2 * len(devices)


def test_parameter_of_a_subclass_has_its_gradient(devices):
    weight = nn.Parameter(with_meta(doubles(4, devices=devices)))
    parallel = DataParallelWithCallback(Net(lambda net, input: input * net.weight, weight=weight), devices)
    input, grad = (doubles(6, 4, devices=devices) for _ in range(2))
    parallel(input).backward(grad)
    assert_equal(parallel.module.weight.grad.as_subclass(Tensor), (input * grad).sum(0))


def test_moments_of_a_subclass_are_those_of_the_tensor():
    data = doubles(6, 3, 4)
    mean, var, count = sync_moments(with_meta(data), None)
    assert count == 24
    assert_equal(mean.as_subclass(Tensor), data.mean((0, 2)))
    assert_equal(var.as_subclass(Tensor), data.var((0, 2), correction=0))
