"""Scatter and gather of trees of every kind: values, types, gradients and errors, as those of `torch.nn.parallel`."""

import math
import re
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import INTERLEAVED, device_lists, needs_two_gpus
from helpers import Cache, Named, Net, as_devices, assert_same_tree, count_calls, doubles
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback

on_devices = pytest.mark.parametrize("devices", [*device_lists(2, 3), *INTERLEAVED])


@dataclass
class Batch:
    images: Tensor
    mask: Tensor | None = None
    kind: Any = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSlots:
    rows: Tensor
    scale: str = "2"


@dataclass
class Halved:
    """Changes a field when it is made, and has an attribute that is no field."""

    rows: Tensor

    def __post_init__(self):
        self.number = len(self.rows)
        self.rows = self.rows / 2


@dataclass
class Settings:
    """Has no tensors, and cannot be built anew."""

    names: Any
    parent: Any = None
    number: int = field(init=False, default=3)


class ModelOutput(OrderedDict):
    """Both a dict and a dataclass, as that of transformers: fields that are None are no items."""

    def __post_init__(self):
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                self[entry.name] = getattr(self, entry.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class Logits(ModelOutput):
    logits: Tensor | None = None
    hidden: tuple | None = None


class Encoding(UserDict):
    """Takes more than a dict, as `BatchEncoding` of transformers."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class Table(Mapping):
    """Has memory that copies share, and a constructor that takes a dict."""

    def __init__(self, columns):
        self.columns = dict(columns)

    def __getitem__(self, key):
        return self.columns[key]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self):
        return len(self.columns)


class Rowwise(Table):
    """Iterates over rows, as a `TensorDict`."""

    def __iter__(self):
        return iter(range(4))

    def keys(self):
        return self.columns.keys()


class Labelled(dict):
    label = "none"


def with_attributes(made, **attributes):
    vars(made).update(attributes)
    return made


CONFIG = Settings(["a"])
CONFIG.parent = CONFIG  # A walk that looks into it must not go on for ever.
Pair = namedtuple("Pair", ["left", "right"])
TREES = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, [x * 2]],
    "dict": lambda x: {"b": x, "a": {"c": x + 1}, 0: (x,)},
    "ordered": lambda x: OrderedDict(z=x, y=x + 1),
    "namedtuple": lambda x: Pair(x, (x, Batch(x))),
    "none": lambda x: {"x": x, "none": [None, x], "more": (None, None)},
    "empty": lambda x: {"x": x, "list": [], "tuple": (), "dict": {}},
    "dataclass": lambda x: Batch(x, x > 0, "eval"),
    "frozen slots": lambda x: FrozenSlots(rows=x, scale="3"),
    "nested": lambda x: Batch(Batch(x, x + 1), [FrozenSlots(rows=x), (x,)], {"in dict": Batch(x)}),
    "UserDict": lambda x: Encoding({"ids": x, "more": [x, Batch(x)], "text": "a"}, encodings=["a"]),
    "ModelOutput": lambda x: Logits(x, (x, x + 1)),
    "ModelOutput without its first": lambda x: Logits(hidden=(x,)),
    "defaultdict": lambda x: defaultdict(list, a=x, b=[x]),
    "Counter": lambda x: Counter({"a": x}),
    "Table": lambda x: Table({"a": x, "b": (x,)}),
    "Rowwise": lambda x: Rowwise({"a": x}),
    "proxy": lambda x: MappingProxyType({"a": x}),
    "ChainMap": lambda x: ChainMap({"a": x}, {"b": x + 1}),
    "dataclass that changes its field": Halved,
    "dataclass with attributes": lambda x: with_attributes(Batch(x), name="given"),
    "dict with attributes": lambda x: with_attributes(Labelled(x=x), label="given"),
}


def scattered(tree, devices):
    """Return what each replica gets as its only argument, both as a positional and as a keyword one."""
    parallel = DataParallelWithCallback(nn.Identity(), devices)
    inputs, kwargs = parallel.scatter((tree,), {"named": tree}, parallel.device_ids)
    for args, named in zip(inputs, kwargs, strict=True):
        assert_same_tree(args[0], named["named"], "argument", 0.0)
    return [args[0] for args in inputs]


def returned(make, x, devices):
    """Return the output of a wrapper whose replicas return what `make` makes of their rows."""
    return DataParallelWithCallback(Net(lambda net, x: make(x)), devices)(x)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", TREES)
@on_devices
def test_trees_of_every_kind_are_cut_and_put_together(devices, kind):
    x = doubles(5, 2, devices=devices)
    before, tree = TREES[kind](x), TREES[kind](x)
    for part, rows in zip(scattered(tree, devices), x.chunk(len(devices)), strict=True):
        assert_same_tree(part, TREES[kind](rows), "argument", 0.0)
    assert_same_tree(tree, before, "argument", 0.0)
    assert_same_tree(returned(TREES[kind], x, devices), before, "output", 0.0)


@pytest.mark.parametrize(
    "make",
    [lambda x: Logits(x, (Cache([[x], [x + 1]]),)), lambda x: UserList([x, [x]]), lambda x: deque([x, x + 1])],
    ids=["Cache", "UserList", "deque"],
)
def test_iterables_that_replicas_return_are_made_anew(devices, make):
    x = doubles(5, 2, devices=devices)
    assert_same_tree(returned(make, x, devices), make(x), "output", 0.0)


@on_devices
def test_scalars_of_trees_are_copied_and_gathered(devices):
    device = as_devices(devices)[0]
    scale, x = torch.tensor(3.0, device=device), torch.arange(8.0, device=device).view(8, 1)
    for part, at in zip(scattered(Batch(x, mask=scale), devices), as_devices(devices), strict=True):
        assert part.mask.device == part.images.device == at
        assert part.mask == 3.0
        assert part.mask.data_ptr() != scale.data_ptr()
    x.requires_grad_()
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        output = returned(lambda x: Batch(x, x.sum()), x, devices)
    assert output.mask.tolist() == [float(rows.sum()) for rows in x.detach().chunk(len(devices))]
    grad = torch.arange(len(devices), device=device)
    output.mask.backward(grad.float())
    assert x.grad.tolist() == [[i] for i, rows in enumerate(x.chunk(len(devices))) for _ in rows]


@dataclass(eq=False)
class Module(nn.Module):
    """A module, which is no argument to cut even if it is a dataclass."""

    x: Tensor

    def __post_init__(self):
        super().__init__()


def test_what_holds_no_tensors_is_shared_but_lists_and_dicts_are_the_replicas_own(devices):
    x, table = doubles(5, 2, devices=devices), Table({"a": 1})
    tree = {"x": x, "config": CONFIG, "module": Module(x), "table": table, "own": ["a", {"b": 1}, [], {}]}
    first, second = scattered(tree, devices)
    for part in (first, second):
        assert part["config"] is CONFIG
        assert part["table"] is table
        assert type(part["module"]) is Module
        assert part["module"].x is x
        assert part["own"] == tree["own"]
    pairs = [(first["own"], second["own"]), *zip(first["own"][1:], second["own"][1:], strict=True)]
    assert not any(one is other for one, other in pairs)


@needs_two_gpus
def test_torch_moves_the_tensors_of_trees_between_gpus():
    x, nodes = doubles(4, 2, devices=[0]).requires_grad_(), []
    net = Net(lambda net, batch: (nodes.append(batch.images.grad_fn.name()), batch)[1])
    output = DataParallelWithCallback(net, [0, 1])(Batch(x, x.detach()))
    assert [*nodes, output.images.grad_fn.name()] == ["ScatterBackward", "ScatterBackward", "GatherBackward"]


@dataclass
class Counted:
    rows: Tensor
    text: str = field(init=False, default="")


class Closed(Table):
    def __init__(self, **columns):
        super().__init__(columns)


CANNOT = {  # what cannot be built anew, and how the error goes on
    "init=False": (Counted, ", a Counted, .*: field text is declared with init=False"),
    "mapping": (lambda x: Closed(x=x), ", a Closed, .*: .*positional argument"),
    "below": (lambda x: [UserDict(a=Counted(x))], r"\[0\]\['a'\], a Counted, .*: field text"),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_containers_that_cannot_be_built_anew_are_refused_with_their_path(devices, kind):
    make, text = CANNOT[kind]
    x = doubles(4, 2, devices=devices)
    with pytest.raises(TypeError, match=f"cannot build input{text}.*; use a dict"):
        DataParallelWithCallback(nn.Identity(), devices)(make(x))
    with pytest.raises(TypeError, match=f"cannot build output{text}.*; use a dict"):
        returned(make, x, devices)


class Graph(deque):
    """Can be called, and has items, as those of PyTorch Geometric."""

    def __call__(self):
        return self


class Lazy(Table):
    """A mapping of settings, of which reading one that is missing raises, and which counts how often it is read."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        if self.columns[key] is None:
            raise LookupError(f"missing mandatory value: {key}")
        return self.columns[key]


HIDDEN = {  # what holds tensors that are no leaves, its class, and its path
    "object": (lambda x: (x, SimpleNamespace(rows=[x])), "SimpleNamespace", "[1]"),
    "attribute of a dict": (lambda x: {"a": with_attributes(Labelled(x=x), first=x * 1)}, "Labelled", "['a']"),
    "attribute of a dataclass": (lambda x: {"a": with_attributes(Batch(x), more=(x,))}, "Batch", "['a']"),
    "distribution": (lambda x: Batch(x, kind=torch.distributions.Normal(x, 1.0)), "Normal", ".kind"),
    "packed": (lambda x: [x, nn.utils.rnn.pack_sequence([x])], "PackedSequence", "[1]"),
    "partly unreadable": (lambda x: {"a": Lazy({"x": x, "missing": None})}, "Lazy", "['a']"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_tensors_that_cannot_be_reached_are_refused_with_their_path(devices, kind):
    make, found, path = HIDDEN[kind]
    x = doubles(4, 2, devices=devices)
    text = f"{re.escape(path)}, a {found} that holds tensors, cannot be cut into chunks .*; pass dense tensors"
    with pytest.raises(TypeError, match=f"^input{text}"):
        DataParallelWithCallback(nn.Identity(), devices)(make(x))
    with pytest.raises(TypeError, match=f"got {found} in output{re.escape(path)}; return a tensor"):
        returned(make, x, devices)


def test_tensors_in_what_can_be_called_and_has_items_are_refused():
    with pytest.raises(TypeError, match=r"input\['graphs'\]\[0\], a Graph that holds tensors, cannot be cut"):
        scattered({"x": X, "graphs": [with_attributes(Graph(), x=X)]}, ["cpu"] * 2)


def test_objects_that_hold_tensors_are_handed_on_if_they_are_named_whole(devices):
    x, other = doubles(4, 2, devices=devices), SimpleNamespace(rows=[doubles(3, devices=devices)])
    net = Named(lambda net, x, other: (x * len(other.rows), net.seen.append(other))[0], seen=[])
    DataParallelWithCallback(net, devices, in_dims={"other": None})(x, other)
    assert net.seen == [other, other]


def test_settings_are_handed_on_as_they_are_and_not_read():
    settings, x = {"lazy": Lazy({"scale": 2, "missing": None}), "config": CONFIG}, torch.ones(6, 1)
    net = Net(lambda net, x, settings: x * settings["lazy"]["scale"])
    assert torch.equal(DataParallelWithCallback(net, ["cpu"] * 3)(x, settings=settings), 2 * x)
    assert settings["lazy"].reads == 3  # once in each replica


@pytest.mark.parametrize("make", [lambda words: SimpleNamespace(words=words), Settings, MappingProxyType])
def test_a_vocabulary_beside_the_batch_takes_no_calls_for_its_words(make):
    parallel = DataParallelWithCallback(Net(lambda net, *args: args[0]), ["cpu"] * 4)

    def calls(number):
        arguments = torch.ones(8, 1), make({f"word {i}": i for i in range(number)})
        return count_calls(lambda: parallel.scatter(arguments, {}, parallel.device_ids))

    calls(1)
    assert calls(50_000) == calls(1)


@pytest.mark.parametrize("make", [UserDict, lambda held: Batch(None, kind=held)])
def test_tensors_are_found_behind_many_containers(make):
    held = {**{str(i): [i, [i]] for i in range(2000)}, "last": {"x": torch.arange(4.0)}}
    parallel = DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)
    chunks, _ = parallel.scatter((make(held),), {}, parallel.device_ids)
    assert [getattr(part, "kind", part)["last"]["x"].tolist() for (part,) in chunks] == [[0, 1], [2, 3]]


def test_tree_that_contains_itself_is_refused():
    tree = Batch(X, [])
    tree.mask.append(tree)
    for call in (lambda: scattered(tree, ["cpu"] * 2), lambda: returned(lambda x: tree, X, ["cpu"] * 2)):
        with pytest.raises(ValueError, match="arguments or outputs are nested too deeply, or contain themselves"):
            call()


X = torch.zeros(4, 2)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_other_dimensions_can_be_cut(dim):
    parallel, x = DataParallelWithCallback(nn.Identity(), ["cpu"] * 3, dim=dim), torch.randn(4, 6, 5)
    parts = [part for (part,) in parallel.scatter((x,), {}, parallel.device_ids)[0]]
    assert all(map(torch.equal, parts, x.chunk(3, dim)))
    assert torch.equal(parallel.gather(parts, "cpu"), x)


def test_chunks_have_memory_of_their_own():
    x = torch.randn(4, 2)
    parts = scattered({"x": x, "list": [x[:, 0], x.long()]}, ["cpu"] * 2)
    before = [tensor.clone() for part in parts for tensor in (part["x"], *part["list"])]
    x.zero_()
    assert all(map(torch.equal, [tensor for part in parts for tensor in (part["x"], *part["list"])], before))
    parts[0]["x"].fill_(1)
    assert torch.equal(x, X)


def test_chunks_keep_the_order_of_dimensions_in_memory():
    images = [torch.randn(4, 3, size, size).to(memory_format=torch.channels_last) for size in (5, 1)]
    for x in (*images, torch.randn(3, 4).t(), torch.randn(5, 4, 3, 2).movedim(1, 0)):
        for ours, theirs in zip(scattered(x, ["cpu"] * 2), x.chunk(2), strict=True):
            assert ours.stride() == theirs.clone().stride()


def test_scalars_have_no_other_dimension_to_be_gathered_along():
    with pytest.raises(RuntimeError, match="zero-dimensional tensor"):
        DataParallelWithCallback(Net(lambda net, x: x.sum()), ["cpu"] * 2, dim=1)(X)


def test_outputs_of_another_dtype_are_gathered_under_autocast():
    rows = torch.arange(4, dtype=torch.float16)  # which autocast on the CPU does not concatenate
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)(rows), rows)


