"""Methods of modules that convert or clear parameters, called in the forward of replicas."""

import copy
import pickle

import pytest
import torch
from conftest import slow
from helpers import Net, as_devices, assert_equal, assert_same_gradient, assert_same_step, doubles, twins
from torch import nn

# The layers of a recurrent net keep their weights in a list besides. Simulated GPUs lack the kernels of an LSTM.
LAYERS = {
    "linear": lambda: nn.Linear(3, 3),
    "norm": lambda: nn.BatchNorm1d(3),
    "rnn": lambda: nn.RNN(3, 3, batch_first=True),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
}
MOVES = {
    "to the first device": lambda layer, device: layer.to(device),
    "to its own device": lambda layer, device: layer.to(next(layer.parameters()).device),
    "float64": lambda layer, device: layer.double(),
    "share_memory": lambda layer, device: layer.share_memory(),
    "memory format": lambda layer, device: layer.to(device, torch.float64, memory_format=torch.contiguous_format),
    "cuda": lambda layer, device: layer.cuda(0) if device.type == "cuda" else layer.cpu(),
    "meta": lambda layer, device: layer.to("meta"),
}


def run(layer, input):
    return layer(input[:, None])[0][:, 0] if isinstance(layer, nn.RNN) else layer(input)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_layer_of_a_replica_stays_on_its_device_and_says_nothing(devices, move, layer):
    def forward(net, input):
        parameters = dict(net.named_parameters())
        if vars(net).get("_is_replica"):
            assert move(net.layer, as_devices(devices)[0]) is net.layer
            assert {parameter.device for parameter in net.parameters()} == {input.device}
            assert {buffer.device for buffer in net.buffers()} == {input.device}
            assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
        return run(net.layer, net.bn(input))

    plain, parallel = twins(Net(forward, bn=nn.BatchNorm1d(3), layer=layer()).double(), devices)
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(7, 3, devices=devices))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
@pytest.mark.filterwarnings("ignore:unless each .* of Net set .*running_mean")  # as is the case for batch norms
def test_dtype_of_a_layer_changes_in_the_replica_alone(devices, layer):
    def forward(net, input):
        net.layer.double()
        return run(net.layer, input.double())

    plain, parallel = twins(Net(forward, layer=layer()), devices)
    assert parallel(doubles(7, 3, devices=devices).float()).dtype == torch.float64
    assert {parameter.dtype for parameter in parallel.module.parameters()} == {torch.float32}
    data, other = doubles(7, 3, devices=devices), copy.deepcopy(plain).double()
    for model in (other, parallel):
        model.zero_grad()
        model(data).square().sum().backward()
    for expected, actual in zip(other.parameters(), parallel.parameters(), strict=True):
        assert_equal(actual.grad, expected.grad.float())


def test_other_functions_act_on_the_parameters_of_the_replica():
    net = Net(lambda net, x: net.layer._apply(torch.neg)(x), layer=nn.Linear(3, 3)).double()
    (plain, parallel), data = twins(net, ["cpu"] * 2), doubles(4, 3)
    assert_equal(parallel(data), -plain.layer(data))


def test_copies_of_a_layer_of_a_replica_convert_themselves():
    def forward(net, input):
        kept = next(net.layer.parameters())
        for other in (copy.deepcopy(net.layer), pickle.loads(pickle.dumps(net.layer))):
            assert other.half() is other
            assert next(other.parameters()).dtype == torch.float16
        assert next(net.layer.parameters()) is kept
        return net.layer(input)

    _, parallel = twins(Net(forward, layer=nn.Linear(3, 3)).double(), ["cpu"] * 2)
    with torch.no_grad():  # Torch copies no parameters that are in a graph.
        assert parallel(doubles(4, 3)).shape == (4, 3)


SET = {
    "weight": lambda net: net.linear.weight.sum(0),
    "bias": lambda net: net.linear.bias * 2,
    "running_mean": lambda net: net.linear.weight.detach().sum(1),
}


