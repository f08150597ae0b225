"""Spans in the profile of torch: what they are called, how many, and that there are none without."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from unittest.mock import Mock

from helpers import Net, TwoLayers, as_devices, doubles, twins
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile


def recording() -> profile:
    """Return a profiler that records all threads, on the CPU."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    # Torch 2.12 warns without `acc_events`.
    return profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread, acc_events=True)


def spans_of(prof: profile) -> Counter[str]:
    """Return how often each span of this library occurs, without its name in front."""
    names = (event.name for event in prof.events())
    return Counter(name.removeprefix("sync_batchnorm: ") for name in names if name.startswith("sync_batchnorm: "))


def nested() -> Net:
    """Return a net that calls a layer twice, whose name has several parts, and another one, which has two names."""
    features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    features.register_module("nothing", None)
    head = nn.BatchNorm2d(3)
    return Net(lambda net, x: net.again(net.features[0](net.features[0](x))), features=features, head=head, again=head)


def test_each_exchange_is_a_span_with_the_name_of_its_layer(devs):
    _, parallel = twins(nested().double(), devs)
    with recording() as prof:
        parallel(doubles(12, 3, 5, 5, devices=devs))
    spans = spans_of(prof)
    if len(devs) == 1:  # The module itself runs, without an exchange.
        assert not spans
        return
    replicas = {f"replica {i} on device {device}": 1 for i, device in enumerate(as_devices(parallel.device_ids))}
    expected = dict(replicas)
    for layer, calls in {"features.0.1": 2, "head": 1}.items():
        expected |= {f"{layer}, waiting": calls * len(devs), f"{layer}, merging": calls}
    assert spans == expected
    with recording() as prof:
        parallel.eval()(doubles(12, 3, 5, 5, devices=devs))
    assert spans_of(prof) == replicas


def test_without_a_profiler_nothing_is_made(devs, monkeypatch):
    record_function = Mock(return_value=nullcontext())
    _, parallel = twins(TwoLayers().double(), devs)
    with recording():
        parallel(doubles(4, 3, 8, 8, devices=devs))
    monkeypatch.setattr("torch.autograd.profiler.record_function", record_function)
    parallel(doubles(4, 3, 8, 8, devices=devs)).sum().backward()
    record_function.assert_called_once_with("DataParallel.forward")
