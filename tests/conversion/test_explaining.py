"""`assert_matches_one_device` names each planted cause, and speaks of nothing else."""

from __future__ import annotations

import copy
import math
import random
from contextlib import suppress

import numpy
import pytest
import torch
import torch.nn.functional as F
from checked import (
    IMAGES,
    LABELS,
    VECTORS,
    Apply,
    DropPath,
    MeanInBackward,
    assert_names,
    bind,
    hide,
    mix,
    quietly,
    with_hook,
    wrapped,
)
from helpers import Net
from torch import nn

from sync_batchnorm import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, assert_matches_one_device, convert_model


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


class NormInBackward(MeanInBackward):
    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


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


def add_gradient(self, grad_input, grad_output):
    self.seen += grad_output[0].abs().sum()


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
    """Return as an option a loss that changes by this much, relative to the first, at each call."""
    calls = []

    def loss(output):
        calls.append(0)
        return output.sum() * (1 + change * (len(calls) - 1))

    return {"loss": loss}


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


def keep_whole(self, x):
    if len(x) == len(VECTORS):
        self.register_buffer("late", x[0].clone())
    return x * 1


def beside_others_not_finite(self, x):
    return torch.stack([torch.full_like(x, number) for number in (math.nan, math.inf, -math.inf, len(x) / 8)], 1)


def larger_gradient(x):
    return x + 0.5 * (x - x.detach())


def scale_in_replica(self, x):
    return self.parts[0](x) * (2 if hasattr(self, "_is_replica") else 3)


def count_and_mix(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return mix(self, x) * self.calls


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


def with_forward(module, forward):
    module.forward = forward
    return module


class Rms(nn.BatchNorm1d):
    def forward(self, x):
        return self.weight * x / x.square().mean(0).add(self.eps).sqrt()


class SynchronizedRms(Rms, SynchronizedBatchNorm1d):
    def forward(self, x):
        return SynchronizedBatchNorm1d.forward(self, x)


class DropRows(nn.Module):
    """Drops rows by a number `p`, and mixes them by another one, which is none of dropout."""

    def __init__(self):
        super().__init__()
        self.p, self.mixed = 0.5, 1.0

    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x[:, :1], 1 - self.p)) + self.mixed * x.mean(0)


class Linear(nn.Linear):
    def forward(self, x):
        return mix(self, super().forward(x))


class BatchNorm1d(nn.BatchNorm1d):
    def forward(self, x):
        return normalize(self, x)


ITSELF = "the model itself (Apply)"
LINE = "it begins with `"
MEAN = "it begins with `x.mean(0)` ("
SIZE = "`..., which gets ... in place of "
WAY = "it goes another way: "
OTHERS = "what it returns for a sample depends on other samples of the batch"
RANDOM = "it draws random numbers, which differ in replicas"
NO_MEAN = (
    "no sum or mean of what replicas return is that of one device; compute it from the gathered output, or, if it "
    'divides sums, return these, and divide outside, see "In the replicas, with balanced memory"; or something before '
    "it mixes samples; replicas with [2, 2] rows return"
)
GRADIENT = (
    "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that of parts.0"
)
KEPT = "only what replica 0 writes into it in place stays, from its own chunk; update it outside the"
LOSS = "in replicas; `loss` depends on more than the output$"
LABELS_TO_IGNORE = {"kwargs": {"labels": torch.tensor([0, 9, 2, 2])}}
CROSS_ENTROPY = {"loss": lambda output: F.cross_entropy(output, LABELS)}

