"""Scatter and gather of trees: the values, the types, the gradients and the errors of `torch.nn.parallel`."""

import math
import re
import warnings
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any

import pytest
import torch
from helpers import Cache, Net, as_devices, doubles
from torch import nn

from sync_batchnorm import DataParallelWithCallback
from sync_batchnorm.wrapper.scatter_gather import gather_trees

CPU = torch.device("cpu")
X = torch.zeros(4, 2)


def scatter(tree, number=2, dim=0):
    """Return what each of some CPU replicas gets as its only argument."""
    parallel = DataParallelWithCallback(nn.Identity(), ["cpu"] * number, dim=dim)
    return [chunk for (chunk,) in parallel.scatter((tree,), {}, parallel.device_ids)[0]]


def equal(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_other_dimensions_can_be_cut(dim):
    x = torch.randn(4, 6, 5)
    parts = scatter(x, 3, dim)
    assert equal(parts, x.chunk(3, dim))
    assert torch.equal(gather_trees(parts, CPU, dim), x)


def test_chunks_have_memory_of_their_own():
    x = torch.randn(4, 2)
    parts = scatter({"x": x, "list": [x[:, 0], x.long()]})
    before = [part["x"].clone() for part in parts], [part["list"][0].clone() for part in parts]
    x.zero_()
    assert equal([part["x"] for part in parts], before[0])
    assert equal([part["list"][0] for part in parts], before[1])
    parts[0]["x"].fill_(1)
    assert torch.equal(x, X)
    assert not any(part["x"]._is_view() for part in parts)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
        torch.randn(5, 4, 3, 2).movedim(1, 0),
    ],
    ids=["channels-last", "one-pixel", "transposed", "moved"],
)
def test_chunks_keep_the_order_of_dimensions_in_memory(x):
    for ours, theirs in zip(scatter(x), x.chunk(2), strict=True):
        assert ours.stride() == theirs.clone().stride()


def test_scalars_have_no_other_dimension_to_be_gathered_along():
    with pytest.raises(RuntimeError, match="zero-dimensional tensor"):
        gather_trees([torch.tensor(1.0)] * 2, CPU, 1)


def test_scalars_become_a_vector_with_a_warning_unless_dimension_0_is_named(devices):
    x = torch.arange(4.0, device=as_devices(devices)[0])
    module = Net(lambda net, x: {"loss": x.sum()})
    with pytest.warns(UserWarning, match="all input tensors were scalars; will instead unsqueeze and return a vector"):
        assert DataParallelWithCallback(module, devices)(x)["loss"].tolist() == [1, 5]
    with warnings.catch_warnings(action="error"):
        assert DataParallelWithCallback(module, devices, out_dims=0)(x)["loss"].tolist() == [1, 5]


def test_outputs_of_another_dtype_are_gathered_under_autocast():
    rows = torch.arange(4, dtype=torch.float16)  # which autocast on the CPU does not concatenate
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)(rows), rows)


@pytest.mark.parametrize(("number", "rows", "dim"), [(1, 5, 2), (2, 1, 0)])
def test_single_chunk_has_the_objects_of_the_caller(number, rows, dim):
    tree = [doubles(rows, 2), {"a": doubles(rows, 2)}]
    module = Net(lambda net, positional, named: net.seen.extend([positional, named]), seen=[])
    DataParallelWithCallback(module, ["cpu"] * number, dim=dim)(tree, named=tree)
    assert module.seen[0] is module.seen[1] is tree


@dataclass(eq=False)
class Output:
    rows: Any
    value: Any = None


Pair = namedtuple("Pair", ["left", "right"])
NOTHING = "a tensor, but replica 1 returned nothing there"
ONE_MORE = "nothing there, but replica 1 returned a tensor"
UNLIKE: dict[str, Any] = {  # what two replicas return, and how the error names it
    "none": (lambda x: x, lambda x: None, "output = a tensor, but replica 1 returned None"),
    "none inside": (lambda x: (x, [None, x]), lambda x: (x, x), "output[1][0] = None, but replica 1 returned nothing"),
    "keys": (lambda x: {"a": x}, lambda x: {"b": x}, f"output['a'] = {NOTHING}"),
    "more keys": (lambda x: {"a": x}, lambda x: {"a": x, "b": x}, f"output['b'] = {ONE_MORE}"),
    "empty": (lambda x: (x, []), lambda x: (x,), "output[1] = [], but replica 1 returned nothing there"),
    "value": (lambda x: Output(x, "a"), lambda x: Output(x, "b"), "output.value = 'a', but replica 1 returned 'b'"),
    "below": (
        lambda x: (x, UserDict(names=Output(x, ["a", "b"]))),
        lambda x: (x, UserDict(names=Output(x, ["a", "c"]))),
        "output[1]['names'].value[1] = 'b', but replica 1 returned 'c'",
    ),
    "no tensors": (lambda x: Output(None, "a"), lambda x: Output(None, "b"), "output = Output(rows=None, value='a'),"),
    "objects": (lambda x: {"x": x, "net": Net(None)},) * 2 + ("output['net'] = Net(), but replica 1 returned Net()",),
    "layers": (lambda x: Cache([[x]]), lambda x: Cache([[x], [x]]), f"output[1][0] = {ONE_MORE}"),
    "iterable out of reach": (lambda x: {"x": x, "a": Cache([[1]])},) * 2 + ("output['a'] = <helpers.Cach",),
}


