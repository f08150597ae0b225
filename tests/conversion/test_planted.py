"""`assert_matches_one_device` on planted faults, and on right models that look like them."""

from __future__ import annotations

import contextvars
import copy
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from checked import VECTORS, Apply, DropPath, MeanInBackward, assert_names, mix, quietly, with_hook, wrapped
from helpers import Net
from torch import nn
from torch.nn.parallel import gather
from torch.nn.parallel.scatter_gather import scatter_kwargs
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, assert_matches_one_device, convert_model

BATCH = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
LINE = "it begins with `"


class Gated(nn.Module):
    """A block of a diffusion transformer at its start: gates and last layer are zeros."""

    def __init__(self, inside):
        super().__init__()
        self.stem, self.inside, self.gate, self.last = nn.Linear(6, 6), inside, nn.Linear(6, 6), nn.Linear(6, 6)
        for parameter in [*self.gate.parameters(), *self.last.parameters()]:
            nn.init.zeros_(parameter)

    def forward(self, x):
        hidden = self.stem(x)
        return self.last(hidden + self.gate(x) * self.inside(hidden))


def views(*inside):
    """Return a net that runs two views of each sample in one batch."""
    layers = nn.Sequential(nn.Linear(6, 8), *inside, nn.ReLU(), nn.Linear(8, 4))
    return Net(lambda self, x: self.net(torch.cat([x, x + 1])).chunk(2), net=layers)


def compare_nets(self, x):
    difference = self.net(x) - self.slow(x)
    return x + difference - difference.mean(0)


def nets_that_begin_equal():
    net = nn.Linear(6, 6)
    return Net(compare_nets, net=net, slow=copy.deepcopy(net))


class ByNumbers(nn.Module):
    """Gets a list with a number for each sample, or with a dict that has one."""

    def forward(self, x, numbers):
        numbers = [number["number"][0] if isinstance(number, dict) else number for number in numbers]
        return torch.stack([row * number for row, number in zip(x, numbers, strict=False)])


def keep(self, module, args, output):
    self.features = output.detach().mean()


def scaled(self, module, args, output):
    return output * self.scale.to(output.dtype)


def set_scale(self, x):
    self.scale = x[:1].detach() * 0 + 2
    return self.net(x)


def of_class(forward, **attributes):
    """Return a module of a class that has this `forward`, where the check looks for what a hook sets."""
    model = type("Hooked", (nn.Module,), {"forward": forward})()
    for name, value in {"net": nn.Linear(6, 6), **attributes}.items():
        setattr(model, name, value)
    return model


def hooked(hook, forward, **attributes):
    """Return a net with a hook that is its method."""
    model = of_class(forward, **attributes)
    model.net.register_forward_hook(MethodType(hook, model))
    return model


def hooked_by_closure(by_name):
    def keep(module, args, output):
        model.features = output

    model = of_class(add_features)
    model.net.register_forward_hook(
        (lambda module, args, output: setattr(model, "features", output)) if by_name else keep
    )
    return model


def add_features(self, x):
    return self.net(x) + self.features


class Logs(nn.Module):
    """Has a hook that is a method, and sets on the model what nobody reads."""

    def __init__(self):
        super().__init__()
        self.net, self.log = nn.Linear(6, 6), None
        self.net.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.log = output.detach()

    def forward(self, x):
        return self.net(x)


class Levels(nn.Module):
    """Has a backward hook that is a method, and reads what it has set in the last pass."""

    def __init__(self):
        super().__init__()
        self.net, self.level = nn.Linear(6, 6), 1.0
        self.net.register_full_backward_hook(self.keep)

    def keep(self, module, grad_input, grad_output):
        self.level = 1 + float(grad_output[0].norm())

    def forward(self, x):
        return self.net(x * 1) * self.level


class KeepsFeatures(nn.Module):
    """Has a hook that is a method, and sets on itself what the module around it reads."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.net.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.features = output

    def forward(self, x):
        return self.net(x)


def read_child(self, x):
    return self.child(x) + self.child.features


FEATURES = {}


def fill_features(module, args, output):
    FEATURES["net"] = output


def filling(hook, features):
    """Return a net whose hook fills a dict that is an attribute, too."""
    model = of_class(lambda self, x: (self.net(x), self.features["net"] * 2)[1], features=features)
    with_hook(model.net, hook)
    return model


def filled_by_closure():
    features = {}
    return filling(lambda module, args, output: features.update(net=output), features)


def filled_by_default():
    features = {}
    return filling(lambda module, args, output, features=features: features.update(net=output), features)


def before_norm(function):
    """Return a net that does something in its own forward, before a norm."""
    layers = {"first": nn.Linear(6, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 3)}
    return convert_model(Net(lambda self, x: self.last(self.norm(function(self.first(x)))), **layers))


def keeping(kept, update, use):
    """Return a net that uses what it keeps on itself, and then updates it."""

    def forward(self, x):
        output = use(x, self.kept)
        self.kept = update(self.kept, x.detach())
        return output

    return convert_model(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Net(forward, kept=kept)))


def in_blocks(self, x):
    """Run a time-major sequence of three steps as one batch."""
    steps = torch.stack([x, x + 1, x * 2]).flatten(0, 1)
    return self.parts[1](self.parts[0](steps).unflatten(0, (3, -1)).sum(0))


def log_and_mix(self, x):
    self.parts[0](x)
    return self.parts[1](self.parts[2](x))


def refuse_one_row(self, x):
    if len(x) == 1:
        raise ValueError("one row")
    return x


def frozen_norm_and_mix(self, x):
    hidden = F.batch_norm(x, torch.zeros(6), torch.ones(6))
    return hidden - hidden.mean(0)


def drop_path(self, x):
    return x * torch.bernoulli(torch.full_like(x[:, :1], 1 - self.drop_prob))


def assign_parameter(self, x):
    self.scale = nn.Parameter(self.scale.detach() / 2)
    return x * self.scale


def assign_data(self, x):
    self.scale.data = self.scale.data / 2
    return x * 1


def follow_gradient(self, x):
    """Change the input along a gradient, as an attack does."""
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.parts[0](moved).square().sum(), moved)
    return self.parts[0](x + grad)


def penalty(self, x):
    """Return a gradient of a mean, which divides by the rows of the chunk."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(self.parts[0](x).mean(), x, create_graph=True)[0]


