"""`assert_matches_one_device` names each planted cause, and speaks of nothing else."""

from __future__ import annotations

import copy
import math
import random
import re
from contextlib import suppress
from functools import reduce

import numpy
import pytest
import torch
import torch.nn.functional as F
from checked import IMAGES, LABELS, VECTORS, Apply, bind, hide, quietly, wrapped
from helpers import Net
from torch import nn

from sync_batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    assert_matches_one_device,
    convert_model,
)


class MyNorm(nn.BatchNorm2d):
    def forward(self, input):
        return F.batch_norm(input, None, None, self.weight, self.bias, True)


class NeverSynchronized(MyNorm, SynchronizedBatchNorm2d):
    pass


class Scaled(nn.BatchNorm2d):
    def forward(self, input):
        return F.dropout(super().forward(input) * input.mean())


class SynchronizedScaled(Scaled, SynchronizedBatchNorm2d):
    pass


class Once(nn.BatchNorm2d):
    calls = 0

    def forward(self, input):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("is called again")
        return super().forward(input) * input.mean()


class SynchronizedOnce(Once, SynchronizedBatchNorm2d):
    pass


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / len(grad)


class NormInBackward(MeanInBackward):
    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


def norm_backward(self, x):
    return NormInBackward.apply(x)


class SumInBackward(MeanInBackward):
    @staticmethod
    def backward(ctx, grad):
        return grad * len(grad)


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
    self.queue = torch.cat((x.detach(), self.queue))[:6]
    return x * 1


def drop_gradient(self, x):
    hidden = self.parts[0](x)
    return self.parts[1](hidden if len(x) == 4 else hidden.detach())


def drop_gradient_beside_zero(self, x):
    hidden = self.parts[0](x)
    return (hidden if len(x) == 4 else hidden.detach()) + 0 * self.parts[1](x)


def loss_with_state(change):
    """Return a loss that changes by this much, relative to the first, at each call."""
    calls = []

    def loss(output):
        calls.append(0)
        return output.sum() * (1 + change * (len(calls) - 1))

    return loss


def behind(scale, *branch):
    """Return a residual block whose branch has a last scale."""

    def forward(self, x):
        return x + self.scale * self.branch(x)

    return Net(forward, branch=nn.Sequential(*branch), scale=nn.Parameter(torch.full((1,), scale)))


def normalize(self, x):
    return F.batch_norm(x, None, None, training=True)


def change_parameter(self, x):
    with torch.no_grad():
        self.threshold.mul_(0.5).add_(1.0)
    return x * 1


def change_and_use_parameter(self, x):
    self.threshold.data.add_(1.0)
    return x * self.threshold


def labelled(**options):
    """Return a model that computes its loss."""
    return Apply(lambda self, x, labels: F.cross_entropy(self.parts[0](x), labels, **options), nn.Linear(3, 3))


def dice(self, x):
    y = self.parts[0](x).sigmoid()
    return y, 1 - 2 * (y * (x[:, :2] > 0)).sum() / (y.sum() + (x[:, :2] > 0).sum())


def mix(self, x):
    return x - x.mean(0)


def keep_whole(self, x):
    if len(x) == len(VECTORS):
        self.register_buffer("late", x[0].clone())
    return x * 1


def with_centering_hook(module):
    module.register_forward_pre_hook(lambda _, args: args[0] - args[0].mean(0))
    return module


def beside_others_not_finite(self, x):
    return torch.stack([torch.full_like(x, number) for number in (math.nan, math.inf, -math.inf, len(x) / 8)], 1)


def larger_gradient(x):
    return x + 0.5 * (x - x.detach())


