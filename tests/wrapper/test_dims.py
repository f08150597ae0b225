"""`in_dims` and `out_dims`: programs whose arguments are not all cut by rows equal one device, in every wrapper."""

import copy
import functools
import math
import pickle
import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from conftest import CUDA_COUNT, device_lists, first_in_smoke, slow
from helpers import Named, Net, as_devices, assert_same_state, assert_same_tree, doubles, randomize, tensors_of
from scripted import of_class
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    assert_matches_one_device,
    convert_model,
    patch_replication_callback,
    revert_model,
)

CPUS = ["cpu"] * 2


class Boxes:
    """An object with a method `to`, as those of detection libraries, which has no items to cut."""

    def __init__(self, corners):
        self.corners = corners

    def to(self, device):
        return Boxes(self.corners.to(device))


@dataclass
class Batch:
    images: Tensor
    mask: Tensor
    names: Any = None


class TwoStates(nn.Module):
    """Has the arguments and outputs of an LSTM."""

    def __init__(self, *sizes, **options):
        super().__init__()
        self.first, self.second = nn.RNN(*sizes, **options), nn.RNN(*sizes, **options)

    def forward(self, x, states):
        (y, h), (z, c) = self.first(x, states[0]), self.second(x, states[1])
        return y + z, (h, c)


def model(forward, **attributes):
    return Named(forward, bn=nn.BatchNorm1d(4), linear=nn.Linear(4, 4), **attributes)


def norm(net, x):
    return net.linear(net.bn(x.flatten(0, -2))).view(x.shape)


def rnn(kind, batch_first=True):
    if CUDA_COUNT:  # Simulated GPUs lack the kernels.
        kind = {nn.GRU: nn.RNN, nn.LSTM: TwoStates}.get(kind, kind)
    return model(recur, rnn=kind(4, 4, num_layers=2, batch_first=batch_first))


def recur(net, x, state=None):
    return net.rnn(norm(net, x), state)


def attend(net, x, attn_mask=None, key_padding_mask=None):
    x = norm(net, x)
    return net.attention(x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask)


def masks(n, new):
    numbers = torch.arange(n, device=new(0).device)
    mask, padding = numbers[:, None] < numbers, numbers[None].expand(n, n) > max(n - 2, 0)
    return {"x": new(n, n, 4), "attn_mask": mask, "key_padding_mask": padding}


def detect(net, images, targets):
    features = norm(net, images)
    losses = [(feature * target["boxes"].sum(0)).sum() for feature, target in zip(features, targets, strict=True)]
    found = [{"boxes": features[i] * 2, "name": target["name"]} for i, target in enumerate(targets)]
    return {"loss": torch.stack(losses)}, found


def targets(n, new):
    return {"images": new(n, 3, 4), "targets": [{"boxes": new(i + 1, 4), "name": f"image {i}"} for i in range(n)]}


def pool(net, clouds):
    return norm(net, torch.stack([cloud.amax(0) for cloud in clouds]))


def caption(net, images, captions, boxes):
    assert all(box.corners.device == images.device for box in boxes)
    lengths = torch.tensor([len(caption) for caption in captions], device=images.device)
    return norm(net, images) * lengths[:, None] + torch.stack([box.corners.sum(0) for box in boxes])


def captions(n, new):
    boxes = tuple(Boxes(new(i + 1, 4)) for i in range(n))
    return {"images": new(n, 4), "captions": ["a" * (i + 1) for i in range(n)], "boxes": boxes}


def compare(net, queries, prototypes):
    """Compares queries with prototypes, which every replica needs as a whole; its table is equal in all replicas."""
    return torch.cdist(norm(net, queries), prototypes * net.table), net.table * 2


def few_shot():
    return model(compare, table=nn.Parameter(torch.randn(3, 4)))


def prototypes(n, new):
    return {"queries": new(n, 4), "prototypes": new(3, 4)}


def nested(net, batch, *others, **named):
    lengths = torch.tensor([len(name) for name in batch.names], device=batch.mask.device)
    x = norm(net, batch.images) * lengths[:, None]
    return Batch(x @ batch.mask @ others[0] + others[1].sum(0), net.linear(batch.mask) * named["scale"])