DIFFER = (
    ": their numbers of dimensions differ, as after squeeze() of a single row; "
    "write flatten(1) for (N, C, 1, 1), squeeze(1) for (N, 1)"
)
ALONG = "; outputs are put together along dimension 0, so all other sizes must be equal; pad them"
SIZES: dict[str, Any] = {  # as of `pad_packed_sequence`, since each chunk has a longest sequence of its own
    "tensor": (lambda x: x, lambda x: x[:, :1], f"[(3, 2), (3, 1)]{ALONG}"),
    "dict": (lambda x: {"a": x, "b": x}, lambda x: {"a": x, "b": x[:, :1]}, f"[(3, 2), (3, 1)]{ALONG}"),
    "dimensions": (lambda x: [x], lambda x: [x[..., None]], f"[(3, 2), (3, 2, 1)]{DIFFER}"),
    "squeeze": (lambda x: x[:, 0], lambda x: x[:1, 0].squeeze(), f"[(3,), ()]{DIFFER}"),
}


def returning(first, others, devices):
    """Return the output for six rows if replica 0 returns one function of its rows, and the others another."""
    net = Net(lambda net, input: (first if input[0, 0] == 0 else others)(input))
    return DataParallelWithCallback(net, devices)(torch.arange(12.0, device=as_devices(devices)[0]).view(6, 2))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", UNLIKE)
def test_replicas_that_return_unlike_outputs_are_named(devices, kind):
    *outputs, found = UNLIKE[kind]
    with pytest.raises(ValueError, match=f"replica 0 returned {re.escape(found)}.*; return the same keys, lengths"):
        returning(*outputs, devices)


@pytest.mark.parametrize("kind", SIZES)
def test_outputs_that_differ_in_other_sizes_than_rows_are_named(devices, kind):
    *outputs, found = SIZES[kind]
    with pytest.raises(RuntimeError, match=f"^replicas returned tensors of shapes {re.escape(found)}"):
        returning(*outputs, devices)


@pytest.mark.parametrize(
    "output",
    ["text", {1.0}, True, object(), iter([]), Cache([[1]]), ["a"]],
    ids=lambda value: type(value).__name__,
)
def test_replicas_that_return_no_tensors_are_told(devices, output):
    name, path, dims = ("str", "[1][0]", "{0: None}") if output == ["a"] else (type(output).__name__, "[1]", "None")
    text = re.escape(f"mappings and dataclasses of tensors, got {name} in output{path}; return a tensor (")
    with pytest.raises(
        TypeError, match=rf"{text}.*, or pass out_dims={{1: {dims}}} if it .*, or out_dims=0 for a list"
    ):
        returning(*[lambda x: (x, output)] * 2, devices)


