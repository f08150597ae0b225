"""The simulated GPUs themselves: each mistake that they are there for is reported, and the right version is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import simulated_gpus
import torch
from simulated_gpus import recording, reports
from torch import nn

pytestmark = [pytest.mark.cuda, pytest.mark.simulated]
DEVICES = torch.cuda.device_count()
F16, F32, F64 = torch.float16, torch.float32, torch.float64
two_devices = pytest.mark.skipif(DEVICES < 2, reason="needs two devices")


def expected_reports(count: int, *phrases: str) -> None:
    """Check what was reported so far, and forget it: otherwise the test would fail."""
    found = reports()
    assert len(found) == count, found
    for phrase in phrases:
        assert any(phrase in report for report in found), found
    simulated_gpus.clear()


def work(size: int = 8) -> torch.Tensor:
    return torch.ones(size, device="cuda").mul_(2)


# Order of streams


ORDERS: dict[str, Callable[[torch.Tensor, torch.cuda.Stream, torch.Event], object]] = {
    "event": lambda x, side, event: side.wait_event(event),
    "host waits for the stream": lambda x, side, event: torch.cuda.current_stream().synchronize(),
    "host waits for the event": lambda x, side, event: event.synchronize(),
    "host waits for the device": lambda x, side, event: torch.cuda.synchronize(),
    "host waits for the value": lambda x, side, event: x[0].item(),
}


@pytest.mark.parametrize("order", ["none", "early event", *ORDERS])
def test_reading_what_another_stream_writes_is_a_race_unless_something_orders_the_two(order):
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    early = here.record_event()
    x = work()
    event = here.record_event()
    if order in ORDERS:
        ORDERS[order](x, side, event)
    elif order == "early event":
        side.wait_event(early)
    with torch.cuda.stream(side):
        x + 1
    side.synchronize()
    texts = [] if order in ORDERS else ["add on cuda:0 stream", "reads what mul on cuda:0 writes"]
    expected_reports(len(texts) // 2, *texts)


# Memory that is written again


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "cat": lambda kept, pair: torch.cat(tuple(pair), out=kept.view(-1)),
    "stack": lambda kept, pair: torch.stack(tuple(pair), out=kept),
    "sum": lambda kept, pair: torch.sum(pair[None], 0, out=kept),
    "copy": lambda kept, pair: kept.copy_(pair.to("cuda:1"), non_blocking=True),
    "copies": lambda kept, pair: torch._foreach_copy_([kept], [pair.to("cuda:1")], non_blocking=True),
}


@two_devices
@pytest.mark.parametrize("ordered", [False, True], ids=["race", "in order"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_again_what_a_kernel_on_another_stream_uses_is_a_race_unless_it_waits(write, ordered):
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    kept, pair = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
    side.wait_stream(here)
    with torch.cuda.stream(side):
        kept + 1
    if ordered:
        here.wait_stream(side)
    write(kept, pair)
    expected_reports(1 - ordered, *["overwrites what add on cuda:0 stream"][ordered:])
    here.wait_stream(side)
    if ordered:
        side.wait_stream(here)
    with torch.cuda.stream(side):
        kept + 1
    expected_reports(1 - ordered, *["reads what"][ordered:])
    here.wait_stream(side)


# Memory


@pytest.mark.parametrize("safe", ["not", "recorded", "waited"])
def test_memory_freed_while_another_stream_uses_it_is_unsafe(safe):
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    x = work()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        x + 1
    if safe == "recorded":
        x.record_stream(side)
    elif safe == "waited":
        here.wait_stream(side)
    del x
    if safe == "not":
        expected_reports(1, "is freed to cuda:0 while add on cuda:0 stream", "without record_stream")
    assert reports() == []


# Devices


COMBINATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat": lambda x, y: torch.cat([x, y]),
    "add_": lambda x, y: x.add_(y),
    "conv": lambda x, y: nn.functional.conv1d(x.view(1, 1, 3), y.view(1, 1, 3)),
}


@two_devices
@pytest.mark.parametrize("combine", COMBINATIONS.values(), ids=COMBINATIONS)
def test_tensors_of_two_devices_in_one_operator_are_an_error(combine):
    x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*cuda:0 and cuda:1"):
        combine(x, y)
    combine(x, y.to("cuda:0"))


def test_tensors_of_cpu_and_device_are_an_error_unless_one_is_a_number():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*cuda.* and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.zeros(()).add_(x[0])
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()


# Counts


def test_counts_of_a_known_sequence_are_exact():
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    with recording() as ran:
        y = x + 1  # 1 launch, 1 allocation of 16 bytes
        y.mul_(2).view(2, 2)  # 1 launch; a view is none
        side.wait_event(torch.cuda.current_stream().record_event())  # 1 event, 1 wait
        with torch.cuda.stream(side):
            z = y.sum()  # 1 launch, 1 allocation of 4 bytes
        side.synchronize()  # 1 host synchronization
        z.item()  # 1 launch, 1 host synchronization, 4 bytes to the host
        torch.ones(2, 2).to("cuda", non_blocking=True)  # 1 launch, 1 allocation and 16 bytes to the device
    assert ran.by_operator() == dict.fromkeys(["add", "mul", "sum", "_local_scalar_dense", "copy to device"], 1)
    assert ran.by_stream() == {"cuda:0": 4, f"cuda:0 stream {side.stream_id}": 1}
    counts = {name: value for name, value in vars(ran).items() if name != "log" and value != 0}
    assert counts == {
        "launches": 5, "host_syncs": 2, "events": 1, "waits": 1, "bytes_to_device": 16, "bytes_to_host": 4,
        "allocations": 3, "bytes_allocated": 36,
    }  # fmt: skip


WAITS: dict[str, tuple[int, Callable[[torch.Tensor], object]]] = {  # with how often the host waits
    "item": (1, lambda x: x[0].item()),
    "bool": (1, lambda x: bool((x > 0).all())),
    "cpu": (1, lambda x: x.cpu()),
    "cpu-non-blocking": (0, lambda x: x.to("cpu", non_blocking=True)),  # into pinned memory
    "copy-non-blocking": (1, lambda x: torch.empty(4).copy_(x, non_blocking=True)),
    "pinned": (0, lambda x: x.add_(torch.ones(4).pin_memory().to("cuda", non_blocking=True))),
    "index_put": (1, lambda x: x.index_put_((x > 0,), x[1:])),
    "tensor": (1, lambda x: torch.tensor([1.0, 2.0], device="cuda")),
    "index": (1, lambda x: x[torch.tensor([0, 1])]),
    "nonzero": (1, lambda x: x.nonzero()),
    "where": (0, lambda x: torch.where(x > 0, x, 0.0)),
}


@pytest.mark.parametrize(("syncs", "wait"), WAITS.values(), ids=list(WAITS))
def test_hidden_wait_of_the_host_is_counted(wait, syncs):
    x = torch.arange(4.0, device="cuda")
    with recording() as ran:
        wait(x)
    assert ran.host_syncs == syncs, str(ran)


# Batch norm operators


WRONG = [(F32, F32, F32, F64, "mean"), (F64, F64, F64, F32, "mean"), (F16, F16, F16, F16, "mean")]
WRONG += [(F16, F32, F16, F32, "bias"), (F16, F16, F32, F32, "bias"), (F32, F64, F64, F32, "weight")]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("input", "weight", "bias", "mean", "wrong"), WRONG)
def test_batch_norm_elemt_refuses_the_dtypes_that_cuda_refuses(input, weight, bias, mean, wrong, memory_format):
    x = torch.randn(2, 3, 4, 4, device="cuda").to(input, memory_format=memory_format)
    vectors = [torch.ones(3, dtype=dtype, device="cuda") for dtype in (weight, bias, mean, mean)]
    with pytest.raises(RuntimeError, match=f"Expected {wrong} to have type"):
        torch.batch_norm_elemt(x, *vectors, 0.0)
