"""How far float32 results are from float64 on the same data: nowhere farther than those of one device."""

import pytest
import torch
from conftest import every_kernel, first_in_smoke, slow
from helpers import FORMATS, TOLERANCES, as_devices, assert_equal, assert_same_state, doubles, run_parts, twins
from torch import nn

RATIOS = [0.0, 12.0, 30.0, 1e2, 1e3, 1e4, 1e5, 1e6]  # of mean and deviation; up to 16, fast statistics are used
VARIANCE = 1e-6  # the largest error of the variance, relative to it
ROUNDING = 2e-7  # what float32 rounds off a number near one, whoever computes it
SUMS = 5e-6  # what sums over channels_last lose, which the operators of torch add up row by row in float32


usual_on_the_cpu = pytest.mark.parametrize("kernel", ["fast", *slow("exact")], indirect=True)


def channels(size):
    """Return one random number with a random sign for each channel, between 1 and 1.3 in size."""
    numbers = 1 + 0.3 * torch.rand(1, size, 1, 1, dtype=torch.float64)
    return numbers * torch.randn(1, size, 1, 1, dtype=torch.float64).sign()


def worst(actual, expected, scale=1.0):
    """Return the largest error, relative to `scale`."""
    return float(((actual.detach().double() - expected.detach()).abs() / scale).max())


class Errors:
    """One step of the layer of torch and of ours in float32, compared with torch in float64 on the same numbers.

    That of torch gets contiguous tensors: of channels_last ones with a large mean, it makes wrong gradients. With
    `follows`, the upstream gradient depends on the input: otherwise its sums are nearly zero, as what they contribute.
    """

    def __init__(self, data, parts, memory_format, follows=False):
        rounded = data.float().contiguous(memory_format=memory_format)
        grad = torch.randn(rounded.shape)
        if follows:
            grad += 1 + (data - data.mean((0, 2, 3), keepdim=True)).float()
        grad = grad.contiguous(memory_format=memory_format)
        plain, parallel = twins(nn.BatchNorm2d(data.shape[1], momentum=1.0), ["cpu"] * len(parts))
        exact = nn.BatchNorm2d(data.shape[1], momentum=1.0).double()
        exact.load_state_dict(plain.state_dict())
        inputs = [rounded.contiguous(), rounded.clone(), rounded.double()]
        for input in inputs:
            input.requires_grad_()
        torchs, expected = plain(inputs[0]), exact(inputs[2])
        ours = torch.cat(run_parts(parallel, inputs[1].split(parts)))
        torchs.backward(grad.contiguous())
        ours.backward(grad)
        expected.backward(grad.double())
        layer = parallel.module
        self.of_torch, self.output = worst(torchs, expected), worst(ours, expected)
        self.grad_of_torch, self.grad = worst(inputs[0].grad, inputs[2].grad), worst(inputs[1].grad, inputs[2].grad)
        self.weight, self.bias = worst(layer.weight.grad, exact.weight.grad), worst(layer.bias.grad, exact.bias.grad)
        self.variance = worst(layer.running_var, exact.running_var, exact.running_var)
        self.largest, self.largest_grad = (float(t.detach().abs().max()) for t in (expected, inputs[2].grad))
        self.rounding = ROUNDING if memory_format == torch.contiguous_format else SUMS

    def check(self):
        assert self.variance <= VARIANCE
        assert self.output <= max(1.5 * self.of_torch, ROUNDING * self.largest)
        assert self.grad <= max(1.5 * self.grad_of_torch, self.rounding * self.largest_grad)


@pytest.mark.parametrize("size", [40, *slow(96)])
@pytest.mark.parametrize("memory_format", ["contiguous", *slow("channels_last")])
@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: f"{ratio:g}")
def test_upstream_gradient_that_follows_the_input_leaves_gradients_as_exact(ratio, memory_format, size):
    data = doubles(8, 8, size, size) + ratio * channels(8)
    errors = Errors(data, [4, 4], FORMATS[memory_format], follows=True)
    # A multiple of the input is part of the gradient: it is rounded where it is as large as the mean makes it.
    assert errors.grad <= (2 * errors.rounding + 3e-8 * ratio) * errors.largest_grad
    elements = data[:, 0].numel()  # which is about what the gradients of weight and bias are
    assert errors.weight <= 2 * errors.rounding * elements
    assert errors.bias <= 2 * errors.rounding * elements


