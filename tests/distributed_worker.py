"""One process of a small world: runs the checks of `test_distributed.py` in order and writes down how each ended.

Run as ``python distributed_worker.py <rank> <size> <folder> <what>``. Starting processes takes longer than all of the
checks, so a world is started once for all of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[4] == "gpus":
    import simulated_gpus

    simulated_gpus.simulate(3)  # before torch is imported

import pytest
import torch
import torch.distributed as dist
from helpers import WITHOUT_BIAS, assert_equal, randomize
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    assert_synchronized,
    convert_model,
    recompute,
    sync_moments,
)

CHECKS: dict[str, tuple[Callable[[], None], tuple[int, ...]]] = {}
ON_GPUS: list[str] = []  # the checks that also run on simulated GPUs
SLOW: list[str] = []  # the checks that run only where all is tried
DEVICE = "cpu"  # "cuda" on simulated GPUs
ROWS = [3, 1, 2]  # of the process of that rank, in most checks

RANK = SIZE = 0
THOROUGH = True  # whether nets are tried with every mix of replicas, or each with a few
SECONDS = 60.0  # the timeout of the world; starting takes long where many processes share few cores


def check(*sizes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check for worlds of the given sizes."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = (function, sizes)
        return function

    return register


def on_gpus_too(function: Callable[[], None]) -> Callable[[], None]:
    ON_GPUS.append(function.__name__)
    return function


def slow(function: Callable[[], None]) -> Callable[[], None]:
    SLOW.append(function.__name__)
    return function


def cut(batch: Tensor, rows: list[int] | None = None) -> Tensor:
    """Return the rows of this process."""
    return batch.split((rows or ROWS)[:SIZE])[RANK]


def total(rows: list[int] | None = None) -> int:
    return sum((rows or ROWS)[:SIZE])


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over all processes."""
    result = tensor.detach().clone()
    dist.all_reduce(result, group=dist.group.WORLD)
    return result


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """List the collectives that run in the body."""
    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}

    def counted(name: str, *args: object, **kwargs: object) -> object:
        calls.append(name)
        return originals[name](*args, **kwargs)

    for name in originals:
        setattr(dist, name, functools.partial(counted, name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def conv_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    # Without biases before a batch norm: their gradients are zero, and in half precision nothing but noise.
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, bias=False),
        nn.BatchNorm2d(3),
    ).to(dtype)


def assert_same_buffers(actual: nn.Module, expected: nn.Module, tolerance: float | None = None) -> None:
    pairs = zip(actual.named_buffers(), expected.buffers(), strict=True)
    for (name, buffer), reference in pairs:
        assert_equal(buffer, reference, name, tolerance)


def assert_same_gradients(actual: nn.Module, expected: nn.Module, share: float = 1.0) -> None:
    """Compare the gradients of the parameters with `share` times the expected ones."""
    for (name, parameter), reference in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (reference.grad is None), name
        if parameter.grad is not None:
            assert_equal(parameter.grad, reference.grad * share, f"gradient of {name}")


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(self.module, input, use_reentrant=self.reentrant)


def assert_same_sums(model: nn.Module, plain: nn.Module, tolerance: float | None = None) -> None:
    """Compare the gradients of the parameters, summed over all processes."""
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None:
            assert_equal(summed(parameter.grad), reference.grad, f"gradient of {name}", tolerance)
        elif DEVICE == "cpu":
            assert parameter.grad is None, name
        else:  # see `assert_same_gradient` in `helpers.py`
            assert parameter.grad is None or not parameter.grad.count_nonzero(), name


def assert_one_batch(
    plain: nn.Module,
    model: nn.Module,
    batch: Tensor,
    rows: list[int] | None = None,
    tolerance: float | None = None,
) -> None:
    """Compare a forward and backward of `model` on the rows of each process with `plain` on all of them at once."""
    whole = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    part = cut(batch, rows).clone(memory_format=torch.preserve_format).requires_grad_()
    expected, actual = plain(whole), model(part)
    assert_equal(actual, cut(expected, rows), "output", tolerance)
    grad = torch.randn_like(expected)
    for parameter in [*plain.parameters(), *model.parameters()]:
        parameter.grad = None
    expected.backward(grad)
    actual.backward(cut(grad, rows))
    assert_equal(part.grad, cut(whole.grad, rows), "input gradient", tolerance)
    assert_same_sums(model, plain, tolerance)
    assert_same_buffers(model, plain, tolerance)


# Statistics and gradients.


@check(2, 3)
def conv_net_steps_are_those_of_one_process() -> None:
    plain = randomize(conv_net())
    model = convert_model(copy.deepcopy(plain))
    for _ in range(3):
        assert_one_batch(plain, model, torch.randn(total(), 2, 6, 5, dtype=torch.float64))


@check(2, 3)
def every_kind_of_layer_equals_torch() -> None:
    for layer, plain, shape in (
        (SynchronizedBatchNorm1d, nn.BatchNorm1d, ()),
        (SynchronizedBatchNorm1d, nn.BatchNorm1d, (5,)),
        (SynchronizedBatchNorm2d, nn.BatchNorm2d, (40, 30)),
        (SynchronizedBatchNorm3d, nn.BatchNorm3d, (2, 3, 4)),
        (SynchronizedBatchNorm, nn.BatchNorm2d, (3, 2)),
    ):
        expected = randomize(plain(4))
        actual = layer(4)
        actual.load_state_dict(expected.state_dict())
        assert_one_batch(expected, actual, torch.randn(total(), 4, *shape))


@check(2, 3)
def options_of_a_layer_equal_those_of_torch() -> None:
    for options in (
        {"affine": False},
        *WITHOUT_BIAS,
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
    ):
        plain = randomize(nn.BatchNorm2d(4, **options)).double()
        model = SynchronizedBatchNorm2d(4, **options).double()
        model.load_state_dict(plain.state_dict())
        for _ in range(3):
            assert_one_batch(plain, model, torch.randn(total(), 4, 3, 3, dtype=torch.float64))


@check(2, 3)
def channels_last_stays_channels_last() -> None:
    plain = randomize(nn.BatchNorm2d(5))
    model = convert_model(copy.deepcopy(plain))
    batch = torch.randn(total(), 5, 4, 4).to(memory_format=torch.channels_last)
    assert_one_batch(plain, model, batch)
    assert model(cut(batch)).is_contiguous(memory_format=torch.channels_last)


