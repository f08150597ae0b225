"""Conversion changes the class of layers and nothing else, both ways, and says what it leaves."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as quantized
import torch.distributed as dist
import torch.nn.functional as F
from forks import forked, needs_fork
from helpers import (
    WITHOUT_BIAS,
    anatomy,
    assert_equal,
    assert_same_state,
    assert_same_step,
    classes,
    needs_bias_argument,
    randomize,
)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import fuse_conv_bn_eval, parametrize, prune

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    patch_replication_callback,
    patch_sync_batchnorm,
    revert_model,
)
from sync_batchnorm.replicate import _Callbacks

KINDS = [
    (nn.BatchNorm1d, SynchronizedBatchNorm1d),
    (nn.BatchNorm2d, SynchronizedBatchNorm2d),
    (nn.BatchNorm3d, SynchronizedBatchNorm3d),
    (nn.SyncBatchNorm, SynchronizedBatchNorm),
]
OPTIONS: list[dict[str, Any]] = [{}, {"eps_mode": "clamp", "group_size": 2}, {"process_group": "a group"}]


class Tagged(nn.BatchNorm2d):
    """A subclass that adds to a layer, but leaves its computation alone."""

    def __init__(self, tag: str, num_features: int) -> None:
        super().__init__(num_features)
        self.tag = tag
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


class BatchNormReLU(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class SynchronizedBatchNormReLU(SynchronizedBatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class OfNoDimension(_BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        pass


class Slotted(nn.BatchNorm2d):
    __slots__ = ("extra",)


class Named(type(nn.Module)):  # type: ignore[misc]
    """A metaclass of somebody's own."""


class WithMetaclass(nn.BatchNorm2d, metaclass=Named):
    pass


class Wrapper(nn.DataParallel):
    """A subclass of `nn.DataParallel`, as projects have them."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), Tagged("second", 4))


class Nested(nn.Module):
    """Every way in which a module holds another, and layers that are not to be touched."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True))
        self.list = nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
        self.dict = nn.ModuleDict({"volume": nn.BatchNorm3d(4), "dropout": nn.Dropout()})
        self.parent = nn.BatchNorm2d(4)
        self.parent.child = nn.Sequential(nn.BatchNorm1d(2))
        self.nothing: nn.Module | None = None
        self.tagged = Tagged("a", 4)
        self.sync = nn.SyncBatchNorm(4)
        self.add_module("none", None)


def synchronized_step(net: nn.Module, plain: nn.Module, *shape: int, tolerance: float | None = None) -> None:
    parallel = DataParallelWithCallback(net, ["cpu"] * 3, timeout=5.0)
    input = torch.randn(5, *shape, dtype=next(plain.parameters()).dtype)
    assert_same_step(plain, parallel, input, tolerance=tolerance)


# What is converted


@pytest.mark.parametrize("options", OPTIONS)
def test_a_nested_model_changes_only_the_classes_of_its_batch_norms(options):
    net = Nested()
    before, keys = classes(net), list(net.state_dict())
    assert convert_model(net, **options) is net
    expected = {name: dict(KINDS).get(cls, cls) for name, cls in before.items()}
    after = classes(net)
    tagged = after.pop("tagged")
    assert before.pop("tagged") is Tagged
    expected.pop("tagged")
    assert issubclass(tagged, (Tagged, SynchronizedBatchNorm2d))
    assert after == expected
    assert list(net.state_dict()) == keys


@pytest.mark.parametrize(("plain", "ours"), KINDS)
def test_a_root_layer_becomes_synchronized_and_plain_again(plain, ours):
    layer = plain(3)
    assert convert_model(layer) is layer
    assert type(layer) is ours
    assert revert_model(layer) is layer
    assert type(layer) is plain


def test_a_model_without_batch_norm_is_returned_as_it_is():
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = anatomy(net), classes(net)
    assert convert_model(net) is net
    assert revert_model(net) is net
    assert (anatomy(net), classes(net)) == before


def test_what_is_not_a_module_is_refused():
    for convert in (convert_model, revert_model):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, but got list; pass the model itself"):
            convert([nn.BatchNorm2d(2)])


@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_but_classes_and_options_differs_after_conversion_and_back(options):
    net = Nested()
    before = anatomy(net), classes(net), dict(net.state_dict()._metadata)
    convert_model(net, **options)
    after = anatomy(net)
    for name, parts in after.items():
        given = {key: parts.pop(key, None) for key in options}
        assert all(given.values()) or name not in ("parent", "list.0", "tagged")
        if name == "sync":
            parts.pop("_former_process_group", None)
            parts["process_group"] = before[0][name]["process_group"]
    assert after == before[0]
    revert_model(net)
    assert (anatomy(net), classes(net), dict(net.state_dict()._metadata)) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_dtype_requires_grad_and_gradients_are_kept(dtype):
    net = small_net().to(dtype)
    net[1].weight.requires_grad_(False)
    net[4].bias.grad = torch.ones_like(net[4].bias)
    before = anatomy(net)
    assert anatomy(convert_model(net)) == before
    assert anatomy(revert_model(net)) == before


def test_a_model_on_meta_converts_and_is_loaded_by_assignment():
    source = convert_model(randomize(small_net()))
    with torch.device("meta"):
        net = small_net()
    convert_model(net)
    assert net[1].weight.is_meta
    net.load_state_dict(source.state_dict(), assign=True)
    assert_same_state(net, source)
    assert type(net[1]) is SynchronizedBatchNorm2d


def test_modes_are_kept_layer_by_layer():
    net = nn.Sequential(nn.BatchNorm2d(2).eval(), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2)).eval())
    modes = [module.training for module in net.modules()]
    assert [module.training for module in convert_model(net).modules()] == modes
    assert [module.training for module in revert_model(net).modules()] == modes


SETTINGS: list[dict[str, Any]] = [
    {"eps": 0.5, "momentum": 0.25},
    {"momentum": None},
    {"momentum": 0.0},
    {"affine": False},
    *WITHOUT_BIAS,
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_are_kept_and_train_as_before(settings):
    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, **settings)).double()
    net = convert_model(copy.deepcopy(randomize(plain)))
    assert {name: vars(plain[1])[name] for name in vars(plain[1]) if not name.startswith("_")} == {
        name: vars(net[1])[name] for name in vars(net[1]) if not name.startswith("_")
    }
    synchronized_step(net, plain, 2, 4, 4)
    revert_model(net)
    assert repr(net) == repr(plain)
    net(torch.randn(2, 2, 4, 4, dtype=torch.float64))


