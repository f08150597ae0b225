"""`assert_synchronized` names every layer that would not be synchronized; what does not warns once."""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from conftest import needs_two_gpus
from helpers import AdaIN, Freezes, Net, WithPipe, assert_like
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


def _ours(net: nn.Module, replicas: int = 2) -> DataParallelWithCallback:
    return DataParallelWithCallback(net, ["cpu"] * replicas)


NET = _net()


class Norm(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 2


def _in_a_list() -> Net:
    return Net(len, layers=[nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)])


SYNCHRONIZED: dict[str, tuple[nn.Module, int | None]] = {  # with the number of replicas that is asked for
    "wrapper": (_ours(_net()), 2),
    "one device": (_ours(_net(), 1), None),
    "converted": (convert_model(nn.DataParallel(_net())), None),
    "patched subclass": (patch_replication_callback(TorchStyle(_net(), 2)), 2),
    "inside": (nn.Sequential(_ours(_net())), 2),
    "nested and converted": (_ours(convert_model(nn.Sequential(nn.BatchNorm1d(4), nn.DataParallel(_net())))), 2),
    "two ways": (nn.ModuleDict({"net": NET, "wrapped": _ours(NET)}), 2),
    "two wrappers": (nn.Sequential(_ours(NET), _ours(nn.Sequential(_ours(NET)), 1)), None),
    "group of all": (_ours(SynchronizedBatchNorm1d(4, group_size=2)), 2),
    "plain ones outside": (nn.Sequential(_ours(_net()), nn.BatchNorm1d(4), nn.SyncBatchNorm(4), Norm(4), AdaIN(4)), 2),
    "plain ones outside of torch's": (nn.Sequential(nn.DataParallel(nn.Linear(4, 4)), nn.BatchNorm1d(4)), None),
}


@pytest.mark.parametrize(("model", "replicas"), SYNCHRONIZED.values(), ids=list(SYNCHRONIZED))
def test_synchronized_model_passes(model, replicas):
    assert_synchronized(model, replicas=replicas)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: patch_replication_callback(nn.DataParallel(net, ["cpu"] * 2)),
        lambda net: DataParallelWithCallback(net, [0, 1]),
    ],
    ids=["patched", "wrapper"],
)
def test_devices_that_torch_drops_are_told_and_fail_where_replicas_are_asked_for(wrap):
    with pytest.warns(UserWarning, match=r"PyTorch finds no accelerator, .*\['cpu'\] \* 2\)") as caught:
        model = wrap(_net())
    assert caught[0].filename == __file__
    assert_synchronized(model)
    with pytest.raises(RuntimeError, match="its wrapper makes 1 of 2 replicas"):
        assert_synchronized(model, replicas=2)


# What is said of layers; "..." stands for any text.
UNCONNECTED = "its DataParallel does not connect replicas; call patch_replication_callback on it"
EVAL = "it is in eval mode; call model.train(), or, if it is frozen on purpose, call assert_synchronized before you ..."
EVAL_PLAIN = "it is in eval mode; call model.train(), or, if it is frozen on purpose, name it in ignore"
NOT_REGISTERED = "in a plain list or dict, which torch does not register; use nn.ModuleList or nn.ModuleDict"
NOT_SYNCHRONIZED = "it is not synchronized; call convert_model(model)"
NO_WRAPPER = "no wrapper is around it; wrap the model with DataParallelWithCallback"
OUTSIDE = "it stands outside every wrapper; on a gathered output that is right, so name it in ignore; ..."
OF_PROCESSES = "it synchronizes processes, not the replicas of one; call convert_model(model)"
OWN_FORWARD = "convert_model leaves it, because Norm has a forward of its own; write class ..."
IN_ITS_ATTRIBUTES = "convert_model leaves it, because AdaIN has ...; otherwise leave it, here by ignore=[AdaIN]"
FREEZES = "it is in eval mode, and module has a train() of its own (Freezes); if that freezes it on ..."
FEWER = 'its wrapper makes {} replicas; name more devices, as in DataParallelWithCallback(wrapper.module, ["cpu"] * {})'
FEWER_PATCHED = "its wrapper makes 2 of 3 replicas; name more devices, CPUs only in a DataParallelWithCallback"
GROUPS = "its group_size of {} makes groups {} of replicas; set it to None, ..."
ALONE = "the model itself (SynchronizedBatchNorm1d)"
OF_WRAPPER = "module (SynchronizedBatchNorm1d)"


