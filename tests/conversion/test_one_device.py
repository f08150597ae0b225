"""`assert_matches_one_device` passes where replicas are right, and names each planted cause where they are not."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import reduce

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import Net, anatomy
from torch import nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, assert_matches_one_device, convert_model

IMAGES, VECTORS, LABELS = torch.randn(5, 3, 6, 6), torch.randn(4, 3), torch.tensor([0, 1, 0, 1])


class Apply(Net):
    def __init__(self, function, *modules, **buffers):
        buffers = {name: nn.Buffer(torch.tensor(value)) for name, value in buffers.items()}
        super().__init__(function, parts=nn.ModuleList(modules), **buffers)


class MyNorm(nn.BatchNorm2d):
    def forward(self, input):
        return F.batch_norm(input, None, None, self.weight, self.bias, True)


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / len(grad)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise NotImplementedError("one of a kind")


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def around(function):
    """Put a module between others that are right."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Apply(function), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)]
    return convert_model(nn.Sequential(*layers))


def resnet_with_own_norm():
    pytest.importorskip("zoo")  # which needs torchvision
    import torchvision

    model = torchvision.models.resnet18(num_classes=3)
    model.layer2[0].bn2 = MyNorm(128)
    return quietly(convert_model, model)


def count(self, x):
    self.seen += len(x)
    return x


def enqueue(self, x):
    self.queue = torch.cat((x.detach(), self.queue))[:4]
    return x * 1


def drop_gradient(self, x):
    hidden = self.parts[0](x)
    return self.parts[1](hidden if len(x) == 4 else hidden.detach())


def loss_with_state(output, calls=[]):  # noqa: B006
    calls.append(0)
    return output.sum() * len(calls)


def hide(self, x):
    return x + 0 * self.parts[0](x)