@check(2, 3)
def half_precision_inputs_equal_torch() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        plain = randomize(nn.BatchNorm2d(4))
        assert_one_batch(plain, convert_model(copy.deepcopy(plain)), torch.randn(total(), 4, 6, 6).to(dtype))


@check(2, 3)
def autocast_step_equals_one_process() -> None:
    plain = randomize(conv_net(torch.float32))
    model = convert_model(copy.deepcopy(plain))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_one_batch(plain, model, torch.randn(total(), 2, 6, 5), tolerance=5e-2)


@check(2, 3)
def a_mean_far_from_zero_keeps_its_digits() -> None:
    batch = torch.randn(total(), 4, 8, 8, dtype=torch.float64) + 1e4
    plain = nn.BatchNorm2d(4).double()
    expected = plain(batch)
    model = SynchronizedBatchNorm2d(4)
    assert_equal(model(cut(batch).float()).double(), cut(expected), "output", 2e-3)
    assert_equal(model.running_var.double(), plain.running_var, "running_var", 1e-5)


@check(2, 3)
def an_empty_process_takes_part() -> None:
    rows = [0, 3, 2] if SIZE == 2 else [2, 0, 3]
    plain = randomize(conv_net())
    model = convert_model(copy.deepcopy(plain))
    for _ in range(2):
        assert_one_batch(plain, model, torch.randn(total(rows), 2, 6, 5, dtype=torch.float64), rows)


@check(2, 3)
def empty_inputs_everywhere_are_those_of_torch() -> None:
    plain, model = nn.BatchNorm2d(4), SynchronizedBatchNorm2d(4)
    input = torch.randn(0, 4, 3, 3, requires_grad=True)
    output = model(input)
    output.backward(torch.randn_like(output))
    assert input.grad.shape == input.shape
    plain(torch.randn(0, 4, 3, 3))
    assert_equal(model.num_batches_tracked, plain.num_batches_tracked)
    assert torch.isfinite(model.running_mean).all()


