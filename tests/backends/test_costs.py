"""What a layer costs, counted: the bytes that it saves, and the tensors of the size of an input that it allocates."""

import pytest
import torch
from conftest import every_kernel, slow
from helpers import FORMATS, Net, Operators, as_devices, run_parts, saved_bytes, twins
from torch import nn
from torch.utils._pytree import tree_leaves


@pytest.mark.smoke
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(4, 8, 4, 4), (8, 512, 7, 7), *slow((4, 64, 28, 28))], ids=str)
@every_kernel
def test_layer_saves_no_more_bytes_than_that_of_torch(shape, kind):
    plain, parallel = twins(nn.BatchNorm2d(shape[1]), ["cpu"] * 2)
    data = torch.randn(shape).contiguous(memory_format=FORMATS[kind]).requires_grad_()
    expected = saved_bytes(torch.cat([plain(part) for part in data.chunk(2)]))
    input = data.numel() * data.element_size()
    assert input <= saved_bytes(parallel(data)) <= expected


class Allocations(Operators):
    """Counts the tensors as large as `input`, or larger; holds their memory, so that none is taken twice."""

    def __init__(self, input):
        super().__init__(self.note)
        self.size, self.taken = input.numel(), {}

    def note(self, operator, args, result):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.size:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self.taken[storage.data_ptr()] = storage


def allocating(net, input):
    with Allocations(input) as allocations:
        output = net.bn(input)
    net.counts.append(len(allocations.taken))
    return output


def counted(data):
    """Return two parts of `data`, their outputs, and how many tensors of the size of a part were allocated."""
    _, parallel = twins(Net(allocating, bn=nn.BatchNorm2d(data.shape[1]), counts=[]), ["cpu"] * 2)
    parts = [part.requires_grad_() for part in data.chunk(2)]
    return parts, run_parts(parallel, parts), sum(parallel.module.counts)


STATISTICS = [("fast", torch.float32), ("fast", torch.bfloat16), ("exact", torch.float32)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("kernel", "dtype"), STATISTICS, indirect=["kernel"])
def test_large_inputs_take_no_memory_but_that_of_output_and_gradient(kernel, kind, dtype):
    data = torch.randn(4, 8, 40, 40, dtype=dtype).contiguous(memory_format=FORMATS[kind])
    parts, outputs, taken = counted(data)
    # The outputs, some of which replica 0 allocates for all; with the inputs minus their means.
    assert taken == (4 if kernel == "exact" else 2)
    grads = [torch.randn_like(output) for output in outputs]
    with Allocations(parts[0]) as backward:
        torch.autograd.backward(outputs, grads)
    # The gradients; of half precision, input and upstream gradient in float32 and the result as well.
    assert len(backward.taken) == (2 if dtype == torch.float32 else 8)


def with_ratio(ratio):
    """Return samples with a mean of one, whose square is `ratio` times the variance plus eps."""
    deviation = (1 / ratio - 1e-5) ** 0.5
    return 1 + deviation * torch.tensor([1.0, -1.0]).repeat(8, 4, 120, 60)


SAMPLES = {"ratio 250": (with_ratio(250), 2), "ratio 260": (with_ratio(260), 4)}  # with the tensors that are allocated
SAMPLES["constant"] = torch.randn(8, 4, 1, 1).expand(8, 4, 120, 120).contiguous(), 2


@pytest.mark.parametrize(("data", "taken"), SAMPLES.values(), ids=SAMPLES)
def test_exact_statistics_are_computed_only_beyond_the_ratio_that_was_measured(data, taken):
    assert counted(data)[2] == taken


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_only_inputs_that_are_asked_for_get_a_gradient(devices, asked):
    _, parallel = twins(nn.BatchNorm1d(3), devices)
    parts = [torch.randn(40, 3, device=device, requires_grad=True) for device in as_devices(devices)]
    outputs = run_parts(parallel, [part * 1 for part in parts])
    wanted, grads = [parallel.module.weight, *parts[:asked]], [torch.randn_like(output) for output in outputs]
    with Allocations(parts[0]) as backward:
        torch.autograd.grad(outputs, wanted, grads)
    assert len(backward.taken) == 2 * asked  # that of the layer, and that of the product
