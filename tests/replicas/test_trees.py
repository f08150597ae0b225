"""Trees of arguments and outputs: every kind of container is cut and put together alike on every kind of device."""

import re
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import INTERLEAVED, device_lists, needs_two_gpus
from helpers import Cache, Net, as_devices, assert_same_tree, count_calls, doubles
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback
from sync_batchnorm.trees import tensors_in

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

    def __reduce__(self):
        function, _, *others = super().__reduce__()
        return function, tuple(getattr(self, entry.name) for entry in fields(self)), *others


@dataclass
class Logits(ModelOutput):
    logits: Tensor | None = None
    hidden: tuple | None = None


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
    "UserDict": lambda x: UserDict(x=x, more=[x, Batch(x)], text="a"),
    "Encoding": lambda x: Encoding({"ids": x, "mask": x + 1}, encodings=["a"]),
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
    parallel = DataParallelWithCallback(Net(lambda net, *args, **kwargs: None), devices)
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


ITERABLES = {
    "Cache": lambda x: Cache([(x, x + 1, None)]),
    "Cache in a dataclass": lambda x: Logits(x, (Cache([[x], [x + 1]]),)),
    "UserList": lambda x: UserList([x, [x]]),
    "deque": lambda x: deque([x, x + 1]),
}


@pytest.mark.parametrize("kind", ITERABLES)
def test_iterables_that_replicas_return_are_made_anew(devices, kind):
    x = doubles(5, 2, devices=devices)
    assert_same_tree(returned(ITERABLES[kind], x, devices), ITERABLES[kind](x), "output", 0.0)


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


def test_dataclass_on_one_device_is_moved_or_passed(devices):
    net = Net(lambda net, batch: (net.seen.append(batch), batch)[1], seen=[])
    parallel, batch = DataParallelWithCallback(net, devices[:1]), Batch(doubles(4, 2, devices=devices))
    assert parallel(batch) is net.seen[0] is batch
    assert parallel(Batch(doubles(4, 2))).images.device == as_devices(devices)[0]


@needs_two_gpus
def test_torch_moves_each_tensor_of_a_tree_once(monkeypatch):
    def counted(name):
        function = getattr(nn.parallel, name)
        return lambda *args: (calls.update([name]), function(*args))[1]

    calls = Counter()
    for name in ("scatter", "gather"):
        monkeypatch.setattr(f"sync_batchnorm.wrapper.scatter_gather.{name}_by_torch", counted(name))
    tree = TREES["nested"](doubles(4, 2, devices=[0]))
    assert_same_tree(DataParallelWithCallback(nn.Identity(), [0, 1])(tree), tree, "output", 0.0)
    assert calls == {"scatter": len(tensors_in(tree)), "gather": len(tensors_in(tree))}
    assert len(tensors_in(tree)) > 1


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


class WithRows:
    def __init__(self, x):
        self.rows = [x]


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
    "object": (lambda x: (x, WithRows(x)), "WithRows", "[1]"),
    "namespace": (lambda x: [x, SimpleNamespace(x=x)], "SimpleNamespace", "[1]"),
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
    x = doubles(4, 2)
    with pytest.raises(TypeError, match=r"input\['graphs'\]\[0\], a Graph that holds tensors, cannot be cut"):
        DataParallelWithCallback(nn.Identity(), ["cpu"] * 2)({"x": x, "graphs": [with_attributes(Graph(), x=x)]})


def test_objects_that_hold_tensors_are_handed_on_if_they_are_named_whole(devices):
    x, other = doubles(4, 2, devices=devices), WithRows(doubles(3, devices=devices))
    net = Net(None)
    net.forward = lambda x, other: (x * len(other.rows), net.seen.append(other))[0]
    net.seen = []
    DataParallelWithCallback(net, devices, in_dims={"other": None})(x, other)
    assert net.seen == [other, other]


def test_settings_are_handed_on_as_they_are_and_not_read():
    settings = {"lazy": Lazy({"scale": 2, "missing": None}), "table": Rowwise({"a": 1}), "config": CONFIG}
    forward = Net(lambda net, x, settings: x * settings["lazy"]["scale"])
    x = torch.ones(6, 1)
    assert torch.equal(DataParallelWithCallback(forward, ["cpu"] * 3)(x, settings=settings), 2 * x)
    assert settings["lazy"].reads == 3  # once in each replica


VOCABULARIES = {
    "object": lambda words: SimpleNamespace(words=words),
    "dataclass": lambda words: Settings(words, parent=[words]),
    "mapping": MappingProxyType,
}


@pytest.mark.parametrize("make", VOCABULARIES.values(), ids=list(VOCABULARIES))
def test_a_vocabulary_beside_the_batch_takes_no_calls_for_its_words(make):
    parallel = DataParallelWithCallback(Net(lambda net, *args: args[0]), ["cpu"] * 4)

    def calls(number):
        arguments = torch.ones(8, 1), make({f"word {i}": i for i in range(number)})
        return count_calls(lambda: parallel.scatter(arguments, {}, parallel.device_ids))

    calls(1)
    assert calls(50_000) == calls(1)  # 900 ms in version 2.2


@pytest.mark.parametrize("make", [lambda held: UserDict(held), lambda held: Batch(None, kind=held)])
def test_tensors_are_found_behind_many_containers(make):
    x = torch.arange(4.0)
    held = {**{str(i): [i, [i]] for i in range(2000)}, "last": {"x": x}}
    parts = scattered([make(dict(held)), x], ["cpu"] * 2)
    for part, rows in zip(parts, x.chunk(2), strict=True):
        held = part[0].kind if isinstance(part[0], Batch) else part[0]
        assert torch.equal(held["last"]["x"], rows)


@pytest.mark.parametrize("where", ["argument", "output"])
def test_tree_that_contains_itself_is_refused(where):
    tree = Batch(doubles(4, 2), [])
    tree.mask.append(tree)
    net, x = (nn.Identity(), tree) if where == "argument" else (Net(lambda net, x: tree), doubles(4, 2))
    with pytest.raises(ValueError, match="arguments or outputs are nested too deeply, or contain themselves"):
        DataParallelWithCallback(net, ["cpu"] * 2)(x)
