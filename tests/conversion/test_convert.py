"""Conversion changes the class of layers and nothing else, both ways, and says what it leaves."""

import copy
import inspect
import pickle
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as quantized
import torch.nn.functional as F
from helpers import (
    Net,
    anatomy,
    assert_equal,
    assert_like,
    assert_same_state,
    assert_same_step,
    classes,
    doubles,
    randomize,
)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import fuse_conv_bn_eval, parametrize

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    assert_matches_one_device,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
)

OURS = SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d, SynchronizedBatchNorm
KINDS = [*zip((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), OURS, strict=True)]
GROUP = torch.distributed.ProcessGroup(0, 1)


class Tagged(nn.BatchNorm2d):
    def __init__(self, tag: str, num_features: int) -> None:
        super().__init__(num_features)
        self.tag = self._base = self._original = tag  # of which two could be names of the library's own
        self.register_buffer("calls", torch.zeros(2))

    def extra_repr(self) -> str:
        return f"tag={self.tag}"

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.weight, 0.5)


class AnyShape(nn.BatchNorm2d):
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 3:
            raise ValueError("expected more dimensions")


class Final(nn.BatchNorm2d):
    def __init_subclass__(cls) -> None:
        raise TypeError("this class is final")


def subclass(name: str, base: type = nn.BatchNorm2d, **attributes: Any) -> Any:
    return type(base)(name, (base,), attributes)


def set_all_but_class(layer: nn.Module, name: str, value: object) -> None:
    if name != "__class__":
        nn.Module.__setattr__(layer, name, value)


Redirects = subclass("Redirects", __setattr__=set_all_but_class)
OfNoDimension = subclass("OfNoDimension", _BatchNorm, _check_input_dim=lambda self, input: None)
Slotted = subclass("Slotted", __slots__=("extra",))
WithMetaclass = subclass("Metaclass", type(nn.Module))("WithMetaclass", (nn.BatchNorm2d,), {})
Wrapper = subclass("Wrapper", nn.DataParallel)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), Tagged("second", 4))


