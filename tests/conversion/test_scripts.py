"""Training scripts as people publish them, made small: four replicas train to the numbers of one device.

Each script is given a function that wraps a model, and returns what it ends with: modules, whose parameters, gradients
and buffers are compared, and tensors. What a script draws at random, it draws before it calls a model: replicas draw in
any order.
"""

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
    return nn.Sequential(conv(3, 6), conv(6, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def images():
    return torch.randn(8, 3, 8, 8)


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def ema_and_swa(wrap):
    net = wrap(classifier())
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        step(optimizer, F.cross_entropy(net(images()), torch.randint(5, (8,))))
        ema.update_parameters(net)
        swa.update_parameters(net)
    update_bn([images() for _ in range(3)], swa)
    return net, ema.module, swa.module, ema.eval()(images()), swa.eval()(images())


def quantization_aware_training(wrap):
    stub, unstub = quantization.QuantStub(), quantization.DeQuantStub()
    net = nn.Sequential(stub, nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 6)[:2], unstub)
    quantization.fuse_modules_qat(net, [["1", "2", "3"], ["4.0", "4.1"]], inplace=True)
    net.qconfig = quantization.QConfig(
        activation=quantization.FakeQuantize.with_args(quant_min=0, quant_max=255),
        weight=quantization.FakeQuantize.with_args(
            quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
        ),
    )
    quantization.prepare_qat(net, inplace=True)
    net(images())  # calibrates; then the observers stop, which belong to a replica and see its part alone
    net.apply(quantization.disable_observer)
    net = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    for _ in range(2):
        step(optimizer, (net(images()) * torch.randn(8, 6, 8, 8)).mean())
    return (net,)


def replicated(net):
    return DataParallelWithCallback(convert_model(net), ["cpu"] * 4, timeout=5.0)


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("script", [ema_and_swa, quantization_aware_training])
def test_script_ends_as_on_one_device(script):
    endings = []
    for wrap in (lambda net: net, replicated):
        torch.manual_seed(3)
        endings.append(script(wrap))
    for expected, actual in zip(*endings, strict=True):
        compare = assert_same_state if isinstance(expected, nn.Module) else assert_equal
        compare(actual, expected, tolerance=1e-9)


def test_fusing_wants_a_model_of_torch():
    net = conv(3, 4).eval()
    for parts, fuse in ((["0", "1", "2"], quantization.fuse_modules), (["0", "1"], quantization.fuse_modules_qat)):
        converted = convert_model(copy.deepcopy(net).train(fuse is quantization.fuse_modules_qat))
        with pytest.raises(AssertionError, match=r"did not find fuser method for: .*SynchronizedBatchNorm2d"):
            fuse(copy.deepcopy(converted), [parts])
        assert isinstance(fuse(revert_model(converted), [parts])[1], nn.Identity)