def changed(data, where, change):
    data[where] = change(data[where])
    return data


EVERY_SECOND = slice(None, None, 2)  # sample, which is the first of a replica, too
DATA = {  # from random numbers
    **{f"ratio of {ratio:g}": lambda x, ratio=ratio: x + ratio * channels(x.shape[1]) for ratio in RATIOS},
    "borders of zeros": lambda x: nn.functional.pad(x[..., 8:-8, 8:-8] + 1000, [8] * 4),
    "constant first samples": lambda x: changed(x + 1e4, EVERY_SECOND, lambda x: x * 0 + 1e4),
    "far first samples": lambda x: changed(x, EVERY_SECOND, lambda x: x + 1e4),  # no good shift for a sum of squares
    "one far value": lambda x: changed(x, (0, slice(None), 0, 0), lambda x: x * 0 + 1e4),
    "one far channel": lambda x: changed(x, (slice(None), 3), lambda x: x + 1e4),
    "many channels": lambda x: doubles(8, 512, 7, 7) + 12 * channels(512),
    "few levels": lambda x: (x * 2).round() / 8 + 255,
    "one constant replica": lambda x: changed(x + 1e3, slice(4), torch.ones_like),
    "replicas apart": lambda x: torch.cat([x[:4] / 10 - 1e4 * channels(8), 10 * x[4:] + 1e4 * channels(8)]),
    "nearly constant": lambda x: 1 + 1e-6 * x.sign(),
    "all positive": lambda x: x.clamp(min=0),  # what follows a ReLU
    "heavy tails": lambda x: x**7,
    "ramps": lambda x: torch.arange(x.numel(), dtype=x.dtype).view_as(x),
}


@usual_on_the_cpu
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("make", first_in_smoke(DATA))
def test_step_is_as_exact_as_that_of_one_device(make, memory_format):
    Errors(DATA[make](doubles(8, 8, 40, 40)), [4, 4], FORMATS[memory_format]).check()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[5, 3], [2, 2, 2, 2], [1] * 8], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: f"{ratio:g}")
@pytest.mark.parametrize("size", [6, 96])
def test_step_on_any_parts_is_as_exact_as_that_of_one_device(size, ratio, memory_format, parts):
    Errors(doubles(8, 16, size, size - 1) + ratio * channels(16), parts, FORMATS[memory_format]).check()


