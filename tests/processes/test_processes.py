"""Processes compute what one process computes on the whole batch; what they exchange, and with whom."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import worlds
from forks import forked
from helpers import WITHOUT_BIAS, WithPipe, assert_equal
from scripted import OneThread
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.functional import jacobian
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import GATHER, REDUCE, ROWS, WITHOUT_NAME, Collectives, assert_same_step, cut, each_process, images, twins

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    assert_matches_one_device,
    assert_synchronized,
    convert_model,
    execute_replication_callbacks,
    sync_moments,
)

# Statistics and gradients.


@each_process(2, 3, "gpus")
def test_steps_of_a_net_are_those_of_one_process():
    for net in (worlds.conv_net, worlds.residual, worlds.partly_frozen, worlds.with_ignored_head):
        for reentrant in (None, False, True):
            pair = plain, model = twins(net())
            if reentrant is not None:
                pair = worlds.checkpointed(plain, reentrant), worlds.checkpointed(model, reentrant)
            for _ in range(2):
                assert_same_step(*pair, images())


@each_process(2, 3)
def test_every_kind_of_layer_equals_torch(size):
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
                batch = torch.randn(sum(ROWS[:size]), 3, *shape, dtype=dtype)
                assert_same_step(plain, model, batch)
            if len(shape) == 2:
                batch = batch.to(memory_format=torch.channels_last)
                assert_same_step(plain, model, batch)
                assert model(cut(batch)).is_contiguous(memory_format=torch.channels_last)


@each_process(2, 3)
def test_clamped_variances_are_those_of_replicas_of_one_process(size):
    batch = images([2] * size) * torch.tensor([1.0, 0.01, 1e-4]).view(-1, 1, 1)
    layers = [SynchronizedBatchNorm2d(3, eps=1e-3, eps_mode="clamp", group_size=n).double() for n in (size, None)]
    assert_same_step(DataParallelWithCallback(layers[0], ["cpu"] * size), layers[1], batch, [2] * size)


@each_process(2, 3, "gpus")
def test_an_empty_process_takes_part():
    plain, model = twins(worlds.conv_net())
    for rows in ([0, 3, 2], [2, 0, 3], [0, 0, 0], [2, 3, 0]):
        assert_same_step(plain, model, images(rows), rows)


@each_process(2, 3)
def test_one_value_in_all_processes_is_refused_by_all_and_one_in_each_is_enough(rank, size):
    plain, model = twins(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel when training, got input size"):
        model(torch.ones(1 if rank == 1 else 0, 4).double())
    worlds.assert_same_buffers(model, plain)
    assert_same_step(plain, model, torch.randn(size, 4).double(), [1] * size)


@each_process(2, 3)
def test_running_statistics_are_the_same_bits_in_all_processes(rank, size):
    model = SynchronizedBatchNorm2d(16)
    for i in range(5):
        model(torch.randn(2 + rank, 16, 7, 7) * 10**i + 3**rank)
    for buffer in (model.running_mean, model.running_var):
        gathered = [torch.empty_like(buffer) for _ in range(size)]
        dist.all_gather(gathered, buffer)
        assert all(torch.equal(other, buffer) for other in gathered)


@each_process(2, 3)
def test_several_calls_in_one_loss_equal_one_process(size):
    plain, model = twins(worlds.with_ignored_head())
    expected, actual = [], []
    for rows in (ROWS, ROWS[:size][::-1]):  # as a discriminator is called
        batch, grad = images(rows), images(rows)
        outputs = plain(batch), model(cut(batch, rows))
        expected.append((outputs[0] * grad).sum())
        actual.append((outputs[1] * cut(grad, rows)).sum())
    # and one that takes the output of the last one
    expected.append((plain(outputs[0].tanh()) * grad).sum())
    actual.append((model(outputs[1].tanh()) * cut(grad, rows)).sum())
    for losses in (expected, actual):
        sum(losses).backward(retain_graph=True)
        sum(losses[:2]).backward()
    worlds.assert_same_gradients(model, plain)
    worlds.assert_same_buffers(model, plain)


# Gradients of gradients, and gradients of a part of the graph.


@each_process(2, 3, "gpus")
def test_gradient_penalties_equal_one_process():
    for net in (nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3)), worlds.residual()):
        for rows in (ROWS, [3, 0, 2]):
            plain, model = twins(net)
            plain.zero_grad()
            whole, part = worlds.as_inputs(images(rows), rows)
            inner, outer = images(rows), images(rows)
            for module, input, of in ((plain, whole, torch.clone), (model, part, partial(cut, rows=rows))):
                output = module(input)
                (grad,) = torch.autograd.grad((output**2 * of(inner)).sum(), input, create_graph=True)
                ((grad**3).sum() + (output * of(outer)).sum()).backward()
            assert_equal(part.grad, cut(whole.grad, rows), "second gradient")
            worlds.assert_same_gradients(model, plain)


def without_gradient(output: Tensor) -> Tensor:
    result = output * 2
    result.grad_fn.register_hook(lambda *_: (None, None))
    return result


@each_process(2, 3)
def test_a_process_that_gets_no_gradient_takes_part_in_the_exchange(rank):
    for create_graph in (False, True):
        plain, model = twins(nn.BatchNorm2d(3))
        whole, part = worlds.as_inputs(images())
        grad = images()
        grad[ROWS[0] :][: ROWS[1]] = 0
        expected, actual = plain(whole), model(part)
        loss = without_gradient(actual).sum() if rank == 1 else (actual * cut(grad)).sum()
        (found,) = torch.autograd.grad(loss, part, create_graph=create_graph)
        (wanted,) = torch.autograd.grad((expected * grad).sum(), whole)
        assert_equal(found.detach(), cut(wanted))
    without_gradient(model(cut(images()))).sum().backward()  # in all processes
    assert [parameter.grad.count_nonzero() for parameter in model.parameters()] == [0, 0]


@each_process(2, 3)
def test_sync_moments_spans_processes(size):
    a, b = torch.randn(2, 3, dtype=torch.float64)
    whole, part = worlds.as_inputs(images())
    var, mean = torch.var_mean(whole, (0, 2, 3), correction=0)
    with Collectives() as collectives:
        actual_mean, actual_var, count = sync_moments(part, None)
    assert (collectives.found, count) == ([REDUCE] * 2, whole.numel() // 3)
    assert_equal(actual_mean, mean)
    assert_equal(actual_var, var)
    # The same loss in every process: its gradient reaches the statistics once from each.
    loss, actual = (mean * a + var**2 * b).sum() * size, (actual_mean * a + actual_var**2 * b).sum()
    for order in ("gradient", "second gradient"):
        (wanted,) = torch.autograd.grad(loss, whole, create_graph=True)
        (given,) = torch.autograd.grad(actual, part, create_graph=True)
        assert_equal(given, cut(wanted), order)
        loss, actual = (wanted**3).sum(), (given**3).sum()
    mean, var, count = sync_moments(torch.zeros(0, 3, 4), None)
    assert [torch.cat((mean, var)).count_nonzero(), count] == [0, 0]


@each_process("gpus")
def test_gradients_are_not_multiplied_by_a_weight_in_half_precision():
    layer = SynchronizedBatchNorm2d(3, device=worlds.DEVICE)
    nn.init.constant_(layer.weight, 3e4)
    input = (1e4 * torch.randn(2, 3, 4, 4).sign()).to(worlds.DEVICE, torch.float16).requires_grad_()
    layer(input).backward(torch.full_like(input, 4.0) * torch.randn_like(input).sign())
    assert input.grad.isfinite().all()


# When processes communicate, and with whom.


@each_process(2, 3, "gpus")
def test_a_layer_makes_one_collective_in_each_direction_and_gathers_its_statistics():
    header = 2 if worlds.DEVICE == "cpu" else 1  # the count, and on the CPU the number of the layer
    nets = nn.BatchNorm2d(3), worlds.conv_net(), worlds.residual(), worlds.norm_conv(4096)
    for net, channels in zip(nets, ([3], [4, 3], [3] * 6, [4096]), strict=True):
        _, model = twins(net)
        needs_gradient = channels != [3]
        input = cut(images()).requires_grad_(needs_gradient)
        with Collectives() as collectives:
            output = model(input)
            assert collectives.found == [GATHER] * len(channels)
            output.backward(torch.randn_like(output))
        assert collectives.found == [GATHER] * len(channels) + [REDUCE] * len(channels) * needs_gradient
        assert collectives.lengths == [header + 2 * n for n in channels]


@each_process(2, 3)
def test_eval_never_communicates_even_without_running_statistics(size):
    for net in (worlds.conv_net(), nn.BatchNorm2d(3, track_running_stats=False)):
        plain, model = twins(net)
        batch = images([2] * size)
        with Collectives() as collectives:
            assert torch.equal(model.eval()(cut(batch, [2] * size)), plain.eval()(cut(batch, [2] * size)))
            assert_equal(DataParallelWithCallback(model, ["cpu"] * 2)(batch), plain(batch))
        assert collectives.found == []


@each_process(2, 3)
def test_checks_of_one_process_are_refused_or_name_what_is_in_eval_mode():
    with pytest.raises(RuntimeError, match="expected a single process, as copies would exchange with others"):
        assert_matches_one_device(nn.Linear(3, 3), torch.ones(4, 3))
    with pytest.raises(RuntimeError, match=r"the model itself .*: it is in eval mode"):
        assert_synchronized(SynchronizedBatchNorm2d(3, track_running_stats=False).eval())
    assert_synchronized(SynchronizedBatchNorm2d(3))  # The processes are connected, without a wrapper.
    with pytest.raises(RuntimeError, match=r"1 \(BatchNorm2d\): it is not synchronized; call convert_model"):
        assert_synchronized(nn.Sequential(DataParallelWithCallback(nn.Linear(3, 3), ["cpu"]), nn.BatchNorm2d(3)))


@each_process(2, 3)
def test_sub_groups_synchronize_among_themselves(rank, size):
    members = [[0], [1]] if size == 2 else [[0, 2], [1]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [rank in ranks for ranks in members].index(True)
    plain, model = twins(nn.BatchNorm2d(3), process_group=groups[mine])
    rows = [2 * (other in members[mine]) for other in range(size)]
    with Collectives() as collectives:
        assert_same_step(plain, model, images(rows), rows, accumulates=True)  # Gradients are added up in each group.
    assert collectives.found == ([] if len(members[mine]) == 1 else [GATHER, REDUCE])


@each_process(2, 3)
def test_an_argument_that_is_no_group_is_refused(size):
    layer, batch = SynchronizedBatchNorm2d(3), torch.randn(2, 3, 4, 4)
    for layer.process_group in (3, "gloo", [0, 1], init_device_mesh("cpu", (size,))):
        options = {"process_group": layer.process_group}
        for refuse in (
            partial(SynchronizedBatchNorm2d, 3, **options),
            partial(convert_model, nn.BatchNorm2d(3), **options),
            partial(sync_moments, batch, None, **options),
            partial(layer, batch),
        ):
            with pytest.raises(TypeError, match=r"process_group must be a group of torch.distributed, got .*; pass"):
                refuse()


@each_process(2, 3)
def test_a_group_without_this_process_is_refused(rank):
    model = SynchronizedBatchNorm2d(3, process_group=dist.new_group([0]))
    text = f"process_group that this process belongs to, but got one without rank {rank}"
    with pytest.raises(ValueError, match=text) if rank else nullcontext():
        model(torch.randn(2, 3, 4, 4))
    model.eval()(torch.randn(2, 3, 4, 4))


# One replica in each process.


@each_process(2, 3)
def test_group_size_counts_replicas_of_one_process(rank):
    layer = SynchronizedBatchNorm2d(3, group_size=2)
    batch = torch.randn(5, 3, 4, 4) + rank
    with Collectives() as collectives:
        output = DataParallelWithCallback(layer, ["cpu"] * 5)(batch)
        with pytest.warns(UserWarning, match=r"process_group=torch\.distributed\.new_subgroups\(2\)\[0\]"):
            layer(batch)
        assert_equal(SynchronizedBatchNorm2d(3, group_size=1)(batch), nn.BatchNorm2d(3)(batch))  # without a warning
        with pytest.warns(UserWarning, match="not connected"):
            OneThread(SynchronizedBatchNorm2d(3), 2)(batch)
        execute_replication_callbacks([SynchronizedBatchNorm2d(3)])
        with pytest.raises(RuntimeError, match=r"itself \(SynchronizedBatchNorm2d\): no wrapper is around it"):
            assert_synchronized(layer)
        assert_synchronized(DataParallelWithCallback(layer, ["cpu"] * 2))
    assert collectives.found == []
    for part, group in zip(output.split(2), batch.split(2), strict=True):
        assert_equal(part, nn.BatchNorm2d(3)(group))


@each_process(2, 3)
def test_several_replicas_in_a_process_are_refused_at_once(rank, size):
    text = r"use one process per device, .*\(1\.0, replica \d\); run: torchrun --nproc-per-node="
    for layer in (nn.BatchNorm2d(3), WithPipe(lambda net, x: x - sync_moments(x, net.pipe)[0][:, None, None])):
        plain, model = twins(nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Sequential(layer)))
        parallel = DataParallelWithCallback(model, ["cpu"] * 2)
        for ranks in ([0], range(size)):  # nobody waits for a process that is refused, nor for one that is not
            with Collectives() as collectives, ExitStack() as stack:
                if rank in ranks:
                    stack.enter_context(pytest.raises(RuntimeError, match=text))
                    parallel(images([2] * size))
            assert collectives.found == []
        ddp = DistributedDataParallel(parallel)
        with pytest.raises(RuntimeError, match=text):
            ddp(images([2] * size))
        worlds.assert_same_buffers(model, plain)


@each_process(2, 3)
def test_one_replica_in_a_process_is_a_process(size):
    plain, model = twins(worlds.conv_net())
    assert_same_step(plain, DataParallelWithCallback(model, ["cpu"]), images())
    rows = [1] * size  # a single chunk
    assert_same_step(plain, DataParallelWithCallback(model, ["cpu"] * 2), images(rows), rows)


# What other processes cannot take, or do not answer.


@each_process(2, 3)
def test_a_forked_child_is_refused_in_training_mode():
    model = SynchronizedBatchNorm2d(3)
    status, output = forked(lambda: model(torch.ones(2, 3, 4, 4)))
    assert status == 1
    assert "but got a call in training mode in a process that was forked from it" in output
    assert forked(lambda: model.eval()(torch.ones(2, 3, 4, 4))).status == 0


@each_process(2, 3)
def test_tensors_that_other_processes_cannot_take_are_refused(size):
    layer, batch = SynchronizedBatchNorm2d(3), images([1] * size).float()
    whole = distribute_tensor(batch, init_device_mesh("cpu", (size,)), [Shard(0)])
    text = "expected a tensor of this process, but got a %s in the exchange of %s; pass the to_local"
    with pytest.raises(RuntimeError, match=text % ("DTensor", WITHOUT_NAME) + "|sharding strategy"):
        layer(whole)
    for norm, name in ((layer, WITHOUT_NAME), (lambda input: sync_moments(input, None), "sync_moments")):
        refused = pytest.raises(RuntimeError, match=text % ("FakeTensor", name))
        with FakeTensorMode(allow_non_fake_inputs=True), refused:
            norm(torch.randn(2, 3, 4, 4))
    with pytest.raises(RuntimeError, match="Batching rule not implemented for c10d"):
        jacobian(layer, batch[:, :, :1, :1], vectorize=True)
    layer(whole.to_local())
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert_same_step(*twins(nn.BatchNorm2d(3)), images())


@each_process(2, 3)
def test_training_beside_a_process_in_eval_ends_with_the_timeout_of_torch(rank):
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = convert_model(nn.Sequential(nn.BatchNorm2d(3)), process_group=group).train(rank == 0)
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms") if rank == 0 else nullcontext() as caught:
        model(torch.randn(2, 3, 4, 4))
    assert caught is None or caught.value.__notes__ == ["Raised in the exchange of 0 between processes."]
    dist.barrier()  # until when the others are there