MIXES = ": it mixes samples, as x.mean(0) does, or depends on the size of the batch or a sample's place in it"
SIZE = "; look for a branch, a loop or a cache that depends on the batch or its size"
GRADIENT = (
    "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that of parts.0"
)
STATE = (
    " differs after the forward pass, by ... of its largest value: only what replica 0 writes into it stays, which is "
)
FAILS = "runs on one device, but not in replicas: "
PLANTED = {  # how to build the model, its input, what the message is, options
    "norm of a ResNet-18": (
        *(resnet_with_own_norm, torch.randn(4, 3, 32, 32)),
        "first difference: output of layer2.0.bn2 (MyNorm), in replica 0, by ...e-0... of its largest value: a batch "
        "norm that convert_model has left alone, because it has a forward of its own; write class SynchronizedMyNorm",
    ),
    "not converted": (
        *(lambda: nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), wrapped(nn.BatchNorm2d(4)))), IMAGES),
        "output of 1.module (BatchNorm2d), in ...: a batch norm that is not synchronized; call convert_model(model)",
    ),
    "group": (
        *(lambda: convert_model(nn.BatchNorm2d(3), group_size=2), IMAGES[:4]),
        *("(SynchronizedBatchNorm2d), in replica 0, ...: group_size=2", {"replicas": 4}),
    ),
    "clamp": (lambda: convert_model(nn.BatchNorm2d(3), eps_mode="clamp"), IMAGES, "eps_mode='clamp' make it differ"),
    "plain list": (
        *(lambda: Net(lambda self, x: self.hidden[0](x), hidden=[nn.BatchNorm1d(3)]), VECTORS),
        "it calls F.batch_norm, or a batch norm that is no submodule of it",
    ),
    "torch's random numbers": (
        *(lambda: around(lambda self, x: x + torch.rand_like(x)), IMAGES),
        "output of 2 (Apply), in replica ...: it draws random numbers, which differ in replicas",
    ),
    "Python's": (lambda: Apply(lambda self, x: x * 1e-8 * random.random()), VECTORS, "it draws random numbers"),
    "NumPy's": (lambda: Apply(lambda self, x: self.parts[0](x * numpy.random.rand()), nn.ReLU()), VECTORS, "it draws"),
    "mix": (lambda: around(lambda self, x: x - x.mean(0)), IMAGES, f"output of 2 (Apply), in replica 0, ...{MIXES}"),
    "branch": (
        *(lambda: around(lambda self, x: x * x.ndim if len(x) > 2 else x), IMAGES),
        f"output of 2 (Apply), in replica 1, ...: it calls mul 1 times on one device, 0 times there{SIZE}",
    ),
    "calls": (
        *(lambda: Apply(lambda self, x: reduce(lambda y, _: self.parts[0](y), x, x), nn.Linear(3, 3)), VECTORS),
        f"the model itself (Apply), in replica 0, ...: it calls parts.0 4 times on one device, 2 times there{SIZE}",
    ),
    "mix in place, with dropout": (
        lambda: nn.Sequential(
            *(nn.Linear(3, 3), nn.Dropout(), Apply(lambda self, x: x.sub_(x.mean(0)))),
            Net(lambda self, x: x * (1 - self.dropout), dropout=0.5),
        ),
        VECTORS,
        f"output of 2 (Apply), in replica 0, ...{MIXES} (dropout is switched off in both copies)",
    ),
    "second call": (
        lambda: Apply(
            lambda self, x: self.parts[0](self.parts[0](x), 1), Apply(lambda self, x, k=0: x + k * x.mean(0))
        ),
        *(VECTORS, "output of parts.0 (Apply, call 2), in replica 0"),
    ),
    "means that are added up": (
        *(lambda: Apply(lambda self, x: self.parts[0](x).square().mean(), nn.Linear(3, 2)), VECTORS),
        "the loss differs: ... on one device, ... in replicas (ratio 2.0): each replica returns a mean, and `loss` "
        "adds them up; take their mean",
        {"loss": torch.sum},
    ),
    "sums that are averaged": (
        *(lambda: Apply(lambda self, x: (x, x.square().sum())), VECTORS),
        "outputs agree, the loss does not: ... on one device, ... in replicas (ratio 0.5): each replica returns a sum, "
        "and `loss` takes their mean; add them up",
        {"loss": lambda output: output[1].mean()},
    ),
    "uneven means": (
        *(lambda: Apply(lambda self, x: x.square().mean()), IMAGES),
        "each replica returns a mean over its own chunk, of [3, 2] rows; weight them by these",
    ),
    "no mean over samples": (lambda: Apply(lambda self, x: x.std()), VECTORS, "something else than a mean"),
    "norm in front of a loss": (
        *(lambda: nn.Sequential(nn.BatchNorm1d(3), Apply(lambda self, x: (x**3).mean())), VECTORS),
        "first difference: output of 0 (BatchNorm1d), in replica 0",
    ),
    "loss with a state": (
        lambda: Apply(hide, nn.Softmax(0)),
        *(VECTORS, "outputs agree, the loss does not: ...: `loss` depends on more than", {"loss": loss_with_state}),
    ),
    "gradient that replicas drop": (
        *(lambda: Apply(drop_gradient, nn.Linear(3, 3), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}... (ratio of norms 0.0): only replicas drop it; look for detach, no_grad or a branch on the size",
        {"loss": lambda output: F.cross_entropy(output, LABELS)},
    ),
    "part of a gradient": (
        lambda: Apply(lambda self, x: self.parts[0](x).detach() if len(x) == 1 else self.parts[0](x), nn.Linear(3, 2)),
        *(VECTORS[:3], f"{GRADIENT}...: they drop a part of it, or add up what should be a mean; look for detach"),
    ),
    "mean in the backward pass": (
        *(lambda: Apply(lambda self, x: MeanInBackward.apply(self.parts[0](x)), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}... (ratio of norms 2.0): they drop a part of it, or add up what should be a mean; look for",
    ),
    "counter": (
        *(lambda: Apply(count, seen=0), VECTORS),
        f"outputs, loss and gradients agree; seen{STATE.replace('...', '5.0e-01')}from its own chunk",
    ),
    "queue": (lambda: Apply(enqueue, queue=[[0.0] * 3]), VECTORS, f"gradients agree; queue{STATE}from its own chunk"),
    "keys": (lambda: Apply(lambda self, x: {len(x): x}), IMAGES, f"{FAILS}ValueError: replica 0 returned"),
    "error": (lambda: Apply(lambda self, x: x.view(4, 3)), VECTORS, f"{FAILS}RuntimeError: "),
    "NaN": (lambda: Apply(lambda self, x: x if len(x) == 4 else x * math.nan), VECTORS, "the model itself (Apply), in"),
    "behind similarities": (
        *(lambda: nn.Sequential(Apply(lambda self, x: x @ x.T), Apply(lambda self, x: x.softmax(1)[:, :1])), VECTORS),
        f"output of 1 (Apply), in replica 0, ...{MIXES}",
    ),
    "copy": (lambda: Apply(lambda self, x: copy.deepcopy(self.parts[0])(x), nn.Linear(3, 3)), VECTORS, f"{FAILS}Runt"),
    "new": (lambda: Apply(lambda self, x: self.register_parameter("w", nn.Parameter(x[0])) or x), VECTORS, f"w{STATE}"),
    "list": (
        *(lambda: Apply(lambda self, x: list(self.parts[0](x)), nn.Linear(3, 2)), VECTORS),
        "outputs have shapes [(2,), (2,), (2,), (2,)] on one device, [(4,), (4,)] in replicas; return a row for each",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_cause_is_named(planted):
    build, input, message, *options = PLANTED[planted]
    model, text = build(), re.escape(message).replace(r"\.\.\.", ".*")
    with torch.inference_mode(), torch.autocast("cpu"), pytest.raises(AssertionError, match=text):
        assert_matches_one_device(model, input, **dict(*options))


def drop(self, x):
    attention = self.parts[1](x[:, None], x[:, None], x[:, None])[0][:, 0]
    scores = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]
    sequence = self.parts[2](x[:, None].expand(-1, 3, -1))[0][:, 0]
    return F.dropout(self.parts[0](x)) + torch.dropout(attention, 0.5, True) * scores + sequence


def in_checkpoint(self, x):
    return checkpoint(lambda y: F.dropout(self.parts[1](self.parts[0](y))).exp(), x, use_reentrant=False)


def in_thread(self, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(self.parts[0], x).result()


def experts(self, x):
    """Route each row to one of two experts, which get other numbers of rows in replicas."""
    is_first = x[:, :1] > 0
    first, second = self.parts[0](x[is_first[:, 0]]), self.parts[1](x[~is_first[:, 0]])
    return torch.zeros_like(x).masked_scatter(is_first, first).masked_scatter(~is_first, second)


class Recurrent(nn.Module):
    """Has states and constants in float32, as people write them."""

    def __init__(self):
        super().__init__()
        self.lstm, self.scale = nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True), torch.ones(4, 4)
        self.dropout, self.device_ids, self.dim = nn.Dropout(), nn.Identity(), 1  # other things than ours

    def forward(self, input, lengths):
        states = torch.zeros(2, len(input), 4), torch.zeros(2, len(input), 4)
        output = self.lstm(input, states)[0].float() @ self.scale
        return {"all": output, "last": [output[torch.arange(len(input)), lengths - 1], None]}


class Siamese(nn.Module):
    """Calls a tower twice, once in a checkpoint; has parameters that are tied, frozen and unused."""

    def __init__(self):
        super().__init__()
        self.tower = convert_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)))
        self.head, self.tied, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.tied.weight, self.frozen = self.head.weight, nn.Linear(4, 4).requires_grad_(False)

    def forward(self, left, *, right):
        left, right = self.tower(left), checkpoint(self.tower, right, use_reentrant=False)
        return self.tied(self.head(left)) * self.frozen(right), left.argmax(1)


