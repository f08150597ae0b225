"""The checks of `test_distributed.py`, which run in order in each process of a small world.

As a program, ``python distributed_worker.py <folder> [<name> ...]``, it runs some of them on a simulated GPU.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import importlib
import io
import logging
import os
import pickle
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import simulated_gpus

    simulated_gpus.simulate(1)  # before torch is imported

import pytest
import torch
import torch.distributed as dist
from forks import fork, forked
from helpers import WITHOUT_BIAS, Net, WithPipe, assert_equal, randomize
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.functional import jacobian
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    assert_matches_one_device,
    assert_synchronized,
    convert_model,
    execute_replication_callbacks,
    sync_moments,
)
from sync_batchnorm.processes import Peers
from sync_batchnorm.wrapper.replicas import make_replicas

CHECKS: dict[str, Callable[[], None]] = {}
CHECKS_ON_GPUS: dict[str, Callable[[], None]] = {}  # that need some, and run in a world of two
CHECKS_OF_ENDS: dict[str, Callable[[], None]] = {}  # each ends its world of two: torch aborts the process of rank 0
SLOW = {"compiled_ddp_equals_one_process", "fsdp2_equals_one_process", "layers_called_by_name_compile_to_two_graphs"}
ON_GPUS = [
    "steps_of_a_net_are_those_of_one_process",
    "an_empty_process_takes_part",
    "gradient_penalties_equal_one_process",
    "a_gather_has_the_statistics_with_their_count_and_on_the_cpu_a_number",
    "processes_that_make_their_layers_in_ways_of_their_own_equal_one_process",
    "one_process_goes_on_with_another_object",
]
DEVICE = "cpu"  # "cuda" on simulated GPUs
ROWS = [3, 1, 2]  # of the process of that rank, in most checks
GATHER, REDUCE = "_allgather_base_", "allreduce_"

RANK = SIZE = 0
SECONDS = 60.0  # the timeout of the world; starting takes long where many processes share few cores


def add(checks: dict[str, Callable[[], None]], function: Callable[[], None]) -> Callable[[], None]:
    checks[function.__name__] = function
    return function


check, check_of_end, check_on_gpus = (partial(add, checks) for checks in (CHECKS, CHECKS_OF_ENDS, CHECKS_ON_GPUS))


def twins(module: nn.Module, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return `module` with random parameters, and a synchronized copy of it."""
    plain = randomize(module).to(DEVICE, dtype)
    return plain, convert_model(copy.deepcopy(plain), **options)


def images(rows: Sequence[int] = ()) -> Tensor:
    """Return the random images of all processes, which have `rows` of them, or `ROWS`; equal in all processes."""
    return torch.randn(sum(list(rows or ROWS)[:SIZE]), 3, 6, 5, dtype=torch.float64, device=DEVICE)


def cut(batch: Tensor, rows: Sequence[int] = ()) -> Tensor:
    """Return the rows of this process."""
    return batch.split(list(rows or ROWS)[:SIZE])[RANK]


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over all processes."""
    result = tensor.detach().clone()
    dist.all_reduce(result, group=dist.group.WORLD)
    return result


class Collectives(TorchDispatchMode):
    """Lists the collectives that run in its body, by their operators, and how many numbers the gathers send."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found.append(func.overloadpacket.__name__)
            if self.found[-1] == GATHER:
                self.lengths.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def assert_same_buffers(actual: nn.Module, expected: nn.Module) -> None:
    for (name, buffer), reference in zip(actual.named_buffers(), expected.buffers(), strict=True):
        assert_equal(buffer, reference, name)


def assert_same_gradients(actual: nn.Module, expected: nn.Module, averaged: bool = False) -> None:
    """Compare the gradients of the parameters: those that are the same in all processes, or their sums."""
    for (name, parameter), reference in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (reference.grad is None), name
        if parameter.grad is not None:
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            assert_equal(grad if averaged else summed(grad), reference.grad, f"gradient of {name}")


def assert_same_step(
    plain: nn.Module,
    model: nn.Module,
    batch: Tensor,
    rows: Sequence[int] = (),
    *,
    averages: bool = False,
    accumulates: bool = False,
) -> None:
    """Compare a forward and backward of `model` on the rows of each process with `plain` on all of them at once.

    With `averages`, the gradients of parameters are averaged over the processes. With `accumulates`, further ones will
    be added to them.
    """
    whole, part = (
        tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (batch, cut(batch, rows))
    )
    expected, actual = plain(whole), model(part)
    assert_equal(actual, cut(expected, rows), "output")
    grad, scale = torch.randn_like(expected), SIZE if averages else 1
    expected.backward(grad)
    actual.backward(cut(grad, rows) * scale)
    assert_equal(part.grad / scale, cut(whole.grad, rows), "input gradient")
    assert_same_buffers(model, plain)
    if not accumulates:
        assert_same_gradients(model, plain, averages)
        for module in (plain, model):
            module.zero_grad()


# Nets, all for images with three channels.


