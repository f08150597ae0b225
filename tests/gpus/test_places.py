"""Places: the current one of a device, and tensors that go from one to another."""

import pytest
import torch
from conftest import CUDA_COUNT
from helpers import as_devices, assert_equal

from sync_batchnorm.backends.places import Place, Streams, current_place, in_order_with_engine


def test_cpu_is_one_place_without_a_stream():
    assert current_place(torch.device("cpu")) == (torch.device("cpu"), None)


def test_tensor_stays_what_it_is_on_one_device(devs):
    for device in as_devices(devs):
        tensor, place = torch.ones(3, device=device), current_place(device)
        streams = Streams([place])
        assert streams.to_place(tensor, place, place) is tensor


def test_tensor_arrives_at_every_place(devs):
    first, *others = map(current_place, as_devices(devs))
    tensor = torch.arange(3.0, device=first.device)
    for place in others:
        arrived = Streams([first, place]).to_place(tensor, first, place)
        assert arrived.device == place.device
        assert_equal(arrived.cpu(), tensor.cpu())


@pytest.mark.cuda
def test_place_is_the_stream_of_this_thread():
    device = torch.device("cuda", CUDA_COUNT - 1)
    stream, before = torch.cuda.Stream(device), torch.cuda.current_device()
    with Place(device, stream).entered():
        assert current_place(device) == (device, stream)
        assert torch.cuda.current_device() == device.index
    assert current_place(device).stream != stream
    assert torch.cuda.current_device() == before


@pytest.mark.cuda
def test_operators_of_a_place_run_on_its_stream():
    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream(device)
    place = Place(device, stream)
    streams = Streams([place])
    with streams.at(place):
        assert torch.cuda.current_stream(device) == stream
        with streams.at(place), Streams([place]).at(place):
            assert torch.cuda.current_stream(device) == stream
    assert torch.cuda.current_stream(device) != stream


@pytest.mark.cuda
def test_tensor_of_another_stream_is_waited_for():
    device = torch.device("cuda", 0)
    here, there = current_place(device), Place(device, torch.cuda.Stream(device))
    tensor = torch.arange(1000.0, device=device) * 2
    with there.entered():
        doubled = Streams([here, there]).to_place(tensor, here, there) * 2
    assert_equal(Streams([here, there]).to_place(doubled, there, here).cpu(), torch.arange(1000.0) * 4)


@pytest.mark.cuda
@pytest.mark.parametrize("own", [False, True], ids=["current", "stream of its own"])
def test_backward_knows_whether_its_places_are_current(own):
    device = torch.device("cuda", 0)
    place = Place(device, torch.cuda.Stream(device)) if own else current_place(device)
    with in_order_with_engine(place, [place], [None]) as streams:
        assert streams.are_current is not own
        assert current_place(device) == place