def wrapped(module, **options):
    return DataParallelWithCallback(module, ["cpu"] * 2, **options)


RIGHT = {
    "wrapper of torch": (lambda: nn.DataParallel(convert_model(nn.Sequential(nn.BatchNorm1d(3)))), VECTORS),
    "wrapper, another dim": (lambda: wrapped(nn.ReLU(), dim=1), torch.randn(1, 4), {"replicas": 4}),
    "no parameters": (nn.Flatten, IMAGES, {"replicas": 5}),
    "dropout": (
        lambda: Apply(
            *(drop, nn.Dropout(), nn.MultiheadAttention(3, 1, 0.5, batch_first=True), nn.LSTM(3, 3, 2, True, True, 0.5))
        ),
        VECTORS,
    ),
    "dropout in a checkpoint": (lambda: Apply(in_checkpoint, nn.Linear(3, 3), nn.Dropout()), VECTORS),
    "float32": (Recurrent, torch.randn(4, 5, 3), {"kwargs": {"lengths": torch.tensor([1, 5, 2, 3])}}),
    "float32 target": (lambda: nn.Linear(3, 3), VECTORS, {"loss": lambda output: F.mse_loss(output, VECTORS)}),
    "complex": (lambda: Apply(lambda self, x: torch.fft.rfft(x)), VECTORS),
    "siamese": (Siamese, VECTORS, {"kwargs": {"right": VECTORS.roll(1, 0)}}),
    "thread": (lambda: Apply(in_thread, nn.Linear(3, 3)), VECTORS.clone().requires_grad_()),
    "experts": (lambda: Apply(experts, nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(16, 3)),
    "script": (lambda: nn.Sequential(quietly(torch.jit.script, nn.Linear(3, 3)), nn.ReLU()), VECTORS),
    "weight norm": (lambda: quietly(nn.utils.weight_norm, nn.Linear(3, 3)), VECTORS),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), VECTORS),
    "means of replicas": (lambda: Apply(lambda self, x: hide(self, x).square().mean(), nn.Softmax(0)), VECTORS),
    "sums of replicas": (lambda: Apply(lambda self, x: x.square().sum()), VECTORS, {"loss": torch.sum}),
    "integers": (lambda: nn.Embedding(9, 3, sparse=True), torch.arange(8) % 5, {"replicas": 3}),
    "NaN": (lambda: Apply(lambda self, x: (x.log(), x * math.nan)), VECTORS),
    "zeros and None": (
        lambda: Apply(lambda self, x: x + 0 * self.parts[0](x) if len(x) > 2 else x, nn.Linear(3, 3)),
        VECTORS,
    ),
    "zeros": (lambda: Apply(lambda self, x: self.parts[0](x) * 0, nn.BatchNorm1d(3, 1e-5, 0.1, True, False)), VECTORS),
    "mask, in inference mode": (lambda: Apply(torch.inference_mode()(lambda self, x: x > 0)), VECTORS),
}


