"""What a replica finds of itself: parameters, their names and its state, as on one device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CUDA_COUNT, INTERLEAVED, device_lists
from helpers import Net, as_devices, assert_equal, assert_same_state, assert_same_step, doubles, twins
from scripted import WRAPPERS, R
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from sync_batchnorm import convert_model

on_devices = pytest.mark.parametrize("devices", [*device_lists(2, 3), *INTERLEAVED])


ON_CPU = not CUDA_COUNT


class Doubled(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * input


class All(nn.Module):
    """Every way in which a module holds parameters; `look` is what its forward makes of itself."""

    def __init__(self, look: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.look = look
        self.bn, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)
        # Simulated GPUs lack the kernels of an LSTM.
        self.rnn = (nn.LSTM if ON_CPU else nn.RNN)(3, 3, batch_first=True, bidirectional=True)
        options = {"proj_size": 2} if ON_CPU else {}
        self.other = (nn.LSTM if ON_CPU else nn.RNN)(6, 3, bias=False, batch_first=True, **options)
        self.list = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.dict = nn.ParameterDict({"scale": nn.Parameter(torch.randn(3))})
        self.parametrized = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Doubled())
        self.normed = parametrizations.weight_norm(nn.Linear(3, 3))
        self.alias, self.shared = self.linear, nn.Linear(3, 3)
        self.shared.weight, self.shared.bias = self.linear.weight, self.bn.bias
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_parameter("nothing", None)

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        hidden = self.alias(self.bn(input)) * self.list[0] + self.list[1] * self.dict["scale"] + self.frozen
        hidden = self.other(self.rnn(hidden[:, None])[0])[0][:, 0].repeat(1, 2)[:, :3]
        return self.shared(self.normed(self.parametrized(hidden))), self.look(self)


def penalty(net: nn.Module) -> Tensor:
    of_all = sum(parameter.square().sum() for parameter in net.parameters())
    of_part = sum(p.abs().sum() for name, p in net.linear.named_parameters() if name.endswith("bias"))
    return (of_all + of_part + torch.cat([p.flatten() for p in net.rnn.parameters()]).sin().sum()).reshape(1)


def assert_same_penalty(plain: nn.Module, parallel: nn.Module, data: Tensor) -> None:
    (expected, one), (output, several) = plain(data), parallel(data)
    assert_equal(output, expected)
    assert_equal(several, one.expand(len(several)), tolerance=1e-12)
    if torch.is_grad_enabled():
        for loss in (expected.sin().sum() + one.mean(), output.sin().sum() + several.mean()):
            loss.backward()
    assert_same_state(parallel, plain, tolerance=1e-12)


@on_devices
def test_penalty_over_parameters_of_a_replica_has_the_value_and_the_gradients_of_one_device(devices):
    plain, parallel = twins(All(penalty).double(), devices)
    for is_enabled in (True, False, True):
        with torch.set_grad_enabled(is_enabled):
            assert_same_penalty(plain, parallel, doubles(8, 3, devices=devices))


@pytest.mark.smoke
@pytest.mark.parametrize("way", WRAPPERS)
def test_penalty_is_right_in_every_wrapper(way):
    plain = All(penalty).double()
    assert_same_penalty(plain, WRAPPERS[way](convert_model(copy.deepcopy(plain))), doubles(2 * R, 3))


@on_devices
def test_replica_finds_names_state_and_dtype_as_on_one_device(devices):
    def look(net: nn.Module) -> Tensor:
        seen.append(
            [
                [name for name, _ in net.named_parameters()],
                [name for name, _ in net.named_parameters(remove_duplicate=False)],
                [list(module.state_dict()) for module in (net, net.rnn)],
                [name for name, parameter in net.named_parameters() if parameter.requires_grad],
                next(net.parameters()).dtype,
                len(net.rnn.all_weights[0]),
                "weight" in vars(net.linear),
                "nothing" in net._parameters,
            ]
        )
        devices_seen.append({p.device for p in [*net.parameters(), *net.state_dict().values()]})
        return next(net.bn.parameters())[:1]

    seen: list[Any] = []
    devices_seen: list[Any] = []
    plain, parallel = twins(All(look).double(), devices)
    data = doubles(8, 3, devices=devices)
    plain(data)
    parallel(data)
    assert seen == seen[:1] * (1 + len(devices))
    assert sorted(map(str, devices_seen[1:])) == sorted(str({device}) for device in as_devices(devices))


@on_devices
def test_parameters_of_replicas_are_theirs(devices):
    _, parallel = twins(All(penalty), devices)
    originals = dict(parallel.module.named_parameters())
    for replica in parallel.replicate(parallel.module, parallel.device_ids):
        own = dict(replica.named_parameters())
        assert list(own) == list(originals)
        assert all((own[name].grad_fn is not None) == p.requires_grad for name, p in originals.items())
        assert replica.alias is replica.linear
        assert own["linear.weight"] is replica.linear.weight is replica.shared.weight
        assert own["bn.bias"] is replica.bn.bias is replica.shared.bias
        assert own["rnn.weight_hh_l0"] is replica.rnn.weight_hh_l0
        assert any(own["rnn.weight_hh_l0"] is weight for weight in replica.rnn._flat_weights)
    assert all(originals[name] is parameter for name, parameter in parallel.module.named_parameters())


def assigned(net: nn.Module, input: Tensor) -> Tensor:
    net.linear.weight = net.linear.weight * 2
    return net.linear(net.bn(input))


def replaced(net: nn.Module, input: Tensor) -> Tensor:
    weight = net.linear.weight * 2
    del net.linear.weight
    net.linear.weight = weight
    output = net.linear(net.bn(input))
    if not hasattr(net, "_is_replica"):
        del net.linear.weight, net.linear.bias  # in their order
        net.linear.weight, net.linear.bias = net.kept
    return output


def test_tensor_cannot_be_assigned_to_the_name_of_a_parameter_but_can_after_it_is_deleted(devices):
    plain, parallel = twins(Net(assigned, bn=nn.BatchNorm1d(3), linear=nn.Linear(3, 3)).double(), devices)
    for model in (plain, parallel):
        with pytest.raises(TypeError, match=r"cannot assign .+ as parameter 'weight'"):
            model(doubles(4, 3, devices=devices))
    plain, parallel = twins(Net(replaced, bn=nn.BatchNorm1d(3), linear=nn.Linear(3, 3)).double(), devices)
    plain.kept = [plain.linear.weight, plain.linear.bias]
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(5, 3, devices=devices))


class Noting(nn.Linear):
    """Keeps the weights that are assigned to it in a list, as recurrent layers do."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        object.__setattr__(self, "noted", {})
        self.in_features = self.out_features = 3
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            object.__setattr__(self, "noted", self.noted | {name: value})
        super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        assert set(self.noted) == {"weight", "bias"}
        assert all(self.noted[name] is parameter for name, parameter in self.named_parameters())
        return input @ self.noted["weight"] + self.bias


@on_devices
def test_what_a_class_keeps_besides_its_parameters_is_what_a_replica_has(devices):
    plain, parallel = twins(
        Net(lambda net, x: net.layer(net.bn(x)), bn=nn.BatchNorm1d(3), layer=Noting()).double(), devices
    )
    plain.layer.noted = dict(plain.layer.named_parameters())
    assert_same_step(plain, parallel, doubles(8, 3, devices=devices))
