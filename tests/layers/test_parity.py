"""Replicas compute what one device computes on the whole batch."""

import pytest
import torch
from conftest import device_lists, every_kernel, first_in_smoke, slow, usual_kernels
from helpers import (
    WITHOUT_BIAS,
    TwoLayers,
    as_devices,
    assert_equal,
    assert_same_parts,
    assert_same_state,
    assert_same_step,
    doubles,
    twins,
)
from torch import nn

BATCHES = {
    "rows": (nn.BatchNorm1d, (16, 10)),
    "1d": (nn.BatchNorm1d, (7, 4, 5)),
    "2d": (nn.BatchNorm2d, (6, 3, 5, 4)),
    "3d": (nn.BatchNorm3d, (5, 2, 3, 4, 3)),
}
OPTIONS = [
    {"eps": 0.3},
    *({"momentum": momentum} for momentum in (0.3, None, 0.0, 1.0)),
    {"affine": False},
    {"track_running_stats": False},
    *WITHOUT_BIAS,
]
EMPTY = [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 2, 0), (0, 1, 1), (0, 0, 0)]


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32)], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", first_in_smoke(BATCHES))
@pytest.mark.parametrize("devs", device_lists(1, 3, slow=[2, 4]))
def test_step_is_that_of_the_whole_batch(devs, kind, dtype):
    layer, shape = BATCHES[kind]
    plain, parallel = twins(layer(shape[1]).to(dtype), devs)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(*shape, devices=devs).to(dtype))


@usual_kernels
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("devices", device_lists(1, 3))
def test_constructor_options_mean_what_they_mean_in_torch(devices, options):
    plain, parallel = twins(nn.BatchNorm2d(3, **options).double(), devices)
    for _ in range(3):
        assert_same_step(plain, parallel, doubles(5, 3, 4, 2, devices=devices))
    assert parallel.module.bias is None or options != {"bias": False}


@usual_kernels
@pytest.mark.parametrize("batch", [8, 4], ids=["two-a-replica", "one-a-replica"])
def test_training_stays_equal_step_by_step(devs, batch):
    plain, parallel = twins(TwoLayers().double(), devs)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (plain, parallel)]
    data = doubles(batch, 3, 7, 6, devices=devs)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_same_step(plain, parallel, data[torch.randperm(batch)])
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(parallel, plain)


@every_kernel
@pytest.mark.parametrize("devices", device_lists(4))
@pytest.mark.parametrize("sizes", [(16, 8), (2, 3, 4, 5), (1, 1, 9)], ids=str)
def test_parts_of_chosen_sizes_are_weighted_by_elements(devices, sizes):
    plain, parallel = twins(nn.BatchNorm1d(3).double(), devices)
    parts = [doubles(size, 3, 2) for size in sizes]
    parts[0] *= 50
    assert_same_parts(plain, parallel, parts)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64)], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last], ids=str)
def test_parts_may_differ_in_their_spatial_sizes(devices, dtype, kind):
    plain, parallel = twins(nn.BatchNorm2d(3).to(dtype), devices)
    for sizes in ((9, 2), (9, 5)):  # Of equal widths: those in channels_last have equal strides inside of a sample.
        parts = [torch.randn(2, 3, 5, 5), torch.randn(1, 3, *sizes)]
        assert_same_parts(plain, parallel, [part.to(dtype).contiguous(memory_format=kind) for part in parts])


@every_kernel
def test_one_value_in_each_replica_is_enough(devices):
    plain, parallel = twins(nn.BatchNorm1d(2, momentum=1.0, affine=False), devices)
    output = parallel(torch.tensor([[3.0, -1.0], [5.0, 2.0]], device=as_devices(devices)[0])).cpu()
    half = torch.tensor([1.0, 1.5])  # half of the distance of the two samples
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) * half / (half**2 + plain.eps).sqrt()
    assert_equal(output, expected, "output", 1e-6)
    assert_equal(parallel.module.running_mean.cpu(), torch.tensor([4.0, 0.5]), "running mean", 1e-6)
    assert_equal(parallel.module.running_var.cpu(), torch.tensor([2.0, 4.5]), "running variance", 1e-6)


@every_kernel
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_frozen_parameters_get_no_gradient(devices, frozen):
    plain, parallel = twins(nn.BatchNorm1d(3).double(), devices)
    for module in (plain, parallel.module):
        for name in frozen:
            getattr(module, name).requires_grad_(False)
    assert_same_step(plain, parallel, doubles(6, 3, devices=devices))
    assert all(getattr(parallel.module, name).grad is None for name in frozen)


@usual_kernels
@pytest.mark.parametrize("momentum", [None, 0.0, 1.0, 0.1], ids=str)
@pytest.mark.parametrize("devices", device_lists(3))
def test_running_statistics_follow_after_a_reset_and_an_empty_batch(devices, momentum):
    plain, parallel = twins(nn.BatchNorm1d(3, momentum=momentum).double(), devices)
    for rows in (6, 0, 5, 7):
        assert_same_step(plain, parallel, doubles(rows, 3, devices=devices))
    plain.reset_running_stats()
    parallel.module.reset_running_stats()
    assert_same_step(plain, parallel, doubles(4, 3, devices=devices))


@every_kernel
@pytest.mark.parametrize("devices", device_lists(3))
@pytest.mark.parametrize("sizes", first_in_smoke(EMPTY), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64)], ids=["float32", "float64"])
def test_empty_replicas_take_part(devices, sizes, dtype):
    plain, parallel = twins(nn.BatchNorm2d(3).to(dtype), devices)
    assert_same_parts(plain, parallel, [torch.randn(size, 3, 2, 2, dtype=dtype) for size in sizes])


@every_kernel
def test_empty_images_are_an_empty_batch(devices):
    plain, parallel = twins(nn.BatchNorm2d(3).double(), devices)
    assert_same_step(plain, parallel, doubles(2, 3, 0, 2, devices=devices))


@every_kernel
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("devs", device_lists(1, 3, slow=[2, 4]))
def test_training_mode_without_gradients_updates_running_statistics(devs, mode):
    plain, parallel = twins(nn.BatchNorm1d(3).double(), devs)
    data = doubles(6, 3, devices=devs)
    with mode():
        expected, output = plain(data), parallel(data)
    assert_equal(output, expected)
    assert not output.requires_grad
    assert not any(buffer.requires_grad or buffer.is_inference() for buffer in parallel.module.buffers())
    assert_same_state(parallel, plain)
    assert_same_step(plain, parallel, data)
