"""What trainings do around batch norm: low precision, memory formats, frozen layers, losses inside, other formulas."""

import copy
import io

import pytest
import torch
from conftest import device_lists, first_in_smoke, slow, usual_kernels
from helpers import (
    FORMATS,
    TOLERANCES,
    Net,
    assert_equal,
    assert_same_refusal,
    assert_same_results,
    assert_same_state,
    assert_same_step,
    doubles,
    outcome,
    twins,
)
from simulated_gpus import is_simulated
from torch import nn

pytestmark = usual_kernels

LOW = [torch.float16, torch.bfloat16]


# Low precision.


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("cast_module", [True, False], ids=["module-too", "input-only"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("devices", device_lists(2, slow=[3]))
def test_low_precision_has_the_types_of_torch_and_the_values_of_float32(devices, kind, dtype, cast_module):
    plain, parallel = twins(nn.BatchNorm2d(5).to(dtype if cast_module else torch.float32), devices)
    exact = copy.deepcopy(plain).float()
    data = (torch.randn(5, 5, 36, 7, device=devices[0]) * 40 + 300).to(dtype, memory_format=FORMATS[kind])
    assert data[0].float().square().sum() > 65504  # beyond the range of float16
    grad = torch.randn_like(data)
    results = []
    for model, used in ((exact, torch.float32), (plain, dtype), (parallel, dtype)):
        input = data.to(used, copy=True).requires_grad_()
        output = model(input)
        output.backward(grad.to(used))
        assert output.is_contiguous(memory_format=FORMATS[kind])
        _, _, *statistics, _ = model.state_dict().values()
        results.append([output, input.grad, *(parameter.grad for parameter in model.parameters()), *statistics])
    # For a contiguous input, the kernel of a real GPU rounds the sums of parts, which become the parameters' gradients.
    rounded = range(4 if kind == "contiguous" and data.is_cuda and not is_simulated() else 2)
    for i, (expected, of_torch, ours) in enumerate(zip(*results, strict=True)):
        assert ours.dtype == of_torch.dtype
        rounds_to = dtype if cast_module or i in rounded else torch.float32
        assert_equal(ours.float(), expected, tolerance=TOLERANCES[rounds_to])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_autocast_around_the_wrapper_is_autocast_around_the_net(devices, dtype):
    first = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    net = nn.Sequential(*first, nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2))
    plain, parallel = twins(net, devices)
    data = torch.randn(5, 3, 7, 6, device=devices[0])
    device_type = torch.device(devices[0]).type
    with torch.autocast(device_type, dtype=dtype):
        expected, output = plain(data), parallel(data)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    output.backward(grad)
    assert output.dtype == expected.dtype == dtype
    # The convolutions round to `dtype`: what reaches a parameter differs by some of its last digits.
    assert_equal(output, expected, "output", 2 * TOLERANCES[dtype])
    for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        assert_equal(ours.grad, theirs.grad, "gradient", 5 * TOLERANCES[dtype])
    for ours, theirs in zip(parallel.buffers(), plain.buffers(), strict=True):
        assert_equal(ours, theirs, "buffer", 2 * TOLERANCES[dtype])


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, *slow(torch.float16)], ids=str)
@pytest.mark.parametrize("parameters", DTYPES, ids=str)
@pytest.mark.parametrize("input", DTYPES, ids=str)
def test_mixes_of_types_are_taken_and_refused_as_torch_does(input, parameters, autocast):
    plain, parallel = twins(nn.BatchNorm1d(3).to(parameters), ["cpu"] * 3)
    data, grad = torch.randn(6, 3).to(input), torch.randn(6, 3).to(input)
    if outcome(lambda: plain(data)) is not None:
        assert_same_refusal(plain, parallel, data)
        assert parallel.module.num_batches_tracked == 0
        assert parallel(data.to(parameters)).dtype == parameters  # and nothing is left of it
        return
    inputs = [data.clone().requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        expected, output = plain(inputs[0]), parallel(inputs[1])
    (wanted,) = torch.autograd.grad(expected, inputs[0], grad)
    assert_equal(output, expected)
    for create_graph in (True, False):
        (found,) = torch.autograd.grad(output, inputs[1], grad, retain_graph=True, create_graph=create_graph)
        assert_equal(found, wanted)


# Memory formats.


SHAPES = {"even": (6, 4, 3, 5), "odd": (4, 65, 6, 5), "pixels": (4, 9, 1, 1)}
SHAPES |= {"one-channel": (4, 1, 9, 9), "single-images": (2, 5, 4, 6), "volumes": (4, 5, 3, 4, 2)}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("of_grad", FORMATS)
@pytest.mark.parametrize("of_input", FORMATS)
@pytest.mark.parametrize("devices", device_lists(2, slow=[1]))
def test_formats_are_kept_and_change_no_value(devices, of_input, of_grad, shape):
    layer = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm3d
    formats = {"contiguous": torch.contiguous_format, "channels_last": CHANNELS_LAST[len(shape)]}
    plain, parallel = twins(layer(shape[1]).double(), devices)
    input = doubles(*shape, devices=devices).contiguous(memory_format=formats[of_input]).requires_grad_()
    grad = doubles(*shape, devices=devices).contiguous(memory_format=formats[of_grad])
    output, kept = parallel(input), []
    input.register_hook(lambda grad: kept.append(grad.is_contiguous(memory_format=formats[of_input])))
    output.backward(grad)
    assert output.is_contiguous(memory_format=formats[of_input])
    assert kept == [True]
    reference = input.detach().contiguous().requires_grad_()
    expected = plain(reference)
    expected.backward(grad.contiguous())
    assert_equal(output, expected)
    assert_equal(input.grad, reference.grad)
    assert_same_state(parallel, plain)


# Models that do more than one thing in their forward.


def freezing(net, input):
    net.frozen.eval()
    return net.bn(torch.tanh(net.frozen(net.conv(input))))


def probing(net, input):
    """Trains on features that are computed in inference mode."""
    with torch.inference_mode():
        features = net.conv(input)
    return net.bn(features)


@pytest.mark.parametrize("forward", [freezing, probing])
@pytest.mark.parametrize("devices", device_lists(1, 3))
def test_layers_that_are_frozen_or_follow_features_of_inference_mode_train_as_on_one_device(devices, forward):
    net = Net(forward, conv=nn.Conv2d(3, 4, 1), frozen=nn.BatchNorm2d(4), bn=nn.BatchNorm2d(4, affine=False))
    net.conv.requires_grad_(False)
    head = nn.Sequential(net, nn.Conv2d(4, 2, 1))
    plain, parallel = twins(head.double(), devices)
    data, grad = doubles(6, 3, 4, 3, devices=devices), doubles(6, 2, 4, 3, devices=devices)

    def step(model):
        output = model(data)
        output.backward(grad)
        return [output]

    for _ in range(2):
        assert_same_results(plain.train(), parallel.train(), step)
    assert plain[0].frozen.num_batches_tracked == 0


def trains_and_evaluates(net, input):
    """Calls one layer in both modes in one forward: a batch to learn from, and one to look at; returns a loss, too."""
    outputs = torch.cat((net.bn.train()(input), net.bn.eval()(input)), 1)
    return outputs, ((net.bn.train()(input) - 1) ** 3).sum()


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0, but all input tensors were scalars")
@pytest.mark.parametrize("devices", device_lists(3))
def test_losses_of_replicas_add_up_and_calls_in_eval_mode_see_the_buffers_from_before_the_forward(devices):
    plain, parallel = twins(Net(trains_and_evaluates, bn=nn.BatchNorm2d(3, momentum=0.3)).double(), devices)
    for _ in range(2):
        before = copy.deepcopy(plain.bn).eval()
        data = doubles(7, 3, 4, 5, devices=devices)
        (expected, loss), (output, losses) = plain(data), parallel(data)
        expected = torch.cat((expected[:, :3], torch.cat((expected[:3, 3:], before(data[3:])))), 1)  # of replica 0 only
        assert_equal(output, expected)
        assert losses.shape == (len(devices),)
        assert_equal(losses.sum(), loss)
        losses.sum().backward()
        loss.backward()
        assert_same_state(parallel, plain)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_defaults_for_new_tensors_decide_nothing(kind, dtype):
    def surrounded(net, input):
        with torch.device(net.device):
            return net.bn(input)

    sizes = (4, 3, 7, 5) if kind == "contiguous" else (4, 3, 5, 9)
    data, grad = (torch.randn(sizes).to(dtype).contiguous(memory_format=FORMATS[kind]) for _ in range(2))
    _, parallel = twins(Net(surrounded, bn=nn.BatchNorm2d(3), device="cpu"), ["cpu"] * 2)
    results = []
    for default, device in ((torch.float64, "meta"), (torch.float32, "cpu")):
        net = copy.deepcopy(parallel)
        net.module.device = device
        input = data.clone(memory_format=torch.preserve_format).requires_grad_()
        torch.set_default_dtype(default)
        try:
            output = net(input)
            with torch.device(device):
                output.backward(grad)
        finally:
            torch.set_default_dtype(torch.float32)
        results.append([output, input.grad, *(p.grad for p in net.parameters()), *net.buffers()])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


# Strides of sizes of one, which say nothing, and which operators of torch read differently.

ONES = {
    "columns": lambda h: h.transpose(1, 2).unsqueeze(-1),  # (N, C, L, 1), strides (L * C, 1, C, 1)
    "volumes": lambda h: h.transpose(1, 2)[..., None, None],
    "rows": lambda h: h.transpose(1, 2)[:, :, None],
}


def transposing(net, input):
    """Normalizes rows as images with a size of one, and goes on with them as rows."""
    return net.linear(net.bn(ONES[net.view](input)).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("view", ONES)
@pytest.mark.parametrize("size", [7, 700], ids=["small", "large"])
def test_strides_of_sizes_of_one_change_no_number(devices, size, view):
    norm = nn.BatchNorm3d if view == "volumes" else nn.BatchNorm2d
    net = Net(transposing, bn=norm(6), linear=nn.Linear(6, 4), view=view)
    plain, parallel = twins(net.double(), devices)

    def by_rows(net, input):  # The operator of torch makes wrong sums of such strides, as of 2.13.0.
        rows = input.reshape(-1, 6, *[1] * (3 if view == "volumes" else 2))
        return net.linear(net.bn(rows).view(6, size, 6))

    plain.function = by_rows
    assert_same_step(plain, parallel, doubles(6, size, 6, devices=devices))


# A run that is resumed from its state dicts computes, bit for bit, what the uninterrupted one does.


UNUSUAL = {
    "usual": 1.0,
    "infinity": torch.tensor([1.0, torch.inf, 1.0, 1.0, 1.0]).view(-1, 1, 1, 1),
    "nan": torch.nan,
    "constant": 0.0,
    "overflow": 1e30,
    "large in one replica": torch.tensor([1e4, 1.0, 1.0, 1.0, 1.0]).view(-1, 1, 1, 1),
}


def train(parallel, optimizer, batch, grad):
    """Train with `batch`, and return all that the step computes. As a gradient scaler does, skip what overflows."""
    optimizer.zero_grad()
    input = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    output = parallel(input)
    output.backward(grad)
    grads = [parameter.grad for parameter in parallel.parameters()]
    if all(bool(grad.isfinite().all()) for grad in grads):
        optimizer.step()
    return [output.detach(), input.grad, *grads, *(tensor.clone() for tensor in parallel.state_dict().values())]


@pytest.mark.parametrize("kind", ["contiguous", *slow("channels_last")])
@pytest.mark.parametrize("unusual", first_in_smoke(UNUSUAL))
def test_run_that_is_resumed_after_an_unusual_batch_is_the_uninterrupted_one(unusual, kind):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    pairs = [(torch.randn(5, 4, 9, 9) + 0.5, torch.randn(5, 6, 7, 7)) for _ in range(4)]
    pairs[1] = (pairs[1][0] * UNUSUAL[unusual], pairs[1][1])
    pairs = [[tensor.contiguous(memory_format=FORMATS[kind]) for tensor in pair] for pair in pairs]
    parallels, file = [twins(model.to(memory_format=FORMATS[kind]), ["cpu"] * 2)[1] for _ in range(2)], io.BytesIO()
    runs = [(parallel, torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)) for parallel in parallels]
    for pair in pairs[:2]:
        train(*runs[0], *pair)
    torch.save([part.state_dict() for part in runs[0]], file)
    file.seek(0)
    for part, state in zip(runs[1], torch.load(file), strict=True):
        part.load_state_dict(state)
    for pair in pairs[2:]:
        for expected, actual in zip(train(*runs[0], *pair), train(*runs[1], *pair), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