# What a module between others that are right does with images, the replica where they differ first, and the cause.
AROUND = {
    "a mean": (mix, 0, MEAN),
    "length": (lambda self, x: x * len(x), 0, SIZE),
    "beside dropout": (lambda self, x: F.dropout(x) * len(x), 0, SIZE),
    "of the second replica": (lambda self, x: x * (2 if len(x) == 2 else 1), 1, SIZE),
    "branch": (lambda self, x: x * x.ndim if len(x) > 2 else x, 1, f"{WAY}one device runs `x * x.ndim`"),
    "branch in place": (lambda self, x: x.clone().add_(1.0) if len(x) > 2 else x, 1, WAY),
    "arange": (lambda self, x: x * torch.arange(len(x)).reshape(-1, 1, 1, 1), 1, f"{LINE}torch.arange(len(x)){SIZE}5"),
    "attribute of replicas": (lambda self, x: x * (2 if hasattr(self, "_is_replica") else 3), 0, f"{SIZE}3"),
    "torch's random numbers": (lambda self, x: x + torch.rand_like(x), 0, RANDOM),
}
# By the cause that the message says: how to build the model, in which module its output differs, in replica 0 unless it
# says another one; the input if that is not `VECTORS`, and options.
IN_MODULES = {
    LINE: {
        "class that synchronizes": (
            lambda: convert_model(nn.Sequential(Scaled(3)), classes={Scaled: SynchronizedScaled}),
            "0 (SynchronizedScaled)",
            IMAGES,
        ),
        "by a number that is none of dropout": (
            lambda: Net(lambda self, x: x + self.p * x.mean(0), p=0.5),
            "the model itself (Net)",
        ),
        "of a list that is used up": (
            lambda: Apply(lambda self, x: self.parts[0]([x]), Apply(lambda self, xs: mix(self, xs.pop()))),
            "parts.0 (Apply)",
        ),
        "class with a name of torch's": (lambda: nn.Sequential(Linear(3, 3)), f"0 ({__name__}.Linear)"),
        "behind a parameter that is changed": (
            lambda: nn.Sequential(Apply(mix), Net(change_and_use_parameter, threshold=nn.Parameter(torch.ones(())))),
            "0 (Apply)",
        ),
        "dropout of one's own beside a mix": (lambda: nn.Sequential(DropRows()), "0 (DropRows)"),
        "of complex numbers": (lambda: Apply(lambda self, x: torch.complex(x, x - x.mean(0))), ITSELF),
        "behind similarities": (
            lambda: nn.Sequential(Apply(lambda self, x: x @ x.T), Apply(lambda self, x: x.softmax(1)[:, :1])),
            "1 (Apply)",
        ),
        "before a frozen norm": (
            lambda: nn.Sequential(behind(0.0, Apply(mix), convert_model(nn.BatchNorm1d(3)).requires_grad_(False))),
            "0.branch.0 (Apply)",
        ),
    },
    OTHERS: {
        "beside a call that was stopped": (
            lambda: Apply(stop_and_mix, nn.Sequential(nn.ReLU(), Apply(stop)), nn.ReLU()),
            ITSELF,
        )
    },
    f"{MEAN}checked.py, line 48, in mix)$": {
        "with a backward hook": (
            lambda: nn.Sequential(with_hook(Apply(mix), lambda *_: None, "full_backward_hook")),
            "0 (Apply)",
        ),
        "behind a zero": (lambda: behind(0.0, nn.Linear(3, 3), Apply(mix)), "branch.1 (Apply)"),
    },
    f"by...{LINE}x.flip(0)` (": {
        "forward that was set": (
            lambda: nn.Sequential(with_forward(nn.Linear(3, 3), lambda x: x.flip(0))),
            "0 (Linear)",
        )
    },
    f"{MEAN}...; compared with dropout switched off: 3.drop_prob, dropout": {
        "in place": (
            lambda: nn.Sequential(
                *(nn.Linear(3, 3), nn.Dropout(), Apply(lambda self, x: x.sub_(x.mean(0)))),
                DropPath(lambda self, x: x * (1 - self.drop_prob), drop_prob=0.5),
            ),
            "2 (Apply)",
        )
    },
    "it begins with": {
        "mix with a state": (lambda: Apply(count_and_mix), ITSELF),
        "argument that only replicas pass": (
            lambda: Apply(
                lambda self, x: self.parts[0](x, x if len(x) == 2 else None),
                Apply(lambda self, x, y: x * 1 if y is None else x * y),
            ),
            ITSELF,
        ),
        "second call": (
            lambda: Apply(
                lambda self, x: self.parts[0](self.parts[0](x), 1), Apply(lambda self, x, k=0: x + k * x.mean(0))
            ),
            "parts.0 (Apply, call 2)",
        ),
    },
    SIZE: {
        "in rows of several": (
            lambda: Apply(lambda self, x: self.parts[0](x.flatten(0, 1)), Apply(lambda self, x: x * len(x))),
            "parts.0 (Apply)",
            IMAGES,
        ),
        "argument that is no tensor": (
            lambda: Apply(lambda self, x: self.parts[0](x, len(x)), Apply(lambda self, x, number: x / number)),
            ITSELF,
        ),
        "around a norm": (
            lambda: convert_model(Apply(lambda self, x: self.parts[0](x) * len(x), nn.BatchNorm1d(3))),
            ITSELF,
        ),
        "beside others that are not finite": (
            lambda: Apply(beside_others_not_finite),
            f"{ITSELF}, in replica 0, by 0.5 of its largest value",
        ),
    },
    "which gets 2 in place of 3$": {
        "beside a norm in eval mode": (
            lambda: convert_model(Apply(scale_in_replica, nn.BatchNorm1d(3).eval())),
            ITSELF,
        ),
        "beside a norm": (lambda: convert_model(Apply(scale_in_replica, nn.BatchNorm1d(3))), ITSELF),
    },
    WAY: {
        "branch behind a call that was stopped": (
            lambda: nn.Sequential(Apply(stop_and_branch, Apply(refuse))),
            "0 (Apply)",
        ),
        "call that only replicas make": (
            lambda: Apply(lambda self, x: self.parts[0](x) if len(x) == 2 else x * 1, nn.Softmax(0)),
            ITSELF,
        ),
        "not finite": (lambda: Apply(lambda self, x: x if len(x) == 4 else x * math.nan), ITSELF),
    },
    "of its largest value: 0.calls changed in this pass": {
        "class that cannot run again": (
            lambda: convert_model(nn.Sequential(Once(3)), classes={Once: SynchronizedOnce}),
            "0 (SynchronizedOnce)",
            IMAGES,
        )
    },
    RANDOM: {
        "Python's": (lambda: Apply(lambda self, x: x * 1e-8 * random.random()), ITSELF),
        "NumPy's": (lambda: Apply(lambda self, x: self.parts[0](x * numpy.random.rand()), nn.ReLU()), ITSELF),
    },
    "a batch norm that is not synchronized; call convert_model(model)": {
        "not converted": (
            lambda: nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), wrapped(nn.BatchNorm2d(4)))),
            "1.module (BatchNorm2d)",
            IMAGES,
        ),
        "behind a zero": (lambda: behind(0.0, nn.Linear(3, 3), nn.BatchNorm1d(3)), "branch.1 (BatchNorm1d)"),
        "behind a small scale": (
            lambda: nn.Sequential(behind(1e-9, nn.BatchNorm1d(3)), nn.Linear(3, 1)),
            "0.branch.0 (BatchNorm1d)",
            VECTORS - VECTORS.mean(0),
            {"loss": lambda output: (output - output.detach().mean()).mean() * 1e6},
        ),
    },
    "a batch norm that convert_model leaves as it is: it has a forward of its own; write class": {
        "of a ResNet-18": (
            resnet_with_own_norm,
            "layer2.0.bn2 (MyNorm), in replica 0, by 0...",
            torch.randn(4, 3, 32, 32),
        )
    },
    f"leaves as it is: it has a forward of its own; write class MySynchronizedBatchNorm1d({__name__}.BatchNorm1d, "
    f"SynchronizedBatchNorm1d), in which SynchronizedBatchNorm1d.forward computes the norm, and call "
    f"convert_model(model, classes={{{__name__}.BatchNorm1d: MySynchronizedBatch": {
        "norm with a name of torch's": (lambda: nn.Sequential(BatchNorm1d(3)), f"0 ({__name__}.BatchNorm1d)")
    },
    "with its group_size of 2, groups of so many of the 4 replicas normalize separately; set it to None, unless": {
        "group": (
            lambda: convert_model(nn.BatchNorm2d(3), group_size=2),
            "the model itself (SynchronizedBatchNorm2d)",
            IMAGES[:4],
            {"replicas": 4},
        )
    },
    "its forward never calls that of SynchronizedBatchNorm2d; call": {
        "class that never synchronizes": (
            lambda: convert_model(nn.Sequential(MyNorm(3)), classes={MyNorm: NeverSynchronized}),
            "0 (NeverSynchronized)",
            IMAGES,
        )
    },
    "SynchronizedRms computes something else than Rms, which it replaces, on one device, too; for another formula": {
        "class with another formula": (
            lambda: convert_model(nn.Sequential(Rms(3)), classes={Rms: SynchronizedRms}),
            "0 (SynchronizedRms)",
        )
    },
    "it calls F.batch_norm, or a batch norm that is no submodule; make it an attribute, and convert the model$": {
        "plain list": (
            lambda: Net(lambda self, x: self.hidden[0](x), hidden=[nn.BatchNorm1d(3)]),
            "the model itself (Net)",
        ),
        "behind a zero": (lambda: behind(0.0, Apply(normalize), nn.Linear(3, 3)), "branch.0 (Apply)"),
    },
    "its forward() changes the parameter 1.threshold in place, and each replica once more, as all share its memory": {
        "parameter that is changed and used": (
            lambda: nn.Sequential(nn.ReLU(), Net(change_and_use_parameter, threshold=nn.Parameter(torch.ones(())))),
            "1 (Net), in replica 1",
        )
    },
}
# The same, with what the message says before.
ELSEWHERE = {
    f"{MEAN}checked.py": {
        "mix for each sample": (
            lambda: nn.Sequential(Apply(lambda self, x: mix(self, x).unbind()), Apply(lambda self, x: torch.stack(x))),
            "first difference: output[1] of 0 (Apply), in replica 0, by",
        )
    },
    "return a row for each sample": {
        "another number of outputs": (
            lambda: Apply(lambda self, x: (x, x) if len(x) == 2 else (x,)),
            "outputs have shapes [(4, 3)] on one device, [(4, 3), (4, 3)] in replicas",
        ),
        "another number of scalars": (
            lambda: Apply(lambda self, x: [x.mean()] * len(x)),
            "outputs have shapes [(), (), (), ()] on one device, [(2,), (2,)] in replicas",
        ),
        "another output that fits no other": (
            lambda: Apply(lambda self, x: (x, x[:, 0]) if len(x) == 2 else (x,)),
            "outputs have shapes [(4, 3)] on one device, [(4, 3), (4,)] in replicas",
        ),
        "list": (
            lambda: Apply(lambda self, x: list(self.parts[0](x)), nn.Linear(3, 2)),
            "outputs have shapes [(2,), (2,), (2,), (2,)] on one device, [(4,), (4,)] in replicas",
        ),
        "number among the outputs": (
            lambda: wrapped(Apply(lambda self, x: {"x": x, "count": len(x)}), out_dims={"count": None}),
            "output['count'] is 4 on one device, 2 in replicas",
        ),
    },
    # Losses
    'of what replicas return, the mean is that of one device; take their mean, see "In the replicas, with balanced '
    'memory"; replicas with [2, 2] rows return ..., one device returns': {
        "means that are added up": (
            lambda: Apply(lambda self, x: self.parts[0](x).square().mean(), nn.Linear(3, 2)),
            "the loss differs: ",
            {"loss": torch.sum},
        ),
    },
    "the sum is that of one device; add them up": {
        "averaged": (
            lambda: Apply(lambda self, x: (x, x.square().sum())),
            "the loss differs: as output[1], of what replicas",
            {"loss": lambda output: output[1].mean()},
        ),
        "without a loss": (lambda: Apply(lambda self, x: x.square().sum()), "the loss differs:"),
    },
    "the mean weighted by rows is that of one device; weight them by...replicas with [3, 2] rows return": {
        "uneven means": (lambda: Apply(lambda self, x: x.square().mean()), "the loss differs:", IMAGES),
        "uneven means from the second pass on": (
            lambda: Apply(lambda self, x: x.square().mean() * (self.count.add_(1) > 1), count=0.0),
            "in pass 2: the loss differs: of what replicas return, ",
            IMAGES,
        ),
    },
    NO_MEAN: {
        "no mean over samples": (lambda: Apply(lambda self, x: x.std()), "the loss differs:"),
        "class weights": (
            lambda: labelled(weight=torch.tensor([1.0, 3.0, 9.0])),
            "the loss differs:",
            {"kwargs": {"labels": torch.tensor([0, 1, 2, 2])}},
        ),
        "ignored labels": (lambda: labelled(ignore_index=9), "the loss differs:", LABELS_TO_IGNORE),
        "Dice": (
            lambda: Apply(dice, nn.Linear(3, 2)),
            "the loss differs: as output[1], ",
            {"loss": lambda output: output[1].mean()},
        ),
    },
    "compute it from the ga...; replicas with [2, 2] rows return nan, ": {
        "nothing but ignored labels": (
            lambda: labelled(ignore_index=9),
            "the loss differs: ",
            {"kwargs": {"labels": torch.tensor([9, 9, 2, 2])}},
        ),
        "NaN that one device has as well": (
            lambda: Apply(lambda self, x: x.mean()),
            "the loss differs: ",
            torch.tensor([[math.nan], [1.0], [2.0], [3.0]]),
            {"loss": lambda losses: losses.reshape(-1)[-1]},
        ),
    },
    LOSS: {
        "state": (lambda: Apply(hide, nn.Softmax(0)), "outputs agree, the loss does not:", loss_with_state(1.0)),
        "state that changes somewhat": (lambda: Apply(hide, nn.Softmax(0)), "", loss_with_state(0.012)),
        "state that changes little": (lambda: Apply(hide, nn.Softmax(0)), "", loss_with_state(0.001)),
    },
    # Gradients
    "it is missing, or zero, in replicas, while that of parts.1..., before it, "
    "agrees; if no branch leads past that, look between these two for": {
        "that replicas drop": (lambda: Apply(drop_gradient, nn.Linear(3, 3), nn.Linear(3, 2)), GRADIENT, CROSS_ENTROPY),
    },
    "it is missing, or zero, in replicas; look for": {
        "behind one of zero": (lambda: Apply(drop_gradient_beside_zero, nn.Linear(3, 2), nn.Linear(3, 2)), GRADIENT)
    },
    "only replicas have one": {
        "that one device drops": (
            lambda: Apply(
                lambda self, x: self.parts[0](x).detach() if len(x) == 4 else self.parts[0](x), nn.Linear(3, 2)
            ),
            GRADIENT,
        )
    },
    "that of 0.bias: only replicas have one; it begins with `grad.norm()` (": {
        "that is nothing but rounding on one device": (
            lambda: convert_model(
                nn.Sequential(nn.Linear(3, 3), Apply(lambda self, x: NormInBackward.apply(x)), nn.BatchNorm1d(3))
            ),
            "outputs and loss agree",
        )
    },
    "its norm in replicas is 2.0 times that on one device": {
        "beside a loss that hardly changes": (
            lambda: Apply(lambda self, x: MeanInBackward.apply(self.parts[0](x)), nn.Linear(3, 2)),
            GRADIENT,
            loss_with_state(1e-8),
        ),
    },
    "its norm in replicas is 2.0 times that on one device; it begins with `grad / len(grad)` (checked.py, line 38, in "
    "backward), which gets 2 in place of 4$": {
        "mean": (lambda: Apply(lambda self, x: MeanInBackward.apply(self.parts[0](x)), nn.Linear(3, 2)), GRADIENT)
    },
    "its norm in replicas is 0.5 times that on one device; it begins with `grad * len(grad)` (": {
        "sum": (lambda: Apply(lambda self, x: SumInBackward.apply(self.parts[0](x)), nn.Linear(3, 2)), GRADIENT)
    },
    "its norm in replicas is 1.5 times that on one device; look for": {
        "other part of a gradient": (
            lambda: Apply(
                lambda self, x: larger_gradient(self.parts[0](x)) if len(x) < 4 else self.parts[0](x), nn.Linear(3, 3)
            ),
            GRADIENT,
        )
    },
    ".bias: its norm in replicas is 1.0 times that on one device; if replicas return the loss, compute it from the "
    "gathered output, or, if it divides sums, return these, and divide outside$": {
        "class weights that hardly matter": (
            lambda: labelled(weight=torch.tensor([1.0, 1.0, 1.00001])),
            GRADIENT,
            torch.arange(12.0).reshape(4, 3).sin(),
            {"kwargs": {"labels": torch.tensor([0, 1, 2, 2])}},
        )
    },
    "the first gradient that differs, in the order of the backward pass, is that of input": {
        "of an input": (
            lambda: Apply(lambda self, x: self.parts[0](MeanInBackward.apply(x)), nn.Linear(3, 3)),
            "outputs and loss agree;",
            VECTORS.clone().requires_grad_(),
        )
    },
    # State
    KEPT: {
        "counter": (
            lambda: Apply(count, seen=0),
            "outputs, loss and gradients agree; the buffer seen differs after the forward pass, by 0.5 of",
        ),
        "buffer that only the whole batch makes": (
            lambda: Apply(keep_whole),
            "outputs, loss and gradients agree; the buffer late differs after the forward pass,",
        ),
        "buffer that a backward hook writes": (
            lambda: with_hook(
                Apply(lambda self, x: self.parts[0](x), nn.Linear(3, 3), seen=0.0), add_gradient, "full_backward_hook"
            ),
            "outputs, loss and gradients agree; the buffer seen differs after the forward pass,",
        ),
        "attribute behind a buffer": (
            lambda: Apply(lambda self, x: count(self, bind("step", lambda step, _: step + 1)(self, x)), seen=0),
            "outputs, loss and gradients agree; the buffer seen differs",
        ),
    },
    "update it outside the forward pass, or in place if it is a buffer that does not depend on the batch": {
        "queue": (lambda: Apply(enqueue, queue=[[0.0] * 3] * 6), "agree; the buffer queue differs")
    },
    "forward() changes it, in each replica once; make it a buffer, which only replica 0 writes, or do so outside": {
        "parameter that is changed": (
            lambda: Net(change_parameter, threshold=nn.Parameter(torch.ones(()), requires_grad=False)),
            "gradients agree; the parameter threshold differs after the forward pass, by 0.17 of its largest value",
        )
    },
    "the parameter w is there on one device only": {
        "new parameter": (
            lambda: Apply(lambda self, x: self.register_parameter("w", nn.Parameter(x[0])) or x),
            "after the forward pass,",
        )
    },
    # Errors
    "runs on one device, but not in replicas: ValueError: replica 0 returned": {
        "keys": (lambda: Apply(lambda self, x: {len(x): x}), "", IMAGES)
    },
    "runs on one device, but not in replicas: RuntimeError: ": {
        "error": (lambda: Apply(lambda self, x: x.view(4, 3)), ""),
        "copy": (lambda: Apply(lambda self, x: copy.deepcopy(self.parts[0])(x), nn.Linear(3, 3)), ""),
    },
}