def norm_conv(channels: int = 3, size: int = 1) -> nn.Sequential:
    # Without biases before a batch norm: their gradients are zero, and in half precision nothing but noise.
    return nn.Sequential(nn.Conv2d(3, channels, size, bias=False), nn.BatchNorm2d(channels))


def conv_net() -> nn.Sequential:
    return nn.Sequential(*norm_conv(4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3))


class Residual(nn.Module):
    """Blocks that compute their shortcut first."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcuts = nn.ModuleList(norm_conv() for _ in range(3))
        self.paths = nn.ModuleList(nn.Sequential(norm_conv(), nn.Tanh(), norm_conv()) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        for shortcut, path in zip(self.shortcuts, self.paths, strict=True):
            rest = shortcut(input)
            input = torch.tanh(path(input) + rest)
        return input


def large() -> nn.Sequential:
    """Return a net of more than a megabyte, which is the size of the first bucket."""
    return nn.Sequential(nn.Conv2d(3, 20000, 1, stride=2), nn.Tanh(), nn.Conv2d(20000, 3, 1), Residual())


def partly_frozen() -> Residual:
    """Return a net with layers in eval mode between those that synchronize."""
    net = Residual()
    for path in net.paths:
        path[0].eval()
    return net


class Ignored(Residual):
    """A net that ignores the outputs of layers which it calls between others, as those of an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(norm_conv(), nn.Tanh(), norm_conv())

    def forward(self, input: Tensor) -> Tensor:
        input = super().forward(input)
        self.head(input)
        return self.shortcuts[0](input)


def checkpointed(module: nn.Module, reentrant: bool) -> Net:
    return Net(lambda net, input: checkpoint(net.module, input, use_reentrant=reentrant), module=module)


# Statistics and gradients.


@check
def steps_of_a_net_are_those_of_one_process() -> None:
    for net in (conv_net, Residual, partly_frozen, Ignored):
        for reentrant in (None, False, True):
            plain, model = twins(net())
            for _ in range(2):
                pair = plain, model
                if reentrant is not None:
                    pair = checkpointed(plain, reentrant), checkpointed(model, reentrant)
                assert_same_step(*pair, images())


@check
def every_kind_of_layer_equals_torch() -> None:
    options = [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}]
    for layer, shape in (
        (nn.BatchNorm1d(3), ()),
        (nn.BatchNorm1d(3), (5,)),
        (nn.BatchNorm2d(3), (40, 30)),
        (nn.BatchNorm3d(3), (2, 3, 4)),
        *((nn.BatchNorm2d(3, **some), (6, 5)) for some in [*WITHOUT_BIAS, *options]),
    ):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            plain, model = twins(layer, torch.promote_types(dtype, torch.float32))
            for _ in range(2):
                batch = torch.randn(sum(ROWS[:SIZE]), 3, *shape, dtype=dtype)
                assert_same_step(plain, model, batch)
            if len(shape) == 2:
                batch = batch.to(memory_format=torch.channels_last)
                assert_same_step(plain, model, batch)
                assert model(cut(batch)).is_contiguous(memory_format=torch.channels_last)


@check
def clamped_variances_are_those_of_replicas_of_one_process() -> None:
    batch = images([2] * SIZE) * torch.tensor([1.0, 0.01, 1e-4]).view(-1, 1, 1)
    layers = [SynchronizedBatchNorm2d(3, eps=1e-3, eps_mode="clamp", group_size=n).double() for n in (SIZE, None)]
    assert_same_step(DataParallelWithCallback(layers[0], ["cpu"] * SIZE), layers[1], batch, [2] * SIZE)


@check
def an_empty_process_takes_part() -> None:
    plain, model = twins(conv_net())
    for rows in ([0, 3, 2], [2, 0, 3], [0, 0, 0], [2, 3, 0]):
        assert_same_step(plain, model, images(rows), rows)