def through_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def rich_net() -> Net:
    """Return a net with every way in which a module holds another, and all that a layer may have."""
    parent, layers = nn.BatchNorm2d(4), nn.ModuleList([nn.BatchNorm1d(4).eval(), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
    layers[0].num_batches_tracked += 5
    layers.add_module("shared", parent)
    parent.child = nn.Sequential(nn.BatchNorm1d(2))
    parent.weight.requires_grad_(False)
    parent.bias.grad = torch.ones(4)
    parent.qconfig, parent.note = object(), ["a", "list"]
    parent.register_buffer("scale", torch.ones(1))
    parent.register_forward_hook(lambda *_: None)
    sequence = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True))
    by_name = nn.ModuleDict({"volume": nn.BatchNorm3d(4), "dropout": nn.Dropout(), "cycle": layers})
    net = Net(len, sequence=sequence, layers=layers, by_name=by_name, parent=parent, nothing=None, alias=[parent])
    net.tagged, net.sync = Tagged("a", 4), nn.SyncBatchNorm(4)
    net.add_module("none", None)
    return net


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Check that a model has the same modules, tensors, attributes and classes afterwards."""
    before = anatomy(net), classes(net), net.state_dict()._metadata
    yield
    assert (anatomy(net), classes(net), net.state_dict()._metadata) == before


def on_three(net: nn.Module) -> DataParallelWithCallback:
    return DataParallelWithCallback(net, ["cpu"] * 3, timeout=5.0)


def synchronized_step(net: nn.Module, plain: nn.Module, *shape: int) -> None:
    assert_same_step(plain, on_three(net), torch.randn(5, *shape, dtype=next(plain.parameters()).dtype))


# What is converted


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, {"eps_mode": "clamp", "group_size": 2}, {"process_group": GROUP}])
def test_nothing_but_classes_and_options_differs_after_conversion_and_back(options):
    net = rich_net().half()
    before, metadata, keys = anatomy(net), net.state_dict()._metadata, list(net.state_dict())
    synchronized = {name: dict(KINDS).get(cls, cls) for name, cls in classes(net).items()}
    synchronized["tagged"] = type(convert_model(Tagged("another", 2)))
    with unchanged(net):
        assert convert_model(net, **options) is net
        assert classes(net) == synchronized
        after = anatomy(net)
        assert options or after == before
        for name, parts in before.items():
            assert {part for part in parts.items() if part[0] not in options} <= after[name].items()
        assert all(getattr(net.tagged, option) == getattr(net.sync, option) == options[option] for option in options)
        assert (net.state_dict()._metadata, list(net.state_dict())) == (metadata, keys)
        with unchanged(net):  # Twice is once.
            convert_model(net, **options)
        assert revert_model(net) is net
    with unchanged(net):
        revert_model(net)


@pytest.mark.parametrize(("plain", "ours"), KINDS)
def test_a_layer_alone_becomes_synchronized_and_plain_again(plain, ours):
    layer = plain(3)
    assert type(convert_model(layer)) is ours
    assert [kind for kind, _ in KINDS if isinstance(layer, kind)] == [plain] * (plain is not nn.SyncBatchNorm)
    for reverted in (revert_model(layer), revert_model(ours(3, eps_mode="plus", group_size=2))):
        assert type(reverted) is plain
        assert set(vars(reverted)) == set(vars(plain(3)))


def test_a_model_on_meta_converts_and_gets_the_tensors_of_a_checkpoint():
    source = convert_model(randomize(small_net()))
    with torch.device("meta"):
        net = convert_model(small_net())
    net.load_state_dict(source.state_dict(), assign=True)
    assert_same_state(net, source)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"eps_mode": "max"}, ValueError, "eps_mode must be 'plus' or 'clamp', got 'max'"),
        ({"eps_mode": 3}, TypeError, "eps_mode must be 'plus' or 'clamp', got 3"),
        ({"group_size": 0}, ValueError, "expected group_size of at least 1"),
        ({"group_size": True}, TypeError, "expected group_size as a number of replicas"),
        ({"process_group": [0, 1]}, TypeError, r"process_group must be a group of torch.distributed, got \[0, 1\]"),
        ({"group_size": 2, "process_group": GROUP}, ValueError, "expected group_size or process_group, but got 2 "),
    ],
)
def test_bad_options_are_refused_before_anything_changes(options, error, text):
    net, other = nn.DataParallel(small_net()), nn.Identity()
    with unchanged(net):
        for take in (partial(convert_model, net), partial(convert_model, other), partial(SynchronizedBatchNorm2d, 3)):
            with pytest.raises(error, match=text):
                take(**options)


def test_a_model_and_its_optimizer_train_on_through_conversion_and_back():
    plain = randomize(small_net()).double()
    net = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, net)]
    parallel, leave = on_three(net), (lambda net: net)
    with unchanged(net):
        for convert, trained in ((leave, net), (convert_model, parallel), (leave, parallel), (revert_model, net)):
            convert(net)
            assert_same_step(plain, trained, doubles(5, 3, 6, 6))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_state(net, plain)


def test_a_sync_batch_norm_keeps_its_group_unless_one_is_given():
    layer = nn.SyncBatchNorm(3, process_group="its own")
    for convert in (convert_model, revert_model):
        assert convert(layer).process_group == "its own"
    assert convert_model(layer, process_group=GROUP).process_group is GROUP
    assert revert_model(layer).process_group == "its own"
    assert set(vars(layer)) == set(vars(nn.SyncBatchNorm(3)))
    assert revert_model(SynchronizedBatchNorm(3, process_group=GROUP)).process_group is GROUP


# Subclasses


@pytest.mark.parametrize("cls", [Tagged, AnyShape, Redirects, OfNoDimension, Slotted, WithMetaclass, Final])
def test_a_subclass_without_computation_of_its_own_is_synchronized_and_comes_back(cls):
    plain = randomize(cls("tag", 3) if cls is Tagged else cls(3)).double()
    layer = copy.deepcopy(plain)
    before = anatomy(layer)
    convert_model(layer)
    assert isinstance(layer, cls)
    assert [isinstance(layer, ours) for _, ours in KINDS] == [isinstance(plain, theirs) for theirs, _ in KINDS]
    assert type(layer).__name__ == f"Synchronized{cls.__name__}"
    assert anatomy(layer) == before
    for other in (convert_model(copy.deepcopy(plain)), copy.deepcopy(layer), through_pickle(layer)):
        assert type(other) is type(layer)
        assert type(revert_model(other)) is cls
    synchronized_step(layer, plain, 3, 4, 4)
    assert type(revert_model(layer)) is cls
    assert vars(layer).keys() == vars(plain).keys()


def test_a_converted_subclass_keeps_what_it_overrides():
    layer = convert_model(Tagged("a tag", 3), group_size=2)
    assert repr(layer) == "SynchronizedTagged(tag=a tag, group_size=2)"
    assert repr(convert_model(Standalone(3), classes=dict(USERS_OWN))).startswith("SynchronizedStandalone(3")
    layer.reset_parameters()
    assert_equal(layer.weight, torch.full((3,), 0.5))
    assert type(layer)("another", 2).tag == "another"
    with pytest.raises(ValueError, match="expected more dimensions"):
        convert_model(AnyShape(3))(torch.randn(2, 3))


def test_a_copy_of_another_class_keeps_its_class():
    net = convert_model(nn.Sequential(subclass("Vanishes", __deepcopy__=lambda self, memo: nn.Identity())(3)))
    assert isinstance(net[0], SynchronizedBatchNorm2d)
    assert type(copy.deepcopy(net)[0]) is nn.Identity


def left(net: nn.Module, convert: Callable[[nn.Module], nn.Module] = convert_model) -> str:
    """Convert, and return the one warning that there is."""
    with pytest.warns(UserWarning, match=r"_model left .* as they are, which .*, \d+ in all:\n- ") as caught:
        assert convert(net) is net
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return str(caught[0].message)


def nested(depth: int) -> list[Any]:
    """Return a layer in so many lists that Python could not recurse."""
    held: list[Any] = [nn.BatchNorm2d(4)]
    for _ in range(depth):
        held = [held, held]
    return held


RING: list[Any] = [nn.BatchNorm2d(4)]
RING.append(RING)
LAYER = nn.BatchNorm2d(4)
HELD: list[tuple[Any, str | None]] = [  # what is in an attribute, and what the warning calls it
    ((nn.Sequential(nn.BatchNorm1d(4)),), "1.held"),
    ({"a": [1, ([nn.BatchNorm3d(4)],)]}, "1.held"),
    (RING, "1.held"),
    (nested(3000), "1.held"),
    ([nn.Sequential(LAYER, nn.ReLU()), {"a": nn.BatchNorm2d(4)}, nn.BatchNorm1d(4), LAYER], "1.held (3 layers)"),
    (["text", [nn.ReLU(), 3], SynchronizedBatchNorm2d(4)], None),
]


@pytest.mark.parametrize(("held", "named"), HELD, ids=[f"{i}: {named}" for i, (_, named) in enumerate(HELD)])
def test_layers_in_a_plain_container_are_named(held, named):
    registered = nn.BatchNorm2d(4)
    net = nn.Sequential(nn.ReLU(), Net(len, registered=registered, known=[registered], held=held))
    if named is None:
        convert_model(net)  # without a warning
    else:
        message = left(net)
        assert f"{3 if 'layers' in named else 1} in all:\n- {named}: in a plain list or dict, which torch" in message
        assert message.endswith("does not register; use nn.ModuleList or nn.ModuleDict")
    assert type(registered) is SynchronizedBatchNorm2d


def test_stored_methods_are_those_of_the_new_class():
    net = Net(lambda net, x: net.map(net.norm(x)), bn=nn.BatchNorm2d(3), linear=nn.Linear(4, 4))
    bn = net.bn
    net.norm, net.map, net.partial = bn.forward, net.linear.forward, partial(partial(bn.forward), input=1)
    net.norms, net.by_name = [bn.forward, 2], {"norm": bn.forward, "eval": bn.eval}
    net.odd = MethodType(partial(lambda layer: layer), bn)  # whose function has no name
    net.call, net.update = partial(max, 1), UserDict().update  # of no layer, and of an object without a hash
    kept = [net.map, net.odd, net.call, net.update, net.norms[1], net.by_name["eval"]]
    model = nn.Sequential(nn.DataParallel(net))
    parallel = DataParallelWithCallback(convert_model(model), ["cpu"] * 2)
    for method in (net.norm, net.partial.func, net.norms[0], net.by_name["norm"]):
        assert method == MethodType(SynchronizedBatchNorm2d.forward, bn)
    assert net.partial.keywords == {"input": 1}
    assert [net.map, net.odd, net.call, net.update, net.norms[1], net.by_name["eval"]] == kept
    assert_matches_one_device(parallel, torch.randn(4, 3, 4, 4))
    revert_model(model)
    assert net.norms[0].__func__ is net.partial.func.__func__ is net.norm.__func__ is nn.BatchNorm2d.forward


OfBase = subclass("OfBase", _BatchNorm.__base__, forward=lambda self, input: input)
Called = subclass("Called", __call__=lambda self, input: input)
Reduced = subclass("Reduced", nn.BatchNorm1d, __reduce__=lambda self: (Reduced, (self.num_features,)))
Saved = subclass("Saved", nn.BatchNorm3d, __getstate__=lambda self: vars(self) | {"training": True})
Grouped = subclass("Grouped", group_size=property(lambda self: self.missing_so_far))
Sync = subclass("Sync", nn.SyncBatchNorm)


def layer_with(**attributes: Any) -> nn.Module:
    layer = nn.BatchNorm2d(2)
    vars(layer).update(attributes)
    return layer


def parametrized(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Net(lambda net, weight: 2 * weight))


COMPILED = "is compiled by TorchScript; convert the model that was compiled instead"
OWN_FORWARD = "NormAbs has a forward of its own; ...class SynchronizedNormAbs(NormAbs, SynchronizedBatchNorm2d), in ..."
COPY_OF_CODE = (
    "Standalone has the ... and a forward of its own; ...(Standalone, SynchronizedBatchNorm), whose forward ..."
)
LEFT: list[tuple[Callable[[], nn.Module], str]] = [  # "..." stands for any text
    (lambda: NormAbs(2), OWN_FORWARD),
    (lambda: Standalone(2), COPY_OF_CODE),
    (lambda: OfBase(2), "OfBase has the attributes of a batch norm and a forward of its own; ..."),
    (lambda: Called(2), "Called has a __call__ of its own; write class ..."),
    (lambda: Reduced(2), "Reduced has a __reduce__ of its own; ...(Reduced, SynchronizedBatchNorm1d)..."),
    (lambda: Saved(2), "Saved has a __getstate__ of its own; ..."),
    (lambda: quantized.BatchNorm2d(2), "BatchNorm2d has a forward of its own; write class ..."),
    (lambda: layer_with(forward=torch.relu), "BatchNorm2d has a forward of its own, set on the object; convert ..."),
    (lambda: Grouped(2), "Grouped has a group_size of its own, a name that synchronized layers need; rename it"),
    (lambda: layer_with(eps_mode="mine"), "BatchNorm2d has a eps_mode of its own, a name ..."),
    (lambda: layer_with(process_group="mine"), "BatchNorm2d has a process_group of its own, a name ..."),
    (lambda: Sync(2), "Sync is derived from torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"),
    (lambda: parametrized(nn.BatchNorm2d(2)), "ParametrizedBatchNorm2d is parametrized; convert the model before ..."),
    (nn.LazyBatchNorm3d, "LazyBatchNorm3d is lazy and has seen no input; run one batch through the model in eval ..."),
    (lambda: torch.jit.script(nn.BatchNorm2d(2)), f"BatchNorm2d {COMPILED}"),
    (lambda: torch.jit.trace(nn.BatchNorm1d(2).eval(), torch.randn(2, 2)), f"BatchNorm1d {COMPILED}"),
]


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("make", "reason"), LEFT, ids=[reason[:40] for _, reason in LEFT])
def test_layers_that_cannot_be_converted_are_left_as_they_are_and_named(make, reason):
    net = nn.Sequential(make(), nn.BatchNorm2d(2), nn.Sequential(make()))
    before = [(anatomy(net[i]), classes(net[i])) for i in (0, 2)]
    text = "convert_model left BatchNorm layers as they are, which do not synchronize, 2 in all:"
    assert_like(left(net), f"{text}\n- 0, 2.0: {reason}")
    assert [(anatomy(net[i]), classes(net[i])) for i in (0, 2)] == before
    assert type(net[1]) is SynchronizedBatchNorm2d


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_that_never_normalize_with_the_batch_are_not_named():
    frozen = Standalone(2)
    frozen.register_buffer("weight", frozen._parameters.pop("weight"))
    convert_model(nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), frozen, torch.jit.script(nn.ReLU())))


@pytest.mark.parametrize(("plain", "ours"), KINDS[:3])
def test_a_lazy_layer_is_left_until_it_has_seen_an_input(plain, ours):
    sizes, source = [4] * (KINDS.index((plain, ours)) + 1), nn.Sequential(randomize(plain(3)))
    net = nn.Sequential(getattr(nn, f"Lazy{plain.__name__}")())
    net.load_state_dict(source.state_dict())  # which gives it its parameters
    before = anatomy(net)
    assert f"- 0: Lazy{plain.__name__} is lazy and has seen no input; run one batch through the model" in left(net)
    assert anatomy(net) == before
    net.eval()(torch.randn(2, 3, *sizes))
    weight = net[0].weight
    assert type(convert_model(net.train())[0]) is ours
    assert net[0].weight is weight
    synchronized_step(net, source, 3, *sizes)


def test_a_converted_layer_can_be_parametrized_and_is_then_left_by_revert_model():
    plain = nn.Sequential(randomize(NormTanh(3))).double()
    net = convert_model(copy.deepcopy(plain), classes={NormTanh: SynchronizedNormTanh})
    for model in (plain, net):
        parametrized(model[0])
    synchronized_step(net, plain, 3, 4, 4)
    assert "is parametrized; remove its parametrizations first" in left(net, revert_model)
    parametrize.remove_parametrizations(net[0], "weight")
    assert type(revert_model(net)[0]) is NormTanh


def test_a_class_derived_from_ours_is_left_by_both_ways():
    net = convert_model(nn.Sequential(Unrelated(2), nn.BatchNorm2d(2)))
    assert type(net[0]) is Unrelated
    assert "1 in all:\n- 0: Unrelated is derived from a class of sync_batchnorm; give it" in left(net, revert_model)
    assert [type(layer) for layer in net] == [Unrelated, nn.BatchNorm2d]


@pytest.mark.parametrize("kind", [Wrapper, nn.DataParallel])
def test_a_wrapper_and_its_subclass_keep_what_they_have_both_ways(kind):
    net = kind(nn.Sequential(nn.BatchNorm2d(2)))
    net.device_ids, net.output_device, net.dim, net.timeout = [0, 2], 2, 1, "mine"
    before = anatomy(net.eval())
    model = nn.Sequential(net, nn.ReLU())
    assert convert_model(model) is model
    for twin in (net, copy.deepcopy(net), through_pickle(net)):
        assert isinstance(twin, kind)
        assert classes(twin) == classes(convert_model(kind(twin.module)))
        kept = twin.device_ids, twin.output_device, twin.dim, twin.training, twin.timeout
        assert kept == ([0, 2], 2, 1, False, "mine")
        assert type(twin.module[0]) is SynchronizedBatchNorm2d
    assert isinstance(net, DataParallelWithCallback) == (kind is nn.DataParallel)
    assert revert_model(model) is model
    assert type(net) is kind
    assert anatomy(net) == before


def test_a_wrapper_of_cpu_replicas_stays_and_reverts_to_one_that_runs_its_module_or_has_each_gpu_once():
    net, input = DataParallelWithCallback(convert_model(small_net()), ["cpu"] * 2), torch.randn(4, 3, 5, 5)
    with unchanged(net):
        convert_model(net)
    expected = net.eval()(input)
    assert (type(revert_model(net)), net.device_ids) == (nn.DataParallel, [])
    assert not [name for name in vars(net) if "timeout" in name]
    assert_equal(net(input), expected)
    shared = DataParallelWithCallback(net.module, ["cpu"] * 2)
    shared.device_ids = [torch.device("cuda", i) for i in (1, 0, 1)]
    assert revert_model(shared).device_ids == [1, 0]


def test_options_that_synchronized_layers_keep_are_named():
    net = nn.Sequential(nn.BatchNorm2d(2), SynchronizedBatchNorm2d(2), SynchronizedBatchNorm2d(2, eps_mode="clamp"))
    with pytest.warns(UserWarning, match=r"left the eps_mode of .* \(1, first: 1\); .* layer\.eps_mode = 'clamp', or"):
        convert_model(net, eps_mode="clamp")
    assert [layer.eps_mode for layer in net] == ["clamp", None, "clamp"]
    net[1].eps_mode = "clamp"  # as the warning says
    convert_model(net, eps_mode="clamp")
    with pytest.warns(UserWarning, match=r"the group_size of layers .* \(3, first: 0\)"):
        convert_model(net, group_size=2)


def test_a_reverted_model_pickles_without_the_library():
    net = nn.Sequential(Wrapper(Tagged("a", 2)), nn.DataParallel(nn.BatchNorm2d(2)), nn.SyncBatchNorm(4))
    convert_model(net, eps_mode="clamp", group_size=2)
    assert b"sync_batchnorm" in pickle.dumps(net)
    assert b"sync_batchnorm" not in pickle.dumps(revert_model(net))


# What torch does with a model in eval, converted or reverted

WAYS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
    "fused": lambda net, input: nn.Sequential(fuse_conv_bn_eval(net[0], net[1]), *net[2:]),
    "traced": lambda net, input: torch.jit.trace(net, (input,)),
    "compiled": lambda net, input: torch.compile(net, fullgraph=True, backend="eager"),
    "exported": lambda net, input: torch.export.export(net, (input,)).module(),
}


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("convert", [convert_model, lambda net: revert_model(convert_model(net))], ids=["ours", "back"])
@pytest.mark.parametrize("way", WAYS)
def test_tools_of_torch_take_a_converted_and_a_reverted_model_in_eval(way, convert):
    torch.compiler.reset()
    net, input = randomize(small_net()), torch.randn(2, 3, 5, 5)
    net(input)
    expected = net.eval()(input).detach()
    assert_equal(WAYS[way](convert(net), input)(input), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_and_symbolic_tracing_take_a_reverted_model():
    net, input = revert_model(convert_model(nn.Sequential(nn.BatchNorm2d(3)))).eval(), torch.randn(2, 3, 5, 5)
    assert_equal(torch.jit.script(net)(input), net(input))
    assert type(convert_model(torch.fx.symbolic_trace(net)).get_submodule("0")) is SynchronizedBatchNorm2d


# Classes of a user's own


def batch_norm(layer: Any, input: Tensor) -> Tensor:
    statistics, parameters = (layer.running_mean, layer.running_var), (layer.weight, layer.bias)
    return F.batch_norm(input, *statistics, *parameters, layer.training, layer.momentum, layer.eps)


class NormTanh(nn.BatchNorm2d):
    def __init__(self, size: int, gain: float = 0.5) -> None:
        super().__init__(size)
        self.gain = gain
        self.scale = nn.Parameter(torch.full((size, 1, 1), gain))

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input)) * self.scale


class NormAbs(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        self.num_batches_tracked += self.training
        return batch_norm(self, input).abs()


class Standalone(nn.Module):
    """A copy of the code of a batch norm, without a counter, as some projects have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        vars(self).update(vars(nn.BatchNorm2d(size)))
        del self.track_running_stats, self.num_batches_tracked

    forward = batch_norm