def check(message, build, *rest):
    input = next((value for value in rest if isinstance(value, torch.Tensor)), VECTORS)
    options = next((value for value in rest if isinstance(value, dict)), {})
    model = build()
    with torch.inference_mode(), torch.autocast("cpu"):
        assert_names([message], model, input, **options)


@pytest.mark.parametrize("planted", AROUND)
def test_a_module_between_others_is_named_with_the_cause(planted):
    function, replica, cause = AROUND[planted]
    check(f"first difference: output of 2 (Apply), in replica {replica}, ...{cause}", lambda: around(function), IMAGES)


@pytest.mark.parametrize(("cause", "planted"), [(cause, name) for cause in IN_MODULES for name in IN_MODULES[cause]])
def test_a_module_is_named_with_the_cause(cause, planted):
    build, where, *rest = IN_MODULES[cause][planted]
    where = where if "in replica" in where else f"{where}, in replica "
    check(f"first difference: output of {where}...{cause}", build, *rest)


@pytest.mark.parametrize(("cause", "planted"), [(cause, name) for cause in ELSEWHERE for name in ELSEWHERE[cause]])
def test_a_planted_cause_is_named(cause, planted):
    build, before, *rest = ELSEWHERE[cause][planted]
    check(f"{before}...{cause}", build, *rest)