@check
def one_value_in_all_processes_is_refused_by_all_and_one_in_each_is_enough() -> None:
    plain, model = twins(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel when training, got input size"):
        model(torch.ones(1 if RANK == 1 else 0, 4).double())
    assert_same_buffers(model, plain)
    assert_same_step(plain, model, torch.randn(SIZE, 4).double(), [1] * SIZE)


@check
def running_statistics_are_the_same_bits_in_all_processes() -> None:
    model = SynchronizedBatchNorm2d(16)
    for i in range(5):
        model(torch.randn(2 + RANK, 16, 7, 7) * 10**i + 3**RANK)
    for buffer in (model.running_mean, model.running_var):
        gathered = [torch.empty_like(buffer) for _ in range(SIZE)]
        dist.all_gather(gathered, buffer)
        assert all(torch.equal(other, buffer) for other in gathered)


@check
def several_calls_in_one_loss_equal_one_process() -> None:
    plain, model = twins(Ignored())
    losses: dict[nn.Module, list[Tensor]] = {plain: [], model: []}
    for rows in (ROWS, ROWS[:SIZE][::-1]):  # as a discriminator is called
        batch = images(rows)
        expected, actual = plain(batch), model(cut(batch, rows))
        grad = torch.randn_like(expected)
        losses[plain].append((expected * grad).sum())
        losses[model].append((actual * cut(grad, rows)).sum())
    # And one that takes the output of the last one.
    losses[plain].append((plain(expected.tanh()) * grad).sum())
    losses[model].append((model(actual.tanh()) * cut(grad, rows)).sum())
    for of_model in losses.values():
        sum(of_model).backward(retain_graph=True)
        sum(of_model[:2]).backward()
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


# Gradients of gradients, and gradients of a part of the graph.


@check
def gradient_penalties_equal_one_process() -> None:
    for net in (nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3)), Residual()):
        for rows in (ROWS, [3, 0, 2]):
            plain, model = twins(net)
            batch, *upstream = images(rows), images(rows), images(rows)
            inputs = [batch.clone().requires_grad_(), cut(batch, rows).clone().requires_grad_()]
            for module, input, (inner, outer) in zip(
                (plain, model), inputs, (upstream, [cut(grad, rows) for grad in upstream]), strict=True
            ):
                module.zero_grad()
                output = module(input)
                (grad,) = torch.autograd.grad((output**2 * inner).sum(), input, create_graph=True)
                ((grad**3).sum() + (output * outer).sum()).backward()
            assert_equal(inputs[1].grad, cut(inputs[0].grad, rows), "second gradient")
            assert_same_gradients(model, plain)


def without_gradient(output: Tensor) -> Tensor:
    """Return a tensor whose gradient does not reach `output`."""
    result = output * 2
    result.grad_fn.register_hook(lambda *_: (None, None))
    return result


@check
def a_process_that_gets_no_gradient_takes_part_in_the_exchange() -> None:
    for create_graph in (False, True):
        plain, model = twins(nn.BatchNorm2d(3))
        batch, grad = images(), images()
        grad.split(ROWS[:SIZE])[1].zero_()
        whole, part = batch.clone().requires_grad_(), cut(batch).clone().requires_grad_()
        expected, actual = plain(whole), model(part)
        loss = without_gradient(actual).sum() if RANK == 1 else (actual * cut(grad)).sum()
        (found,) = torch.autograd.grad(loss, part, create_graph=create_graph)
        (wanted,) = torch.autograd.grad((expected * grad).sum(), whole)
        assert_equal(found.detach(), cut(wanted))


@check
def parameters_of_an_output_that_gets_no_gradient_in_any_process_have_zeros() -> None:
    _, model = twins(nn.BatchNorm2d(3))
    without_gradient(model(cut(images()))).sum().backward()
    assert [parameter.grad.count_nonzero() for parameter in model.parameters()] == [0, 0]


@check
def sync_moments_spans_processes() -> None:
    batch = images()
    a, b = torch.randn(2, 3, dtype=torch.float64)
    whole, part = batch.clone().requires_grad_(), cut(batch).clone().requires_grad_()
    var, mean = torch.var_mean(whole, (0, 2, 3), correction=0)
    with Collectives() as collectives:
        actual_mean, actual_var, count = sync_moments(part, None)
    assert collectives.found == [REDUCE] * 2
    assert count == batch.numel() // 3
    assert_equal(actual_mean, mean)
    assert_equal(actual_var, var)
    # The same loss in every process: its gradient reaches the statistics once from each.
    loss, actual = (mean * a + var**2 * b).sum() * SIZE, (actual_mean * a + actual_var**2 * b).sum()
    (wanted,) = torch.autograd.grad(loss, whole, create_graph=True)
    (given,) = torch.autograd.grad(actual, part, create_graph=True)
    assert_equal(given, cut(wanted))
    (wanted,) = torch.autograd.grad((wanted**3).sum(), whole)
    (given,) = torch.autograd.grad((given**3).sum(), part)
    assert_equal(given, cut(wanted), "second gradient")
    mean, var, count = sync_moments(torch.zeros(0, 3, 4), None)
    assert not torch.cat((mean, var)).any()
    assert count == 0


# When processes communicate, and with whom.


@check
def a_layer_makes_one_collective_in_each_direction() -> None:
    for net, layers, sums in ((nn.BatchNorm2d(3), 1, 0), (conv_net(), 2, 2), (Residual(), 9, 9)):
        _, model = twins(net)
        input = cut(images()).requires_grad_(sums > 0)
        with Collectives() as collectives:
            output = model(input)
            assert collectives.found == [GATHER] * layers
            output.backward(torch.randn_like(output))
        assert collectives.found == [GATHER] * layers + [REDUCE] * sums


@check
def a_gather_has_the_statistics_with_their_count_and_on_the_cpu_a_number() -> None:
    for channels in (1, 2048, 2049, 4096):
        length = (2 if DEVICE == "cpu" else 1) + 2 * channels
        layer = SynchronizedBatchNorm1d(channels, device=DEVICE)
        for _ in range(2):
            with Collectives() as collectives:
                layer(torch.randn(2, channels, device=DEVICE))
            assert (collectives.found, collectives.lengths) == ([GATHER], [length])


