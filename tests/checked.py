"""Models and batches that the tests of the check on one device share."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from helpers import Net
from torch import nn

from sync_batchnorm import DataParallelWithCallback, assert_matches_one_device

# One batch in every run: of a few, rows that should differ agree to the tolerance of the check.
_drawn = torch.Generator().manual_seed(0)
IMAGES, VECTORS = torch.randn(5, 3, 6, 6, generator=_drawn), torch.randn(4, 3, generator=_drawn)
LABELS = torch.tensor([0, 1, 0, 1])


class Apply(Net):
    def __init__(self, function, *modules, **buffers):
        buffers = {name: nn.Buffer(torch.tensor(value)) for name, value in buffers.items()}
        super().__init__(function, parts=nn.ModuleList(modules), **buffers)


class DropPath(Net):
    """A copy of the class of timm, as many projects have one."""


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / len(grad)


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


# Warnings of torch about what forward() does in training, too.
WARNINGS_OF_TORCH = ("Calling .zero_grad", "The .grad attribute", "Full backward hook is firing")


def assert_names(texts, model, *inputs, **options):
    """Check that the check fails, and says these texts, with "..." for any text and "$" for the end; return all."""
    with warnings.catch_warnings():
        for warning in WARNINGS_OF_TORCH:
            warnings.filterwarnings("ignore", warning)
        with pytest.raises(AssertionError) as caught:
            assert_matches_one_device(model, *inputs, **options)
    for text in texts:
        caught.match(re.escape(text).replace(r"\.\.\.", ".*").replace(r"\$", "$"))
    check_length(caught.value)
    return str(caught.value)


def check_length(error):
    """Check that a message of the check has at most 60 words."""
    assert len(str(error).split()) <= 60, f"{len(str(error).split())} words: {error}"
