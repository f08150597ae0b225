"""`assert_matches_one_device` names each planted fault with its cause and line, and speaks of nothing else."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections import deque
from functools import partial
from types import MethodType

import numpy
import pytest
import torch
import torch.nn.functional as F
from checked import (
    BATCH,
    IMAGES,
    VECTORS,
    Apply,
    Batch,
    MeanInBackward,
    Result,
    Stop,
    assert_names,
    average_gradient,
    behind,
    bind,
    follow_gradient,
    gated,
    hide,
    mean_square,
    mix,
    of_class,
    quietly,
    tower,
    try_first,
    views,
    with_hook,
    with_norm,
    wrapped,
)
from conftest import first_in_smoke
from helpers import Net
from torch import nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import convert_model


class DropPath(Net):
    """A copy of the class of timm, as many projects have one."""


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return normalize(self, x)


class BatchNorm1d(OwnNorm):
    pass


# Forwards of several statements.


def normalize(self, x):
    return F.batch_norm(x, None, None, training=True)


def run_once(self, x, norm):
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 1:
        raise RuntimeError("is called again")
    return norm(x) * x.mean()


def log(self, x):
    self.largest = x.max().item()
    order = x.sum(1).argsort()
    sorted_rows = x[order] * 2
    return sorted_rows[order.argsort()] / x.abs().max(0).values


def softmax_on_several_lines(self, x):
    return x * torch.softmax(
        x,
        dim=0,
    )


def add_in_a_loop(self, x):
    total = torch.zeros(6)
    for row in x:
        total = total + row
    return x - total


def route_and_mix(self, x):
    output = torch.zeros_like(x)
    for expert, is_mine in ((1, x[:, 0] > 0), (2, x[:, 0] <= 0)):
        index = is_mine.nonzero().flatten()
        output[index] += expert * x[index]
    return output - output.mean(0)


def clear_row_in_place(self, x):
    x = x * 1
    x[0] = 0.0
    return x


def deal_out(self, x):
    rows = []
    for row in x:
        rows.append(self.parts[self.turn % 2](row))
        self.turn += 1
    return torch.stack(rows)


def set_momentum(self, x):
    self.step += 1
    self.norm.momentum = 0.5 / self.step
    return self.norm(x)


def count_steps(self, x):
    """Scale by a count what the next layer normalizes, so that outputs differ less than the check looks at."""
    self.step += 1
    return self.norm(self.linear(x) * (1 + 1e-3 * self.step))


def change_parameter(self, x):
    with torch.no_grad():
        self.scale.mul_(0.5).add_(1.0)
    return x * 1


def make_layer(self, x):
    if not hasattr(self, "late"):
        torch.manual_seed(0)
        self.late = nn.Linear(6, 3).to(x)
    return self.late(x)


def penalty(self, x):
    """Return a gradient of a mean, which divides by the rows of the chunk."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(self.parts[0](x).mean(), x, create_graph=True)[0]


def go_backward(self, x):
    output = self.parts[0](x)
    output.square().mean().backward(retain_graph=True)
    self.zero_grad()
    return output * 1


def bind_scale(self, x):
    self.scale = x[:1].detach() * 0 + 2
    return self.net(x)


def setattr_(holder, **values):
    """Set attributes in an expression, and return their holder."""
    for name, value in values.items():
        setattr(holder, name, value)
    return holder


def detach_if(condition, x):
    return x.detach() if condition else x


def raise_it(error):
    raise error


def keep(self, module, args, output):
    self.features = output.detach().mean()


def keep_gradient(self, module, grad_input, grad_output):
    self.level = 1 + float(grad_output[0].norm())


def scale_output(self, module, args, output):
    return output * self.scale.to(output.dtype)


def pad(self, x):
    return F.pad(x, (0, int(x.max() * 9)))


def add_total(self, x):
    return x[:, :6] + x.sum(1, keepdim=True)


def run_net(self, x):
    return self.net(x * 1)


def add_features(self, x):
    return self.net(x) + self.features


def by_sample(self, x):
    return torch.stack([self.parts[0](row.reshape(3, 2)) for row in x])


