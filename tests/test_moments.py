"""The arithmetic of statistics and gradients, one function at a time, against plain formulas and autograd."""

import pytest
import torch
import torch.nn.functional as F
from conftest import device_lists
from helpers import assert_equal, doubles

from sync_batchnorm import moments, normalization

SHAPES = [(5, 3), (1, 3), (4, 3, 2), (2, 3, 4, 5), (2, 3, 2, 3, 4), (3, 1, 2, 2)]
FORMATS = [torch.contiguous_format, torch.channels_last]
DEVICE = device_lists(1) + [param for param in device_lists(2) if param.id.startswith("cuda0")]


def plain_moments(input):
    """Return mean and biased variance ``(2, C)`` by their definition, in float64."""
    elements = input.double().movedim(1, 0).flatten(1)
    return torch.stack((elements.mean(1), elements.var(1, correction=0)))


def parts_of(input, sizes):
    """Return the parts of `input`, their moments, and their counts."""
    parts = input.split(list(sizes))
    return parts, [moments.local_moments(part) for part in parts], [moments.channel_count(part.shape) for part in parts]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), *[(low, torch.float32) for low in (torch.float32, torch.float16, torch.bfloat16)]],
    ids=str,
)
def test_statistics_have_the_digits_of_float32_at_least(dtype, expected):
    assert moments.statistics_dtype(dtype) == expected


@pytest.mark.parametrize(
    ("shape", "count"), [((5, 3), 5), ((4, 3, 2), 8), ((2, 3, 0, 7), 0), ((0, 3), 0), ((2, 0, 4, 5), 40)], ids=str
)
def test_count_is_the_number_of_elements_of_a_channel(shape, count):
    assert moments.channel_count(torch.Size(shape)) == count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vectors_broadcast_over_channels(shape):
    vector = torch.arange(float(shape[1]))
    spread = torch.zeros(shape) + moments.per_channel(vector, torch.zeros(shape))
    assert torch.equal(spread.mean(moments.reduced_dims(spread)), vector)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("devices", DEVICE)
def test_local_moments_are_mean_and_biased_variance(devices, shape, dtype):
    input = doubles(*shape, devices=devices).to(dtype)
    actual = moments.local_moments(input)
    assert actual.dtype == torch.float64
    assert_equal(actual, plain_moments(input), tolerance=1e-10 if devices == ["cpu"] else 1e-6)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("size", [15, 16, 33, 72, 140])
@pytest.mark.parametrize("devices", DEVICE)
def test_local_moments_of_any_size_and_format_keep_the_digits_of_a_large_mean(devices, size, memory_format):
    input = (doubles(8, 17, size, size, devices=devices) + 1000).float().to(memory_format=memory_format)
    mean, var = moments.local_moments(input)
    expected_mean, expected_var = plain_moments(input)
    assert_equal(mean, expected_mean, tolerance=1e-6)
    assert_equal(var, expected_var, tolerance=1e-4)  # sums of plain squares in float32 are off by 0.1 and more


def test_local_moments_of_nothing_are_zero():
    assert torch.equal(moments.local_moments(torch.zeros(0, 3, 2)), torch.zeros(2, 3, dtype=torch.float64))


def test_variance_of_equal_values_is_not_negative():
    mean, var = moments.local_moments(torch.full((64, 2, 40, 40), 1e6))
    assert (var >= 0).all()
    assert_equal(mean, torch.full((2,), 1e6, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [(9,), (4, 5), (1, 2, 6), (0, 9), (3, 0, 6)], ids=str)
def test_merged_moments_are_those_of_the_whole(sizes):
    input = doubles(9, 3, 2) * 5 + 100
    _, local, counts = parts_of(input, sizes)
    assert_equal(torch.stack(moments.merge_moments(local, counts)), plain_moments(input))


@pytest.mark.parametrize("sizes", [(4, 5), (1, 2, 6), (3, 0, 6)], ids=str)
def test_gradients_of_the_merge_are_those_of_autograd(sizes):
    _, local, counts = parts_of(doubles(9, 3, 2), sizes)
    local = [part.requires_grad_() for part in local]
    grad = doubles(2, 3)
    expected = torch.autograd.grad(
        torch.stack(moments.merge_moments(local, counts)), local, grad, materialize_grads=True
    )
    for part, reference in zip(moments.merge_gradients(grad, local, counts), expected, strict=True):
        assert_equal(part, reference)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient_of_the_moments_is_that_of_autograd(shape):
    input, grad = doubles(*shape).requires_grad_(), doubles(2, shape[1])
    (expected,) = torch.autograd.grad(plain_moments(input), input, grad)
    assert_equal(moments.moments_gradient(grad, input.detach()), expected)


def test_gradient_of_the_moments_of_nothing_is_nothing():
    assert moments.moments_gradient(doubles(2, 3), torch.zeros(0, 3, 4)).shape == (0, 3, 4)


def forward(input, weight, bias, eps=0.1):
    """Return the pieces of a normalization of `input` by its own moments, and what it should give."""
    mean, var = moments.local_moments(input)
    normalizer = torch.stack((mean, var + eps)).to(moments.statistics_dtype(input.dtype))
    affine = normalization.make_affine(mean, var + eps, normalizer.dtype, weight, bias)
    return normalizer, affine, F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)


