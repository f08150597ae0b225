"""What only GPUs have: streams of the caller's own, several devices, half precision; the numbers stay those of one GPU.

On simulated GPUs each of these tests also fails on a race and on memory that is reused while another stream may still
use it, which is what most of them are about; on real GPUs they compare numbers.
"""

import contextlib

import pytest
import torch
from conftest import device_lists
from helpers import (
    TwoLayers,
    as_devices,
    assert_equal,
    assert_same_state,
    doubles,
    run_parts,
    twins,
)

pytestmark = [
    pytest.mark.cuda,
    # The engine notes it where parameters were made on another stream than the one that first uses them, and waits.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]


def gpu_lists(*sizes):
    return [devices for devices in device_lists(*sizes) if devices.id.startswith("cuda")]


@contextlib.contextmanager
def on_streams(streams):
    """Make the streams current on their devices, after the ones that were; and let these follow in the end."""
    before = [torch.cuda.current_stream(stream.device) for stream in streams]
    with contextlib.ExitStack() as stack:
        for stream, previous in zip(streams, before, strict=True):
            stream.wait_stream(previous)
            stack.enter_context(torch.cuda.stream(stream))
        if streams:  # A stream brings its device with it; the caller is on the first.
            stack.enter_context(torch.cuda.device(streams[0].device))
        yield
    for stream, previous in zip(streams, before, strict=True):
        previous.wait_stream(stream)


SIDES = {"first": slice(1), "others": slice(1, None), "all": slice(None)}


def side_streams(devices, side):
    """Return a new stream for some of the distinct devices."""
    return [torch.cuda.Stream(device) for device in list(dict.fromkeys(as_devices(devices)))[SIDES[side]]]


def used_here(tensors):
    """Let the current streams use what others have made, and may free while they do; return it."""
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensors


def input_gradients(outputs, inputs, grads, penalty):
    if not penalty:
        return torch.autograd.grad(outputs, inputs, grads)
    first = torch.autograd.grad(outputs, inputs, grads, create_graph=True)
    return torch.autograd.grad(first, inputs, [grad.detach() ** 2 for grad in first])


def assert_same_on_streams(plain, parallel, streams, where, penalty=False):
    """Compare one step of replicas, with its forward, its backward or both on the streams, and of all on one GPU.

    Each replica has a part of its own, and only the gradients of these are computed: torch's backward of scatter and
    broadcast reads what another GPU has made on the default stream there, without waiting for it.
    """
    devices = as_devices(parallel.device_ids)
    parts = [doubles(2 + i % 2, 3, 7, 6, devices=[device]).requires_grad_() for i, device in enumerate(devices)]
    grads = [torch.randn(len(part), 4, 3, 2, dtype=part.dtype, device=part.device) for part in parts]
    with contextlib.ExitStack() as stack:
        if where != "backward":
            stack.enter_context(on_streams(streams))
        outputs = run_parts(parallel, parts)
        if where == "forward":
            stack.close()
        if where == "backward":
            stack.enter_context(on_streams(streams))
        found = input_gradients(outputs, parts, grads, penalty)
    outputs, found = used_here(outputs), used_here(found)
    first = [part.detach().to(devices[0]).requires_grad_() for part in parts]
    expected = plain(torch.cat(first))
    wanted = input_gradients([expected], first, [torch.cat([grad.to(devices[0]) for grad in grads])], penalty)
    assert_equal(torch.cat([output.to(devices[0]) for output in outputs]), expected, "output")
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert_equal(ours, theirs, f"input gradient of replica {i}")
    assert_same_state(parallel, plain)


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("devices", gpu_lists(2, 4))
def test_replicas_on_side_streams_compute_what_one_gpu_computes(devices, side, where):
    plain, parallel = twins(TwoLayers().double(), devices)
    streams = side_streams(devices, side)
    for _ in range(2):  # The second finds the memory that the first has freed.
        assert_same_on_streams(plain, parallel, streams, where)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("devices", gpu_lists(2))
def test_gradient_penalties_on_side_streams_are_those_of_one_gpu(devices, side):
    plain, parallel = twins(TwoLayers().double(), devices)
    streams = side_streams(devices, side)
    for _ in range(2):
        assert_same_on_streams(plain, parallel, streams, "both", penalty=True)


@pytest.mark.parametrize("records", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("devices", gpu_lists(1, 2, 4))
def test_outputs_on_side_streams_are_those_of_one_gpu(devices, side, records):
    plain, parallel = twins(TwoLayers().double(), devices)
    batches = [doubles(8, 3, 7, 6, devices=devices) for _ in range(3)]
    with torch.set_grad_enabled(records):
        with on_streams(side_streams(devices, side)):
            for data in batches:  # Each frees what the one before it has used, while the streams may still be busy.
                output = parallel(data)
        for data in batches:
            expected = plain(data)
    assert_equal(*used_here((output, expected)))
    assert_same_state(parallel, plain)