class SynchronizedNormAbs(NormAbs, SynchronizedBatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return SynchronizedBatchNorm2d.forward(self, input).abs()


class SynchronizedStandalone(Standalone, SynchronizedBatchNorm):
    track_running_stats, num_batches_tracked = True, None

    def forward(self, input: Tensor) -> Tensor:
        return SynchronizedBatchNorm.forward(self, input)


SynchronizedNormTanh = type("SynchronizedNormTanh", (NormTanh, SynchronizedBatchNorm2d), {})
USERS_OWN = [(NormTanh, SynchronizedNormTanh), (NormAbs, SynchronizedNormAbs), (Standalone, SynchronizedStandalone)]


@pytest.mark.parametrize(("plain", "ours"), USERS_OWN)
@pytest.mark.parametrize("copied", [lambda net: net, copy.deepcopy, through_pickle], ids=["same", "copy", "pickle"])
def test_class_that_is_told_trains_as_on_one_device_and_comes_back(plain, ours, copied):
    net = randomize(nn.Sequential(nn.Conv2d(2, 3, 3), plain(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))).double()
    kinds, expected = classes(net), copy.deepcopy(net)
    with unchanged(net):
        revert_model(convert_model(net, classes={plain: ours}))
    net = copied(convert_model(net, classes={plain: ours}))
    assert [type(net[1]), type(net[3])] == [ours, SynchronizedBatchNorm2d]
    parallel = on_three(net)
    for training in (True, False, True):
        expected.train(training)
        parallel.train(training)
        assert_same_step(expected, parallel, doubles(5, 2, 6, 6))
    assert classes(revert_model(net)) == kinds
    assert [vars(layer).keys() for layer in net] == [vars(layer).keys() for layer in expected]


def test_class_that_is_told_takes_the_options_and_leaves_its_subclasses():
    Derived = subclass("Derived", NormTanh)
    net = nn.Sequential(NormTanh(3), Derived(3), NormTanh(3))
    net[2].forward = net[2].forward
    with pytest.warns(UserWarning, match=r"- 1: Derived has a forward of its(.|\n)*- 2: NormTanh .* set on the object"):
        convert_model(net, classes={NormTanh: SynchronizedNormTanh}, group_size=2, eps_mode="clamp")
    assert (net[0].group_size, net[0].eps_mode) == (2, "clamp")
    assert [type(layer) for layer in net[1:]] == [Derived, NormTanh]
    assert type(revert_model(net)[0]) is NormTanh


NotSynchronized, Unrelated = subclass("NotSynchronized", NormAbs), subclass("Unrelated", SynchronizedBatchNorm2d)
ForgetsTheAbs = type("ForgetsTheAbs", (SynchronizedBatchNorm2d, NormAbs), {})


@pytest.mark.parametrize(
    ("plain", "ours"),
    [
        *((NormAbs, wrong) for wrong in ("a name", NotSynchronized, Unrelated, SynchronizedNormTanh, ForgetsTheAbs)),
        *((nn.BatchNorm2d, nn.BatchNorm2d), ("a name", Unrelated), (SynchronizedNormTanh, SynchronizedNormTanh)),
    ],
)
def test_class_that_cannot_stand_for_another_is_refused_before_anything_changes(plain, ours):
    replaced, stands = (repr(cls) if isinstance(cls, str) else cls.__name__ for cls in (plain, ours))
    advice = f"derive one, as in class Synchronized{replaced}({replaced}, SynchronizedBatchNorm2d)"
    advice = "leave it out, as convert_model has one" if plain is nn.BatchNorm2d else advice
    text = f"expected a synchronized subclass that does what {replaced} does, but got {stands}; {advice}"
    net = nn.Sequential(nn.BatchNorm2d(3), NormAbs(3))
    with unchanged(net), pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        convert_model(net, classes={plain: ours})


@pytest.fixture(autouse=True)
def _torch_is_as_before() -> Iterator[None]:
    init = _BatchNorm.__init__
    yield
    assert _BatchNorm.__init__ is init
    assert not any("__init__" in vars(plain) for plain, _ in KINDS[:3])


@pytest.mark.smoke
@pytest.mark.parametrize(("plain", "ours"), KINDS[:3])
def test_layers_built_inside_of_the_context_are_synchronized(plain, ours):
    with patch_sync_batchnorm():
        assert type(revert_model(convert_model(ours(2, group_size=2)))) is plain
        layer = plain(2, eps=0.25, momentum=None, affine=False)
        assert getattr(nn, plain.__name__) is plain  # which libraries look up by name
        assert inspect.signature(plain.__init__) == inspect.signature(_BatchNorm.__init__)
    assert type(layer) is type(through_pickle(layer)) is ours
    assert repr(layer) == f"Synchronized{plain(2, eps=0.25, momentum=None, affine=False)}"
    assert type(revert_model(layer)) is plain


def test_subclasses_built_inside_of_the_context_are_what_convert_model_makes_of_them():
    with patch_sync_batchnorm():
        layer, other = Tagged("a", 2), OfNoDimension(2)
        derived = subclass("Derived", __init__=nn.BatchNorm2d.__init__)
    assert type(derived(2)) is derived  # outside
    assert type(layer) is type(convert_model(Tagged("b", 3))) is type(type(layer)("c", 3))
    assert type(other) is type(convert_model(OfNoDimension(2)))
    assert [name for name, _ in layer.named_buffers()][-1] == "calls"
    assert type(revert_model(layer)) is Tagged


PATCH_LEFT = "patch_sync_batchnorm left a BatchNorm layer as it is, which does not synchronize: "


def test_subclass_that_computes_something_else_is_named_where_it_is_built():
    with patch_sync_batchnorm():
        with pytest.warns(UserWarning, match=f"{PATCH_LEFT}NormAbs has a forward of its own; write") as caught:
            assert type(NormAbs(2)) is NormAbs
        with pytest.warns(UserWarning, match=f"{PATCH_LEFT}LazyBatchNorm2d is lazy and has seen no input"):
            nn.LazyBatchNorm2d()
        assert type(nn.SyncBatchNorm(2)) is nn.SyncBatchNorm
    assert [warning.filename for warning in caught] == [__file__]


def test_the_context_decorates_a_function_and_ends_with_it_also_by_an_exception():
    build = patch_sync_batchnorm()(nn.BatchNorm2d)
    with pytest.raises(TypeError, match="num_features"):
        build()
    assert type(nn.BatchNorm2d(2)) is nn.BatchNorm2d
    assert type(build(2)) is SynchronizedBatchNorm2d
