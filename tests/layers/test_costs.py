"""What a layer costs, counted: bytes that it saves and allocates, exchanges, and the tensors that replicas send."""

import pytest
import torch
from conftest import every_kernel, slow
from helpers import FORMATS, Net, as_devices, run_parts, saved_bytes, twins
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sync_batchnorm.backends import BACKENDS, cpu
from sync_batchnorm.meeting import Coordinator


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


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_only_inputs_that_are_asked_for_get_a_gradient(devices, asked, monkeypatch):
    _, parallel = twins(nn.BatchNorm1d(3), devices)
    parts = [torch.randn(4, 3, device=device, requires_grad=True) for device in as_devices(devices)]
    inner = [part * 1 for part in parts]
    outputs = run_parts(parallel, inner)
    backend = BACKENDS[parts[0].device.type]
    results, gradients = [], backend.gradients
    monkeypatch.setattr(backend, "gradients", lambda *args: results.extend(gradients(*args)) or results)
    wanted = [parallel.module.weight, *parts[:asked]]
    torch.autograd.grad(outputs, wanted, [torch.randn_like(output) for output in outputs])
    assert [grad_input is not None for grad_input, *_ in results].count(True) == asked


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


def allocating(net, input):
    with Allocations(input) as allocations:
        output = net.bn(input)
    net.counts.append(len(allocations.taken))
    return output


STATISTICS = [("fast", torch.float32), ("fast", torch.bfloat16), ("exact", torch.float32)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("kernel", "dtype"), STATISTICS, indirect=["kernel"])
def test_large_inputs_take_no_memory_but_that_of_output_and_gradient(kernel, kind, dtype):
    _, parallel = twins(Net(allocating, bn=nn.BatchNorm2d(8), counts=[]), ["cpu"] * 2)
    data = torch.randn(4, 8, 150, 150, dtype=dtype).contiguous(memory_format=FORMATS[kind])
    parts = [part.requires_grad_() for part in data.chunk(2)]
    outputs = run_parts(parallel, parts)
    # The outputs, some of which replica 0 allocates for all; with the inputs minus their means.
    assert sum(parallel.module.counts) == (4 if kernel == "exact" else 2)
    grads = [torch.randn_like(output) for output in outputs]
    with Allocations(parts[0]) as backward:
        torch.autograd.backward(outputs, grads)
    # The gradients; of half precision, input and upstream gradient in float32 and the result as well.
    assert len(backward.taken) == (2 if dtype == torch.float32 else 8)


@pytest.mark.parametrize("replicas", [2, 3])
@every_kernel
def test_each_call_of_a_layer_is_one_exchange(replicas, monkeypatch):
    _, parallel = twins(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)), ["cpu"] * replicas)
    send, layers = Coordinator.send, []

    def note_and_send(coordinator, rendezvous, *args):
        layers.append(rendezvous.name)
        return send(coordinator, rendezvous, *args)

    monkeypatch.setattr(Coordinator, "send", note_and_send)
    output = parallel(torch.randn(6, 4, 5, 5, requires_grad=True))
    output.backward(torch.randn_like(output))
    assert sorted(layers) == ["0"] * replicas + ["1"] * replicas


def test_parts_of_small_deviation_do_not_ask_for_exact_statistics(monkeypatch):
    _, parallel = twins(nn.BatchNorm2d(4), ["cpu"] * 2)
    data = torch.randn(8, 4, 1, 1).expand(8, 4, 120, 120).contiguous()  # Each sample is constant.
    monkeypatch.setattr(cpu, "exact_moments", None)
    parallel(data)