def go_backward(self, x):
    output = self.parts[0](x)
    output.square().mean().backward(retain_graph=True)
    self.zero_grad()
    return output * 1


def go_backward_elsewhere(self, x):
    x.detach().requires_grad_().sum().backward()
    return x * 1


def by_sample(self, x):
    return torch.stack([self.parts[0](row.reshape(3, 2)) for row in x])


def set_momentum(self, x):
    self.step += 1
    self.norm.momentum = 0.5 / self.step
    return self.norm(x)


def tower():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def draw(self, x):
    return x + torch.randn(x.shape, generator=self.generator)


def add_seeded_noise(self, x):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)


def average_in_buffer(self, x):
    before = self.average * 1
    self.average.copy_(x.detach().mean(0))
    return x - before


def two_losses(self, x):
    return {"rows": x.square().mean(1), "divided": (x.square().mean(1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum()}


def pad(self, x):
    return F.pad(x, (0, int(x.max() * 9)))


def add_total(self, x):
    return x[:, :6] + x.sum(1, keepdim=True)


@dataclass
class Batch:
    x: torch.Tensor


def change_parameter(self, x):
    with torch.no_grad():
        self.count.add_(1.0)
    return x * 1


def behind(*modules):
    return nn.Sequential(nn.Linear(6, 6), *modules)


def without_statistics():
    return nn.BatchNorm1d(6, track_running_stats=False)


def passing(make, use):
    """Return a model whose submodule mixes samples, and gets them in another object."""
    return Apply(lambda self, x: self.parts[0](make(x)), Apply(lambda self, held: mix(self, use(held))))


ITSELF = "the model itself"
# By cause: how to build the model, and where the message says that the cause is; words that it must not have.
FAULTS = {
    LINE: {
        "cumsum before a norm": (lambda: before_norm(lambda h: h.cumsum(0)), ITSELF, "norm"),
        "maximum before a norm": (lambda: before_norm(lambda h: h / h.max()), ITSELF, "norm"),
        "two views": (lambda: views(Apply(mix)), "net.1 (Apply)"),
        "time-major": (lambda: Apply(in_blocks, nn.Linear(6, 6), Apply(mix)), "parts.1 (Apply)"),
        "behind a log": (
            lambda: Apply(log_and_mix, Apply(lambda self, x: x.mean(0)), Apply(mix), nn.Linear(6, 6)),
            *("parts.1 (Apply)", "parts.0"),
        ),
        "gates of zeros": (lambda: Gated(Apply(mix)), "inside (Apply)"),
        "roots of zeros": (
            lambda: Net(lambda self, x: self.mix(x) * self.w.sqrt(), w=nn.Parameter(torch.zeros(6)), mix=Apply(mix)),
            "mix (Apply)",
        ),
        "a copy that begins equal": (nets_that_begin_equal, ITSELF),
        "loop over samples": (
            lambda: before_norm(lambda h: torch.stack([row.tanh() for row in h - h.mean(0)])),
            ITSELF,
            "tanh",
        ),
        "mean by hand": (lambda: Apply(lambda self, x: x - sum(x.unbind()) / len(x)), ITSELF),
        "a number that is drawn and not used": (
            lambda: before_norm(lambda h: (torch.rand(1), h - h.mean(0))[1]),
            *(ITSELF, "random"),
        ),
        "a frozen F.batch_norm": (lambda: Apply(frozen_norm_and_mix), ITSELF, "batch_norm"),
        "backdrop": (lambda: Net(lambda self, x: x - self.backdrop * x.mean(0), backdrop=0.5), ITSELF, "dropout"),
        "drop_prob of a class that is not known": (
            lambda: Net(lambda self, x: x - self.drop_prob * x.mean(0), drop_prob=0.5),
            *(ITSELF, "dropout"),
        ),
        "before a parameter that forward changes": (
            lambda: nn.Sequential(Apply(mix), Net(change_parameter, count=nn.Parameter(torch.ones(6)))),
            *("0 (Apply)", "1.count"),
        ),
        "one of two outputs": (
            lambda: behind(Net(lambda self, x: {"right": x * 1, "wrong": x - x.mean(0)})),
            "output['wrong'] of 1 (Net)",
        ),
        "padding to the longest sample": (
            lambda: nn.Sequential(Apply(pad), Apply(lambda self, x: x.sum(1) / len(x[0]))),
            "output of 0 (Apply), in replica 0, in its shape",
        ),
        "behind padding": (lambda: behind(Apply(pad), Apply(add_total), Apply(mix)), "3 (Apply)"),
        "behind a hook that only logs": (lambda: nn.Sequential(Logs(), Apply(mix)), "1 (Apply)", "hooks that refer"),
        "in a wrapper, before the loss of a model": (
            lambda: Apply(lambda self, x: self.parts[0](x).square().mean(), wrapped(behind(Apply(mix)))),
            *("parts.0.module.1 (Apply)", "outputs agree", "depends on more"),
        ),
        "behind a right output that does not fit into the replica": (
            lambda: nn.Sequential(
                Apply(lambda self, x: pad(self, x) + self.parts[0](x), Apply(pad)), Apply(add_total), Apply(mix)
            ),
            "2 (Apply)",
        ),
        "list of samples": (lambda: passing(list, torch.stack), "parts.0 (Apply)"),
        "an object that cannot be cut": (
            lambda: passing(lambda x: SimpleNamespace(x=x), lambda batch: batch.x),
            "parts.0 (Apply)",
        ),
        "dataclass": (lambda: passing(Batch, lambda batch: batch.x), "parts.0 (Apply)"),
        "in vmap": (
            lambda: behind(Apply(lambda self, x: torch.vmap(torch.sub, in_dims=(0, None))(x, x.mean(0)))),
            "1 (Apply)",
        ),
        "in a checkpoint": (
            lambda: Apply(lambda self, x: checkpoint(self.parts[0], x, use_reentrant=False), Apply(mix)),
            "parts.0 (Apply)",
        ),
    },
    "it goes another way: replica 1 runs `h * 2` (": {
        "small chunk before a norm": (lambda: before_norm(lambda h: h * 2 if len(h) < 3 else h), ITSELF, "norm")
    },
    "depends on other samples of the batch": {  # The arguments of the module cannot be compared.
        "dict with other keys": (lambda: passing(lambda x: {len(x): x}, lambda of_rows: sum(of_rows.values())), ITSELF)
    },
    f"{LINE}...gets ": {
        "number in place of a tensor": (
            lambda: Apply(lambda self, x: self.parts[0](x, x if len(x) < 5 else 1), Apply(lambda self, x, by: x * by)),
            ITSELF,
        ),
        "behind a norm without statistics": (
            lambda: convert_model(Apply(lambda self, x: len(x) * self.parts[0](x), without_statistics())),
            ITSELF,
        ),
        "infinite": (lambda: Apply(lambda self, x: x / (len(x) - 3)), f"{ITSELF}...only one of them is finite"),
    },
    "it calls torch.autograd.grad, which in a replica sees only its chunk": {
        "in a gradient": (lambda: Apply(penalty, tower()), ITSELF),
        "in a gradient of what requires one": (lambda: behind(Apply(penalty, tower())), "1 (Apply)"),
    },
    f"{LINE}torch.arange(len(h))`": {
        "arange before a norm": (lambda: before_norm(lambda h: h + torch.arange(len(h))[:, None]), ITSELF, "norm")
    },
    "draws random numbers": {
        "dropout of one's own": (
            lambda: Net(lambda self, x: x * (torch.rand_like(x) < self.p), p=0.5),
            ITSELF,
            "dropout",
        )
    },
    "look for state, a generator of its own, or the time": {
        "generator of its own": (lambda: behind(Net(draw, generator=torch.Generator())), "1 (Net)"),
        "time": (lambda: Apply(lambda self, x: x * (time.perf_counter_ns() % 1000)), ITSELF, "random numbers"),
    },
    "because of a seed or a generator of its own": {
        "noise": (lambda: behind(Net(add_seeded_noise)), "1 (Net)...the same random numbers in each replica")
    },
    "is not synchronized; call": {"two views": (lambda: views(nn.BatchNorm1d(8)), "net.1 (BatchNorm1d)")},
    "2.kept differs from": {  # what forward keeps on itself
        "counter in a tensor": (lambda: keeping(torch.ones(()), lambda k, x: k + 1, torch.mul), "pass 2"),
        "average in a tensor": (lambda: keeping(torch.zeros(6), lambda k, x: k / 2 + x.mean(0), torch.sub), "pass 2"),
        "None at first": (lambda: keeping(None, lambda k, x: x[0] * 0, lambda x, k: x * (1 + (k is None))), "pass 2"),
        "in the third pass": (lambda: keeping(0, lambda k, x: k + 1, lambda x, k: x if k < 2 else x * 2), "pass 3"),
    },
    "2.kept changed in this pass": {
        "counter in a dict": (
            lambda: keeping({"n": 0}, lambda k, x: k.update(n=k["n"] + 1) or k, lambda x, k: x * (1 + k["n"])),
            "2 (Net)",
        ),
        "list": (lambda: keeping([], lambda k, x: k.append(x.sum()) or k, lambda x, k: x + sum(k)), "2 (Net)"),
        "queue": (
            lambda: keeping(deque(maxlen=3), lambda k, x: k.append(0) or k, lambda x, k: x * (1 + len(k))),
            "2 (Net)",
        ),
    },
    "assigns another tensor to it, which ends with the replica": {
        "parameter": (
            lambda: Net(assign_parameter, scale=nn.Parameter(torch.ones(6))),
            *("the parameter scale differs", "in place, and", "each replica once"),
        ),
        "data of a parameter": (
            lambda: behind(Net(assign_data, scale=nn.Parameter(torch.ones(6)))),
            *("the parameter 1.scale differs", "each replica once"),
        ),
    },
    "from its own chunk": {
        "average in a buffer that is not saved": (
            lambda: Net(average_in_buffer, average=nn.Buffer(torch.zeros(6), persistent=False)),
            *("pass 2...the buffer average differs", "sets on self"),
        ),
    },
    f"{LINE}grad / len(grad)`": {
        "gradient behind padding": (
            lambda: behind(Apply(lambda self, x: MeanInBackward.apply(x)), Apply(pad), Apply(add_total)),
            *("the first gradient that differs...that of 0.", "first difference"),
        ),
        "gradient behind a hook that only logs": (
            lambda: nn.Sequential(Logs(), Apply(lambda self, x: MeanInBackward.apply(x))),
            *("that of 0.net.", "hooks that refer"),
        ),
        "gradient behind backward() of a tensor of one's own": (
            lambda: behind(Apply(go_backward_elsewhere), Apply(lambda self, x: MeanInBackward.apply(x))),
            *("that of 0.", "forward() calls backward()"),
        ),
    },
    "compute it outside the forward pass": {
        "gradient of a chunk within forward": (
            lambda: convert_model(Apply(follow_gradient, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()))),
            *(f"{ITSELF}...torch.autograd.grad", "running_mean", "running_var", "num_batches"),
        )
    },
    "forward() calls backward(), which in a replica adds to the gradients of the model; call it outside": {
        "gradients that forward drops": (
            lambda: Apply(go_backward, nn.Linear(6, 6)),
            *("the first gradient that differs...that of parts.0", "autograd.grad"),
        ),
        "of a norm": (lambda: convert_model(Apply(go_backward, nn.BatchNorm1d(6))), "that of parts.0.weight"),
    },
    "10 rows for 5 samples, in another order in replicas; return z1, z2, not cat([z1, z2])": {
        "two views in one output": (
            lambda: convert_model(
                Apply(lambda self, x: torch.cat([self.parts[0](x), self.parts[0](x + 1)]), nn.BatchNorm1d(6))
            ),
            *("outputs differ", "first difference"),
        )
    },
    "so step, norm.momentum differs from one device": {
        "momentum": (
            lambda: convert_model(Net(set_momentum, norm=nn.BatchNorm1d(6), step=0)),
            *("pass 2...the buffer norm.running_mean differs", "chunk"),
        )
    },
    "the mean weighted by rows is that of one device": {
        "in a wrapper": (
            lambda: Apply(
                lambda self, x: self.parts[0](x).mean(), wrapped(behind(Apply(lambda self, x: x.square().mean())))
            ),
            *("the loss differs: ...; replicas with [3, 2] rows", "outputs agree", "depends on more"),
        )
    },
    "compute it from the gathered output, or": {
        "one of two losses": (
            lambda: behind(Net(two_losses)),
            *("as output['divided'], no sum or mean", "weight them"),
        )
    },
    "compared with dropout switched off: 1.drop_prob, dropout": {
        "mix": (lambda: nn.Sequential(nn.Dropout(), DropPath(drop_path, drop_prob=0.5), Apply(mix)), "2 (Apply)")
    },
    f"{LINE}x.mean(0)`": {
        "hook": (lambda: behind(with_hook(nn.Linear(6, 6), lambda module, args, x: x - x.mean(0))), "1 (Linear)"),
        "hook before": (
            lambda: behind(with_hook(nn.Linear(6, 6), lambda module, args: (mix(module, *args),), "forward_pre_hook")),
            "1 (Linear)",
        ),
    },
    "hooks that refer to the model...; level differs from one device": {
        "backward hook": (Levels, "pass 2...keep of net (level)", "sets on self")
    },
    "hooks that refer to the model": {
        "hook": (lambda: hooked_by_closure(False), "not in replicas: AttributeError...keep of net (features)"),
        "hook, a method": (lambda: hooked(keep, add_features, features=0), "...keep of net (features)"),
        "hook that reads": (lambda: hooked(scaled, set_scale, scale=torch.ones(1, 6)), "...scaled of net (scale)"),
        "hook of a child that its parent reads": (
            lambda: of_class(read_child, child=KeepsFeatures()),
            "not in replicas: AttributeError...KeepsFeatures.keep of child.net (features)",
        ),
        "hook, by name": (lambda: hooked_by_closure(True), "not in replicas: AttributeError...(features)"),
    },
}
# Of a replica that gets one row: how to build the model, and what the message is.
ERRORS = {
    "plain norm": (
        lambda: behind(nn.BatchNorm1d(6)),
        "ValueError: Expected more than 1...; raised in 1 (BatchNorm1d): a batch norm that is not sync",
    ),
    "error before a norm": (
        lambda: convert_model(nn.Sequential(nn.Sequential(Apply(refuse_one_row)), nn.BatchNorm1d(6))),
        "ValueError: one row; raised in 0.0 (Apply)",
    ),
    "F.batch_norm": (
        lambda: Apply(lambda self, x: F.batch_norm(x, None, None, training=True)),
        "raised in the model itself (Apply): it calls F.batch_norm, or",
    ),
    "another norm": (
        lambda: behind(nn.GroupNorm(6, 6)),
        "ValueError: Expected more than 1...; raised in 1 (GroupNorm)$",
    ),
    "a norm that is called for each sample": (
        lambda: convert_model(Apply(by_sample, nn.BatchNorm1d(2))),
        "ReplicaSyncError: number of calls of parts.0: 3 on one device, [2, 1] in replicas; ...for all rows or with "
        "group_size 1; raised in parts.0 (SynchronizedBatchNorm1d, call 2)$",
    ),
}


PLANTED = [(cause, fault) for cause in FAULTS for fault in FAULTS[cause]]


@pytest.mark.parametrize(("cause", "fault"), [pytest.param(*PLANTED[0], marks=pytest.mark.smoke), *PLANTED[1:]])
def test_a_planted_fault_is_named_and_nothing_else(cause, fault):
    build, where, *never = FAULTS[cause][fault]
    text = assert_names([where, cause], build(), BATCH)
    assert not any(word in text for word in never), text


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_a_replica_alone_is_named_with_its_module(error):
    build, message = ERRORS[error]
    assert_names(["runs on one device, but not in replicas: ", message], build(), BATCH[:3])


def forces(self, x):
    return torch.autograd.grad(self.parts[0](x.requires_grad_()).sum(), x, create_graph=True)[0]


def fill_table(self, x):
    if self.table is None:
        self.table = torch.arange(x.shape[1])
    return x + self.table


def grow(self, x):
    if len(self.table) < len(x):
        self.table = torch.arange(len(x))
    return x + 0 * self.table[: len(x), None]


def set_rows(self, x):
    self.block.rows, self.rows = len(x), x.shape[0]
    return self.block(self.first(x))


def swin():
    block = Net(lambda self, x: self.norm(x).reshape(self.rows, -1), norm=nn.BatchNorm1d(8), rows=0)
    return Net(set_rows, first=nn.Linear(6, 8), block=block)


def write_buffer(self, x):
    self.last.copy_(x.detach().mean())
    return x * 1


def jacobian(self, x):
    return torch.func.vmap(torch.func.jacrev(self.parts[0]))(x).sum(1)


def called_functionally(self, x):
    return torch.func.functional_call(self.parts[0], dict(self.parts[0].named_parameters()), (x,))


def tagged():
    model = convert_model(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    model[0].weight.tag = model[1].running_mean.tag = 3
    return nn.Sequential(model, Net(lambda self, x: x * self.weight[0].tag, weight=[model[0].weight]))


def compiled():
    model = convert_model(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    quietly(model[0].compile)
    return nn.Sequential(model, Net(quietly(torch.compile, lambda self, x: x * 2)))


class MovesByDevice(nn.Linear):
    """Has a `to` and a `cpu` of its own, which take a device or nothing."""

    def to(self, device):
        return super().to(torch.device(device))

    def cpu(self):
        raise NotImplementedError


def rotate(self, x):
    assert self.factors.imag.all()
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 3, 2)) * self.factors).flatten(1)


