"""The arithmetic of each kind of device, one operation at a time, against plain formulas and autograd."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from conftest import device_lists
from helpers import as_devices, assert_equal, assert_same_parts, assert_same_step, doubles, randomize, twins
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from sync_batchnorm import SynchronizedBatchNorm1d, execute_replication_callbacks
from sync_batchnorm.backends import BACKENDS, GENERAL, backend_for, base, cpu, cuda
from sync_batchnorm.backends.base import Backend, Backward, BatchStatistics, ReplicaGradients, ReplicaStatistics
from sync_batchnorm.backends.cpu import Cpu
from sync_batchnorm.backends.general import General
from sync_batchnorm.backends.places import Streams, current_place

SHAPES = [(5, 3), (1, 3), (4, 3, 2), (2, 3, 4, 5), (2, 3, 2, 3, 4), (3, 1, 2, 2)]
FORMATS = [torch.contiguous_format, torch.channels_last]
DEVICE = device_lists(1) + [param for param in device_lists(2) if param.id.startswith("cuda0")]


def plain_moments(input):
    """Return mean and biased variance ``(2, C)`` by their definition, in float64."""
    elements = input.double().movedim(1, 0).flatten(1)
    return torch.stack((elements.mean(1), elements.var(1, correction=0)))


def part_of(input, backend=None):
    """Return the mean and variance of `input` as a replica sends them."""
    backend = backend or backend_for(input.device)
    return backend.statistics(input, 0.0, False)[0] if input.numel() else backend.nothing(input)


def merged(parts, backend=None):
    """Return mean and variance ``(2, C)`` of all parts, as the master merges them."""
    batch = (backend or backend_for(parts[0].mean.device)).merge(parts, 0.0, None)
    return torch.stack((batch.mean, batch.var))


def moments_of(input, exact=False):
    """Return the moments of `input` as ``(2, C)``; on the CPU the fast or the exact ones."""
    if input.is_cuda:
        return merged([part_of(input)])
    found, memory = cpu.fast_moments(input)
    if exact:
        found = cpu.exact_moments(input, found[0], memory)
    return merged([ReplicaStatistics(*found, False, base.channel_count(input.shape))])


class NoFloat64(TorchFunctionMode):
    """Refuses what some kinds of devices do not have."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.dtype != torch.float64, func
        return result


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_operators_of_torch_merge_float32_in_float64(backend):
    input = torch.randn(6, 3, 2)
    parts = [part_of(part, GENERAL) for part in input.split([1, 2, 3])]
    assert {part.mean.dtype for part in parts} == {torch.float32}
    found = merged(parts, backend)
    assert found.dtype == torch.float64
    assert_equal(found, plain_moments(input), tolerance=1e-6)


@pytest.mark.parametrize("shares", [None, [0.5, 0.25, 0.125, 0.125]], ids=["equal", "unequal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_merged_moments_have_the_dtype_of_the_parts(dtype, shares):
    mean, var = doubles(4, 3), doubles(4, 3).exp()
    weights = torch.full((4, 1), 0.25).double() if shares is None else torch.tensor(shares).double()[:, None]
    expected = (mean * weights).sum(0), ((var + mean.square()) * weights).sum(0)
    expected = expected[0], expected[1] - expected[0].square()
    given = None if shares is None else weights.to(dtype)
    found = base.merge_moments(mean.to(dtype), var.to(dtype), given)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        assert_equal(actual.double(), wanted, tolerance=1e-10 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), *[(low, torch.float32) for low in (torch.float32, torch.float16, torch.bfloat16)]],
    ids=str,
)
def test_statistics_have_the_digits_of_float32_at_least(dtype, expected):
    assert base.statistics_dtype(dtype) == expected


@pytest.mark.parametrize(
    ("shape", "count"), [((5, 3), 5), ((4, 3, 2), 8), ((2, 3, 0, 7), 0), ((0, 3), 0), ((2, 0, 4, 5), 40)], ids=str
)
def test_count_is_the_number_of_elements_of_a_channel(shape, count):
    assert base.channel_count(torch.Size(shape)) == count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vectors_broadcast_over_channels(shape):
    vector = torch.arange(float(shape[1]))
    spread = torch.zeros(shape) + base.per_channel(vector, torch.zeros(shape))
    assert torch.equal(spread.mean(base.reduced_dims(spread)), vector)


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