def test_the_counter_is_kept():
    layer = nn.BatchNorm2d(3)
    layer(torch.randn(2, 3, 4, 4))
    counter = layer.num_batches_tracked
    assert convert_model(layer).num_batches_tracked is counter
    assert revert_model(layer).num_batches_tracked is counter
    assert counter == 1


def test_options_are_kept_on_the_layers():
    grouped = convert_model(small_net(), eps_mode="clamp", group_size=2)
    distributed = convert_model(small_net(), process_group="a group")
    for i in (1, 4):
        assert (grouped[i].eps_mode, grouped[i].group_size, grouped[i].process_group) == ("clamp", 2, None)
        assert (distributed[i].eps_mode, distributed[i].process_group) == (None, "a group")


def test_options_left_out_leave_no_attribute():
    layer = convert_model(nn.BatchNorm2d(3))
    assert not {"eps_mode", "group_size", "process_group"} & set(vars(layer))
    assert (layer.eps_mode, layer.group_size, layer.process_group) == (None, None, None)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"eps_mode": "max"}, ValueError, "expected eps_mode to be one of"),
        ({"group_size": 0}, ValueError, "expected group_size of at least 1"),
        ({"group_size": 2.0}, TypeError, "expected group_size as a number of replicas"),
        ({"group_size": True}, TypeError, "expected group_size as a number of replicas"),
    ],
)
def test_bad_options_are_refused_before_anything_changes(options, error, text):
    net = nn.DataParallel(small_net())
    before = anatomy(net), classes(net)
    with pytest.raises(error, match=text):
        convert_model(net, **options)
    assert (anatomy(net), classes(net)) == before
    with pytest.raises(error, match=text):
        convert_model(nn.Identity(), **options)


# Hooks, parameters and attributes of a layer


def test_hooks_of_every_kind_are_kept_and_called():
    net = small_net()
    called: list[str] = []
    layer = net[1]
    layer.register_forward_pre_hook(lambda *_: called.append("forward_pre"))
    layer.register_forward_hook(lambda *_: called.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: called.append("backward_pre"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    layer.register_state_dict_pre_hook(lambda *_: called.append("state_dict_pre"))
    layer.register_state_dict_post_hook(lambda *_: called.append("state_dict"))
    layer.register_load_state_dict_pre_hook(lambda *_: called.append("load_pre"))
    layer.register_load_state_dict_post_hook(lambda *_: called.append("load"))
    before = anatomy(net)
    order = ["forward_pre", "forward", "backward_pre", "backward", "state_dict_pre", "state_dict", "load_pre", "load"]
    for convert in (convert_model, revert_model):
        convert(net)
        assert anatomy(net) == before
        called.clear()
        output = net(torch.randn(2, 3, 5, 5))
        output.backward(torch.randn_like(output))
        net.load_state_dict(net.state_dict())
        assert called == order
        net.zero_grad()


def test_attributes_and_buffers_of_the_users_own_are_kept():
    layer = nn.BatchNorm2d(2)
    layer.qconfig, layer.note = object(), ["a", "list"]
    layer.register_buffer("scale", torch.ones(1))
    before = anatomy(layer)
    assert anatomy(convert_model(layer)) == before
    assert anatomy(revert_model(layer)) == before


def test_a_pruned_layer_trains_in_replicas_as_before():
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    net = copy.deepcopy(plain)
    for model in (plain, net):
        prune.custom_from_mask(model[1], "weight", torch.tensor([1.0, 0.0, 0.0, 1.0]))
    convert_model(net)
    assert type(net[1]) is SynchronizedBatchNorm2d
    synchronized_step(net, plain, 3, 4, 4)


def test_an_optimizer_that_was_built_before_trains_the_converted_model():
    plain = randomize(small_net()).double()
    net = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, net)]
    parallel = DataParallelWithCallback(convert_model(net), ["cpu"] * 3, timeout=5.0)
    for _ in range(3):
        assert_same_step(plain, parallel, torch.randn(5, 3, 6, 6, dtype=torch.float64))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(net, plain)


# Sharing


def test_a_layer_in_two_places_stays_one_layer():
    shared = nn.BatchNorm2d(2)
    net = nn.Module()
    net.first, net.second, net.pair = shared, shared, nn.Sequential(shared, shared)
    net.alias = [shared]
    convert_model(net)
    assert net.first is net.second is net.pair[0] is net.pair[1] is net.alias[0] is shared
    assert type(shared) is SynchronizedBatchNorm2d
    revert_model(net)
    assert net.first is net.pair[1] is net.alias[0] is shared
    assert type(shared) is nn.BatchNorm2d


def test_a_cycle_of_modules_is_converted_once():
    net = nn.Module()
    net.layer, net.child = nn.BatchNorm2d(2), nn.Module()
    net.child.parent, net.child.layer = net, nn.BatchNorm2d(2)
    convert_model(net)
    assert type(net.layer) is type(net.child.layer) is SynchronizedBatchNorm2d
    revert_model(net)
    assert type(net.layer) is type(net.child.layer) is nn.BatchNorm2d


def test_converting_twice_is_converting_once():
    net = convert_model(nn.DataParallel(Nested()), group_size=2)
    before = anatomy(net), classes(net)
    convert_model(net, eps_mode="clamp")
    assert (anatomy(net), classes(net)) == before


def test_reverting_twice_is_reverting_once():
    net = revert_model(convert_model(Nested()))
    before = anatomy(net), classes(net)
    revert_model(net)
    assert (anatomy(net), classes(net)) == before


def test_a_sync_batch_norm_keeps_its_group_unless_one_is_given():
    layer = nn.SyncBatchNorm(3, process_group="its own")
    assert convert_model(layer).process_group == "its own"
    assert revert_model(layer).process_group == "its own"
    assert convert_model(layer, process_group="given").process_group == "given"
    assert revert_model(layer).process_group == "its own"
    assert "_former_process_group" not in vars(layer)


def test_a_layer_that_was_built_synchronized_reverts_to_one_of_torch():
    for plain, ours in KINDS:
        layer = revert_model(ours(3, eps_mode="plus", group_size=2))
        assert type(layer) is plain
        assert set(vars(layer)) == set(vars(plain(3)))
    assert revert_model(SynchronizedBatchNorm(3, process_group="a group")).process_group == "a group"


# Subclasses


@pytest.mark.parametrize("cls", [Tagged, AnyShape, OfNoDimension, Slotted, WithMetaclass])
def test_a_subclass_without_computation_of_its_own_is_synchronized_and_comes_back(cls):
    plain = randomize(cls("tag", 3) if cls is Tagged else cls(3)).double()
    layer = copy.deepcopy(plain)
    before = anatomy(layer)
    convert_model(layer)
    assert isinstance(layer, cls)
    assert [isinstance(layer, ours) for _, ours in KINDS] == [isinstance(plain, theirs) for theirs, _ in KINDS]
    assert type(layer).__name__ == f"Synchronized{cls.__name__}"
    assert anatomy(layer) == before
    synchronized_step(layer, plain, 3, 4, 4)
    assert type(revert_model(layer)) is cls
    assert anatomy(layer).keys() == before.keys()
    assert vars(layer).keys() == vars(plain).keys()


