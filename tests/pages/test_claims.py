"""What pages say in words, tried: accumulation, averages, teachers, loops over rows, `squeeze`, choices, filters."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CUDA_COUNT, device_lists, needs_two_gpus
from helpers import AdaIN, Freezes, Net, assert_equal, assert_same_results, assert_same_state, doubles, twins
from repository import ROOT
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm1d,
    assert_matches_one_device,
    assert_synchronized,
    convert_model,
)

CPUS = ["cpu"] * 2


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def synchronized(net: nn.Module, **options: Any) -> DataParallelWithCallback:
    return DataParallelWithCallback(convert_model(net, **options), CPUS)


@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_accumulated_gradients_are_those_of_one_device_with_the_same_micro_batches_only(devices):
    plain, parallel = twins(_net(), devices)
    at_once = copy.deepcopy(plain)
    batch = doubles(12, 6, devices=devices)

    def accumulate(model: nn.Module, micro_batches: tuple[Tensor, ...]) -> list[Tensor]:
        for micro_batch in micro_batches:
            (model(micro_batch).sin().mean() / len(micro_batches)).backward()
        return []

    assert_same_results(plain, parallel, lambda model: accumulate(model, batch.chunk(2)))
    accumulate(at_once, (batch,))
    assert (at_once[0].weight.grad - plain[0].weight.grad).abs().max() > 1e-3
    assert (at_once[1].num_batches_tracked, plain[1].num_batches_tracked) == (1, 2)


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


def test_rows_of_a_loop_are_normalized_alone_only_with_a_group_size_of_one():
    plain, rows = calls_for_each_row().double(), doubles(4, 6, 3)
    together, alone = (synchronized(copy.deepcopy(plain), group_size=size) for size in (None, 1))
    expected = plain(rows)
    assert_equal(alone(rows), expected)
    assert_equal(alone(rows[:3]), expected[:3])
    assert (together(rows) - expected).abs().max() > 1e-2
    with pytest.raises(ReplicaSyncError, match=r"bn the same number of times.* group_size=1"):
        together(rows[:3])


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


def losses(net: Net, input: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net.net(input), labels, reduction="none")


def hardest(losses: Tensor) -> Tensor:
    return losses.flatten().topk(2).values.mean()


def test_loss_that_chooses_is_right_outside_the_replicas_that_compute_losses():
    batch = torch.randn(5, 6), torch.randint(4, (5,))
    chooses_outside = synchronized(Net(losses, net=_net().float()))
    chooses_inside = synchronized(Net(lambda net, *batch: hardest(losses(net, *batch)), net=_net().float()))
    assert_matches_one_device(chooses_outside, *batch, loss=hardest)
    with pytest.raises(AssertionError, match="the loss differs"):
        assert_matches_one_device(chooses_inside, *batch, loss=torch.mean)


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


def test_group_norm_is_equal_in_replicas_without_this_library():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)).double()
    assert_matches_one_device(net, doubles(3, 3, 6, 6))


class FreezesByClass(nn.Sequential):
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for layer in self:
            if type(layer) is nn.BatchNorm2d or layer.__class__.__name__ == "BatchNorm2d":
                layer.eval()
        return self


def test_train_that_compares_classes_freezes_no_converted_layer():
    net = FreezesByClass(nn.BatchNorm2d(3)).train()
    assert not net[0].training
    converted = convert_model(net).train()
    assert converted[0].training
    assert isinstance(converted[0], nn.BatchNorm2d)


@pytest.mark.parametrize(
    ("net", "ignore"),
    [(nn.Sequential(nn.BatchNorm2d(3), AdaIN(3)), AdaIN), (Freezes(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), "module.0")],
    ids=["AdaIN", "frozen"],
)
def test_norm_that_is_right_as_it_is_can_be_left_out(net, ignore):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert_model left BatchNorm layers")
        parallel = synchronized(copy.deepcopy(net)).train()
    with pytest.raises(RuntimeError, match="expected every batch norm of the model to synchronize"):
        assert_synchronized(parallel)
    assert_synchronized(parallel, ignore=[ignore])
    assert_matches_one_device(parallel, torch.randn(3, 3, 4, 4))


def _refuses(parallel: nn.Module, *batch: Any, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        assert_matches_one_device(parallel, *batch)


def test_points_of_clouds_in_one_tensor_are_cut_by_points():
    def pooled(net: Net, points: Tensor, of_cloud: Tensor) -> Tensor:
        features = net.net(points)
        return features.new_zeros(3, 4).index_add(0, of_cloud, features)

    of_cloud = torch.arange(3).repeat_interleave(torch.tensor([4, 2, 5]))
    net = synchronized(Net(pooled, net=_net().float()))
    _refuses(net, torch.randn(11, 6), of_cloud, match=r"outputs have shapes .* in_dims should name")


@pytest.mark.parametrize(
    ("put_together", "is_right"), [(torch.cat, False), (tuple, True), (lambda views: torch.stack(views, 1), True)]
)
def test_two_rows_for_each_sample_are_no_output(put_together, is_right):
    net = Net(lambda net, *views: put_together([net.net(view) for view in views]), net=_net().float())
    views = torch.randn(3, 6), torch.randn(3, 6)
    if is_right:
        assert_matches_one_device(synchronized(net), *views)
    else:
        _refuses(synchronized(net), *views, match="outputs differ")


def test_halves_of_a_batch_are_chosen_by_a_mask():
    def by_halves(net: Net, input: Tensor) -> Tensor:
        source, target = input.chunk(2)
        return torch.cat([net.bn(source), target])

    def by_mask(net: Net, input: Tensor, is_source: Tensor) -> Tensor:
        output = input.clone()
        output[is_source] = net.bn(input[is_source])
        return output

    input, is_source = torch.randn(6, 3), torch.arange(6) < 3
    _refuses(synchronized(Net(by_halves, bn=nn.BatchNorm1d(3))), input, match="it begins with `input.chunk")
    assert_matches_one_device(synchronized(Net(by_mask, bn=nn.BatchNorm1d(3))), input, is_source)


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


def test_wrapper_inside_a_model_is_replaced_to_name_devices():
    net = convert_model(nn.Sequential(nn.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))))
    net[0] = DataParallelWithCallback(net[0].module, CPUS)
    assert_synchronized(net, replicas=2)


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


def test_backward_pass_in_forward_frees_the_graphs_of_all_replicas():
    parallel = synchronized(Net(lambda net, input: net.net(input).sin().mean(1).sum().backward(), net=_net()))
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        parallel(doubles(4, 6))
    loss = synchronized(_net())(doubles(4, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("is_called", ["the wrapper", "the net in forward"])
def test_net_that_is_called_several_times_has_the_numbers_of_one_device(is_called):
    def triplet(net: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(net.net if isinstance(net, Net) else net, inputs))

    plain, parallel = twins(_net() if is_called == "the wrapper" else Net(triplet, net=_net()), CPUS)
    inputs = [doubles(5, 6) for _ in range(3)]

    def step(model: nn.Module) -> list[Tensor]:
        anchor, same, other = triplet(model, *inputs) if is_called == "the wrapper" else model(*inputs)
        loss = nn.functional.triplet_margin_loss(anchor, same, other)
        loss.backward()
        return [loss]

    assert_same_results(plain, parallel, step)


@pytest.mark.parametrize("is_mean", [False, True], ids=["frozen", "mean"])
def test_teacher_in_a_wrapper_of_its_own_has_the_numbers_of_one_device(is_mean):
    def teacher_of(model: nn.Module) -> nn.Module:
        if not is_mean:
            return copy.deepcopy(model).eval().requires_grad_(False)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
        average.update_parameters(model)
        return average.eval()

    def distill(model: nn.Module) -> list[Tensor]:
        is_parallel = isinstance(model, DataParallelWithCallback)
        teacher = teacher_of(model.module if is_parallel else model)
        with torch.no_grad():
            expected = (DataParallelWithCallback(teacher, CPUS) if is_parallel else teacher)(batch)
        loss = nn.functional.mse_loss(model(batch), expected)
        loss.backward()
        return [loss]

    plain, parallel = twins(_net(), CPUS)
    batch = doubles(5, 6)
    assert_same_results(plain, parallel, distill)


DISJOINT = [pytest.param(([0, 1], [2, 3]), marks=pytest.mark.cuda, id="disjoint")] if CUDA_COUNT > 3 else []


@pytest.mark.parametrize("devices", [(CPUS, ["cpu"] * 3), *DISJOINT])
def test_several_wrappers_have_the_numbers_of_one_device(devices):
    nets = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double() for _ in range(2)]
    plain = nn.Sequential(*copy.deepcopy(nets))
    pairs = zip(nets, devices, strict=True)
    parallel = nn.Sequential(*[DataParallelWithCallback(convert_model(net).to(ids[0]), ids) for net, ids in pairs])
    input = doubles(5, 6)
    outputs = [plain(input), parallel(input.to(devices[0][0]))]
    for output in outputs:
        output.sin().sum().backward()
    assert_equal(outputs[1].cpu(), outputs[0])
    for expected, parameter in zip(plain.parameters(), parallel.parameters(), strict=True):
        assert_equal(parameter.grad.cpu(), expected.grad)
    with pytest.raises(ValueError, match="expected a model with one wrapper, but got 0, 1"):
        assert_matches_one_device(parallel, torch.randn(5, 6))


class NormWithoutCounter(nn.Module):
    """A copy of BatchNorm's code, as some projects have it."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine = num_features, 1e-5, 0.1, True
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, input: Tensor) -> Tensor:
        statistics, parameters = (self.running_mean, self.running_var), (self.weight, self.bias)
        return nn.functional.batch_norm(input, *statistics, *parameters, self.training, self.momentum, self.eps)