def test_one_channel_of_large_mean_takes_no_digits_from_the_others():
    input = doubles(4, 8, 20, 20).float()
    input[:, 3] += 1e4
    fast, expected = moments_of(input), plain_moments(input)
    assert not cpu.precise(*fast, eps=1e-5)
    exact = moments_of(input, exact=True)
    assert float(((exact - expected)[1] / expected[1]).abs().max()) <= 1e-6


PRECISE = {
    "sixteen-deviations": (True, [0.0, 15.9], [1.0, 1.0]),
    "seventeen-deviations": (False, [0.0, 17.0], [1.0, 1.0]),
    "constant-that-eps-covers": (True, [0.0, 0.04], [1.0, 0.0]),
    "constant": (False, [0.0, 1.0], [1.0, 0.0]),
    "nan-mean": (False, [0.0, float("nan")], [1.0, 1.0]),
    "nan-variance": (False, [0.0, 0.0], [1.0, float("nan")]),
    "infinite-variance": (False, [0.0, 0.0], [1.0, float("inf")]),
}


@pytest.mark.parametrize("kind", PRECISE)
def test_statistics_are_trusted_unless_they_may_have_lost_digits(kind):
    precise, mean, var = PRECISE[kind]
    assert cpu.precise(torch.tensor(mean), torch.tensor(var), eps=1e-5) == precise


def test_statistics_that_are_precise_in_all_parts_are_precise_when_they_are_merged():
    random = torch.Generator().manual_seed(0)
    for _ in range(500):
        numbers = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=random) * 4
        mean, var = numbers[0].exp() * numbers[0].sign(), numbers[1].exp()
        largest = (mean.square() / (var + 1e-5)).max()
        parts = [
            ReplicaStatistics(m * (256 / largest).sqrt(), v, False, 3 + i)
            for i, (m, v) in enumerate(zip(mean, var, strict=True))
        ]
        assert all(cpu.precise(part.mean, part.second, 1.01e-5) for part in parts)
        assert cpu.precise(*merged(parts), eps=1.01e-5)


def test_local_moments_of_nothing_are_zero():
    found = part_of(torch.zeros(0, 3, 2))
    assert found.elements == 0
    assert torch.equal(merged([found]), torch.zeros(2, 3, dtype=torch.float64))


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
@pytest.mark.parametrize("backend", [Cpu(), GENERAL], ids=["cpu", "general"])
def test_merged_moments_are_those_of_the_whole(backend, sizes, memory_format):
    input = (doubles(9, 3, 2, 4) * 5 + 100).contiguous(memory_format=memory_format)
    parts = [part_of(part, backend) for part in input.split(list(sizes))]
    assert_equal(merged(parts, backend), plain_moments(input))


def test_parts_count_by_their_elements():
    parts = [doubles(2, 3, 5), doubles(1, 3, 7), doubles(4, 3)[..., None]]
    found = merged([part_of(part) for part in parts])
    whole = torch.cat([part.movedim(1, 0).flatten(1) for part in parts], 1)
    assert_equal(found, plain_moments(whole.T))


def test_parts_without_elements_change_no_digit():
    large = ReplicaStatistics(torch.full((1, 3), 1e160, dtype=torch.float64), doubles(1, 3).abs(), False, 4)
    nothing = part_of(doubles(0, 3, 2))
    assert torch.equal(merged([nothing, large, nothing, large]), merged([large, large]))


def test_constants_of_another_kind_of_tensor_are_not_kept():
    place, counts = current_place(torch.device("cpu")), (3, 4, 5)
    with FakeTensorMode():
        cuda._counts(place, counts, torch.float32)
    (found,) = cuda._counts(place, counts, torch.float32)
    assert found.tolist() == [3.0, 4.0, 5.0]
    assert cuda._counts(place, counts, torch.float32)[0] is found


