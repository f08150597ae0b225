"""What is private to torch: a torch that has dropped any of it is refused by its name, when the package is imported."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys

import pytest
import torch
from torch import nn

from sync_batchnorm import torch_private

OF_MODULES = [f"torch.nn.Module.{name}" for name in torch_private._ATTRIBUTES]
REQUIRED = [*torch_private._REQUIRED, *OF_MODULES]


@pytest.mark.parametrize("names", [*([name] for name in REQUIRED), REQUIRED], ids=lambda names: "-".join(names)[:60])
def test_torch_without_a_required_name_is_refused_by_that_name(names, monkeypatch):
    resolve, init = pkgutil.resolve_name, nn.Module.__init__

    def resolve_others(name: str) -> object:
        if name in names:
            raise AttributeError(name)
        return resolve(name)

    def init_without(self: nn.Module) -> None:
        init(self)
        for name in set(names) & set(OF_MODULES):
            del self.__dict__[name.rpartition(".")[2]]

    monkeypatch.setattr(pkgutil, "resolve_name", resolve_others)
    monkeypatch.setattr(nn.Module, "__init__", init_without)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sync_batchnorm"]:
        monkeypatch.delitem(sys.modules, name)
    listed = re.escape(str(names))
    text = rf"^expected a torch that has {listed}, but got torch {re.escape(torch.__version__)}; use a torch that"
    with pytest.raises(ImportError, match=text):
        importlib.import_module("sync_batchnorm")


def test_modules_and_their_names_are_those_of_torch():
    shared = nn.ReLU()
    net = nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared))
    net.register_module("nothing", None)
    assert list(torch_private.names_of_modules(net).items()) == [(module, name) for name, module in net.named_modules()]


def test_module_that_is_compiled_is_not_looked_for_before_the_compiler_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)
    assert torch_private.compiled_module_type() == ()
