"""Parameters of replicas: the gradient that each has, and what happens when they change or are converted."""

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import device_lists, slow, usual_kernels
from helpers import (
    Net,
    Numbered,
    as_devices,
    assert_equal,
    assert_same_gradient,
    assert_same_state,
    assert_same_step,
    doubles,
    run_parts,
    twins,
)
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, convert_model

# On distinct GPUs torch copies the parameters.
local = pytest.mark.parametrize("devices", [p for p in device_lists(2, 3) if not p.id.startswith("cuda-")])


class Case:
    """A model in replicas, with its batch, and the part of each replica of the gradients of weight and bias."""

    def __init__(self, devices: list[Any], look: Any = lambda bn, replica: None) -> None:
        net = Numbered(lambda net, input: (look(net.bn, net.number), net.bn(input))[1], bn=nn.BatchNorm1d(4))
        _, self.parallel = twins(net.double(), devices)
        self.layer, self.number = self.parallel.module.bn, len(devices)
        self.input = doubles(3 * self.number - 1, 4, devices=devices).requires_grad_()
        self.upstream = 5 * (self.input.detach() + doubles(*self.input.shape, devices=devices))
        normalized = F.batch_norm(self.input.detach(), None, None, training=True)
        parts = list(zip(normalized.chunk(self.number), self.upstream.chunk(self.number), strict=True))
        self.parts = {"weight": [(x * dy).sum(0) for x, dy in parts], "bias": [dy.sum(0) for _, dy in parts]}

    def check(self, found: dict[int, Any], name: str) -> None:
        assert sorted(found) == list(range(self.number))
        for i, part in enumerate(self.parts[name]):
            assert_equal(found[i].to(part.device), part, f"{name} of replica {i}")


@usual_kernels
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_hook_changes_the_part_of_its_replica(devices, name):
    seen = {}

    def clamp(replica, grad):
        seen[replica] = grad.clone()
        return grad.clamp(-1, 1)

    case = Case(devices, lambda bn, replica: getattr(bn, name).register_hook(partial(clamp, replica)))
    case.parallel(case.input).backward(case.upstream)
    case.check(seen, name)
    assert_equal(getattr(case.layer, name).grad, sum(part.clamp(-1, 1) for part in case.parts[name]))
    other = "bias" if name == "weight" else "weight"
    assert_equal(getattr(case.layer, other).grad, sum(case.parts[other]))


@usual_kernels
def test_gradients_by_the_parameters_of_replicas_are_their_parts(devices):
    kept = {}
    case = Case(devices, lambda bn, replica: kept.update({replica: bn}))
    output = case.parallel(case.input)
    for name in ("weight", "bias"):
        ours = [getattr(kept[i], name) for i in range(case.number)]
        grads = torch.autograd.grad(output, ours, case.upstream, retain_graph=True)
        case.check(dict(enumerate(grads)), name)
        (last,) = torch.autograd.grad(output, ours[-1:], case.upstream, retain_graph=True)
        assert_equal(last.to(output.device), case.parts[name][-1])
    assert case.layer.weight.grad is None


@usual_kernels
def test_hooks_that_come_after_the_forward_see_the_parts(devices):
    kept, tensors, nodes = {}, {}, {}
    case = Case(devices, lambda bn, replica: kept.update({replica: bn.weight}))
    output = case.parallel(case.input)
    for i, weight in kept.items():
        weight.register_hook(partial(tensors.__setitem__, i))
    if len({weight.grad_fn for weight in kept.values()}) == case.number:  # On distinct GPUs torch has one for all.
        for i, weight in kept.items():
            weight.grad_fn.register_prehook(lambda grads, i=i: nodes.__setitem__(i, grads[0]))
        output.backward(case.upstream)
        case.check(nodes, "weight")
    else:
        output.backward(case.upstream)
    case.check(tensors, "weight")


@usual_kernels
@pytest.mark.parametrize(("name", "frozen"), [("weight", "bias"), ("bias", "weight")])
def test_part_of_a_replica_without_a_part_in_the_loss_is_zero(devices, name, frozen):
    seen = {}
    case = Case(devices, lambda bn, replica: getattr(bn, name).register_hook(partial(seen.__setitem__, replica)))
    getattr(case.layer, frozen).requires_grad_(False)
    outputs = run_parts(case.parallel, case.input.chunk(case.number))
    outputs[1].backward(case.upstream.chunk(case.number)[1].to(outputs[1].device))
    assert_equal(seen.pop(1).to(case.input.device), case.parts[name][1])
    assert [int(grad.count_nonzero()) for grad in seen.values()] == [0] * (case.number - 1)
    assert_equal(getattr(case.layer, name).grad, case.parts[name][1])


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@local
def test_parameters_that_change_between_forward_and_backward_are_refused(devices, frozen):
    net = Net(lambda net, input: input * net.weight, weight=nn.Parameter(torch.rand(4)))
    for model in twins(net.requires_grad_(not frozen), devices):
        output = model(torch.randn(6, 4, device=as_devices(devices)[0], requires_grad=True))
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward(torch.randn_like(output))