@check
def recomputation_exchanges_again() -> None:
    model = checkpointed(nn.Sequential(SynchronizedBatchNorm2d(3), nn.Tanh()), False)
    found, call = [], Peers.call
    with pytest.MonkeyPatch.context() as patch:  # as a mode does not see what a layer in a checkpoint does
        patch.setattr(Peers, "call", lambda *args: (found.append(args[1].__name__), call(*args))[1])
        output = model(torch.randn(2, 3, 4, 4, requires_grad=True))
        output.backward(torch.randn_like(output))
    assert [name[:10] for name in found] == ["all_gather", "all_gather", "all_reduce"]
    assert model.module[0].num_batches_tracked == 2


@check
def eval_never_communicates_even_without_running_statistics() -> None:
    for net in (conv_net(), nn.BatchNorm2d(3, track_running_stats=False)):
        plain, model = twins(net)
        batch = images([2] * SIZE)
        with Collectives() as collectives:
            assert torch.equal(model.eval()(cut(batch, [2] * SIZE)), plain.eval()(cut(batch, [2] * SIZE)))
            assert_equal(DataParallelWithCallback(model, ["cpu"] * 2)(batch), plain(batch))
        assert collectives.found == []


@check
def checks_of_one_process_are_refused_or_name_what_is_in_eval_mode() -> None:
    with pytest.raises(RuntimeError, match="expected a single process, as copies would exchange with others"):
        assert_matches_one_device(nn.Linear(3, 3), torch.ones(4, 3))
    with pytest.raises(RuntimeError, match=r"the model itself .*: it is in eval mode"):
        assert_synchronized(SynchronizedBatchNorm2d(3, track_running_stats=False).eval())
    assert_synchronized(SynchronizedBatchNorm2d(3))  # The processes are connected, without a wrapper.
    with pytest.raises(RuntimeError, match=r"1 \(BatchNorm2d\): it is not synchronized; call convert_model"):
        assert_synchronized(nn.Sequential(DataParallelWithCallback(nn.Linear(3, 3), ["cpu"]), nn.BatchNorm2d(3)))


@check
def sub_groups_synchronize_among_themselves() -> None:
    members = [[0], [1]] if SIZE == 2 else [[0, 2], [1]]
    groups = [dist.new_group(ranks) for ranks in members]
    (mine,) = [i for i, ranks in enumerate(members) if RANK in ranks]
    here = members[mine].index(RANK)
    plain, model = twins(nn.BatchNorm2d(3), process_group=groups[mine])
    batch, grad = (images([2] * SIZE).unflatten(0, (SIZE, 2)) for _ in range(2))
    whole = batch[members[mine]].flatten(0, 1).requires_grad_()
    part = batch[RANK].clone().requires_grad_()
    expected = plain(whole)
    expected.backward(grad[members[mine]].flatten(0, 1))
    with Collectives() as collectives:
        actual = model(part)
        actual.backward(grad[RANK])
    assert collectives.found == ([] if len(members[mine]) == 1 else [GATHER, REDUCE])
    assert_equal(actual, expected.split(2)[here])
    assert_equal(part.grad, whole.grad.split(2)[here])
    assert_same_buffers(model, plain)


@check
def what_is_no_group_is_refused() -> None:
    text = r"process_group must be a group of torch.distributed, got .*; pass the result of torch.distributed.new_group"
    for wrong in (3, "gloo", [0, 1], init_device_mesh(DEVICE, (SIZE,))):
        layer = SynchronizedBatchNorm2d(3)
        layer.process_group = wrong
        for refuse in (
            lambda wrong=wrong: SynchronizedBatchNorm2d(3, process_group=wrong),
            lambda wrong=wrong: convert_model(nn.BatchNorm2d(3), process_group=wrong),
            lambda wrong=wrong: sync_moments(torch.randn(2, 3), None, process_group=wrong),
            lambda layer=layer: layer(torch.randn(2, 3, 4, 4)),
        ):
            with pytest.raises(TypeError, match=text):
                refuse()


@check
def a_group_without_this_process_is_refused() -> None:
    model = SynchronizedBatchNorm2d(3, process_group=dist.new_group([0]))
    text = f"expected a process_group that this process belongs to, but got one without rank {RANK}"
    with pytest.raises(ValueError, match=text) if RANK else contextlib.nullcontext():
        model(torch.randn(2, 3, 4, 4))
    model.eval()(torch.randn(2, 3, 4, 4))


# Which layer processes call together, and where.


def assert_ends(width: int, device: str) -> None:
    """Call a layer whose statistics do not fit into the memory that rank 0 has for them, or those of rank 0 itself."""
    faulthandler.disable()
    layer = SynchronizedBatchNorm2d(width, device=device)
    with pytest.raises(RuntimeError, match="Connection") as caught:
        [layer(torch.randn(2, width, 4, 4, device=device)) for _ in range(2)]  # The first one may get what rank 0 sent.
    assert caught.value.__notes__ == [f"Raised in the exchange of {WITHOUT_NAMES[0]} between processes."]


