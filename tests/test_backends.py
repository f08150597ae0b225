"""The arithmetic of statistics and gradients, one function at a time, against plain formulas and autograd."""

import pytest
import torch
import torch.nn.functional as F
from conftest import device_lists
from helpers import assert_equal, doubles
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from sync_batchnorm import moments, normalization

SHAPES = [(5, 3), (1, 3), (4, 3, 2), (2, 3, 4, 5), (2, 3, 2, 3, 4), (3, 1, 2, 2)]
FORMATS = [torch.contiguous_format, torch.channels_last]
DEVICE = device_lists(1) + [param for param in device_lists(2) if param.id.startswith("cuda0")]


def plain_moments(input):
    """Return mean and biased variance ``(2, C)`` by their definition, in float64."""
    elements = input.double().movedim(1, 0).flatten(1)
    return torch.stack((elements.mean(1), elements.var(1, correction=0)))


def moments_of(input, exact=False):
    """Return the moments of `input` as ``(2, C)``; on the CPU the fast or the exact ones."""
    found, memory = moments.local_moments(input, 0.0) if input.is_cuda else moments.fast_moments(input)
    if exact and not input.is_cuda:
        found = moments.exact_moments(input, found, memory)
    return torch.stack(moments.merge_moments([found]))


class NoFloat64(TorchFunctionMode):
    """Refuses what some kinds of devices do not have."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.dtype != torch.float64, func
        return result


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=str)
def test_moments_of_float32_merge_without_float64_on_devices_that_may_not_have_it(sizes, monkeypatch):
    parts = [moments.local_moments(part, 0.0)[0] for part in torch.randn(4, 3, 2).split(list(sizes))]
    monkeypatch.setattr(moments, "FUSED", ())
    with NoFloat64():
        merged = moments.merge_moments(parts)
    assert merged[0].dtype == torch.float32
    monkeypatch.undo()
    with pytest.raises(AssertionError), NoFloat64():  # as on the CPU
        moments.merge_moments(parts)


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


EXACT = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])


@EXACT
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("devices", DEVICE)
def test_local_moments_are_mean_and_biased_variance(devices, shape, dtype, exact):
    input = doubles(*shape, devices=devices).to(dtype)
    actual = moments_of(input, exact)
    assert actual.dtype == torch.float64
    tolerance = 1e-10 if dtype == torch.float64 and devices == ["cpu"] else 1e-6
    assert_equal(actual, plain_moments(input), tolerance=tolerance)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "strided": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "one-sample-of-many": lambda x: x.contiguous(memory_format=torch.channels_last)[2:3],
    "channels-of-many": lambda x: x.contiguous(memory_format=torch.channels_last)[:, 1:],
}


@EXACT
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [4, 15, 33, 72])
def test_local_moments_of_any_strides_and_size_are_right(size, layout, exact):
    input = LAYOUTS[layout](doubles(5, 17, size, size).float())
    assert_equal(moments_of(input, exact), plain_moments(input), tolerance=1e-6)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("ratio", [0, 4, 16])
@pytest.mark.parametrize("shape", [(4, 64, 56, 56), (4, 256, 28, 28), (4, 512, 7, 7), (2, 8, 4, 4)], ids=str)
def test_fast_variance_is_good_to_a_millionth_where_it_is_used(shape, ratio, memory_format):
    input = (doubles(*shape) + ratio * (1 - 0.05 * torch.rand(1, shape[1], 1, 1))).float()
    mean, var = moments_of(input.contiguous(memory_format=memory_format))
    expected_mean, expected_var = plain_moments(input)
    assert float(((var - expected_var) / expected_var).abs().max()) <= 1e-6
    torchs = torch.zeros(shape[1])
    F.batch_norm(
        input.contiguous(memory_format=memory_format), torchs, torch.ones(shape[1]), training=True, momentum=1.0
    )
    errors = [float(((found - expected_mean) / expected_var.sqrt()).abs().max()) for found in (mean, torchs)]
    assert errors[0] <= max(2e-6, errors[1])


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("ratio", [30, 1e3, 1e4, 1e6], ids=str)
def test_exact_variance_is_good_to_a_millionth_at_any_ratio(ratio, memory_format):
    input = (doubles(4, 33, 40, 40) + ratio).float().contiguous(memory_format=memory_format)
    _, var = moments_of(input, exact=True)
    expected = plain_moments(input)[1]
    assert float(((var - expected) / expected).abs().max()) <= 1e-6


def test_device_without_operators_for_batch_norm_uses_none(monkeypatch):
    monkeypatch.setattr(moments, "FUSED", ())
    for name in ("batch_norm_update_stats", "native_group_norm"):
        monkeypatch.setattr(torch, name, None)
    input = doubles(4, 3, 2)
    found, _ = moments.local_moments(input, 0.0)
    assert_equal(torch.stack(moments.merge_moments([found])), plain_moments(input))


def test_one_channel_of_large_mean_takes_no_digits_from_the_others():
    input = doubles(4, 8, 20, 20).float()
    input[:, 3] += 1e4
    fast, expected = moments_of(input), plain_moments(input)
    assert not moments.precise(*fast, eps=1e-5)
    exact = moments_of(input, exact=True)
    assert float(((exact - expected)[1] / expected[1]).abs().max()) <= 1e-6


UNTRUSTED = {
    "large-mean": (torch.tensor([0.0, 17.0]), torch.tensor([1.0, 1.0])),
    "constant": (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])),
    "nan-mean": (torch.tensor([0.0, float("nan")]), torch.tensor([1.0, 1.0])),
    "nan-variance": (torch.tensor([0.0, 0.0]), torch.tensor([1.0, float("nan")])),
    "infinite-variance": (torch.tensor([0.0, 0.0]), torch.tensor([1.0, float("inf")])),
}


@pytest.mark.parametrize("kind", UNTRUSTED)
def test_statistics_that_may_have_lost_digits_are_not_trusted(kind):
    assert not moments.precise(*UNTRUSTED[kind], eps=1e-5)


def test_statistics_with_a_mean_of_sixteen_deviations_are_trusted():
    assert moments.precise(torch.tensor([0.0, 15.9]), torch.tensor([1.0, 1.0]), eps=1e-5)


def test_constant_channels_that_eps_covers_are_trusted():
    assert moments.precise(torch.tensor([0.04]), torch.tensor([0.0]), eps=1e-5)


def test_statistics_that_are_precise_in_all_parts_are_precise_when_they_are_merged():
    random = torch.Generator().manual_seed(0)
    for _ in range(500):
        numbers = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=random) * 4
        mean, var = numbers[0].exp() * numbers[0].sign(), numbers[1].exp()
        largest = (mean.square() / (var + 1e-5)).max()
        parts = [
            moments.Moments(m * (256 / largest).sqrt(), v, 3 + i)
            for i, (m, v) in enumerate(zip(mean, var, strict=True))
        ]
        assert all(moments.precise(part.mean, part.var, 1.01e-5) for part in parts)
        assert moments.precise(*moments.merge_moments(parts), eps=1.01e-5)


def test_local_moments_of_nothing_are_zero():
    found, memory = moments.local_moments(torch.zeros(0, 3, 2), 0.0)
    assert memory is None
    assert found.elements == 0
    assert torch.equal(torch.stack(moments.merge_moments([found])), torch.zeros(2, 3, dtype=torch.float64))


@EXACT
def test_variance_of_equal_values_is_not_negative(exact):
    mean, var = moments_of(torch.full((64, 2, 40, 40), 1e6), exact)
    assert (var >= 0).all()
    assert_equal(mean, torch.full((2,), 1e6, dtype=torch.float64))


def test_infinite_values_leave_what_torch_leaves():
    input = torch.randn(4, 3, 5, 5)
    input[0, 1, 0, 0] = float("inf")
    mean, var = moments_of(input, exact=True)
    assert mean[1] == float("inf")
    assert var[1].isnan()
    assert torch.isfinite(torch.stack((mean, var))[:, ::2]).all()


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("sizes", [(9,), (4, 5), (1, 2, 6), (0, 9), (3, 0, 6)], ids=str)
def test_merged_moments_are_those_of_the_whole(sizes, memory_format):
    input = (doubles(9, 3, 2, 4) * 5 + 100).contiguous(memory_format=memory_format)
    parts = [moments.local_moments(part, 0.0)[0] for part in input.split(list(sizes))]
    assert_equal(torch.stack(moments.merge_moments(parts)), plain_moments(input))


def test_parts_count_by_their_elements():
    parts = [doubles(2, 3, 5), doubles(1, 3, 7), doubles(4, 3)[..., None]]
    merged = torch.stack(moments.merge_moments([moments.local_moments(part, 0.0)[0] for part in parts]))
    whole = torch.cat([part.movedim(1, 0).flatten(1) for part in parts], 1)
    assert_equal(merged, plain_moments(whole.T))


def test_parts_without_elements_change_no_digit():
    large = moments.Moments(torch.full((1, 3), 1e160, dtype=torch.float64), doubles(1, 3).abs(), 4)
    nothing, _ = moments.local_moments(doubles(0, 3, 2), 0.0)
    expected = moments.merge_moments([large, large])
    for found, vector in zip(moments.merge_moments([nothing, large, nothing, large]), expected, strict=True):
        assert torch.equal(found, vector)


def test_constants_of_another_kind_of_tensor_are_not_kept():
    counts = (3, 4, 5)
    with FakeTensorMode():
        moments.counts_on(torch.device("cpu"), None, counts, torch.float32)
    found = moments.counts_on(torch.device("cpu"), None, counts, torch.float32)
    assert found.tolist() == [3.0, 4.0, 5.0]
    assert moments.counts_on(torch.device("cpu"), None, counts, torch.float32) is found


def test_constants_made_in_inference_mode_may_be_saved_by_autograd():
    with torch.inference_mode():
        found = moments.counts_on(torch.device("cpu"), None, (7, 8), torch.float64)
    assert not found.is_inference()


def test_constants_are_forgotten_when_they_are_many():
    made = []

    @moments.cached_constants
    def make(number):
        made.append(number)
        return (torch.tensor(number),)

    for number in range(3000):
        assert make(number)[0] == number
        make(number)
    assert made == list(range(3000))
    assert len(_found_by(make)) <= 1024


def _found_by(cached):
    return next(cell.cell_contents for cell in cached.__closure__ if isinstance(cell.cell_contents, dict))


EPS = 0.1


def statistics_of(input):
    """Return what replicas normalize with, as the master makes it, and its unbiased form."""
    mean, var = moments_of(input)
    invstd = (var + EPS).rsqrt()
    if input.is_cuda:
        mean, invstd = (vector.to(moments.statistics_dtype(input.dtype)) for vector in (mean, invstd))
    return normalization.Statistics(mean, invstd)


def normalized(input, weight, bias):
    statistics, output = statistics_of(input), normalization.memory_for_output(input)
    normalization.normalize(input, statistics, None, weight, bias, output)
    return output


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
    expected = F.batch_norm(input, None, None, weight, bias, True, 0.0, EPS)
    assert_equal(normalized(input, weight, bias), expected)


ONE = [(1, 3, 4, 5), (4, 3, 1, 1), (1, 3, 1, 1), (4, 1, 3, 2), (4, 3, 1, 5)]


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), *ONE], ids=str)
@pytest.mark.parametrize("devices", DEVICE)
def test_normalization_keeps_dtype_and_strides_as_torch_does(devices, shape, dtype, memory_format):
    input = doubles(*shape, devices=devices).to(dtype, memory_format=memory_format)
    output = normalized(input, None, None)
    running = torch.zeros(2, shape[1], dtype=dtype, device=input.device)
    expected = F.batch_norm(input, *running, training=shape != (1, 3, 1, 1))
    assert output.dtype == expected.dtype
    assert output.stride() == expected.stride()


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "channels-of-many"])
def test_normalization_of_unusual_strides_has_those_of_torch(layout):
    input = LAYOUTS[layout](doubles(5, 4, 6, 6))
    expected = F.batch_norm(input, None, None, None, None, True, 0.0, EPS)
    assert_equal(normalized(input, None, None), expected)
    assert normalized(input, None, None).stride() == expected.stride()


def test_output_of_any_strides_has_those_of_torch():
    random, formats = torch.Generator().manual_seed(0), set()
    for _ in range(2000):
        sizes = torch.randint(1, 4, (4,), generator=random).tolist()
        strides = torch.tensor([0, 1, 2, 3, 4, 6, 9, 12, 18, 27])[torch.randint(10, (4,), generator=random)].tolist()
        input = torch.zeros(200, dtype=torch.float64).as_strided(sizes, strides)
        expected = F.batch_norm(input, torch.zeros(sizes[1]).double(), torch.ones(sizes[1]).double())
        found = normalization.memory_for_output(input)
        assert found.stride() == expected.stride(), (sizes, strides)
        formats.add(expected.is_contiguous())
    assert formats == {True, False}


def gradients(grad, input, weight, weighted):
    """Return the gradients by input, weight and bias, in the steps of a backward."""
    statistics, asked = statistics_of(input), weight is not None
    if input.is_cuda:
        *sums, grad_weight, grad_bias = normalization.fused_gradient_sums(grad, input, statistics, weight, asked, True)
    else:
        sums = normalization.gradient_sums(grad, input, *statistics)
        grad_bias, grad_weight = sums
    totals = torch.stack(sums) * weight if weighted and asked else torch.stack(sums)
    if input.is_cuda:
        count = torch.full((1,), moments.channel_count(input.shape), dtype=torch.int32, device=input.device)
        grad_input = normalization.fused_input_gradient(grad, input, statistics, weight, totals, count, weighted)
    else:
        factor = statistics.invstd * weight if asked else statistics.invstd
        by = statistics.invstd if weighted else factor
        linear = normalization.linear_gradient(statistics, totals, by, moments.channel_count(input.shape), input.dtype)
        grad_input = normalization.input_gradient(grad, input, factor, linear)
    return grad_input, grad_weight, grad_bias


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["one-weight", "own-weights"])
@pytest.mark.parametrize("devices", DEVICE)
def test_gradients_are_those_of_autograd(devices, weighted, kind):
    input, grad = (doubles(4, 3, 2, 5, devices=devices) for _ in range(2))
    weight, bias = parameters(kind, 3, input.device)
    leaves = [tensor.requires_grad_() for tensor in (input, weight, bias) if tensor is not None]
    output = F.batch_norm(input, None, None, weight, bias, True, 0.0, EPS)
    expected = iter(torch.autograd.grad(output, leaves, grad))
    with torch.no_grad():
        found = gradients(grad, input, weight, weighted)
    for leaf, actual in zip((input, weight, bias), found, strict=True):
        if leaf is not None:
            assert_equal(actual, next(expected))


STRIDES = {
    "contiguous": lambda x: x.contiguous(),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(x.shape),
    "expanded": lambda x: x[:, :, :1, :1].expand_as(x),
}


@pytest.mark.parametrize("of_input", [kind for kind in STRIDES if kind != "expanded"])
@pytest.mark.parametrize("of_grad", STRIDES)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 6, 7, 1), (4, 6, 1, 7), *ONE], ids=str)
def test_sums_of_a_gradient_of_any_strides_are_right(shape, of_grad, of_input):
    input, grad = STRIDES[of_input](doubles(*shape)), STRIDES[of_grad](doubles(*shape))
    mean, invstd = doubles(shape[1]), doubles(shape[1]).exp()
    normalized = (input - moments.per_channel(mean, input)) * moments.per_channel(invstd, input)
    total, dot = normalization.gradient_sums(grad, input, mean, invstd)
    assert_equal(total, grad.sum((0, 2, 3)))
    assert_equal(dot, (grad * normalized).sum((0, 2, 3)))


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_what_float32_rounds_to(dtype, memory_format):
    input, grad = (doubles(4, 3, 5, 6).to(dtype, memory_format=memory_format) for _ in range(2))
    factor, affine = torch.rand(3), normalization.Affine(torch.randn(3), torch.randn(3))
    for upstream in (grad, None):
        wide = None if upstream is None else upstream.float()
        expected = normalization.input_gradient(wide, input.float(), factor, affine)
        assert torch.equal(normalization.input_gradient(upstream, input, factor, affine), expected.to(dtype))


@pytest.mark.parametrize("devices", DEVICE)
def test_input_gradient_without_an_upstream_gradient_takes_it_as_zero(devices):
    input, totals = doubles(4, 3, 2, devices=devices), doubles(2, 3, devices=devices)
    statistics, zeros = statistics_of(input), torch.zeros_like(input)
    found = []
    for grad in (None, zeros):
        if input.is_cuda:
            count = torch.full((1,), 8, dtype=torch.int32, device=input.device)
            found.append(normalization.fused_input_gradient(grad, input, statistics, None, totals, count, False))
        else:
            linear = normalization.linear_gradient(statistics, totals, statistics.invstd, 8, input.dtype)
            found.append(normalization.input_gradient(grad, input, statistics.invstd, linear))
    assert_equal(*found)
    assert found[1].abs().max() > 0


def assert_cancels(affine, mean, value):
    """Check that a slope and an offset take the mean to `value`, up to half of the last digit of the offset."""
    slope, offset = (vector.double() for vector in affine)
    assert affine.slope.dtype == affine.offset.dtype == torch.float32
    assert ((slope * mean + offset - value).abs() <= 2**-24 * offset.abs() + 1e-12).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_offsets_cancel_the_mean_with_the_slope_as_it_is_rounded(weighted):
    mean, invstd, bias, totals = 1e3 * doubles(500), doubles(500).exp(), doubles(500), 100 * doubles(2, 500)
    weight = doubles(500) if weighted else None
    statistics = normalization.Statistics(mean, invstd)
    forward = normalization.make_affine(statistics, torch.float32, weight, bias if weighted else None)
    assert_cancels(forward, mean, bias if weighted else 0)
    backward = normalization.linear_gradient(statistics, totals, invstd, 8, torch.float32)
    assert_cancels(backward, mean, -totals[0] * invstd / 8)


def test_empty_input_passes_through_every_function():
    input = torch.zeros(0, 3, 2)
    statistics = statistics_of(torch.randn(4, 3, 2))
    output = torch.empty(0, 3, 2)
    normalization.normalize(input, statistics, None, None, None, output)
    assert not torch.stack(normalization.gradient_sums(input, input, *statistics)).any()
    linear = normalization.linear_gradient(statistics, torch.ones(2, 3), statistics.invstd, 8, input.dtype)
    assert normalization.input_gradient(input, input, statistics.invstd, linear).shape == input.shape
