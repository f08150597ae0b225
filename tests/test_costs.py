"""What a layer costs, counted: bytes that it saves and allocates, exchanges, and the tensors that replicas send."""

import pytest
import torch
from conftest import FREE_THREADED, KERNELS, device_lists
from helpers import as_devices, run_parts, saved_bytes, twins
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sync_batchnorm import moments, normalization
from sync_batchnorm.coordinator import Coordinator

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
on_every_kernel = pytest.mark.parametrize("kernel", list(KERNELS), indirect=True)
SHAPES = [(4, 8, 4, 4), (8, 512, 7, 7), (4, 64, 28, 28)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_every_kernel
@pytest.mark.usefixtures("kernel")
def test_layer_saves_no_more_bytes_than_that_of_torch(shape, kind):
    plain, parallel = twins(nn.BatchNorm2d(shape[1]), ["cpu"] * 2)
    data = torch.randn(shape).contiguous(memory_format=FORMATS[kind]).requires_grad_()
    expected = saved_bytes(torch.cat([plain(part) for part in data.chunk(2)]))
    input = data.numel() * data.element_size()
    assert input <= saved_bytes(parallel(data)) <= expected


@pytest.mark.parametrize("kernel", ["separate"], indirect=True)
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("devices", device_lists(2))
def test_only_inputs_that_are_asked_for_get_a_gradient(devices, monkeypatch):
    _, parallel = twins(nn.BatchNorm1d(3), devices)
    parts = [torch.randn(4, 3, device=device, requires_grad=True) for device in as_devices(devices)]
    outputs = run_parts(parallel, parts)
    name = "input_gradient" if devices[0] == "cpu" else "fused_input_gradient"
    made, gradient = [], getattr(normalization, name)
    monkeypatch.setattr(normalization, name, lambda *args: made.append(args) or gradient(*args))
    torch.autograd.grad(outputs, parts[1], [torch.randn_like(output) for output in outputs])
    assert len(made) == 1


one_mode_at_a_time = pytest.mark.skipif(
    FREE_THREADED,
    reason="torch 2.12 fails by itself, in PyHandleCache, where threads without the GIL begin dispatch modes at once",
)


class Allocations(TorchDispatchMode):
    """Notes the memory of the size of `input`, or more, that operators take; holds it, so that none is taken twice."""

    def __init__(self, input):
        super().__init__()
        self.input, self.taken = input, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.input.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self.taken[storage.data_ptr()] = (func, storage)
        return result


class Allocating(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(8)
        self.counts = []

    def forward(self, input):
        with Allocations(input) as allocations:
            output = self.bn(input)
        self.counts.append(len(allocations.taken))
        return output


@one_mode_at_a_time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_large_inputs_take_no_memory_but_that_of_the_output(kind, dtype):
    _, parallel = twins(Allocating(), ["cpu"] * 2)
    data = torch.randn(4, 8, 150, 150, dtype=dtype).contiguous(memory_format=FORMATS[kind]).requires_grad_()
    output = parallel(data)
    assert parallel.module.counts == [1, 1]
    output.backward(torch.randn_like(output))


# Of the size of the input: the input minus its mean; the output; and with contiguous inputs one more, since the
# operator that makes the statistics also makes an output of its own.
@one_mode_at_a_time
@pytest.mark.parametrize(("kind", "taken"), [("contiguous", 3), ("channels_last", 2)])
def test_exact_statistics_take_memory_to_center_the_input(kind, taken):
    _, parallel = twins(Allocating(), ["cpu"] * 2)
    data = torch.randn(4, 8, 150, 150).contiguous(memory_format=FORMATS[kind]) + 1000
    parallel(data)
    parallel.module.counts.clear()
    parallel(data)  # The layer asks for exact statistics at once now.
    assert parallel.module.counts == [taken, taken]


@one_mode_at_a_time
@pytest.mark.parametrize("kind", FORMATS)
def test_master_takes_memory_for_the_joined_batch_and_the_output_in_two_precisions(kind):
    _, parallel = twins(Allocating(), ["cpu"] * 2)
    parallel(torch.randn(4, 8, 30, 30).contiguous(memory_format=FORMATS[kind]))
    assert sorted(parallel.module.counts) == [0, 4]


class TwoCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, input):
        return self.second(self.first(input))


@pytest.mark.parametrize("replicas", [2, 3])
@on_every_kernel
@pytest.mark.usefixtures("kernel")
def test_each_call_of_a_layer_is_one_exchange(replicas, monkeypatch):
    _, parallel = twins(TwoCalls(), ["cpu"] * replicas)
    exchange, layers = Coordinator.exchange, []

    def note_and_exchange(coordinator, sync_group, *args):
        layers.append(sync_group.name)
        return exchange(coordinator, sync_group, *args)

    monkeypatch.setattr(Coordinator, "exchange", note_and_exchange)
    output = parallel(torch.randn(6, 4, 5, 5, requires_grad=True))
    output.backward(torch.randn_like(output))
    assert sorted(layers) == ["first"] * replicas + ["second"] * replicas


def statistics_made(model, batch, monkeypatch):
    """Return for each computation of local statistics in a forward whether exact ones were asked for."""
    made, local_moments = [], moments.local_moments
    monkeypatch.setattr(moments, "local_moments", lambda x, exact=False: made.append(exact) or local_moments(x, exact))
    model(batch)
    monkeypatch.undo()
    return made


def test_layer_that_needed_exact_statistics_asks_for_them_at_once(monkeypatch):
    _, parallel = twins(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)), ["cpu"] * 2)
    far = torch.randn(2, 4, 200, 200) + 1000
    assert statistics_made(parallel, far, monkeypatch) == [False, False, True, True, False, False]
    assert statistics_made(parallel, far, monkeypatch) == [True, True, False, False]