def rotations():
    return torch.polar(torch.ones(3), torch.tensor([0.1, 1.0, 2.0]))


RIGHT = {
    "a gradient of an input that forward asks for": (lambda: Apply(forces, tower()), lambda output: output.sum()),
    "numbers of replicas that the model adds up": (
        lambda: Apply(lambda self, x: self.parts[0](x).sum(), wrapped(Apply(lambda self, x: x.square().sum()))),
    ),
    "a complex parameter": (lambda: Net(rotate, factors=nn.Parameter(rotations())),),
    "a complex buffer": (lambda: Net(rotate, factors=nn.Buffer(rotations())),),
    "a `to` of its own": (lambda: MovesByDevice(6, 3),),
    "script with buffers": (
        lambda: quietly(torch.jit.script, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval())),
    ),
    "sizes that each forward sets": (lambda: convert_model(swin()),),
    "a table filled in the first forward": (lambda: Net(fill_table, table=None),),
    "a growing table": (lambda: Net(grow, table=torch.arange(1)),),
    "a number that is counted": (lambda: Net(lambda self, x: setattr(self, "n", self.n + len(x)) or x * 1, n=0),),
    "softmax and sum": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(1)), lambda output: output.sum()),
    "a last norm without affine": (
        lambda: convert_model(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False))),
        lambda output: output.sum(),
    ),
    "mean of a softmax": (
        lambda: convert_model(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Softmax(1))),
        lambda output: output.mean(),
    ),
    "a buffer that each forward writes": (lambda: Apply(write_buffer, last=0.0),),
    "a module that logs": (lambda: Apply(lambda self, x: (self.parts[0](x), x * 1)[1], Apply(mix)),),
    "gates of zeros": (lambda: convert_model(Gated(nn.BatchNorm1d(6))),),
    "two views": (lambda: convert_model(views(nn.BatchNorm1d(8))),),
    "jacrev and vmap": (lambda: Apply(jacobian, nn.Sequential(nn.Linear(6, 6), nn.Tanh())),),
    "functional_call": (lambda: Apply(called_functionally, nn.Linear(6, 6)),),
    "attributes of parameters": (tagged,),
    "compiled": (compiled,),
    "in vmap": (lambda: Apply(lambda self, x: torch.vmap(self.parts[0])(x), nn.Linear(6, 6)),),
    "gradient within forward, without a norm": (
        lambda: Apply(follow_gradient, nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())),
    ),
}