@check(2, 3)
def one_value_in_all_processes_is_refused_by_all() -> None:
    model = SynchronizedBatchNorm1d(4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel when training, got input size"):
        model(torch.randn(1 if RANK == 1 else 0, 4))
    for name, buffer in model.state_dict().items():
        assert torch.equal(buffer, before[name])


@check(2, 3)
def one_value_in_each_process_is_enough() -> None:
    plain = randomize(nn.BatchNorm1d(4)).double()
    batch = torch.randn(SIZE, 4, dtype=torch.float64)
    assert_one_batch(plain, convert_model(copy.deepcopy(plain)), batch, [1] * SIZE)


@check(2, 3)
def running_statistics_are_the_same_bits_in_all_processes() -> None:
    model = SynchronizedBatchNorm2d(16)
    for step in range(5):
        model(torch.randn(2 + RANK, 16, 7, 7) * 10**step + 3**RANK)
    for buffer in (model.running_mean, model.running_var):
        gathered = [torch.empty_like(buffer) for _ in range(SIZE)]
        dist.all_gather(gathered, buffer)
        assert all(torch.equal(other, buffer) for other in gathered)


@check(2, 3)
def the_input_may_need_no_gradient() -> None:
    plain = randomize(nn.BatchNorm2d(3)).double()
    model = convert_model(copy.deepcopy(plain))
    batch = torch.randn(total(), 3, 4, 4, dtype=torch.float64)
    grad = torch.randn_like(batch)
    plain(batch).backward(grad)
    with collectives() as calls:
        model(cut(batch)).backward(cut(grad))
    assert calls == ["all_gather"]
    assert_equal(summed(model.weight.grad), plain.weight.grad)


@check(2, 3)
def a_layer_called_twice_counts_two_calls() -> None:
    plain = nn.Sequential(randomize(nn.BatchNorm2d(3)).double())
    plain.append(plain[0])
    model = convert_model(copy.deepcopy(plain))
    assert_one_batch(plain, model, torch.randn(total(), 3, 4, 4, dtype=torch.float64))
    assert model[0].num_batches_tracked == 2


@check(2, 3)
def forward_without_gradient_still_counts() -> None:
    plain = nn.BatchNorm2d(3).double()
    model = convert_model(copy.deepcopy(plain))
    batch = torch.randn(total(), 3, 4, 4, dtype=torch.float64)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_equal(model(cut(batch)), cut(plain(batch)))
        assert_same_buffers(model, plain)


@check(2, 3)
def clamped_variances_are_those_of_replicas_of_one_process() -> None:
    devices = ["cpu"] * SIZE
    batch = torch.randn(2 * SIZE, 4, 3, 3, dtype=torch.float64) * torch.tensor([1.0, 0.01, 1e-4, 0.1]).view(-1, 1, 1)
    apart = DataParallelWithCallback(SynchronizedBatchNorm2d(4, eps=1e-3, eps_mode="clamp", group_size=SIZE), devices)
    assert_one_batch(apart.double(), SynchronizedBatchNorm2d(4, eps=1e-3, eps_mode="clamp").double(), batch, [2] * SIZE)


@check(2, 3)
def retained_graph_gives_the_same_gradient_again() -> None:
    model = randomize(SynchronizedBatchNorm2d(3)).double()
    input = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    output = model(input)
    grad = torch.randn_like(output)
    (first,) = torch.autograd.grad(output, input, grad, retain_graph=True)
    (second,) = torch.autograd.grad(output, input, grad)
    assert torch.equal(first, second)


@check(2, 3)
def weights_that_differ_by_process_get_true_gradients() -> None:
    batch = torch.randn(total(), 3, 4, 4, dtype=torch.float64)
    grad = torch.randn_like(batch)
    weights = torch.randn(SIZE, 3, dtype=torch.float64)
    whole = batch.clone().requires_grad_()
    of_rows = torch.cat([weights[rank].expand(rows, 3) for rank, rows in enumerate(ROWS[:SIZE])])[..., None, None]
    (nn.BatchNorm2d(3, affine=False).double()(whole) * of_rows).backward(grad)
    model = SynchronizedBatchNorm2d(3).double()
    with torch.no_grad():
        model.weight.copy_(weights[RANK])
    part = cut(batch).clone().requires_grad_()
    model(part).backward(cut(grad))
    assert_equal(part.grad, cut(whole.grad))


# More than one backward.


def penalty(model: nn.Module, input: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and a loss made of the input gradient, nonlinear in it."""
    output = model(input)
    (grad_input,) = torch.autograd.grad((output**2 * grad).sum(), input, create_graph=True)
    return output, (grad_input**3).sum()


def assert_same_second_gradients(model: nn.Module, plain: nn.Module, rows: list[int], both: bool) -> None:
    batch = torch.randn(total(rows), 2, 4, 3, dtype=torch.float64, device=DEVICE)
    grad = torch.randn_like(batch)
    upstream = torch.randn_like(grad)
    whole, part = batch.clone().requires_grad_(), cut(batch, rows).clone().requires_grad_()
    expected, expected_loss = penalty(plain, whole, grad)
    actual, loss = penalty(model, part, cut(grad, rows))
    assert_equal(summed(loss), expected_loss.detach(), "loss")
    if both:
        expected_loss = expected_loss + (expected * upstream).sum()
        loss = loss + (actual * cut(upstream, rows)).sum()
    expected_loss.backward()
    loss.backward()
    assert_equal(part.grad, cut(whole.grad, rows), "second gradient")
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_equal(summed(parameter.grad), reference.grad, f"second gradient of {name}")


@check(2, 3)
def gradient_penalty_equals_one_process() -> None:
    plain = randomize(nn.BatchNorm2d(2)).double()
    assert_same_second_gradients(convert_model(copy.deepcopy(plain)), plain, ROWS, both=False)


@check(2, 3)
def gradient_penalty_beside_a_loss_equals_one_process() -> None:
    plain = nn.Sequential(randomize(nn.BatchNorm2d(2)), nn.Tanh(), nn.BatchNorm2d(2)).double()
    assert_same_second_gradients(convert_model(copy.deepcopy(plain)), plain, ROWS, both=True)


@check(2, 3)
def gradient_penalty_of_an_empty_process_equals_one_process() -> None:
    plain = nn.Sequential(randomize(nn.BatchNorm2d(2)), nn.Tanh(), nn.BatchNorm2d(2)).double()
    assert_same_second_gradients(convert_model(copy.deepcopy(plain)), plain, [3, 0, 2], both=True)


@check(2, 3)
def gradient_penalty_of_replicas_equals_one_process() -> None:
    plain = nn.Sequential(randomize(nn.BatchNorm2d(2)), nn.Tanh(), nn.BatchNorm2d(2)).double()
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 2)
    assert_same_second_gradients(parallel, plain, [3, 2, 4], both=True)


@check(2, 3)
def third_derivative_is_that_of_the_formula() -> None:
    class Formula(nn.Module):
        # Not `nn.BatchNorm1d`: the third derivative of torch 2.13.0 is another one than that of its formula.
        def forward(self, input: Tensor) -> Tensor:
            var, mean = torch.var_mean(input, 0, correction=0)
            return (input - mean) / (var + 1e-5).sqrt()

    plain, model = Formula(), SynchronizedBatchNorm1d(2).double()
    batch = torch.randn(total(), 2, dtype=torch.float64)
    weights = [torch.randn_like(batch) for _ in range(3)]

    def third(layer: nn.Module, rows: Callable[[Tensor], Tensor]) -> Tensor:
        input = rows(batch).clone().requires_grad_()
        value = layer(input) ** 2
        for weight in weights:
            (value,) = torch.autograd.grad((value * rows(weight)).sum(), input, create_graph=True)
        return value.detach()

    assert_equal(third(model, cut), cut(third(plain, lambda whole: whole)), "third derivative")


@check(2, 3)
def sync_moments_spans_processes() -> None:
    batch = torch.randn(total(), 3, 4, dtype=torch.float64)
    a, b = torch.randn(2, 3, dtype=torch.float64)
    whole, part = batch.clone().requires_grad_(), cut(batch).clone().requires_grad_()
    var, mean = torch.var_mean(whole, (0, 2), correction=0)
    actual_mean, actual_var, count = sync_moments(part, None)
    assert count == batch.numel() // 3
    assert_equal(actual_mean, mean)
    assert_equal(actual_var, var)
    # The same loss in every process: its gradient reaches the statistics once from each.
    (mean * a + var * b).sum().mul(SIZE).backward()
    (actual_mean * a + actual_var * b).sum().backward()
    assert_equal(part.grad, cut(whole.grad))


@check(2, 3)
def layers_that_processes_synchronize_need_no_wrapper() -> None:
    assert_synchronized(nn.Sequential(SynchronizedBatchNorm2d(3)))


@check(2, 3)
def layers_with_a_group_size_need_a_wrapper() -> None:
    model = nn.Sequential(SynchronizedBatchNorm2d(3, group_size=2))
    with pytest.raises(RuntimeError, match=r"0 \(SynchronizedBatchNorm2d\): no wrapper is around it"):
        assert_synchronized(model)
    assert_synchronized(DataParallelWithCallback(model, ["cpu"] * 2))


@check(2, 3)
def moments_of_nothing_are_zero_in_all_processes() -> None:
    mean, var, count = sync_moments(torch.zeros(0, 3, 4), None)
    assert not mean.any()
    assert not var.any()
    assert count == 0


# When processes communicate, and with whom.


@check(2, 3)
def eval_never_communicates() -> None:
    plain = conv_net()
    model = convert_model(copy.deepcopy(plain)).eval()
    batch = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    with collectives() as calls:
        assert torch.equal(model(batch), plain.eval()(batch))
        DataParallelWithCallback(model, ["cpu"] * 2)(batch)
    assert calls == []


@check(2, 3)
def a_layer_makes_one_collective_in_each_direction() -> None:
    layer = SynchronizedBatchNorm2d(3)
    for model in (layer, DataParallelWithCallback(layer, ["cpu"] * 2)):
        input = torch.randn(4, 3, 2, 2, requires_grad=True)
        with collectives() as calls:
            output = model(input)
            assert calls == ["all_gather"]
            output.backward(torch.randn_like(output))
        assert calls == ["all_gather", "all_reduce"]


@check(2, 3)
def sub_groups_synchronize_among_themselves() -> None:
    members = [[0], [1]] if SIZE == 2 else [[2, 0], [1]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if RANK in ranks)
    plain = randomize(nn.BatchNorm2d(3)).double()
    model = convert_model(copy.deepcopy(plain), process_group=groups[mine])
    batch = torch.randn(total(), 3, 4, 4, dtype=torch.float64)
    rows = torch.cat([batch.split(ROWS[:SIZE])[rank] for rank in sorted(members[mine])])
    here = sum(ROWS[rank] for rank in sorted(members[mine]) if rank < RANK)
    whole, part = rows.clone().requires_grad_(), cut(batch).clone().requires_grad_()
    expected = plain(whole)
    with collectives() as calls:
        actual = model(part)
        grad = torch.randn_like(batch)
        actual.backward(cut(grad))
    assert len(calls) == (0 if len(members[mine]) == 1 else 2)
    assert_equal(actual, expected[here : here + len(part)])
    expected.backward(torch.cat([grad.split(ROWS[:SIZE])[rank] for rank in sorted(members[mine])]))
    assert_equal(part.grad, whole.grad[here : here + len(part)])
    assert_same_buffers(model, plain)


@check(2, 3)
def a_group_without_this_process_is_refused() -> None:
    others = dist.new_group([0])
    model = SynchronizedBatchNorm2d(3, process_group=others)
    text = f"expected a process_group that this process belongs to, but got one without rank {RANK}"
    with pytest.raises(ValueError, match=text) if RANK else contextlib.nullcontext():
        model(torch.randn(2, 3, 4, 4))
    model.eval()(torch.randn(2, 3, 4, 4))


@check(2, 3)
def replicas_that_do_not_know_each_other_never_communicate() -> None:
    plain = nn.BatchNorm2d(3)
    # What a stock `nn.DataParallel` makes, which refuses the CPU.
    replica = convert_model(copy.deepcopy(plain))._replicate_for_data_parallel()
    replica.weight, replica.bias = plain.weight, plain.bias
    batch = torch.randn(2, 3, 4, 4)
    with collectives() as calls, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(replica(batch), plain(batch))
    assert calls == []
    assert [str(warning.message) for warning in caught if "never connected to its peers" in str(warning.message)]


@check(2, 3)
def group_size_keeps_replicas_inside_of_their_process() -> None:
    layer = SynchronizedBatchNorm2d(3, group_size=2)
    batch = torch.randn(5, 3, 4, 4) + RANK
    with collectives() as calls:
        output = DataParallelWithCallback(layer, ["cpu"] * 5)(batch)
    assert calls == []
    for group in (batch[:2], batch[2:4], batch[4:]):
        assert_equal(output[: len(group)], nn.BatchNorm2d(3)(group))
        output = output[len(group) :]


@check(2, 3)
def group_size_without_replicas_warns() -> None:
    layer = SynchronizedBatchNorm2d(3, group_size=2)
    with collectives() as calls, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(torch.randn(2, 3, 4, 4))
    assert calls == []
    assert "process_group=torch.distributed.new_subgroups(2)[0]" in str(caught[0].message)


@check(2, 3)
def group_size_beside_a_group_is_refused() -> None:
    for make in (
        lambda: SynchronizedBatchNorm2d(3, group_size=2, process_group=dist.group.WORLD),
        lambda: convert_model(nn.BatchNorm2d(3), group_size=2, process_group=dist.group.WORLD),
    ):
        with pytest.raises(ValueError, match="expected group_size or process_group, but got 2 and"):
            make()


# Replicas in each process.


@check(2, 3)
def replicas_of_all_processes_compute_what_one_device_computes() -> None:
    plain = randomize(conv_net())
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 2)
    for rows in ([3, 2, 4], [1, 4, 2], [2, 0, 3]):
        assert_one_batch(plain, parallel, torch.randn(total(rows), 2, 6, 5, dtype=torch.float64), rows)


@check(2, 3)
def replicas_with_weights_of_their_own_compute_what_one_device_computes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, input: Tensor) -> Tensor:
            norm = copy.copy(self.norm)
            norm._parameters = {}
            norm.weight, norm.bias = self.norm.weight * 2, self.norm.bias + 1
            return norm(input)

    plain = randomize(Scaled()).double()
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 2)
    rows = [3, 1, 2]  # a process with one row has one replica, which runs another path
    assert_one_batch(plain, parallel, torch.randn(total(rows), 3, 6, 5, dtype=torch.float64), rows)


# The order of the collectives in a backward, which must not depend on the number of replicas.


def norm_conv(channels: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))


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


class Dense(nn.Module):
    """Pre-activation layers whose outputs are concatenated, and one that all levels share."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(3 * i), nn.Conv2d(3 * i, 3, 1)) for i in (1, 2, 3))
        self.shared = nn.BatchNorm2d(3)

    def forward(self, input: Tensor) -> Tensor:
        for level in self.levels:
            input = torch.cat((self.shared(level(input)), input), 1)
        return input


class PartlyFrozen(Residual):
    """A net with layers in eval mode between those that synchronize."""

    def train(self, mode: bool = True) -> PartlyFrozen:
        super().train(mode)
        for path in self.paths:
            path[0].eval()
        return self


class Ignored(Residual):
    """A net that ignores the outputs of layers which it calls between others, as those of an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(norm_conv(), nn.Tanh(), norm_conv())

    def forward(self, input: Tensor) -> Tensor:
        input = super().forward(input)
        self.head(input)
        return super().forward(input)


class Bare(nn.Module):
    """Layers with almost nothing between them, so that replicas make fewer nodes than there are calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        rest = self.norms[0](input)
        return rest * self.norms[1](torch.tanh(self.norms[2](input)))


class Heads(nn.Module):
    """A net with many more calls than parameters, and a head half way, whose output is the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.BatchNorm2d(3)
        self.trunk = nn.Sequential(*[nn.BatchNorm2d(3)] * 30)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        input = self.trunk(input)
        head = self.head(input)
        return self.trunk(input), head


BRANCHED = [Residual, Dense, PartlyFrozen, Ignored, Bare]
MIXES = {  # devices and rows of each process
    "1/1": ([1, 1, 1], [2, 3, 1]),
    "2/1": ([2, 1, 3], [4, 2, 3]),
    "3/2": ([3, 2, 1], [3, 4, 1]),
    "2/2, one chunk": ([2, 2, 2], [4, 1, 1]),
    "none/2": ([0, 2, 0], [2, 4, 1]),  # without a wrapper
}
FEW = ["2/1", "2/2, one chunk"]  # where it is not thorough, for most nets


def on_replicas(model: nn.Module, number: int) -> nn.Module:
    """Wrap a synchronized copy of a model for a number of replicas; none to leave it without a wrapper."""
    model = convert_model(copy.deepcopy(model))
    devices: list[Any] = ["cpu"] * number if DEVICE == "cpu" else list(range(number))
    return DataParallelWithCallback(model, devices) if number else model


def every_mix(
    *nets: Callable[[], nn.Module], always: Callable[[], nn.Module] | None = None
) -> Iterator[tuple[nn.Module, nn.Module, list[int]]]:
    """Yield each net, a synchronized copy of it on the replicas of this process, and the rows of all processes."""
    for make in nets:
        names = MIXES if THOROUGH or make is always else FEW
        for devices, rows in map(MIXES.__getitem__, names):
            plain = randomize(make()).to(DEVICE, torch.float64).train()
            yield plain, on_replicas(plain, devices[RANK]).train(), rows[:SIZE]


@check(2, 3)
@on_gpus_too
def branched_nets_equal_one_process_for_any_mix_of_replicas() -> None:
    for plain, model, rows in every_mix(*BRANCHED, always=Residual):
        for _ in range(2):
            assert_one_batch(plain, model, torch.randn(total(rows), 3, 4, 3, dtype=torch.float64, device=DEVICE), rows)


@check(2, 3)
@slow
def several_calls_in_one_loss_equal_one_process_for_any_mix_of_replicas() -> None:
    for plain, model, rows in every_mix(Residual, Ignored, Bare):
        # As a discriminator is called: the second call may make more chunks than the first, or fewer.
        losses, sums = [], []
        for of_call in (rows, rows[::-1]):
            batch = torch.randn(total(of_call), 3, 4, 3, dtype=torch.float64, device=DEVICE)
            expected, actual = plain(batch), model(cut(batch, of_call))
            grad = torch.randn_like(expected)
            losses.append((actual * cut(grad, of_call)).sum())
            sums.append((expected * grad).sum())
        # And one that takes the output of the last one.
        expected, actual = plain(expected.tanh()), model(actual.tanh())
        sum([*sums, (expected * grad).sum()]).backward()
        sum([*losses, (actual * cut(grad, of_call)).sum()]).backward()
        assert_same_sums(model, plain)
        assert_same_buffers(model, plain)


@check(2, 3)
def threads_that_have_recorded_nothing_equal_one_process_for_any_mix_of_replicas() -> None:
    def step(plain: nn.Module, model: nn.Module, rows: list[int]) -> None:
        batch = torch.randn(total(rows), 3, 4, 3, dtype=torch.float64, device=DEVICE)
        actual = model(cut(batch, rows))  # the first nodes of this thread
        expected = plain(batch)
        grads = [torch.randn_like(output) for output in expected]
        torch.autograd.backward(actual, [cut(grad, rows) for grad in grads])
        torch.autograd.backward(expected, grads)
        assert_same_sums(model, plain)

    for mix in every_mix(Heads):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(step, *mix).result()


@check(2, 3)
def forwards_after_a_retained_graph_equal_one_process_for_any_mix_of_replicas() -> None:
    for plain, model, rows in every_mix(Residual):
        losses: dict[nn.Module, list[Tensor]] = {plain: [], model: []}
        for _ in range(3):
            batch = torch.randn(total(rows), 3, 4, 3, dtype=torch.float64)
            grad = torch.randn_like(batch)
            losses[plain].append((plain(batch) * grad).sum())
            losses[model].append((model(cut(batch, rows)) * cut(grad, rows)).sum())
            for of_model in losses.values():
                sum(of_model).backward(retain_graph=True)
        assert_same_sums(model, plain)
        assert_same_buffers(model, plain)


@check(2)
def inference_beside_a_living_graph_is_that_of_one_process() -> None:
    for plain, model, rows in every_mix(Residual):
        batch = torch.randn(total(rows), 3, 4, 3, dtype=torch.float64)
        outputs = plain(batch), model(cut(batch, rows))  # The calls of a living graph are counted.
        for mode in (True, False):
            with torch.inference_mode():
                assert_equal(model.train(mode)(cut(batch, rows)), cut(plain.train(mode)(batch), rows))
        assert_equal(outputs[1], cut(outputs[0], rows))
        assert_same_buffers(model, plain)


@check(2, 3)
@on_gpus_too
def gradient_penalties_equal_one_process_for_any_mix_of_replicas() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 1), Residual(), nn.Conv2d(3, 2, 1))

    for plain, model, rows in every_mix(make):
        assert_same_second_gradients(model, plain, rows, both=True)


class NoGradient(torch.autograd.Function):
    """Keeps the gradient of its input to itself."""

    @staticmethod
    def forward(ctx: object, input: Tensor) -> Tensor:
        return input * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> None:
        return None


@check(2, 3)
def a_process_that_gets_no_gradient_takes_part_in_the_exchange() -> None:
    for create_graph in (False, True):
        for devices in ([0, 0, 0], [2, 2, 2], [2, 0, 1]):
            plain = randomize(nn.BatchNorm2d(3)).double()
            model = on_replicas(plain, devices[RANK])
            batch = torch.randn(total(), 3, 4, 4, dtype=torch.float64)
            whole, part = batch.clone().requires_grad_(), cut(batch).clone().requires_grad_()
            expected, actual = plain(whole), model(part)
            grad = torch.randn_like(expected)
            with torch.no_grad():
                cut(grad)[...] *= RANK != 1
                dist.all_reduce(grad)  # what the others have drawn is the same, but for the rows of rank 1
                grad /= SIZE
                grad.split(ROWS[:SIZE])[1].zero_()
            loss = NoGradient.apply(actual).sum() if RANK == 1 else (actual * cut(grad)).sum()
            (found,) = torch.autograd.grad(loss, part, create_graph=create_graph)
            (wanted,) = torch.autograd.grad((expected * grad).sum(), whole)
            assert_equal(found.detach(), cut(wanted))


# Activation checkpointing.


@check(2, 3)
def checkpointed_layers_count_once_and_equal_one_process() -> None:
    for reentrant in (False, True):
        plain = randomize(conv_net())
        model = Checkpointed(convert_model(copy.deepcopy(plain)), reentrant)
        assert_one_batch(plain, model, torch.randn(total(), 2, 6, 5, dtype=torch.float64))


@check(2, 3)
def checkpointed_segments_equal_one_process() -> None:
    plain = nn.Sequential(*[randomize(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))) for _ in range(3)]).double()
    model = nn.Sequential(*[Checkpointed(convert_model(copy.deepcopy(part)), False) for part in plain])
    assert_one_batch(plain, model, torch.randn(total(), 3, 6, 5, dtype=torch.float64))


@check(2, 3)
def recomputation_does_not_exchange_again() -> None:
    model = Checkpointed(SynchronizedBatchNorm2d(3), False)
    for input in (torch.randn(2, 3, 4, 4, requires_grad=True), torch.randn(2, 3, 4, 4)):
        with collectives() as calls:
            output = model(input)
            output.backward(torch.randn_like(output))
        assert calls == (["all_gather", "all_reduce"] if input.requires_grad else ["all_gather"])
    assert model.module.num_batches_tracked == 2


@check(2, 3)
def calls_of_a_layer_are_forgotten_with_their_graph() -> None:
    layer = SynchronizedBatchNorm2d(3)
    for _ in range(3):
        output = layer(torch.randn(2, 3, 4, 4, requires_grad=True))
        output.backward(torch.randn_like(output))
        del output
    gc.collect()
    assert not recompute._kept


@check(2, 3)
def checkpointed_replicas_equal_one_process() -> None:
    plain = randomize(conv_net())
    model = DataParallelWithCallback(Checkpointed(convert_model(copy.deepcopy(plain)), False), ["cpu"] * 2)
    for rows in ([3, 2, 4], [3, 1, 2]):  # a process with one row has one replica, and no pipe
        assert_one_batch(plain, model, torch.randn(total(rows), 2, 6, 5, dtype=torch.float64), rows)


@check(2)
def span_of_a_merge_holds_the_collective() -> None:
    model = DataParallelWithCallback(nn.Sequential(SynchronizedBatchNorm2d(3)), ["cpu"] * 2)
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, experimental_config=every_thread) as prof:
        model(torch.randn(4, 3, 4, 4))
    (merging,) = [event for event in prof.events() if event.name == "sync_batchnorm: 0, merging"]
    (collective,) = [event for event in prof.events() if event.name == "c10d::allgather_"]
    assert collective.thread == merging.thread
    assert merging.time_range.start <= collective.time_range.start
    assert collective.time_range.end <= merging.time_range.end


# DistributedDataParallel, which averages the gradients of the processes.


def assert_same_training(plain: nn.Module, ddp: nn.Module, steps: int = 3, rows: int = 2) -> None:
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (plain, ddp)]
    for _ in range(steps):
        batch = torch.randn(rows * SIZE, 2, 6, 5, dtype=torch.float64)
        expected = plain(batch)
        grad = torch.randn_like(expected) / SIZE
        expected.backward(grad)
        ddp(cut(batch, [rows] * SIZE)).backward(cut(grad, [rows] * SIZE) * SIZE)
        assert_same_gradients(ddp, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_buffers(ddp, plain)


@check(2, 3)
def ddp_training_equals_one_process() -> None:
    for broadcast_buffers in (True, False):
        plain = randomize(conv_net())
        options = {} if broadcast_buffers else {"broadcast_buffers": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Torch 2.13 has another name for it; older versions do not.
            ddp = DistributedDataParallel(convert_model(copy.deepcopy(plain)), bucket_cap_mb=1e-4, **options)
        assert_same_training(plain, ddp)


@check(2)
def ddp_that_was_converted_after_it_was_built_equals_one_process() -> None:
    plain = randomize(conv_net())
    ddp = DistributedDataParallel(copy.deepcopy(plain))
    assert convert_model(ddp) is ddp
    assert_same_training(plain, ddp)


@check(2)
@slow
def compiled_ddp_equals_one_process() -> None:
    plain = randomize(conv_net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler are its own
        # Not the default backend, which needs a compiler of C++ and seconds.
        ddp = torch.compile(DistributedDataParallel(convert_model(copy.deepcopy(plain))), backend="aot_eager")
        assert_same_training(plain, ddp)


def assert_same_sharded_training(plain: nn.Module, model: nn.Module) -> None:
    """Compare three steps with one process, where `model` keeps a part of each parameter in each process."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (plain, model)]
    for _ in range(3):
        batch = torch.randn(2 * SIZE, 2, 6, 5, dtype=torch.float64)
        expected = plain(batch)
        grad = torch.randn_like(expected) / SIZE
        expected.backward(grad)
        model(cut(batch, [2] * SIZE)).backward(cut(grad, [2] * SIZE) * SIZE)
        for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_equal(parameter.grad.full_tensor(), reference.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_equal(parameter.full_tensor(), reference, name)
        assert_same_buffers(model, plain)


@check(2)
@slow
def fsdp2_equals_one_process() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (SIZE,))
    for layers in (nn.Conv2d, nn.Module):  # also the batch norms by themselves
        for convert_first in (True, False):
            plain = randomize(conv_net())
            model = copy.deepcopy(plain)
            if convert_first:
                convert_model(model)
            for child in model:
                if isinstance(child, layers):
                    fully_shard(child, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if not convert_first:
                convert_model(model)
            assert_same_sharded_training(plain, model)


@check(2, 3)
def ddp_around_replicas_equals_one_process() -> None:
    plain = randomize(conv_net())
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 2)
    ddp = DistributedDataParallel(parallel)
    assert_same_training(plain, ddp, rows=4)


def assert_same_uneven_training(
    make: Callable[[], nn.Module], rows: Sequence[int], devices: Sequence[int] = (2, 2, 2), **options: Any
) -> None:
    """Compare three steps with one process, of which the second one is that of an uneven batch."""
    plain = randomize(make()).double()
    ddp = DistributedDataParallel(on_replicas(plain, devices[RANK]), **options)
    for of_step in ([4] * SIZE, list(rows), [4] * SIZE):
        batch = torch.randn(total(of_step), 3, 4, 3, dtype=torch.float64)
        for module in (plain, ddp):
            module.zero_grad()
        expected = plain(batch)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        ddp(cut(batch, of_step)).backward(cut(grad, of_step) * SIZE)
        assert_same_gradients(ddp, plain)
        assert_same_buffers(ddp, plain)
        with torch.no_grad():
            for parameter, reference in zip(ddp.parameters(), plain.parameters(), strict=True):
                if reference.grad is not None:
                    reference -= 0.05 * reference.grad
                parameter.copy_(reference)  # Otherwise rounding errors grow from step to step.


class Large(Dense):
    """A net of more than a megabyte, which is the size of the first bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(*[nn.Conv2d(3, 20000, 1), nn.Tanh(), nn.Conv2d(20000, 3, 1)])

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.wide(input))


@check(2, 3)
def ddp_around_replicas_trains_with_uneven_batches() -> None:
    assert_same_uneven_training(Dense, [1, 4, 2], bucket_cap_mb=1e-4)
    assert_same_uneven_training(Large, [4, 1, 1])
    if THOROUGH:
        for make in (Residual, Dense, Large):
            for rows in ([4, 1, 1], [1, 4, 2]):
                assert_same_uneven_training(make, rows)
                assert_same_uneven_training(make, rows, bucket_cap_mb=1e-4)


@check(2, 3)
@slow
def ddp_around_any_number_of_replicas_equals_one_process() -> None:
    for devices in ([2, 1, 3], [1, 3, 0], [0, 2, 1]):  # none: without a wrapper
        for make in (Residual, Bare, Dense):
            assert_same_uneven_training(make, [3, 4, 1], devices, bucket_cap_mb=1e-4)


class PreActivated(nn.Module):
    """Blocks whose shortcuts end with a convolution, made before the layers of the path and ready before them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.shortcuts = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)) for _ in range(3))
        self.paths = nn.ModuleList(nn.Sequential(norm_conv(), nn.Tanh(), norm_conv()) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        input = self.stem(input)
        for shortcut, path in zip(self.shortcuts, self.paths, strict=True):
            rest = shortcut(input)
            input = torch.tanh(path(input) + rest)
        return input


@check(2, 3)
def ddp_finds_complete_the_same_gradients_between_layers_in_threads_old_and_new() -> None:
    # Replicas are new threads, whose nodes have low numbers. Without a wrapper it is the thread of all checks.
    assert_same_uneven_training(PreActivated, [3, 4, 2], [0, 3, 2], bucket_cap_mb=1e-4)


@check(2, 3)
@slow
def ddp_around_replicas_takes_its_options_with_uneven_batches() -> None:
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        assert_same_uneven_training(Residual, [4, 1, 2], **options, bucket_cap_mb=1e-4)
    assert_same_uneven_training(Ignored, [4, 1, 2], find_unused_parameters=True, bucket_cap_mb=1e-4)


@check(2, 3)
def accumulation_of_uneven_batches_equals_one_process() -> None:
    plain = randomize(Residual()).double()
    ddp = DistributedDataParallel(DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 2))
    for of_step in ([4, 4, 4], [1, 4, 2], [4, 1, 1]):
        batch = torch.randn(total(of_step), 3, 4, 3, dtype=torch.float64)
        expected = plain(batch)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        with contextlib.nullcontext() if of_step[1] == 1 else ddp.no_sync():
            ddp(cut(batch, of_step)).backward(cut(grad, of_step) * SIZE)
    assert_same_gradients(ddp, plain)