def once(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 1:
        raise RuntimeError("is called again")
    return mix(self, x)


def scale_in_replica(self, x):
    return self.parts[0](x) * (2 if hasattr(self, "_is_replica") else 3)


def count_and_mix(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return mix(self, x) * self.calls


@torch.no_grad()
def add_without_graph(self, x):
    return x + 1


def mix_and_call_itself(self, x):
    return x * 1 if x.shape[1] == 1 else mix(self, x) + self(x[:, :1])


class Stop(BaseException):
    pass


def stop(self, x):
    raise Stop


def refuse(self, x):
    raise StopAsyncIteration


def stop_and_branch(self, x):
    with suppress(StopAsyncIteration):
        self.parts[0](x)
    return x * 2 if len(x) > 2 else x


def stop_and_mix(self, x):
    with suppress(Stop):
        self.parts[0](x)
    return mix(self, self.parts[1](x))


def with_backward_hook(module):
    module.register_full_backward_hook(lambda *_: None)
    return module


def hooked(module):
    module.register_forward_hook(lambda module, args, output: output - output.mean(0))
    return module


def with_forward(module, forward):
    module.forward = forward
    return module


class Rms(nn.BatchNorm1d):
    def forward(self, x):
        return self.weight * x / x.square().mean(0).add(self.eps).sqrt()


class SynchronizedRms(Rms, SynchronizedBatchNorm1d):
    def forward(self, x):
        return SynchronizedBatchNorm1d.forward(self, x)


def change_in_inference_mode(self, x):
    with torch.inference_mode():
        y = x * 1
        first = self.parts[0](y)
        y.add_(y.mean(0))
        return first + self.parts[1](y)


class DropRows(nn.Module):
    """Drops rows by a number `p`, and mixes them by another one, which is none of dropout."""

    def __init__(self):
        super().__init__()
        self.p, self.mixed = 0.5, 1.0

    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x[:, :1], 1 - self.p)) + self.mixed * x.mean(0)


class DropPath(Net):
    pass


class Linear(nn.Linear):
    def forward(self, x):
        return mix(self, super().forward(x))


class BatchNorm1d(nn.BatchNorm1d):
    def forward(self, x):
        return normalize(self, x)


MIXES = ": what it returns for a sample depends on other samples of the batch, as with x.mean(0), x.std(), x[0] or pad"


SIZE = ": what it returns for a sample depends on the number of samples, as with x / len(x) or a branch on len(x)"


NO_MEAN = (
    "none of these is that of one device; compute it from the gathered output, or, if it divides sums over the "
    "samples, return these sums from the replicas, and divide outside, see"
)


GRADIENT = (
    "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that of parts.0"
)


STATE = "only what replica 0 writes into it in place stays, and that is from its own chunk; update it outside the"


ASSIGNED = "forward() assigns another tensor to it, which ends with the replica; update it outside the forward pass, or"


FAILS = "runs on one device, but not in replicas: "