def others(n, new):
    batch = Batch(new(n, 4), new(4, 4), ["a" * (i + 1) for i in range(n)])
    return {"batch": batch, "others[0]": new(4, 4), "others[1]": new(2, n, 4), "scale": new(1)}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    # By the names of `forward`, the positional ones first, of a number of samples and of what makes random numbers.
    arguments: Callable[[int, Any], dict[str, Any]]
    in_dims: Any
    out_dims: Any = None


def with_two_states(n: int, new: Any) -> dict[str, Any]:
    return {"x": new(n, 5, 4), "state": (new(2, n, 4), new(2, n, 4))}


GRU, LSTM, TIME_FIRST = partial(rnn, nn.GRU), partial(rnn, nn.LSTM), partial(rnn, nn.RNN, batch_first=False)
IN_NESTED = {"batch": {"mask": None, "names": 0}, "others": (None, 1), "scale": None}
CASES = {
    "GRU": Case(GRU, lambda n, new: {"x": new(n, 5, 4), "state": new(2, n, 4)}, {"state": 1}, (0, 1)),
    "LSTM": Case(LSTM, with_two_states, {"state": (1, -2)}, (0, (1, 1))),
    "LSTM, one dimension for both": Case(LSTM, with_two_states, {"state": 1}, (0, 1)),
    "time first": Case(TIME_FIRST, lambda n, new: {"x": new(5, n, 4), "state": new(2, n, 4)}, {"x": 1, "state": 1}, 1),
    "no state": Case(GRU, lambda n, new: {"x": new(n, 5, 4)}, {"state": 1}, [0, -2]),
    "attention": Case(
        lambda: model(attend, attention=nn.MultiheadAttention(4, 2, batch_first=True)), masks, {"attn_mask": None}
    ),
    "detector": Case(partial(model, detect), targets, {"targets": 0}, (0, 0)),
    "clouds": Case(partial(model, pool), lambda n, new: {"clouds": [new(i + 2, 4) for i in range(n)]}, {"clouds": 0}),
    "captions and objects": Case(partial(model, caption), captions, {"captions": 0, "boxes": 0}),
    "prototypes": Case(few_shot, prototypes, {"prototypes": None}, (0, None)),
    "nested": Case(partial(model, nested), others, IN_NESTED, {"mask": None}),
}


def arguments_of(case: Case, rows: int, devices: list[Any]) -> dict[str, Any]:
    return case.arguments(rows, functools.partial(doubles, devices=devices))


def call(model: nn.Module, arguments: dict[str, Any], positional: int) -> Any:
    """Pass that many arguments by position; those of ``*others`` always, and that of ``**named`` never."""
    of_others = [i + 1 for i, name in enumerate(arguments) if "[" in name]
    number = min(max([positional, *of_others]), len(arguments) - ("scale" in arguments))
    values = list(arguments.values())
    return model(*values[:number], **dict(list(arguments.items())[number:]))


def wrapper(net: nn.Module, devices: list[Any], case: Case, way: str = "wrapped") -> nn.DataParallel[Any]:
    dims = {"in_dims": case.in_dims, "out_dims": case.out_dims}
    if way == "patched":
        plain = of_class(Passing, net, devices)
        return copy.deepcopy(patch_replication_callback(plain, timeout=5.0, **dims))
    cls = OwnScatter if way == "own scatter" else DataParallelWithCallback
    parallel = cls(net, devices, timeout=5.0, **dims)
    if way == "copied":
        return copy.deepcopy(parallel)
    return pickle.loads(pickle.dumps(parallel)) if way == "pickled" else parallel


class OwnScatter(DataParallelWithCallback):
    def scatter(self, inputs, kwargs, device_ids):
        return super().scatter(inputs, kwargs, device_ids)

    def gather(self, outputs, output_device):
        return super().gather(outputs, output_device)