def _two(prefix: str) -> str:
    """Return the layers of `_net` as a message names them."""
    return f"{prefix}.1 (SynchronizedBatchNorm1d), {prefix}.2.0 (SynchronizedBatchNorm2d)"


LISTS = nn.Sequential(*_net()[:2], _in_a_list(), Net(len, held={"a": 2 * [SynchronizedBatchNorm1d(4)]}))
FROZEN = _ours(Freezes(SynchronizedBatchNorm1d(4), SynchronizedBatchNorm1d(4))).train()
BESIDE_FROZEN = nn.Sequential(Freezes(nn.Linear(4, 4)), SynchronizedBatchNorm1d(4).eval())
WITHOUT_STATISTICS = SynchronizedBatchNorm1d(4, track_running_stats=False).eval()
LEFT: list[tuple[nn.Module, int | None, str, str]] = [  # the model, how many replicas are asked for, layers, reason
    (_ours(nn.BatchNorm1d(4)), None, "module (BatchNorm1d)", NOT_SYNCHRONIZED),
    (_ours(nn.SyncBatchNorm(4)), None, "module (SyncBatchNorm)", OF_PROCESSES),
    (_ours(nn.Sequential(Norm(4))), None, "module.0 (Norm)", OWN_FORWARD),
    (_ours(nn.Sequential(AdaIN(4))), None, "module.0 (AdaIN)", IN_ITS_ATTRIBUTES),
    (_ours(LISTS), None, "module.2.layers (1 BatchNorm layer), module.3.held (1 BatchNorm layer)", NOT_REGISTERED),
    (_ours(_in_a_list()), None, "module.layers (1 BatchNorm layer)", NOT_REGISTERED),
    (_ours(_net()).eval(), None, _two("module"), EVAL),
    (WITHOUT_STATISTICS, None, ALONE, EVAL),
    (_ours(nn.Sequential(nn.BatchNorm1d(4).eval(), _net())), None, "module.0 (BatchNorm1d)", EVAL_PLAIN),
    (_ours(Norm(4).eval()), None, "module (Norm)", EVAL_PLAIN),
    (_ours(nn.SyncBatchNorm(4).eval()), None, "module (SyncBatchNorm)", EVAL_PLAIN),
    (_ours(Freezes(nn.BatchNorm1d(4), SynchronizedBatchNorm1d(4))).train(), None, "module.0 (BatchNorm1d)", FREEZES),
    (_ours(nn.BatchNorm1d(4, track_running_stats=False)).eval(), None, "module (BatchNorm1d)", NOT_SYNCHRONIZED),
    (FROZEN, None, "module.0 (SynchronizedBatchNorm1d)", FREEZES),
    (_ours(BESIDE_FROZEN), None, "module.1 (SynchronizedBatchNorm1d)", EVAL),
    (_net()[1], None, ALONE, NO_WRAPPER),
    (nn.ModuleDict({"net": _ours(_net()), "network": _net()}), None, _two("network"), OUTSIDE),
    (nn.Sequential(nn.DataParallel(nn.Linear(4, 4)), _net()), 2, _two("1"), OUTSIDE),
    (nn.DataParallel(_net()), None, _two("module"), UNCONNECTED),
    (nn.DataParallel(nn.Sequential(_ours(_net()))), None, _two("module.0.module"), UNCONNECTED),
    (nn.DataParallel(_ours(_ours(_net()))), None, _two("module.module.module"), UNCONNECTED),
    (nn.Sequential(_ours(NET), nn.DataParallel(NET)), None, _two("0.module"), UNCONNECTED),
    (_ours(_net()), 3, _two("module"), FEWER.format("2 of 3", 3)),
    (patch_replication_callback(TorchStyle(_net(), 2)), 3, _two("module"), FEWER_PATCHED),
    (_ours(_net(), 1), 2, _two("module"), FEWER.format("1 of 2", 2)),
    (nn.Sequential(_ours(NET), _ours(nn.Sequential(_ours(NET)), 1)), 2, _two("0.module"), FEWER.format("1 of 2", 2)),
    (_ours(SynchronizedBatchNorm1d(4, group_size=1), 3), None, OF_WRAPPER, GROUPS.format(1, "[[0], [1], [2]]")),
    (_ours(SynchronizedBatchNorm1d(4, group_size=2), 3), None, OF_WRAPPER, GROUPS.format(2, "[[0, 1], [2]]")),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("model", "replicas", "layers", "reason"), LEFT)
