"""What is private to torch: all of it is there, and without it happens what `torch_private.py` says."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import assert_equal, doubles, randomize
from torch import nn
from torch.nn.modules import batchnorm, lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import sync_batchnorm
from sync_batchnorm import torch_private
from sync_batchnorm.__main__ import versions

SOURCE = Path(torch_private.__file__).read_text()
NAMES = re.findall(r'"(torch\.\S+\.\w+)"', re.sub(r'sys\.modules\.get\("\S+"\)', "", SOURCE))
REQUIRED = ["_BatchNorm", "_check_input_dim", "_version", "_call_impl", "_replicate_for_data_parallel"]
REQUIRED += ["_buffers", "_forward_hooks", "_modules", "_parameters"]


def lacking(*names: str) -> ModuleType:
    """Return `torch_private` as it is where torch has dropped `names`: it looks for others, which are nowhere."""
    source = SOURCE
    for name in names:
        assert f'"{name}"' in source
        source = source.replace(f'"{name}"', f'"{name}_dropped"')
    module = ModuleType("lacking")
    exec(compile(source, "lacking.py", "exec"), vars(module))
    return module


@pytest.fixture
def package_lacking(monkeypatch):
    """Import the package anew, where torch has dropped what the test says; return it."""

    def imported(*names: str) -> ModuleType:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sync_batchnorm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "sync_batchnorm.torch_private", lacking(*names))
        found = importlib.import_module("sync_batchnorm")
        assert found is not sync_batchnorm
        return found

    yield imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "sync_batchnorm"]:
        del sys.modules[name]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an older torch may do without")
def test_torch_has_all_of_it():
    assert torch_private.MISSING == []


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


outputs = []  # up to torch 2.12, a node lives as long as its output


def node():
    outputs[:] = [Node.apply(torch.ones(2, requires_grad=True))]
    return outputs[0].grad_fn


def free_in_backward(private, found):
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: private.free_saved(found))
    x.sum().backward()


def test_what_a_node_has_saved_can_be_freed():
    found = node()
    free_in_backward(torch_private, found)
    with pytest.raises(RuntimeError, match="freed"):
        _ = found.saved_tensors


def test_node_without_a_method_is_left_as_it_is():
    torch_private.free_saved(object())
    torch_private.set_sequence_number(object(), 3)


def test_node_gets_a_number():
    found = node()
    torch_private.set_sequence_number(found, 12345)
    assert found._sequence_nr() == 12345


def leaves_saved(private):
    found = node()
    free_in_backward(private, found)
    return found.saved_tensors[0].tolist() == [1, 1]


def leaves_number(private):
    found = node()
    number = found._sequence_nr()
    private.set_sequence_number(found, number + 7)
    return found._sequence_nr() == number


def has_no_hooks(private):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return not private.TELLS_HOOKS and private.top_hooks() is None


def has_no_modes(private):
    with TorchDispatchMode():
        return torch_private.has_modes() and not private.has_modes()


# What holds of `torch_private` without each name.
WITHOUT = {
    "torch._C._current_graph_task_id": lambda private: private.graph_task_id() == -1,
    "torch._C._autograd._get_current_graph_task_keep_graph": lambda private: private.keeps_graph(),
    "torch._C._will_engine_execute_node": lambda private: private.will_run(node()) and not private.will_run(None),
    "torch.autograd.function.BackwardCFunction.maybe_clear_saved_tensors": leaves_saved,
    "torch.autograd._get_sequence_nr": lambda private: private.next_sequence_number() == sys.maxsize,
    "torch.autograd.function.BackwardCFunction._set_sequence_nr": leaves_number,
    "torch.autograd.forward_ad._current_level": lambda private: private.dual_level() == 0,
    "torch._C._are_functorch_transforms_active": lambda private: (
        not torch.func.vmap(lambda x: x * private.in_transform())(torch.ones(2)).any()
    ),
    "torch._C._autograd._top_saved_tensors_default_hooks": has_no_hooks,
    "torch._C._autograd._pop_saved_tensors_default_hooks": has_no_hooks,
    "torch._C._autograd._push_saved_tensors_default_hooks": has_no_hooks,
    "torch._C._len_torch_dispatch_stack": has_no_modes,
    "torch.utils._python_dispatch._pop_mode": has_no_modes,
    "torch.utils._python_dispatch._push_mode": has_no_modes,
    "torch.utils.checkpoint._CachingTorchDispatchMode": lambda private: private.POLICY_TYPES[0] == (),
    "torch.utils.checkpoint._CachedTorchDispatchMode": lambda private: private.POLICY_TYPES[1] == (),
    "torch.utils.checkpoint._CheckpointFrame": lambda private: private.CheckpointFrame == (),
    "torch._C.DisableTorchFunctionSubclass": lambda private: private.plain_tensors is nullcontext,
    "torch.nn.parallel._functions.Broadcast": lambda private: private.Broadcast is None,
    "torch.nn.modules.lazy.LazyModuleMixin._infer_parameters": lambda private: private.infer_parameters is None,
    "torch.autograd.profiler._is_profiler_enabled": lambda private: private.profiler_runs() is False,
    "torch._C._autograd._profiler_type": lambda private: private.profiler_of_thread() == "",
}


def test_thread_without_modes_has_none():
    assert not torch_private.has_modes()


def test_every_name_is_tested():
    assert sorted(WITHOUT) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_name_that_torch_has_dropped_is_noted_and_replaced(name):
    private = lacking(name)
    assert set(private.MISSING) == {f"{name}_dropped", *torch_private.MISSING} - {name}
    assert WITHOUT[name](private)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn1, self.linear, self.bn2 = nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, input):
        return self.bn2(self.linear(self.bn1(input)).tanh()) * 2


@pytest.mark.parametrize("names", [*([name] for name in NAMES), NAMES], ids=lambda names: "-".join(names)[:70])
def test_replicas_train_without_each_name_and_without_all(names, package_lacking):
    package = package_lacking(*names)
    plain = randomize(Branches().double())
    parallel = package.DataParallelWithCallback(package.convert_model(copy.deepcopy(plain)), ["cpu"] * 3)
    for _ in range(2):
        data = doubles(7, 3)
        upstream = torch.randn(7, 3, dtype=torch.float64)
        for model in (plain, parallel):
            model.zero_grad()
            (model(data) * upstream).sum().backward()
    assert_equal(parallel(data), plain(data))
    for expected, actual in zip(plain.parameters(), parallel.parameters(), strict=True):
        assert_equal(actual.grad, expected.grad)


@pytest.mark.parametrize(
    ("name", "reentrant", "error"),
    [
        *((name, False, "use_reentrant=False") for name in NAMES if re.search("default_hooks|CheckpointFrame", name)),
        ("torch._C._current_graph_task_id", True, "expected every replica to call bn1 equally often"),
    ],
)
def test_recomputation_that_is_not_recognized_is_an_error_and_no_hang(name, reentrant, error, package_lacking):
    package = package_lacking(name)

    class Checkpointed(Branches):
        def forward(self, input):
            return checkpoint(super().forward, input, use_reentrant=reentrant)

    parallel = package.DataParallelWithCallback(package.convert_model(Checkpointed().double()), ["cpu"] * 2)
    output = parallel(doubles(4, 3).requires_grad_())
    with pytest.raises(RuntimeError, match=error):
        output.sum().backward()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.8 does not notice operators that are recomputed alone")
@pytest.mark.parametrize("name", [name for name in NAMES if re.search("dispatch_stack|_mode|_Cached", name)])
def test_selective_checkpoint_that_sees_too_much_is_an_error(name, package_lacking):
    package = package_lacking(name)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.tanh.default])

    class Selective(Branches):
        def forward(self, input):
            return checkpoint(super().forward, input, use_reentrant=False, context_fn=contexts)

    parallel = package.DataParallelWithCallback(package.convert_model(Selective().double()), ["cpu"] * 2)
    output = parallel(doubles(4, 3).requires_grad_())
    with pytest.raises(RuntimeError, match="encountered during backward"):
        output.sum().backward()


def test_lazy_layer_is_left_where_torch_does_not_make_it_an_ordinary_one(package_lacking):
    package = package_lacking("torch.nn.modules.lazy.LazyModuleMixin._infer_parameters")
    layer = nn.LazyBatchNorm1d()
    layer.load_state_dict(nn.BatchNorm1d(3).state_dict())
    with pytest.warns(UserWarning, match="is lazy and has seen no input; run one batch"):
        assert isinstance(package.convert_model(layer), lazy.LazyModuleMixin)


@pytest.mark.parametrize("name", REQUIRED)
def test_torch_without_what_replicas_and_layers_are_made_of_is_refused(name):
    with pytest.raises(ImportError, match=rf"expected a torch that has \['{name}_dropped'\], but got torch \d"):
        lacking(name)


def test_what_is_required_is_what_the_table_marks():
    rows = [line for line in (torch_private.__doc__ or "").splitlines() if "  * " in line]
    marked = {name for row in rows for name in re.findall(r"``(_\w+)``", row)}
    assert marked == set(REQUIRED) - {"_BatchNorm"}


def test_layers_of_torch_are_found_by_their_base():
    assert torch_private.BatchNormBase is batchnorm.BatchNorm2d.__base__


def test_module_that_is_compiled_is_not_looked_for_before_the_compiler_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)
    assert torch_private.compiled_module_type() == ()


@pytest.mark.slow
def test_constant_is_marked_as_the_compiler_marks_it():
    def marked(): ...

    def marked_by_torch(): ...

    torch_private.mark_constant(marked)
    assert vars(marked) == vars(torch.compiler.assume_constant_result(marked_by_torch)) != {}


def test_command_prints_what_torch_lacks(monkeypatch):
    assert ("torch without" in versions()) == bool(torch_private.MISSING)
    monkeypatch.setattr("sync_batchnorm.__main__.MISSING", ["torch._C._one", "torch._C._two"])
    assert versions()["torch without"] == "torch._C._one, torch._C._two"