def attend(*args, **options):
    return Apply(lambda self, x: F.scaled_dot_product_attention(x, x, x, *args, **options))


def lstm(**options):
    return Apply(lambda self, x: self.parts[0](x)[0], nn.LSTM(3, 3, 2, **options))


DROPOUT = {  # what is in a model beside a cause, or is the cause, and whether the message speaks of dropout
    "random numbers": ([Apply(lambda self, x: x + torch.rand_like(x)), nn.Dropout()], False),
    "no dropout": ([Apply(mix)], False),
    "dropout": ([Apply(mix), nn.Dropout()], True),
    "of an LSTM": ([Apply(mix), lstm(dropout=0.5)], True),
    "none of an LSTM": ([Apply(mix), lstm()], False),
    "by a function": ([Apply(mix), Apply(lambda self, x: F.dropout(x))], True),
    "none of attention": ([Apply(mix), attend(dropout_p=0.0)], False),
    "none by position": ([Apply(mix), attend(None, 0.0, True)], False),
    "of attention": ([Apply(mix), attend(dropout_p=0.5)], True),
    "of attention, by position": ([Apply(mix), attend(None, 0.5)], True),
}


@pytest.mark.parametrize(("layers", "is_said"), DROPOUT.values(), ids=list(DROPOUT))
def test_dropout_is_named_where_it_was_switched_off_and_is_not_the_cause(layers, is_said):
    with pytest.raises(AssertionError, match="output of 0") as caught:
        assert_matches_one_device(nn.Sequential(*layers), VECTORS)
    assert ("dropout" in str(caught.value)) == is_said, caught.value


def count_steps(self, input):
    """Scale by a count what the next layer normalizes, so that outputs differ less than the check looks at."""
    self.step += 1
    return self.norm(self.linear(input) * (1 + 1e-3 * self.step))


def test_loss_of_the_check_is_not_said_to_be_one_of_the_user():
    torch.manual_seed(2)
    model = Net(count_steps, step=0, linear=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    with pytest.raises(AssertionError, match=r"outputs agree, the loss does not: .* in replicas; what forward"):
        assert_matches_one_device(wrapped(convert_model(model)), torch.randn(3, 4))