def two_losses(self, x):
    return {"rows": x.square().mean(1), "divided": (x.square().mean(1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum()}


def losses(self, x):
    """Return the loss of each sample, of what a norm makes of a fault before it."""
    return self.last(self.norm(mix(self, self.first(x))).relu()).square().mean(1)


# Builders of models with a fault.


def residual(scale, *branch):
    """Return a residual block whose branch has a last scale."""

    def forward(self, x):
        return x + self.scale * self.branch(x)

    return Net(forward, branch=nn.Sequential(*branch), scale=nn.Parameter(torch.full((1,), scale)))


def around_norm(forward):
    """Return a net with a norm between two other layers."""
    layers = {"first": nn.Linear(6, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 3)}
    return convert_model(Net(forward, **layers))


def before_norm(function):
    """Return a net that does something in its own forward, before a norm."""
    return around_norm(lambda self, x: self.last(self.norm(function(self.first(x)))))


def between(function):
    """Return a net for images, with a module between others that are right."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Apply(function), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)]
    return convert_model(nn.Sequential(*layers))


def hooked(hook, forward, kind="forward_hook", **attributes):
    """Return a net with a hook that is its method."""
    model = of_class(forward, **attributes)
    with_hook(model.net, MethodType(hook, model), kind)
    return model


def nets_that_begin_equal():
    net = nn.Linear(6, 6)
    return Apply(lambda self, x: x + mix(self, self.parts[0](x) - self.parts[1](x)), net, copy.deepcopy(net))


def mixing(*others):
    return nn.Sequential(Apply(mix), *others)


def lstm(**options):
    return Apply(lambda self, x: self.parts[0](x)[0], nn.LSTM(6, 6, 2, **options))


def attend(*args, **options):
    return Apply(lambda self, x: F.scaled_dot_product_attention(x, x, x, *args, **options))


def passing(make, use):
    """Return a model whose submodule mixes samples, and gets them in another object."""
    return Apply(lambda self, x: self.parts[0](make(x)), Apply(lambda self, held: mix(self, use(held))))


def keeping(kept, update, use):
    """Return a net that uses what it keeps on itself, and then updates it."""

    def forward(self, x):
        output = use(x, self.kept)
        self.kept = update(self.kept, x.detach())
        return output

    return convert_model(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Net(forward, kept=kept)))


def hooked_by_closure(by_name):
    def keep(module, args, output):
        model.features = output

    model = of_class(add_features)
    with_hook(model.net, (lambda module, args, output: setattr(model, "features", output)) if by_name else keep)
    return model


def labelled(**options):
    """Return a model that computes its loss."""
    return Apply(lambda self, x, labels: F.cross_entropy(self.parts[0](x), labels, **options), nn.Linear(3, 3))


def in_function(backward, columns=6):
    cls = type("Own", (MeanInBackward,), {"backward": staticmethod(backward)})
    return Apply(lambda self, x: cls.apply(self.parts[0](x)), nn.Linear(columns, 2))


def with_tensor_hook(hook):
    return Apply(lambda self, x: (hidden := self.parts[0](x), hidden.register_hook(hook))[0], nn.Linear(6, 6))


def loss_with_state(change):
    """Return a loss that changes by this much, relative to the first, at each call."""
    calls = itertools.count()
    return lambda output: output.sum() * (1 + change * next(calls))


# Rows of the table: tests without arguments.


def fault(model, text, *inputs, **options):
    return partial(assert_names, text, model, *inputs, **options)


def around(forward, text, replica=0):
    """Return a test of a module between others, with images."""
    where = f"first difference: output of 2 (Apply), in replica {replica}, by "
    return fault(lambda: between(forward), f"{where}...{text}", IMAGES)


def before(function, text):
    """Return a test of a parent that does something before a norm, which is not blamed."""
    return fault(lambda: before_norm(function), f"of the model itself (Net)...{text}", never="norm")


def lost(kept, update, use, in_pass=2):
    """Return a test of an attribute that forward assigns."""
    return fault(lambda: keeping(kept, update, use), f"in pass {in_pass}: ...2.kept differs from")


def changed(kept, update, use):
    """Return a test of an object in an attribute that forward changes."""
    return fault(lambda: keeping(kept, update, use), "of 2 (Net)...2.kept changed in this pass")


def differs(text, model, *inputs, **options):
    """Return a test of a gradient that differs."""
    what = "outputs and loss agree; the first gradient that differs, in the order of the backward pass, is that of"
    return fault(model, f"{what} {text}", *inputs, **options)


ITSELF = "first difference: output of the model itself"
LINE = "it begins with `"
GETS = "it begins with `...`..., which gets "
WAY = "it goes another way: "
OTHERS = "what it returns for a sample depends on other samples of the batch"
RANDOM = "`...: it draws random numbers, which differ in replicas, and may be meant to"
SEEDED = "it draws the same random numbers in each replica, because of a seed or a generator of its own"
VARIES = "look for state, a generator of its own, or the time"
PLAIN = "a batch norm that is not synchronized; call convert_model(model)"
CALLS = "it calls F.batch_norm, or a batch norm that is no submodule; make it an attribute, and convert the model$"
OWN = "a batch norm that convert_model leaves as it is: it has a forward of its own; write class"
AUTOGRAD = "it calls torch.autograd.grad, which in a replica sees only its chunk"
BACKWARD = "forward() calls backward(), which in a replica adds to the gradients of the model; call it outside"
STATE = "outputs, loss and gradients agree; the buffer"
IN_PLACE = "only what replica 0 writes into it in place stays, from its own chunk; update it outside the"
ROWS = "return a row for each sample"
FAILS = "runs on one device, but not in replicas: "
HOOKS = "hooks that refer to the model"
DIVIDE = "compute it from the gathered output, or, if it divides sums, return these, and divide outside"
SEE = 'see the page "Where to compute the loss"'
NO_MEAN = f"no sum or mean of what replicas return is that of one device; {DIVIDE}, {SEE}"
WEIGHTED = "the loss differs: ...the mean weighted by rows is that of one device; weight them by...[3, 2] rows return"
BEFORE = "; or something before it mixes samples"
LABELS = torch.tensor([0, 1, 2, 2])
SCRIPT = quietly(torch.jit.trace, lambda x: x - x.mean(0), BATCH)

FAULTS = {
    # Samples are mixed in the forward of the model.
    "softmax by hand": fault(lambda self, x: (exp := (x - x.max()).exp()) / exp.sum(0), f"{LINE}exp.sum(0)`"),
    "several lines": fault(softmax_on_several_lines, f"{LINE}torch.softmax( x, dim=0, )`"),
    "behind a right difference": fault(log, f"{LINE}x.abs().max(0)`"),
    "sum in a loop": fault(add_in_a_loop, f"{LINE}total + row`...which runs 3 times in place of 5"),
    "index in a loop": fault(
        lambda self, x: torch.stack([row * i for i, row in enumerate(x)]),
        f"{LINE}row * i`...which gets 0 in place of 3",
    ),
    "loop over samples": before(lambda h: torch.stack([row.tanh() for row in h - h.mean(0)]), f"{LINE}h.mean(0)`"),
    "shifted rows": fault(lambda self, x: x + F.pad(x[1:], (0, 0, 0, 1)), f"{LINE}x[1:]`"),
    "pairs": fault(lambda self, x: (x @ x.T).sum(1), f"{LINE}x @ x.T`...two dimensions of which are samples"),
    "behind a selection": fault(lambda self, x: x - x[x[:, 0] > 0].mean(0), f"{LINE}x[x[:, 0] > 0].mean(0)`"),
    "behind a router": fault(route_and_mix, f"{LINE}output.mean(0)`"),
    "row in place": fault(clear_row_in_place, f"{LINE}x[0] = 0.0`"),
    "number in place": fault(lambda self, x: (x * 1).div_(len(x)), f"{LINE}(x * 1).div_(len(x))`...3 in place of 5"),
    "mean by hand": fault(lambda self, x: x - sum(x.unbind()) / len(x), f"{ITSELF}...{LINE}"),
    "complex": fault(lambda self, x: torch.complex(x, x - x.mean(0)), f"{LINE}x.mean(0)`"),
    "infinite": fault(lambda self, x: x / (len(x) - 3), f"{ITSELF}...only one of them is finite: {GETS}"),
    "beside others that are not finite": fault(
        lambda self, x: torch.stack([torch.full_like(x, y) for y in (math.nan, math.inf, -math.inf, len(x) / 8)], 1),
        f"{ITSELF} (Apply), in replica 0, by 0.4 of its largest value: {GETS}",
    ),
    "frozen F.batch_norm": fault(
        lambda self, x: mix(self, F.batch_norm(x, torch.zeros(6), torch.ones(6))), f"{LINE}x.mean(0)`", never="batch_n"
    ),
    "copy that begins equal": fault(nets_that_begin_equal, f"{ITSELF}...{LINE}x.mean(0)`"),
    # Before, around and beside norms.
    "cumsum before a norm": before(lambda h: h.cumsum(0), f"{LINE}h.cumsum(0)`"),
    "arange before a norm": before(lambda h: h + torch.arange(len(h))[:, None], f"{LINE}torch.arange(len(h))`"),
    "branch before a norm": before(lambda h: h * 2 if len(h) < 3 else h, f"{WAY}replica 1 runs `h * 2` ("),
    "number drawn and not used": before(lambda h: (torch.rand(1), h - h.mean(0))[1], f"{LINE}h.mean(0)`"),
    "around a norm": fault(convert_model(Apply(lambda self, x: self.parts[0](x) * len(x), nn.BatchNorm1d(6))), GETS),
    # Between others that are right.
    "mean": around(mix, f"{LINE}x.mean(0)`"),
    "length of the second chunk": around(lambda self, x: x * (2 if len(x) == 2 else 1), GETS, replica=1),
    "arange": around(lambda self, x: x + torch.arange(len(x)).reshape(-1, 1, 1, 1), f"{LINE}torch.arange(len(x))`", 1),
    "attribute of replicas": around(lambda self, x: x * [3, 2][hasattr(self, "_is_replica")], "gets 2 in place of 3"),
    "branch": around(lambda self, x: x * x.ndim if len(x) > 2 else x, f"{WAY}one device runs `x * x.ndim`", replica=1),
    "branch in place": around(lambda self, x: x.clone().add_(1.0) if len(x) > 2 else x, WAY, replica=1),
    "random numbers": around(lambda self, x: x + torch.rand_like(x), f"{LINE}torch.rand_like(x){RANDOM}"),
    # In a module of the model.
    "two views": fault(lambda: views(Apply(mix)), f"of net.1 (Apply)...{LINE}"),
    "behind a log": fault(
        lambda: Apply(
            lambda self, x: (self.parts[0](x), self.parts[1](self.parts[2](x)))[1],
            *(Apply(lambda self, x: x.mean(0)), Apply(mix), nn.Linear(6, 6)),
        ),
        f"of parts.1 (Apply)...{LINE}",
        never="parts.0",
    ),
    "gates of zeros": fault(lambda: gated(Apply(mix)), f"of inside (Apply)...{LINE}"),
    "behind a zero": fault(lambda: residual(0.0, nn.Linear(6, 6), Apply(mix)), f"of branch.1 (Apply)...{LINE}"),
    "before a frozen norm": fault(
        residual(0.0, Apply(mix), convert_model(nn.BatchNorm1d(6)).requires_grad_(False)),
        f"of branch.0 (Apply)...{LINE}",
    ),
    "behind similarities": fault(
        nn.Sequential(Apply(lambda self, x: x @ x.T), Apply(lambda self, x: x.softmax(1)[:, :1])),
        f"of 1 (Apply)...{LINE}",
    ),
    "second call": fault(
        Apply(lambda self, x: self.parts[0](self.parts[0](x), 1), Apply(lambda self, x, k=0: x + k * x[0])),
        f"of parts.0 (Apply, call 2)...{LINE}",
    ),
    "forward set": fault(lambda: nn.Sequential(setattr_(nn.ReLU(), forward=lambda x: x.flip(0))), f"{LINE}x.flip(0)`"),
    "beside a backward hook": fault(
        nn.Sequential(with_hook(Apply(mix), lambda *_: None, "full_backward_hook")),
        f"of 0 (Apply)...{LINE}x.mean(0)` (checked.py, line {mix.__code__.co_firstlineno + 1}, in mix)$",
    ),
    "hook of a module": fault(with_hook(nn.ReLU(), lambda module, args, y: y - y.mean(0)), f"{LINE}y.mean(0)`"),
    "in a checkpoint": fault(
        Apply(lambda self, x: checkpoint(self.parts[0], x, use_reentrant=False), Apply(mix)),
        f"of parts.0 (Apply)...{LINE}",
    ),
    "vmap, by rows": fault(lambda self, x: torch.vmap(torch.sub, in_dims=(0, None))(x, x.mean(0)), f"{LINE}x.mean(0)`"),
    "beside a call that was stopped": fault(
        Apply(
            lambda self, x: mix(self, self.parts[1](try_first(self, x))),
            *(nn.Sequential(nn.ReLU(), Apply(lambda self, x: raise_it(Stop))), nn.ReLU()),
        ),
        f"{ITSELF}...{OTHERS}",
    ),
    "branch behind a call that was stopped": fault(
        Apply(
            lambda self, x: x * 2 if len(try_first(self, x)) > 2 else x,
            Apply(lambda self, x: raise_it(StopAsyncIteration)),
        ),
        f"{ITSELF}...{WAY}",
    ),
    "call in replicas": fault(Apply(lambda self, x: self.parts[0](x) if len(x) < 5 else x * 1, nn.Softmax(0)), WAY),
    "not finite": fault(lambda self, x: x if len(x) == 5 else x * math.nan, f"{ITSELF}...{WAY}"),
    "one of two outputs": fault(lambda self, x: {"right": x * 1, "wrong": x - x.mean(0)}, "output['wrong'] of the"),
    "one of a list of outputs": fault(
        nn.Sequential(Apply(lambda self, x: mix(self, x).unbind()), Apply(lambda self, x: torch.stack(x))),
        f"first difference: output[0] of 0 (Apply), in replica 0, by...{LINE}x.mean(0)` (checked.py",
    ),
    # No line is certain.
    "module of torch": fault(lambda: behind(nn.Softmax(0)), f"output of 1 (Softmax)...{OTHERS}", never=LINE),
    "module of torch alone": fault(nn.Softmax(0), OTHERS, never="line", loss=lambda output: output.square().mean()),
    "module of torch with a hook": fault(wrapped(with_hook(nn.Softmax(0), lambda *_: None)), OTHERS, never="line"),
    "script": fault(lambda self, x: SCRIPT(x), f"{ITSELF}...{OTHERS}", never=LINE),
    "in vmap": fault(lambda self, x: torch.vmap(lambda y: y - y.mean(), 1, 1)(x), f"{ITSELF}...{OTHERS}", never=LINE),
    "call of a module of torch": fault(
        lambda: Net(lambda self, x: self.rnn(x[:, None])[0][:, 0], rnn=nn.GRU(6, 6)),
        f"`self.rnn(x[:, None])`...{OTHERS}; unless in_dims should name an argument whose rows are no",
    ),
    "layers in turn": fault(
        lambda: Net(deal_out, parts=nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), turn=0),
        f"{ITSELF}...turn changed in this pass",
        never=LINE,
    ),
    # Arguments of other kinds.
    "list of samples": fault(passing(list, torch.stack), f"of parts.0 (Apply)...{LINE}"),
    "dataclass": fault(passing(Batch, lambda batch: batch.x), f"of parts.0 (Apply)...{LINE}"),
    "dict with other keys": fault(passing(lambda x: {len(x): x}, lambda of: sum(of.values())), f"{ITSELF}...{OTHERS}"),
    "list that is used up": fault(passing(lambda x: [x], lambda xs: xs.pop()), f"of parts.0 (Apply)...{LINE}"),
    "number in place of a tensor": fault(
        Apply(lambda self, x: self.parts[0](x, x if len(x) < 5 else 1), Apply(lambda self, x, by: x * by)),
        f"{ITSELF}...{GETS}",
    ),
    "argument that is no tensor": fault(
        Apply(lambda self, x: self.parts[0](x, len(x)), Apply(lambda self, x, number: x / number)), f"{ITSELF}...{GETS}"
    ),
    # Random numbers, and dropout, which is switched off.
    "Python's random": fault(lambda self, x: x * 1e-8 * random.random(), f"`x * 1e-8 * random.random(){RANDOM}"),
    "NumPy's random numbers": fault(lambda self, x: x + torch.from_numpy(numpy.random.rand(len(x), 6)), RANDOM),
    "seed": fault(lambda self, x: torch.manual_seed(0) and x + torch.rand_like(x), f"`torch.rand_like(x)`...{SEEDED}"),
    "own seed": fault(lambda self, x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0)), SEEDED),
    "own generator": fault(Net(lambda self, x: x + torch.randn(6, generator=self.own), own=torch.Generator()), VARIES),
    "time": fault(lambda self, x: x * (time.perf_counter_ns() % 1000), f"{ITSELF}...{VARIES}", never="random numbers"),
    "dropout by hand": fault(Net(lambda self, x: x * (torch.rand_like(x) < self.p), p=0.5), RANDOM, never="dropout"),
    "dropout by hand, and a mix": fault(
        Net(lambda self, x: x * torch.bernoulli(torch.full_like(x[:, :1], self.p)) + x.mean(0), p=0.5),
        f"{ITSELF}...{LINE}",
    ),
    "backdrop, and drop_prob of a class that is not known": fault(
        Net(lambda self, x: x - self.drop_prob * self.backdrop * x.mean(0), backdrop=0.5, drop_prob=0.5),
        f"{LINE}x.mean(0)`",
        never="dropout",
    ),
    "in place, behind dropout": fault(
        lambda: nn.Sequential(
            *(nn.Linear(6, 6), nn.Dropout(), Apply(lambda self, x: x.sub_(x.mean(0)))),
            DropPath(lambda self, x: x * (1 - self.drop_prob), drop_prob=0.5),
        ),
        f"of 2 (Apply)...{LINE}x.mean(0)` (...; compared with dropout switched off: 3.drop_prob, dropout",
    ),
    "random numbers beside dropout": fault(
        nn.Sequential(Apply(lambda self, x: x + torch.rand_like(x)), nn.Dropout()), "of 0 (Apply)", never="dropout"
    ),
    "no dropout": fault(lambda: mixing(lstm(), attend(), attend(None, 0.0, True)), "of 0 (Apply)", never="dropout"),
    "dropout of a layer": fault(mixing(nn.Dropout()), "of 0 (Apply)...dropout"),
    "dropout of a function": fault(mixing(Apply(lambda self, x: F.dropout(x))), "of 0 (Apply)...dropout"),
    "dropout of an LSTM": fault(lambda: mixing(lstm(dropout=0.5)), "of 0 (Apply)...dropout"),
    "dropout, by position": fault(mixing(attend(None, 0.5)), "of 0 (Apply)...dropout"),
    # Norms.
    "plain norm": fault(
        lambda: nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), wrapped(nn.BatchNorm2d(4)))),
        *(f"of 1.module (BatchNorm2d)...{PLAIN}", IMAGES),
    ),
    "plain norm of two views": fault(lambda: views(nn.BatchNorm1d(8)), f"of net.1 (BatchNorm1d)...{PLAIN}"),
    "plain norm behind a small scale": fault(
        lambda: nn.Sequential(residual(1e-9, nn.BatchNorm1d(3)), nn.Linear(3, 1)),
        *(f"of 0.branch.0 (BatchNorm1d)...{PLAIN}", VECTORS - VECTORS.mean(0)),
        loss=lambda output: (output - output.detach().mean()).mean() * 1e6,
    ),
    "norm in a plain list": fault(Net(lambda self, x: self.hidden[0](x), hidden=[nn.BatchNorm1d(6)]), CALLS),
    "norm of one's own": fault(lambda: behind(OwnNorm(6)), f"of 1 (OwnNorm)...{OWN} SynchronizedOwnNorm(OwnNorm, "),
    "norm with a name of torch's": fault(
        lambda: behind(BatchNorm1d(6)),
        f"of 1 ({__name__}.BatchNorm1d)...{OWN} MySynchronizedBatchNorm1d({__name__}.BatchNorm1d, "
        "SynchronizedBatchNorm1d), in which SynchronizedBatchNorm1d.forward computes the norm, and call "
        f"convert_model(model, classes={{{__name__}.BatchNorm1d: MySynchronizedBatch",
    ),
    "group": fault(
        convert_model(nn.BatchNorm1d(6), group_size=2),
        f"{ITSELF} (SynchronizedBatchNorm1d)...with its group_size of 2, groups of so many of the 4 replicas normalize",
        BATCH[:4],
        replicas=4,
    ),
    "class that synchronizes": fault(
        lambda: with_norm(lambda self, x, norm: F.dropout(norm(x) * x.mean())),
        f"of 0 (SynchronizedOwn)...{LINE}x.mean()`",
    ),
    "class that never synchronizes": fault(
        lambda: with_norm(lambda self, x, norm: normalize(self, x)),
        "of 0 (SynchronizedOwn)...its forward never calls that of SynchronizedBatchNorm1d; call",
    ),
    "class with another formula": fault(
        lambda: with_norm(lambda self, x, norm: self.weight * x / x.square().mean(0).add(self.eps).sqrt(), lambda y: y),
        "SynchronizedOwn computes something else than Own, which it replaces, on one device, too; for another formula",
    ),
    "class that cannot run again": fault(lambda: with_norm(run_once), "(SynchronizedOwn)...0.calls changed in this"),
    "norm called for each sample": fault(
        convert_model(Apply(by_sample, nn.BatchNorm1d(2))),
        f"{ITSELF} (Apply)...number of calls of parts.0: 4 on one device, [2, 2] in replicas; if once for each sample, "
        "call it once for all rows, or set its group_size to 1$",
        BATCH[:4],
    ),
    # What forward keeps on itself.
    "None at first": lost(None, lambda k, x: x[0] * 0, lambda x, k: x * (1 + (k is None))),
    "number in the third pass": lost(0, lambda k, x: k + 1, lambda x, k: x if k < 2 else x * 2, in_pass=3),
    "list": changed([], lambda k, x: k.append(x.sum()) or k, lambda x, k: x + sum(k)),
    "queue": changed(deque(maxlen=3), lambda k, x: k.append(0) or k, lambda x, k: x * (1 + len(k))),
    "counter, and a mix": fault(Net(lambda self, x: mix(self, x) * setattr_(self, n=self.n + 1).n, n=0), LINE),
    "momentum": fault(
        convert_model(Net(set_momentum, norm=nn.BatchNorm1d(6), step=0)),
        "pass 2...the buffer norm.running_mean differs...so step, norm.momentum differs from one device",
        never="chunk",
    ),
    "counter that the loss shows": fault(
        lambda: wrapped(convert_model(Net(count_steps, step=0, linear=nn.Linear(6, 6), norm=nn.BatchNorm1d(6)))),
        "outputs agree, the loss does not: ... in replicas; what forward",
        BATCH[:4].roll(2, 1),
    ),
    # Buffers and parameters that forward changes.
    "counter in a buffer": fault(
        Apply(lambda self, x: (self.seen.add_(len(x)), x)[1], seen=0),
        f"{STATE} seen differs after the forward pass, by 0.4 of its largest value; {IN_PLACE}",
    ),
    "buffer that only the whole batch makes": fault(
        lambda self, x: (len(x) == 5 and self.register_buffer("late", x[0].clone()), x * 1)[1],
        f"{STATE} late differs...{IN_PLACE}",
    ),
    "buffer that a backward hook writes": fault(
        lambda: with_hook(
            Apply(lambda self, x: self.parts[0](x), nn.Linear(6, 6), seen=0.0),
            *(lambda self, _, grads: (self.seen.add_(grads[0].abs().sum()), None)[1], "full_backward_hook"),
        ),
        f"{STATE} seen differs...{IN_PLACE}",
    ),
    "buffer that is assigned": fault(
        Apply(bind("queue", lambda queue, x: torch.cat((x.detach(), queue))[:6]), queue=torch.zeros(6, 6)),
        f"{STATE} queue differs...update it outside the forward pass, or in place if it is a buffer",
    ),
    "buffer that is not saved": fault(
        Net(
            lambda self, x: (x - self.average, self.average.copy_(x.detach().mean(0)))[0],
            average=nn.Buffer(torch.zeros(6), persistent=False),
        ),
        "pass 2...the buffer average differs...from its own chunk",
        never="sets on self",
    ),
    "parameter that is assigned": fault(
        Net(bind("scale", lambda scale, x: nn.Parameter(scale.detach() / 2)), scale=nn.Parameter(torch.ones(6))),
        "the parameter scale differs...assigns another tensor to it, which ends with the replica",
        never=("in place, and", "each replica once"),
    ),
    "parameter that is changed": fault(
        Net(change_parameter, scale=nn.Parameter(torch.ones(()), requires_grad=False)),
        "outputs, loss and gradients agree; the parameter scale differs after the forward pass, by 0.17 of its largest "
        "value; forward() changes it, in each replica once; make it a buffer, which only replica 0 writes, or do so",
    ),
    "before a parameter that is changed": fault(
        nn.Sequential(Apply(mix), Net(change_parameter, scale=nn.Parameter(torch.ones(6)))),
        f"of 0 (Apply)...{LINE}",
        never="1.scale",
    ),
    "parameter that is changed and used": fault(
        Net(lambda self, x: x * (self.w.data.add_(1.0), self.w)[1], w=nn.Parameter(torch.ones(()))),
        f"{ITSELF} (Net), in replica 1...its forward() changes the parameter w in place, and each replica once "
        "more, as all share its memory",
    ),
    "layer that forward makes": fault(
        lambda: Net(make_layer), "late.weight is there on one device only; make it in __init__", never="buffer"
    ),
    # Gradients.
    "gradient of a chunk": fault(lambda: Apply(penalty, tower()), f"{ITSELF}...{AUTOGRAD}"),
    "gradient of a chunk of a layer": fault(lambda: behind(Apply(penalty, tower())), f"of 1 (Apply)...{AUTOGRAD}"),
    "gradient of a chunk, around a norm": fault(
        lambda: convert_model(Apply(follow_gradient, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()))),
        f"{ITSELF}...torch.autograd.grad...compute it outside the forward pass",
        never=("running_mean", "running_var", "num_batches"),
    ),
    "backward() in forward": differs(
        f"parts.0.weight...{BACKWARD}", convert_model(Apply(go_backward, nn.BatchNorm1d(6))), never="autograd.grad"
    ),
    "backward() of another tensor": differs(
        f"0.bias: ...{LINE}grad / len(grad)`",
        lambda: behind(
            Apply(lambda self, x: (x.detach().requires_grad_().sum().backward(), x * 1)[1]), Apply(average_gradient)
        ),
        never="forward() calls backward()",
    ),
    "Function that averages": differs(
        f"parts.0...: its norm in replicas is 2.0 times that on one device; {LINE}grad / len(grad)` (checked.py, line "
        f"{MeanInBackward.backward.__code__.co_firstlineno + 2}, in backward), which gets 2 in place of 4$",
        lambda: in_function(MeanInBackward.backward, 3),
        VECTORS,
        loss=loss_with_state(1e-8),  # which hardly changes
    ),
    "gradient that is rounding on one device": differs(
        f"0.parts.0.bias: only replicas have one; {LINE}grad.norm()` (",
        lambda: convert_model(nn.Sequential(in_function(lambda ctx, grad: grad / grad.norm()), nn.BatchNorm1d(2))),
    ),
    "hook of a tensor": differs("parts.0...`grad.norm()`", lambda: with_tensor_hook(lambda grad: grad / grad.norm())),
    "gradient behind padding": differs(
        f"0.bias: ...{LINE}grad / len(grad)`",
        lambda: behind(Apply(average_gradient), Apply(pad), Apply(add_total)),
        never="first difference",
    ),
    "gradient of an input": differs("input", average_gradient, BATCH.clone().requires_grad_()),
    "gradient that replicas drop": differs(
        "parts.0...: it is missing, or zero, in replicas, while that of parts.1..., before it, agrees; if no branch "
        "leads past that, look between these two for",
        lambda: Apply(
            lambda self, x: self.parts[1](detach_if(len(x) < 5, self.parts[0](x))), nn.Linear(6, 6), nn.Linear(6, 2)
        ),
        loss=lambda output: F.cross_entropy(output, torch.tensor([0, 1, 0, 1, 1])),
    ),
    "gradient that replicas drop, behind one of zero": differs(
        "parts.0...: it is missing, or zero, in replicas; look for",
        lambda: Apply(
            lambda self, x: detach_if(len(x) < 5, self.parts[0](x)) + 0 * self.parts[1](x),
            nn.Linear(6, 2),
            nn.Linear(6, 2),
        ),
    ),
    "gradient that one device drops": differs(
        "parts.0...: only replicas have one",
        lambda: Apply(lambda self, x: detach_if(len(x) == 5, self.parts[0](x)), nn.Linear(6, 2)),
    ),
    "other part of a gradient": differs(
        "parts.0...: its norm in replicas is 1.5 times that on one device; look for",
        lambda: Apply(lambda self, x: (y := self.parts[0](x)) + 0.5 * (y - detach_if(len(x) < 5, y)), nn.Linear(6, 6)),
    ),
    # Losses.
    "means that are added up": fault(
        lambda: Apply(mean_square, nn.Linear(3, 2)),
        f"...the mean is that of one device; take their mean, {SEE}; replicas with [2, 2] rows return ..., one device",
        VECTORS,
        loss=torch.sum,
    ),
    "sums without a loss": fault(lambda self, x: x.square().sum(), "the sum is that of one device; add"),
    "uneven means": fault(lambda self, x: x.square().mean(), WEIGHTED),
    "uneven means in the second pass": fault(
        Apply(lambda self, x: x.square().mean() * (self.count.add_(1) > 1), count=0.0), f"in pass 2: {WEIGHTED}"
    ),
    "uneven means, in a wrapper": fault(
        lambda: Apply(lambda self, x: self.parts[0](x).mean(), wrapped(Apply(mean_square, nn.Linear(6, 6)))),
        WEIGHTED,
        never=("outputs agree", "depends on more"),
    ),
    "class weights that hardly matter": differs(
        f"parts.0.bias: its norm in replicas is 1.0 times that on one device; if replicas return the loss, {DIVIDE}$",
        lambda: labelled(weight=torch.tensor([1.0, 1.0, 1.00001])),
        *(torch.arange(12.0).reshape(4, 3).sin(), LABELS),
    ),
    "ignored labels": fault(lambda: labelled(ignore_index=0), f"the loss differs: {NO_MEAN}", VECTORS, LABELS),
    "NaN that one device has as well": fault(
        lambda self, x: x.mean(),
        f"the loss differs: {DIVIDE}...; replicas with [2, 2] rows return nan, ",
        torch.tensor([[math.nan], [1.0], [2.0], [3.0]]),
        loss=lambda losses: losses.reshape(-1)[-1],
    ),
    "infinite loss of a replica": fault(lambda self, x: x.square().sum() / (len(x) != 2), "rows return ..., inf"),
    "two losses": fault(lambda: behind(Apply(two_losses)), f"as output['divided'], {NO_MEAN}", never="weight them"),
    "loss with a state": fault(
        Apply(hide, nn.Softmax(0)),
        "outputs agree, the loss does not:...in replicas; `loss` depends on more than the output$",
        loss=loss_with_state(0.001),
    ),
    "sums and counts, behind a mix": fault(
        lambda: around_norm(lambda self, x: (losses(self, x).sum(), x.new_tensor(len(x)))),
        f"{BEFORE}: what norm (SynchronizedBatchNorm1d) gets differs, too",
        loss=lambda output: output[0].sum() / output[1].sum(),
        never="return these",
    ),
    "mean, behind a mix in a wrapper": fault(
        lambda: Apply(lambda self, x: self.parts[0](x), wrapped(around_norm(lambda self, x: losses(self, x).mean()))),
        f"divide outside, see...{BEFORE}: what parts.0.module.norm (SynchronizedBatchNorm1d) gets",
        never="take their mean",
    ),
    "mean, before a mix": fault(
        lambda: around_norm(lambda self, x: mix(self, self.last(self.norm(self.first(x)))).square().mean()),
        f"{DIVIDE}...{BEFORE}; replicas with [3, 2] rows",
        never="gets differs",
    ),
    # Hooks.
    "hook that only logs": fault(
        lambda: nn.Sequential(hooked(keep, run_net), Apply(mix)), f"of 1 (Apply)...{LINE}", never=HOOKS
    ),
    "gradient behind a hook that only logs": differs(
        f"0.net.bias: ...{LINE}grad / len(grad)`",
        lambda: nn.Sequential(hooked(keep, run_net), Apply(average_gradient)),
        never=HOOKS,
    ),
    "hook that is a method": fault(lambda: hooked(keep, add_features, features=0), f"{HOOKS}...keep of net (features)"),
    "hook that is a closure": fault(lambda: hooked_by_closure(False), "AttributeError...keep of net (features)"),
    "hook that sets by name": fault(lambda: hooked_by_closure(True), f"{FAILS}AttributeError...{HOOKS}...(features)"),
    "hook that reads": fault(
        lambda: hooked(scale_output, bind_scale, scale=torch.ones(1, 6)), f"{HOOKS}...scale_output of net (scale)"
    ),
    "hook of a child that its parent reads": fault(
        lambda: of_class(lambda self, x: self.child(x) + self.child.features, child=hooked(keep, run_net)),
        f"{FAILS}AttributeError...{HOOKS}...keep of child.net (features)",
    ),
    "hook of the backward pass": fault(
        lambda: hooked(keep_gradient, lambda self, x: run_net(self, x) * self.level, "full_backward_hook", level=1.0),
        f"pass 2...{HOOKS} ...keep_gradient of net (level)...; level differs from one device",
        never="sets on self",
    ),
    # Shapes.
    "padding": fault(
        nn.Sequential(Apply(pad), Apply(lambda self, x: x.sum(1) / len(x[0]))),
        f"output of 0 (Apply), in replica 0, in its shape...{LINE}",
    ),
    "behind padding": fault(lambda: behind(Apply(pad), Apply(add_total), Apply(mix)), f"of 3 (Apply)...{LINE}"),
    "behind a right output that does not fit": fault(
        nn.Sequential(
            *(Apply(lambda self, x: pad(self, x) + self.parts[0](x), Apply(pad)), Apply(add_total), Apply(mix))
        ),
        f"of 2 (Apply)...{LINE}",
    ),
    "scalars": fault(
        lambda self, x: [x.mean()] * len(x),
        f"outputs have shapes [(), (), (), ()] on one device, [(2,), (2,)] in replicas...{ROWS}",
        VECTORS,
    ),
    "number among the outputs": fault(
        lambda: wrapped(Apply(lambda self, x: {"x": x, "count": len(x)}), out_dims={"count": None}),
        f"output['count'] is 4 on one device, 2 in replicas...{ROWS}",
        VECTORS,
    ),
    "more rows than samples": fault(
        lambda self, points, size: torch.stack([part.amax(0) for part in points.chunk(size)]),
        *("outputs have shapes [(3, 6)] on one device, [(6, 6)] in replicas", torch.rand(12, 6), 3),
        never="x.mean",
        replicas=2,
    ),
    "two views in one output": fault(
        convert_model(Apply(lambda self, x: torch.cat([self.parts[0](x), self.parts[0](x + 1)]), nn.BatchNorm1d(6))),
        "outputs differ...10 rows for 5 samples, in another order in replicas; return z1, z2, not cat([z1, z2])",
        never="first difference",
    ),
    # Errors in replicas alone.
    "error": fault(lambda self, x: x.view(5, 6), f"{FAILS}RuntimeError: "),
    "keys": fault(lambda self, x: {len(x): x}, f"{FAILS}ValueError: replica 0 returned"),
    "object that no gather takes": fault(lambda self, x: Result(x), f"{FAILS}TypeError: ... got Result"),
    "error before a norm": fault(
        lambda: before_norm(lambda h: h if len(h) > 1 else raise_it(ValueError("one row"))),
        f"{FAILS}ValueError: one row; raised in the model itself (Net)",
        BATCH[:3],
    ),
    "error of a plain norm": fault(
        lambda: behind(nn.BatchNorm1d(6)),
        f"{FAILS}ValueError: Expected more than 1...; raised in 1 (BatchNorm1d): a batch norm that is not sync",
        BATCH[:3],
    ),
    "error of F.batch_norm": fault(normalize, "raised in the model itself (Apply): it calls F.batch_norm", BATCH[:3]),
    "error of another norm": fault(
        lambda: behind(nn.GroupNorm(6, 6)),
        f"{FAILS}ValueError: Expected more than 1...; raised in 1 (GroupNorm)$",
        BATCH[:3],
    ),
    "error of a norm called for each sample": fault(
        convert_model(Apply(by_sample, nn.BatchNorm1d(2))),
        f"{FAILS}ReplicaSyncError: number of calls of parts.0: 3 on one device, [2, 1] in replicas; ...for all rows or "
        "with group_size 1; raised in parts.0 (SynchronizedBatchNorm1d, call 2)$",
        BATCH[:3],
    ),
}


@pytest.mark.parametrize("name", first_in_smoke(FAULTS))
def test_a_fault_is_named_and_nothing_else(name):
    with torch.inference_mode(), torch.autocast("cpu"):
        FAULTS[name]()