def test_a_converted_subclass_keeps_what_it_overrides():
    layer = convert_model(Tagged("a tag", 3), group_size=2)
    assert repr(layer) == "SynchronizedTagged(tag=a tag, group_size=2)"
    layer.reset_parameters()
    assert_equal(layer.weight, torch.full((3,), 0.5))
    assert type(layer)("another", 2).tag == "another"
    with pytest.raises(ValueError, match="expected more dimensions"):
        convert_model(AnyShape(3))(torch.randn(2, 3))


def test_converted_subclasses_of_one_class_have_one_class():
    assert type(convert_model(Tagged("a", 2))) is type(convert_model(Tagged("b", 3)))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_converted_subclass_survives_copy_and_pickle(clone):
    layer = convert_model(Tagged("a", 3), group_size=2)
    other = clone(layer)
    assert type(other) is type(layer)
    assert (other.tag, other.group_size) == ("a", 2)
    assert other.weight is not layer.weight
    assert type(revert_model(other)) is Tagged
    assert isinstance(layer, SynchronizedBatchNorm2d)


def left(net: nn.Module, convert: Callable[[nn.Module], nn.Module] = convert_model) -> str:
    """Convert, and return the one warning that there is."""
    with pytest.warns(UserWarning, match=r"_model left .* as they are, which .*, \d+ in all:\n- ") as caught:
        assert convert(net) is net
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return str(caught[0].message)


def test_a_subclass_with_a_forward_of_its_own_is_left_and_named():
    net = nn.Sequential(BatchNormReLU(2), nn.BatchNorm2d(2), nn.Sequential(BatchNormReLU(2)))
    before = anatomy(net)
    text = left(net)
    assert text == (
        "convert_model left BatchNorm layers as they are, which do not synchronize, 2 in all:\n"
        "- 0, 2.0: BatchNormReLU has a forward of its own; write class "
        "SynchronizedBatchNormReLU(BatchNormReLU, SynchronizedBatchNorm2d) and call "
        "convert_model(model, classes={BatchNormReLU: SynchronizedBatchNormReLU}), see its documentation"
    )
    assert [type(net[0]), type(net[1]), type(net[2][0])] == [BatchNormReLU, SynchronizedBatchNorm2d, BatchNormReLU]
    assert anatomy(net) == before


def test_a_class_derived_as_the_warning_advises_synchronizes():
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), randomize(BatchNormReLU(4))).double()
    net = copy.deepcopy(plain)
    net[1].__class__ = SynchronizedBatchNormReLU
    synchronized_step(convert_model(net), plain, 3, 4, 4)


def test_a_call_or_pickling_of_its_own_or_a_forward_of_the_object_is_left():
    class Called(nn.BatchNorm2d):
        def __call__(self, input: Tensor) -> Tensor:
            return input

    class Reduced(nn.BatchNorm1d):
        def __reduce__(self) -> Any:
            return Reduced, (self.num_features,)

    class Saved(nn.BatchNorm3d):
        def __getstate__(self) -> Any:
            return vars(self) | {"training": True}

    net = nn.Sequential(Called(2), Reduced(2), nn.BatchNorm2d(2), Saved(2))
    net[2].forward = lambda input: input
    text = left(net)
    assert (
        "- 0: Called has a __call__ of its own; write class SynchronizedCalled(Called, SynchronizedBatchNorm2d)" in text
    )
    assert "- 1: Reduced has a __reduce__ of its own; write class SynchronizedReduced(Reduced, Synchronized" in text
    assert "- 2: BatchNorm2d has a forward of its own, set on the object; convert the model before" in text
    assert "- 3: Saved has a __getstate__ of its own" in text
    assert [type(layer) for layer in net] == [Called, Reduced, nn.BatchNorm2d, Saved]


def test_quantized_layers_are_left():
    assert "- (the module itself): BatchNorm2d has a forward of its own" in left(quantized.BatchNorm2d(2))


def test_a_name_that_synchronized_layers_need_is_left():
    class Grouped(nn.BatchNorm2d):
        group_size = 8

    net = nn.Sequential(Grouped(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2))
    net[1].eps_mode = "mine"
    text = left(net)
    assert "- 0: Grouped has a group_size of its own, a name that synchronized layers need; rename it" in text
    assert "- 1: BatchNorm2d has a eps_mode of its own" in text
    assert net[1].eps_mode == "mine"
    assert type(net[2]) is SynchronizedBatchNorm


def test_a_class_that_takes_no_subclass_is_left_and_the_rest_converted():
    class Final(nn.BatchNorm2d):
        def __init_subclass__(cls) -> None:
            raise TypeError("this class is final")

    net = nn.Sequential(Final(2), nn.BatchNorm2d(2))
    assert "- 0: Final does not take a synchronized subclass (this class is final); " in left(net)
    assert [type(layer) for layer in net] == [Final, SynchronizedBatchNorm2d]


def test_a_subclass_of_sync_batch_norm_is_left():
    class Sync(nn.SyncBatchNorm):
        pass

    text = "Sync is a subclass of torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"
    assert text in left(nn.Sequential(Sync(2)))


def test_a_class_derived_from_ours_is_left_by_both_ways():
    net = nn.Sequential(SynchronizedBatchNormReLU(2), nn.BatchNorm2d(2))
    convert_model(net)
    assert type(net[0]) is SynchronizedBatchNormReLU
    assert left(net, revert_model) == (
        "revert_model left modules as they are, which need sync_batchnorm, 1 in all:\n- 0: SynchronizedBatchNormReLU "
        "is derived from a class of sync_batchnorm; give it the class that you want, by hand"
    )
    assert [type(layer) for layer in net] == [SynchronizedBatchNormReLU, nn.BatchNorm2d]


# Lazy, parametrized and scripted layers


LAZY = [
    (nn.LazyBatchNorm1d, SynchronizedBatchNorm1d),
    (nn.LazyBatchNorm2d, SynchronizedBatchNorm2d),
    (nn.LazyBatchNorm3d, SynchronizedBatchNorm3d),
]


