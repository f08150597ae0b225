"""Arguments: what each replica gets; what cannot be cut is refused, and lists that are not cut are warned of."""

import ast
import re
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import device_lists
from helpers import Named, Net, are_distinct_gpus, as_devices, assert_equal, doubles, twins
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

from sync_batchnorm import DataParallelWithCallback

X = torch.zeros(4, 2)
BOXES = [torch.zeros(n, 4) for n in (8, 4, 8, 12)]  # whose rows are in proportion to those of `X`


@dataclass
class Sample:
    images: Any
    more: Any


Four = namedtuple("Four", ["one", "two", "three", "four"])
LISTS = {  # what is passed, and how the warning names the list and its remedy
    "rows in proportion": ([X, BOXES], {}, "y, a list,", "{'y': 0}"),
    "clouds alone": ([[torch.zeros(n, 3) for n in (4, 8, 4)]], {}, "x, a list,", "{'x': 0}"),
    "targets": ([X, [{"boxes": box, "name": "a"} for box in BOXES]], {}, "y, a list,", "{'y': 0}"),
    "by name": ([], {"x": X, "boxes": tuple(BOXES)}, "boxes, a tuple,", "{'boxes': 0}"),
    "below": ([{"data": Sample(X, [X, BOXES])}], {}, "x['data'].more[1], a list,", "{'x': {'data': {'more': {1: 0}}}}"),
    "others": ([X, X, BOXES], {}, "z[0], a list,", "{'z': {0: 0}}"),
}


def call(args, kwargs, devices=("cpu", "cpu"), dim=0):
    return DataParallelWithCallback(Takes(), list(devices), dim=dim)(*args, **kwargs)


class Takes(nn.Module):
    def forward(self, x, y=None, *z, **named):
        return None


