"""`assert_synchronized` names every layer that would not be synchronized; what does not warns once."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from helpers import Net
from scripted import WRAPPERS, TorchStyle
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    assert_synchronized,
    convert_model,
    patch_replication_callback,
    revert_model,
)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), SynchronizedBatchNorm1d(4), nn.Sequential(SynchronizedBatchNorm2d(4)))


def _ours(net: nn.Module) -> DataParallelWithCallback:
    return DataParallelWithCallback(net, ["cpu"] * 2)


def _in_a_list() -> Net:
    """Return a model with a layer where torch does not find it."""
    return Net(len, layers=[nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)])


@pytest.mark.parametrize(
    "model",
    [
        _ours(_net()),
        DataParallelWithCallback(_net(), ["cpu"]),
        convert_model(nn.DataParallel(_net())),
        patch_replication_callback(TorchStyle(_net(), 2)),
        nn.Sequential(_ours(_net())),
        _ours(nn.Sequential(_ours(_net()))),
        _ours(convert_model(nn.Sequential(nn.BatchNorm1d(4), nn.DataParallel(nn.BatchNorm1d(4))))),
    ],
    ids=["wrapper", "one device", "patched", "patched subclass", "inside", "nested", "converted"],
)
def test_synchronized_model_passes(model):
    assert_synchronized(model)


def test_model_without_batch_norms_fails():
    text = "expected a model with BatchNorm layers, but found none in DataParallelWithCallback; check the model "
    with pytest.raises(RuntimeError, match=text):
        assert_synchronized(_ours(nn.Linear(2, 2)))


def test_a_patched_object_shows_that_its_replicas_are_connected():
    parallel = TorchStyle(_net(), 2)
    before = repr(parallel)
    head, _, rest = before.partition("\n")
    assert repr(patch_replication_callback(parallel)) == f"{head}\n  replicas connected by sync_batchnorm\n{rest}"
    assert repr(revert_model(parallel)).partition("\n")[0] == head
    assert "connected" not in repr(_ours(_net()))


def test_replicas_that_are_asked_for_must_be_made():
    for model in (_ours(_net()), patch_replication_callback(TorchStyle(_net(), 2))):
        assert_synchronized(model, replicas=2)
        with pytest.raises(RuntimeError, match=r"module\.\d .*: its wrapper makes 2 of 3 replicas; name"):
            assert_synchronized(model, replicas=3)
    with pytest.raises(RuntimeError, match="its wrapper makes 1 of 2 replicas"):
        assert_synchronized(DataParallelWithCallback(_net(), ["cpu"]), replicas=2)
    assert_synchronized(_ours(nn.Sequential(DataParallelWithCallback(_net(), ["cpu"]))), replicas=2)


def test_each_wrapper_around_a_layer_must_make_the_replicas_that_are_asked_for():
    net = _net()
    model = nn.Sequential(_ours(net), DataParallelWithCallback(nn.Sequential(_ours(net)), ["cpu"]))
    assert_synchronized(model)
    with pytest.raises(RuntimeError, match=r"2 that would not:\n  0\.module\.1 .*: its wrapper makes 1 of 2 replicas"):
        assert_synchronized(model, replicas=2)


@pytest.mark.parametrize(("size", "groups"), [(1, r"\[\[0\], \[1\], \[2\]\]"), (2, r"\[\[0, 1\], \[2\]\]")])
def test_groups_that_are_smaller_than_the_batch_are_named(size, groups):
    model = DataParallelWithCallback(SynchronizedBatchNorm1d(4, group_size=size), ["cpu"] * 3)
    text = rf"its group_size of {size} makes groups {groups} of replicas; set it to None"
    with pytest.raises(RuntimeError, match=text):
        assert_synchronized(model)
    assert_synchronized(DataParallelWithCallback(model.module, ["cpu"] * size))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: patch_replication_callback(nn.DataParallel(net, ["cpu"] * 2)),
        lambda net: patch_replication_callback(nn.DataParallel(net, [0, 1])),
        lambda net: DataParallelWithCallback(net, [0, 1]),
    ],
    ids=["patched cpu", "patched gpus", "wrapper"],
)
def test_devices_that_torch_drops_are_told_and_fail_where_replicas_are_asked_for(wrap):
    with pytest.warns(UserWarning, match=r"PyTorch finds no accelerator, .*\['cpu'\] \* 2\)") as caught:
        model = wrap(_net())
    assert caught[0].filename == __file__
    assert_synchronized(model)
    with pytest.raises(RuntimeError, match="its wrapper makes 1 of 2 replicas"):
        assert_synchronized(model, replicas=2)


class Norm(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 2


class LookAlike(nn.Module):
    """Has the code of a batch norm."""

    def __init__(self):
        super().__init__()
        self.num_features, self.training = 4, True
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))


UNCONNECTED = "its DataParallel does not connect replicas; call patch_replication_callback on it"
EVAL = (
    "it is in eval mode; call model.train(), or, if it is frozen on purpose, call assert_synchronized before you "
    "freeze it"
)
IN_A_LIST = "in a plain list or dict, which torch does not register; use nn.ModuleList or nn.ModuleDict"
NO_WRAPPER = "no wrapper is around it; wrap the model with DataParallelWithCallback"
LEFT = {
    "plain": (
        _ours(nn.Sequential(nn.BatchNorm1d(4), SynchronizedBatchNorm1d(4))),
        ["module.0 (BatchNorm1d): it is not synchronized; call convert_model(model)"],
    ),
    "class of the user's": (
        _ours(nn.Sequential(Norm(4), LookAlike())),
        [
            "module.0 (Norm): convert_model leaves it as it is, because Norm has a forward of its own; write class ... "
            "for another formula than that of batch norm, use sync_moments, "
            'see "Norms of your own" on the page "Extending"',
            "module.1 (LookAlike): convert_model leaves it as it is, because LookAlike has the attributes of a batch "
            "norm and a forward of its own; (1) ... if it is right alone, pass ignore=[LookAlike]",
        ],
    ),
    "list": (
        _ours(nn.Sequential(*_net()[:2], _in_a_list(), Net(len, held={"a": 2 * [SynchronizedBatchNorm1d(4)]}))),
        [f"module.2.layers (1 BatchNorm layer), module.3.held (1 BatchNorm layer): {IN_A_LIST}"],
        2,
    ),
    "list and nothing else": (_ours(_in_a_list()), [f"module.layers (1 BatchNorm layer): {IN_A_LIST}"]),
    "SyncBatchNorm": (
        _ours(nn.Sequential(nn.SyncBatchNorm(4))),
        ["module.0 (SyncBatchNorm): it synchronizes processes, not the replicas of one; call convert_model(model)"],
    ),
    "no wrapper": (SynchronizedBatchNorm1d(4), [f"the model itself (SynchronizedBatchNorm1d): {NO_WRAPPER}"]),
    "stock wrapper": (
        nn.DataParallel(_net()),
        [f"module.1 (SynchronizedBatchNorm1d), module.2.0 (SynchronizedBatchNorm2d): {UNCONNECTED}"],
        2,
    ),
    "eval": (
        _ours(_net()).eval(),
        [f"module.1 (SynchronizedBatchNorm1d), module.2.0 (SynchronizedBatchNorm2d): {EVAL}"],
        2,
    ),
    "eval without wrapper and running statistics": (
        SynchronizedBatchNorm1d(4, track_running_stats=False).eval(),
        [f"the model itself (SynchronizedBatchNorm1d): {EVAL}"],
    ),
}


@pytest.mark.parametrize("left", LEFT)
def test_layers_that_would_not_synchronize_are_named_with_the_reason(left):
    model, lines, *number = LEFT[left]  # of layers, if equal reasons stand in one line
    found = number[0] if number else len(lines)
    text = f"expected every batch norm of the model to synchronize, but got {found} that would not:\n  "
    with pytest.raises(RuntimeError) as caught:
        assert_synchronized(model)
    pattern = re.escape(text + "\n  ".join(lines)).replace(re.escape("..."), ".+")
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(_ours, nn.DataParallel), (nn.DataParallel, _ours), (lambda net: nn.DataParallel(_ours(net)), _ours)],
    ids=["inside", "outside", "outermost"],
)
def test_every_wrapper_around_a_layer_must_connect_replicas(outer, inner):
    model = outer(nn.Sequential(inner(_net())))
    with pytest.raises(RuntimeError, match=rf"2 that would not:\n  [\w.]+\.1 .*: {UNCONNECTED}$"):
        assert_synchronized(model)
    assert_synchronized(convert_model(model))


def test_every_way_to_a_layer_must_connect_replicas():
    net = _net()
    with pytest.raises(RuntimeError, match=rf"2 that would not:\n  0\.module\.1 .*: {UNCONNECTED}$"):
        assert_synchronized(nn.Sequential(_ours(net), nn.DataParallel(net)))
    assert_synchronized(nn.ModuleDict({"net": net, "wrapped": _ours(net)}))


def test_wrapper_holds_for_what_is_in_it_and_not_for_names_that_begin_like_its_own():
    model = nn.ModuleDict({"net": _ours(_net()), "network": _net()})
    with pytest.raises(RuntimeError, match=r"2 that would not:\n  network\.1 .*: no wrapper is around it"):
        assert_synchronized(model)


WARNING = (
    r"synchronized BatchNorm layers \(%s\) run in replicas that are not connected: each normalizes with its own chunk "
    r"of the batch\. Use DataParallelWithCallback alone, or call patch_replication_callback\(data_parallel\)"
)


def _caught(parallel: nn.Module, forwards: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(forwards):
            parallel(torch.randn(6, 4))
    return [str(warning.message) for warning in caught]


def test_stock_wrapper_warns_with_the_fix_once():
    model = nn.Sequential(SynchronizedBatchNorm1d(4), nn.Linear(4, 4), _ours(SynchronizedBatchNorm1d(4)))
    before = [set(vars(layer)) for layer in model]
    (text,) = _caught(TorchStyle(model, 3))
    assert re.match(WARNING % "such as a SynchronizedBatchNorm1d", text)
    assert not _caught(TorchStyle(copy.deepcopy(model), 3))
    assert [set(vars(layer)) for layer in model] == before
    (text,) = _caught(TorchStyle(convert_model(_plain_net()), 3))
    assert re.match(WARNING % "2, first: '1'", text)


# Models that nobody has converted


PLAIN = (
    r"2 BatchNorm layers in training mode \(first: '1'\) do not synchronize in a DataParallelWithCallback: each "
    r"replica normalizes with its own chunk of the batch\. Call convert_model\(model\), or filter this warning if that "
    r"is intended"
)


def _plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", WRAPPERS)
def test_model_that_nobody_converted_warns_once(name, mode):
    parallel = WRAPPERS[name](_plain_net())
    with mode():
        (text,) = _caught(parallel)
    assert re.fullmatch(PLAIN.replace("DataParallelWithCallback", type(parallel).__name__), text)
    assert not _caught(pickle.loads(pickle.dumps(parallel)))


X = torch.randn(4, 4)
WARN_IN_THEIR_LINE: dict[str, Callable[[], object]] = {
    "2 BatchNorm layers in training mode": lambda: _ours(_plain_net())(X),
    "replicas that are not connected": lambda: TorchStyle(Net(lambda net, x: net.layer(x), layer=_net()[1]), 2)(X),
    "all input tensors were scalars": lambda: _ours(Net(lambda net, x: x.sum()))(X),
    "modified parameters": lambda: _ours(Net(lambda net, x: nn.init.ones_(net.weight), weight=nn.Parameter(X)))(X),
    "convert_model left BatchNorm": lambda: convert_model(_in_a_list()),
    "revert_model left modules": lambda: revert_model(type("Sub", (SynchronizedBatchNorm1d,), {})(4)),
}


@pytest.mark.parametrize("text", WARN_IN_THEIR_LINE)
def test_warning_names_the_line_of_the_user(text):
    case = WARN_IN_THEIR_LINE[text]
    with pytest.warns(UserWarning, match=text) as caught:
        case()
    assert (caught[0].filename, caught[0].lineno) == (__file__, case.__code__.co_firstlineno)


def test_model_that_nobody_converted_warns_in_its_first_training_forward():
    parallel = _ours(_plain_net()).eval()
    assert not _caught(parallel)
    assert not _caught(DataParallelWithCallback(parallel.module.train(), ["cpu"]))  # one device has the whole batch
    assert len(_caught(parallel.train())) == 1


class OwnNorm(nn.Module):
    """A normalization of a user's own, which synchronizes."""

    def __data_parallel_replicate__(self, ctx, copy_id):
        pass

    def forward(self, input):
        return input


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)),
        _plain_net().eval(),
        nn.Sequential(SynchronizedBatchNorm1d(4), nn.BatchNorm1d(4)),
        nn.Sequential(SynchronizedBatchNorm1d(4).eval(), nn.BatchNorm1d(4)),
        nn.Sequential(OwnNorm(), nn.BatchNorm1d(4)),
        convert_model(_plain_net()),
    ],
    ids=["no batch norm", "frozen", "some left", "frozen and some left", "own norm", "converted"],
)
def test_model_that_need_not_be_converted_does_not_warn(model):
    assert not _caught(_ours(model))


