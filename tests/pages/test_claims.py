"""What pages say in words, tried: averages, loops over rows, conditions, `squeeze`, rows of chunks, caches."""

import copy
import math
from typing import Any

import pytest
import torch
from conftest import needs_two_gpus
from helpers import Net, assert_equal, assert_same_state, doubles, twins
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, update_bn

from sync_batchnorm import (
    DataParallelWithCallback,
    assert_matches_one_device,
    assert_synchronized,
    convert_model,
)

CPUS = ["cpu"] * 2


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def synchronized(net: nn.Module, **options: Any) -> DataParallelWithCallback:
    return DataParallelWithCallback(convert_model(net, **options), CPUS)


@pytest.mark.parametrize("wraps", ["the average", "the model", "neither"])
def test_statistics_of_averaged_weights_are_those_of_one_device(wraps):
    plain, parallel = twins(_net(), CPUS)
    batches = [doubles(5, 6) for _ in range(3)]

    def averaged(trained: nn.Module) -> AveragedModel:
        average = AveragedModel(trained)
        average.update_parameters(trained)
        return average

    expected = averaged(plain)
    update_bn(batches, expected)
    average = averaged(parallel if wraps == "the model" else parallel.module)
    update_bn(batches, DataParallelWithCallback(average, CPUS) if wraps == "the average" else average)
    assert_same_state(average.module.module if wraps == "the model" else average.module, expected.module)


def calls_for_each_row(**options: bool) -> nn.Module:
    return Net(lambda net, rows: torch.stack([net.bn(row) for row in rows]), bn=nn.BatchNorm1d(3, **options))


def test_checks_of_a_loop_over_rows_need_the_name_of_the_layer_and_no_running_statistics():
    alone = synchronized(calls_for_each_row(), group_size=1)
    with pytest.raises(RuntimeError, match=r"module\.bn .*group_size of 1 makes groups"):
        assert_synchronized(alone)
    assert_synchronized(alone, ignore=["module.bn"])
    with pytest.raises(AssertionError, match=r"the buffer bn\.running_mean differs"):
        assert_matches_one_device(alone, torch.randn(3, 6, 3))
    without_statistics = synchronized(calls_for_each_row(track_running_stats=False), group_size=1)
    assert_matches_one_device(without_statistics, torch.randn(3, 6, 3))


def test_rows_that_a_condition_selects_have_the_numbers_of_one_device_where_a_replica_selects_none():
    def normalize_positive_rows(net: Net, input: Tensor) -> Tensor:  # without an early return if there is none
        mask, output = input[:, 0] > 0, input.clone()
        output[mask] = net.bn(input[mask])
        return output

    rows = torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.0, 7.0], [-1.0, 1.0, 1.0]])
    plain = Net(normalize_positive_rows, bn=nn.BatchNorm1d(3))
    parallel = synchronized(copy.deepcopy(plain))
    assert_matches_one_device(parallel, rows)
    assert_equal(parallel(rows), plain(rows))


SCALARS = "Was asked to gather along dimension 0, but all input tensors were scalars"


def test_single_output_that_is_equal_in_all_replicas_needs_a_container():
    def penalty(container: Any, out_dims: Any) -> Any:
        net = Net(lambda net, _: container(net.weight.square().mean()), weight=nn.Parameter(torch.ones(3)))
        return DataParallelWithCallback(net, CPUS, out_dims=out_dims)(torch.ones(2))

    assert penalty(lambda mean: (mean,), (None,))[0].shape == ()
    assert penalty(lambda mean: {"penalty": mean}, {"penalty": None})["penalty"].shape == ()
    with pytest.warns(UserWarning, match=SCALARS):
        assert penalty(lambda mean: mean, None).shape == (2,)