def test_layers_that_would_not_synchronize_are_named_with_the_reason(model, replicas, layers, reason):
    with pytest.raises(RuntimeError) as caught:
        assert_synchronized(model, replicas=replicas)
    text = f"expected every batch norm of the model to synchronize, but got {len(layers.split(', '))} that would not:"
    assert_like(str(caught.value), f"{text}\n  {layers}: {reason}")
    assert max([len(line.split("): ", 1)[1].split()) for line in str(caught.value).splitlines()[1:]]) <= 60
    if reason == UNCONNECTED:
        assert_synchronized(convert_model(model))


def test_each_reason_has_a_line():
    text = r"2 that would not:\n  module\.0 .*; call convert_model\(model\)\n  module\.1 .*: it is in eval mode"
    with pytest.raises(RuntimeError, match=text):
        assert_synchronized(_ours(nn.Sequential(nn.BatchNorm1d(4), SynchronizedBatchNorm1d(4).eval())))


def _caught(parallel: nn.Module, forwards: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(forwards):
            parallel(torch.randn(6, 4))
    return [str(warning.message) for warning in caught]


def _plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))


NOT_CONNECTED = "synchronized BatchNorm layers ({}) run in replicas that are not connected: ... call patch_replic..."


@pytest.mark.smoke
def test_stock_wrapper_warns_with_the_fix_once():
    model = nn.Sequential(SynchronizedBatchNorm1d(4), nn.Linear(4, 4), _ours(SynchronizedBatchNorm1d(4)))
    before = [set(vars(layer)) for layer in model]
    (text,) = _caught(TorchStyle(model, 3))
    assert_like(text, NOT_CONNECTED.format("such as a SynchronizedBatchNorm1d"))
    assert not _caught(TorchStyle(copy.deepcopy(model), 3))
    assert [set(vars(layer)) for layer in model] == before
    (text,) = _caught(TorchStyle(convert_model(_plain_net()), 3))
    assert_like(text, NOT_CONNECTED.format("2, first: '1'"))


@needs_two_gpus
def test_function_data_parallel_warns_that_its_replicas_are_not_connected():
    with pytest.warns(UserWarning, match="not connected"):
        nn.parallel.data_parallel(SynchronizedBatchNorm1d(4).cuda(), torch.randn(4, 4, device="cuda"), range(2))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", WRAPPERS)
def test_model_that_nobody_converted_warns_once(name, mode):
    parallel = WRAPPERS[name](_plain_net())
    assert not _caught(parallel.eval())
    assert not _caught(_ours(_plain_net(), 1))  # one device has the whole batch
    with mode():
        (text,) = _caught(parallel.train())
    assert (
        f"2 BatchNorm layers in training mode (first: '1') do not synchronize in a {type(parallel).__name__}: " in text
    )
    assert not _caught(pickle.loads(pickle.dumps(parallel)))


X = torch.randn(4, 4)
WARN_IN_THEIR_LINE: dict[str, Callable[[], object]] = {
    "2 BatchNorm layers in training mode": lambda: _ours(_plain_net())(X),
    "replicas that are not connected": lambda: TorchStyle(Net(lambda net, x: net.layer(x), layer=_net()[1]), 2)(X),
    "all input tensors were scalars": lambda: _ours(Net(lambda net, x: x.sum()))(X),
    "modified parameters": lambda: [*map(_ours(Net(lambda net, x: nn.init.normal_(net.w), w=nn.Parameter(X))), (X, X))],
    "convert_model left BatchNorm": lambda: convert_model(_in_a_list()),
    "revert_model left modules": lambda: revert_model(type("Sub", (SynchronizedBatchNorm1d,), {})(4)),
}