@check_of_end
def processes_with_layers_of_other_widths_end() -> None:
    assert_ends([3, 4][RANK], "cpu")


@check_of_end
def a_process_on_a_gpu_beside_one_on_the_cpu_ends() -> None:
    assert_ends(3, ["cuda", "cpu"][RANK])


@check_on_gpus
def on_gpus_nothing_is_compared() -> None:
    layers = named_layers(DEVICE)
    for called in (layers[0], layers[1], layers[RANK]):
        called.reset_running_stats()
        plain = nn.BatchNorm2d(3, device=DEVICE, dtype=torch.float64)
        with Collectives() as collectives:
            assert_same_step(plain, called.double(), images())
        assert collectives.found.count(GATHER) == 1


@check_on_gpus
def gradients_are_not_multiplied_by_a_weight_in_half_precision() -> None:
    layer = SynchronizedBatchNorm2d(3, device=DEVICE)
    nn.init.constant_(layer.weight, 3e4)
    input = (1e4 * torch.randn(2, 3, 4, 4).sign()).to(DEVICE, torch.float16).requires_grad_()
    layer(input).backward(torch.full_like(input, 4.0) * torch.randn_like(input).sign())
    assert input.grad.isfinite().all()


def named_layers(device: str = "cpu") -> list[nn.Module]:
    models = [nn.Sequential(OrderedDict([(name, nn.BatchNorm2d(3, device=device))])) for name in ("stem", "head")]
    return [convert_model(model)[0] for model in models]


def copied_by_one_process() -> list[nn.Module]:
    """Return layers of which one process has copies as well, such as an average that it evaluates."""
    layers = named_layers()
    for layer in copy.deepcopy(layers) if RANK == 0 else []:
        layer.eval()(torch.ones(2, 3, 4, 4))
    return layers


def unpickled_by_one_process() -> list[nn.Module]:
    layers = named_layers()
    return pickle.loads(pickle.dumps(layers)) if RANK == 1 else layers


WITHOUT_NAMES = ["a SynchronizedBatchNorm2d without a name"] * 2
PAIRS: list[tuple[Callable[[], Sequence[nn.Module]], Sequence[str]]] = [
    (lambda: convert_model(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))), ["0", "1"]),
    (lambda: [layer := SynchronizedBatchNorm2d(3), copy.deepcopy(layer)], WITHOUT_NAMES),
    (copied_by_one_process, ["stem", "head"]),
    (unpickled_by_one_process, ["stem", "head"]),
]


def assert_all_are_told(layers: Sequence[nn.Module], names: Sequence[str]) -> list[str]:
    """Call a layer in each rank, the last one also in those after it; return the numbers that all tell.

    A rank names its own layer, and says only the numbers of the others.
    """
    called = layers[min(RANK, len(layers) - 1)]
    before = copy.deepcopy(called.state_dict())
    name = names[min(RANK, len(names) - 1)]
    each = [rf"{name if rank == RANK else 'a layer'} \((.*?)\) in rank {rank}" for rank in range(SIZE)]
    text = f"expected all processes to call the same synchronized batch norm, but got {', '.join(each)}; make every"
    with Collectives() as collectives, pytest.raises(RuntimeError, match=text) as caught:
        called(torch.randn(2, called.num_features, 4, 4))
    assert collectives.found == [GATHER]
    for name, value in called.state_dict().items():
        assert torch.equal(value, before[name]), name
    return list(re.search(text, str(caught.value)).groups())


@check
def processes_that_call_different_layers_after_a_right_call_are_told_which() -> None:
    for make, names in PAIRS:
        layers = make()
        for layer in layers:
            layer(torch.randn(2, 3, 4, 4))
        one, other, *_ = [int(told.removeprefix("number ")) for told in assert_all_are_told(layers, names)]
        assert other == one + 1
        for layer in layers:
            layer.reset_running_stats()
            assert_same_step(nn.BatchNorm2d(3).double(), layer.double(), images())


@check
def process_is_told_the_name_of_its_own_layer_only() -> None:
    layers, names = named_layers(), ["stem", "head"]
    own = 1 if RANK == 1 else 0
    first, second, third = layers[own], SynchronizedBatchNorm2d(3), SynchronizedBatchNorm2d(3)
    for layer in (first, second):  # No process notices that rank 1 begins with another layer.
        layer(torch.randn(2, 3, 4, 4))
    layers, names = [second, first, third], [WITHOUT_NAMES[0], names[own], WITHOUT_NAMES[0]]
    one, other, *rest = assert_all_are_told(layers, names)
    assert (int(one[7:]), rest) == (int(other[7:]) + 1, ["not yet numbered"] * (SIZE - 2))