def test_mean_over_samples_of_each_replica_is_right_with_their_numbers():
    def mean_of_chunk(net: Net, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = nn.functional.cross_entropy(net.net(images), labels)
        return loss[None], loss.new_tensor([len(images)])

    def mean(losses_and_numbers: tuple[Tensor, Tensor]) -> Tensor:
        losses, numbers = losses_and_numbers
        return (losses * numbers).sum() / numbers.sum()

    batch = torch.randn(3, 6), torch.randint(4, (3,))
    assert_matches_one_device(synchronized(Net(mean_of_chunk, net=_net().float())), *batch, loss=mean)


def test_losses_in_training_and_a_list_of_dicts_in_evaluation_have_one_dimension():
    def detect(net: Net, images: Tensor) -> Any:
        return {"loss": images.mean(1)} if net.training else [{"boxes": image} for image in images]

    parallel, images = DataParallelWithCallback(Net(detect), CPUS, out_dims=0), doubles(5, 4)
    assert_equal(parallel(images)["loss"], images.mean(1))
    detections = parallel.eval()(images)
    assert [list(detection) for detection in detections] == [["boxes"]] * 5
    assert_equal(torch.stack([detection["boxes"] for detection in detections]), images)


def test_compiled_submodule_is_that_of_the_model_in_each_replica():
    called = []
    net = Net(lambda net, input: net.part(input), part=Net(lambda part, input: called.append(part) or input))
    net.part.compile(backend="eager", dynamic=False)
    with torch.compiler.set_stance("force_eager"):
        DataParallelWithCallback(net, CPUS)(doubles(4, 3))
    assert called == [net.part] * 2


def test_squeeze_of_one_sample_in_each_replica_is_seen_in_the_number_of_rows_or_in_a_warning():
    replicas = DataParallelWithCallback(Net(lambda net, input: input.squeeze()), ["cpu"] * 4)
    assert replicas(doubles(4, 8, 1, 1)).shape == (32,)
    with pytest.warns(UserWarning, match=SCALARS):
        assert replicas(doubles(4, 1)).shape == (4,)
    with pytest.raises(RuntimeError, match="their numbers of dimensions differ"):
        replicas(doubles(5, 8, 1, 1))


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_dimension_of_the_samples_stays_with_what_the_error_of_squeeze_says(rows):
    for shape, sizes in ((lambda net, input: input.flatten(1), (8, 1, 1)), (lambda net, input: input.squeeze(1), (1,))):
        input = doubles(rows, *sizes)
        assert_equal(DataParallelWithCallback(Net(shape), ["cpu"] * 4)(input), input.squeeze())


def test_points_of_clouds_in_one_tensor_are_cut_by_points():
    def pooled(net: Net, points: Tensor, of_cloud: Tensor) -> Tensor:
        features = net.net(points)
        return features.new_zeros(3, 4).index_add(0, of_cloud, features)

    of_cloud = torch.arange(3).repeat_interleave(torch.tensor([4, 2, 5]))
    net = synchronized(Net(pooled, net=_net().float()))
    with pytest.raises(AssertionError, match=r"depends on other samples|outputs differ"):
        assert_matches_one_device(net, torch.randn(11, 6), of_cloud)


@pytest.mark.parametrize("rows", range(1, 10))
def test_rows_of_replicas_are_those_of_torch_chunk(rows):
    sizes: list[int] = []
    net = Net(lambda net, input: sizes.append(len(input)) or input)
    DataParallelWithCallback(net, ["cpu"] * 4)(doubles(rows, 3))
    size = math.ceil(rows / 4)
    assert sizes == [len(chunk) for chunk in torch.arange(rows).chunk(4)]
    assert sizes == [min(size, rows - first) for first in range(0, rows, size)]


def test_functional_call_takes_the_module_or_runs_in_replicas():
    plain, parallel = twins(_net(), CPUS)
    input = doubles(5, 6)
    weights = {name: torch.randn_like(weight).requires_grad_() for name, weight in plain.named_parameters()}
    with pytest.raises(RuntimeError, match=r"The stateless API can't be used with nn\.DataParallel module"):
        functional_call(parallel, {f"module.{name}": weight for name, weight in weights.items()}, (input,))
    inside = Net(lambda net, input, weights: functional_call(net.net, weights, (input,)), net=parallel.module)
    inside = DataParallelWithCallback(inside, CPUS, in_dims={"args": (0, None)})
    outputs = functional_call(plain, weights, (input,)), inside(input, weights)
    outputs += (functional_call(parallel.module, weights, (input,)),)
    expected, *others = (
        [output, *torch.autograd.grad(output.sin().sum(), list(weights.values()))] for output in outputs
    )
    for results in others:
        for actual, of_one_device in zip(results, expected, strict=True):
            assert_equal(actual, of_one_device)


@needs_two_gpus
def test_replicas_of_the_function_data_parallel_are_not_connected():
    net = convert_model(nn.BatchNorm1d(3)).cuda()
    with pytest.warns(UserWarning, match="run in replicas that are not connected"):
        nn.parallel.data_parallel(net, torch.randn(4, 3, device="cuda"), range(2))


def test_cache_that_the_first_batch_fills_is_not_seen_by_the_check():
    cache: dict[str, Tensor] = {}
    net = Net(lambda net, input: net.net(input - cache.setdefault("mean", input.detach().mean(0))), net=_net().float())
    assert_matches_one_device(synchronized(net), torch.randn(3, 6))
    cache.clear()
    synchronized(net)(batch := torch.randn(3, 6))
    assert (cache["mean"] - batch.mean(0)).abs().max() > 1e-3