class WithLoaderOfTorch(NormWithoutCounter, SynchronizedBatchNorm1d):
    track_running_stats, num_batches_tracked = True, None

    def forward(self, input: Tensor) -> Tensor:
        return SynchronizedBatchNorm1d.forward(self, input)


class WithOwnLoader(WithLoaderOfTorch):
    _load_from_state_dict = nn.Module._load_from_state_dict


def test_copy_of_the_code_of_batch_norm_loads_its_state_dict_with_its_own_loader():
    state = {name: torch.rand(3) for name in nn.Sequential(NormWithoutCounter(3)).state_dict()}
    of_torch, own = (
        convert_model(nn.Sequential(NormWithoutCounter(3)), classes={NormWithoutCounter: cls})
        for cls in (WithLoaderOfTorch, WithOwnLoader)
    )
    with pytest.raises(RuntimeError, match=r"Unexpected key.*num_batches_tracked"):
        of_torch.load_state_dict(dict(state))
    own.load_state_dict(dict(state))
    assert own.state_dict().keys() == state.keys()
    assert_matches_one_device(DataParallelWithCallback(own, CPUS), torch.randn(3, 3))


def _sets(name: str, value: Any) -> Callable[[Net, Tensor], Tensor]:
    def forward(net: Net, input: Tensor) -> Tensor:
        setattr(net, name, value(getattr(net, name, None), input))
        return net.bn(input)

    return forward


