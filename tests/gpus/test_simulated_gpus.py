"""The simulated GPUs themselves: each mistake that they are there for is reported, and the right version is not."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable

import pytest
import simulated_gpus
import torch
from simulated_gpus import recording, reports
from simulated_gpus.free import costing_nothing
from torch import nn

from sync_batchnorm import DataParallelWithCallback, convert_model

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


@pytest.mark.parametrize(
    ("order", "races"),
    [("none", 1), ("early event", 1), ("event", 0)]
    + [(f"host waits for the {what}", 0) for what in ("stream", "event", "device", "value")],
)
def test_reading_what_another_stream_writes_is_a_race_unless_something_orders_the_two(order, races):
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    early = here.record_event()
    x = work()
    event = here.record_event()
    if order == "early event":
        side.wait_event(early)
    elif order == "event":
        side.wait_event(event)
    elif order.endswith("the stream"):
        here.synchronize()
    elif order.endswith("the event"):
        event.synchronize()
    elif order.endswith("the device"):
        torch.cuda.synchronize()
    elif order.endswith("the value"):
        x[0].item()
    with torch.cuda.stream(side):
        x + 1
    side.synchronize()
    expected_reports(races, *["add on cuda:0 stream", "reads what mul on cuda:0 writes"][: 2 * races])


def test_overwriting_what_another_stream_reads_is_a_race():
    side = torch.cuda.Stream()
    x = work()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    x.zero_()
    torch.cuda.synchronize()
    expected_reports(1, "zero_ on cuda:0 overwrites what add on cuda:0 stream")


def test_thread_knows_what_its_parent_waited_for():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = work()
    side.synchronize()
    thread = threading.Thread(target=lambda: x.add_(1))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert reports() == []


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


@pytest.mark.parametrize("index", range(min(DEVICES, 2)))
def test_statistics_follow_what_is_allocated_and_freed(index):
    device, other = torch.device("cuda", index), (index + 1) % DEVICES
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before, elsewhere = torch.cuda.memory_allocated(device), torch.cuda.memory_allocated(other)
    assert torch.cuda.max_memory_allocated(device) == before
    x = torch.empty(1000, device=device)  # 4000 bytes, in blocks of 512
    y = torch.empty(1, device=device)
    del x
    with torch.cuda.device(device):
        assert torch.cuda.memory_allocated() - before == 512
        assert torch.cuda.max_memory_allocated() - before == 4096 + 512
        assert torch.accelerator.memory_stats() == torch.cuda.memory_stats()
    if DEVICES > 1:
        assert torch.cuda.memory_allocated(other) == elsewhere
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    assert free == total - torch.cuda.memory_reserved(device)
    assert y.device == device


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_new_memory_is_nan(dtype):
    assert torch.empty(5, dtype=dtype, device="cuda").isnan().all()
    assert torch.empty_strided((2, 3), (1, 2), dtype=dtype, device="cuda").isnan().all()


# Devices


@two_devices
@pytest.mark.parametrize(
    "combine",
    [
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.add_(y),
        lambda x, y: nn.functional.conv1d(x.view(1, 1, 3), y.view(1, 1, 3)),
    ],
    ids=["cat", "add_", "conv"],
)
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


@pytest.mark.parametrize("index", [DEVICES, 63])
def test_device_that_is_not_there_is_an_error(index):
    for use in (
        lambda: torch.cuda.set_device(index),
        lambda: torch.ones(1, device=f"cuda:{index}"),
        lambda: torch.cuda.synchronize(index),
        lambda: torch.cuda.Stream(index),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            use()
    assert torch.cuda.current_device() == 0


@two_devices
def test_current_device_and_stream_are_restored():
    side = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(side):
        assert torch.cuda.current_device() == 1
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream() == torch.cuda.default_stream(0)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)


@two_devices
def test_event_belongs_to_the_device_that_recorded_it():
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(0))
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(torch.cuda.current_stream(1))


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
    assert ran.by_operator() == {
        "add": 1, "mul": 1, "sum": 1, "_local_scalar_dense": 1, "copy to device": 1,
    }  # fmt: skip
    assert ran.by_stream() == {"cuda:0": 4, f"cuda:0 stream {side.stream_id}": 1}
    counts = {name: value for name, value in vars(ran).items() if name != "log"}
    assert counts == {
        "launches": 5,
        "host_syncs": 2,
        "events": 1,
        "waits": 1,
        "copies_between_devices": 0,
        "bytes_between_devices": 0,
        "bytes_to_device": 16,
        "bytes_to_host": 4,
        "allocations": 3,
        "bytes_allocated": 36,
    }


@two_devices
def test_bytes_between_devices_are_counted():
    x = torch.ones(3, 5, dtype=torch.float64, device="cuda:0")
    with recording() as ran:
        x.to("cuda:1", non_blocking=True)
        x.to("cuda:0")  # It is there: no copy.
    assert (ran.copies_between_devices, ran.bytes_between_devices, ran.launches, ran.host_syncs) == (1, 120, 1, 0)
    (copied,) = [entry for entry in ran.log if entry.kind == "launch"]
    assert (copied.name, copied.stream, copied.bytes) == ("copy between devices", "cuda:0", 120)


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


# Operators of nets, of which CUDA has other kernels than the CPU

LAYERS = [  # each with the shape of its input
    (nn.Conv2d(4, 8, 3, groups=4, padding="same", dilation=2), (2, 4, 5, 5)),
    (nn.Conv3d(4, 8, 3, groups=4), (2, 4, 5, 4, 3)),
    (nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, bias=False), (2, 4, 5, 5)),
    (nn.AdaptiveMaxPool3d(2), (2, 3, 5, 4, 3)),
    (nn.PReLU(6), (5, 6, 3)),
    (nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 5, 4)),
    (nn.InstanceNorm3d(3, affine=True), (2, 3, 4, 3, 2)),
    (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: type(value).__name__)
def test_layer_computes_and_derives_as_on_the_cpu(layer, shape, dtype):
    layer = copy.deepcopy(layer).to(dtype)
    on_device = copy.deepcopy(layer).cuda()
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y = x.detach().cuda().requires_grad_()
    expected, output = layer(x), on_device(y)
    torch.testing.assert_close(output.cpu(), expected)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    output.backward(dy.cuda())
    pairs = [(y.grad, x.grad)]
    pairs += [(b.grad, a.grad) for a, b in zip(layer.parameters(), on_device.parameters(), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.cpu(), theirs)


# Batch norm operators


def vectors(*dtypes: torch.dtype, channels: int = 3) -> list[torch.Tensor]:
    return [torch.rand(channels, device="cuda").add(0.5).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("input", "weight", "bias", "mean", "wrong"),
    [
        (F32, F32, F32, F32, None),
        (F64, F64, F64, F64, None),
        (F16, F16, F16, F32, None),
        (F16, F32, F32, F32, None),
        (F32, F32, F32, F64, "mean"),
        (F64, F64, F64, F32, "mean"),
        (F16, F32, F16, F32, "bias"),
        (F16, F16, F32, F32, "bias"),
        (F16, F16, F16, F16, "mean"),
        (F32, F64, F64, F32, "weight"),
    ],
)
def test_batch_norm_elemt_takes_the_dtypes_of_cuda_only(input, weight, bias, mean, wrong, channels_last):
    x = torch.randn(2, 3, 4, 4, device="cuda").to(input)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias, mean, invstd = vectors(weight, bias, mean, mean)
    if wrong is None:
        y = torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
        assert (y.dtype, y.stride()) == (x.dtype, x.stride())
        exact = (x.double() - mean.double().view(3, 1, 1)) * invstd.double().view(3, 1, 1)
        exact = exact * weight.double().view(3, 1, 1) + bias.double().view(3, 1, 1)
        torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)
    else:
        with pytest.raises(RuntimeError, match=f"Expected {wrong} to have type"):
            torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)


def test_batch_norm_elemt_writes_into_out():
    x = torch.randn(2, 3, 4, device="cuda")
    weight, bias, mean, invstd = vectors(F32, F32, F32, F32)
    out = torch.empty_like(x)
    result = torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0, out=out)
    assert result is out
    torch.testing.assert_close(out, torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0))
    with pytest.raises(RuntimeError, match="Expected output to have type"):
        torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0, out=out.double())


@pytest.mark.parametrize(
    ("input", "running", "counts", "works"),
    [
        (F32, None, F32, True),
        (F16, None, F16, True),
        (F16, None, F32, False),
        (F16, F32, F32, True),
        (F16, F16, F32, False),
        (F32, F32, torch.int64, False),
        (F64, F64, F64, True),
    ],
)
def test_gathered_statistics_have_counts_of_the_dtype_that_cuda_reads(input, running, counts, works):
    wide = F64 if input == F64 else F32
    samples = torch.randn(6, 4, dtype=F64)
    parts = samples.split([2, 4])
    mean = torch.stack([part.mean(0) for part in parts]).to("cuda", wide)
    invstd = torch.stack([(part.var(0, correction=0) + 1e-5).rsqrt() for part in parts]).to("cuda", wide)
    x = torch.zeros(1, 4, device="cuda", dtype=input)
    n = torch.tensor([2, 4], device="cuda").to(counts)
    state = [None, None] if running is None else [torch.zeros(4, device="cuda", dtype=running) for _ in range(2)]

    def gather() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.batch_norm_gather_stats_with_counts(x, mean, invstd, *state, 1.0, 1e-5, n)

    if not works:
        with pytest.raises(RuntimeError, match="Expected counts to have type"):
            gather()
        return
    merged, merged_invstd = gather()
    torch.testing.assert_close(merged.cpu(), samples.mean(0).to(wide))
    torch.testing.assert_close(merged_invstd.cpu(), (samples.var(0, correction=0) + 1e-5).rsqrt().to(wide))
    if running is not None:
        torch.testing.assert_close(state[1].cpu(), samples.var(0).to(running))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_backward_of_the_operators_is_that_of_batch_norm(dtype):
    x, dy = (torch.randn(4, 3, 5, device="cuda", dtype=dtype) for _ in range(2))
    (weight,) = vectors(dtype)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    reduced = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = reduced
    count = torch.tensor([20], device="cuda", dtype=torch.int32)
    dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
    with pytest.raises(RuntimeError, match="expected scalar type Int but found Long"):
        torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count.long())

    layer = nn.BatchNorm1d(3, dtype=dtype)
    layer.weight.data.copy_(weight)
    leaf = x.cpu().requires_grad_()
    layer(leaf).backward(dy.cpu())
    for ours, expected in ((dx, leaf.grad), (grad_weight, layer.weight.grad), (grad_bias, layer.bias.grad)):
        torch.testing.assert_close(ours.cpu(), expected)


def test_backward_takes_a_float16_weight_in_channels_last_only():
    x, dy = (torch.randn(2, 3, 4, 4, device="cuda", dtype=F16) for _ in range(2))
    weight, mean, invstd, a, b = vectors(F16, F32, F32, F32, F32)
    count = torch.tensor([32], device="cuda", dtype=torch.int32)
    with pytest.raises(RuntimeError, match="Expected weight to have type Float but got Half"):
        torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, a, b, count)
    x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, a, b, count)
    assert dx.stride() == x.stride()


# torch.nn.DataParallel without this library


class Tagged(torch.Tensor):
    """A subclass that all operators keep."""


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", [None, [2] * DEVICES])
def test_scatter_gives_plain_tensors(where, sizes):
    whole = torch.randn(2 * DEVICES, 3, device=where)
    tagged = whole.as_subclass(Tagged)
    assert type(tagged.chunk(2)[0]) is Tagged
    for chunks in (
        nn.parallel.comm.scatter(tagged, range(DEVICES), sizes),
        nn.parallel.scatter(tagged, list(range(DEVICES))),
    ):
        assert [type(chunk) for chunk in chunks] == [torch.Tensor] * DEVICES
        assert [chunk.get_device() for chunk in chunks] == list(range(DEVICES))
        assert torch.equal(torch.cat([chunk.cpu() for chunk in chunks]), whole.cpu())


@pytest.mark.watchdog(120)
def test_data_parallel_resnet_has_the_gradients_of_one_device():
    torchvision = pytest.importorskip("torchvision")
    # In evaluation mode batch norm does not depend on how the batch is split.
    model = torchvision.models.resnet18(num_classes=3).double().eval()
    single = copy.deepcopy(model)
    parallel = nn.DataParallel(model.cuda())
    x, dy = torch.randn(8, 3, 32, 32, dtype=F64), torch.randn(8, 3, dtype=F64)
    single(x).backward(dy)
    parallel(x).backward(dy.cuda())
    for ours, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), expected.grad)
    assert reports() == []


def test_operator_that_has_no_kernel_is_named():
    x = torch.ones(2, 3, device="cuda")
    with pytest.raises(NotImplementedError, match="simulated GPUs have no kernel for aten::_thnn_fused_lstm_cell"):
        nn.LSTMCell(3, 4).cuda()(x)
    assert nn.RNN(3, 4).cuda()(x.unsqueeze(0))[0].is_cuda


# Kernels that cost nothing, for benchmarks


def kind_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: [x + 1, x.double() + x, x > 0],
        lambda x: [x.transpose(0, 1)[1:], x.view(-1).add_(2)],
        lambda x: [*x.unbind(), *x.split(1, 1), torch.stack([x, x], 1), torch.cat([x, x])],
        lambda x: [x.sum((0, 2)), *torch.var_mean(x, 1), torch.empty_like(x), x.to(torch.float16)],
        lambda x: [x.to(f"cuda:{DEVICES - 1}"), x.cpu(), torch.ones(3).to("cuda")],
    ],
    ids=["values", "views", "lists", "sizes", "copies"],
)
def test_kernels_that_cost_nothing_return_tensors_of_the_same_kind(run):
    x = torch.randn(2, 3, 4, device="cuda")
    expected = [kind_of(tensor) for tensor in run(x)]
    with costing_nothing(), recording() as ran:
        for _ in range(2):  # as it is run first, and then as it is known
            assert [kind_of(tensor) for tensor in run(x)] == expected
    assert ran.launches == 0
    assert torch.equal((torch.ones(3, device="cuda") + 1).cpu(), torch.full((3,), 2.0))


@two_devices
def test_replicas_train_with_kernels_that_cost_nothing():
    parallel = DataParallelWithCallback(convert_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).cuda())
    with costing_nothing():
        for _ in range(2):
            output = parallel(torch.randn(8, 3, device="cuda"))
            output.sum().backward()
    assert output.shape == (8, 4)
    assert all(parameter.grad.shape == parameter.shape for parameter in parallel.parameters())


def test_what_older_code_calls_is_there():
    made = torch.cuda.FloatTensor([1.0, 2.0])
    assert made.is_cuda
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made.double(), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert nn.LazyLinear(3).cuda()(torch.ones(2, 4, device="cuda")).shape == (2, 3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(torch.cuda.current_stream()):
        numbers = {"device_index": stream.device_index, "device_type": stream.device_type}
        torch._C._cuda_setStream(stream_id=stream.stream_id, **numbers)
        assert torch.cuda.current_stream() == stream


@two_devices
def test_tensors_of_unequal_sizes_are_gathered():
    parts = [torch.full((i + 1, 3), float(i), device=f"cuda:{i}") for i in range(2)]
    assert torch.equal(torch.nn.parallel.comm.gather(parts, 0, 0).cpu(), torch.cat([part.cpu() for part in parts]))