@pytest.mark.parametrize("trained", [False, True])
def test_sparse_parameters_are_shared_by_replicas_on_the_cpu(trained):
    def sparse() -> nn.Module:
        graph = nn.Parameter(torch.eye(4, dtype=torch.float64).to_sparse(), requires_grad=trained)
        normalize = lambda net, input: net.bn(torch.sparse.mm(net.graph, input.t()).t())  # noqa: E731
        return Net(normalize, graph=graph, bn=nn.BatchNorm1d(4)).double()

    plain, parallel = sparse(), DataParallelWithCallback(convert_model(sparse()), ["cpu"] * 2)
    input, grad = doubles(6, 4), doubles(6, 4)
    for model in (plain, parallel):
        model(input).backward(grad)
    assert_equal(parallel.module.bn.weight.grad, plain.bn.weight.grad)
    if trained:
        assert_equal(parallel.module.graph.grad.to_dense(), plain.graph.grad.to_dense())


@local
def test_embedding_that_shortens_its_rows_in_place_trains_as_on_one_device(devices):
    table = nn.EmbeddingBag(5, 4, max_norm=1.0, _weight=1 + torch.rand(5, 4))
    net = Net(lambda net, input: net.bn(net.embedding(input[:, None])), embedding=table, bn=nn.BatchNorm1d(4))
    plain, parallel = twins(net.double(), devices)
    input = torch.arange(2 * len(devices), device=as_devices(devices)[0]) % 5
    grad = doubles(len(input), 4, devices=devices)
    for training in (True, False, True):
        for model in (plain.train(training), parallel.train(training)):
            model.zero_grad()
            model(input).backward(grad)
        assert_same_state(parallel, plain)
        with torch.no_grad():
            assert_equal(parallel(input), plain(input))


def in_place(change: Any, is_late: bool, kind: str = "") -> Net:
    """Return a net that changes its weight in place, before or after a layer in which replicas wait for each other."""

    def forward(net: Numbered, input: Tensor) -> Tensor:
        output = net.bn(input) if is_late else input
        with torch.no_grad():
            if net.number == 0 or kind != "one replica":
                change(net.weight, input)
        output = output * net.weight
        return output if is_late else net.bn(output)

    return Numbered(forward, bn=SynchronizedBatchNorm1d(4), weight=nn.Parameter(2 * torch.ones(4)))


SLOPE = 0.1 * torch.arange(4.0)
IN_PLACE = {  # how replicas change a parameter, and the number of warnings
    "clamp": (lambda weight, input: weight.clamp_(-1, 1), 0),
    "equal values": (lambda weight, input: weight.copy_(torch.arange(4.0)), 0),
    "normalize": (lambda weight, _: weight.copy_(F.normalize(weight + (weight[0] == 2) * SLOPE.to(weight), dim=0)), 0),
    "NaN": (lambda weight, input: weight.fill_(torch.nan), 0),
    "count": (lambda weight, input: weight.add_(1), 1),
    "slow average": (lambda weight, input: weight.lerp_(input.mean(0), 1e-4), 1),
    "values of the chunk": (lambda weight, input: weight.copy_(input.mean(0)), 1),
    "values of the chunk, once": (lambda weight, input: weight[0] == 2 and weight.copy_(input.mean(0)), 0),
    "one replica": (lambda weight, input: weight.add_(1), 0),
}


