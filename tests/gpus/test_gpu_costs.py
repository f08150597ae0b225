"""What one synchronized layer costs on GPUs, exactly: launches, waits of the host, events, copies between GPUs.

Counted on simulated GPUs, where a launch is one operator: an operator that real GPUs run as one kernel and the CPU in
parts counts as its parts. ``python -m pytest --simulated-gpus 4 tests/gpus/test_gpu_costs.py -s`` prints all that ran.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import CUDA_COUNT
from helpers import as_devices, twins
from simulated_gpus import Recording, recording
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback

pytestmark = [pytest.mark.cuda, pytest.mark.simulated]

CHANNELS = 8


class Cost(NamedTuple):
    """What ran in one direction of one layer, in all replicas together."""

    launches: int  # copies included
    events: int  # recorded, by the engine of autograd too
    waits: int  # of streams for events
    copies: int  # between GPUs
    bytes_a_channel: int  # of these copies
    bytes_an_element: int  # that all launches read and write of tensors as large as the input


# The one place to change when a layer costs less; half precision moves half the bytes an element. The backward ends at
# the parameters of the module: on 2 GPUs 4, on 4 GPUs 10, on 8 GPUs 22 of its launches are those of torch's Broadcast,
# which adds up the gradients of the replicas.
BUDGETS = {  # forward and backward, of float32
    "[0]": (Cost(2, 0, 0, 0, 0, 8), Cost(1, 0, 0, 0, 0, 12)),
    "[0, 0]": (Cost(7, 0, 0, 0, 0, 12), Cost(8, 0, 0, 0, 0, 20)),
    "[0, 1]": (Cost(11, 0, 0, 2, 16, 12), Cost(13, 6, 3, 3, 24, 20)),
    "[0, 1, 2, 3]": (Cost(21, 0, 0, 6, 48, 12), Cost(29, 16, 9, 9, 72, 20)),
    "[0, 1, 2, 3, 4, 5, 6, 7]": (Cost(41, 0, 0, 14, 112, 12), Cost(61, 36, 21, 21, 168, 20)),
}

EVERY = [[0], [0, 0], [0, 1], [0, 1, 2, 3], list(range(8))]
DEVICES = {str(devices): devices for devices in EVERY if max(devices) < CUDA_COUNT}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2}
TENSOR = re.compile(rf"({'|'.join(BYTES)})\[(\d+(?:, \d+)*)\]")  # as a log has it: "Float[3, 8, 6, 5]"


class Step(NamedTuple):
    """One step of a layer: what ran in its two directions, and how large the input of a replica was."""

    forward: Recording
    backward: Recording
    num_elements: int
    replicas: int

    def costs(self) -> tuple[Cost, ...]:
        return tuple(self._cost(ran) for ran in (self.forward, self.backward))

    def _cost(self, ran: Recording) -> Cost:
        tensors = [found for entry in ran.log if entry.kind == "launch" for found in TENSOR.findall(entry.details)]
        large = sum(
            BYTES[kind] for kind, sizes in tensors if math.prod(map(int, sizes.split(", "))) == self.num_elements
        )
        return Cost(
            ran.launches,
            ran.events,
            ran.waits,
            ran.copies_between_devices,
            ran.bytes_between_devices // CHANNELS,
            large // self.replicas,
        )

    def __str__(self) -> str:
        directions = zip(("forward", "backward"), (self.forward, self.backward), strict=True)
        return "\n".join(f"{name}:\n{ran}\n{ran.by_operator()}\n{ran.by_stream()}\n" for name, ran in directions)


def step(
    parallel: DataParallelWithCallback,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    rows: int = 3,
) -> Step:
    """Run both directions of a layer, without scatter, replicate and gather."""

    def random(device: torch.device) -> Tensor:
        return torch.randn(rows, CHANNELS, 6, 5, device=device).to(dtype, memory_format=memory_format)

    devices = as_devices(parallel.device_ids)
    parts, grads = [random(device).requires_grad_() for device in devices], [random(device) for device in devices]
    parallel.zero_grad()
    replicas = parallel.replicate(parallel.module, parallel.device_ids)
    with recording() as forward:
        outputs = parallel.parallel_apply(replicas, [(part,) for part in parts], [{} for _ in parts])
    with recording() as backward:
        torch.autograd.backward(outputs, grads)
    return Step(forward, backward, parts[0].numel(), len(parts))


def layer(name: str, **options: Any) -> DataParallelWithCallback:
    return twins(nn.BatchNorm2d(CHANNELS, **options), DEVICES[name])[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DEVICES)
def test_layer_costs_exactly_what_the_table_says(name, dtype):
    parallel = layer(name)
    step(parallel, dtype)
    ran = step(parallel, dtype)
    print(f"{name}, {dtype}\n{ran}")
    half = 1 if dtype == torch.float32 else 2
    assert ran.costs() == tuple(cost._replace(bytes_an_element=cost.bytes_an_element // half) for cost in BUDGETS[name])


def test_page_has_the_launches_of_the_table():
    two, four = ([cost.launches for cost in BUDGETS[name]] for name in ("[0, 1]", "[0, 1, 2, 3]"))
    page = Path(__file__).parents[2] / "docs" / "how-it-works.md"
    words = " ".join(page.read_text(encoding="utf-8").split())
    assert f"{two[0]} and {two[1]} on two GPUs, {four[0]} and {four[1]} on four" in words


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "[0]"])
def test_channels_last_costs_what_contiguous_inputs_cost(name):
    parallel = layer(name)
    step(parallel)
    ran = step(parallel, memory_format=torch.channels_last)
    print(ran)
    assert ran.costs() == BUDGETS[name]


# On one GPU, the layer of torch itself waits for the number of its calls, without a momentum.
@pytest.mark.parametrize(
    ("name", "momentum"), [*((name, 0.1) for name in DEVICES), *((name, None) for name in DEVICES if name != "[0]")]
)
def test_host_never_waits_not_even_for_sizes_that_are_new(name, momentum):
    parallel = layer(name, momentum=momentum)
    for rows in (11, 13):
        ran = step(parallel, rows=rows)
        assert (ran.forward.host_syncs, ran.backward.host_syncs) == (0, 0), ran
        assert (ran.forward.bytes_to_device, ran.forward.bytes_to_host) == (0, 0), ran
        assert (ran.backward.bytes_to_device, ran.backward.bytes_to_host) == (0, 0), ran


@pytest.fixture
def _two_processes() -> Iterator[None]:
    """Make this process one of two of a group whose collectives change nothing, as torch has it for its own tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_two_processes")
def test_host_does_not_wait_for_other_processes_either():
    ran = step(layer("[0]"))
    assert (ran.forward.host_syncs, ran.backward.host_syncs) == (0, 0), ran