def test_constants_made_in_inference_mode_may_be_saved_by_autograd():
    with torch.inference_mode():
        (found,) = cuda._counts(current_place(torch.device("cpu")), (7, 8), torch.float64)
    assert not found.is_inference()


def test_constants_are_forgotten_when_they_are_many():
    made = []

    @base.cached_constants
    def make(number):
        made.append(number)
        return (torch.tensor(number),)

    for number in range(3000):
        assert make(number)[0] == number
        make(number)
    assert made == list(range(3000))
    make(0)
    assert made[3000:] == [0]


EPS = 0.1


def statistics_of(input, backend=None):
    """Return mean and invstd as the master makes them for all replicas."""
    mean, var = moments_of(input)
    pair = torch.stack((mean, (var + EPS).rsqrt()))
    backend = backend or backend_for(input.device)
    return (pair if backend.pair_dtype is not None else pair.to(base.statistics_dtype(input.dtype))).unbind()


def normalized(input, weight, bias, backend=None):
    backend, output = backend or backend_for(input.device), base.memory_for_output(input)
    normalizer = backend.normalizer(statistics_of(input, backend), input.dtype, weight, bias)
    backend.normalize(input, normalizer, weight, bias, output)
    return output


def backward_of(replicas, statistics, count, own_weights=False):
    """Return the backward of `replicas`, all at the place of the master, whose mean and invstd are `statistics`."""
    place = replicas[0].place
    batch = BatchStatistics(statistics[0], None, statistics[1], count=count, master=place, at={place: statistics})
    return Backward(replicas, batch, batch.at, [], Streams([place]), own_weights, None)


NAMES = ("input", "weight", "bias")


def replica_of(grad, input, weight):
    return ReplicaGradients(current_place(input.device), grad, input, weight, True, True)


PARAMETERS = {"both": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}


def parameters(kind, channels, device):
    made = [torch.randn(channels, dtype=torch.float64, device=device) for _ in range(2)]
    return [parameter if present else None for parameter, present in zip(made, PARAMETERS[kind], strict=True)]


# Of the device, or the one for all devices.
BOTH = pytest.mark.parametrize("general", [False, True], ids=["own", "general"])


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (2, 3, 4, 5)], ids=str)
@BOTH
@pytest.mark.parametrize("devices", DEVICE)
def test_normalization_is_that_of_torch(devices, general, shape, kind):
    input = doubles(*shape, devices=devices)
    weight, bias = parameters(kind, 3, input.device)
    expected = F.batch_norm(input, None, None, weight, bias, True, 0.0, EPS)
    assert_equal(normalized(input, weight, bias, GENERAL if general else None), expected)


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
        found = base.memory_for_output(input)
        assert found.stride() == expected.stride(), (sizes, strides)
        formats.add(expected.is_contiguous())
    assert formats == {True, False}


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["one-weight", "own-weights"])
@BOTH
@pytest.mark.parametrize("devices", DEVICE)
def test_gradients_are_those_of_autograd(devices, general, weighted, kind):
    input, grad = (doubles(4, 3, 2, 5, devices=devices) for _ in range(2))
    weight, bias = parameters(kind, 3, input.device)
    leaves = [tensor.requires_grad_() for tensor in (input, weight, bias) if tensor is not None]
    output = F.batch_norm(input, None, None, weight, bias, True, 0.0, EPS)
    expected = iter(torch.autograd.grad(output, leaves, grad))
    backend = GENERAL if general else backend_for(input.device)
    with torch.no_grad():
        replica = replica_of(grad, input.detach(), weight)
        backend.gradients(backward_of([replica], statistics_of(input, backend), 40, weighted))
    for name, leaf in zip(NAMES, (input, weight, bias), strict=True):
        if leaf is not None:
            assert_equal(getattr(replica, f"grad_{name}"), next(expected))


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
    normalized = (input - base.per_channel(mean, input)) * base.per_channel(invstd, input)
    total, dot = cpu.gradient_sums(grad, input, mean, invstd)
    assert_equal(total, grad.sum((0, 2, 3)))
    assert_equal(dot, (grad * normalized).sum((0, 2, 3)))


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_what_float32_rounds_to(dtype, memory_format):
    input, grad = (doubles(4, 3, 5, 6).to(dtype, memory_format=memory_format) for _ in range(2))
    terms = cpu.CommonTerms(cpu.Affine(torch.randn(3), torch.randn(3)), torch.rand(3))
    for upstream in (grad, None):
        found = []
        for kind in (torch.float32, dtype):
            replica = replica_of(None if upstream is None else upstream.to(kind), input.to(kind), None)
            backward = backward_of([replica], statistics_of(input), 120)
            found.append(Cpu().input_gradient(replica, terms, backward))
        assert torch.equal(found[1], found[0].to(dtype))