def loaded(model: nn.Module) -> nn.Module:
    """Return a model that was saved as an object."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    return average.module


@check
def one_process_goes_on_with_another_object() -> None:
    for make in (copy.deepcopy, averaged, loaded):
        plain, model = twins(Residual())
        first = model
        for rank in [*range(SIZE)] * 2:  # each in turn goes on with another one, then with the first one again
            assert_same_step(plain, model, images())
            if rank == RANK:
                first.load_state_dict(model.state_dict())
                model = make(model) if model is first else first
        assert_same_step(plain, model, images())


def first_in_eval(*nets: nn.Module) -> nn.Module:
    """Return the first of some nets, after each process has evaluated all, in an order of its own."""
    for net in nets[:: 1 if RANK else -1]:
        net.eval()(images())
    return nets[0].train()


@check
def processes_that_make_their_layers_in_ways_of_their_own_equal_one_process() -> None:
    for make in (
        lambda net: [convert_model(copy.deepcopy(net)) for _ in range(SIZE)][RANK],
        lambda net: convert_model(nn.ModuleList([net, copy.deepcopy(net).eval()][: 1 + RANK]))[0],
        lambda net: convert_model(nn.ModuleDict({str(i): copy.deepcopy(net) for i in range(SIZE)}))[str(RANK)],
        lambda net: first_in_eval(*[convert_model(copy.deepcopy(net)) for _ in range(2)]),
    ):
        plain = randomize(conv_net()).to(DEVICE, torch.float64)
        model = make(copy.deepcopy(plain))
        for step in range(4):
            if step == RANK + 1:
                copy.deepcopy(model)  # in the middle of a training, and at another step in each process
            assert_same_step(plain, model, images())


@check
def numbers_begin_anew_in_a_group_that_was_made_anew() -> None:
    layers = named_layers()
    for order in (layers, layers[::-1]):
        group = dist.new_group()
        for layer in order:
            layer.process_group = group
            layer(torch.randn(2, 3, 4, 4))
        told = assert_all_are_told(order, ["stem", "head"] if order is layers else ["head", "stem"])
        assert told[:2] == ["number 1", "number 2"]
        dist.destroy_process_group(group)


@check
def layer_that_is_gone_in_some_processes_keeps_its_number() -> None:
    first, input = SynchronizedBatchNorm2d(3), torch.randn(2, 3, 4, 4, requires_grad=True)
    output, gone = first(input), weakref.ref(first)
    kept = first if RANK else None
    del first
    gc.collect()
    assert gone() is kept  # the graph keeps no layer alive
    output.sum().backward()
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    for _ in range(2):  # Processes have agreed on numbers, although they have others free.
        for layer in layers:
            layer.reset_running_stats()
            assert_same_step(nn.BatchNorm2d(3).double(), layer, images())
    assert_all_are_told([layers[0].float(), kept], WITHOUT_NAMES)  # Its number is free in one process only.


@check
def forked_child_is_refused_in_training_mode() -> None:
    model = SynchronizedBatchNorm2d(3)
    ended = forked(lambda: model(torch.ones(2, 3, 4, 4)))
    assert ended.status == 1
    assert "but got a call in training mode in a process that was forked from it, such as" in ended.output
    assert forked(lambda: model.eval()(torch.ones(2, 3, 4, 4))).status == 0


@check
def what_other_processes_cannot_take_is_refused() -> None:
    layer, batch = SynchronizedBatchNorm2d(3), images([1] * SIZE).float()
    whole = distribute_tensor(batch, init_device_mesh(DEVICE, (SIZE,)), [Shard(0)])
    text = "expected a tensor of this process, but got a %s in the exchange of %s; pass the to_local"
    with pytest.raises(RuntimeError, match=text % ("DTensor", WITHOUT_NAMES[0]) + "|sharding strategy"):
        layer(whole)
    for norm, name in ((layer, WITHOUT_NAMES[0]), (lambda input: sync_moments(input, None), "sync_moments")):
        refused = pytest.raises(RuntimeError, match=text % ("FakeTensor", name))
        with FakeTensorMode(allow_non_fake_inputs=True), refused:
            norm(torch.randn(2, 3, 4, 4))
    with pytest.raises(RuntimeError, match="Batching rule not implemented for c10d"):
        jacobian(layer, batch[:, :, :1, :1], vectorize=True)
    layer(whole.to_local())
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        plain, model = twins(nn.BatchNorm2d(3))
        assert_same_step(plain, model, images())


@check
def group_size_counts_replicas_of_one_process() -> None:
    layer = SynchronizedBatchNorm2d(3, group_size=2)
    batch = torch.randn(5, 3, 4, 4) + RANK
    with Collectives() as collectives:
        output = DataParallelWithCallback(layer, ["cpu"] * 5)(batch)
        with pytest.warns(UserWarning, match=r"process_group=torch\.distributed\.new_subgroups\(2\)\[0\]"):
            layer(batch)
        assert_equal(SynchronizedBatchNorm2d(3, group_size=1)(batch), nn.BatchNorm2d(3)(batch))  # without a warning
        replica, other = make_replicas(SynchronizedBatchNorm2d(3), [torch.device("cpu")] * 2, False)
        with pytest.warns(UserWarning, match="replicas that are not connected"):
            other(batch)
        execute_replication_callbacks([replica])
        with pytest.raises(
            RuntimeError, match=r"the model itself \(SynchronizedBatchNorm2d\): no wrapper is around it"
        ):
            assert_synchronized(layer)
        assert_synchronized(DataParallelWithCallback(layer, ["cpu"] * 2))
        assert_synchronized(SynchronizedBatchNorm2d(3))  # it synchronizes processes
    assert collectives.found == []
    for part, group in zip(output.split(2), batch.split(2), strict=True):
        assert_equal(part, nn.BatchNorm2d(3)(group))


# One replica in each process.


@check
def several_replicas_in_a_process_are_refused_at_once() -> None:
    text = r"use one process per device, .*\(1\.0, replica \d\); run: torchrun --nproc-per-node="
    for layer in (nn.BatchNorm2d(3), WithPipe(lambda net, x: x - sync_moments(x, net.pipe)[0][:, None, None])):
        plain, model = twins(nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Sequential(layer)))
        parallel = DataParallelWithCallback(model, ["cpu"] * 2)
        for ranks in ([0], range(SIZE)):  # nobody waits for a process that is refused, nor for one that is not
            with Collectives() as collectives, contextlib.ExitStack() as stack:
                if RANK in ranks:
                    stack.enter_context(pytest.raises(RuntimeError, match=text))
                    parallel(images([2] * SIZE))
            assert collectives.found == []
        ddp = DistributedDataParallel(parallel)
        with pytest.raises(RuntimeError, match=text):
            ddp(images([2] * SIZE))
        assert_same_buffers(model, plain)


@check
def one_replica_in_a_process_is_a_process() -> None:
    plain, model = twins(conv_net())
    assert_same_step(plain, DataParallelWithCallback(model, ["cpu"]), images())
    rows = [1] * SIZE  # a single chunk
    assert_same_step(plain, DataParallelWithCallback(model, ["cpu"] * 2), images(rows), rows)


# DistributedDataParallel, which averages the gradients of the processes.


def each_ddp(net: Callable[[], nn.Module], **options: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield twins of a net, of which one trains in all processes: with tiny buckets, and converted in a usual DDP.

    Some processes have recorded another graph before, so that the nodes of their nets have higher numbers.
    """
    others = torch.ones(2, requires_grad=True)
    for _ in range(1000 * RANK):
        others = others * 1.0
    plain, model = twins(net())
    yield plain, DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)
    plain = randomize(net()).double()
    yield plain, convert_model(DistributedDataParallel(copy.deepcopy(plain), **options))
    others.sum().backward()


