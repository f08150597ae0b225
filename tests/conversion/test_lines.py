"""`assert_matches_one_device` names the expression and the line with which a difference begins, or no line."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from checked import Apply, quietly, with_hook, wrapped
from helpers import Net
from torch import nn

from sync_batchnorm import assert_matches_one_device, convert_model

BATCH = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
HERE = Path(__file__).name


def standardize(self, x):
    centered = x - x.mean(0)
    spread = centered.square().mean(0)
    return centered / spread.sqrt()


def softmax_by_hand(self, x):
    exp = (x - x.max()).exp()
    return exp / exp.sum(0)


def logs(self, x):
    self.largest = x.max().item()
    order = x.sum(1).argsort()
    sorted_rows = x[order] * 2
    return sorted_rows[order.argsort()] / x.abs().max(0).values


def count_before(self, x):
    rows = [row * 2 for row in x]
    count = len(rows)
    return torch.stack(rows) / count


def add_in_a_loop(self, x):
    total = torch.zeros(6)
    for row in x:
        total = total + row
    return x - total


def enumerate_rows(self, x):
    return torch.stack([row * i for i, row in enumerate(x)])


def shifted(self, x):
    others = x[1:]
    return x + F.pad(others, (0, 0, 0, 1))


def swap_halves(self, x):
    half = len(x) // 2
    return x + torch.cat([x[half:], x[:half]])


def pairs(self, x):
    similar = x @ x.T
    weights = similar.softmax(1)
    return weights.sum(1, keepdim=True) * x + (weights * similar).sum(1, keepdim=True)


def selected_and_mixed(self, x):
    chosen = x[x[:, 0] > 0]
    middle = chosen.mean(0)
    return x - middle


def routed(self, x):
    output = torch.zeros_like(x)
    for expert, is_mine in ((1, x[:, 0] > 0), (2, x[:, 0] <= 0)):
        index = is_mine.nonzero().flatten()
        output[index] += expert * x[index]
    return output - output.mean(0)


def first_in_place(self, x):
    x = x * 1
    x[0] = 0.0
    return x


def scale_in_place(self, x):
    x = x * 1
    x /= len(x)
    return x


def branch(self, x):
    if x.shape[0] > 2:
        x = x * 2
    return self.parts[0](x)


def on_several_lines(self, x):
    return x * torch.softmax(
        x,
        dim=0,
    )


def drawn_by_numpy(self, x):
    noise = torch.from_numpy(numpy.random.rand(len(x), 6))
    return x + noise


def seeded(self, x):
    torch.manual_seed(0)
    return x + torch.rand_like(x)


def read_elsewhere(self, x):
    return x * KEPT[len(x)]


class Center(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


def hooked(self, x):
    hidden = self.parts[0](x)
    hidden.register_hook(lambda grad: grad / grad.norm())
    return hidden


def clipped(self, x):
    hidden = self.parts[0](x)
    hidden.register_hook(lambda grad: grad.clamp(-0.1, 0.1) * len(grad))
    return hidden


KEPT = {size: torch.full((6,), float(size)) for size in range(9)}
RANDOM = "`...: it draws random numbers, which differ in replicas, and may be meant to"
LINEAR = nn.Linear(6, 6)
# How to build the model; the expression, or what follows "it ", and the line that it is in, if it is in this file.
FAULTS = {
    "statistics": (lambda: Apply(standardize), "begins with `x.mean(0)`"),
    "softmax by hand": (lambda: Apply(softmax_by_hand), "begins with `exp.sum(0)`"),
    "behind what differs rightly": (lambda: Apply(logs), "begins with `x.abs().max(0)`"),
    "a count": (lambda: Apply(count_before), "begins with `torch.stack(rows) / count`...3 in place of 5"),
    "a sum in a loop": (lambda: Apply(add_in_a_loop), "begins with `total + row`...which runs 3 times in place of 5"),
    "the index in a loop": (lambda: Apply(enumerate_rows), "begins with `row * i`...which gets 0 in place of 3"),
    "shifted rows": (lambda: Apply(shifted), "begins with `x[1:]`"),
    "halves": (lambda: Apply(swap_halves), "begins with `torch.cat([x[half:], x[:half]])`"),
    "pairs": (lambda: Apply(pairs), "begins with `x @ x.T`...two dimensions of which are samples"),
    "behind a selection": (lambda: Apply(selected_and_mixed), "begins with `chosen.mean(0)`"),
    "behind a router": (lambda: Apply(routed), "begins with `output.mean(0)`"),
    "a row in place": (lambda: Apply(first_in_place), "begins with `x[0] = 0.0`"),
    "a number in place": (lambda: Apply(scale_in_place), "begins with `x /= len(x)`...3 in place of 5"),
    "a branch before a norm": (
        lambda: convert_model(Apply(branch, nn.BatchNorm1d(6))),
        "goes another way: one device runs `x * 2`",
    ),
    "several lines": (lambda: Apply(on_several_lines), "begins with `torch.softmax( x, dim=0, )`"),
    "a generator": (
        lambda: Apply(lambda self, x: x + torch.arange(len(x))[:, None]),
        "begins with `torch.arange(len(x))`",
    ),
    "numpy": (lambda: Apply(drawn_by_numpy), f"begins with `x + noise{RANDOM}"),
    "Python's random numbers": (
        lambda: Apply(lambda self, x: x * random.random()),
        f"begins with `x * random.random(){RANDOM}",
    ),
    "a seed": (lambda: Apply(seeded), "begins with `torch.rand_like(x)`...the same random numbers in each replica"),
    "what is read elsewhere": (
        lambda: Apply(read_elsewhere),
        "begins with `x * KEPT[len(x)]`...which gets another tensor than on one device",
    ),
    "a hook of a module": (
        lambda: nn.Sequential(LINEAR, with_hook(nn.ReLU(), lambda module, args, y: y - y.mean(0))),
        "begins with `y.mean(0)`",
    ),
    "a function": (lambda: Apply(lambda self, x: Center.apply(self.parts[0](x)), LINEAR), "begins with `grad.mean(0)`"),
    "a hook of a tensor": (lambda: Apply(hooked, LINEAR), "begins with `grad.norm()`"),
    "a number in a hook": (lambda: Apply(clipped, LINEAR), "begins with `grad.clamp(-0.1, 0.1) * len(grad)`...gets"),
    "in a wrapper": (
        lambda: Apply(lambda self, x: self.parts[0](x), wrapped(Apply(lambda self, x: x.cumsum(0)))),
        "begins with `x.cumsum(0)`",
    ),
    "a call of a module of torch": (
        lambda: Net(lambda self, x: self.rnn(x[:, None])[0][:, 0], rnn=nn.GRU(6, 6)),
        "begins with `self.rnn(x[:, None])`...depends on other samples of the batch",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_line_is_named_with_which_a_difference_begins(fault):
    build, expected = FAULTS[fault]
    with pytest.raises(AssertionError) as caught:
        assert_matches_one_device(build(), BATCH)
    text = str(caught.value)
    caught.match("it " + re.escape(expected).replace(r"\.\.\.", ".*"))
    file, number = re.search(r"\((\w+\.py), line (\d+), in ", text).groups()
    code = Path(__file__).read_text(encoding="utf-8").splitlines()[int(number) - 1]
    assert file == HERE
    assert "assert_matches_one_device" not in text
    assert re.search(r"`([^`.(]*)", text).group(1).strip() in code, text
    assert len(text.split()) <= 60


def deals_out(self, x):
    rows = []
    for row in x:
        rows.append(self.parts[self.turn % 2](row))
        self.turn += 1
    return torch.stack(rows)


def center(x):
    return x - x.mean(0)


SCRIPT = quietly(torch.jit.script, center)
WITHOUT = {  # where no line is certain, what is said in its place
    "a module of torch in a container": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(0)),
        "output of 1 (Softmax)...depends on other samples",
    ),
    "a script": (lambda: Apply(lambda self, x: SCRIPT(x)), "depends on other samples"),
    "vmap": (
        lambda: Apply(lambda self, x: torch.vmap(lambda column: column - column.mean(), 1, 1)(x)),
        "depends on other samples",
    ),
    "layers in turn": (
        lambda: Net(deals_out, parts=nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), turn=0),
        "turn changed in this pass",
    ),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_no_line_is_named_where_none_is_certain(kind):
    build, expected = WITHOUT[kind]
    with pytest.raises(AssertionError, match=re.escape(expected).replace(r"\.\.\.", ".*")) as caught:
        assert_matches_one_device(build(), BATCH)
    assert "it begins" not in str(caught.value)
    assert "assert_matches_one_device" not in str(caught.value)


@pytest.mark.parametrize("has_hook", [False, True])
def test_the_line_that_calls_the_check_is_none_of_the_model(has_hook):
    softmax = nn.Softmax(0)
    model = with_hook(softmax, lambda module, args, output: None) if has_hook else softmax
    for wrapper in (model, wrapped(model), nn.Sequential(model)):
        with pytest.raises(AssertionError) as caught:
            assert_matches_one_device(wrapper, BATCH, loss=lambda output: output.square().mean())
        assert "line" not in str(caught.value)


def test_nothing_is_followed_where_nothing_differs(monkeypatch):
    monkeypatch.setattr("sync_batchnorm.check.explaining.line_of_call", None)
    monkeypatch.setattr("sync_batchnorm.check.explaining.line_of_gradient", None)
    assert_matches_one_device(Apply(lambda self, x: self.parts[0](x) * 2, LINEAR), BATCH)