PLANTED = {  # how to build the model, its input, what the message is, options
    "norm of a ResNet-18": (
        *(resnet_with_own_norm, torch.randn(4, 3, 32, 32)),
        "first difference: output of layer2.0.bn2 (MyNorm), in replica 0, by ...e-0... of its largest value: a batch "
        "norm that convert_model leaves as it is, because it has a forward of its own; write class SynchronizedMyNorm",
    ),
    "not converted": (
        *(lambda: nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), wrapped(nn.BatchNorm2d(4)))), IMAGES),
        "output of 1.module (BatchNorm2d), in ...: a batch norm that is not synchronized; call convert_model(model)",
    ),
    "group": (
        *(lambda: convert_model(nn.BatchNorm2d(3), group_size=2), IMAGES[:4]),
        "(SynchronizedBatchNorm2d), in replica 0, ...: with its group_size of 2, groups of so many of the 4 "
        "replicas normalize separately; set it to None, unless that is meant",
        {"replicas": 4},
    ),
    "class that never synchronizes": (
        *(lambda: convert_model(nn.Sequential(MyNorm(3)), classes={MyNorm: NeverSynchronized}), IMAGES),
        "output of 0 (NeverSynchronized), in replica 0, ...: its forward never calls that of SynchronizedBatchNorm2d, "
        "so each replica normalizes with its own chunk; call SynchronizedBatchNorm2d.forward(self, input) in place of",
    ),
    "class with another formula": (
        *(lambda: convert_model(nn.Sequential(Rms(3)), classes={Rms: SynchronizedRms}), VECTORS),
        "output of 0 (SynchronizedRms), in replica 0, ...: SynchronizedRms computes something else than Rms, which it "
        "replaces, on one device, too. For another formula than that of F.batch_norm, use sync_moments, see",
    ),
    "class that synchronizes and mixes": (
        *(lambda: convert_model(nn.Sequential(Scaled(3)), classes={Scaled: SynchronizedScaled}), IMAGES),
        f"output of 0 (SynchronizedScaled), in replica 0, ...{MIXES}",
    ),
    "class that cannot run again": (
        *(lambda: convert_model(nn.Sequential(Once(3)), classes={Once: SynchronizedOnce}), IMAGES),
        "output of 0 (SynchronizedOnce), in replica 0, by ... of its largest value, in its samples [0, 1, 2] of [0, "
        "1, 2]: 0.calls changed in this pass, and",
    ),
    "plain list": (
        *(lambda: Net(lambda self, x: self.hidden[0](x), hidden=[nn.BatchNorm1d(3)]), VECTORS),
        "it calls F.batch_norm, or a batch norm that is no submodule of it",
    ),
    "torch's random numbers": (
        *(lambda: around(lambda self, x: x + torch.rand_like(x)), IMAGES),
        "output of 2 (Apply), in replica ...: it draws random numbers, which differ in replicas",
    ),
    "of a compiled function": (
        *(lambda: nn.Sequential(nn.Flatten(), quietly(torch.jit.script, Drops())), IMAGES),
        "output of the model itself (Sequential), in replica 0, ...: it draws random numbers",
    ),
    "another number of outputs": (
        *(lambda: Apply(lambda self, x: (x, x) if len(x) == 2 else (x,)), VECTORS),
        "outputs have shapes [(4, 3)] on one device, [(4, 3), (4, 3)] in replicas; return a row for each sample",
    ),
    "another number of scalars": (
        *(lambda: Apply(lambda self, x: [x.mean()] * len(x)), VECTORS),
        "outputs have shapes [(), (), (), ()] on one device, [(2,), (2,)] in replicas; return a row for each sample",
    ),
    "another output that fits no other": (
        *(lambda: Apply(lambda self, x: (x, x[:, 0]) if len(x) == 2 else (x,)), VECTORS),
        "outputs have shapes [(4, 3)] on one device, [(4, 3), (4,)] in replicas; return a row for each sample",
    ),
    "Python's": (lambda: Apply(lambda self, x: x * 1e-8 * random.random()), VECTORS, "it draws random numbers"),
    "NumPy's": (lambda: Apply(lambda self, x: self.parts[0](x * numpy.random.rand()), nn.ReLU()), VECTORS, "it draws"),
    "mix": (lambda: around(lambda self, x: x - x.mean(0)), IMAGES, f"output of 2 (Apply), in replica 0, ...{MIXES}"),
    "mix beside dropout of one's own": (
        *(lambda: nn.Sequential(DropRows()), VECTORS),
        "output of 0 (DropRows), in replica 0, ...: it draws random numbers",
    ),
    "number among the outputs": (
        *(lambda: Apply(lambda self, x: {"x": x, "count": len(x)}), VECTORS),
        "output['count'] is 4 on one device, 2 in replicas: what is no tensor is that of replica 0; return",
    ),
    "gradient of an input": (
        *(
            lambda: Apply(lambda self, x: self.parts[0](MeanInBackward.apply(x)), nn.Linear(3, 3)),
            VECTORS.clone().requires_grad_(),
        ),
        "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that of input",
    ),
    "change in place in inference mode": (
        *(lambda: Apply(change_in_inference_mode, nn.Tanh(), nn.Tanh()), VECTORS),
        f"first difference: output of the model itself (Apply), in replica 0, ...{MIXES}",
    ),
    "number of samples": (
        *(lambda: around(lambda self, x: x * len(x)), IMAGES),
        f"output of 2 (Apply), in replica 0, ...{SIZE}",
    ),
    "number of samples beside dropout": (
        *(lambda: around(lambda self, x: F.dropout(x) * len(x)), IMAGES),
        "output of 2 (Apply), in replica 0, ...: what it returns for a sample depends on the number of samples, as",
    ),
    "number of samples of the second replica": (
        *(lambda: around(lambda self, x: x * (2 if len(x) == 2 else 1)), IMAGES),
        "output of 2 (Apply), in replica 1, ...: what it returns for a sample depends on the number of samples, as",
    ),
    "number of samples in rows of several": (
        lambda: Apply(lambda self, x: self.parts[0](x.flatten(0, 1)), Apply(lambda self, x: x * len(x))),
        *(
            IMAGES,
            "output of parts.0 (Apply), in replica 0, ...: what it returns for a sample depends on the number of",
        ),
    ),
    "place": (
        *(lambda: around(lambda self, x: x * torch.arange(len(x)).reshape(-1, 1, 1, 1)), IMAGES),
        "output of 2 (Apply), in replica 1, ...: what it returns for a sample depends on its place in the batch, as",
    ),
    "state": (
        *(lambda: around(lambda self, x: x * (2 if hasattr(self, "_is_replica") else 3)), IMAGES),
        "output of 2 (Apply), in replica 0, ...: it returns the same for these rows when it is called again on one",
    ),
    "state beside a norm": (
        *(lambda: convert_model(Apply(scale_in_replica, nn.BatchNorm1d(3))), VECTORS),
        "output of the model itself (Apply), in replica 0, by ... of its largest value, in its samples [0, 1] of [0, "
        "1]$",
    ),
    "state beside a norm in eval mode": (
        *(lambda: convert_model(Apply(scale_in_replica, nn.BatchNorm1d(3).eval())), VECTORS),
        "output of the model itself (Apply), in replica 0, ...: it returns the same for these rows when it is called",
    ),
    "argument that is no tensor": (
        lambda: Apply(
            lambda self, x: self.parts[0](x, len(x)),
            Apply(lambda self, x, number: x / number),
        ),
        *(
            VECTORS,
            f"output of the model itself (Apply), in replica 0, ...{SIZE}",
        ),
    ),
    "number of samples around a norm": (
        *(lambda: convert_model(Apply(lambda self, x: self.parts[0](x) * len(x), nn.BatchNorm1d(3))), VECTORS),
        "output of the model itself (Apply), in replica 0, ...: what it returns for a sample depends on the number of",
    ),
    "mix that cannot run twice": (
        *(lambda: Apply(once), VECTORS),
        f"output of the model itself (Apply), in replica 0, ...{MIXES}",
    ),
    "mix with a state": (
        *(lambda: Apply(count_and_mix), VECTORS),
        "output of the model itself (Apply), in replica 0, ...: what it returns for a sample depends on",
    ),
    "mix that calls itself": (
        *(lambda: nn.Sequential(Apply(mix_and_call_itself)), VECTORS),
        f"output of 0 (Apply), in replica 0, ...{MIXES}",
    ),
    "mix beside a call that was stopped": (
        *(lambda: Apply(stop_and_mix, nn.Sequential(nn.ReLU(), Apply(stop)), nn.ReLU()), VECTORS),
        f"output of the model itself (Apply), in replica 0, ...{MIXES}",
    ),
    "mix behind many others": (
        *(lambda: nn.Sequential(*[Apply(add_without_graph) for _ in range(20)], Apply(mix)), VECTORS),
        f"output of 20 (Apply), in replica 0, ...{MIXES}",
    ),
    "mix by a number that is none of dropout": (
        *(lambda: Net(lambda self, x: x + self.p * x.mean(0), p=0.5), VECTORS),
        f"output of the model itself (Net), in replica 0, ...{MIXES}",
    ),
    "mix behind a selection": (
        lambda: Apply(lambda self, x: mix(self, self.parts[0](x)[0]), Apply(lambda self, x: (x * 1, x[x > 0]))),
        *(VECTORS, f"output of the model itself (Apply), in replica 0, ...{MIXES}"),
    ),
    "mix of a list that is used up": (
        *(lambda: Apply(lambda self, x: self.parts[0]([x]), Apply(lambda self, xs: mix(self, xs.pop()))), VECTORS),
        f"output of parts.0 (Apply), in replica 0, ...{MIXES}",
    ),
    "forward hook": (
        lambda: nn.Sequential(hooked(nn.Linear(3, 3))),
        *(
            VECTORS,
            f"output of 0 (Linear), in replica 0, ...{MIXES}...; look at the forward hooks of",
        ),
    ),
    "mix with a backward hook": (
        *(lambda: nn.Sequential(with_backward_hook(Apply(mix))), VECTORS),
        f"output of 0 (Apply), in replica 0, ...{MIXES}ding to the longest sample$",
    ),
    "forward that was set": (
        lambda: nn.Sequential(with_forward(nn.Linear(3, 3), lambda x: x.flip(0))),
        *(
            VECTORS,
            f"(Linear), in replica 0, ...{MIXES}...; look at the forward that was set on the",
        ),
    ),
    "class with a name of torch's": (
        *(lambda: nn.Sequential(Linear(3, 3)), VECTORS),
        f"output of 0 ({__name__}.Linear), in replica 0, ...{MIXES}",
    ),
    "norm with a name of torch's": (
        *(lambda: nn.Sequential(BatchNorm1d(3)), VECTORS),
        f"because it has a forward of its own; write class MySynchronizedBatchNorm1d({__name__}.BatchNorm1d, "
        f"SynchronizedBatchNorm1d) and call convert_model(model, classes={{{__name__}.BatchNorm1d: MySynchronizedBatch",
    ),
    "branch": (
        *(lambda: around(lambda self, x: x * x.ndim if len(x) > 2 else x), IMAGES),
        f"output of 2 (Apply), in replica 1, ...{SIZE}",
    ),
    "calls that only replicas make": (
        *(lambda: Apply(lambda self, x: self.parts[0](x) if len(x) == 2 else x * 1, nn.Softmax(0)), VECTORS),
        f"itself (Apply), in replica 0, ...{SIZE}",
    ),
    "arguments that only replicas pass": (
        lambda: Apply(
            lambda self, x: self.parts[0](x, x if len(x) == 2 else None),
            Apply(lambda self, x, y: x * 1 if y is None else x * y),
        ),
        *(VECTORS, "output of the model itself (Apply), in replica 0"),
    ),
    "branch behind a call that was stopped": (
        *(lambda: nn.Sequential(Apply(stop_and_branch, Apply(refuse))), VECTORS),
        f"output of 0 (Apply), in replica 0, ...{SIZE}",
    ),
    "branch in place": (
        *(lambda: around(lambda self, x: x.clone().add_(1.0) if len(x) > 2 else x), IMAGES),
        f"output of 2 (Apply), in replica 1, ...{SIZE}",
    ),
    "calls": (
        *(lambda: Apply(lambda self, x: reduce(lambda y, _: self.parts[0](y), x, x), nn.Linear(3, 3)), VECTORS),
        f"the model itself (Apply), in replica 0, ...{SIZE}",
    ),
    "mix in place, with dropout": (
        lambda: nn.Sequential(
            *(nn.Linear(3, 3), nn.Dropout(), Apply(lambda self, x: x.sub_(x.mean(0)))),
            DropPath(lambda self, x: x * (1 - self.drop_prob), drop_prob=0.5),
        ),
        VECTORS,
        f"output of 2 (Apply), in replica 0, ...{MIXES}... (compared with dropout switched off: 3.drop_prob, dropout)",
    ),
    "second call": (
        lambda: Apply(
            lambda self, x: self.parts[0](self.parts[0](x), 1), Apply(lambda self, x, k=0: x + k * x.mean(0))
        ),
        *(VECTORS, "output of parts.0 (Apply, call 2), in replica 0"),
    ),
    "means that are added up": (
        *(lambda: Apply(lambda self, x: self.parts[0](x).square().mean(), nn.Linear(3, 2)), VECTORS),
        "the loss differs: replicas with [2, 2] rows return ...; their sum is ..., their mean is ...: the mean is that "
        'of one device; take their mean, see "In the replicas, with balanced memory" on the page "Where to compute the '
        'loss"$',
        {"loss": torch.sum},
    ),
    "sums that are averaged": (
        *(lambda: Apply(lambda self, x: (x, x.square().sum())), VECTORS),
        "the loss differs: as output[1], replicas ...: the sum is that of one device; add them up",
        {"loss": lambda output: output[1].mean()},
    ),
    "uneven means": (
        *(lambda: Apply(lambda self, x: x.square().mean()), IMAGES),
        "replicas with [3, 2] rows return ...: the mean weighted by rows is that of one device; weight them by",
    ),
    "one mean of several": (
        *(lambda: Apply(lambda self, x: x.square().mean()), VECTORS),
        "the loss differs: ...: the mean is that of one device; take their mean",
        {"loss": lambda losses: losses.reshape(-1)[0]},
    ),
    "sums without a loss": (
        *(lambda: Apply(lambda self, x: x.square().sum()), VECTORS),
        "the loss differs: ...: the sum is that of one device; add them up",
    ),
    "no mean over samples": (lambda: Apply(lambda self, x: x.std()), VECTORS, f"the loss differs: ...: {NO_MEAN}"),
    "class weights": (
        *(lambda: labelled(weight=torch.tensor([1.0, 3.0, 9.0])), VECTORS),
        *(f"the loss differs: ...: {NO_MEAN}", {"kwargs": {"labels": torch.tensor([0, 1, 2, 2])}}),
    ),
    "ignored labels": (
        *(lambda: labelled(ignore_index=9), VECTORS),
        *(f"the loss differs: ...: {NO_MEAN}", {"kwargs": {"labels": torch.tensor([0, 9, 2, 2])}}),
    ),
    "ignored labels of unequal chunks": (
        *(lambda: labelled(ignore_index=9), torch.randn(5, 3)),
        *(f"the loss differs: ...: {NO_MEAN}", {"kwargs": {"labels": torch.tensor([0, 1, 2, 9, 1])}}),
    ),
    "class weights that hardly matter": (
        *(lambda: labelled(weight=torch.tensor([1.0, 1.0, 1.00001])), torch.arange(12.0).reshape(4, 3).sin()),
        f"{GRADIENT}.bias: its norm in replicas is 1.0 times that on one device...; replicas with [2, 2] rows return",
        {"kwargs": {"labels": torch.tensor([0, 1, 2, 2])}},
    ),
    "nothing but ignored labels": (
        *(lambda: labelled(ignore_index=9), VECTORS),
        "the loss differs: replicas with [2, 2] rows return nan, ...; replica 0 returns nan; compute it from",
        {"kwargs": {"labels": torch.tensor([9, 9, 2, 2])}},
    ),
    "Dice": (
        *(lambda: Apply(dice, nn.Linear(3, 2)), VECTORS),
        f"the loss differs: as output[1], replicas ...: {NO_MEAN}",
        {"loss": lambda output: output[1].mean()},
    ),
    "norm in front of a loss": (
        *(lambda: nn.Sequential(nn.BatchNorm1d(3), Apply(lambda self, x: (x**3).mean())), VECTORS),
        "first difference: output of 0 (BatchNorm1d), in replica 0",
    ),
    "loss with a state": (
        lambda: Apply(hide, nn.Softmax(0)),
        *(VECTORS, "outputs agree, the loss does not: ... in replicas: `loss` depends on more than the output$"),
        {"loss": loss_with_state(1.0)},
    ),
    "loss that changes somewhat": (
        lambda: Apply(hide, nn.Softmax(0)),
        *(VECTORS, "in replicas: `loss` depends on more than the output$", {"loss": loss_with_state(0.012)}),
    ),
    "small loss that changes little": (
        lambda: Apply(lambda self, x: x * 1e-5),
        *(VECTORS, "in replicas: `loss` depends on more than the output$", {"loss": loss_with_state(0.001)}),
    ),
    "loss that changes little": (
        lambda: Apply(hide, nn.Softmax(0)),
        *(VECTORS, "in replicas: `loss` depends on more than the output$", {"loss": loss_with_state(0.001)}),
    ),
    "gradient that replicas drop": (
        *(lambda: Apply(drop_gradient, nn.Linear(3, 3), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}...: it is missing, or zero, in replicas, as after detach or no_grad, while that of parts.1..., "
        f"before "
        "it in the backward pass, agrees; look for",
        {"loss": lambda output: F.cross_entropy(output, LABELS)},
    ),
    "gradient of a script": (
        *(lambda: Apply(drop_gradient, quietly(torch.jit.script, nn.Linear(3, 3)), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}...: it is missing, or zero, in replicas",
        {"loss": lambda output: F.cross_entropy(output, LABELS)},
    ),
    "part of a gradient": (
        lambda: Apply(lambda self, x: self.parts[0](x).detach() if len(x) == 1 else self.parts[0](x), nn.Linear(3, 2)),
        *(
            VECTORS[:3],
            f"{GRADIENT}...: its norm in replicas is 0... times that on one device; look for",
        ),
    ),
    "gradient that only replicas have": (
        lambda: Apply(lambda self, x: self.parts[0](x).detach() if len(x) == 4 else self.parts[0](x), nn.Linear(3, 2)),
        *(
            VECTORS,
            f"{GRADIENT}...: only replicas have one; look for detach, no_grad, hooks on tensors",
        ),
    ),
    "gradient that replicas drop behind one of zero": (
        *(lambda: Apply(drop_gradient_beside_zero, nn.Linear(3, 2), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}...: it is missing, or zero, in replicas, as after detach or no_grad; look for",
    ),
    "gradient that is nothing but rounding on one device": (
        *(lambda: convert_model(nn.Sequential(nn.Linear(3, 3), Apply(norm_backward), nn.BatchNorm1d(3))), VECTORS),
        "that of 0.bias: only replicas have one, while that of 2.bias, before it",
    ),
    "gradient of a scalar": (
        *(lambda: Apply(lambda self, x: MeanInBackward.apply(self.parts[0](x)).mean(), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}...: its norm in replicas is 2.0 times",
    ),
    "gradient beside a loss that hardly changes": (
        *(lambda: Apply(lambda self, x: MeanInBackward.apply(self.parts[0](x)), nn.Linear(3, 2)), VECTORS),
        *(f"{GRADIENT}...: its norm in replicas is 2.0 times", {"loss": loss_with_state(1e-8)}),
    ),
    "mean in the backward pass": (
        *(lambda: Apply(lambda self, x: MeanInBackward.apply(self.parts[0](x)), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}...: its norm in replicas is 2.0 times that on one device; look for detach, no_grad, hooks on "
        f"tensors "
        "and a torch.autograd.Function$",
    ),
    "sum in the backward pass": (
        *(lambda: Apply(lambda self, x: SumInBackward.apply(self.parts[0](x)), nn.Linear(3, 2)), VECTORS),
        f"{GRADIENT}...: its norm in replicas is 0.5 times that on one device; look for",
    ),
    "other part of a gradient": (
        lambda: Apply(
            lambda self, x: larger_gradient(self.parts[0](x)) if len(x) < 4 else self.parts[0](x), nn.Linear(3, 3)
        ),
        *(
            VECTORS,
            f"{GRADIENT}...: its norm in replicas is 1.5 times that on one device; look for",
        ),
    ),
    "counter": (
        *(lambda: Apply(count, seen=0), VECTORS),
        f"outputs, loss and gradients agree; the buffer seen differs after the forward pass, by 5.0e-01 of ...{STATE}",
    ),
    "buffer that only the whole batch makes": (
        *(lambda: Apply(keep_whole), VECTORS),
        f"outputs, loss and gradients agree; the buffer late differs after the forward pass, ...: {STATE}",
    ),
    "one output for each sample": (
        lambda: nn.Sequential(Apply(lambda self, x: (x - x.mean(0)).unbind()), Apply(lambda self, x: torch.stack(x))),
        *(VECTORS, "first difference: output[1] of 0 (Apply), in replica 0"),
    ),
    "hook that changes the input": (
        *(lambda: nn.Sequential(nn.Linear(3, 3), with_centering_hook(nn.Identity())), VECTORS),
        "output of 1 (Identity), in replica 0",
    ),
    "queue": (
        lambda: Apply(enqueue, queue=[[0.0] * 3] * 6),
        VECTORS,
        f"agree; the buffer queue differs ...{ASSIGNED}",
    ),
    "attribute behind a buffer": (
        *(lambda: Apply(lambda self, x: count(self, bind("step", lambda step, _: step + 1)(self, x)), seen=0), VECTORS),
        f"outputs, loss and gradients agree; the buffer seen differs ...{STATE}",
    ),
    "mix behind a zero": (
        *(lambda: behind(0.0, nn.Linear(3, 3), Apply(mix)), VECTORS),
        f"first difference: output of branch.1 (Apply), in replica 0, ...{MIXES}ding to the longest sample$",
    ),
    "F.batch_norm behind a zero": (
        *(lambda: behind(0.0, Apply(normalize), nn.Linear(3, 3)), VECTORS),
        "output of branch.0 (Apply), in replica 0, ...: it calls F.batch_norm, or",
    ),
    "norm behind a zero": (
        *(lambda: behind(0.0, nn.Linear(3, 3), nn.BatchNorm1d(3)), VECTORS),
        "output of branch.1 (BatchNorm1d), in replica 0, ...: a batch norm that is not synchronized; call convert",
    ),
    "norm behind a small scale": (
        *(lambda: nn.Sequential(behind(1e-9, nn.BatchNorm1d(3)), nn.Linear(3, 1)), VECTORS - VECTORS.mean(0)),
        "output of 0.branch.0 (BatchNorm1d), in replica 0",
        {"loss": lambda output: (output - output.detach().mean()).mean() * 1e6},
    ),
    "buffer behind a zero": (
        lambda: nn.Sequential(behind(0.0, Apply(mix), convert_model(nn.BatchNorm1d(3)).requires_grad_(False))),
        *(VECTORS, "output of 0.branch.0 (Apply), in replica 0"),
    ),
    "parameter that is changed": (
        lambda: Net(change_parameter, threshold=nn.Parameter(torch.ones(()), requires_grad=False)),
        VECTORS,
        "outputs, loss and gradients agree; the parameter threshold differs after the forward pass, by 1.7e-01 of "
        "its largest value: forward() changes it, in each replica once; make it a buffer, which only replica 0 writes, "
        "or change it outside the forward pass",
    ),
    "parameter that is changed behind a mix": (
        lambda: nn.Sequential(Apply(mix), Net(change_and_use_parameter, threshold=nn.Parameter(torch.ones(())))),
        *(VECTORS, f"output of 0 (Apply), in replica 0, ...{MIXES}"),
    ),
    "parameter that is changed and used": (
        lambda: nn.Sequential(nn.ReLU(), Net(change_and_use_parameter, threshold=nn.Parameter(torch.ones(())))),
        VECTORS,
        "output of 1 (Net), in replica 1, ...: its forward() changes the parameter 1.threshold in "
        "place, and each replica once more, as all share its memory",
    ),
    "keys": (lambda: Apply(lambda self, x: {len(x): x}), IMAGES, f"{FAILS}ValueError: replica 0 returned"),
    "error": (lambda: Apply(lambda self, x: x.view(4, 3)), VECTORS, f"{FAILS}RuntimeError: "),
    "NaN": (lambda: Apply(lambda self, x: x if len(x) == 4 else x * math.nan), VECTORS, "the model itself (Apply), in"),
    "difference beside what is not finite": (
        *(lambda: Apply(beside_others_not_finite), VECTORS),
        "the model itself (Apply), in replica 0, by 5.0e-01 of its largest value: ",
    ),
    "NaN that one device has as well": (
        *(lambda: Apply(lambda self, x: x.mean()), torch.tensor([[math.nan], [1.0], [2.0], [3.0]])),
        "the loss differs: replicas with [2, 2] rows return nan, 2.5, one device returns nan; compute it from the ga",
        {"loss": lambda losses: losses.reshape(-1)[-1]},
    ),
    "complex numbers": (
        *(lambda: Apply(lambda self, x: torch.complex(x, x - x.mean(0))), VECTORS),
        f"output of the model itself (Apply), in replica 0, ...{MIXES}",
    ),
    "behind similarities": (
        *(lambda: nn.Sequential(Apply(lambda self, x: x @ x.T), Apply(lambda self, x: x.softmax(1)[:, :1])), VECTORS),
        f"output of 1 (Apply), in replica 0, ...{MIXES}",
    ),
    "copy": (lambda: Apply(lambda self, x: copy.deepcopy(self.parts[0])(x), nn.Linear(3, 3)), VECTORS, f"{FAILS}Runt"),
    "new": (
        lambda: Apply(lambda self, x: self.register_parameter("w", nn.Parameter(x[0])) or x),
        VECTORS,
        "parameter w is there",
    ),
    "list": (
        *(lambda: Apply(lambda self, x: list(self.parts[0](x)), nn.Linear(3, 2)), VECTORS),
        "outputs have shapes [(2,), (2,), (2,), (2,)] on one device, [(4,), (4,)] in replicas; return a row for each",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_cause_is_named(planted):
    build, input, message, *options = PLANTED[planted]
    model, text = build(), re.escape(message).replace(r"\.\.\.", ".*").replace(r"\$", "$")
    with torch.inference_mode(), torch.autocast("cpu"), pytest.raises(AssertionError, match=text):
        assert_matches_one_device(model, input, **dict(*options))


class Drops(nn.Module):
    def forward(self, x):
        return F.dropout(x)


@pytest.mark.parametrize(
    ("layers", "is_said"),
    [
        ([Apply(lambda self, x: x + torch.rand_like(x)), nn.Dropout()], False),
        ([Apply(mix)], False),
        ([Apply(mix), nn.Dropout()], True),
        ([Apply(mix), Apply(lambda self, x: self.parts[0](x)[0], nn.LSTM(3, 3, 2, dropout=0.5))], True),
        ([Apply(mix), Apply(lambda self, x: self.parts[0](x)[0], nn.LSTM(3, 3, 2))], False),
        ([Apply(mix), Apply(lambda self, x: F.dropout(x))], True),
        ([Apply(mix), Apply(lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0))], False),
        ([Apply(mix), Apply(lambda self, x: F.scaled_dot_product_attention(x, x, x, None, 0.0))], False),
        ([Apply(mix), Apply(lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))], True),
        ([Apply(mix), Apply(lambda self, x: F.scaled_dot_product_attention(x, x, x, None, 0.5))], True),
    ],
    ids=[
        "random numbers",
        "no dropout",
        "dropout",
        "of an LSTM",
        "none of an LSTM",
        "by a function",
        "none of attention",
        "none by position",
        "of attention",
        "of attention, by position",
    ],
)
def test_dropout_is_named_where_it_was_switched_off_and_is_not_the_cause(layers, is_said):
    with pytest.raises(AssertionError, match="output of 0") as caught:
        assert_matches_one_device(nn.Sequential(*layers), VECTORS)
    assert ("dropout" in str(caught.value)) == is_said, caught.value


class Counting(nn.Module):
    """Scales by a count what the next layer normalizes, so that outputs differ less than the check looks at."""

    def __init__(self):
        super().__init__()
        self.step, self.linear, self.norm = 0, nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, input):
        self.step += 1
        return self.norm(self.linear(input) * (1 + 1e-3 * self.step))


def test_loss_of_the_check_is_not_said_to_be_one_of_the_user():
    torch.manual_seed(2)
    with pytest.raises(AssertionError, match=r"outputs agree, the loss does not: .* in replicas; what forward"):
        assert_matches_one_device(wrapped(convert_model(Counting())), torch.randn(3, 4))