def assert_same_training(plain: nn.Module, model: nn.Module) -> None:
    """Compare three steps with one process, of which the second one is that of an uneven batch."""
    for rows in ([4] * SIZE, [4, 1, 2], [4] * SIZE):
        assert_same_step(plain, model, images(rows), rows, averages=True)
        with torch.no_grad():
            for parameter in [*plain.parameters(), *model.parameters()]:
                parameter.mul_(0.9)


@check
def ddp_training_equals_one_process() -> None:
    for net, options in (
        *((net, {}) for net in (conv_net, Residual, large, partly_frozen)),
        (Residual, {"broadcast_buffers": False}),
        (Residual, {"static_graph": True}),
        (Residual, {"gradient_as_bucket_view": True}),
        (Ignored, {"find_unused_parameters": True}),
    ):
        for plain, ddp in each_ddp(net, **options):
            assert_same_training(plain, ddp)


@check
def ddp_around_checkpoints_equals_one_process() -> None:
    for reentrant in (False, True):
        plain, model = twins(nn.Sequential(Residual(), conv_net()))
        one, ours = (nn.Sequential(*[checkpointed(part, reentrant) for part in net]) for net in (plain, model))
        assert_same_training(one, DistributedDataParallel(ours))


class GatheredStatistics(torch.autograd.Function):
    """The features of all processes, as losses that compare samples with each other take them."""

    @staticmethod
    def forward(ctx: object, features: Tensor) -> Tensor:
        parts = [torch.empty_like(features) for _ in range(SIZE)]
        dist.all_gather(parts, features)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return summed(grad).chunk(SIZE)[RANK]


def levels(net: Net, input: Tensor) -> tuple[Tensor, Tensor]:
    """Return features of two depths, so that the collectives of a loss are between those of layers."""
    stem = net.stem(input)
    return net.head(stem).flatten(1), net.trunk(stem).flatten(1)


