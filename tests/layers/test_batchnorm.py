"""The layers: when they synchronize, what they refuse, and that a checkpoint cannot tell them from torch's."""

import copy
import inspect

import pytest
import torch
from conftest import device_lists, slow
from helpers import (
    WITHOUT_BIAS,
    Net,
    TwoLayers,
    as_devices,
    assert_equal,
    assert_same_refusal,
    assert_same_step,
    doubles,
    outcome,
    run_parts,
    twins,
)
from simulated_gpus import is_simulated
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    assert_synchronized,
    set_sbn_eps_mode,
)

LAYERS = {
    SynchronizedBatchNorm1d: nn.BatchNorm1d,
    SynchronizedBatchNorm2d: nn.BatchNorm2d,
    SynchronizedBatchNorm3d: nn.BatchNorm3d,
}


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 3, 1, 1)], ids=str)
def test_single_value_in_all_is_refused_in_the_words_of_torch(devices, shape):
    plain, parallel = twins((nn.BatchNorm1d if len(shape) < 4 else nn.BatchNorm2d)(3).double(), devices)
    single, empty = doubles(*shape, devices=devices), doubles(0, *shape[1:])
    message = f"Expected more than 1 value per channel when training, got input size torch.Size({list(shape)})"
    assert outcome(lambda: run_parts(parallel, [single, empty])) == (ValueError, message)
    assert outcome(lambda: run_parts(parallel, [empty, single])) == (ValueError, message)
    assert parallel.module.num_batches_tracked == 0
    assert_same_refusal(plain, parallel, single)
    assert_same_step(plain, parallel, doubles(4, *shape[1:], devices=devices))
    assert_equal(parallel.eval()(single), plain.eval()(single))


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [6, 1])
@pytest.mark.parametrize("devices", device_lists(3, slow=[1, 2, 4]))
def test_eval_is_that_of_torch(devices, rows):
    plain, parallel = twins(TwoLayers().double(), devices)
    assert_same_step(plain, parallel, doubles(6, 3, 6, 6, devices=devices))
    before = copy.deepcopy(parallel.state_dict())
    data = doubles(rows, 3, 6, 6, devices=devices)
    for module in (plain.eval(), parallel.eval()):
        module.zero_grad()
    for _ in range(2):
        assert_same_step(plain, parallel, data)
    with torch.no_grad():
        assert_equal(parallel(data), plain(data))
    assert all(torch.equal(value, before[name]) for name, value in parallel.state_dict().items())


def test_replica_in_eval_may_skip_a_layer(devices):
    _, parallel = twins(Net(lambda net, x: net.bn(x) if x[0, 0] > 0 else x, bn=nn.BatchNorm1d(3)).double(), devices)
    data = doubles(4, 3, devices=devices).abs()
    data[2:] *= -1
    assert_equal(parallel.eval()(data)[2:], data[2:])


def test_layer_without_running_statistics_synchronizes_in_eval_too(devs):
    plain, parallel = twins(nn.BatchNorm1d(3, track_running_stats=False).double(), devs)
    assert_same_step(plain.eval(), parallel.eval(), doubles(4 * len(devs), 3, devices=devs))
    assert_synchronized(parallel)


CHANGES = {
    "untracked": {"track_running_stats": False},
    "no counter": {"num_batches_tracked": None},
    "nothing to average by": {"momentum": None, "num_batches_tracked": None},
    "no statistics": {"running_mean": None, "running_var": None},
    "no mean": {"running_mean": None},
    "nothing to track": {"running_mean": None, "running_var": None, "num_batches_tracked": None},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("momentum", [0.1, None], ids=str)
@pytest.mark.parametrize("training", [True, *slow(False)], ids=["train", "eval"])
def test_layers_changed_while_they_live_do_what_torch_does(devices, training, momentum, change):
    plain, parallel = twins(nn.BatchNorm1d(3, momentum=momentum).double(), devices)
    assert_same_step(plain, parallel, doubles(6, 3, devices=devices))
    for module in (plain, parallel):
        for name, value in CHANGES[change].items():
            setattr(getattr(module, "module", module), name, value)
        module.train(training)
    data = doubles(6, 3, devices=devices)
    expected = outcome(lambda: plain(data))
    if expected is not None:
        assert outcome(lambda: parallel(data)) == expected
    else:
        plain.load_state_dict(parallel.module.state_dict())
        assert_same_step(plain, parallel, data)


WRONG_INPUTS = {
    "dimensions": (torch.zeros(4), torch.zeros(4, 3, 2, 2, 2, 2)),
    "channels": (torch.randn(4, 5, 2), torch.randn(4, 5, 2, 2), torch.randn(4, 5, 2, 2, 2)),
    "integer": tuple(torch.ones(4, 3, *[2] * n, dtype=torch.int64) for n in range(4)),
    "complex": tuple(torch.ones(4, 3, *[2] * n, dtype=torch.complex64) for n in range(4)),
    "dtype": tuple(torch.ones(4, 3, *[2] * n, dtype=torch.float64) for n in range(4)),
}


@pytest.mark.parametrize("kind", WRONG_INPUTS)
@pytest.mark.parametrize("layer", LAYERS.values())
def test_wrong_input_is_refused_in_the_words_of_torch(devices, layer, kind):
    plain, parallel = twins(layer(3), devices)
    before = copy.deepcopy(parallel.state_dict())
    for data in WRONG_INPUTS[kind]:
        assert_same_refusal(plain, parallel, data.to(as_devices(devices)[0]))
    assert all(torch.equal(value, before[name]) for name, value in parallel.state_dict().items())


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda tensor: tensor[:2]], ids=["dtype", "shape"])
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_wrong_parameter_or_buffer_is_refused_in_the_words_of_torch(devices, name, change):
    plain, parallel = twins(nn.BatchNorm1d(3), devices)
    for layer in (plain, parallel.module):
        tensor = change(getattr(layer, name).detach())
        setattr(layer, name, nn.Parameter(tensor) if name in ("weight", "bias") else tensor)
    data = torch.randn(4, 3, device=as_devices(devices)[0])
    if "running" in name and change is torch.Tensor.double and data.is_cuda and not is_simulated():
        pytest.skip("a real GPU takes running statistics of another dtype")
    assert_same_refusal(plain, parallel, data)
    assert parallel.module.num_batches_tracked == 0


