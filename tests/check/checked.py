"""Batches, models, and the comparison of messages for the tests of `assert_matches_one_device`."""

from __future__ import annotations

import inspect
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import Net
from torch import nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, assert_matches_one_device, convert_model

# One batch in every run: of a few, rows that should differ agree to the tolerance of the check.
_drawn = torch.Generator().manual_seed(0)
IMAGES, VECTORS = torch.randn(5, 3, 6, 6, generator=_drawn), torch.randn(4, 3, generator=_drawn)
BATCH = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))  # in two replicas: 3 and 2 rows

# Warnings of torch about what forward() does in training, too.
WARNINGS_OF_TORCH = ("Calling .zero_grad", "The .grad attribute", "Full backward hook is firing")


def assert_names(text, model, *inputs, never=(), **options):
    """Check that the check fails with this message, in which "..." stands for any text and "$" for its end.

    The model may be one, or anything that `built` takes. The input is `BATCH`, unless there are others. `never` is a
    text, or several, that the message must not have.
    """
    with warnings.catch_warnings():
        for warning in WARNINGS_OF_TORCH:
            warnings.filterwarnings("ignore", warning)
        with pytest.raises(AssertionError) as caught:
            assert_matches_one_device(built(model), *(inputs or [BATCH]), **options)
    caught.match(re.escape(text).replace(r"\.\.\.", ".*").replace(r"\$", "$"))
    check_message(caught.value, [never] if isinstance(never, str) else never)


def check_message(error, never=()):
    """Check what each message of the check has: at most 60 words, and the line with the code that it quotes."""
    message = str(error)
    assert len(message.split()) <= 60, f"{len(message.split())} words: {message}"
    assert not [text for text in (*never, "assert_matches_one_device") if text in message], message
    if named := re.search(r"`([^`]*)` \((\w+\.py), line (\d+), in ", message):
        code, file, line = named.groups()
        assert code.partition("(")[0] in (Path(__file__).parent / file).read_text().splitlines()[int(line) - 1], message


def built(model):
    """Return a model that is given as one, as a function that builds it, or as a forward."""
    if isinstance(model, nn.Module):
        return model
    return Apply(model) if inspect.signature(model).parameters else model()


class Apply(Net):
    def __init__(self, function, *modules, **buffers):
        buffers = {name: nn.Buffer(torch.as_tensor(value)) for name, value in buffers.items()}
        super().__init__(function, parts=nn.ModuleList(modules), **buffers)


class Stop(BaseException):
    pass


class Result:
    def __init__(self, scores):
        self.scores = scores


@dataclass
class Batch:
    x: torch.Tensor


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / len(grad)


def average_gradient(self, x):
    return MeanInBackward.apply(x)


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def mix(self, x):
    return x - x.mean(0)


def hide(self, x):
    return x + 0 * self.parts[0](x)


def bind(name, value):
    """Return a forward that binds an attribute, from its former value and the input."""

    def forward(self, x):
        setattr(self, name, value(getattr(self, name, 0), x))
        return x * 1

    return forward


def with_hook(module, hook, kind="forward_hook"):
    getattr(module, f"register_{kind}")(hook)
    return module


def wrapped(module, **options):
    return DataParallelWithCallback(module, ["cpu"] * 2, **options)


def wrapper_with(module, base=DataParallelWithCallback, **methods):
    """Return a wrapper whose class has methods of its own."""
    return type("Own", (base,), methods)(module, ["cpu"] * 2)


def behind(*modules):
    return nn.Sequential(nn.Linear(6, 6), *modules)


def tower():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def gated(inside):
    """Return a block of a diffusion transformer at its start: gates and last layer are zeros."""

    def forward(self, x):
        hidden = self.stem(x)
        return self.last(hidden + self.gate(x) * self.inside(hidden))

    layers = {name: nn.Linear(6, 6) for name in ("stem", "gate", "last")}
    for parameter in [*layers["gate"].parameters(), *layers["last"].parameters()]:
        nn.init.zeros_(parameter)
    return Net(forward, inside=inside, **layers)


def views(*inside):
    """Return a net that runs two views of each sample in one batch."""
    layers = nn.Sequential(nn.Linear(6, 8), *inside, nn.ReLU(), nn.Linear(8, 4))
    return Net(lambda self, x: self.net(torch.cat([x, x + 1])).chunk(2), net=layers)


def with_norm(forward, synchronized=None):
    """Return a norm of a class of one's own, converted to another one; a forward also gets that of its base class."""

    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return forward(self, x, super().forward)

    class SynchronizedOwn(Own, SynchronizedBatchNorm1d):
        if synchronized:

            def forward(self, x):
                return synchronized(SynchronizedBatchNorm1d.forward(self, x))

    return convert_model(nn.Sequential(Own(6)), classes={Own: SynchronizedOwn})


def of_class(forward, **attributes):
    """Return a module of a class that has this `forward`, where the check looks for what a hook sets."""
    model = type("Hooked", (nn.Module,), {"forward": forward})()
    for name, value in {"net": nn.Linear(6, 6), **attributes}.items():
        setattr(model, name, value)
    return model


def follow_gradient(self, x):
    """Change the input along a gradient, as an attack does."""
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.parts[0](moved).square().sum(), moved)
    return self.parts[0](x + grad)


def mean_square(self, x):
    return self.parts[0](x).square().mean()


def try_first(self, x):
    with suppress(Stop, StopAsyncIteration):
        self.parts[0](x)
    return x