@pytest.mark.parametrize(("number", "rows"), [(1, 5), (2, 1)])
def test_single_chunk_has_the_objects_of_the_caller_unless_they_are_elsewhere(devices, number, rows):
    tree = [Batch(doubles(rows, 2, devices=devices)), {"a": doubles(rows, 2, devices=devices)}]
    net = Net(lambda net, positional, named: net.seen.extend([positional, named]), seen=[])
    parallel = DataParallelWithCallback(net, devices[:number])
    parallel(tree, named=tree)
    parallel(Batch(doubles(rows, 2)), named=None)
    assert net.seen[0] is net.seen[1] is tree
    assert net.seen[2].images.device == as_devices(devices)[0]


@dataclass(eq=False)
class Output:
    rows: Any
    value: Any = None


ONE_MORE = "nothing there, but replica 1 returned a tensor"
UNLIKE: dict[str, Any] = {  # what two replicas return, and how the error names it
    "none": (lambda x: x, lambda x: None, "output = a tensor, but replica 1 returned None"),
    "fewer keys": (lambda x: {"a": x}, lambda x: {"b": x}, "output['a'] = a tensor, but replica 1 returned nothing"),
    "none inside": (lambda x: (x, [None, x]), lambda x: (x, x), "output[1][0] = None, but replica 1 returned nothing"),
    "more keys": (lambda x: {"a": x}, lambda x: {"a": x, "b": x}, f"output['b'] = {ONE_MORE}"),
    "value": (lambda x: Output(x, "a"), lambda x: Output(x, "b"), "output.value = 'a', but replica 1 returned 'b'"),
    "below": (lambda x: [Output(x, ["a", "b"])], lambda x: [Output(x, ["a", "c"])], "output[0].value[1] = 'b', but"),
    "no tensors": (lambda x: Output(None, "a"), lambda x: Output(None, "b"), "output = Output(rows=None, value='a'),"),
    "objects": (lambda x: {"x": x, "net": Net(None)},) * 2 + ("output['net'] = Net(), but replica 1 returned Net()",),
    "layers": (lambda x: Cache([[x]]), lambda x: Cache([[x], [x]]), f"output[1][0] = {ONE_MORE}"),
    "iterable out of reach": (lambda x: {"x": x, "a": Cache([[1]])},) * 2 + ("output['a'] = <helpers.Cach",),
}


