"""Scatter and gather of trees: the values, the types, the gradients and the errors of `torch.nn.parallel`."""

import re
from collections import OrderedDict, UserList, namedtuple

import pytest
import torch
from conftest import device_lists
from helpers import Net, as_devices, doubles
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from sync_batchnorm import DataParallelWithCallback
from sync_batchnorm.wrapper.scatter_gather import gather, scatter

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and equal(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


TREES = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, [x * 2]],
    "dict": lambda x: {"b": x, "a": {"c": x + 1}},
    "ordered": lambda x: OrderedDict(z=x, y=x + 1),
    "namedtuple": lambda x: Pair(x, (x,)),
    "none": lambda x: {"x": x, "none": [None, x]},
    "empty-containers": lambda x: {"x": x, "list": [], "tuple": (), "dict": {}},
}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_other_dimensions_can_be_cut(dim):
    x = torch.randn(4, 6, 5)
    parts = scatter(x, [CPU] * 3, dim)
    assert equal(list(parts), list(x.chunk(3, dim)))
    assert equal(gather(parts, CPU, dim), x)


def test_chunks_have_memory_of_their_own():
    x = torch.randn(4, 2)
    parts = scatter({"x": x, "list": [x[:, 0], x.long()]}, [CPU] * 2, 0)
    before = [part["x"].clone() for part in parts], [part["list"][0].clone() for part in parts]
    x.zero_()
    assert equal([part["x"] for part in parts], before[0])
    assert equal([part["list"][0] for part in parts], before[1])
    parts[0]["x"].fill_(1)
    assert equal(x, torch.zeros(4, 2))
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
    for ours, theirs in zip(scatter(x, [CPU] * 2, 0), x.chunk(2), strict=True):
        assert ours.stride() == theirs.clone().stride()


def test_scalars_have_no_other_dimension_to_be_gathered_along():
    with pytest.raises(RuntimeError, match="zero-dimensional tensor"):
        gather([torch.tensor(1.0)] * 2, CPU, 1)


def test_scalars_become_a_vector_with_a_warning():
    rows = torch.arange(3.0, requires_grad=True)
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        vector, _ = DataParallelWithCallback(Net(lambda net, row: UserList([row.sum(), row])), ["cpu"] * 3)(rows)
    assert equal(vector.detach(), rows.detach())
    vector.backward(torch.tensor([3.0, 4.0, 5.0]))
    assert rows.grad.tolist() == [3.0, 4.0, 5.0]


def test_outputs_of_another_dtype_are_gathered_under_autocast():
    rows = torch.arange(4, dtype=torch.float16)  # which autocast on the CPU does not concatenate
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert equal(DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)(rows), rows)


ECHO = Net(lambda net, *args, **kwargs: (list(args), kwargs))


@pytest.mark.parametrize(("number", "rows", "dim"), [(1, 5, 2), (2, 1, 0)])
def test_single_chunk_has_the_objects_of_the_caller(number, rows, dim):
    tree = [doubles(rows, 2), {"a": doubles(rows, 2)}]
    module = Net(lambda net, positional, named: net.seen.extend([positional, named]), seen=[])
    DataParallelWithCallback(module, ["cpu"] * number, dim=dim)(tree, named=tree)
    assert module.seen[0] is module.seen[1] is tree


@pytest.mark.parametrize("kind", [kind for kind in TREES if kind != "empty-containers"])
def test_wrapper_passes_trees_in_and_out(devs, kind):
    tree = TREES[kind](doubles(5, 2, devices=devs))
    args, kwargs = DataParallelWithCallback(ECHO, devs)(tree, named=tree)
    assert equal(args, [tree])
    assert equal(kwargs, {"named": tree})