@pytest.mark.smoke
@pytest.mark.parametrize("kind", LISTS)
def test_list_that_certainly_has_an_entry_for_each_sample_is_named_once(kind):
    args, kwargs, found, remedy = LISTS[kind]
    text = f"^{re.escape(found)} is not cut by .* an entry for each sample, pass in_dims={re.escape(remedy)} "
    with pytest.warns(UserWarning, match=text) as caught:
        call(args, kwargs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    call(args, kwargs)


NO_LISTS = {
    "feature maps": [torch.zeros(3, 8), [torch.zeros(3, n) for n in (1, 2, 3)]],
    "feature maps alone": [[torch.zeros(3, n) for n in (1, 2, 3)]],
    "shape": [torch.zeros(2, 3), (224, 224)],
    "fields": [X, Four(X, X, "c", {"a": X})],
    "scalars": [X, torch.tensor(1.0), {"a": torch.tensor(1.0)}, Sample(torch.tensor(1.0), Four(*torch.arange(4)))],
    "layers": [X, ["conv1", 2, 3.0, "conv4"]],
    "two views": [torch.zeros(2, 3), [{"image": torch.zeros(2, 3), "name": "a"}] * 2],
    "one entry": [torch.zeros(1, 2), [{"a": torch.zeros(1)}]],
    "another number of dicts": [X, [{"a": X}] * 3],
    "auxiliary outputs": [X, {"aux": [{"a": X}] * 6}],
}


@pytest.mark.parametrize("kind", NO_LISTS)
def test_what_is_no_list_by_sample_is_not_named(kind):
    call(NO_LISTS[kind], {})
    call([NO_LISTS[kind][0]], dict(zip("abc", NO_LISTS[kind][1:], strict=False)))


def test_list_that_is_named_or_not_cut_is_not_warned_of():
    call([X, BOXES], {}, ["cpu"])
    call([X[:1], [X[:1], X[:1]]], {})
    for dims in ({"y": 0}, {"y": (0, 0, 0, 0)}, {"y": None}, {"y": {0: 0, 1: 0, 2: 0, 3: 0}}):
        DataParallelWithCallback(Takes(), ["cpu"] * 2, in_dims=dims)(X, BOXES)


UNEQUAL = "so that replicas would get rows that do not belong together; name the dimension of the samples of "
TWO = ", in_dims={'y': %s} for a list with an entry for each sample, or pass in_dims={'y': %s} to the wrapper if"
ROWS: dict[str, Any] = {  # arguments on two devices, and what their error says; None if they are cut
    "5 and 10": ([torch.zeros(5, 3), torch.zeros(10, 3)], f"x has 5 rows, but y has 10, {UNEQUAL}y in in_dims, or"),
    "4 and 1": ([torch.zeros(4, 2), torch.zeros(1, 2)], "x has 4 rows, but y has 1"),
    "6 and 7": ([torch.zeros(6, 3), torch.zeros(7, 3)], "x has 6 rows, but y has 7, "),
    "none and some": ([torch.zeros(0, 3), torch.zeros(4, 3)], "x has 0 rows, but y has 4"),
    "none and none": ([torch.zeros(0, 3), torch.zeros(0, 3)], None),
    "a hidden state": (
        [torch.zeros(7, 5), torch.zeros(2, 7)],
        f"{UNEQUAL}y in in_dims, or pass in_dims={{'y': None}} t",
    ),
    "boxes": ([X[:3], [torch.zeros(n, 4) for n in (7, 2, 1)]], "y[0] in in_dims" + TWO % (0, "{0: None}")),
    "keys": ([X, {0: [X, torch.zeros(5)], "a": X}], "y[0][1] in in_dims" + TWO % ("{0: 0}", "{0: {1: None}}")),
    "fields": ([X, Sample(X, (X, torch.zeros(5)))], TWO % ("{'more': 0}", "{'more': {1: None}}")),
    "dimension": ([torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(3)], "x has 4 rows, but z[0] has 3"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_chunks_that_do_not_belong_together_are_refused_with_names_and_remedy(kind):
    args, text = ROWS[kind]
    if text is None:
        return call(args, {})
    with pytest.raises(ValueError, match=re.escape(text)):
        call(args, {})


LIST = "in_dims names y as a list with an entry for each sample: pass as many, or pass in_dims={'y': %s} to the wrapper"
NAMED: dict[str, Any] = {  # what in_dims names for `y` beside 5 rows, and what the error says of it
    "another dimension": (torch.zeros(2, 5), 0, "y of shape (2, 5): name another one if that has its samples, or pass"),
    "from the end": (torch.zeros(5, 3), -1, "in_dims names dimension -1 of y of shape (5, 3): name another one"),
    "entries": (["a", "b"], 0, LIST % "None"),
    "a tuple": ((torch.zeros(5), torch.zeros(5)), 0, LIST % "(0, 0)"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_said_of_a_dimension_that_is_named_is_not_to_name_one(kind):
    value, dim, text = NAMED[kind]
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        DataParallelWithCallback(Takes(), ["cpu"] * 2, in_dims={"y": dim})(torch.zeros(5, 3), value)
    assert "name the dimension" not in str(caught.value)


def test_tensors_whose_rows_are_in_proportion_are_cut_as_by_torch(devices):
    parallel = DataParallelWithCallback(Takes(), devices)
    tensors = [torch.arange(rows, device=as_devices(devices)[0]) for rows in (8, 16)]
    for pair in (tensors, tensors[::-1]):
        chunks, _ = parallel.scatter(tuple(pair), {}, parallel.device_ids)
        for tensor, pieces in zip(pair, zip(*chunks, strict=True), strict=True):
            assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in tensor.chunk(len(devices))]


def test_arguments_without_the_dimension_of_the_wrapper_are_refused():
    with pytest.raises(
        ValueError, match=re.escape("y of shape (4,) has no dimension 1; name the dimension of its samp")
    ):
        call([torch.zeros(2, 4), torch.zeros(4)], {}, dim=1)
    DataParallelWithCallback(Takes(), ["cpu"] * 2, dim=1, in_dims={"y": 0})(torch.zeros(2, 4), torch.zeros(4))


SCALARS: dict[str, Any] = {  # arguments with a tensor without dimensions in a list, its path, and how in_dims names it
    "labels": ([X, list(torch.arange(4))], {}, "y[0]", "{'y': 0}", "{'y': {0: None}}"),
    "dicts": ([X, [{"a": torch.tensor(i)} for i in range(4)]], {}, "y[0]['a']", "{'y': 0}", "{'y': {0: {'a': None}}}"),
    "a tensor beside it": ([[X, torch.tensor(2.0)]], {}, "x[1]", "{'x': 0}", "{'x': {1: None}}"),
    "tuple": ([X], {"a": (torch.tensor(1),)}, "a[0]", "{'a': 0}", "{'a': {0: None}}"),
    "others": ([X, X, [torch.tensor(1)]], {}, "z[0][0]", "{'z': {0: 0}}", "{'z': {0: {0: None}}}"),
}


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("rows", [1, 4])
def test_tensors_without_dimensions_in_lists_are_refused_with_both_remedies(kind, rows):
    args, kwargs, path, by_sample, whole = SCALARS[kind]
    args = [arg[:rows] if arg is X else arg for arg in args]
    text = f"^{re.escape(path)}, a Tensor without dimensions, cannot be cut .*, in_dims={re.escape(by_sample)} for "
    with pytest.raises(TypeError, match=f"{text}a list .*, or {re.escape(f'in_dims={whole}')} if every replica needs"):
        call(args, kwargs)
    call(args, kwargs, ["cpu"])
    DataParallelWithCallback(Takes(), ["cpu"] * 2, in_dims=ast.literal_eval(whole))(*args, **kwargs)


class CutsLists(DataParallelWithCallback):
    """Cuts a list by a `scatter` of its own, which calls that of the wrapper."""

    def scatter(self, inputs, kwargs, device_ids):
        assert {type(device) for device in device_ids} == {int if are_distinct_gpus(device_ids) else torch.device}
        images, boxes = inputs
        chunks, kwargs = super().scatter((images,), kwargs, device_ids)
        boxes = iter(boxes)
        return [(chunk, [next(boxes).to(chunk.device) for _ in chunk]) for (chunk,) in chunks], kwargs


@pytest.mark.parametrize("rows", [1, 5])
def test_own_scatter_and_named_lists_give_replicas_the_entries_of_their_samples(devices, rows):
    device = as_devices(devices)[0]
    sums = Net(lambda net, images, boxes: images + torch.stack([entry.sum() for entry in boxes])[:, None])
    images, boxes = doubles(rows, 1, devices=devices), [doubles(n + 1, 4) for n in range(rows)]
    expected = images + torch.stack([entry.sum() for entry in boxes])[:, None].to(device)
    assert_equal(CutsLists(sums, devices)(images, boxes), expected)
    named = DataParallelWithCallback(sums, devices, in_dims={"args": {1: 0}})
    assert_equal(named(images, boxes), expected)


def test_a_child_of_the_name_that_compiled_modules_use_is_not_what_is_called():
    net = Named(lambda net, x, mask: net._orig_mod(x) * mask.sum(), _orig_mod=nn.Linear(2, 2))
    DataParallelWithCallback(net, ["cpu"] * 2, in_dims={"mask": None})


def shape_or_value(leaf):
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf


ARGUMENTS = {  # the number of devices, what the wrapper gets, and what each replica that runs gets of it
    "keywords": (2, [], {"input": torch.zeros(4, 3), "flag": True}, [([], {"input": (2, 3), "flag": True})] * 2),
    "nothing": (3, [], {}, [([], {})]),
    "one-device": (1, [torch.zeros(4, 2), torch.zeros(3)], {}, [([(4, 2), (3,)], {})]),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_replica_gets_its_part_of_the_arguments(kind):
    number, args, kwargs, expected = ARGUMENTS[kind]
    seen = []
    net = Net(lambda net, *args, **kwargs: seen.append(tree_map(shape_or_value, ([*args], kwargs))))
    assert DataParallelWithCallback(net, ["cpu"] * number)(*args, **kwargs) is None
    assert seen == expected


WITHOUT_TENSORS = {
    "number": ((5,), {}, "int"),
    "text": ((["a", "b"],), {"flag": True}, "str, bool"),
    "object": ((object(),), {}, "object"),
    "none": ((), {"images": None}, "NoneType"),
    "empty": (([],), {}, "list"),
    "array": (([torch.zeros(2).numpy()],), {}, "ndarray"),
}


@pytest.mark.parametrize("kind", WITHOUT_TENSORS)
def test_arguments_without_a_tensor_are_refused_where_every_replica_would_get_all(devices, kind):
    args, kwargs, found = WITHOUT_TENSORS[kind]
    message = f"expected tensors to cut into chunks, but got arguments of {found} only, of which each of 2 .*; pass"
    with pytest.raises(TypeError, match=message):
        DataParallelWithCallback(nn.Identity(), devices)(*args, **kwargs)
    assert DataParallelWithCallback(Net(lambda net, *_, **__: 1), devices[:1])(*args, **kwargs) == 1


def nested(layout):
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype
        return torch.nested.nested_tensor(rows, layout=layout)


UNCUT = {
    "packed": (lambda: pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), "a PackedSequence that holds tensors"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "a tensor of torch.sparse_coo"),
    "jagged": (lambda: nested(torch.jagged), "a nested tensor"),
    "nested": (lambda: nested(torch.strided), "a nested tensor"),
}


@pytest.mark.parametrize("kind", UNCUT)
def test_what_cannot_be_cut_into_rows_is_refused_by_name(kind):
    make, what = UNCUT[kind]
    net, remedy = Net(lambda net, *args, **kwargs: 1), "pass dense tensors .*padded ones and .* a dict or dataclass"
    parallel = DataParallelWithCallback(net, ["cpu"] * 2)
    with pytest.raises(TypeError, match=rf"^args\[1\]\[0\], {what}, cannot be cut .*{remedy}.*'args': {{1: {{0: None"):
        parallel(X, [make()])
    with pytest.raises(TypeError, match=rf"^other\['one'\], {what}, cannot be cut .*{remedy}.*'other': {{'one': None"):
        parallel(other={"one": make()})
    assert DataParallelWithCallback(net, ["cpu"])(X, make()) == 1


def scaled(net, input, factors):
    assert all(factor.device == input.device for factor in factors.values())
    return net.bn(input) * factors["trained"] / factors["number"]


@pytest.mark.parametrize("rows", [5, 6])
@pytest.mark.parametrize("devices", device_lists(1, 4))
def test_every_replica_has_a_scalar_tensor_on_its_device(devices, rows):
    plain, parallel = twins(Net(scaled, bn=nn.BatchNorm1d(3)).double(), devices)
    input, factor = doubles(rows, 3, devices=devices), doubles(1, devices=devices)[0].requires_grad_()
    number = torch.tensor(6, device=input.device)
    outputs = [model(input, {"trained": factor, "number": number}) for model in (plain, parallel)]
    assert_equal(outputs[1], outputs[0])
    grad = torch.randn_like(input)
    assert_equal(*[torch.autograd.grad(output, factor, grad)[0] for output in outputs])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("devices", device_lists(4))
def test_fewer_samples_than_devices_may_come_with_arguments_that_are_no_tensors(devices, rows):
    net = Named(lambda net, factor, input: net.bn(input) * factor, bn=nn.BatchNorm1d(3))
    plain, parallel = twins(net.double(), devices)
    input = doubles(rows, 3, 2, devices=devices)
    assert_equal(parallel(2, input=input), plain(2, input))