@pytest.mark.parametrize("right", RIGHT)
def test_a_right_model_that_looks_like_a_fault_passes(right):
    build, *loss = RIGHT[right]
    assert_matches_one_device(build(), BATCH, loss=loss[0] if loss else None)


def late(self, x):
    self.step += 1
    return x * 2 if self.step > 100 else x * 1


def test_what_the_wrapper_warns_of_is_left_to_the_training_of_a_model_that_passes():
    assert_matches_one_device(Net(late, step=0), BATCH)
    with pytest.warns(UserWarning, match=r"forward\(\) of Net set step .* of replica 0"):  # in training, as well
        DataParallelWithCallback(Net(late, step=0), ["cpu"] * 2)(BATCH)


LISTS = {
    "numbers": [1.0, 2.0, 3.0, 4.0, 5.0],
    "dicts": [{"number": torch.ones(5) * i} for i in range(5)],
    "dicts of tensors without dimensions": [{"number": torch.ones(()) * i} for i in range(5)],
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_with_an_entry_for_each_sample_that_nobody_named_is_said(kind):
    def forward(self, x, numbers):
        numbers = [float(number["number"].max()) if isinstance(number, dict) else number for number in numbers]
        return torch.stack([row * number for row, number in zip(x, numbers, strict=False)])

    with suppress(TypeError):  # of the wrapper, for tensors without dimensions
        assert_names(
            ["a whole list or tensor as long as the batch: if it lists samples"], Apply(forward), BATCH, LISTS[kind]
        )


def test_tensors_whose_number_is_that_of_the_samples_are_no_list_with_an_entry_for_each():
    text = assert_names([""], Apply(lambda self, x, y: mix(self, x + y)), BATCH[:2], BATCH[:2])
    assert "whole list" not in text


def test_a_list_that_each_replica_gets_whole_is_said():
    numbers = [1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(AssertionError, match=r"which gets .*a whole list or tensor as long as the"):
        assert_matches_one_device(ByNumbers(), BATCH, numbers)
    assert_matches_one_device(wrapped(ByNumbers(), in_dims={"numbers": 0}), BATCH, numbers)
    with pytest.raises(AssertionError, match="a whole list or tensor as long as the"):
        assert_matches_one_device(wrapped(ByNumbers(), in_dims={"numbers": None}), BATCH, torch.tensor(numbers))


def prototypes(self, x, others):
    return (x @ others.T).amax(1)


def add_sums(self, x, tensors):
    return x + torch.stack([tensor.sum() for tensor in tensors])[: len(x), None]


WHOLE = {  # what a replica needs whole, or a list by entries, and of which the wrapper cuts rows; a right `in_dims`
    "prototypes": (prototypes, -BATCH, None, "x @ others.T"),
    "weights": (lambda self, x, weights: x * weights.sum() / weights.mean(), torch.rand(5), None, "weights.sum()"),
    "a list": (add_sums, [torch.rand(5, 2) for _ in range(5)], 0, "tensor.sum()"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_other_samples_are_no_certain_cause_where_rows_of_an_argument_may_be_none(kind):
    forward, value, dim, code = WHOLE[kind]
    text = f"it begins with `{re.escape(code)}` .*; unless in_dims should name an argument whose rows are no samples$"
    inside = Net(lambda self, x: self.net(x, value), net=wrapped(Apply(forward)))
    for model, inputs in ((Apply(forward), (BATCH, value)), (inside, (BATCH,))):
        with pytest.raises(AssertionError, match=text):
            assert_matches_one_device(model, *inputs)
    assert_matches_one_device(wrapped(Apply(forward), in_dims={"args": {1: dim}}), BATCH, value)


def test_a_norm_that_is_called_for_each_sample_is_named_with_both_numbers_of_calls():
    model = Apply(by_sample, nn.BatchNorm1d(2))
    text = (
        "the model itself (Apply)...number of calls of parts.0: 4 on one device, [2, 2] in replicas; if once for "
        "each sample, call it once for all rows, or set its group_size to 1$"
    )
    assert_names([text], convert_model(model), BATCH[:4])


def test_a_recurrent_layer_of_torch_is_not_blamed_where_in_dims_may_name_another_dimension():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.last = nn.GRU(6, 4), nn.Linear(4, 2)

        def forward(self, steps):
            return self.last(self.rnn(steps)[0])

    steps = torch.randn(5, 3, 6)
    text = "(GRU)...depends on other samples of the batch...unless in_dims should name an argument whose rows are no"
    assert_names([text], Steps(), steps)
    assert_matches_one_device(wrapped(Steps(), in_dims={"steps": 1}, out_dims=1), steps)


def test_a_class_of_ones_own_is_not_said_to_synchronize_in_eval_mode():
    model = convert_model(nn.Sequential(nn.Linear(6, 6), InEval(6)), classes={InEval: SynchronizedInEval})
    assert_matches_one_device(model, BATCH)
    assert "never calls" not in assert_names(["1 (SynchronizedInEval)"], model.eval(), BATCH)


class InEval(nn.BatchNorm1d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1)


class SynchronizedInEval(InEval, SynchronizedBatchNorm1d):
    def forward(self, x):
        return SynchronizedBatchNorm1d.forward(self, x)


FILLED = {
    "closure": filled_by_closure,
    "default": filled_by_default,
    "global": lambda: filling(fill_features, FEATURES),
}


@pytest.mark.parametrize("kind", FILLED)
def test_a_hook_that_fills_a_dict_that_is_an_attribute_too_is_named(kind):
    FEATURES.clear()
    model = FILLED[kind]()
    with pytest.raises(KeyError) as caught:
        assert_matches_one_device(model, BATCH)
    assert "hooks that refer to the model" in caught.value.__notes__[1]
    assert "of net (features)" in caught.value.__notes__[1]
    model(BATCH[:2].float())
    text = assert_names(["outputs differ; hooks that refer to the model...of net (features)"], model, BATCH)
    assert "shape" not in text


def test_an_output_with_other_rows_is_told_by_their_number():
    def forward(self, points, batch_size):
        return torch.stack([self.parts[0](part).amax(0) for part in points.chunk(batch_size)])

    text = "outputs have shapes [(3, 4)] on one device, [(6, 4)] in replicas"
    assert "x.mean" not in assert_names([text], Apply(forward, nn.Linear(6, 4)), torch.randn(12, 6), 3, replicas=2)


def test_a_layer_that_forward_makes_is_told_where_to_make():
    def forward(self, x):
        if not hasattr(self, "late"):
            torch.manual_seed(0)
            self.late = nn.Linear(6, 3).to(x)
        return self.late(x)

    text = assert_names(["late.weight is there on one device only; make it in __init__"], Net(forward), BATCH)
    assert "buffer" not in text


def in_packed_order(self, x, lengths):
    x = self.before(self.norm(x.transpose(1, 2)).transpose(1, 2))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return self.after(self.rnn(packed)[1][0])


def in_sorted_order(self, x, lengths):
    order = lengths.argsort(descending=True)
    packed = nn.utils.rnn.pack_padded_sequence(self.before(x)[order], lengths[order], batch_first=True)
    return self.after(self.rnn(packed)[1][0][order.argsort()])


@pytest.mark.parametrize(
    ("forward", "where"),
    [
        (in_packed_order, ""),
        (in_packed_order, "before"),
        (in_packed_order, "after"),
        (in_sorted_order, ""),
        (in_sorted_order, "before"),
        (in_sorted_order, "after"),
        (lambda self, x, lengths: in_packed_order(self, mix(self, x), lengths), "itself"),
    ],
)
def test_a_fault_beside_a_packed_sequence_is_not_that_of_the_rnn(forward, where):
    layers = {name: Apply(mix) if name == where else nn.Identity() for name in ("before", "after")}
    model = convert_model(Net(forward, norm=nn.BatchNorm1d(6), rnn=nn.GRU(6, 4, batch_first=True), **layers))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 5, 6, generator=generator), torch.tensor([2, 5, 3])
    if not where:
        return assert_matches_one_device(model, *inputs)
    name = "the model itself (Net)" if where == "itself" else f"{where} (Apply)"
    assert_names([f"first difference: output of {name}...{LINE}x.mean(0)`"], model, *inputs)


def sort_and_list(self, x, lengths):
    lengths, order = lengths.sort(descending=True)
    return self.parts[0](x)[order], lengths.tolist()


@pytest.mark.parametrize("lengths", [[6, 5, 4, 6, 5], [6, 6, 6, 6, 7]])
def test_a_list_that_is_joined_is_not_said_to_be_that_of_replica_0(lengths):
    parallel = wrapped(convert_model(Apply(sort_and_list, nn.BatchNorm1d(6))), out_dims=(0, 0))
    text = assert_names([""], parallel, BATCH, torch.tensor(lengths))
    assert "replica 0" not in text.replace("in replica 0", "")


class ListOfOutputs(DataParallelWithCallback):
    def gather(self, outputs, output_device):
        return outputs


def mean_of_list(outputs):
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return sum([output.square().mean() for output in outputs]) / len(outputs)


def test_a_loss_of_a_list_that_a_gather_returns_is_not_said_to_depend_on_more():
    parallel = ListOfOutputs(nn.Linear(6, 3), ["cpu"] * 2)
    text = assert_names(["outputs agree, the loss does not: ...own gather"], parallel, BATCH, loss=mean_of_list)
    assert "depends on more" not in text


class ByImages(nn.Module):
    def forward(self, images, targets):
        return torch.stack([image.mean() for image in images]) * len(images) * torch.cat(targets)


def test_a_list_that_is_cut_is_not_said_to_be_whole():
    images, targets = [torch.rand(3, 2, size) for size in (2, 3, 4)], [torch.rand(1) for _ in range(3)]
    with pytest.raises(AssertionError, match=r"it begins with `.*which gets 2 in place of 3") as caught:
        assert_matches_one_device(wrapped(ByImages(), in_dims={"images": 0, "targets": 0}), images, targets)
    assert "whole list" not in str(caught.value)


def test_what_the_wrapper_warns_of_is_a_note_of_an_error():
    with pytest.raises(AssertionError) as caught:
        assert_matches_one_device(ByNumbers(), BATCH[:4], [{"number": torch.ones(8) * i} for i in range(4)])
    (note,) = caught.value.__notes__
    assert note.startswith("The wrapper has warned: numbers, a list, is not cut by its entries")
    with pytest.raises(AssertionError) as caught:
        assert_matches_one_device(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), BATCH)
    assert "does not synchronize in a DataParallelWithCallback:" in caught.value.__notes__[0]


def test_a_check_keeps_no_warning_of_another_thread_and_gets_none():
    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(contextvars.Context().run, DataParallelWithCallback(nn.BatchNorm1d(6), ["cpu"] * 2), x).result()
        return mix(self, x)

    with pytest.warns(UserWarning, match="1 BatchNorm layer in training mode"), pytest.raises(AssertionError) as caught:
        assert_matches_one_device(nn.Sequential(Net(forward, step=0)), BATCH.double())
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("number", range(2, 9))
def test_a_mean_of_each_chunk_is_found_with_twice_the_replicas_less_one_samples(number):
    model = Apply(lambda self, x: self.parts[0](x).square().mean(), nn.Linear(6, 3))
    with pytest.raises(AssertionError, match="the mean weighted by rows is that of one device"):
        assert_matches_one_device(model, torch.randn(2 * number - 1, 6), replicas=number)


def test_equal_chunks_of_scalars_are_warned_of_as_they_hide_a_mean():
    model = Apply(lambda self, x: self.parts[0](x).square().mean(), nn.Linear(3, 3))
    with pytest.warns(
        UserWarning, match="all chunks have 2 rows, .* pass 3 samples, unless those of your training"
    ) as caught:
        assert_matches_one_device(model, VECTORS)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_number_that_all_replicas_return_is_no_mean_of_a_chunk():
    model = Apply(lambda self, x: (self.parts[0](x), self.parts[0].weight.sum()), nn.Linear(3, 3))
    assert_matches_one_device(model, VECTORS)


def test_without_a_loss_the_numbers_are_those_that_the_module_returns():
    model = Apply(lambda self, x: self.parts[0](x).square().mean(), nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    expected = copy.deepcopy(model)(BATCH).item()
    with pytest.raises(AssertionError, match=f"one device returns {expected:.5g}"[:-2]):
        assert_matches_one_device(convert_model(model), BATCH)


def losses(self, x):
    """Return the loss of each sample, of what a norm makes of a fault before it."""
    return self.last(self.norm(mix(self, self.first(x))).relu()).square().mean(1)


BEFORE_A_LOSS = {  # a model that returns its loss, or what makes it, and options; what is said, and what is not
    "sums and counts": (
        lambda self, x: (losses(self, x).sum(), x.new_tensor(len(x))),
        {"loss": lambda output: output[0].sum() / output[1].sum()},
        "or something before it mixes samples: what norm (SynchronizedBatchNorm1d) gets differs, too",
        "return these",
    ),
    "a mean": (
        lambda self, x: losses(self, x).mean(),
        {},
        "divide outside, see...; or something before it mixes samples: what norm (SynchronizedBatchNorm1d) gets",
        "take their mean",
    ),
    "behind the last module": (
        lambda self, x: mix(self, self.last(self.norm(self.first(x)))).square().mean(),
        {},
        "return these, and divide outside, see...; or something before it mixes samples; replicas with [3, 2] rows",
        "gets differs",
    ),
}


@pytest.mark.parametrize("kind", BEFORE_A_LOSS)
def test_a_loss_that_no_sum_explains_may_follow_a_fault_before_it(kind):
    forward, options, text, never = BEFORE_A_LOSS[kind]
    layers = {"first": nn.Linear(6, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 3)}
    model = convert_model(Net(forward, **layers))
    assert never not in assert_names([text], model, BATCH, **options)
    inside = Apply(lambda self, x: self.parts[0](x), wrapped(model))
    assert never not in assert_names([text.replace("what norm", "what parts.0.module.norm")], inside, BATCH, **options)


def detect(self, images):
    size = max(image.shape[-1] for image in images)
    batch = torch.stack([F.pad(image, (0, size - image.shape[-1])) for image in images])
    return self.parts[0](batch).square().mean((1, 2, 3)).mean()


def test_a_loss_of_images_that_are_padded_within_their_chunk_is_one_of_padding():
    images = [torch.rand(3, 4, size) for size in (4, 9, 6, 7, 5)]
    parallel = wrapped(convert_model(Apply(detect, nn.Conv2d(3, 4, 1))), in_dims={"args": {0: 0}})
    text = (
        "; or pad the entries of the list to one size outside, if forward() pads them to the largest of its chunk: "
        "what parts.0 (Conv2d) gets differs, too"
    )
    assert "divide outside" not in assert_names([text], parallel, images)


def test_a_loss_that_uses_parameters_of_the_user_leaves_no_gradient_on_them():
    model, judge = nn.Linear(6, 3), nn.Linear(3, 1)
    judge.weight.grad = torch.ones(1, 3)
    assert_matches_one_device(
        model, BATCH, loss=lambda output: judge(output).mean() + sum(p.square().sum() for p in model.parameters())
    )
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    assert judge.bias.grad is None
    assert torch.equal(judge.weight.grad, torch.ones(1, 3))


class OnlyFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype != torch.float32:
            raise NotImplementedError("'only' not implemented for 'Double'")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_an_operator_without_float64_is_checked_in_float32():
    right = convert_model(Apply(lambda self, x: self.parts[0](OnlyFloat32.apply(x)), nn.BatchNorm1d(6)))
    with pytest.raises(NotImplementedError) as caught:
        assert_matches_one_device(right, BATCH)
    assert any("pass dtype=torch.float32" in note for note in caught.value.__notes__)
    assert_matches_one_device(right, BATCH, dtype=torch.float32)
    wrong = nn.Sequential(right, Apply(mix))
    with pytest.raises(AssertionError, match=r"output of 1 \(Apply\).*begins with `x.mean\(0\)`"):
        assert_matches_one_device(wrong, BATCH, dtype=torch.float32)


def test_in_float32_a_gradient_below_a_millionth_of_the_largest_one_is_rounding():
    def net(layer):
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), layer, nn.Linear(8, 2)
        return convert_model(nn.Sequential(*layers))

    torch.manual_seed(0)
    right = net(quietly(torch.jit.script, nn.Sequential(nn.Linear(8, 8), nn.Tanh())))
    for dtype in (torch.float32, torch.float64):
        assert_matches_one_device(right, BATCH, dtype=dtype)
        wrong = net(Apply(lambda self, x: MeanInBackward.apply(x)))
        assert_names(["the first gradient that differs"], wrong, BATCH, dtype=dtype)


def in_dicts(self, inputs, kwargs, device_ids):
    return [({"x": x},) for x in inputs[0].chunk(len(device_ids))], [{}] * len(device_ids)


def number_first(self, inputs, kwargs, device_ids):
    return [(inputs[0], x) for x in inputs[1].chunk(len(device_ids))], [{}] * len(device_ids)


def by_name(self, inputs, kwargs, device_ids):
    return [()] * len(device_ids), [{"x": x} for x in kwargs["x"].chunk(len(device_ids))]


SCATTERS = {
    "dicts": (in_dicts, (BATCH,), {}, lambda self, batch: self.parts[0](batch["x"])),
    "a number first": (number_first, (2.0, BATCH), {}, lambda self, number, x: number * self.parts[0](x)),
    "keyword arguments only": (by_name, (), {"x": BATCH}, lambda self, x: self.parts[0](x)),
}


@pytest.mark.parametrize("kind", SCATTERS)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_scatter_of_any_shape_is_used(kind, is_right):
    scatter, inputs, kwargs, forward = SCATTERS[kind]
    cls = type("Own", (DataParallelWithCallback,), {"scatter": scatter})
    parallel = cls(convert_model(Apply(forward, nn.BatchNorm1d(6) if is_right else Apply(mix))), ["cpu"] * 2)
    if is_right:
        return assert_matches_one_device(parallel, *inputs, kwargs=kwargs)
    with pytest.raises(AssertionError, match=r"parts\.0|the model itself"):
        assert_matches_one_device(parallel, *inputs, kwargs=kwargs)


OF_TORCH = {
    "gather": lambda self, outputs, device: gather(outputs, device),
    "scatter": lambda self, inputs, kwargs, devices: scatter_kwargs(inputs, kwargs, devices, dim=self.dim),
}


@pytest.mark.parametrize("step", OF_TORCH)
def test_a_step_that_calls_that_of_torch_is_named(step):
    parallel = type("Own", (DataParallelWithCallback,), {step: OF_TORCH[step]})(nn.Linear(6, 6), ["cpu"] * 2)
    for model in (parallel, nn.Sequential(parallel)):
        with pytest.raises(RuntimeError, match=rf"your {step} calls that of torch.*call super\(\).{step}\("):
            assert_matches_one_device(model, BATCH)


class Result:
    def __init__(self, scores):
        self.scores = scores


GATHERED = {  # what a gather of one's own makes of the scores; which class cannot be looked into
    "object": (Result, "output of class Result"),
    "object beside a tensor": (
        lambda scores: {"a": scores, "b": [Result(scores)]},
        r"output\['b'\]\[0\] of class Result",
    ),
    "object in an object": (lambda scores: Result(Result(scores)), "output of class Result"),
    "array": (lambda scores: scores.detach().numpy(), "output of class ndarray"),
    "dataclass": (lambda scores: Batch(scores), None),
    "number": (lambda scores: len(scores), None),
}


@pytest.mark.parametrize("kind", GATHERED)
def test_an_output_that_cannot_be_looked_into_is_refused_unless_a_loss_does(kind):
    make, text = GATHERED[kind]
    cls = type("Own", (DataParallelWithCallback,), {"gather": lambda self, outputs, device: make(torch.cat(outputs))})
    right, wrong = (
        cls(convert_model(nn.Sequential(nn.BatchNorm1d(6), *more)), ["cpu"] * 2) for more in ([], [Apply(mix)])
    )
    for parallel in (right, wrong) if text else ():
        with pytest.raises(TypeError, match=f"expected outputs to compare, but got {text}.*or pass a `loss`"):
            assert_matches_one_device(parallel, BATCH)
    if not text:
        assert_matches_one_device(right, BATCH)
    if make is Result:
        loss = lambda result: result.scores.square().mean()  # noqa: E731
        assert_matches_one_device(right, BATCH, loss=loss)
        with pytest.raises(AssertionError, match=r"output of 1 \(Apply\)"):
            assert_matches_one_device(wrong, BATCH, loss=loss)


def test_objects_that_no_gather_takes_are_an_error_of_replicas():
    with pytest.raises(AssertionError, match=r"not in replicas: TypeError: .* got Result"):
        assert_matches_one_device(Apply(lambda self, x: Result(x)), BATCH)


class ScalesInput(DataParallelWithCallback):
    def forward(self, x):
        return super().forward(x * 2) + 1


class KnowsDevices(DataParallelWithCallback):
    def forward(self, x):
        return super().forward(x) - 3 * len(self.device_ids)


def test_a_forward_of_the_wrapper_is_used():
    assert_matches_one_device(ScalesInput(convert_model(nn.BatchNorm1d(6)), ["cpu"] * 2), BATCH)
    with pytest.raises(AssertionError, match="your wrapper has its own forward, which the check has used"):
        assert_matches_one_device(KnowsDevices(convert_model(nn.BatchNorm1d(6)), ["cpu"] * 2), BATCH)


def test_a_forward_of_the_wrapper_may_cut_the_batch_in_another_way():
    class Unpacks(DataParallelWithCallback):
        def forward(self, batches):
            return super().forward(batches[0])

    assert_matches_one_device(Unpacks(convert_model(nn.BatchNorm1d(6)), ["cpu"] * 2), BATCH[None])
    with pytest.raises(AssertionError, match=r"outputs differ, .*own forward"):
        assert_matches_one_device(Unpacks(Apply(mix), ["cpu"] * 2), BATCH[None])


def test_a_wrapper_keeps_its_attributes_and_modules_in_the_check():
    def forward(self, x):
        return self.head(DataParallelWithCallback.forward(self, x)) * self.factor

    cls = type("Headed", (DataParallelWithCallback,), {"forward": forward, "factor": 2})
    parallel = cls(nn.Linear(6, 6), ["cpu"] * 2)
    parallel.head, parallel.factor = nn.Linear(6, 2).double(), 3
    assert_matches_one_device(parallel, BATCH)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_replica_that_returns_no_number_is_named(value):
    model = Apply(lambda self, x: x.sum() if len(x) != 2 else x.sum() * (value or float("inf")))
    with pytest.raises(AssertionError, match=r"rows return .*(nan|inf)"):
        assert_matches_one_device(model, BATCH.abs())


def test_hard_mining_within_the_chunk_is_evidence_and_no_advice_to_weight():
    model = Apply(lambda self, x: self.parts[0](x).square().sum(1).topk(2).values.mean(), nn.Linear(6, 3))
    with pytest.raises(AssertionError, match="no sum or mean of what replicas return is that of one device") as caught:
        assert_matches_one_device(model, BATCH)
    assert "weight them" not in str(caught.value)