@BOTH
@pytest.mark.parametrize("devices", DEVICE)
def test_input_gradient_without_an_upstream_gradient_takes_it_as_zero(devices, general):
    input, totals = doubles(4, 3, 2, devices=devices), doubles(2, 3, devices=devices)
    backend = GENERAL if general else backend_for(input.device)
    statistics, found = statistics_of(input, backend), []
    for grad in (None, torch.zeros_like(input)):
        replica = replica_of(grad, input, None)
        backward = backward_of([replica], statistics, 8)
        if grad is not None:
            backend.sums(backward)
        found.append(backend.input_gradient(replica, backend.common_terms(totals, backward), backward))
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
    backend = Cpu()
    forward = backend.normalizer((mean, invstd), torch.float32, weight, bias if weighted else None)
    assert_cancels(forward, mean, bias if weighted else 0)
    for own_weights in (True, False):
        replica = replica_of(None, torch.zeros(1, 500), weight)
        linear, factor = backend.common_terms(totals, backward_of([replica], (mean, invstd), 8, own_weights))
        assert (factor is None) == own_weights
        assert_cancels(linear, mean, -totals[0] * (invstd if factor is None else factor) / 8)


@BOTH
@pytest.mark.parametrize("devices", DEVICE)
def test_empty_input_passes_through_every_function(devices, general):
    full, input = doubles(4, 3, 2, devices=devices), doubles(0, 3, 2, devices=devices)
    backend = GENERAL if general else backend_for(input.device)
    replica = replica_of(input, input, None)
    backward = backward_of([replica], statistics_of(full, backend), 8)
    assert not backend.sums(backward).any()
    assert not replica.grad_weight.any()
    assert not replica.grad_bias.any()
    terms = backend.common_terms(torch.ones(2, 3, dtype=torch.float64, device=input.device), backward)
    assert backend.input_gradient(replica, terms, backward).shape == input.shape


def test_device_without_operators_and_without_float64_normalizes_and_differentiates(monkeypatch):
    for name in vars(torch):
        if name.startswith(("batch_norm", "native_batch_norm", "native_group_norm")):
            monkeypatch.setattr(torch, name, None)
    for name in ("batch_norm_backward", "_normalize_into"):
        monkeypatch.setattr(cpu, name, None)
    input, grad, weight, bias = torch.randn(6, 3, 4), torch.randn(6, 3, 4), torch.randn(3), torch.randn(3)
    parts = [part_of(part, GENERAL) for part in input.split([2, 4])]
    with pytest.raises(AssertionError), NoFloat64():
        merged(parts, Cpu())
    with NoFloat64():
        mean, var = merged(parts, GENERAL)
        statistics = mean, (var + EPS).rsqrt()
        output = torch.empty_like(input)
        GENERAL.normalize(input, GENERAL.normalizer(statistics, input.dtype, weight, bias), weight, bias, output)
        replica = replica_of(grad, input, weight)
        GENERAL.gradients(backward_of([replica], statistics, 24))
    monkeypatch.undo()
    leaves = [tensor.double().requires_grad_() for tensor in (input, weight, bias)]
    expected = F.batch_norm(leaves[0], None, None, *leaves[1:], True, 0.0, EPS)
    assert_equal(output.double(), expected, tolerance=1e-5)
    for name, wanted in zip(NAMES, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert_equal(getattr(replica, f"grad_{name}").double(), wanted, name, tolerance=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("momentum", [0.3, None], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4), (3, 0, 3)], ids=str)