STRUCTURES = {  # what two replicas return, and how an error names it
    "none": (lambda x: x, lambda x: None, "Tensor, but replica 1 returned None"),
    "tuple": (lambda x: x, lambda x: (x, x), "Tensor, but replica 1 returned (Tensor, Tensor)"),
    "none-inside": (lambda x: (x, [None, x]), lambda x: (x, x), "(Tensor, (None, Tensor)), but replica 1 returned (T"),
    "keys": (lambda x: {"a": x}, lambda x: {"b": x}, "{'a': Tensor}, but replica 1 returned {'b': Tensor}"),
    "fewer-keys": (lambda x: {"a": x}, lambda x: {}, "{'a': Tensor}, but replica 1 returned {}"),
    "lengths": (lambda x: [x, x], lambda x: [x], "(Tensor, Tensor), but replica 1 returned (Tensor)"),
    "fields": (
        lambda x: Pair(x, x),
        lambda x: {"left": x, "right": x},
        "(Tensor, Tensor), but replica 1 returned {'left':",
    ),
    "scalar": (lambda x: x, lambda x: x.sum(), "Tensor, but replica 1 returned scalar Tensor"),
}


def returning(first, others):
    return Net(lambda net, input: (first if input[0, 0] == 0 else others)(input))


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_replicas_that_return_different_structures_are_named(devices, kind):
    *outputs, found = STRUCTURES[kind]
    parallel = DataParallelWithCallback(returning(*outputs), devices)
    message = f"replica 0 returned {re.escape(found)}.*; return the same"
    with pytest.raises(ValueError, match=message):
        parallel(torch.arange(12.0, device=as_devices(devices)[0]).view(6, 2))


@pytest.mark.parametrize(
    "output", ["text", {1.0}, 3, 1.5, True, object(), iter([])], ids=lambda output: type(output).__name__
)
@pytest.mark.parametrize("devices", device_lists(2))
def test_replicas_that_return_no_tensors_are_told(devices, output):
    parallel = DataParallelWithCallback(returning(*[lambda x: (x, output)] * 2), devices)
    with pytest.raises(
        TypeError, match=f"mappings and dataclasses of tensors, got {type(output).__name__}; return tensors"
    ):
        parallel(torch.zeros(4, 2, device=as_devices(devices)[0]))


@pytest.mark.parametrize("wrap", [lambda packed: packed, lambda packed: {"packed": packed}], ids=["alone", "in a dict"])
@pytest.mark.parametrize("devices", device_lists(2))
def test_packed_sequences_cannot_be_returned(devices, wrap):
    parallel = DataParallelWithCallback(Net(lambda net, x: wrap(pack_sequence([x[0], x[1, :1]]))), devices)
    with pytest.raises(TypeError, match="dataclasses of tensors, got PackedSequence; return tensors"):
        parallel(torch.zeros(4, 2, device=as_devices(devices)[0]))


ALIKE = {
    "sequences": (lambda x: (x, None), lambda x: [x, None]),
    "named": (lambda x: Pair(x, -x), lambda x: (x, -x)),
    "order of keys": (lambda x: {"b": x, "a": (-x,)}, lambda x: OrderedDict(a=[-x], b=x)),
}


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("devices", device_lists(2))
def test_structures_that_differ_in_kind_only_are_put_together_as_those_of_the_first(devices, kind):
    parallel = DataParallelWithCallback(returning(*ALIKE[kind]), devices)
    data = torch.arange(8.0, device=as_devices(devices)[0]).view(4, 2)
    assert equal(parallel(data), ALIKE[kind][0](data))


SIZES = {
    "tensor": (lambda x: x, lambda x: x[:, :1], "(3, 2)", "(3, 1)"),
    "dict": (lambda x: {"a": x, "b": x}, lambda x: {"a": x, "b": x[:, :1]}, "(3, 2)", "(3, 1)"),
    "dimensions": (lambda x: [x], lambda x: [x[..., None]], "(3, 2)", "(3, 2, 1)"),
}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("devices", device_lists(2))
def test_outputs_that_differ_in_other_sizes_than_rows_are_named(devices, kind):
    """As those of `pad_packed_sequence` without a total length, since each chunk has a longest sequence of its own."""
    first, others, expected, found = SIZES[kind]
    parallel = DataParallelWithCallback(returning(first, others), devices)
    text = re.escape(
        f"replica 0 returned a tensor of shape {expected}, but replica 1 one of shape {found}; outputs are put "
        "together along dimension 0, so all other sizes must be equal"
    )
    with pytest.raises(RuntimeError, match=f"^{text}; .*total_length"):
        parallel(torch.arange(12.0, device=as_devices(devices)[0]).view(6, 2))