PARAMETERS = {"both": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}


def parameters(kind, channels, device):
    made = [torch.randn(channels, dtype=torch.float64, device=device) for _ in range(2)]
    return [parameter if present else None for parameter, present in zip(made, PARAMETERS[kind], strict=True)]


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("devices", DEVICE)
def test_normalization_is_that_of_torch(devices, shape, kind):
    input = doubles(*shape, devices=devices)
    weight, bias = parameters(kind, 3, input.device)
    normalizer, affine, expected = forward(input, weight, bias)
    assert_equal(normalization.normalize(input, normalizer, affine, bias), expected)
    assert_equal(normalization.differentiable_normalize(input, normalizer, weight, bias), expected)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("devices", DEVICE)
def test_normalization_keeps_dtype_and_memory_format(devices, dtype, memory_format):
    input = doubles(2, 3, 4, 5, devices=devices).to(dtype, memory_format=memory_format)
    normalizer, affine, _ = forward(input, None, None)
    output = normalization.normalize(input, normalizer, affine, None)
    assert output.dtype == dtype
    assert output.stride() == input.stride()


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("devices", DEVICE)
def test_gradients_are_those_of_autograd(devices, kind):
    input, grad = (doubles(4, 3, 2, 5, devices=devices) for _ in range(2))
    weight, bias = parameters(kind, 3, input.device)
    normalizer, affine, _ = forward(input, weight, bias)
    leaves = [tensor.requires_grad_() for tensor in (input, weight, bias) if tensor is not None]
    output = F.batch_norm(input, None, None, weight, bias, True, 0.0, 0.1)
    expected = dict(zip(map(id, leaves), torch.autograd.grad(output, leaves, grad), strict=True))
    with torch.no_grad():
        sum_dy, sum_dy_normalized = normalization.gradient_sums(grad, input, normalizer, affine)
        sums = normalization.weigh_sums(torch.stack((sum_dy, sum_dy_normalized)), affine)
        coefficients = normalization.gradient_coefficients(sums, 40, affine)
        grad_input = normalization.input_gradient(grad, input, normalizer, affine, coefficients)
    assert_equal(grad_input, expected[id(input)], "input gradient")
    for parameter, actual in ((weight, sum_dy_normalized), (bias, sum_dy)):
        if parameter is not None:
            assert_equal(actual, expected[id(parameter)])


@pytest.mark.parametrize("devices", DEVICE)
def test_input_gradient_without_an_upstream_gradient_takes_it_as_zero(devices):
    input = doubles(4, 3, 2, devices=devices)
    normalizer, affine, _ = forward(input, None, None)
    coefficients = doubles(2, 3, devices=devices)
    expected = normalization.input_gradient(torch.zeros_like(input), input, normalizer, affine, coefficients)
    assert_equal(normalization.input_gradient(None, input, normalizer, affine, coefficients), expected)
    assert expected.abs().max() > 0


@pytest.mark.parametrize("kind", ["both", "none"])
def test_differentiable_gradients_are_those_of_autograd(kind):
    input, grad = doubles(4, 3, 2).requires_grad_(), doubles(4, 3, 2)
    weight, bias = parameters(kind, 3, input.device)
    normalizer = torch.stack((doubles(3), doubles(3).exp())).requires_grad_()
    leaves = [t.requires_grad_() for t in (input, normalizer, weight, bias) if t is not None]
    output = normalization.differentiable_normalize(input, normalizer, weight, bias)
    expected = torch.autograd.grad(output, leaves, grad)
    actual = normalization.normalize_gradients(grad, input, normalizer, weight)
    for i, reference in enumerate(expected):
        assert_equal(actual[i], reference)


def test_empty_input_passes_through_every_function():
    input = torch.zeros(0, 3, 2)
    normalizer, affine, _ = forward(torch.randn(4, 3, 2), None, None)
    assert normalization.normalize(input, normalizer, affine, None).shape == input.shape
    assert all(not sums.any() for sums in normalization.gradient_sums(input, input, normalizer, affine))
    assert normalization.input_gradient(input, input, normalizer, affine, torch.ones(2, 3)).shape == input.shape
