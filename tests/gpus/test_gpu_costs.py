"""What one synchronized layer costs on GPUs: launches, copies between GPUs, and no wait of the host.

Counted on simulated GPUs, where a launch is one operator: an operator that real GPUs run as one kernel and the CPU in
parts counts as its parts. ``python -m pytest --simulated-gpus 4 tests/gpus/test_gpu_costs.py -s`` prints all that ran.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import CUDA_COUNT
from helpers import FORMATS, Net, Operators, as_devices, assert_equal, run_parts, twins
from simulated_gpus import Recording, recording
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, sync_moments

pytestmark = [pytest.mark.cuda, pytest.mark.simulated]

CHANNELS = 8


class Cost(NamedTuple):
    """The most that may run in one direction of one layer, in all replicas together."""

    launches: int  # copies included
    bytes_a_channel: int  # of copies between GPUs, whatever the size of the input


# The backward ends at the parameters of the module: on 2 GPUs 4, on 4 GPUs 10, on 8 GPUs 22 of its launches are those
# of torch's Broadcast, which adds up the gradients of the replicas.
BUDGETS = {  # forward and backward
    "[0]": (Cost(2, 0), Cost(1, 0)),
    "[0, 0]": (Cost(7, 0), Cost(8, 0)),
    "[0, 1]": (Cost(11, 16), Cost(13, 24)),
    "[0, 1, 2, 3]": (Cost(21, 48), Cost(29, 72)),
    "[0, 1, 2, 3, 4, 5, 6, 7]": (Cost(41, 112), Cost(61, 168)),
}
EVERY = [[0], [0, 0], [0, 1], [0, 1, 2, 3], list(range(8))]
DEVICES = {str(devices): devices for devices in EVERY if max(devices) < CUDA_COUNT}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def step(
    parallel: DataParallelWithCallback,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    rows: int = 3,
    wanted: bool = True,
) -> tuple[Recording, Recording]:
    """Return what runs in the two directions of a layer, without scatter, replicate and gather."""

    def random(device: torch.device) -> Tensor:
        return torch.randn(rows, CHANNELS, 6, 5, device=device).to(dtype, memory_format=memory_format)

    devices = as_devices(parallel.device_ids)
    parts, grads = [random(device).requires_grad_(wanted) for device in devices], [random(device) for device in devices]
    parallel.zero_grad()
    replicas = parallel.replicate(parallel.module, parallel.device_ids)
    with recording() as forward:
        outputs = parallel.parallel_apply(replicas, [(part,) for part in parts], [{} for _ in parts])
    with recording() as backward:
        torch.autograd.backward(outputs, grads)
    return forward, backward


def observed(net: Net, input: Tensor) -> Tensor:
    with Operators(net.note):
        return net.bn(input)


# A layer with running statistics, in its second step: all operators of its forward pass, and those of its node.
OPERATORS = {"[0, 1]": (11, 11), "[0, 1, 2, 3]": (19, 21), "[0, 1, 2, 3, 4, 5, 6, 7]": (35, 41)}


@pytest.mark.parametrize("name", [name for name in DEVICES if name in OPERATORS])
def test_layer_takes_no_more_operators_than_the_table_says(name):
    forward: list[str] = []
    backward: list[str] = []
    net = Net(observed, bn=nn.BatchNorm2d(CHANNELS), note=lambda operator, *_: forward.append(str(operator)))
    parallel = twins(net, DEVICES[name])[1]
    step(parallel)
    forward.clear()
    leaves = [torch.randn(3, CHANNELS, 6, 5, requires_grad=True) for _ in DEVICES[name]]
    parts = [leaf.to(gpu) for leaf, gpu in zip(leaves, as_devices(DEVICES[name]), strict=True)]
    outputs = run_parts(parallel, parts)  # no leaves, of which a layer makes a view
    grads = list(map(torch.randn_like, outputs))
    with Operators(lambda operator, *_: backward.append(str(operator))):
        torch.autograd.grad(outputs, parts, grads)
    for found, most in zip((forward, backward), OPERATORS[name], strict=True):
        print(len(found), Counter(found))
        assert 0 < len(found) <= most


def layer(name: str, **options: Any) -> DataParallelWithCallback:
    return twins(nn.BatchNorm2d(CHANNELS, **options), DEVICES[name])[1]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DEVICES)
def test_layer_costs_no_more_than_the_table_says(name, dtype, memory_format):
    parallel = layer(name)
    step(parallel, dtype, FORMATS[memory_format])
    for ran, budget in zip(step(parallel, dtype, FORMATS[memory_format]), BUDGETS[name], strict=True):
        print(f"{ran}\n{ran.by_operator()}\n{ran.by_stream()}")
        assert ran.launches <= budget.launches
        assert ran.events == 0 or len(set(DEVICES[name])) > 1
        assert ran.bytes_between_devices <= budget.bytes_a_channel * CHANNELS


def test_sums_are_not_added_up_where_no_input_wants_a_gradient():
    _, backward = step(layer("[0, 0]"), wanted=False)
    assert backward.by_operator() == {"batch_norm_backward_reduce": 2, "add": 2}  # weight and bias of both replicas


def test_page_has_the_launches_of_the_table():
    two, four = ([cost.launches for cost in BUDGETS[name]] for name in ("[0, 1]", "[0, 1, 2, 3]"))
    page = Path(__file__).parents[2] / "docs" / "how-it-works.md"
    words = " ".join(page.read_text(encoding="utf-8").split())
    assert f"{two[0]} and {two[1]} on two GPUs, {four[0]} and {four[1]} on four" in words


def assert_host_never_waits(recordings: Iterable[Recording]) -> None:
    for ran in recordings:
        assert (ran.host_syncs, ran.bytes_to_device, ran.bytes_to_host) == (0, 0, 0), ran


@pytest.mark.parametrize("momentum", [0.1, None], ids=str)
@pytest.mark.parametrize("name", DEVICES)
def test_host_never_waits_not_even_for_sizes_that_are_new(name, momentum):
    if name == "[0]":  # There, the layer of torch itself waits for the number of its calls, without a momentum.
        momentum = 0.1
    parallel = layer(name, momentum=momentum)
    for rows in (11, 13):
        assert_host_never_waits(step(parallel, rows=rows))


@pytest.fixture
def _two_processes() -> Iterator[None]:
    """Make this process one of two of a group whose collectives change nothing, as torch has it for its own tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_two_processes")
def test_layer_of_one_process_of_several_never_lets_the_host_wait_and_stays_on_one_stream():
    for momentum in (0.1, None):
        with torch.cuda.stream(torch.cuda.Stream()):  # as in the capture of a CUDA graph
            directions = step(layer("[0]", momentum=momentum))
        assert_host_never_waits(directions)
        assert all("stream" in stream for ran in directions for stream in ran.by_stream())  # not the default one


def test_moments_of_one_device_stay_on_one_stream():
    with torch.cuda.stream(torch.cuda.Stream()), recording() as ran:
        sync_moments(torch.ones(3, CHANNELS, device="cuda"), None)
    assert_host_never_waits([ran])
    assert all("stream" in stream for stream in ran.by_stream())


@pytest.mark.usefixtures("_two_processes")
def test_gradients_beside_another_process_are_those_of_the_cpu():
    data, grad, layer = torch.randn(3, CHANNELS, 5), torch.randn(3, CHANNELS, 5), SynchronizedBatchNorm1d(CHANNELS)
    found = []
    for device in ("cpu", "cuda"):
        input = data.to(device).requires_grad_()
        found += torch.autograd.grad(layer.to(device)(input), input, grad.to(device))
    assert_equal(found[1].cpu(), found[0])
