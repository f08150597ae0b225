"""Inputs and activations that are a subclass of `Tensor`, as data loaders of MONAI and fastai make them."""

from typing import Any

import pytest
import torch
from conftest import device_lists, usual_kernels
from helpers import Net, as_devices, assert_equal, assert_same_state, doubles, twins
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, sync_moments

pytestmark = usual_kernels


class WithMeta(Tensor):
    """Has an attribute, which the results of operations take over from the first of their arguments that has one."""

    meta: dict[str, Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        metas = [arg.meta for arg in args if isinstance(arg, WithMeta) and "meta" in vars(arg)]
        if isinstance(result, WithMeta) and metas:
            result.meta = metas[0]
        return result


def with_meta(tensor: Tensor) -> Tensor:
    made = tensor.as_subclass(WithMeta)
    made.meta = {"spacing": 2}
    return made


ACTIVATIONS = pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.ReLU(), nn.Identity()], ids=str)


def making(activation: nn.Module, make: Any = lambda input: input) -> Net:
    """Return a net that works on what `make` makes."""

    def forward(net: Net, input: Tensor) -> Tensor:
        input = make(net.conv(input))
        output = net.bn(input)
        net.seen.append((type(input), type(output), getattr(output, "meta", None)))
        return net.last(activation(output))

    return Net(forward, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), last=nn.Conv2d(4, 2, 3), seen=[])


def assert_same_on_leaves(plain: nn.Module, parallel: nn.Module, devices: Any, data: Tensor, make: Any) -> None:
    """Compare a step on what `make` makes of `data`."""
    leaves = [data.clone().requires_grad_() for _ in range(2)]
    outputs = [model(make(leaf)) for model, leaf in zip((plain, parallel), leaves, strict=True)]
    assert_equal(*(output.as_subclass(Tensor) for output in outputs))
    grad = doubles(*outputs[0].shape, devices=devices)
    for output in outputs:
        output.backward(grad)
    assert_equal(leaves[1].grad, leaves[0].grad)
    assert_same_state(parallel, plain)


@ACTIVATIONS
@pytest.mark.parametrize("where", ["input", "model"])
@pytest.mark.parametrize("devices", device_lists(3, slow=[1, 2]))
def test_step_on_a_subclass_from_outside_or_inside_of_the_model_equals_one_device(devices, where, activation):
    inside = where == "model"
    plain, parallel = twins(making(activation, *([with_meta] if inside else [])).double(), devices)
    for training in (True, False):
        plain.train(training)
        parallel.train(training)
        data = doubles(7, 3, 8, 8, devices=devices)
        assert_same_on_leaves(plain, parallel, devices, data, (lambda leaf: leaf) if inside else with_meta)
    if inside:
        assert sorted(map(str, parallel.module.seen)) == sorted(map(str, plain.seen * len(devices)))


@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_replicas_get_plain_chunks_and_outputs_of_a_subclass_are_gathered_as_by_torch(devices):
    def look(net: Net, input: Tensor) -> Tensor:
        seen.append(type(input))
        return with_meta(input * 2)

    seen: list[Any] = []
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
