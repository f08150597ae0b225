"""Streams: synchronized layers run on default streams, in order with those that are current around them."""

import pytest
import torch
from conftest import CUDA_COUNT
from helpers import assert_equal

from sync_batchnorm.backends.streams import current_stream, in_order_with_engine, on_default_streams


def test_cpu_has_no_stream():
    assert current_stream(torch.device("cpu")) is None
    assert on_default_streams([torch.device("cpu")], lambda value: value + 1, 2) == 3


@pytest.mark.cuda
def test_function_runs_on_default_streams_and_the_current_ones_are_back_afterwards():
    devices = [torch.device("cuda", index) for index in range(CUDA_COUNT)]
    before, side = torch.cuda.current_device(), torch.cuda.Stream(devices[-1])
    with torch.cuda.stream(side):
        within = torch.cuda.current_device()
        streams = on_default_streams(devices, lambda: list(map(current_stream, devices)))
        assert streams == [torch.cuda.default_stream(device) for device in devices]
        assert current_stream(devices[-1]) == side
        assert torch.cuda.current_device() == within
        with pytest.raises(KeyError):
            on_default_streams(devices, {}.__getitem__, "missing")
        assert current_stream(devices[-1]) == side
    assert torch.cuda.current_device() == before


@pytest.mark.cuda
def test_what_another_stream_has_made_is_waited_for_in_both_directions():
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        tensor = torch.arange(1000.0, device=device) * 2
        doubled = on_default_streams([device], lambda tensor: tensor * 2, tensor)
        found = doubled * 2
    torch.cuda.synchronize()
    assert_equal(found.cpu(), torch.arange(1000.0) * 8)


@pytest.mark.cuda
def test_backward_of_several_devices_runs_on_their_default_streams():
    devices = [torch.device("cuda", index) for index in range(CUDA_COUNT)]
    with torch.cuda.stream(torch.cuda.Stream(devices[-1])), in_order_with_engine(devices, [None]):
        assert list(map(current_stream, devices)) == [torch.cuda.default_stream(device) for device in devices]