def test_inverse_standard_deviations_are_merged_with_the_running_statistics(sizes, momentum):
    backend, input = BACKENDS["cuda"], torch.randn(6, 3, 4, device="cuda:0")
    parts = [
        backend.statistics(part, EPS, True)[0] if len(part) else backend.nothing(part)
        for part in input.split(list(sizes))
    ]
    assert all(part.is_invstd for part in parts if part.elements)
    buffers = [torch.zeros(3, device="cuda:0"), torch.ones(3, device="cuda:0"), torch.tensor(4, device="cuda:0")]
    expected = [buffer.clone() for buffer in buffers]
    batch = backend.merge(parts, EPS, base.RunningStatistics(*buffers, momentum))
    mean, var = plain_moments(input)
    assert_equal(batch.mean.double(), mean, tolerance=1e-6)
    assert_equal(batch.invstd.double(), (var + EPS).rsqrt(), tolerance=1e-6)
    assert batch.updated == (momentum is not None)  # the operator knows no cumulative average
    if batch.updated:
        F.batch_norm(input, *expected[:2], None, None, True, momentum)
        expected[2] += 1
    for found, wanted in zip(buffers, expected, strict=True):
        assert_equal(found, wanted)


# A new kind of device.


class Plain(Backend):
    """A kind of device that nobody knows: the formulas of batch normalization, with no arithmetic but its own."""

    def statistics(self, input, eps, adds_eps):
        values = input.transpose(0, 1).flatten(1)
        mean = values.mean(1, keepdim=True)
        var = (values - mean).square().mean(1)
        return ReplicaStatistics(mean.view(1, -1), var[None], False, values.shape[1]), None

    def normalize(self, input, pair, weight, bias, out):
        mean, invstd = (base.per_channel(vector, input) for vector in pair)
        out.copy_((input - mean) * invstd)
        if weight is not None:
            out.mul_(base.per_channel(weight, input))
        if bias is not None:
            out.add_(base.per_channel(bias, input))

    def gradient_sums(self, replica, backward):
        mean, invstd = backward.at[replica.place]
        dims, centered = base.reduced_dims(replica.input), replica.input - base.per_channel(mean, replica.input)
        sum_dy, sum_dy_xmu = replica.grad_output.sum(dims), (replica.grad_output * centered).sum(dims)
        replica.grad_weight, replica.grad_bias = sum_dy_xmu * invstd, sum_dy
        return tuple(backward.scaled_by_weight(vector, replica.weight) for vector in (sum_dy, sum_dy_xmu))

    def common_terms(self, totals, backward):
        return backward.without_clamped(totals) / backward.batch.count

    def input_gradient(self, replica, terms, backward):
        input, dy, weight = replica.input, replica.grad_output, replica.weight
        mean, invstd = (base.per_channel(vector, input) for vector in backward.at[replica.place])
        factor = 1 if weight is None else base.per_channel(weight, input)
        own, common = (factor, 1) if backward.own_weights else (1, factor)
        mean_dy, mean_dy_xmu = (base.per_channel(vector, input) for vector in terms)
        direct = torch.zeros_like(input) if dy is None else dy * own
        return common * invstd * (direct - mean_dy - (input - mean) * invstd**2 * mean_dy_xmu)


OPERATIONS = {name for name, operation in vars(Backend).items() if callable(operation)}
GRADIENTS = {"gradients", "sums", "gradient_sums", "common_terms", "again", "input_gradient"}


def noting(backend, called):
    """Return `backend`, whose operations note their names in `called`."""
    for name in OPERATIONS:
        operation = getattr(backend, name)
        setattr(backend, name, lambda *args, name=name, operation=operation: called.append(name) or operation(*args))
    return backend