@pytest.mark.parametrize(("lazy", "ours"), LAZY)
def test_a_lazy_layer_is_left_until_it_has_seen_an_input(lazy, ours):
    net = nn.Sequential(lazy())
    assert f"{lazy.__name__} is lazy and has seen no input; run one batch through the model" in left(net)
    assert type(net[0]) is lazy
    net(torch.randn(2, 3, *[4] * (LAZY.index((lazy, ours)) + 1)))
    assert type(convert_model(net)[0]) is ours
    assert net[0].num_features == 3


def test_a_lazy_layer_that_was_loaded_is_converted():
    source = randomize(nn.Sequential(nn.BatchNorm2d(3)))
    net = nn.Sequential(nn.LazyBatchNorm2d())
    net.load_state_dict(source.state_dict())
    weight = net[0].weight
    convert_model(net)
    assert type(net[0]) is SynchronizedBatchNorm2d
    assert net[0].weight is weight
    synchronized_step(net, source, 3, 4, 4)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_parametrized_layer_is_left():
    net = nn.Sequential(nn.BatchNorm2d(2))
    parametrize.register_parametrization(net[0], "weight", Doubled())
    parametrized = type(net[0])
    assert "is parametrized; convert the model before its layers are parametrized" in left(net)
    assert type(net[0]) is parametrized


def test_a_converted_layer_can_be_parametrized_and_is_then_left_by_revert_model():
    plain = nn.Sequential(randomize(nn.BatchNorm2d(3))).double()
    net = convert_model(copy.deepcopy(plain))
    for model in (plain, net):
        parametrize.register_parametrization(model[0], "weight", Doubled())
    synchronized_step(net, plain, 3, 4, 4)
    assert "is parametrized; remove its parametrizations first" in left(net, revert_model)
    parametrize.remove_parametrizations(net[0], "weight")
    assert type(revert_model(net)[0]) is nn.BatchNorm2d


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_and_traced_layers_are_left():
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm2d(2)))
    traced = torch.jit.trace(nn.BatchNorm1d(2).eval(), torch.randn(2, 2))
    net = nn.ModuleDict({"scripted": scripted, "traced": traced, "plain": nn.BatchNorm2d(2)})
    text = left(net)
    assert "- scripted.0: BatchNorm2d is compiled by TorchScript; convert the model that was compiled instead" in text
    assert "- traced: BatchNorm1d is compiled by TorchScript; " in text
    assert type(net["plain"]) is SynchronizedBatchNorm2d


def test_a_deep_model_is_converted_to_its_end():
    net: nn.Module = nn.BatchNorm2d(2)
    layer = net
    for _ in range(200):
        net = nn.Sequential(net)
    convert_model(net)
    assert type(layer) is SynchronizedBatchNorm2d


def test_a_module_that_refuses_new_children_is_no_obstacle():
    class Sealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.BatchNorm2d(2)
            self.sealed = True

        def add_module(self, name: str, module: nn.Module | None) -> None:
            raise RuntimeError("sealed")

        def __setattr__(self, name: str, value: Any) -> None:
            if vars(self).get("sealed"):
                raise RuntimeError("sealed")
            super().__setattr__(name, value)

    net = nn.Sequential(Sealed(), nn.BatchNorm2d(2))
    convert_model(net)
    assert [type(net[0].layer), type(net[1])] == [SynchronizedBatchNorm2d] * 2
    revert_model(net)
    assert [type(net[0].layer), type(net[1])] == [nn.BatchNorm2d] * 2


# Wrappers


def test_a_data_parallel_keeps_its_arguments_both_ways():
    net = nn.DataParallel(nn.Sequential(nn.BatchNorm2d(2)))
    net.device_ids, net.output_device, net.dim = [0, 2], 2, 1
    net.eval()
    before, module = anatomy(net), net.module
    assert convert_model(net) is net
    assert type(net) is DataParallelWithCallback
    assert type(module[0]) is SynchronizedBatchNorm2d
    assert (net.device_ids, net.output_device, net.dim, net.training) == ([0, 2], 2, 1, False)
    assert net.module is module
    assert revert_model(net) is net
    assert type(net) is nn.DataParallel
    assert anatomy(net) == before


def test_a_subclass_of_data_parallel_is_patched_and_comes_back():
    net = Wrapper(nn.BatchNorm2d(2), "a name")
    before = anatomy(net)
    convert_model(net)
    assert isinstance(net, Wrapper)
    assert net.name == "a name"
    assert classes(net) == classes(patch_replication_callback(convert_model(Wrapper(nn.BatchNorm2d(2), ""))))
    assert type(revert_model(net)) is Wrapper
    assert anatomy(net) == before


def test_a_data_parallel_inside_of_a_model_is_converted():
    net = nn.Sequential(nn.DataParallel(nn.BatchNorm2d(2)), nn.ReLU())
    assert type(convert_model(net)[0]) is DataParallelWithCallback
    assert type(revert_model(net)[0]) is nn.DataParallel


def test_a_wrapper_with_callback_stays_as_it_is():
    net = DataParallelWithCallback(nn.BatchNorm2d(2), ["cpu"] * 2, timeout=7.0)
    before = anatomy(net)
    convert_model(net)
    assert anatomy(net) == before
    assert type(net) is DataParallelWithCallback


class WithTimeout(nn.DataParallel):
    """Has a timeout of its own."""

    def __init__(self, module):
        super().__init__(module)
        self.timeout = "mine"


