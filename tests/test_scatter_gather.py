"""Scatter and gather of trees: the values, the types, the gradients and the errors of `torch.nn.parallel`."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from helpers import doubles
from torch import nn

from sync_batchnorm import DataParallelWithCallback
from sync_batchnorm.scatter_gather import check_structures, gather, scatter, tensors_in

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


def equal(one, other):
    """Compare trees: types, keys, and values."""
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
    "empty-containers": lambda x: {"x": x, "list": [], "tuple": (), "dict": {}},
}


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("rows", [4, 5, 6])
def test_trees_are_cut_as_their_tensors_are(kind, rows):
    x = torch.randn(rows, 2)
    expected = [TREES[kind](chunk) for chunk in x.chunk(4)]
    assert equal(scatter(TREES[kind](x), [CPU] * 4, 0), expected)


def test_empty_containers_are_the_own_of_each_replica():
    first, second = scatter({"x": torch.zeros(4), "list": []}, [CPU] * 2, 0)
    assert first["list"] is not second["list"]


@pytest.mark.parametrize("kind", [kind for kind in TREES if kind != "empty-containers"])
def test_gathering_undoes_scattering(kind):
    tree = TREES[kind](torch.randn(5, 2))
    assert equal(gather(scatter(tree, [CPU] * 3, 0), CPU, 0), tree)


@pytest.mark.parametrize("leaf", [None, 3, "text", object()], ids=["None", "int", "str", "object"])
def test_leaves_that_are_no_tensors_are_shared(leaf):
    parts = scatter((torch.zeros(4), leaf), [CPU] * 2, 0)
    assert all(part[1] is leaf for part in parts)


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


def test_single_chunk_is_the_tensor_itself():
    x = torch.randn(1, 2)
    assert scatter([x], [CPU] * 2, 0)[0][0] is x


def test_tensor_that_is_there_twice_is_cut_once():
    x = torch.randn(4, 2)
    first, second = scatter({"one": x, "other": (x,)}, [CPU] * 2, 0)
    assert first["one"] is first["other"][0]
    assert second["one"] is second["other"][0]


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


def test_gradients_of_some_parts_only_reach_their_rows():
    x = doubles(6, 2).requires_grad_()
    parts = scatter(x, [CPU] * 3, 0)
    grad = torch.randn_like(parts[1])
    parts[1].backward(grad)
    assert equal(x.grad, torch.cat((torch.zeros_like(grad), grad, torch.zeros_like(grad))))


def test_scattering_and_gathering_can_be_differentiated_twice():
    def through(x):
        return gather([part * part * (i + 1) for i, part in enumerate(scatter(x, [CPU] * 2, 0))], CPU, 0)

    x = doubles(4, 2).requires_grad_()
    assert torch.autograd.gradcheck(through, x)
    assert torch.autograd.gradgradcheck(through, x)


def test_scalars_become_a_vector_with_a_warning():
    scalars = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        vector = gather(scalars, CPU, 0)
    assert equal(vector.detach(), torch.tensor([0.0, 1.0, 2.0]))
    vector.backward(torch.tensor([3.0, 4.0, 5.0]))
    assert [scalar.grad.item() for scalar in scalars] == [3.0, 4.0, 5.0]


def test_scalars_along_another_dimension_are_refused_in_the_words_of_torch():
    with pytest.raises(RuntimeError, match=r"zero-dimensional tensor .* cannot be concatenated"):
        gather([torch.tensor(1.0)] * 2, CPU, 1)


def test_none_stays_none():
    assert gather([None, None], CPU, 0) is None
    assert equal(gather([{"x": None}, {"x": None}], CPU, 0), {"x": None})


def test_structures_are_told_by_keys_lengths_and_places_of_tensors():
    x = torch.zeros(1)
    check_structures([{"b": x, "a": [x, None]}, OrderedDict(a=(x, None), b=x)])
    check_structures([Pair(x, x), (x, x)])
    message = r"but got \{'x': Tensor\} from replica 0 and \{\} from replica 2; return the same keys"
    with pytest.raises(ValueError, match=message):
        check_structures([{"x": x}, {"x": x}, {}])
    message = r"but got \(Tensor, \(None, Tensor\)\) from replica 0 and \(Tensor, Tensor\) from replica 1"
    with pytest.raises(ValueError, match=message):
        check_structures([(x, [None, x]), (x, x)])


@pytest.mark.parametrize("output", [3, 1.5, object(), "text", {1}, iter([])], ids=lambda output: type(output).__name__)
def test_outputs_that_cannot_be_put_together_are_told(output):
    with pytest.raises(TypeError, match=f"but got {type(output).__name__}; return tensors"):
        check_structures([[output], [output]])


@pytest.mark.parametrize("output", [3, 1.5, object()], ids=["int", "float", "object"])
def test_outputs_that_are_no_tensors_are_refused(output):
    with pytest.raises(TypeError, match=f"but got {type(output).__name__}; return tensors"):
        gather([output, output], CPU, 0)


def test_tensors_are_found_in_order():
    tensors = [torch.zeros(i) for i in range(4)]
    assert tensors_in([tensors[0], {"x": (tensors[1], 5)}, None, Pair(tensors[2], tensors[3])]) == tensors


class Echo(nn.Module):
    """Returns what it gets."""

    def forward(self, *args, **kwargs):
        return list(args), kwargs


@pytest.mark.parametrize("kind", [kind for kind in TREES if kind != "empty-containers"])
def test_wrapper_passes_trees_in_and_out(devs, kind):
    tree = TREES[kind](doubles(5, 2, devices=devs))
    args, kwargs = DataParallelWithCallback(Echo(), devs)(tree, named=tree)
    assert equal(args, [tree])
    assert equal(kwargs, {"named": tree})