DIFFER = ": their numbers of dimensions differ, as after squeeze() of a single row; write flatten(1) for"
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


@pytest.mark.parametrize("output", ["text", True, iter([]), Cache([[1]]), ["a"]], ids=lambda it: type(it).__name__)
def test_replicas_that_return_no_tensors_are_told(devices, output):
    name, path, dims = ("str", "[1][0]", "{0: None}") if output == ["a"] else (type(output).__name__, "[1]", "None")
    text = re.escape(f"got {name} in output{path}; return a tensor (")
    with pytest.raises(TypeError, match=rf"{text}.* pass out_dims={{1: {dims}}} if it .*, or out_dims=0 for a list"):
        returning(*[lambda x: (x, output)] * 2, devices)


SETTINGS = Output("a", [1]), Output("a", [True])
NUMBERS: dict[str, Any] = {  # what replicas return, where its number is found, what it is, and how out_dims names it
    "count": (lambda x: {"x": x, "n": len(x)}, "['n']", "int", {"n": None}),
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
    found = re.escape(f"got {name} in output{path}; return a tensor (loss.detach()[None] for loss.item()), or pass ")
    for is_training in (True, False):  # the last batch, too, of which there may be a single chunk
        with pytest.raises(TypeError, match=f"{found}{re.escape(f'out_dims={dims} if it is equal in all replicas')}"):
            DataParallelWithCallback(net, devices).train(is_training)(x)
    if kind not in ("count", "shape") or rows == 1:
        assert repr(DataParallelWithCallback(net, devices, out_dims=dims)(x)) == repr(make(x))


def test_number_that_is_the_whole_output_is_refused_with_a_remedy_that_works():
    net = Net(lambda net, x: 2.5)
    with pytest.raises(TypeError, match=r"float in output; .*, or pass out_dims=\(None,\) and return \(value,\) if"):
        DataParallelWithCallback(net, ["cpu"] * 2)(X)
    net.function = lambda net, x: (2.5,)
    assert DataParallelWithCallback(net, ["cpu"] * 2, out_dims=(None,))(X) == (2.5,)


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
    for make in (lambda: numpy.ones((2, 2)), lambda: shared):
        net = Net(lambda net, x, make=make: {"value": make() if x[0] == x[0] else numpy.arange(3), "x": x})
        parallel = DataParallelWithCallback(net, ["cpu"] * 2)
        assert repr(parallel(x)["value"]) == repr(make())
        with pytest.raises(ValueError, match="replica 0 returned"):
            parallel(torch.where(x > 1, math.nan, x))


@pytest.mark.parametrize("name", ["float32", "int64", "array"])
def test_numbers_of_numpy_are_refused_but_no_bools(name):
    numpy = pytest.importorskip("numpy")
    net = Net(lambda net, x: {"x": x, "n": getattr(numpy, name)(2)})
    with pytest.raises(TypeError, match=r"got \w+ in output\['n'\]; .*, or pass out_dims=\{'n': None\} if it"):
        DataParallelWithCallback(net, ["cpu"] * 2)(X)
    assert DataParallelWithCallback(net, ["cpu"] * 2, out_dims={"n": None})(X)["n"] == 2
    net.function = lambda net, x: {"x": x, "flag": numpy.bool_(True)}
    assert DataParallelWithCallback(net, ["cpu"] * 2)(X)["flag"] == True  # noqa: E712