def _with_hook_that_sets() -> Net:
    net = Net(lambda net, input: net.bn(input), bn=_norm(), seen=0)
    net.bn.register_forward_hook(lambda *_: setattr(net, "seen", 1))
    return net


def _with_hook_that_reads() -> Net:
    net = Net(_sets("gain", lambda _, input: input.mean()), bn=_norm(), gain=None)
    net.bn.register_forward_hook(lambda *_: net.gain and None)
    return net


def _norm() -> nn.Module:
    return SynchronizedBatchNorm1d(3)


def _scales_weight(net: Net, input: Tensor) -> Tensor:
    with torch.no_grad():
        net.bn.weight.mul_(0.9)
    return net.bn(input)


def _called_twice(parallel: nn.Module, input: Tensor) -> None:
    """Call a wrapper twice: a parameter that `forward` changes is watched after the first forward pass."""
    parallel(input)
    parallel(input)


class OwnForward(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


FILTERED: dict[str, Callable[[Tensor], Any]] = {
    "plain BatchNorm": lambda input: DataParallelWithCallback(nn.BatchNorm1d(3), CPUS)(input),
    "left by `convert_model`": lambda input: convert_model(OwnForward(3)),
    "state on": lambda input: DataParallelWithCallback(
        Net(_sets("step", lambda step, _: step + 1), bn=_norm(), step=0), CPUS
    )(input),
    "hooks that set": lambda input: DataParallelWithCallback(_with_hook_that_sets(), CPUS)(input),
    "read them": lambda input: DataParallelWithCallback(_with_hook_that_reads(), CPUS)(input),
    "parameters changed": lambda input: _called_twice(
        DataParallelWithCallback(Net(_scales_weight, bn=_norm()), CPUS), input
    ),
    "lists not cut": lambda input: DataParallelWithCallback(Net(lambda net, x, tables: net.bn(x), bn=_norm()), CPUS)(
        input, [torch.ones(10, 2), torch.ones(10, 2)]
    ),
    "scalars": lambda input: DataParallelWithCallback(Net(lambda net, x: net.bn(x).sum(), bn=_norm()), CPUS)(input),
    "a checkpoint": lambda input: checkpoint(
        DataParallelWithCallback(_norm(), CPUS), input.requires_grad_(), use_reentrant=False
    ),
}


@pytest.mark.parametrize("about", FILTERED)
def test_filter_of_the_page_hides_its_warning_alone(about):
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    section = page.partition("## Warnings to filter")[2].partition("\n## ")[0]
    patterns = re.findall(r'`r?"(.+?)"`', section)
    assert len(patterns) == len(FILTERED)
    assert about in section
    pattern = patterns.pop(list(FILTERED).index(about))
    with pytest.warns(UserWarning, match=f"^(?:{pattern})") as caught:
        FILTERED[about](torch.randn(4, 3))
    assert len(caught) == 1
    assert not any(re.match(other, str(caught[0].message)) for other in patterns)
