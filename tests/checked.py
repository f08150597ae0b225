"""Models and batches that the tests of the check on one device share."""

from __future__ import annotations

import warnings

import torch
from helpers import Net
from torch import nn

from sync_batchnorm import DataParallelWithCallback

# One batch in every run: of a few, rows that should differ agree to the tolerance of the check.
_drawn = torch.Generator().manual_seed(0)
IMAGES, VECTORS = torch.randn(5, 3, 6, 6, generator=_drawn), torch.randn(4, 3, generator=_drawn)
LABELS = torch.tensor([0, 1, 0, 1])


class Apply(Net):
    def __init__(self, function, *modules, **buffers):
        buffers = {name: nn.Buffer(torch.tensor(value)) for name, value in buffers.items()}
        super().__init__(function, parts=nn.ModuleList(modules), **buffers)


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def hide(self, x):
    return x + 0 * self.parts[0](x)


def bind(name, value):
    """Return a forward that binds an attribute, from its former value and the input."""

    def forward(self, x):
        setattr(self, name, value(getattr(self, name, 0), x))
        return x * 1

    return forward


def wrapped(module, **options):
    return DataParallelWithCallback(module, ["cpu"] * 2, **options)
