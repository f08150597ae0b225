"""Averages of the weights of a replicated net, and fusing, by the tools of torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, assert_same_state
from torch import nn
from torch.ao import quantization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from sync_batchnorm import DataParallelWithCallback, convert_model, revert_model


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def classifier():
    return nn.Sequential(conv(3, 6), conv(6, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).double()


def images():
    return torch.randn(8, 3, 8, 8, dtype=torch.float64)


def ends_of(wrap):
    """Train a net, and return it with two averages of it, and their outputs."""
    torch.manual_seed(3)
    net = wrap(classifier())
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(images()), torch.randint(5, (8,))).backward()
        optimizer.step()
        ema.update_parameters(net)
        swa.update_parameters(net)
    update_bn([images() for _ in range(3)], swa)
    return net, ema.module, swa.module, ema.eval()(images()), swa.eval()(images())


def replicated(net):
    return DataParallelWithCallback(convert_model(net), ["cpu"] * 4, timeout=5.0)


def test_averages_of_weights_are_those_of_one_device():
    for expected, actual in zip(ends_of(lambda net: net), ends_of(replicated), strict=True):
        compare = assert_same_state if isinstance(expected, nn.Module) else assert_equal
        compare(actual, expected, tolerance=1e-9)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_fusing_wants_a_model_of_torch():
    net = conv(3, 4).eval()
    for parts, fuse in ((["0", "1", "2"], quantization.fuse_modules), (["0", "1"], quantization.fuse_modules_qat)):
        converted = convert_model(copy.deepcopy(net).train(fuse is quantization.fuse_modules_qat))
        with pytest.raises(AssertionError, match=r"did not find fuser method for: .*SynchronizedBatchNorm2d"):
            fuse(copy.deepcopy(converted), [parts])
        assert isinstance(fuse(revert_model(converted), [parts])[1], nn.Identity)
