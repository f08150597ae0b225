"""Trees of arguments and results: every kind of container is cut and put together alike on every kind of device."""

import math
import re
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Mapping, MutableMapping
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from conftest import CUDA_COUNT, device_lists
from helpers import Net, as_devices, doubles
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback

INTERLEAVED = pytest.param([0, 1, 0, 1], marks=[pytest.mark.cuda, pytest.mark.skipif(CUDA_COUNT < 2, reason="GPUs")])
on_devices = pytest.mark.parametrize("devices", [*device_lists(2, 3), INTERLEAVED])


@dataclass
class Batch:
    images: Tensor
    mask: Tensor | None = None
    kind: str = "train"


@dataclass(frozen=True)
class Frozen:
    rows: Tensor
    text: str


@dataclass(slots=True, kw_only=True)
class Slots:
    rows: Tensor
    scale: float = 2.0


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    rows: Tensor


@dataclass
class Nested:
    batch: Batch
    more: list
    named: dict


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

    start: InitVar[int]
    names: list
    parent: Any = None
    number: int = field(init=False)

    def __post_init__(self, start):
        self.number = start


class ModelOutput(OrderedDict):
    """Both a dict and a dataclass, as that of transformers: fields that are None are no items."""

    def __post_init__(self):
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                self[entry.name] = getattr(self, entry.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        function, _, *others = super().__reduce__()
        return function, tuple(getattr(self, entry.name) for entry in fields(self)), *others


@dataclass
class Logits(ModelOutput):
    logits: Tensor | None = None
    hidden: tuple | None = None
    loss: Tensor | None = None


class Encoding(UserDict):
    """Takes more than a dict, as `BatchEncoding` of transformers."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Locked(dict):
    def __setitem__(self, key, value):
        raise TypeError("read-only")


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


class Columns(Table, MutableMapping):
    def __setitem__(self, key, value):
        self.columns[key] = value

    def __delitem__(self, key):
        del self.columns[key]


class Sized(list):
    """A list whose constructor takes more."""

    def __init__(self, items, size):
        super().__init__(items)
        self.size = size


class Named(NamedTuple):
    left: Tensor
    right: tuple


CONFIG = Settings(3, ["a"])
CONFIG.parent = CONFIG  # A walk that looks into it must not go on for ever.
TREES = {
    "dataclass": Batch,
    "dataclass with entries": lambda x: Batch(x, x > 0, "eval"),
    "frozen": lambda x: Frozen(x, "text"),
    "slots": lambda x: Slots(rows=x, scale=3.0),
    "frozen slots": FrozenSlots,
    "nested": lambda x: Nested(Batch(x, x + 1), [Frozen(x, "a"), (x,)], {"slots": Slots(rows=x)}),
    "in dict": lambda x: {"batch": Batch(x), "list": [Batch(x + 1)]},
    "UserDict": lambda x: UserDict(x=x, more=[x, Batch(x)], text="a"),
    "Encoding": lambda x: Encoding({"ids": x, "mask": x + 1}, encodings=["a"]),
    "ModelOutput": lambda x: Logits(x, (x, x + 1)),
    "ModelOutput without its first": lambda x: Logits(hidden=(x,)),
    "defaultdict": lambda x: defaultdict(list, a=x, b=[x]),
    "Counter": lambda x: Counter({"a": x}),
    "Locked": lambda x: Locked(a=x),
    "Table": lambda x: Table({"a": x, "b": (x,)}),
    "Columns": lambda x: Columns({"a": x, "b": (x,)}),
    "proxy": lambda x: MappingProxyType({"a": x}),
    "ChainMap": lambda x: ChainMap({"a": x}, {"b": x + 1}),
    "Sized": lambda x: Sized([x, x + 1], size=3),
    "UserList": lambda x: UserList([x, [x]]),
    "deque": lambda x: deque([x, x + 1]),
    "namedtuple": lambda x: Named(x, (x, Batch(x))),
}


def equal(one: Any, other: Any) -> bool:
    """Return whether two trees have the same types, keys and values."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping):
        same_fields = not is_dataclass(one) or equal([vars(one)], [vars(other)])
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one) and same_fields
    if is_dataclass(one):
        return all(equal(getattr(one, entry.name), getattr(other, entry.name)) for entry in fields(one))
    if isinstance(one, (list, tuple, UserList, deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def scattered(tree, devices):
    """Return what each replica gets as its only argument, both as a positional and as a keyword one."""
    parallel = DataParallelWithCallback(nn.Identity(), devices)
    inputs, kwargs = parallel.scatter((tree,), {"named": tree}, parallel.device_ids)
    assert all(equal(args[0], named["named"]) for args, named in zip(inputs, kwargs, strict=True))
    return [args[0] for args in inputs]


@pytest.mark.parametrize("kind", TREES)
@on_devices
def test_replicas_get_their_rows_of_every_tree(devices, kind):
    x = doubles(5, 2, devices=devices)
    before, tree = TREES[kind](x), TREES[kind](x)
    parts = scattered(tree, devices)
    for part, rows in zip(parts, x.chunk(len(devices)), strict=True):
        assert equal(part, TREES[kind](rows))
    assert equal(tree, before)


@pytest.mark.parametrize("kind", TREES)
@on_devices
def test_outputs_of_every_tree_are_put_together(devices, kind):
    x = doubles(5, 2, devices=devices)
    parallel = DataParallelWithCallback(Net(lambda net, x: TREES[kind](x)), devices)
    assert equal(parallel(x), TREES[kind](x))


class Cache:
    """Made of an iterable, as `DynamicCache` of transformers is for `nn.DataParallel`."""

    def __init__(self, layers):
        self.layers = [tuple(layer) for layer in layers]

    def __iter__(self):
        return iter(self.layers)


@on_devices
def test_iterables_that_replicas_return_are_made_anew(devices):
    x = doubles(5, 2, devices=devices)
    for make in (lambda x: Cache([(x, x + 1, None)]), lambda x: Logits(x, (Cache([[x], [x + 1]]),))):
        output = DataParallelWithCallback(Net(lambda net, x, make=make: make(x)), devices)(x)
        assert equal(as_lists(output), as_lists(make(x)))


def as_lists(output):
    cache = output if isinstance(output, Cache) else output["hidden"][0]
    assert type(cache) is Cache
    return [list(layer) for layer in cache.layers]


def test_iterables_of_different_structure_or_out_of_reach_are_refused():
    x = torch.arange(4.0).view(4, 1)
    with pytest.raises(
        ValueError, match=re.escape("Cache((Tensor)), but replica 1 returned Cache((Tensor), (Tensor))")
    ):
        DataParallelWithCallback(returning(lambda x: Cache([[x]]), lambda x: Cache([[x], [x]])), ["cpu"] * 2)(x)
    with pytest.raises(
        ValueError, match=r"replica 0 returned output\.value = <test_trees\.C.*, but replica 1 returned <"
    ):
        DataParallelWithCallback(Net(lambda net, x: Anything(Cache([[x]]))), ["cpu"] * 2)(x)
    with pytest.raises(TypeError, match="dataclasses of tensors, got Cache"):
        DataParallelWithCallback(Net(lambda net, x: Cache([[1]])), ["cpu"] * 2)(x)


@on_devices
def test_gradients_flow_through_trees(devices):
    x = doubles(5, 2, devices=devices).requires_grad_()
    net = Net(lambda net, batch: Encoding({"out": Batch(batch.images * batch.mask)}))
    output = DataParallelWithCallback(net, devices)(Batch(x, mask=x.detach()))
    grad = torch.randn_like(x)
    output["out"].images.backward(grad)
    assert torch.equal(x.grad, grad * x.detach())


@on_devices
def test_scalars_of_trees_are_copied_and_gathered(devices):
    device = as_devices(devices)[0]
    scale, x = torch.tensor(3.0, device=device), torch.arange(8.0, device=device).view(8, 1)
    for part, at in zip(scattered(Batch(x, mask=scale), devices), as_devices(devices), strict=True):
        assert part.mask.device == part.images.device == at
        assert part.mask == 3.0
        assert part.mask.data_ptr() != scale.data_ptr()
    parallel = DataParallelWithCallback(Net(lambda net, x: Batch(x, x.sum())), devices)
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        assert parallel(x).mask.tolist() == [float(rows.sum()) for rows in x.chunk(len(devices))]


@on_devices
def test_what_holds_no_tensors_is_shared(devices):
    x, table = doubles(5, 2, devices=devices), Table({"a": 1})
    for part in scattered({"x": x, "config": CONFIG, "module": Module(x), "table": table}, devices):
        assert part["config"] is CONFIG
        assert part["table"] is table
        assert type(part["module"]) is Module
        assert part["module"].x is x


@dataclass(eq=False)
class Module(nn.Module):
    """A module, which is no argument to cut even if it is a dataclass."""

    x: Tensor

    def __post_init__(self):
        super().__init__()


def test_lists_and_dicts_without_tensors_are_the_replicas_own():
    first, second = scattered([doubles(6, 2), ["a", {"b": 1}], [], {}], ["cpu"] * 2)
    assert first[1] == second[1] == ["a", {"b": 1}]
    assert first[1] is not second[1]
    assert first[1][1] is not second[1][1]
    assert first[2] is not second[2]
    assert first[3] is not second[3]


def test_dataclass_is_not_changed_a_second_time_when_it_is_built_anew():
    x = doubles(5, 2)
    for part, rows in zip(scattered(Halved(x), ["cpu"] * 2), x.chunk(2), strict=True):
        assert torch.equal(part.rows, rows / 2)
        assert part.number == len(rows)


@on_devices
def test_dataclass_on_one_device_is_moved_or_passed(devices):
    device = as_devices(devices)[0]
    parallel = DataParallelWithCallback(
        Net(lambda net, batch: (net.seen.append(batch), batch)[1], seen=[]), devices[:1]
    )
    batch = Batch(doubles(4, 2, devices=devices))
    assert parallel(batch) is parallel.module.seen[0] is batch
    assert parallel(Batch(doubles(4, 2))).images.device == device


@pytest.mark.cuda
@pytest.mark.skipif(CUDA_COUNT < 2, reason="needs two GPUs")
def test_torch_moves_all_tensors_of_a_tree_in_one_call(monkeypatch):
    calls = Counter()
    for name in ("scatter", "gather"):
        monkeypatch.setattr(f"sync_batchnorm.wrapper.scatter_gather.{name}_by_torch", counted(calls, name))
    x = doubles(4, 2, devices=[0])
    tree = TREES["nested"](x)
    assert equal(DataParallelWithCallback(nn.Identity(), [0, 1])(tree), tree)
    assert calls == {"scatter": 1, "gather": 1}


def counted(calls, name):
    function = getattr(nn.parallel, name)

    def count(*args):
        calls[name] += 1
        return function(*args)

    return count


def returning(first, others):
    return Net(lambda net, input: (first if input[0, 0] == 0 else others)(input))


@dataclass(eq=False)
class Anything:
    value: Any
    x: Any = None


UNEQUAL = {  # what replicas return, and how an error names it
    "field": (
        lambda x: Batch(x, kind="a"),
        lambda x: Batch(x, kind="b"),
        "output.kind = 'a', but replica 1 returned 'b'",
    ),
    "entry": (lambda x: {"x": [x], "n": 1}, lambda x: {"x": [x], "n": 2}, "output['n'] = 1, but replica 1 returned 2"),
    "below": (
        lambda x: (x, UserDict(names=Anything(["a", 1], x))),
        lambda x: (x, UserDict(names=Anything(["a", 2], x))),
        "output[1]['names'].value[1] = 1, but replica 1 returned 2",
    ),
    "whole": (
        lambda x: Batch(None, kind="a"),
        lambda x: Batch(None, kind="b"),
        "output.kind = 'a', but replica 1 returned 'b'",
    ),
    "object": (
        lambda x: Anything(Net(None), x),
        lambda x: Anything(Net(None), x),
        "output.value = Net(), but replica 1 returned Net()",
    ),
}


@pytest.mark.parametrize("kind", UNEQUAL)
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_replicas_that_differ_in_what_is_no_tensor_are_named(devices, kind):
    *outputs, found = UNEQUAL[kind]
    message = f"replica 0 returned {re.escape(found)}; .* must be equal in all replicas; return a tensor"
    with pytest.raises(ValueError, match=message):
        DataParallelWithCallback(returning(*outputs), devices)(
            torch.arange(6.0, device=as_devices(devices)[0]).view(6, 1)
        )


def test_arrays_that_replicas_return_must_be_the_same():
    numpy = pytest.importorskip("numpy")
    array, x = numpy.arange(3), torch.arange(4.0).view(4, 1)
    parallel = DataParallelWithCallback(Net(lambda net, x: Anything(array, x)), ["cpu"] * 2)
    assert parallel(x).value is array
    parallel.module.function = lambda net, x: Anything(numpy.arange(3) + int(x[0, 0]), x)
    with pytest.raises(ValueError, match=r"output.value = array\(\[0, 1, 2\]\), but replica 1 returned array"):
        parallel(x)


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan), ((1, 1), (1,))], ids=str)
def test_values_of_which_one_is_nan_or_longer_differ(values):
    numpy = pytest.importorskip("numpy")
    values = [numpy.array(value) if isinstance(value, tuple) else value for value in values]
    parallel = DataParallelWithCallback(Net(lambda net, x: {"value": values[int(x[0, 0]) // 2], "x": x}), ["cpu"] * 2)
    with pytest.raises(ValueError, match=r"must be equal in all replicas"):
        parallel(torch.arange(4.0).view(4, 1))


class ByAttribute(dict):
    """A dict whose attributes are its items."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Mirrored(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first = next(iter(self.values()))


class Stacked(list):
    def __init__(self, items):
        super().__init__(items)
        self.stacked = torch.stack(list(items))


class WithName(UserList):
    name = "none"


def named(x):
    made = WithName([x])
    made.name = "given"
    return made


@dataclass
class Open:
    x: Any


def opened(x):
    made = Open(x)
    made.name, made.twice = "given", 2 * x
    return made


WITH_ATTRIBUTES = {
    "by attribute": (lambda x: ByAttribute(x=x), lambda tree: tree.x),
    "mirrored": (lambda x: Mirrored(x=x), lambda tree: tree.first),
    "stacked": (lambda x: Stacked([x, x + 1]), lambda tree: tree.stacked.sum(0)),
    "list": (named, lambda tree: tree[0] * len(tree.name)),
    "deque": (lambda x: deque([x], maxlen=1), lambda tree: tree[0] * tree.maxlen),
    "dataclass": (opened, lambda tree: tree.x * len(tree.name)),
}


@pytest.mark.parametrize("kind", WITH_ATTRIBUTES)
@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_attributes_of_containers_are_those_of_the_chunk(devices, kind):
    make, read = WITH_ATTRIBUTES[kind]
    x = torch.arange(12.0, device=as_devices(devices)[0]).view(6, 2)
    parallel = DataParallelWithCallback(Net(lambda net, tree: (read(tree), make(read(tree)))), devices)
    expected = read(make(x))
    output, tree = parallel(make(x))
    assert torch.equal(output, expected)
    assert torch.equal(read(tree), read(make(expected)))


def test_empty_containers_among_the_arguments_are_those_of_each_replica():
    def forward(net, x, memo, entries):
        if "x" not in memo:
            memo["x"] = x
        entries.append(1)
        return memo["x"] * len(entries)

    x = torch.arange(6.0).view(6, 1)
    assert torch.equal(DataParallelWithCallback(Net(forward), ["cpu"] * 3)(x, {}, []), x)


def test_arrays_and_nan_that_are_equal_in_all_replicas_are_returned_as_they_are():
    numpy = pytest.importorskip("numpy")
    x = torch.arange(4.0).view(4, 1)
    shared = numpy.array([math.nan])  # is not equal to itself
    arrays = lambda: (1, numpy.ones((2, 2)), -math.inf)  # noqa: E731
    for make in (lambda: numpy.arange(2), lambda: math.nan, arrays, lambda: shared):
        parallel = DataParallelWithCallback(Net(lambda net, x, make=make: {"value": make(), "x": x}), ["cpu"] * 2)
        assert repr(parallel(x)["value"]) == repr(make())
        parallel.module.function = lambda net, x, make=make: {"value": make() if x[0] else numpy.arange(3), "x": x}
        with pytest.raises(ValueError, match="replica 0 returned"):
            parallel(x)


DIFFERENT = {
    "classes": (
        Batch,
        lambda x: Frozen(x, "a"),
        "Batch(images=Tensor, mask=None, kind=str), but replica 1 returned Frozen(",
    ),
    "fields": (
        Batch,
        lambda x: Batch(x, x),
        "mask=None, kind=str), but replica 1 returned Batch(images=Tensor, mask=Tensor",
    ),
    "mappings": (
        lambda x: UserDict(a=x),
        lambda x: UserDict(b=x),
        "{'a': Tensor}, but replica 1 returned {'b': Tensor}",
    ),
    "lengths": (
        lambda x: UserList([x]),
        lambda x: UserList([x, x]),
        "returned (Tensor), but replica 1 returned (Tensor, Tensor)",
    ),
    "types": (lambda x: {"a": 1}, lambda x: {"a": "b"}, "{'a': int}, but replica 1 returned {'a': str}"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.parametrize("devices", device_lists(2))
def test_replicas_that_return_different_trees_are_named(devices, kind):
    *outputs, found = DIFFERENT[kind]
    with pytest.raises(ValueError, match=re.escape(found)):
        DataParallelWithCallback(returning(*outputs), devices)(
            torch.arange(4.0, device=as_devices(devices)[0]).view(4, 1)
        )


@dataclass
class Counted:
    rows: Tensor
    number: int = field(init=False, default=0)


@dataclass
class Scaled:
    rows: Tensor
    scale: InitVar[float]

    def __post_init__(self, scale):
        self.rows = self.rows * scale


@dataclass
class Shifted:
    x: Any
    shift: InitVar[float] = 0.0

    def __post_init__(self, shift):
        self.x = self.x + shift


@dataclass(init=False)
class Own:
    rows: Tensor

    def __init__(self, *args):
        (self.rows,) = args


class Closed(Table):
    def __init__(self, **columns):
        super().__init__(columns)


class Renaming(Table):
    def __init__(self, columns):
        super().__init__({f"column {key}": value for key, value in dict(columns).items()})


CANNOT = {
    "init=False": (Counted, r"a Counted .*: its fields \['number'\] are declared with init=False"),
    "InitVar with a default": (partial(Shifted, shift=2.0), "a Shifted .*: InitVar 'shift' must be specified"),
    "InitVar": (partial(Scaled, scale=2.0), "a Scaled .*: InitVar 'scale' must be specified"),
    "constructor": (Own, "an? Own .*: .* unexpected keyword argument 'rows'"),
    "mapping": (lambda x: Closed(x=x), "a Closed .*: .*positional argument"),
    "keys": (lambda x: Renaming({"x": x}), r"a Renaming .*: made of its items, it has the keys \['column column x'\]"),
    "below": (lambda x: [UserDict(a=Counted(x))], "a Counted .*: its fields"),
}


@pytest.mark.parametrize("kind", CANNOT)
@pytest.mark.parametrize("devices", device_lists(2))
def test_containers_that_cannot_be_built_anew_are_refused(devices, kind):
    make, text = CANNOT[kind]
    x = doubles(4, 2, devices=devices)
    with pytest.raises(TypeError, match=f"cannot build {text}.*; use a dict"):
        DataParallelWithCallback(nn.Identity(), devices)(make(x))
    with pytest.raises(TypeError, match=f"cannot build {text}.*; use a dict"):
        DataParallelWithCallback(Net(lambda net, x: make(x)), devices)(x)


def test_tree_that_contains_itself_is_refused():
    tree = Nested(Batch(doubles(4, 2)), [], {})
    tree.more.append(tree)
    with pytest.raises(ValueError, match="arguments are nested too deeply, or contain themselves"):
        DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)(tree)