@pytest.fixture
def new_kind(monkeypatch):
    """Give a device a kind of its own, and let all others fail; return what is called of it."""
    called = []

    def register(device):
        monkeypatch.setattr("sync_batchnorm.backends.BACKENDS", {torch.device(device).type: noting(Plain(), called)})
        for name in OPERATIONS:
            monkeypatch.setattr(GENERAL, name, None, raising=False)
        return called

    return register


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"eps": 0.3, "momentum": None}], ids=str)
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_new_kind_of_device_is_one_class_and_one_row(devices, options, new_kind):
    called = new_kind(as_devices(devices)[0])
    plain, parallel = twins(nn.BatchNorm2d(3, **options).double(), devices)
    for size in (7, 6):
        assert_same_step(plain, parallel, doubles(size, 3, 4, 5, devices=devices))
    assert set(called) == OPERATIONS - {"nothing"}
    assert called.count("statistics") == called.count("input_gradient") == 2 * len(devices)
    assert called.count("merge") == called.count("common_terms") == 2
    parts = [doubles(size, 3, 2, 2, devices=devices) for size in (4, 0, 3)[: len(devices)]]
    assert_same_parts(plain, parallel, parts)
    assert set(called) == OPERATIONS


@pytest.mark.parametrize("mode", ["plus", "clamp"])
def test_new_kind_of_device_needs_to_know_nothing_of_eps_and_own_weights(mode, new_kind):
    new_kind("cpu")
    layers = [randomize(SynchronizedBatchNorm1d(3, eps=0.5, eps_mode=mode).double()) for _ in range(2)]
    execute_replication_callbacks(layers)
    data, grad = (doubles(6, 3) * torch.tensor([0.1, 0.7, 2.0]) for _ in range(2))
    input = data.clone().requires_grad_()
    with ThreadPoolExecutor(2) as threads:
        output = torch.cat([*threads.map(lambda layer, part: layer(part), layers, input.chunk(2))])
    leaf, var = data.clone().requires_grad_(), data.var(0, correction=0)
    assert 0 < (var < 0.5).sum() < 3
    var = leaf.var(0, correction=0)
    normalized = (leaf - leaf.mean(0)) * (var + 0.5 if mode == "plus" else var.clamp(min=0.5)).rsqrt()
    halves = zip(normalized.chunk(2), layers, strict=True)
    expected = torch.cat([half * layer.weight + layer.bias for half, layer in halves])
    assert_equal(output, expected)
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    wanted = torch.autograd.grad(expected, [leaf, *parameters], grad)
    for found, gradient in zip(torch.autograd.grad(output, [input, *parameters], grad), wanted, strict=True):
        assert_equal(found, gradient)


@pytest.mark.parametrize("devices", device_lists(2))
def test_new_kind_of_device_has_gradients_of_gradients_without_a_word_of_them(devices, monkeypatch):
    called, of_all = [], []
    device = as_devices(devices)[0]
    monkeypatch.setattr("sync_batchnorm.backends.BACKENDS", {device.type: noting(Plain(), called)})
    monkeypatch.setattr("sync_batchnorm.autograd.GENERAL", noting(General(), of_all))
    plain, parallel = twins(nn.Sequential(nn.BatchNorm2d(3), nn.Tanh()).double(), devices)
    data, grad = doubles(5, 3, 2, 4, devices=devices), doubles(5, 3, 2, 4, devices=devices)
    results = []
    for model in (plain, parallel):
        input = data.clone().requires_grad_()
        output = model(input)
        parameters = [*getattr(model, "module", model).parameters()]
        first = torch.autograd.grad(output, [input, *parameters], grad, create_graph=True)
        penalty = sum(tensor.square().sum() for tensor in first)
        results.append([output, *first, *torch.autograd.grad(penalty, [input, parameters[0]])])
    for found, expected in zip(results[1], results[0], strict=True):
        assert_equal(found, expected)
    assert set(called) == {"statistics", "merge", "normalizer", "normalize"}  # It has no formulas to differentiate.
    assert set(of_all) == GRADIENTS