@pytest.mark.parametrize("right", RIGHT)
def test_a_model_that_is_right_passes(right):
    build, input, *options = RIGHT[right]
    assert assert_matches_one_device(build(), input, **dict(*options)) is None


@pytest.mark.parametrize("raised", [None, AssertionError, OSError, KeyboardInterrupt])
def test_nothing_is_left_behind(raised):
    def forward(self, x):
        self.seen.add_(1)
        random.random(), numpy.random.rand(), torch.rand(1)
        if raised in (OSError, KeyboardInterrupt):
            raise raised
        return x - x.mean(0) if raised else x * 1

    model = convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Apply(forward, nn.Dropout(), seen=0)))
    model[1].eval()
    model[0].weight.grad = torch.ones(3, 3)
    input = VECTORS.clone().requires_grad_()

    def everything():
        state = {name: (value.clone(), value.grad) for name, value in model.state_dict(keep_vars=True).items()}
        generators = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
        return repr((state, input, input.grad, generators, warnings.filters, torch.is_grad_enabled())), anatomy(model)

    before = everything()
    with torch.no_grad(), nullcontext() if raised is None else pytest.raises(raised):
        assert_matches_one_device(model, input)
    assert everything() == before


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (len, {}, TypeError, "expected a torch.nn.Module"),
        (nn.Linear(3, 3), {"replicas": "a"}, TypeError, "'str'"),
        (nn.Linear(3, 3), {"replicas": 0}, ValueError, "at least two chunks"),
        (nn.Linear(3, 3), {"replicas": 1}, ValueError, "two chunks, .* for replicas=1; pass a larger batch, or a larg"),
        (
            nn.Linear(3, 3),
            {"kwargs": {"input": 3.0}},
            TypeError,
            "tensors to cut into chunks, but got arguments of float",
        ),
        (nn.Linear(3, 3), {"kwargs": {}}, ValueError, r"two chunks, but got chunks of \[\] rows"),
        (nn.Linear(3, 3), {"loss": torch.Tensor.detach}, RuntimeError, "invalid for input of size 12"),
        (nn.Linear(3, 3), {"kwargs": {"input": torch.ones(0, 3)}}, ValueError, "at least two chunks"),
        (nn.Linear(3, 3), {"kwargs": {"input": torch.ones(1, 3)}}, ValueError, "at least two chunks"),
        (nn.Linear(3, 3), {"kwargs": {"input": VECTORS, "other": torch.ones(1)}}, ValueError, "make the same number"),
        (nn.Linear(3, 3), {"loss": 1.0}, TypeError, "callable"),
        (nn.Linear(3, 3), {"loss": lambda output: output}, RuntimeError, "only for scalar outputs"),
        (nn.LazyLinear(3), {}, RuntimeError, "LazyLinear cannot be copied.*LazyModule"),
        (Uncopied(3, 3), {}, RuntimeError, "Uncopied cannot be copied.*one of a kind"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        assert_matches_one_device(model, **{"kwargs": {"input": VECTORS}} | options)


def test_an_error_on_one_device_reaches_the_caller_with_a_note():
    only_float32 = Apply(lambda self, x: x if x.dtype == torch.float32 else float("only float32"))
    with pytest.raises(ValueError, match="only float32") as caught:
        assert_matches_one_device(only_float32, VECTORS)
    assert caught.value.__notes__ == ["This is from a copy of the model on one device: on the CPU, in float64."]


def test_an_error_on_one_device_that_refuses_attributes_reaches_the_caller_as_it_is():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    def fail(net, input):
        raise Frozen(3)

    with pytest.raises(Frozen) as caught:
        assert_matches_one_device(Apply(fail), VECTORS)
    assert caught.value.__notes__ == ["This is from a copy of the model on one device: on the CPU, in float64."]
