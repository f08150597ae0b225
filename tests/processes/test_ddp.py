"""DistributedDataParallel, which averages the gradients of the processes, and FSDP train as one process."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from helpers import Net, assert_equal, randomize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from worlds import assert_same_step, conv_net, cut, each_process, images, residual, twins

from sync_batchnorm import convert_model


def large() -> nn.Sequential:
    """Return a net of more than a megabyte, which is the size of the first bucket."""
    return nn.Sequential(nn.Conv2d(3, 20000, 1, stride=5), nn.Tanh(), nn.Conv2d(20000, 3, 1), residual())


def each_ddp(net: Callable[[], nn.Module], **options: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield twins of a net, of which one trains in all processes: with tiny buckets, and converted in a usual DDP.

    Some processes have recorded another graph before, so that the nodes of their nets have higher numbers.
    """
    others = torch.ones(2, requires_grad=True)
    for _ in range(1000 * dist.get_rank()):
        others = others * 1.0
    plain, model = twins(net())
    yield plain, DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)
    plain = randomize(net()).double()
    yield plain, convert_model(DistributedDataParallel(copy.deepcopy(plain), **options))
    others.sum().backward()


def assert_same_training(plain: nn.Module, model: nn.Module) -> None:
    """Compare three steps with one process, of which the second one is that of an uneven batch."""
    for rows in ([4] * dist.get_world_size(), [4, 1, 2], [4] * dist.get_world_size()):
        assert_same_step(plain, model, images(rows), rows, averages=True)
        with torch.no_grad():
            for parameter in [*plain.parameters(), *model.parameters()]:
                parameter.mul_(0.9)


@each_process(2, 3)
def test_ddp_training_equals_one_process():
    for net, options in (
        *((net, {}) for net in (conv_net, residual, large, worlds.partly_frozen)),
        (residual, {"broadcast_buffers": False, "gradient_as_bucket_view": True}),
        (residual, {"static_graph": True}),
        (worlds.with_ignored_head, {"find_unused_parameters": True}),
    ):
        for plain, ddp in each_ddp(net, **options):
            assert_same_training(plain, ddp)


@each_process(2, 3)
def test_ddp_around_checkpoints_equals_one_process():
    for reentrant in (False, True):
        plain, model = twins(nn.Sequential(residual(), conv_net()))
        one, ours = (nn.Sequential(*[worlds.checkpointed(part, reentrant) for part in net]) for net in (plain, model))
        assert_same_training(one, DistributedDataParallel(ours))


class GatheredStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, features: Tensor) -> Tensor:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return worlds.summed(grad).chunk(dist.get_world_size())[dist.get_rank()]


def levels(net: Net, input: Tensor) -> tuple[Tensor, Tensor]:
    """Return features of two depths: the collectives of a loss are between those of layers."""
    stem = net.stem(input)
    return net.head(stem).flatten(1), net.trunk(stem).flatten(1)


@each_process(2, 3)
def test_ddp_with_losses_over_gathered_features_equals_one_process(size):
    def contrast(features: Sequence[Tensor]) -> Tensor:
        return sum((one @ one.T).log_softmax(1).diagonal().sum() for one in features)

    rows = [2] * size
    for plain, ddp in each_ddp(lambda: Net(levels, stem=residual(), trunk=residual(), head=worlds.norm_conv())):
        for _ in range(2):
            batch = images(rows)
            expected = contrast(plain(batch))
            actual = contrast([GatheredStatistics.apply(one) for one in ddp(cut(batch, rows))])
            assert_equal(actual, expected)
            expected.backward()
            actual.backward()
            worlds.assert_same_gradients(ddp, plain, averaged=True)


@each_process(2, 3)
def test_accumulation_under_no_sync_equals_one_process():
    for plain, ddp in each_ddp(residual):
        for rows in ([4, 4, 4], [1, 4, 2]):
            with ddp.no_sync():
                assert_same_step(plain, ddp, images(rows), rows, averages=True, accumulates=True)
        assert_same_step(plain, ddp, images([4, 1, 1]), [4, 1, 1], averages=True)


@each_process(2, 3)
def test_a_process_that_has_no_batches_left_ends_the_others_with_the_error_of_ddp(rank):
    ddp = DistributedDataParallel(convert_model(residual()))
    with pytest.raises(RuntimeError, match="exhausted"), ddp.join(throw_on_early_termination=True):
        [ddp(torch.randn(4, 3, 4, 3)).mean().backward() for _ in range(2 + rank)]


# The compiler, and FSDP.


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    torch.compiler.reset()  # Tests that ran before in this process may have reached its limit of compilations.
    logging.disable(logging.WARNING)  # what the compiler logs and warns of is its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@each_process(3)
def test_compiled_ddp_equals_one_process():
    plain, model = twins(conv_net())
    with compiling():  # not by the default backend, which needs a compiler of C++ and seconds
        assert_same_training(plain, torch.compile(DistributedDataParallel(model), backend="aot_eager"))


@each_process(3)
def test_layers_called_by_name_compile_to_two_graphs():
    def forward(net: Net, input: Tensor) -> Tensor:
        return net.relu(net.bn(net.conv(input)))  # `torch.compile` can break between.

    plain, model = twins(Net(forward, conv=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(8), relu=nn.ReLU()))
    graphs: list[Any] = []
    batch = images()
    with compiling():
        compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
        assert_equal(compiled(cut(batch)), cut(plain(batch)))
    assert len(graphs) == 2


@each_process(3)
def test_fsdp2_equals_one_process(size):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    for layers in (nn.Conv2d, nn.Module):  # also the batch norms by themselves
        for convert_first in (True, False):
            plain = randomize(conv_net()).double()
            model = copy.deepcopy(plain)
            if convert_first:
                convert_model(model)
            for module in [*(child for child in model if isinstance(child, layers)), model]:
                fully_shard(module, mesh=mesh)
            if not convert_first:
                convert_model(model)
            assert_same_training(plain, model)
