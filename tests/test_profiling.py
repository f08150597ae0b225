"""Spans in the profile of torch: what they are called, in which threads, how many, and that there are none without."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from helpers import TwoLayers, doubles
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, schedule

from sync_batchnorm import DataParallelWithCallback, SyncMaster, convert_model, execute_replication_callbacks, profiling
from sync_batchnorm.coordinator import MASTER, Coordinator, SyncGroup
from sync_batchnorm.profiling import spans_of_forward

HINT = "sync_batchnorm: replicas, in threads that are recorded with profile_all_threads=True only"


class Span(NamedTuple):
    name: str
    thread: int
    start: float
    end: float


def recording(**options: Any) -> profile:
    """Return a profiler that records all threads, on the CPU."""
    return profile(
        activities=[ProfilerActivity.CPU],
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
        **({"acc_events": True} | options),  # torch 2.12 warns without it
    )


def spans_of(prof: profile) -> list[Span]:
    """Return the spans of this library, without its name in front of each."""
    return [
        Span(event.name.removeprefix("sync_batchnorm: "), event.thread, event.time_range.start, event.time_range.end)
        for event in prof.events()
        if event.name.startswith("sync_batchnorm: ")
    ]


def names_of(prof: profile) -> Counter[str]:
    return Counter(span.name for span in spans_of(prof))


class Nested(nn.Module):
    """A layer whose name has several parts, called twice in a forward, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
        self.head = nn.BatchNorm2d(3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(self.features(input)))


def wrapped(module: nn.Module, devices: Any, **options: Any) -> DataParallelWithCallback:
    device = torch.device("cuda", devices[0]) if isinstance(devices[0], int) else torch.device(devices[0])
    return DataParallelWithCallback(convert_model(module.double().to(device), **options), devices, timeout=5.0)


def test_each_exchange_is_a_span_with_the_name_of_its_layer(devs):
    parallel = wrapped(Nested(), devs)
    with recording() as prof:
        parallel(doubles(12, 3, 5, 5, devices=devs))
    names = names_of(prof)
    if len(devs) == 1:  # The module itself runs, without an exchange.
        assert not names
        return
    expected = {f"replica {i} on device {device}": 1 for i, device in enumerate(parallel.device_ids)}
    for layer, calls in {"features.0.1": 2, "head": 1}.items():
        expected |= {f"{layer}, waiting": calls * len(devs), f"{layer}, merging": calls}
    assert names == expected


def test_spans_of_a_replica_are_in_its_thread_and_within_its_own():
    parallel = wrapped(Nested(), ["cpu"] * 3)
    with recording() as prof:
        parallel(doubles(6, 3, 5, 5))
        with torch.profiler.record_function("sync_batchnorm: the caller"):
            pass
    spans = spans_of(prof)
    caller = next(span.thread for span in spans if span.name == "the caller")
    replicas = {span.thread: span for span in spans if span.name.startswith("replica ")}
    assert len(replicas) == 3
    assert caller not in replicas
    master = next(thread for thread, span in replicas.items() if span.name.startswith("replica 0 "))
    waits_and_merges = [span for span in spans if span.name.endswith((", waiting", ", merging"))]
    for span in waits_and_merges:
        assert replicas[span.thread].start <= span.start <= span.end <= replicas[span.thread].end
    assert {span.thread for span in waits_and_merges if span.name.endswith(", merging")} == {master}
    waits = Counter(span.thread for span in waits_and_merges if span.name.endswith(", waiting"))
    assert waits == dict.fromkeys(replicas, 3)  # calls of a layer


def exchange(first: int) -> list[Span]:
    """Let two replicas exchange, of which `first` already waits when the other one arrives; return the spans."""
    sync_group = SyncGroup("layer")

    def run(replica: int) -> None:
        coordinator.exchange(sync_group, replica, None, None if replica else lambda messages: messages)

    with recording() as prof:
        coordinator = Coordinator(["cpu"] * 2, span=spans_of_forward())
        coordinator.admit(sync_group, MASTER, 0)
        coordinator.admit(sync_group, 1, 1)
        thread = threading.Thread(target=run, args=(first,))
        thread.start()
        while f"{first} waits in" not in repr(coordinator):
            time.sleep(0)  # give way
        run(1 - first)
        thread.join()
    return spans_of(prof)


@pytest.mark.parametrize("first", [0, 1])
def test_master_waits_before_it_merges_and_slave_until_it_has_merged(first):
    spans = {(span.name, span.thread): span for span in exchange(first)}
    assert len(spans) == 3
    ((_, master), merging) = next(item for item in spans.items() if item[0][0] == "layer, merging")
    waits = {thread: span for (name, thread), span in spans.items() if name == "layer, waiting"}
    of_master, (of_slave,) = waits.pop(master), waits.values()
    assert of_master.end <= merging.start
    assert of_slave.end >= merging.end
    # Whoever arrives first waits from then on, whatever the other one does until it arrives.
    assert (of_master.start < of_slave.start) == (first == 0)


def test_each_group_of_replicas_merges_for_itself():
    parallel = wrapped(TwoLayers(), ["cpu"] * 4, group_size=2)
    with recording() as prof:
        parallel(doubles(4, 3, 8, 8))
    names = names_of(prof)
    assert names["bn1, merging"] == names["bn2, merging"] == 2