class Passing(nn.DataParallel):
    """As many write it: attributes are those of the module, and the steps call those of torch's class."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def scatter(self, inputs, kwargs, device_ids):
        return super().scatter(inputs, kwargs, device_ids)


def assert_steps_equal(
    kind: str, devices: list[Any], rows: int, way: str = "wrapped", positional: int = 9, training: bool = True
) -> None:
    case = CASES[kind]
    plain = randomize(case.make()).double().to(as_devices(devices)[0]).train(training)
    parallel = wrapper(convert_model(copy.deepcopy(plain)), devices, case, way)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, parallel)]
    for _ in range(3 if training else 1):
        arguments = arguments_of(case, rows, devices)
        with torch.backends.cudnn.flags(enabled=training):  # whose RNN has no backward pass in eval mode
            expected, actual = call(plain, arguments, positional), call(parallel, arguments, positional)
        assert_same_tree(actual, expected)
        grads = list(map(torch.randn_like, tensors_of(expected)))
        for optimizer, output in zip(optimizers, (expected, actual), strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(tensors_of(output), grads)
            optimizer.step()
        assert_same_state(parallel, plain)


@pytest.mark.parametrize("kind", first_in_smoke(CASES))
@pytest.mark.parametrize(("rows", "positional"), [(5, 9), (7, 0), (5, 1)])
def test_program_equals_one_device_in_three_steps_however_arguments_are_passed(devices, rows, positional, kind):
    assert_steps_equal(kind, devices, rows, positional=positional)


@pytest.mark.parametrize("kind", ["GRU", "detector", "nested"])
@pytest.mark.parametrize("way", ["patched", "copied", "pickled", "own scatter"])
@pytest.mark.parametrize("devices", device_lists(3))
def test_wrapper_of_every_origin_knows_the_dimensions(devices, way, kind):
    assert_steps_equal(kind, devices, 7, way)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("rows", [1, 3, *slow(2)])
@pytest.mark.parametrize("devices", device_lists(4, slow=(1,)))
def test_one_device_and_fewer_rows_than_devices(devices, rows, kind):
    assert_steps_equal(kind, devices, rows, training=False)


@pytest.mark.parametrize("kind", ["GRU", "detector", "nested", "prototypes"])
def test_the_check_on_one_device_knows_the_dimensions(kind):
    case, arguments = CASES[kind], arguments_of(CASES[kind], 5, CPUS)
    parallel = wrapper(convert_model(case.make()), CPUS, case)
    call(lambda *args, **kwargs: assert_matches_one_device(parallel, *args, kwargs=kwargs), arguments, 9)


def two(net, x, mask=None):
    return x


def rest(net, x, *others, **named):
    return x


TWO, REST, X = Named(two), Named(rest), torch.zeros(4, 3)
KINDS, NAMES = "ints or None, or a tuple or dict of such, got ", "but in_dims names a"
ONE = "name one dimension for all of it"
AS_MANY, BY_KEYS = [f"{ONE}, or a {way}" for way in ("tuple of as many", "dict by its keys or fields")]
NOT_TAKEN = "in_dims names ['{}'], but forward of Named takes "
NO_DIMENSION = "mask of shape {} has no dimension {}; name the dimension"
REFUSED: dict[str, tuple[Any, ...]] = {  # a module, its `in_dims`, arguments, and the error
    "name": (TWO, {"msk": None}, None, ValueError, NOT_TAKEN.format("msk") + "['x', 'mask']"),
    "name of **": (REST, {"named": None}, None, ValueError, NOT_TAKEN.format("named")),
    "compiled": (TWO, {"msk": 0}, None, ValueError, "takes ['x', 'mask']"),
    "wrapped": (nn.DataParallel(TWO), {"msk": 0}, None, ValueError, "takes ['x', 'mask']"),
    "type": (TWO, {"mask": "whole"}, None, TypeError, KINDS + "'whole' for mask"),
    "bool": (TWO, {"mask": (0, True)}, None, TypeError, KINDS + "(0, True)"),
    "no names": (TWO, (0, None), None, TypeError, "in_dims must be a dict by the names of arguments, such as"),
    "no dimension": (TWO, {"mask": 2}, (X, X), ValueError, NO_DIMENSION.format("(4, 3)", 2)),
    "negative": (TWO, {"mask": -3}, (X, X), ValueError, NO_DIMENSION.format("(4, 3)", -3)),
    "scalar": (TWO, {"mask": 0}, (X, X.sum()), ValueError, NO_DIMENSION.format("()", 0)),
    "text": (TWO, {"mask": 1}, (X, "a"), TypeError, "mask, a str without dimensions, cannot be cut"),
    "rows": (TWO, {"x": 1}, (X, X), ValueError, "x has 3 rows, but mask has 4, so that"),
    "entries": (TWO, {"mask": 0}, (X, (X, X, X)), ValueError, "pass in_dims={'mask': (0, 0, 0)} to the wrapper if i"),
    "tree": (TWO, {"mask": (0, None)}, (X, X), ValueError, f"mask is a Tensor, {NAMES} tuple for it, (0, None); {ONE}"),
    "lengths": (TWO, {"mask": (0,)}, (X, (X, X)), ValueError, f"2 entries, {NAMES} tuple for it, (0,); {AS_MANY}"),
    "fields": (TWO, {"mask": {"b": None}}, (X, Batch(X, X)), ValueError, f" dict for it, {{'b': None}}; {BY_KEYS}"),
    "keys": (TWO, {"mask": (0, None)}, (X, {"a": X, "b": X}), ValueError, f" tuple for it, (0, None); {BY_KEYS}"),
    "more others": (REST, {"others": (None,)}, (X, X, X), ValueError, f"others is a dict of 2 entries, {NAMES}"),
    "nothing": (TWO, {"x": None, "mask": None}, (X, X), TypeError, "got arguments of whole Tensor only, of which"),
    "twice": (TWO, {"x": 0}, (X, X, X), TypeError, "takes from 2 to 3 positional arguments but 4 were given"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is")  # deprecated, or not supported
@pytest.mark.parametrize("kind", [*filter("compiled".__ne__, REFUSED), *slow("compiled")])
def test_dimensions_that_do_not_fit_are_refused_by_name(kind):
    module, in_dims, args, error, text = REFUSED[kind]
    module = torch.compile(module) if kind == "compiled" else module
    with pytest.raises(error, match=re.escape(text)):
        DataParallelWithCallback(module, CPUS, in_dims=in_dims)(*args)
    if args is None:
        with pytest.raises(error, match=re.escape(text)):
            patch_replication_callback(nn.DataParallel(module), in_dims=in_dims)


@pytest.mark.parametrize("out_dims", [True, "0", (0, 1.0), {"a": [None, 0, b""]}], ids=repr)
def test_dimensions_of_outputs_are_ints_or_none(out_dims):
    with pytest.raises(TypeError, match=r"dimensions must be ints or None, .* for out_dims"):
        DataParallelWithCallback(TWO, CPUS, out_dims=out_dims)


SECOND = ", or call a second wrapper of the module where it returns something else, as in eval mode"
LONE = f"output is a Tensor, but out_dims names a tuple for it, (0, 0); {ONE}{SECOND}"
FEWER = f"output is a list of 1 entries, but out_dims names a tuple for it, (0, 0); {AS_MANY}{SECOND}"
OUTPUTS: dict[str, tuple[Any, ...]] = {  # what each replica returns, `out_dims`, and the output or the error
    "dimension": (lambda x: x, 1, lambda x: torch.cat(x.chunk(2), 1)),
    "negative": (lambda x: x, -1, lambda x: torch.cat(x.chunk(2), 1)),
    "dict": (lambda x: {"a": x, "b": x.T}, {"b": 1}, lambda x: {"a": x, "b": x.T}),
    "scalars": (lambda x: [x.sum(), x], (None, 0), "replica 0 returned output[0] = tensor("),
    "vector of scalars": (lambda x: {"loss": x.sum()}, 0, lambda x: {"loss": x.view(2, 4).sum(1)}),
    "numbers": (lambda x: {"n": int(x[0, 0])}, {"n": None}, "replica 1 returned 4; return a tensor in place of a"),
    "NaN": (lambda x: {"n": math.nan if x[0, 0] == 0 else 1.0}, {"n": None}, "output['n'] = nan, but replica 1"),
    "list of numbers": (lambda x: [{"n": int(n)} for n in x[:, 0]], 0, lambda x: [{"n": int(n)} for n in x[:, 0]]),
    "list": (lambda x: list(x), 0, list),
    "whole list": (lambda x: [1, "a"], (None, None), lambda x: [1, "a"]),
    "whole values": (lambda x: (x, x * 0 + 1), (0, None), lambda x: (x, x[:2] * 0 + 1)),
    "other values": (lambda x: (x, x), (0, None), "replica 0 returned output[1] = tensor("),
    "other shapes": (lambda x: (x, x[: int(x[0, 0])]), (0, None), "but replica 1 returned tensor("),
    "no list": (lambda x: (x, x[0] if x[0, 0] else [x]), (0, 0), "output[1] = [tensor"),
    "lone tensor": (lambda x: x, (0, 0), LONE),
    "fewer": (lambda x: [x], (0, 0), FEWER),
    "no dimension": (lambda x: x, 3, "output of shape (2, 2) has no dimension 3; name the dimension of its samples"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_put_together_as_named(devices, kind):
    function, out_dims, expected = OUTPUTS[kind]
    x = torch.arange(8.0, device=as_devices(devices)[0]).view(4, 2)
    parallel = DataParallelWithCallback(Net(lambda net, x: function(x)), devices, out_dims=out_dims)
    if kind in ("other values", "scalars") and devices[0] != "cpu":
        parallel(x)  # A comparison would make the host wait.
    elif isinstance(expected, str):
        with pytest.raises((ValueError, IndexError), match=re.escape(expected)):
            parallel(x)
    else:
        assert repr(parallel(x)) == repr(expected(x))


WHOLE: dict[str, Any] = {  # what replicas return as a whole, and what replica 1 returns in its place
    "bool": (torch.tensor([True]), torch.tensor([False])),
    "int": (torch.arange(3), torch.arange(1, 4)),
    "complex": (torch.ones(2) * 1j, torch.ones(2)),
    "dtype": (torch.ones(2), torch.ones(2).double()),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2)),
    "nan": (torch.tensor([math.nan]), torch.tensor([1.0])),
    "infinite": (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0])),
    "empty": (torch.ones(0), torch.ones(1)),
    "half": (torch.ones(2).half(), torch.zeros(2).half()),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_values_of_what_is_whole_must_be_equal_in_all_replicas(kind):
    value, other = WHOLE[kind]
    net = Net(lambda net, x: (x, net.seconds.pop() if x[0] else value), seconds=[other, value.clone()])
    parallel = DataParallelWithCallback(net, CPUS, out_dims=(0, None))
    assert parallel(torch.arange(4.0))[1] is value
    with pytest.raises(ValueError, match=r"replica 0 returned output\[1\] = tensor"):
        parallel(torch.arange(4.0))


@dataclass
class Names:
    names: list[str]


def named(net, x, meta):
    names = meta.names if isinstance(meta, Names) else meta.get("names", ["a"])
    return x, [f"{name} of {len(names)}" for name in names]


@pytest.mark.parametrize("make", [Names, lambda names: UserDict(names=names)], ids=["class", "mapping"])
def test_entries_of_containers_without_tensors_are_cut_as_named(devices, make):
    parallel = DataParallelWithCallback(Named(named), devices, in_dims={"meta": {"names": 0}}, out_dims=(0, 0))
    x, names = X.to(as_devices(devices)[0]), ["a", "b", "c", "d"]
    assert parallel(x, make(names))[1] == [f"{name} of 2" for name in names]
    for settings in (UserDict(), UserDict(title="all")):
        assert parallel(x, settings)[1] == ["a of 1"] * 2


def call_by_hand(parallel, x, inputs_of, kwargs):
    inputs, _ = parallel.scatter((x,), {}, parallel.device_ids)
    replicas = parallel.replicate(parallel.module, parallel.device_ids[: len(inputs)])
    return parallel.gather(parallel.parallel_apply(replicas, inputs_of(inputs), kwargs), parallel.output_device)


@pytest.mark.parametrize("inputs_of", [list, iter])
def test_parallel_apply_takes_iterators_and_none_for_no_keyword_arguments(inputs_of):
    for kwargs in (None, (), map(dict, [(), ()])):
        assert torch.equal(call_by_hand(DataParallelWithCallback(TWO, CPUS), X, inputs_of, kwargs), X)


@pytest.mark.parametrize(("inputs_of", "kwargs"), [(lambda inputs: inputs[:1], None), (list, [{}])])
def test_parallel_apply_refuses_other_numbers_of_arguments_than_of_replicas_at_once(inputs_of, kwargs):
    parallel = DataParallelWithCallback(convert_model(model(pool)), CPUS)
    with pytest.raises(ValueError, match=r"for each of 2 replicas, but got [12] positional and 1 keyword ones"):
        call_by_hand(parallel, X, inputs_of, kwargs)


class Sliced(nn.DataParallel):
    """Has attributes of the names of options, as subclasses have had before the wrapper had such options."""

    in_dims = "those of the user"

    def forward(self, x):
        return super().forward(x)[:, : self.out_dims]


class SlicedWithCallback(Sliced, DataParallelWithCallback):
    pass


WAYS = {"patched": patch_replication_callback, "reverted": lambda parallel: revert_model(convert_model(parallel))}


@pytest.mark.parametrize("way", ["derived", *WAYS])
def test_attributes_of_the_names_of_options_are_left_to_a_subclass(way):
    parallel = SlicedWithCallback(TWO, CPUS) if way == "derived" else WAYS[way](of_class(Sliced, TWO, CPUS))
    parallel.out_dims = 2
    assert torch.equal(parallel(X), X[:, :2])
    assert parallel.in_dims == "those of the user"


class OwnSteps(nn.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        return [(chunk,) for chunk in inputs[0].chunk(2)], [{}, {}]

    def gather(self, outputs, output_device):
        return torch.cat(outputs)


class OwnStepsWithCallback(OwnSteps, DataParallelWithCallback):
    pass


@pytest.mark.parametrize("step", ["scatter", "gather"])
def test_own_step_that_never_reaches_that_of_the_wrapper_is_told_that_it_ignores_dimensions(step):
    dims = {"scatter": {"in_dims": {"x": 0}}, "gather": {"out_dims": 0}}[step]
    assert torch.equal(OwnStepsWithCallback(TWO, CPUS)(X), X)
    patched = patch_replication_callback(of_class(OwnSteps, TWO, CPUS), **dims)
    for parallel in (OwnStepsWithCallback(TWO, CPUS, **dims), patched):
        with pytest.raises(RuntimeError, match=rf"its own {step} does not call .*; call super\(\)\.{step}, or leave"):
            parallel(X)


class InPlace(Boxes):
    def to(self, device):
        self.corners = self.corners.to(device)
        return self


@pytest.mark.parametrize("devices", device_lists(1, 3))
def test_objects_that_move_in_place_are_copied(devices):
    def forward(net, images, whole, boxes):
        assert all(box.corners.device == images.device for box in [whole, *boxes])
        return images, [InPlace(box.corners[:1]) for box in boxes]

    device, whole, boxes = as_devices(devices)[0], InPlace(X), [InPlace(X + i) for i in range(4)]
    dims = {"in_dims": {"whole": None, "boxes": 0}, "out_dims": (0, 0)}
    _, made = DataParallelWithCallback(Named(forward), devices, **dims)(X.to(device), whole, boxes)
    assert all(box.corners.device.type == "cpu" for box in [whole, *boxes])
    assert all(box.corners.device == device for box in made)


def test_wrappers_show_keep_and_revert_their_dimensions():
    parallel = DataParallelWithCallback(TWO, CPUS, in_dims={"mask": None}, out_dims=(0, 1))
    assert "in_dims={'mask': None}, out_dims=(0, 1)" in repr(parallel)
    assert "dims" not in repr(DataParallelWithCallback(TWO, CPUS))
    converted = convert_model(revert_model(parallel))
    assert repr(converted) == repr(parallel)


def test_pickles_of_wrappers_without_dimensions_still_run():
    parallel = DataParallelWithCallback(TWO, CPUS)
    for name in [name for name in vars(parallel) if name.endswith("dims")]:  # which older versions have not had
        delattr(parallel, name)
    assert torch.equal(pickle.loads(pickle.dumps(parallel))(X), X)