@pytest.mark.parametrize("kind", [WithTimeout, nn.DataParallel])
def test_a_timeout_of_the_users_own_stays_through_conversion(kind):
    net = kind(nn.BatchNorm2d(2))
    net.timeout = "mine"
    before = dict(vars(net))
    for twin in (convert_model(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(twin, _Callbacks)
        assert twin.timeout == "mine"
    revert_model(net)
    assert type(net) is kind
    assert vars(net) == before


def test_a_wrapper_of_cpu_replicas_reverts_to_one_that_runs_its_module():
    net = DataParallelWithCallback(convert_model(small_net()), ["cpu"] * 2, timeout=7.0)
    input = torch.randn(4, 3, 5, 5)
    expected = net.eval()(input)
    revert_model(net)
    assert type(net) is nn.DataParallel
    assert net.device_ids == []
    assert not [name for name in vars(net) if "timeout" in name]
    assert_equal(net(input), expected)


def test_a_wrapper_of_replicas_that_share_a_device_reverts_to_each_device_once():
    net = DataParallelWithCallback(nn.BatchNorm2d(2), ["cpu"] * 2)
    net.device_ids = [torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 1)]
    assert revert_model(net).device_ids == [1, 0]


@pytest.fixture
def _world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world_of_one")
def test_the_module_of_a_distributed_data_parallel_is_converted_and_trains_on():
    plain = randomize(small_net()).double()
    net = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    module = net.module
    assert convert_model(net) is net
    assert type(net) is nn.parallel.DistributedDataParallel
    assert net.module is module
    assert type(module[1]) is SynchronizedBatchNorm2d
    input = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    grad = torch.randn(5, 4, 4, 4, dtype=torch.float64)
    for _ in range(2):
        plain(input).backward(grad)
        net(input).backward(grad)
        assert_same_state(module, plain)
    assert type(revert_model(net).module[1]) is nn.BatchNorm2d


# Going back


def test_a_reverted_model_evaluates_to_the_same_bits():
    net = convert_model(randomize(small_net()))
    parallel = DataParallelWithCallback(net, ["cpu"] * 2, timeout=5.0)
    parallel(torch.randn(4, 3, 5, 5))
    input = torch.randn(2, 3, 5, 5)
    expected = net.eval()(input)
    assert torch.equal(revert_model(net)(input), expected)


def test_training_leaves_nothing_on_a_layer_that_reverts():
    net = small_net()
    before = anatomy(net), classes(net)
    parallel = DataParallelWithCallback(convert_model(net), ["cpu"] * 3, timeout=5.0)
    output = parallel(torch.randn(5, 3, 5, 5))
    output.backward(torch.randn_like(output))
    for parameter in net.parameters():
        parameter.grad = None
    revert_model(net)
    assert (anatomy(net), classes(net)) == before


@needs_fork
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_reverted_model_loads_where_the_library_is_missing(wrapped, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SyncBatchNorm(4))
    net = convert_model(nn.DataParallel(net) if wrapped else net, eps_mode="clamp", group_size=2)
    net(torch.randn(4, 3, 5, 5))
    revert_model(net).eval()
    input = torch.randn(2, 3, 5, 5)
    torch.save(net, tmp_path / "model")
    assert b"sync_batchnorm" not in (tmp_path / "model").read_bytes()

    def without_the_library() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sync_batchnorm"]:
            sys.modules[name] = None  # whoever imports it gets an ImportError
        loaded = torch.load(tmp_path / "model", weights_only=False)
        torch.save(loaded(input), tmp_path / "output")

    assert forked(without_the_library) == (0, "")
    assert torch.equal(torch.load(tmp_path / "output"), net(input))


def test_a_reverted_subclass_and_wrapper_pickle_without_the_library():
    net = revert_model(convert_model(nn.Sequential(Wrapper(Tagged("a", 2), "b"), nn.BatchNorm2d(2))))
    assert b"sync_batchnorm" not in pickle.dumps(net)
    assert b"sync_batchnorm" in pickle.dumps(convert_model(net))


# What torch does with a model in eval, converted or reverted


class Exported(nn.Sequential):
    """A convolution, a layer of torch and a subclass."""


@pytest.fixture(params=["plain", "converted", "reverted"])
def served(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in eval, an input, and what the plain model makes of it."""
    net = randomize(Exported(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Tagged("a", 4)))
    input = torch.randn(2, 3, 5, 5)
    net(input)
    expected = net.eval()(input).detach()
    if request.param != "plain":
        convert_model(net)
    if request.param == "reverted":
        revert_model(net)
    return net, input, expected


def test_convolutions_fuse(served):
    net, input, expected = served
    fused = nn.Sequential(fuse_conv_bn_eval(net[0], net[1]), net[2], net[3])
    assert_equal(fused(input), expected)


@pytest.mark.parametrize("settings", [{"affine": False}, *WITHOUT_BIAS], ids=str)
def test_convolutions_fuse_with_layers_that_lack_parameters(settings):
    conv, layer = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **settings)
    input = torch.randn(2, 3, 5, 5)
    layer(conv(input))
    expected = layer.eval()(conv.eval()(input))
    assert_equal(fuse_conv_bn_eval(conv, convert_model(layer))(input), expected)
    assert_equal(fuse_conv_bn_eval(conv, revert_model(layer))(input), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_trace(served):
    net, input, expected = served
    assert_equal(torch.jit.trace(net, (input,))(input), expected)


@pytest.mark.watchdog(60.0)
def test_models_compile_without_a_graph_break(served):
    net, input, expected = served
    torch.compiler.reset()
    assert_equal(torch.compile(net, fullgraph=True, backend="eager")(input), expected)


def test_models_export(served):
    net, input, expected = served
    assert_equal(torch.export.export(net, (input,)).module()(input), expected)


@pytest.mark.slow
@pytest.mark.watchdog(120.0)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_models_export_to_onnx(served, monkeypatch):
    onnx_reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    # The exporter shows its progress, which leaves a thread behind.
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    net, input, expected = served
    program = torch.onnx.export(net, (input,), dynamo=True, verbose=False)
    evaluator = onnx_reference.ReferenceEvaluator(program.model_proto)
    (output,) = evaluator.run(None, {program.model.graph.inputs[0].name: input.numpy()})
    assert_equal(torch.from_numpy(output), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_takes_a_reverted_model():
    net = revert_model(convert_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))).eval()
    input = torch.randn(2, 3, 5, 5)
    assert_equal(torch.jit.script(net)(input), net(input))


def test_symbolic_tracing_takes_a_reverted_model_with_its_layers_whole():
    net = revert_model(convert_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))).eval()
    assert [node.op for node in torch.fx.symbolic_trace(net).graph.nodes][1:3] == ["call_module"] * 2


# Checkpoints


def test_a_checkpoint_of_a_plain_model_loads_into_a_converted_one_and_back():
    source = randomize(small_net())
    source(torch.randn(2, 3, 5, 5))
    net = convert_model(small_net())
    net.load_state_dict(source.state_dict())
    assert_same_state(net, source)
    plain = small_net()
    plain.load_state_dict(net.state_dict())
    assert_same_state(plain, source)
    assert dict(net.state_dict()._metadata) == dict(source.state_dict()._metadata)


def test_a_checkpoint_with_the_prefix_of_a_wrapper_loads_both_ways():
    source = nn.DataParallel(randomize(small_net()))
    net = DataParallelWithCallback(convert_model(small_net()), ["cpu"] * 2)
    net.load_state_dict(source.state_dict())
    assert_same_state(net.module, source.module)
    bare = convert_model(small_net())
    bare.load_state_dict({name.removeprefix("module."): tensor for name, tensor in source.state_dict().items()})
    assert_same_state(bare, source.module)
    source.load_state_dict(net.state_dict())


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, SynchronizedBatchNorm2d, lambda n: convert_model(OfNoDimension(n))])
def test_checkpoints_without_a_counter_load_as_into_a_layer_of_torch(cls):
    layer = cls(3)
    layer.num_batches_tracked.fill_(7)
    state = nn.BatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"num_batches_tracked"'):
        layer.load_state_dict(state)
    layer.load_state_dict(state, strict=False)
    assert layer.num_batches_tracked == 7
    state._metadata[""]["version"] = 1
    layer.load_state_dict(state)
    del state._metadata
    layer.load_state_dict(state)
    assert layer.num_batches_tracked == 7


@needs_bias_argument
def test_a_checkpoint_with_a_bias_is_refused_by_a_layer_without_one():
    layer = convert_model(nn.BatchNorm2d(3, bias=False))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"bias"'):
        layer.load_state_dict(nn.BatchNorm2d(3).state_dict())


# When a model is converted, copied, saved and moved


def test_a_model_is_converted_in_the_middle_of_training():
    plain = randomize(small_net()).double()
    net = copy.deepcopy(plain)
    assert_same_step(plain, net, torch.randn(5, 3, 6, 6, dtype=torch.float64))
    parallel = DataParallelWithCallback(convert_model(net), ["cpu"] * 3, timeout=5.0)
    assert_same_step(plain, parallel, torch.randn(5, 3, 6, 6, dtype=torch.float64))
    revert_model(net)
    assert_same_step(plain, net, torch.randn(5, 3, 6, 6, dtype=torch.float64))


@pytest.mark.parametrize("convert", [convert_model, revert_model])
def test_a_graph_that_is_alive_outlives_conversion(convert):
    plain = randomize(small_net()).double()
    net = copy.deepcopy(plain)
    if convert is revert_model:
        convert_model(net)
    parallel = DataParallelWithCallback(net, ["cpu"] * 3, timeout=5.0) if convert is revert_model else net
    input = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    outputs = plain(input), parallel(input)
    grad = torch.randn_like(outputs[0])
    convert(net)
    for output in outputs:
        output.backward(grad)
    assert_same_state(net, plain)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_used_model_are_independent_and_train_on(wrap, clone):
    plain = randomize(small_net()).double()
    net = convert_model(copy.deepcopy(plain))
    parallel = DataParallelWithCallback(net, ["cpu"] * 3, timeout=5.0)
    assert_same_step(plain, parallel, torch.randn(5, 3, 6, 6, dtype=torch.float64))
    state = copy.deepcopy(net.state_dict())
    other = clone(parallel) if wrap else DataParallelWithCallback(clone(net), ["cpu"] * 3, timeout=5.0)
    for model in (plain, other):
        model.zero_grad()
    assert_same_step(plain, other, torch.randn(5, 3, 6, 6, dtype=torch.float64))
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("whole", [False, True], ids=["state_dict", "module"])
def test_saving_at_step_two_of_five_changes_nothing(whole):
    inputs = [torch.randn(5, 3, 6, 6, dtype=torch.float64) for _ in range(5)]
    plain = randomize(small_net()).double()
    net = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), ["cpu"] * 3, timeout=5.0)
    for step, input in enumerate(inputs):
        if step == 2:
            file = io.BytesIO()
            torch.save(net if whole else net.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=not whole)
            if whole:
                net = loaded
            else:
                net = DataParallelWithCallback(convert_model(small_net().double()), ["cpu"] * 3, timeout=5.0)
                net.load_state_dict(loaded)
        for model in (plain, net):
            model.zero_grad()
        assert_same_step(plain, net, input)


def test_replicas_can_be_saved_and_do_not_take_their_peers_along():
    parallel = DataParallelWithCallback(convert_model(small_net()), ["cpu"] * 2, timeout=5.0)
    for replica in parallel.replicate(parallel.module, ["cpu"] * 2):
        file = io.BytesIO()
        torch.save(replica.state_dict(), file)
        assert b"SyncMaster" not in file.getvalue()
    torch.save(parallel.module, io.BytesIO())


def test_a_converted_model_moves_between_dtypes_between_forwards():
    plain = randomize(small_net())
    net = convert_model(copy.deepcopy(plain))
    for dtype in (torch.float64, torch.float32, torch.float64):
        for model in (plain, net):
            model.to(dtype)
            model.zero_grad()
        synchronized_step(net, plain, 3, 6, 6, tolerance=1e-5)  # The running statistics have been float32.
        assert net[1].running_mean.dtype == dtype
        assert net[1].num_batches_tracked.dtype == torch.int64


def test_a_converted_model_on_meta_gets_memory():
    with torch.device("meta"):
        net = convert_model(small_net())
    net.to_empty(device="cpu")
    net.load_state_dict(small_net().state_dict())
    assert torch.isfinite(net(torch.randn(2, 3, 5, 5))).all()


@pytest.mark.parametrize(("plain", "ours"), KINDS[:3])
def test_a_converted_layer_is_one_of_torch_of_its_dimension_only(plain, ours):
    layer = convert_model(plain(2))
    kinds = [kind for kind, _ in KINDS if isinstance(layer, kind)]
    assert kinds == [plain]
    assert isinstance(layer, _BatchNorm)


def test_the_converter_of_torch_takes_a_converted_model():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(convert_model(small_net()))
    assert [type(net[1]), type(net[4])] == [nn.SyncBatchNorm] * 2


# Classes of a user's own


class NormTanh(nn.BatchNorm2d):
    """Calls the forward of torch."""

    def __init__(self, size: int, gain: float) -> None:
        super().__init__(size)
        self.gain = gain
        self.scale = nn.Parameter(torch.full((size, 1, 1), gain))

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input)) * self.scale


class SynchronizedNormTanh(NormTanh, SynchronizedBatchNorm2d):
    pass


class NormDecorated(nn.BatchNorm2d):
    """Hides its code in a decorator, as those of torch for autocast and gradients do."""

    @torch.autocast("cpu", enabled=False)
    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


class SynchronizedNormDecorated(NormDecorated, SynchronizedBatchNorm2d):
    pass


class NormAbs(nn.BatchNorm2d):
    """Calls the function of torch."""

    def forward(self, input: Tensor) -> Tensor:
        self.num_batches_tracked += self.training
        out = F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return out.abs()


class SynchronizedNormAbs(NormAbs, SynchronizedBatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return SynchronizedBatchNorm2d.forward(self, input).abs()


class OtherOrder(SynchronizedBatchNorm2d, NormAbs):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).abs()


class Standalone(nn.Module):
    """Has what a batch norm has, and is none."""

    def __init__(self, size: int, count: bool = True) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine, self.track_running_stats = size, 1e-5, 0.1, True, True
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        if count:
            self.register_buffer("num_batches_tracked", torch.tensor(0))

    forward = NormAbs.forward


class SynchronizedStandalone(Standalone, SynchronizedBatchNorm2d):
    forward = SynchronizedNormAbs.forward


USERS_OWN = [
    (NormTanh, (3, 0.5), SynchronizedNormTanh),
    (NormDecorated, (3,), SynchronizedNormDecorated),
    (NormAbs, (3,), SynchronizedNormAbs),
    (NormAbs, (3,), OtherOrder),
    (Standalone, (3,), SynchronizedStandalone),
]


@pytest.mark.parametrize(("plain", "arguments", "ours"), USERS_OWN)
@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_class_that_is_told_trains_as_on_one_device_and_comes_back(plain, arguments, ours, copied):
    net = randomize(
        nn.Sequential(nn.Conv2d(2, 3, 3), plain(*arguments), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    ).double()
    parts, kinds = anatomy(net), classes(net)
    expected = copy.deepcopy(net)
    assert anatomy(revert_model(convert_model(net, classes={plain: ours}))) == parts
    assert classes(net) == kinds
    assert convert_model(net, classes={plain: ours}) is net
    assert [type(net[1]), type(net[3])] == [ours, SynchronizedBatchNorm2d]
    if copied is not None:
        net = copied(net)
        assert type(net[1]) is ours
    parallel = DataParallelWithCallback(net, ["cpu"] * 3, timeout=5.0)
    for training in (True, False, True):
        expected.train(training)
        parallel.train(training)
        assert_same_step(expected, parallel, torch.randn(5, 2, 6, 6, dtype=torch.float64))
    assert classes(revert_model(net)) == kinds
    assert [layer.__dict__.keys() for layer in net] == [layer.__dict__.keys() for layer in expected]
    assert_same_step(expected, net, torch.randn(5, 2, 6, 6, dtype=torch.float64))


def test_class_that_is_told_takes_the_options_and_leaves_its_subclasses():
    class Derived(NormTanh):
        pass

    net = nn.Sequential(NormTanh(3, 1.0), Derived(3, 1.0))
    with pytest.warns(UserWarning, match=r"- 1: Derived has a forward of its own"):
        convert_model(net, classes={NormTanh: SynchronizedNormTanh}, group_size=2, eps_mode="clamp")
    assert (net[0].group_size, net[0].eps_mode) == (2, "clamp")
    assert type(net[1]) is Derived
    assert type(revert_model(net)[0]) is NormTanh


def test_layer_whose_attributes_are_set_elsewhere_converts_and_reverts():
    class Redirects(nn.BatchNorm2d):
        def __setattr__(self, name: str, value: object) -> None:
            if name != "__class__":
                super().__setattr__(name, value)

    layer = Redirects(3)
    assert isinstance(convert_model(layer), SynchronizedBatchNorm2d)
    assert type(revert_model(layer)) is Redirects


def test_parametrized_layer_of_a_class_that_was_told_is_left_by_revert_model():
    layer = convert_model(NormTanh(3, 1.0), classes={NormTanh: SynchronizedNormTanh})
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus(), unsafe=True)
    with pytest.warns(UserWarning, match="is parametrized; remove its parametrizations first"):
        revert_model(layer)
    assert layer.weight.shape == (3,)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(revert_model(layer)) is NormTanh


def test_class_that_is_not_told_is_left_with_the_line_that_tells_it():
    net = nn.Sequential(NormTanh(3, 1.0))
    assert (
        "- 0: NormTanh has a forward of its own; write class SynchronizedNormTanh(NormTanh, SynchronizedBatchNorm2d) "
        "and call convert_model(model, classes={NormTanh: SynchronizedNormTanh})"
    ) in left(net)
    assert type(net[0]) is NormTanh
    net[0].forward = net[0].forward
    with pytest.warns(UserWarning, match="NormTanh has a forward of its own, set on the object"):
        convert_model(net, classes={NormTanh: SynchronizedNormTanh})
    assert type(net[0]) is NormTanh


class Unrelated(SynchronizedBatchNorm2d):
    pass


class ForgetsTheAbs(SynchronizedBatchNorm2d, NormAbs):
    pass


class NeverSynchronizes(NormAbs, SynchronizedBatchNorm2d):
    pass


class NormAbsTanh(NormAbs):
    """Calls `super().forward`, which does not."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


class GetsStuck(NormAbsTanh, SynchronizedBatchNorm2d):
    pass


class SynchronizedNormAbsTanh(NormAbsTanh, SynchronizedNormAbs):
    pass


@pytest.mark.parametrize(
    ("plain", "ours", "message"),
    [
        (NormAbs, nn.BatchNorm2d, "expected a synchronized class to stand for NormAbs, but got BatchNorm2d"),
        (NormAbs, "a name", "expected a synchronized class to stand for NormAbs, but got 'a name'"),
        ("a name", Unrelated, "expected a synchronized class to stand for 'a name', but got Unrelated"),
        (NormAbs, Unrelated, "expected a subclass of NormAbs to stand for it, but got Unrelated"),
        (Unrelated, Unrelated, "expected a subclass of Unrelated to stand for it, but got Unrelated"),
        (NormAbs, ForgetsTheAbs, "expected a class that does what NormAbs does, but got ForgetsTheAbs, whose forward"),
        (
            NormAbs,
            NeverSynchronizes,
            "expected a class that synchronizes, but got NeverSynchronizes with the forward of NormAbs",
        ),
        (NormAbsTanh, GetsStuck, "expected a class that synchronizes, but got GetsStuck with the forward of NormAbs,"),
    ],
)
def test_class_that_cannot_stand_for_another_is_refused_before_anything_changes(plain, ours, message):
    net = nn.Sequential(nn.BatchNorm2d(3), NormAbs(3))
    kinds = classes(net)
    with pytest.raises(TypeError, match=message):
        convert_model(net, classes={plain: ours})
    assert classes(net) == kinds


def test_class_derived_from_two_that_synchronize_trains_as_on_one_device():
    net = randomize(nn.Sequential(nn.Conv2d(2, 3, 3), NormAbsTanh(3))).double()
    expected = copy.deepcopy(net)
    convert_model(net, classes={NormAbs: SynchronizedNormAbs, NormAbsTanh: SynchronizedNormAbsTanh})
    assert type(net[1]) is SynchronizedNormAbsTanh
    parallel = DataParallelWithCallback(net, ["cpu"] * 3, timeout=5.0)
    assert_same_step(expected, parallel, torch.randn(5, 2, 6, 6, dtype=torch.float64))


def test_layer_that_lacks_a_buffer_is_refused_before_anything_changes():
    net = nn.Sequential(nn.BatchNorm2d(3), Standalone(3, count=False))
    with pytest.raises(TypeError, match="expected num_batches_tracked in every layer of Standalone, but got none in 1"):
        convert_model(net, classes={Standalone: SynchronizedStandalone})
    assert type(net[0]) is nn.BatchNorm2d


# patch_sync_batchnorm

SHAPES = {nn.BatchNorm1d: (4, 2), nn.BatchNorm2d: (4, 2, 3, 3), nn.BatchNorm3d: (4, 2, 3, 3, 3)}


def assert_not_patched() -> None:
    for plain in SHAPES:
        assert "__init__" not in vars(plain)
        assert type(plain(2)) is plain


@pytest.mark.parametrize("names", [nn, nn.modules, nn.modules.batchnorm], ids=lambda names: names.__name__)
@pytest.mark.parametrize(("plain", "ours"), KINDS[:3])
def test_layers_built_inside_of_the_context_are_synchronized(names, plain, ours):
    assert plain in SHAPES
    with patch_sync_batchnorm():
        layer = getattr(names, plain.__name__)(2, eps=0.25, momentum=None, affine=False)
        assert getattr(names, plain.__name__) is plain  # which libraries look up by name
        assert plain.__name__ == ours.__name__.replace("Synchronized", "")
        assert inspect.signature(plain.__init__) == inspect.signature(nn.modules.batchnorm._BatchNorm.__init__)
    assert type(layer) is ours
    assert isinstance(layer, plain)
    assert type(pickle.loads(pickle.dumps(layer))) is ours
    expected = plain(2, eps=0.25, momentum=None, affine=False)
    batch = torch.randn(SHAPES[plain])
    assert torch.equal(layer(batch), expected(batch))
    assert layer.state_dict().keys() == expected.state_dict().keys()
    assert type(revert_model(layer)) is plain
    assert_not_patched()


def test_code_that_took_the_class_before_builds_synchronized_layers():
    def build(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
        return norm(2)

    registered = {"bn": functools.partial(nn.BatchNorm2d, eps=0.5)}
    with patch_sync_batchnorm():
        assert type(build()) is SynchronizedBatchNorm2d
        layer = registered["bn"](2)
    assert type(layer) is SynchronizedBatchNorm2d
    assert layer.eps == 0.5
    assert_not_patched()


class WithAttribute(nn.BatchNorm2d):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.scale = nn.Parameter(torch.ones(size))


class WithForward(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(input))


def test_subclasses_built_inside_of_the_context_are_what_convert_model_makes_of_them():
    with patch_sync_batchnorm():
        layer = WithAttribute(2)
    assert type(layer) is type(convert_model(WithAttribute(2)))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "scale"]
    assert type(type(layer)(3)) is type(layer)
    assert type(revert_model(layer)) is WithAttribute
    assert_not_patched()


def test_subclass_that_computes_something_else_is_named_when_the_context_is_left():
    with (
        pytest.warns(UserWarning, match="patch_sync_batchnorm left BatchNorm layers as they are") as caught,
        patch_sync_batchnorm(),
        patch_sync_batchnorm(),
    ):
        layers = [WithForward(2) for _ in range(3)]
    (warning,) = caught
    assert "\n- 3 layers: WithForward has a forward of its own; write class SynchronizedWithForward" in str(
        warning.message
    )
    assert warning.filename == __file__
    assert {type(layer) for layer in layers} == {WithForward}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with patch_sync_batchnorm():
            nn.BatchNorm2d(2)


def test_synchronized_layers_built_inside_of_the_context_keep_their_options():
    with patch_sync_batchnorm():
        layer = SynchronizedBatchNorm2d(2, group_size=2, eps_mode="clamp")
    assert (type(layer), layer.group_size, layer.eps_mode) == (SynchronizedBatchNorm2d, 2, "clamp")


class WithProperty(nn.BatchNorm2d):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size_of_groups = size

    @property
    def group_size(self) -> int:
        return self.size_of_groups


def test_property_that_is_not_there_yet_is_not_replaced_in_the_context():
    with (
        pytest.warns(UserWarning, match=r"\n- 1 layers: WithProperty has a group_size of its own"),
        patch_sync_batchnorm(),
    ):
        layer = WithProperty(2)
    assert (type(layer), layer.group_size) == (WithProperty, 2)


def test_classes_are_as_before_when_the_body_raises():
    @patch_sync_batchnorm()
    def build() -> None:
        WithForward(2)
        raise KeyError("a body")

    with pytest.raises(KeyError, match="a body"):
        build()
    assert_not_patched()
    with warnings.catch_warnings():  # What the failed body has left is not told of the next one.
        warnings.simplefilter("error")
        with patch_sync_batchnorm():
            pass


def test_an_initializer_that_somebody_else_has_put_there_comes_back(monkeypatch):
    def initialize(self, size: int) -> None:
        nn.modules.batchnorm._BatchNorm.__init__(self, size + 1)

    monkeypatch.setattr(nn.BatchNorm2d, "__init__", initialize)
    with patch_sync_batchnorm():
        layer = nn.BatchNorm2d(2)
    assert (type(layer), layer.num_features) == (SynchronizedBatchNorm2d, 3)
    assert vars(nn.BatchNorm2d)["__init__"] is initialize


def test_an_initializer_that_somebody_else_has_removed_does_not_keep_the_others():
    try:
        with patch_sync_batchnorm():
            del nn.BatchNorm1d.__init__
            assert type(nn.BatchNorm1d(2)) is nn.BatchNorm1d
        assert_not_patched()
    finally:
        for plain in SHAPES:
            if "__init__" in vars(plain):
                del plain.__init__


def test_nested_contexts_end_with_the_outermost():
    with patch_sync_batchnorm():
        with patch_sync_batchnorm():
            pass
        assert type(nn.BatchNorm2d(2)) is SynchronizedBatchNorm2d
    assert_not_patched()


def test_contexts_of_two_threads_end_with_the_last():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with patch_sync_batchnorm():
            entered.set()
            leave.wait(5.0)

    thread = threading.Thread(target=other)
    with patch_sync_batchnorm():
        thread.start()
        entered.wait(5.0)
    assert type(nn.BatchNorm2d(2)) is SynchronizedBatchNorm2d
    leave.set()
    thread.join()
    assert_not_patched()


def test_the_context_decorates_a_function():
    @patch_sync_batchnorm()
    def build() -> nn.Module:
        return nn.BatchNorm2d(2)

    assert type(build()) is SynchronizedBatchNorm2d
    assert_not_patched()


def test_converting_and_reverting_work_inside_of_the_context():
    layer = nn.BatchNorm2d(2)
    with patch_sync_batchnorm():
        assert type(convert_model(layer)) is SynchronizedBatchNorm2d
        assert type(revert_model(layer)) is nn.BatchNorm2d
    assert_not_patched()


def test_no_warning_is_given_when_nothing_is_left():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        revert_model(convert_model(Nested()))