@every_kernel
@pytest.mark.parametrize("value", [0.0, 1e6, *slow(-1e-6)], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_constant_batch_gives_the_bias_and_no_negative_variance(value, memory_format):
    _, parallel = twins(nn.BatchNorm2d(3, momentum=1.0), ["cpu"] * 2)
    data = torch.full((4, 3, 5, 5), value).contiguous(memory_format=FORMATS[memory_format]).requires_grad_()
    output = parallel(data)
    output.backward(torch.randn_like(output))
    bias = parallel.module.bias.view(1, -1, 1, 1).expand_as(output)
    # A mean of 1e6 that is off by its last digit, 0.03, divided by the root of eps.
    torch.testing.assert_close(output, bias, rtol=0, atol=max(1e-5, abs(value) * 6e-8 / 0.003))
    assert (parallel.module.running_var >= 0).all()
    assert torch.isfinite(data.grad).all()


@usual_on_the_cpu
@pytest.mark.parametrize("value", [torch.inf, torch.nan, *slow(-torch.inf)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_value_that_is_not_finite_spoils_the_statistics_as_in_torch(kind, dtype, value):
    plain, parallel = twins(nn.BatchNorm2d(3).double() if dtype == torch.float64 else nn.BatchNorm2d(3), ["cpu"] * 2)
    data = torch.randn(4, 3, 40, 50).to(dtype).contiguous(memory_format=FORMATS[kind])
    data[2, 1, 3, 1] = value
    expected, actual = plain(data), parallel(data)
    assert torch.equal(actual.isnan(), expected.isnan())
    torch.testing.assert_close(parallel.module.running_mean, plain.running_mean, equal_nan=True)
    torch.testing.assert_close(parallel.module.running_var, plain.running_var, equal_nan=True)
    assert plain.running_var.isfinite().tolist() == [True, False, True]


OVERFLOWS = [(torch.float32, value) for value in (1e20, 1e25, 1e30, 3e38)]
OVERFLOWS += [(torch.bfloat16, 1e25), (torch.bfloat16, 3e38), (torch.float64, 1e160), (torch.float64, 1e300)]


@usual_on_the_cpu
@pytest.mark.parametrize(("dtype", "value"), OVERFLOWS, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_variance_that_overflows_is_infinite_and_leaves_the_bias(kind, dtype, value):
    """As in torch, on contiguous inputs in float32: on others, it has NaN for the largest values."""
    data = torch.rand(8, 3, 40, 40, dtype=torch.float64) * 2 - 1
    data[:, 1] *= value
    data, upstream = data.to(dtype), torch.randn(data.shape).to(dtype)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    plain, parallel = twins(nn.BatchNorm2d(3, momentum=0.3).to(kept), ["cpu"] * 2)
    theirs = data.to(kept).clone().requires_grad_()
    ours = data.clone().contiguous(memory_format=FORMATS[kind]).requires_grad_()
    expected, actual = plain(theirs), torch.cat(run_parts(parallel, ours.split([1, 7])))
    expected.backward(upstream.to(kept))
    actual.backward(upstream)
    layer, inputs = parallel.module, data.double().abs().amax((0, 2, 3))  # the size of what is added up to the mean
    assert layer.running_var.isinf().tolist() == [False, True, False]
    compared = [(actual, expected, None), (layer.running_mean, plain.running_mean, inputs)]
    compared += [(layer.running_var, plain.running_var, None), (layer.bias.grad, plain.bias.grad, None)]
    if plain.weight.grad.isfinite().all():  # Above 1e37, the sums of torch overflow as well.
        compared += [(layer.weight.grad, plain.weight.grad, None), (ours.grad, theirs.grad, None)]
    for tensors in compared:
        found, wanted, scales = (t if t is None or t.dim() == 1 else t.detach().movedim(1, 0) for t in tensors)
        for i in range(3):
            scale = wanted[i].abs().max() if scales is None else scales[i]
            atol = TOLERANCES[found.dtype if found.dim() > 1 else torch.float32] * float(scale)
            same = scale.isinf()
            torch.testing.assert_close(found[i], wanted[i].to(found.dtype), rtol=0, atol=0.0 if same else atol)


def test_running_variance_of_float16_is_finite_where_its_update_is(devices):
    plain, parallel = twins(nn.BatchNorm1d(3, dtype=torch.float16), devices)
    data = 700 * torch.randn(64, 3, dtype=torch.float16, device=as_devices(devices)[0])
    for module in (plain, parallel):
        module(data)
    assert plain.running_var.isfinite().all()
    assert_equal(parallel.module.running_var, plain.running_var, tolerance=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strides", [(3, 3600), (3600, 3)], ids=str)
def test_gradients_do_not_depend_on_the_stride_of_a_single_row(dtype, strides):
    def rows(stride):
        made = [torch.randn(1, 40, 30, 3).to(dtype).permute(0, 3, 1, 2) for _ in range(2)]
        return [row.as_strided(row.shape, (stride, *row.stride()[1:])) for row in made]

    plain, parallel = twins(nn.BatchNorm2d(3), ["cpu"] * 2)
    parts, grads = map(rows, strides)
    torch.autograd.backward(run_parts(parallel, parts), grads)
    plain(torch.cat(parts).float()).backward(torch.cat(grads).float())
    assert_same_state(parallel, plain)


def test_variance_is_finite_if_only_the_sum_of_squares_overflows():
    plain, parallel = twins(nn.BatchNorm2d(2), ["cpu"] * 2)
    data = 3e18 * (torch.randn(8, 2, 16, 16) + 3)
    parallel(data)
    plain.double()(data.double())
    assert_equal(parallel.module.running_var.double() / plain.running_var, torch.ones(2).double(), tolerance=1e-6)
