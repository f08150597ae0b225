"""What is private to torch does what the package uses it for."""

from __future__ import annotations

import sys

from torch import nn

from sync_batchnorm import torch_private


def test_modules_and_their_names_are_those_of_torch():
    shared = nn.ReLU()
    net = nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared))
    net.register_module("nothing", None)
    assert list(torch_private.names_of_modules(net).items()) == [(module, name) for name, module in net.named_modules()]


def test_module_that_is_compiled_is_not_looked_for_before_the_compiler_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)
    assert torch_private.compiled_module_type() == ()
