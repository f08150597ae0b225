"""The recipes of `docs/migrating.md` and `docs/extending.md` equal one device."""

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import device_lists
from helpers import Net, assert_equal, assert_same_results, assert_same_step, doubles, randomize, tensors_of, twins
from repository import ROOT, blocks_of
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm2d, assert_matches_one_device, convert_model

CPUS = ["cpu"] * 2


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> types.ModuleType:
    """The Python code of a page, as one module."""
    module = types.ModuleType("page")
    for block in blocks_of(ROOT / "docs" / request.param):
        if block.language == "python":
            block.run(vars(module))
    return module


migrating = pytest.mark.parametrize("page", ["migrating.md"], indirect=True)
extending = pytest.mark.parametrize("page", ["extending.md"], indirect=True)


class EditedBatchNorm2d(SynchronizedBatchNorm2d):
    def __init__(self, num_features: int, momentum: float = 3e-4) -> None:
        super().__init__(num_features, momentum=momentum)

    def forward(self, input: Tensor, gain: Any = 1, bias: Any = 0) -> Tensor:
        return super().forward(input) * gain + bias


def test_layer_with_more_arguments_and_another_default_equals_one_device():
    plain = Net(lambda net, x, gain, bias: net.bn(x) * gain + bias, bn=nn.BatchNorm2d(3, momentum=3e-4))
    edited = Net(lambda net, x, gain, bias: net.bn(x, gain=gain, bias=bias), bn=EditedBatchNorm2d(3))
    edited.load_state_dict(randomize(plain).double().state_dict())
    inputs = [doubles(5, 3, 4, 4), *(doubles(5, 3, 1, 1).requires_grad_() for _ in range(2))]

    def step(model: nn.Module) -> Sequence[Tensor]:
        output = model(*inputs)
        return [output, *torch.autograd.grad(output, [*inputs[1:], *model.parameters()], output.detach().cos())]

    assert_same_results(plain, DataParallelWithCallback(edited.double(), CPUS), step)


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))


@migrating
@pytest.mark.parametrize(
    ("rows", "chunk_size", "sizes"),
    [(5, [1, 4], [1, 4]), (4, [1, 2, 2], [1, 2, 1]), (2, [1, 2, 2], [1, 1]), (11, [1, 2, 2], [3, 4, 4])],
)
def test_uneven_chunks_are_in_proportion_and_equal_one_device(page, rows, chunk_size, sizes):
    plain, parallel = twins(_conv().double(), ["cpu"] * len(chunk_size))
    seen: list[int] = []
    parallel.module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert_same_step(plain, page.Uneven(parallel.module, parallel.device_ids, chunk_size), doubles(rows, 3, 4, 4))
    assert seen == sizes


@migrating
def test_uneven_chunks_are_checked_and_come_with_other_keyword_arguments_than_tensors(page):
    assert_matches_one_device(page.Uneven(convert_model(_conv()), CPUS, [1, 4]), torch.randn(5, 3, 4, 4))
    signed = page.Uneven(Net(lambda net, x, sign: x * sign), CPUS, [1, 4])
    assert_equal(signed(batch := doubles(5, 2), sign=-1), -batch)
    with pytest.raises(TypeError, match="pass tensors by position"):
        signed(batch, sign=batch)


def _encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def _with_queue(page: types.ModuleType) -> nn.Module:
    return Net(lambda net, x: net.queue(y := net.encoder(x), y), encoder=_encoder(), queue=page.Queue(12, 4))


EXTENSIONS = {
    "norm": lambda page: (nn.Sequential(nn.Conv2d(3, 4, 1), page.OwnNorm2d(4)), doubles(5, 3, 4, 4)),
    "contrastive": lambda page: (page.Contrastive(_encoder()), doubles(5, 6), doubles(5, 6)),
    "queue": lambda page: (_with_queue(page), doubles(5, 6)),
    "features": lambda page: (page.WithFeatures(_conv(), "2"), doubles(5, 3, 4, 4)),
}


@extending
@pytest.mark.parametrize("devices", device_lists(1, 2, 3))
@pytest.mark.parametrize("name", EXTENSIONS)
def test_module_of_ones_own_equals_one_device(page, name, devices):
    net, *inputs = EXTENSIONS[name](page)
    inputs = [input.to(devices[0]).requires_grad_() for input in inputs]
    plain, parallel = twins(net.double(), devices)

    def step(model: nn.Module) -> list[Tensor]:
        outputs = tensors_of(model(*inputs))
        upstream = [output.detach().sin() for output in outputs]
        gradients = torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
        torch.autograd.backward(outputs, upstream, inputs=list(model.parameters()))
        return [*outputs, *gradients]

    for _ in range(3):
        assert_same_results(plain, parallel, step, 1e-12)


def grad_cam(net: Net, input: Tensor) -> Tensor:
    scores, features = net.with_features(input)
    return torch.autograd.grad(scores[:, 0].sum(), features)[0]


@extending
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_gradient_of_features_is_made_inside_in_eval_mode_and_cannot_be_outside(page, devices):
    net = Net(grad_cam, with_features=page.WithFeatures(_conv(), "2"))
    plain, parallel = twins(net.double().eval(), devices)
    input = doubles(5, 3, 4, 4, devices=devices)
    assert_equal(parallel(input), plain(input))
    scores, features = DataParallelWithCallback(parallel.module.with_features, devices)(input)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(scores[:, 0].sum(), features)