def texts_of(net: Net, devices: Any, passes: int) -> list[str]:
    parallel = DataParallelWithCallback(net.to(as_devices(devices)[0]), devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            parallel(torch.randn(6, 4, device=as_devices(devices)[0]))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("passes", [2, *slow(6)])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", IN_PLACE)
@local
def test_change_of_a_parameter_is_named_once_if_to_repeat_it_changes_it_again(devices, kind, is_late, passes):
    change, number = IN_PLACE[kind]
    texts = texts_of(in_place(change, is_late, kind), devices, passes)
    text = f"forward() modified parameters ['weight'] in place; each of the {len(devices)} replicas"
    assert [found.startswith(text) for found in texts] == [True] * number


@pytest.mark.parametrize("due", [(6, 7, 8), (1, 8)], ids=["begins later", "is rare"])
@local
def test_change_that_begins_later_or_is_rare_is_named_once(devices, due):
    def change(weight: Tensor, input: Tensor) -> None:
        calls.append(1)
        if -(-len(calls) // len(devices)) in due:
            weight.add_(1)

    calls: list[int] = []
    assert len(texts_of(in_place(change, True), devices, 8)) == 1


@torch.inference_mode()
def test_parameters_made_in_inference_mode_have_replicas(devices):
    plain, parallel = twins(nn.Linear(3, 2).double(), devices)
    input = doubles(6, 3, devices=devices)
    assert_equal(parallel(input), plain(input))


@pytest.mark.parametrize("grad", [True, False])
def test_attributes_of_parameters_and_buffers_are_those_of_their_replicas(devices, grad):
    """As marks of a tool: which parameters it has pruned, or trains at another rate."""

    def forward(net, input):
        found = [getattr(tensor, "mark", None) for tensor in (net.fc.weight, net.fc.bias, net.scale)]
        seen.append(found)
        assert net.fc.bias._no_decay
        return net.fc(net.bn(input)) * net.scale

    seen: list[Any] = []
    net = Net(forward, bn=nn.BatchNorm1d(3), fc=nn.Linear(3, 3)).double().to(as_devices(devices)[0])
    net.register_buffer("scale", doubles(3, devices=devices))
    net.fc.weight.mark, net.scale.mark = mark, other = [1], {"two": 2}
    net.fc.bias._no_decay = True
    with torch.set_grad_enabled(grad):
        DataParallelWithCallback(convert_model(net), devices)(doubles(7, 3, devices=devices))
    assert seen == [[mark, None, other]] * len(devices)
    assert all(found[0] is mark and found[2] is other for found in seen)


# The layers of a recurrent net keep their weights in a list besides. Simulated GPUs lack the kernels of an LSTM.
LAYERS = {
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
    other, (data, upstream) = copy.deepcopy(plain).double(), doubles(2, 7, 3, devices=devices)
    for model in (other, parallel):
        model.zero_grad()
        model(data).backward(upstream)
    for expected, actual in zip(other.parameters(), parallel.parameters(), strict=True):
        assert_equal(actual.grad, expected.grad.float())


SET = {
    "weight": lambda net: net.linear.weight.sum(0),
    "bias": lambda net: net.linear.bias * 2,
    "running_mean": lambda net: net.linear.weight.detach().sum(1),
}


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("way", ["dictionary", "deleted"])
@pytest.mark.parametrize("training", [True, *slow(False)])
def test_tensor_that_forward_puts_into_the_dictionary_of_a_layer_is_used(devices, training, way, name):
    def forward(net, input):
        if way == "deleted":
            delattr(net.bn, name)
        vars(net.bn)[name] = SET[name](net)
        return net.bn(input)

    module = Net(forward, bn=nn.BatchNorm1d(3), linear=nn.Linear(3, 3)).double().train(training)
    _, parallel = twins(module, devices)
    for _ in range(2):  # One device keeps what it is given, and a model without the parameter has no gradient of it.
        parallel.zero_grad()
        plain, (data, upstream) = copy.deepcopy(parallel.module), doubles(2, 7, 3, devices=devices)
        expected, actual = plain(data), parallel(data)
        assert_equal(actual, expected)
        expected.backward(upstream)
        actual.backward(upstream)
        for path, parameter in plain.named_parameters():
            assert_same_gradient(parallel.module.get_parameter(path).grad, parameter.grad, path)
        for path, buffer in plain.named_buffers():
            assert_equal(parallel.module.get_buffer(path), buffer, path)


class Own(nn.Linear):
    refuses = False

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

    _, parallel = twins(Net(forward, layer=Own(3, 3)).double(), devices)
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
        norm, linear = COPIES[way](net.norm), COPIES[way](net.linear)
        assert norm.to("meta").running_mean.is_meta
        assert linear.half().weight.dtype == torch.float16
        assert net.norm.to("meta").running_mean.device == input.device
        assert net.linear.weight.dtype == torch.float64
        return net.linear(net.norm(input))

    net = Net(lambda net, x: net.linear(net.norm(x)), norm=nn.BatchNorm1d(3, affine=False), linear=nn.Linear(3, 3))
    plain, parallel = twins(net.double(), devices)
    parallel.module.function = forward
    data = doubles(4, 3, devices=devices)
    with torch.no_grad():  # Torch copies no parameters that are in a graph.
        assert_equal(parallel(data), plain(data))