@check
def ddp_with_losses_over_gathered_features_equals_one_process() -> None:
    def contrast(features: Sequence[Tensor]) -> Tensor:
        return sum((one @ one.T).log_softmax(1).diagonal().sum() for one in features)

    rows = [2] * SIZE
    for plain, ddp in each_ddp(lambda: Net(levels, stem=Residual(), trunk=Residual(), head=norm_conv())):
        for _ in range(2):
            batch = images(rows)
            expected = contrast(plain(batch))
            actual = contrast([GatheredStatistics.apply(one) for one in ddp(cut(batch, rows))])
            assert_equal(actual, expected)
            expected.backward()
            actual.backward()
            assert_same_gradients(ddp, plain, averaged=True)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    torch.compiler.reset()  # Tests that ran before in this process may have reached its limit of compilations.
    logging.disable(logging.WARNING)  # what the compiler logs and warns of is its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@check
def compiled_ddp_equals_one_process() -> None:
    plain, model = twins(conv_net())
    with compiling():
        # Not the default backend, which needs a compiler of C++ and seconds.
        assert_same_training(plain, torch.compile(DistributedDataParallel(model), backend="aot_eager"))


class Block(nn.Module):
    """A net that calls its layers by name, which `torch.compile` can break between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(input)))


@check
def layers_called_by_name_compile_to_two_graphs() -> None:
    plain, model = twins(Block())
    graphs: list[Any] = []
    batch = images()
    with compiling():
        compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
        assert_equal(compiled(cut(batch)), cut(plain(batch)))
    assert len(graphs) == 2


@check
def fsdp2_equals_one_process() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (SIZE,))
    for layers in (nn.Conv2d, nn.Module):  # also the batch norms by themselves
        for convert_first in (True, False):
            plain = randomize(conv_net()).double()
            model = copy.deepcopy(plain)
            if convert_first:
                convert_model(model)
            for child in model:
                if isinstance(child, layers):
                    fully_shard(child, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if not convert_first:
                convert_model(model)
            assert_same_training(plain, model)


@check
def accumulation_under_no_sync_equals_one_process() -> None:
    for plain, ddp in each_ddp(Residual):
        for rows in ([4, 4, 4], [1, 4, 2]):
            with ddp.no_sync():
                assert_same_step(plain, ddp, images(rows), rows, averages=True, accumulates=True)
        assert_same_step(plain, ddp, images([4, 1, 1]), [4, 1, 1], averages=True)


@check
def process_that_has_no_batches_left_ends_the_others_with_the_error_of_ddp() -> None:
    ddp = DistributedDataParallel(convert_model(Residual()))

    def train() -> None:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2 + RANK):
                ddp(torch.randn(4, 3, 4, 3)).mean().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()


@check
def training_beside_a_process_in_eval_ends_with_the_timeout_of_torch() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = convert_model(nn.Sequential(OrderedDict(bn=nn.BatchNorm2d(3))), process_group=group).train(RANK == 0)
    if RANK == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms") as caught:
            model(torch.randn(2, 3, 4, 4))
        assert caught.value.__notes__ == ["Raised in the exchange of bn between processes."]
    else:
        model(torch.randn(2, 3, 4, 4))
    dist.barrier()  # until when the others are there


def on_the_host(collective: Callable[..., object]) -> Callable[..., object]:
    """Return a collective that takes tensors of simulated GPUs, for which there is no backend."""

    def run(*tensors: Tensor, group: Any) -> None:
        copies = [tensor.cpu() for tensor in tensors]
        collective(*copies, group=group)
        tensors[0].copy_(copies[0])

    return run


def run_checks(rank: int, size: int, folder: Path, names: Sequence[str]) -> None:
    """Run checks, as the process of a rank, up to the first that fails; make a file for each that has passed."""
    global RANK, SIZE
    RANK, SIZE = rank, size
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # Torch 2.13 has another name for it.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # of the compiler
    store = dist.FileStore(str(folder / "world"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
    for name in names:
        torch.manual_seed(sum(name.encode()))  # the same in every process
        (CHECKS | CHECKS_ON_GPUS | CHECKS_OF_ENDS)[name]()
        (folder / f"{name}.{rank}").touch()


def run_world(size: int, folder: Path, names: Sequence[str]) -> str:
    """Run checks in a world of `size` processes; return what these have printed, which is nothing if all is right."""
    importlib.import_module("torch._dynamo")  # as checkpoints do, once and not in each process
    children, printed = [], ""
    for rank in range(size):
        with (folder / f"output.{rank}").open("w") as output:
            body = lambda rank=rank: run_checks(rank, size, folder, names)  # noqa: E731
            children.append(fork(body, os.dup(output.fileno())))
    for rank, child in enumerate(children):
        _, status = os.waitpid(child, 0)
        output_of_rank = (folder / f"output.{rank}").read_text()
        if status or output_of_rank:
            printed += f"rank {rank} of {size}, which ended with {status}:\n{output_of_rank}\n"
    return printed


if __name__ == "__main__":
    DEVICE = "cuda"
    for function in {"all_gather_into_tensor", "all_gather_single", "all_reduce"} & set(dir(dist)):
        setattr(dist, function, on_the_host(getattr(dist, function)))
    print(run_world(2, Path(sys.argv[1]), sys.argv[2:] or [*ON_GPUS, *CHECKS_ON_GPUS]))