@pytest.mark.cuda
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
def test_input_on_another_device_is_refused_in_the_words_of_torch(affine):
    moving = nn.Sequential(Net(lambda net, input: input.cpu()), nn.BatchNorm1d(3, affine=affine))
    plain, parallel = twins(moving, [0, 0])
    assert_same_refusal(plain, parallel, torch.randn(4, 3, device="cuda"))


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"eps": -1.0}, {"affine": True}, {"affine": False}], ids=str)
def test_layer_without_channels_or_of_a_bad_eps_is_refused_where_torch_refuses_it(devices, options):
    plain, parallel = twins(nn.BatchNorm1d(3 if "eps" in options else 0, **options), devices)
    data = torch.randn(4, plain.num_features, device=as_devices(devices)[0])
    expected = outcome(lambda: plain(data))
    assert expected is not None or "affine" in options or torch.__version__ < (2, 13)  # an older torch may accept it
    assert outcome(lambda: parallel(data)) == expected


@pytest.mark.smoke
@pytest.mark.parametrize(("ours", "theirs"), LAYERS.items())
def test_layers_are_those_of_torch_and_take_the_same_arguments(ours, theirs):
    layer = ours(3)
    assert isinstance(layer, theirs)
    assert not isinstance(layer, (nn.SyncBatchNorm, *(other for other in LAYERS.values() if other is not theirs)))
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(layer), nn.SyncBatchNorm)
    expected = inspect.signature(theirs).parameters
    actual = inspect.signature(ours).parameters
    assert list(actual)[: len(expected)] == list(expected)
    for name, parameter in expected.items():
        assert (actual[name].default, actual[name].kind) == (parameter.default, parameter.kind)
    # Torch 2.8 has no `bias`, and says so to whoever passes it.
    added = [p for p in list(actual.values())[len(expected) :] if p.name != "bias"]
    assert [p.name for p in added] == ["eps_mode", "group_size", "process_group"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in added)


def test_constructor_options_reach_parameters_and_buffers():
    layer = SynchronizedBatchNorm2d(3, 0.1, None, device="meta", dtype=torch.float64, **dict(*WITHOUT_BIAS))
    assert (layer.eps, layer.momentum, layer.bias is None) == (0.1, None, bool(WITHOUT_BIAS))
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    assert layer.weight.dtype == layer.running_mean.dtype == torch.float64


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2, 2, 2)], ids=str)
def test_layer_for_any_number_of_dimensions_takes_them(shape):
    layer = SynchronizedBatchNorm(3).double()
    plain = nn.BatchNorm1d(3).double()
    data = doubles(*shape)
    assert_equal(layer(data), plain(data.flatten(2) if len(shape) > 2 else data).view(shape))
    with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
        layer(doubles(3))


@pytest.mark.parametrize("own", [None, "plus"])
def test_default_of_eps_holds_for_layers_that_have_none_of_their_own(own):
    data = 1e-3 * doubles(4, 3)
    layers = [SynchronizedBatchNorm1d(3, eps_mode=mode).double() for mode in (own, own or "clamp")]
    try:
        set_sbn_eps_mode("clamp")
        outputs = [DataParallelWithCallback(layer, ["cpu"] * 2)(data) for layer in layers]
    finally:
        set_sbn_eps_mode("plus")
    assert_equal(*outputs)
    again = DataParallelWithCallback(layers[0], ["cpu"] * 2)(data)
    assert_equal(again, nn.BatchNorm1d(3).double()(data))
    with pytest.raises(ValueError, match=r"^mode must be 'plus' or 'clamp', got 'minus'"):
        set_sbn_eps_mode("minus")


def test_repr_shows_the_options_that_are_given():
    assert repr(SynchronizedBatchNorm1d(3)) == "Synchronized" + repr(nn.BatchNorm1d(3))
    layer = SynchronizedBatchNorm1d(3, eps_mode="clamp", group_size=2)
    assert repr(layer).endswith(", eps_mode=clamp, group_size=2)")
    layer.group_size = 0  # which no layer takes, but an error message may show
    assert repr(layer).endswith(", eps_mode=clamp, group_size=0)")