@pytest.mark.parametrize(("text", "case"), WARN_IN_THEIR_LINE.items(), ids=list(WARN_IN_THEIR_LINE))
def test_warning_names_the_line_of_the_user(text, case):
    with pytest.warns(UserWarning, match=text) as caught:
        case()
    assert (caught[0].filename, caught[0].lineno) == (__file__, case.__code__.co_firstlineno)


def _calling(called: str, **layers: nn.Module) -> Net:
    """Return a model with `bn`, which synchronizes, and other layers; it calls those that are named."""
    layers = {"bn": SynchronizedBatchNorm1d(4)} | layers
    return Net(lambda net, x: reduce(lambda y, name: net.get_submodule(name)(y), called.split(), x), **layers)


@pytest.mark.parametrize("name", ["wrapper", "patched", "own-parallel_apply"])
def test_model_whose_synchronized_layers_do_not_run_warns_once(name):
    parallel = WRAPPERS[name](_calling("seq.1", seq=nn.Sequential(nn.Identity(), nn.BatchNorm1d(4))))
    assert not _caught(parallel.eval())
    (text,) = _caught(parallel.train())
    assert text.startswith("1 BatchNorm layer in training mode (first: 'seq.1') does not synchronize in a ")
    assert not _caught(parallel)


SILENT: dict[str, nn.Module] = {
    "no batch norm": nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)),
    "some left": nn.Sequential(SynchronizedBatchNorm1d(4), nn.BatchNorm1d(4)),
    "frozen and some left": nn.Sequential(SynchronizedBatchNorm1d(4).eval(), nn.BatchNorm1d(4)),
    "connected norm": nn.Sequential(WithPipe(lambda norm, input: input), nn.BatchNorm1d(4)),
    "converted": convert_model(_plain_net()),
    "frozen norms run": _calling("plain", plain=nn.BatchNorm1d(4).eval()),
    "no norm runs": _calling("", linear=nn.Linear(4, 4)),
    "groups of one": _calling("bn plain", bn=SynchronizedBatchNorm1d(4, group_size=1), plain=nn.BatchNorm1d(4)),
    "frozen layers": _calling("plain", bn=SynchronizedBatchNorm1d(4).eval(), plain=nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("case", SILENT)
def test_model_that_synchronizes_or_need_not_does_not_warn(case):
    assert not _caught(_ours(SILENT[case]))


def test_norms_of_one_sample_each_are_left_out_on_request():
    with pytest.warns(UserWarning, match="if it normalizes the batch, .*; otherwise leave it"):
        parallel = _ours(convert_model(nn.Sequential(AdaIN(4), nn.BatchNorm2d(4), AdaIN(4))))
    assert_synchronized(parallel, ignore=[AdaIN])
    assert_synchronized(parallel, ignore={"module.0", "module.2"})
    text = r"2 that would not:\n  module.0 \(AdaIN\), module.2 \(AdaIN\): .*, here by ignore=\[AdaIN\]$"
    with pytest.raises(RuntimeError, match=text):
        assert_synchronized(parallel)
    with pytest.raises(RuntimeError, match=r"1 that would not:\n  module.2 \(AdaIN\): "):
        assert_synchronized(parallel, ignore=["module.0"])
    assert_synchronized(FROZEN, ignore=["module.0"])
    assert_synchronized(nn.Sequential(_ours(_net()), SynchronizedBatchNorm1d(4)), ignore=["1"])


@pytest.mark.parametrize(
    ("ignore", "error", "text"),
    [
        ("module.0", TypeError, "ignore as a list of classes and names of norms, but got 'module.0'"),
        ([nn.BatchNorm1d(3)], TypeError, "ignore as a list of classes and names"),
        (["module.1", "module.2"], ValueError, r"to name batch norms, but got \['module.2'\]; name each norm itself"),
    ],
)
def test_what_cannot_be_ignored_is_refused(ignore, error, text):
    with pytest.raises(error, match=text):
        assert_synchronized(_ours(_net()), ignore=ignore)