def test_layer_in_eval_mode_makes_no_span():
    parallel = wrapped(TwoLayers(), ["cpu"] * 2).eval()
    with recording() as prof:
        parallel(doubles(4, 3, 8, 8))
    assert names_of(prof) == {"replica 0 on device cpu": 1, "replica 1 on device cpu": 1}


def test_backward_makes_no_span():
    output = wrapped(TwoLayers(), ["cpu"] * 2)(doubles(4, 3, 8, 8))
    with recording() as prof:
        output.sum().backward()
    assert not names_of(prof)
    assert any("SyncBatchNorm" in event.name for event in prof.events())


def test_every_step_of_a_schedule_is_recorded_once():
    parallel = wrapped(TwoLayers(), ["cpu"] * 2)
    steps = []
    plan = schedule(wait=1, warmup=1, active=1, repeat=2)
    with recording(schedule=plan, on_trace_ready=lambda prof: steps.append(names_of(prof)), acc_events=True) as prof:
        for _ in range(6):
            parallel(doubles(4, 3, 8, 8))
            prof.step()
    assert [names["bn1, merging"] for names in steps] == [1, 2]  # with the first one, by `acc_events`


class Exchanging(nn.Module):
    """A module of the user's own that exchanges something."""

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.master = SyncMaster(self.merge)
        self.pipe = ctx.master.register_slave(copy_id) if copy_id else ctx.master

    def merge(self, messages: list[Any]) -> list[Any]:
        return messages

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        meet = self.pipe.run_master if isinstance(self.pipe, SyncMaster) else self.pipe.run_slave
        return input if meet("hello") == "hello" else -input


class FailingToMerge(Exchanging):
    def merge(self, messages: list[Any]) -> list[Any]:
        raise OSError("the master")


class FailingToCome(Exchanging):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        super().forward(input)
        if self.pipe.identifier == 1:
            raise OSError("a replica")
        return super().forward(input)


@pytest.mark.parametrize("module", [FailingToMerge(), FailingToCome()])
def test_failure_leaves_no_span_open(module, monkeypatch):
    entered, left = [], []

    class Counted(torch.profiler.record_function):
        def __enter__(self) -> Any:
            entered.append((self.name, threading.get_ident()))
            return super().__enter__()

        def __exit__(self, *args: Any) -> None:
            left.append((self.name, threading.get_ident()))
            super().__exit__(*args)

    monkeypatch.setattr(profiling, "record_function", Counted)
    parallel = DataParallelWithCallback(nn.Sequential(module), ["cpu"] * 3, timeout=5.0)
    with recording() as prof:
        with pytest.raises(OSError, match="Caught OSError in replica"):
            parallel(torch.ones(3))
        with torch.profiler.record_function("sync_batchnorm: after it"):
            pass
    assert sorted(entered) == sorted(left)
    spans = spans_of(prof)
    assert Counter(span.name for span in spans)["0, merging"] == 1
    assert Counter(f"sync_batchnorm: {span.name}" for span in spans if span.name != "after it") == Counter(
        name for name, _ in entered
    )
    after = next(span for span in spans if span.name == "after it")
    assert all(span.end <= after.start for span in spans if span is not after)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The spans that this library makes, whether they are recorded or not."""
    names: list[str] = []

    def record(name: str) -> contextlib.AbstractContextManager[None]:
        names.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(profiling, "record_function", record)
    return names


def test_without_a_profiler_nothing_is_made(devs, made):
    parallel = wrapped(TwoLayers(), devs)
    parallel(doubles(4, 3, 8, 8, devices=devs)).sum().backward()
    assert not made
    with recording():
        parallel(doubles(4, 3, 8, 8, devices=devs))
    assert bool(made) == (len(devs) > 1)
    made.clear()
    parallel(doubles(4, 3, 8, 8, devices=devs))
    assert not made


def test_exchanges_of_other_modules_are_spans_too():
    parallel = DataParallelWithCallback(nn.Sequential(Exchanging()), ["cpu"] * 2)
    with recording() as prof:
        parallel(torch.ones(2))
    assert names_of(prof)["0, merging"] == 1


def test_callbacks_without_the_wrapper_are_recorded_too():
    copies = [Exchanging(), Exchanging()]
    with recording() as prof:
        execute_replication_callbacks(copies)
        threads = [threading.Thread(target=copy, args=(torch.ones(2),)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert names_of(prof)["Exchanging, merging"] == 1


def test_profiler_of_the_caller_alone_is_told_what_it_leaves_out():
    parallel = wrapped(TwoLayers(), ["cpu"] * 2)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        parallel(doubles(4, 3, 8, 8))
        parallel(doubles(1, 3, 8, 8))  # on the module itself, in this thread
    assert [event.name for event in prof.events() if event.name.startswith("sync_batchnorm: ")] == [HINT]


@pytest.mark.parametrize(("name", "without"), [("profiler_runs", False), ("profiler_of_thread", "")])
def test_torch_without_a_private_name_has_a_wrapper_that_works(name, without, monkeypatch):
    parallel = wrapped(TwoLayers(), ["cpu"] * 2)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        monkeypatch.setattr(profiling, name, lambda: without)
        parallel(doubles(4, 3, 8, 8))
        monkeypatch.undo()
    assert not names_of(prof)


def test_numbers_are_those_without_a_profiler():
    parallel, input = wrapped(TwoLayers(), ["cpu"] * 2), doubles(4, 3, 8, 8)
    expected = parallel(input)
    with recording():
        actual = parallel(input)
    assert torch.equal(actual, expected)