class AdaIN(nn.Module):
    """Normalizes each sample alone, with batch norm of a batch that has the samples as channels."""

    def __init__(self, num_features):
        super().__init__()
        self.num_features, self.weight, self.bias = num_features, None, None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x):
        n, c = x.shape[:2]
        return torch.batch_norm(x.reshape(1, n * c, -1), None, None, None, None, True, 0.1, 1e-5, False).view_as(x)


def test_norms_of_one_sample_each_are_left_out_on_request():
    with pytest.warns(UserWarning, match=r"\(1\) if it normalizes each sample alone, as AdaIN does, leave it as it is"):
        parallel = _ours(convert_model(nn.Sequential(AdaIN(4), nn.BatchNorm2d(4), AdaIN(4))))
    assert_synchronized(parallel, ignore=[AdaIN])
    assert_synchronized(parallel, ignore={"module.0", "module.2"})
    text = r"2 that would not:\n  module.0 \(AdaIN\), module.2 \(AdaIN\): .*pass ignore=\[AdaIN\]$"
    with pytest.raises(RuntimeError, match=text):
        assert_synchronized(parallel)
    with pytest.raises(RuntimeError, match=r"1 that would not:\n  module.2 \(AdaIN\): "):
        assert_synchronized(parallel, ignore=["module.0"])


@pytest.mark.parametrize(
    ("ignore", "error", "text"),
    [
        ("module.0", TypeError, "ignore as a list of classes and names of norms, but got 'module.0'"),
        ([nn.BatchNorm1d(3)], TypeError, "ignore as a list of classes and names"),
        (["module.9"], ValueError, r"to name modules of the model, but got \['module.9'\]; take names from the error"),
    ],
)
def test_what_cannot_be_ignored_is_refused(ignore, error, text):
    with pytest.raises(error, match=text):
        assert_synchronized(_ours(_net()), ignore=ignore)


class Freezes(nn.Sequential):
    """Freezes its norms whenever somebody calls train()."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


def test_a_train_that_freezes_norms_is_named_with_a_remedy_that_works():
    parallel = _ours(Freezes(SynchronizedBatchNorm1d(4), SynchronizedBatchNorm1d(4)))
    parallel.train()
    text = r"module.0 .*: it is in eval mode, and module has a train\(\) of its own \(Freezes\); if that freezes it on "
    with pytest.raises(RuntimeError, match=text):
        assert_synchronized(parallel)
    assert_synchronized(parallel, ignore=["module.0"])