@check(2, 3)
def process_that_has_no_batches_left_ends_the_others_with_the_error_of_ddp() -> None:
    ddp = DistributedDataParallel(DataParallelWithCallback(convert_model(Residual()), ["cpu"] * 2))

    def train() -> None:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2 + RANK):
                ddp(torch.randn(4, 3, 4, 3)).mean().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()


@check(2, 3)
def ddp_with_bfloat16_autocast_equals_one_process() -> None:
    plain = randomize(conv_net(torch.float32))
    ddp = DistributedDataParallel(convert_model(copy.deepcopy(plain)))
    batch = torch.randn(2 * SIZE, 2, 6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = plain(batch), ddp(cut(batch, [2] * SIZE))
    assert actual.dtype == expected.dtype
    assert_equal(actual.float(), cut(expected, [2] * SIZE).float(), "output", 5e-2)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(cut(grad, [2] * SIZE))
    for (name, parameter), reference in zip(ddp.named_parameters(), plain.parameters(), strict=True):
        assert_equal(parameter.grad * SIZE, reference.grad, name, 5e-2)


@check(2, 3)
def gradient_accumulation_under_no_sync_equals_one_process() -> None:
    plain = randomize(conv_net())
    ddp = DistributedDataParallel(convert_model(copy.deepcopy(plain)))
    for last in (False, False, True):
        batch = torch.randn(2 * SIZE, 2, 6, 5, dtype=torch.float64)
        expected = plain(batch)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        with contextlib.nullcontext() if last else ddp.no_sync():
            ddp(cut(batch, [2] * SIZE)).backward(cut(grad, [2] * SIZE))
    assert_same_gradients(ddp, plain, 1 / SIZE)
    assert_same_buffers(ddp, plain)


class Branches(nn.Module):
    """A trunk, and heads of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = conv_net()
        self.heads = nn.ModuleList(nn.Linear(3, 2).double() for _ in range(2))

    def forward(self, input: Tensor, used: list[int]) -> Tensor:
        features = self.trunk(input).mean((2, 3))
        return sum(self.heads[i](features) for i in used)


@check(2, 3)
def parameters_unused_by_all_processes_have_no_gradient() -> None:
    plain = randomize(Branches())
    ddp = DistributedDataParallel(convert_model(copy.deepcopy(plain)), find_unused_parameters=True)
    batch = torch.randn(2 * SIZE, 2, 6, 5, dtype=torch.float64)
    for used in ([0], [1]):
        for module in (plain, ddp):
            module.zero_grad()
        expected = plain(batch, used)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        ddp(cut(batch, [2] * SIZE), used).backward(cut(grad, [2] * SIZE))
        for (name, parameter), reference in zip(ddp.named_parameters(), plain.parameters(), strict=True):
            if reference.grad is not None:
                assert_equal(parameter.grad * SIZE, reference.grad, name)
        assert all(p.grad is None for p in ddp.module.heads[1 - used[0]].parameters())


@check(2, 3)
def parameters_unused_by_some_processes_average_with_zero() -> None:
    plain = randomize(Branches())
    model = convert_model(copy.deepcopy(plain), process_group=dist.new_group())
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=1e-4)
    for _ in range(3):
        for module in (plain, ddp):
            module.zero_grad()
        batch = torch.randn(2 * SIZE, 2, 6, 5, dtype=torch.float64)
        features = plain.trunk(batch).mean((2, 3))
        expected = torch.cat([plain.heads[rank % 2](features[2 * rank : 2 * rank + 2]) for rank in range(SIZE)])
        grad = torch.randn_like(expected)
        expected.backward(grad)
        ddp(cut(batch, [2] * SIZE), [RANK % 2]).backward(cut(grad, [2] * SIZE))
        assert_same_gradients(ddp, plain, 1 / SIZE)


@check(2, 3)
def a_layer_that_no_process_uses_in_its_loss_is_left_out() -> None:
    plain = randomize(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))).double()
    model = convert_model(copy.deepcopy(plain))
    batch = torch.randn(total(), 3, 4, 4, dtype=torch.float64)
    whole, part = batch.clone().requires_grad_(), cut(batch).clone().requires_grad_()
    expected, _ = plain[0](whole), plain[1](whole)
    actual, _ = model[0](part), model[1](part)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with collectives() as calls:
        actual.backward(cut(grad))
    assert calls == ["all_reduce"]
    assert_equal(part.grad, cut(whole.grad))
    assert_same_buffers(model, plain)


# Copies and converters.


@check(2)
def copies_share_the_group() -> None:
    group = dist.new_group()
    model = nn.Sequential(SynchronizedBatchNorm2d(3, process_group=group))
    for copied in (copy.deepcopy(model), copy.copy(model)):
        assert copied[0].process_group is group
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert averaged.module[0].process_group is group
    assert model[0].process_group is group


@check(2)
def a_group_does_not_pickle() -> None:
    layer = SynchronizedBatchNorm2d(3, process_group=dist.new_group())
    with pytest.raises(TypeError, match="expected a layer without a process_group to pickle"):
        pickle.dumps(layer)
    layer.process_group = None
    assert pickle.loads(pickle.dumps(layer)).process_group is None


@check(2)
def the_group_of_all_processes_pickles_as_none() -> None:
    layer = SynchronizedBatchNorm2d(3, process_group=dist.group.WORLD)
    assert pickle.loads(pickle.dumps(layer)).process_group is None
    assert copy.deepcopy(layer).process_group is dist.group.WORLD


@check(2)
def converters_take_the_group() -> None:
    group = dist.new_group()
    for convert in (
        lambda module: convert_model(module, process_group=group),
        lambda module: SynchronizedBatchNorm.convert_sync_batchnorm(module, group),
        lambda module: SynchronizedBatchNorm2d.convert_sync_batchnorm(module, process_group=group),
    ):
        model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm1d(2)))
        assert convert(model) is model
        assert [type(model[0]), type(model[1][0])] == [SynchronizedBatchNorm2d, SynchronizedBatchNorm1d]
        assert model[0].process_group is model[1][0].process_group is group


@check(2)
def the_converter_of_torch_takes_our_layers() -> None:
    group = dist.new_group()
    model = randomize(nn.Sequential(SynchronizedBatchNorm2d(3, eps=0.5, momentum=0.3)))
    state = copy.deepcopy(model.state_dict())
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    assert type(converted[0]) is nn.SyncBatchNorm
    assert (converted[0].eps, converted[0].momentum) == (0.5, 0.3)
    assert converted[0].process_group is group
    for name, value in converted.state_dict().items():
        assert torch.equal(value, state[name])
    with pytest.raises(ValueError, match="on GPU"):  # If this passes one day, docs/scaling.md must say so.
        converted(torch.randn(2, 3, 4, 4))


# Failures. A failure leaves its world unusable, so these have worlds of their own, and this order.


def refusal(body: Callable[[], object]) -> str:
    try:
        body()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_beside_eval(folder: Path) -> str:
    """A process in eval mode does not exchange; the others wait until `torch.distributed` times out."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=2))
    layer = SynchronizedBatchNorm2d(3, process_group=group).train(RANK == 0)
    if RANK == 0:
        return refusal(lambda: layer(torch.randn(2, 3, 4, 4)))
    layer(torch.randn(2, 3, 4, 4))
    dist.FileStore(str(folder / "ends"), SIZE).wait(["train_beside_eval"], timedelta(seconds=SECONDS))
    return "no error"


def channels_differ(folder: Path) -> str:
    """Gloo ends the process that receives more than it expects, which is the first one."""
    layer = SynchronizedBatchNorm2d(3 + RANK)
    return refusal(lambda: layer(torch.randn(2, 3 + RANK, 4, 4)))


def a_process_has_left(folder: Path) -> str:
    return refusal(lambda: SynchronizedBatchNorm2d(3)(torch.randn(2, 3, 4, 4)))


def run_failures(folder: Path) -> None:
    for function in (train_beside_eval, channels_differ, a_process_has_left):
        outcome = function(folder)
        (folder / f"{function.__name__}.{RANK}").write_text(json.dumps(outcome), encoding="utf-8")
        if RANK == 0:
            dist.FileStore(str(folder / "ends"), SIZE).set(function.__name__, "")


def on_the_host(collective: Callable[..., object]) -> Callable[..., object]:
    """Return a collective that takes tensors of simulated GPUs, for which there is no backend."""

    def run(*args: Any, group: Any) -> None:
        copies = [[t.cpu() for t in a] if isinstance(a, list) else a.cpu() for a in args]
        collective(*copies, group=group)
        target, result = (args[0], copies[0]) if isinstance(args[0], list) else ([args[0]], [copies[0]])
        for tensor, copied in zip(target, result, strict=True):
            tensor.copy_(copied)

    return run


def run_checks_on_gpus(folder: Path) -> None:
    global DEVICE, CHECKS
    DEVICE, CHECKS = "cuda", {name: CHECKS[name] for name in ON_GPUS}
    dist.all_gather, dist.all_reduce = on_the_host(dist.all_gather), on_the_host(dist.all_reduce)
    run_checks(folder)


def run_checks(folder: Path) -> None:
    results = {}
    for name, (function, sizes) in CHECKS.items():
        if SIZE not in sizes or (name in SLOW and not THOROUGH):
            continue
        torch.manual_seed(sum(name.encode()))  # the same in every process
        try:
            function()
            results[name] = ""
        except (Exception, pytest.fail.Exception) as error:
            results[name] = traceback.format_exc()
            if isinstance(error, RuntimeError):
                break  # Most likely a collective, and after that the processes are no longer in step.
    (folder / f"results.{RANK}").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def main(rank: int, size: int, folder: Path, what: str) -> None:
    global RANK, SIZE, THOROUGH
    RANK, SIZE, THOROUGH = rank, size, what != "quick"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(str(folder / "world"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
    {"quick": run_checks, "checks": run_checks, "gpus": run_checks_on_gpus, "failures": run_failures}[what](folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