SETTINGS = Output("a", [1]), Output("a", [True])
NUMBERS: dict[str, Any] = {  # what replicas return, where its number is found, what it is, and how out_dims names it
    "count": (lambda x: {"x": x, "n": len(x)}, "['n']", "int", {"n": None}),
    "mean": (lambda x: Output(x, 1.5), ".value", "float", {"value": None}),
    "nan": (lambda x: Output(x, math.nan), ".value", "float", {"value": None}),
    "tuple": (lambda x: (x, 1j), "[1]", "complex", {1: None}),
    "list": (lambda x: (x, [16]), "[1][0]", "int", {1: {0: None}}),
    "named tuple": (lambda x: {"a": Pair(x, Fraction(1))}, "['a'][1]", "Fraction", {"a": {1: None}}),
    "shape": (lambda x: {"x": x, "shape": x.shape}, "['shape']", "Size", {"shape": None}),
    "fields": (lambda x: [x, SETTINGS[0]], "[1]", "Output", {1: None}),
    "mapping": (lambda x: {"x": x, "a": UserDict(n=1)}, "['a']", "UserDict", {"a": None}),
    "no tensor": (lambda x: {"n": 3}, "['n']", "int", {"n": None}),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("rows", [1, 6])
def test_numbers_that_replicas_return_are_refused_unless_named_whole(devices, kind, rows):
    make, path, name, dims = NUMBERS[kind]
    net, x = Net(lambda net, x: make(x)), doubles(rows, 2, devices=devices)
    found = re.escape(f"got {name} in output{path}; return a tensor (loss.detach() for loss.item()), or pass ")
    for is_training in (True, False):  # the last batch, too, of which there may be a single chunk
        with pytest.raises(TypeError, match=f"{found}{re.escape(f'out_dims={dims} if it is equal in all replicas')}"):
            DataParallelWithCallback(net, devices).train(is_training)(x)
    if kind not in ("count", "shape") or rows == 1:
        assert repr(DataParallelWithCallback(net, devices, out_dims=dims)(x)) == repr(make(x))


def test_number_that_is_the_whole_output_is_refused_with_a_remedy_that_works():
    net = Net(lambda net, x: 2.5)
    with pytest.raises(
        TypeError, match=r"got float in output; .*, or pass out_dims=\(None,\) and return \(value,\) if"
    ):
        DataParallelWithCallback(net, ["cpu"] * 2)(X)
    net.function = lambda net, x: (2.5,)
    assert DataParallelWithCallback(net, ["cpu"] * 2, out_dims=(None,))(X) == (2.5,)


@pytest.mark.parametrize("values", [(1, 2), (math.nan, 1.0)])
def test_numbers_that_are_named_whole_must_agree(values):
    net = Net(lambda net, x: {"x": x, "n": values[0] if x[0, 0] == 0 else values[1]})
    parallel = DataParallelWithCallback(net, ["cpu"] * 2, out_dims={"n": None})
    assert repr(parallel(X)["n"]) == repr(values[0])
    text = f"output['n'] = {values[0]}, but replica 1 returned {values[1]}; return a tensor in place of a number"
    with pytest.raises(ValueError, match=re.escape(text)):
        parallel(X + torch.arange(4)[:, None])


def test_numbers_in_a_list_with_an_entry_for_each_sample_are_joined():
    net = Net(lambda net, x: [{"score": float(score)} for score in x[:, 0]])
    assert DataParallelWithCallback(net, ["cpu"] * 2, out_dims=0)(X) == [{"score": 0.0}] * 4


class Mode(Enum):  # whose class can be iterated
    TRAIN = 1


class Kind(IntEnum):
    TRAIN = 1


class Movable:
    """Has a method `to`, as a batch of tokens has, but no tensor."""

    def __eq__(self, other):
        return type(other) is Movable

    def __repr__(self):
        return str(vars(self))

    def to(self, device):
        self.device = device
        return self


ALIKE: dict[str, Any] = {
    "sequences": (lambda x: (x, None), lambda x: [x, None]),
    "named": (lambda x: Pair(x, -x), lambda x: (x, -x)),
    "order of keys": (lambda x: {"b": x, "a": (-x,)}, lambda x: OrderedDict(a=[-x], b=x)),
    "values": (lambda x: Output(x, ("a", True, None, b"b")),) * 2,
    "enum": (lambda x: {"x": x, "mode": Mode.TRAIN, "kind": Kind.TRAIN},) * 2,
    "settings": (lambda x: {"x": x, "settings": SETTINGS[1]},) * 2,
    "movable": (lambda x: {"x": x, "tokens": Movable()},) * 2,
    "whole mappings": (lambda x: {"x": x, "more": {"a": [False, "b"], "c": {}}},) * 2,
    "nothing": (lambda x: None,) * 2,
}


@pytest.mark.parametrize("kind", ALIKE)
def test_outputs_that_are_alike_are_put_together_as_those_of_the_first(devices, kind):
    expected = ALIKE[kind][0](torch.arange(12.0, device=as_devices(devices)[0]).view(6, 2))
    assert repr(returning(*ALIKE[kind], devices)) == repr(expected)


def test_arrays_that_replicas_return_must_be_equal():
    numpy = pytest.importorskip("numpy")
    shared, x = numpy.array([math.nan]), torch.arange(4.0).view(4, 1)  # not equal to itself
    for make in (lambda: numpy.arange(2), lambda: numpy.ones((2, 2)), lambda: shared):
        parallel = DataParallelWithCallback(Net(lambda net, x, make=make: {"value": make(), "x": x}), ["cpu"] * 2)
        assert repr(parallel(x)["value"]) == repr(make())
        parallel.module.function = lambda net, x, make=make: {"value": make() if x[0] else numpy.arange(3), "x": x}
        with pytest.raises(ValueError, match="replica 0 returned"):
            parallel(x)


@pytest.mark.parametrize("name", ["float64", "float32", "int64", "array"])
def test_numbers_of_numpy_are_refused_but_no_bools(name):
    numpy = pytest.importorskip("numpy")
    net = Net(lambda net, x: {"x": x, "n": getattr(numpy, name)(2)})
    with pytest.raises(TypeError, match=r"got \w+ in output\['n'\]; .*, or pass out_dims=\{'n': None\} if it"):
        DataParallelWithCallback(net, ["cpu"] * 2)(X)
    assert DataParallelWithCallback(net, ["cpu"] * 2, out_dims={"n": None})(X)["n"] == 2
    net.function = lambda net, x: {"x": x, "flag": numpy.bool_(True)}
    assert DataParallelWithCallback(net, ["cpu"] * 2)(X)["flag"] == True  # noqa: E712
