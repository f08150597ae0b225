"""Copies, pickles and checkpoints: nothing tells a synchronized layer, used or new, from that of torch."""

import copy
import pickle

import pytest
import torch
from helpers import WITHOUT_BIAS, TwoLayers, assert_same_state, assert_same_step, doubles, randomize, twins
from torch import nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, SynchronizedBatchNorm2d


@pytest.mark.smoke
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_copies_train_on_by_themselves(devices, used, copied):
    plain, parallel = twins(TwoLayers().double(), devices)
    if used:
        assert_same_step(plain, parallel, doubles(4, 3, 6, 6, devices=devices))
    twin, before = copied(parallel), copy.deepcopy(parallel.state_dict())
    for module in (plain, twin):
        module.zero_grad()
    assert_same_step(plain, twin, doubles(4, 3, 6, 6, devices=devices))
    assert all(torch.equal(value, before[name]) for name, value in parallel.state_dict().items())
    plain.load_state_dict(parallel.module.state_dict())
    for module in (plain, parallel):
        module.zero_grad()
    assert_same_step(plain, parallel, doubles(5, 3, 6, 6, devices=devices))


def test_pickles_hold_nothing_of_a_forward():
    _, parallel = twins(TwoLayers(), ["cpu"] * 2)
    fresh = len(pickle.dumps(parallel))
    parallel(torch.randn(4, 3, 6, 6))
    assert len(pickle.dumps(parallel)) == fresh


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, *WITHOUT_BIAS, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpoints_go_both_ways(wrapped, options):
    plain, synchronized = randomize(nn.BatchNorm2d(3, **options)), SynchronizedBatchNorm2d(3, **options)
    plain(torch.randn(4, 3, 2, 2))
    source, target = plain, synchronized
    if wrapped:
        source, target = nn.DataParallel(plain), DataParallelWithCallback(synchronized, ["cpu"] * 2)
    target.load_state_dict(source.state_dict())
    assert target.state_dict()._metadata == source.state_dict()._metadata
    assert_same_state(synchronized, plain)
    source.load_state_dict(target.state_dict())


def checkpoint_without(name, version):
    state = nn.BatchNorm1d(3).state_dict()
    del state[name]
    state._metadata[""]["version"] = version
    return state


CHECKPOINTS = {
    "version 2 without counter": checkpoint_without("num_batches_tracked", 2),
    "version 1 without counter": checkpoint_without("num_batches_tracked", 1),
    "other channels": nn.BatchNorm1d(4).state_dict(),
    "no bias": checkpoint_without("bias", 2),
}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not-strict"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_that_do_not_fit_are_treated_as_torch_treats_them(kind, strict):
    results = []
    for layer in (nn.BatchNorm1d(3), SynchronizedBatchNorm1d(3)):
        layer.num_batches_tracked.fill_(7)
        try:
            text = str(layer.load_state_dict(copy.deepcopy(CHECKPOINTS[kind]), strict))
        except RuntimeError as error:
            text = str(error).replace("Synchronized", "")
        results.append((text, int(layer.num_batches_tracked)))
    assert results[0] == results[1]


EARLIER = {"layers": [f"SynchronizedBatchNorm{dims}" for dims in ("", "1d", "2d", "3d")], "comm": ["SyncMaster"]}
EARLIER["replicate"] = ["DataParallelWithCallback", "_ReplicationMixin", "_derived"]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in EARLIER for name in EARLIER[module]])
def test_name_in_pickles_of_earlier_versions_is_where_it_was(module, name):
    assert callable(pickle.loads(f"csync_batchnorm.{module}\n{name}\n.".encode()))