@pytest.mark.parametrize("names", [["weight"], ["bias"], ["weight", "bias"], ["running_mean"]], ids="-".join)
@pytest.mark.parametrize("way", ["dictionary", "deleted"])
@pytest.mark.parametrize("training", [True, *slow(False)])
def test_tensor_that_forward_puts_into_the_dictionary_of_a_layer_is_used(devices, training, way, names):
    def forward(net, input):
        for name in names:
            if way == "deleted":
                delattr(net.bn, name)
            vars(net.bn)[name] = SET[name](net)
        return net.bn(input)

    module = Net(forward, bn=nn.BatchNorm1d(3), linear=nn.Linear(3, 3)).double().train(training)
    plain, parallel = twins(module, devices)
    pristine = copy.deepcopy(plain)
    for _ in range(2):  # One device keeps what it is given, and a model without the parameter has no gradient of it.
        plain, data = copy.deepcopy(pristine), doubles(7, 3, devices=devices)
        upstream = torch.randn_like(data)
        parallel.zero_grad()
        expected, actual = plain(data), parallel(data)
        assert_equal(actual, expected)
        expected.backward(upstream)
        actual.backward(upstream)
        for name, parameter in plain.named_parameters():
            assert_same_gradient(parallel.module.get_parameter(name).grad, parameter.grad, name)
        for name, buffer in plain.named_buffers():
            assert_equal(parallel.module.get_buffer(name), buffer, name)
        pristine.load_state_dict(parallel.module.state_dict())


class Own(nn.Linear):
    """Has a conversion of its own, which sees its parameters."""

    def _apply(self, fn, recurse=True):
        self.seen = len(list(self.parameters()))
        return self if self.refuses else super()._apply(fn, recurse)


@pytest.mark.parametrize("refuses", [True, False])
def test_conversion_of_a_class_is_asked_first(devices, refuses):
    def forward(net, input):
        net.layer.float()
        assert net.layer.seen == 2
        assert net.layer.weight.dtype == (torch.float64 if refuses else torch.float32)
        return net.layer(input.to(net.layer.weight.dtype))

    layer = Own(3, 3)
    layer.refuses = False
    _, parallel = twins(Net(forward, layer=layer).double(), devices)
    parallel.module.layer.refuses = refuses
    assert parallel(doubles(6, 3, devices=devices)).shape == (6, 3)


def test_clones_of_a_layer_of_a_replica_are_what_is_converted():
    """As clones of meta learning make them: with a copy of the dictionary, and other parameters."""

    def forward(net, input):
        clone = net.layer.__new__(type(net.layer))
        clone.__dict__ = {**vars(net.layer), "_parameters": {}}
        for name, parameter in net.layer._parameters.items():
            clone._parameters[name] = parameter * 2
        assert clone._apply(lambda tensor: tensor + 1) is clone
        shallow = copy.copy(net.layer)
        assert shallow.to(input.device) is shallow
        return clone(input)

    plain, parallel = twins(Net(forward, layer=nn.Linear(3, 3)).double(), ["cpu"] * 2)
    data = doubles(4, 3)
    weight, bias = (2 * parameter + 1 for parameter in (plain.layer.weight, plain.layer.bias))
    assert_equal(parallel(data), data @ weight.t() + bias)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda layer: pickle.loads(pickle.dumps(layer))}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_layer_of_a_replica_belong_to_no_replica(devices, way):
    def forward(net, input):
        copied = COPIES[way](net.norm)
        assert copied.to("meta") is copied
        assert copied.running_mean.is_meta
        assert net.norm.to("meta").running_mean.device == input.device
        return net.norm(input)

    norm = nn.BatchNorm1d(3, affine=False)
    plain, parallel = twins(Net(lambda net, input: net.norm(input), norm=norm).double(), devices)
    parallel.module.function = forward
    data = doubles(4, 3, devices=devices)
    assert_equal(parallel(data), plain(data))
