"""`assert_matches_one_device` makes replicas as the wrapper of the model does, and refuses what it cannot compare."""

from __future__ import annotations

import copy
import threading
from types import MethodType

import pytest
import torch
from checked import BATCH, VECTORS, Apply, Batch, Result, assert_names, mean_square, mix, quietly, wrapped, wrapper_with
from helpers import Net
from torch import nn
from torch.nn.parallel import gather
from torch.nn.parallel.scatter_gather import scatter_kwargs

from sync_batchnorm import (
    DataParallelWithCallback,
    assert_matches_one_device,
    convert_model,
    patch_replication_callback,
)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise NotImplementedError("one of a kind")


def norm_or_mix(is_right, forward=lambda self, x: self.parts[0](x)):
    return convert_model(Apply(forward, nn.BatchNorm1d(6) if is_right else Apply(mix)))


@pytest.mark.parametrize("number", [4, 3])
def test_a_wrapper_says_how_many_replicas_there_are(number):
    model = Apply(lambda self, x: x * 1 if len(x) < 3 else x * 2)
    parallel = DataParallelWithCallback(model, ["cpu"] * number)
    parallel.device_ids = list(range(number))  # as on GPUs: the check needs none
    batch = torch.randn(8, 3)
    assert_matches_one_device(model, batch)
    assert_matches_one_device(parallel, batch, replicas=2)
    assert_names(f"in replica {0 if number == 4 else 2}", parallel, batch)


@pytest.mark.parametrize("wrapper", [nn.DataParallel(nn.ReLU()), wrapped(nn.ReLU())], ids=["no device", "two"])
def test_a_wrapper_of_fewer_than_two_devices_is_compared_with_two(wrapper):
    wrapper.device_ids = wrapper.device_ids[:1]
    assert_matches_one_device(wrapper, VECTORS)


def headed(inside, head):
    """Return a model with a wrapper inside, whose gathered output goes on in the model."""
    backbone = wrapped(convert_model(nn.Sequential(nn.Linear(3, 4), *inside)))
    return Net(lambda self, x: self.head(self.backbone(x * 1)), backbone=backbone, head=head)


HEADS = {
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)),
    "random numbers": lambda: Apply(lambda self, x: mix(self, x) + torch.rand_like(x)),
    "loss": lambda: Apply(lambda self, x: x.square().mean()),
}


@pytest.mark.parametrize("head", HEADS)
def test_what_stands_outside_of_a_wrapper_gets_the_whole_batch(head):
    assert_matches_one_device(headed([nn.BatchNorm1d(4)], HEADS[head]()), VECTORS[:3])


def test_a_fault_in_a_wrapper_that_a_model_contains_is_named():
    model = headed([Apply(mix)], nn.Linear(4, 2))
    assert_names("output of backbone.module.1 (Apply), ...begins with `x.mean(0)`", model, VECTORS[:3])
    assert model.backbone.device_ids == [torch.device("cpu")] * 2
    counting = Apply(lambda self, x: setattr(self, "n", getattr(self, "n", 0) + 1) or x * self.n)
    model = headed([nn.Tanh(), counting], nn.Linear(4, 2))
    assert_names("in pass 2: ...so backbone.module.2.n differs from", model, VECTORS[:3])


def test_what_a_wrapper_has_beside_its_module_stays_as_it_is():
    def forward(self, x):
        return self.norm(DataParallelWithCallback.forward(self, x)) * self.factor

    own = wrapper_with(nn.Linear(6, 4), forward=forward, factor=2)
    own.norm, own.factor = nn.BatchNorm1d(4), torch.ones(4)
    assert_matches_one_device(nn.Sequential(own, nn.BatchNorm1d(4)), BATCH)
    own.uncopied = Uncopied(3, 3)  # without buffers
    assert_matches_one_device(own.double(), BATCH)
    assert own.norm.num_batches_tracked == 0


def test_a_model_that_contains_several_wrappers_is_refused():
    wrappers = {"a": wrapped(nn.Linear(3, 4)), "b": nn.Sequential(wrapped(nn.ReLU()))}
    text = r"one wrapper, but got a, b.0 in a Net; check each alone, as in assert_matches_one_device\(model.a, ...\)"
    with pytest.raises(ValueError, match=text):
        assert_matches_one_device(Net(lambda self, x: self.a(x) @ self.b(x).T, **wrappers), VECTORS)


def test_of_wrappers_in_each_other_the_outermost_one_makes_the_replicas():
    inside = nn.Sequential(wrapped(convert_model(nn.BatchNorm1d(4))), wrapped(nn.ReLU()))
    assert_matches_one_device(headed([inside], nn.BatchNorm1d(4)), VECTORS[:3])
    assert_matches_one_device(wrapped(nn.Sequential(nn.Linear(3, 4), inside)), VECTORS[:3])
    wrong = headed([inside, Apply(mix)], nn.BatchNorm1d(4))
    assert_names("output of backbone.module.2 (Apply)", wrong, VECTORS[:3])


def number_first(self, inputs, kwargs, device_ids):
    return [(inputs[0], x) for x in inputs[1].chunk(len(device_ids))], [{}] * len(device_ids)


def by_name(self, inputs, kwargs, device_ids):
    return [()] * len(device_ids), [{"x": x} for x in kwargs["x"].chunk(len(device_ids))]


def cut_list(self, inputs, kwargs, device_ids):
    size = -(-len(inputs[0]) // len(device_ids))
    return [(inputs[0][i : i + size],) for i in range(0, len(inputs[0]), size)], [kwargs] * len(device_ids)


class OfTorch(nn.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        return super().scatter(tuple(x.flip(1) for x in inputs), kwargs, device_ids)


SCATTERS = {
    "number first": (number_first, (2.0, BATCH), {}, lambda self, number, x: number * self.parts[0](x)),
    "keyword arguments only": (by_name, (), {"x": BATCH}, lambda self, x: self.parts[0](x)),
    "list of samples": (cut_list, (list(BATCH),), {}, lambda self, samples: self.parts[0](torch.stack(samples))),
}


@pytest.mark.parametrize("kind", SCATTERS)
def test_a_scatter_of_any_shape_is_used(kind):
    scatter, inputs, kwargs, forward = SCATTERS[kind]
    right, wrong = (wrapper_with(norm_or_mix(is_right, forward), scatter=scatter) for is_right in (True, False))
    assert_matches_one_device(right, *inputs, kwargs=kwargs, replicas=3)
    with pytest.raises(AssertionError, match=r"output of parts\.0|the model itself"):
        assert_matches_one_device(wrong, *inputs, kwargs=kwargs, replicas=3)


@pytest.mark.parametrize("patch", [lambda parallel: parallel, patch_replication_callback], ids=["torch's", "patched"])
def test_a_wrapper_of_torch_scatters_in_its_own_way(patch):
    seen = []
    parallel = OfTorch(Apply(lambda self, x: seen.append(x[0].tolist()) or x * 1))
    assert_matches_one_device(quietly(patch, parallel), torch.arange(12.0).reshape(4, 3))
    assert seen == [[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [8.0, 7.0, 6.0]] * 3  # passes
    assert_matches_one_device(parallel, torch.ones(4, 3, requires_grad=True))


def test_nothing_of_a_wrapper_is_called_that_scatters_and_gathers_as_torch_does():
    cls = type("NeverCalled", (nn.DataParallel,), {"__call__": None, "replicate": None, "parallel_apply": None})
    assert_matches_one_device(cls(nn.ReLU()), VECTORS)


def test_a_scatter_of_ones_own_cuts_another_dimension():
    parallel = wrapped(Apply(lambda self, x: x * 1), dim=1)
    parallel.scatter = lambda inputs, kwargs, device_ids: (
        [(x,) for x in inputs[0].tensor_split(len(device_ids), 1)],
        [kwargs] * len(device_ids),
    )
    assert_matches_one_device(parallel, torch.randn(3, 4))
    parallel.module = Apply(lambda self, x: x - x.mean(1, keepdim=True))
    assert_names("begins with `x.mean(1, keepdim=True)`", parallel, torch.randn(3, 4))


def test_a_scatter_of_ones_own_may_leave_replicas_without_a_tensor():
    def scatter(inputs, kwargs, device_ids):
        rows = inputs[0].split(2) if len(device_ids) > 1 else inputs
        return [(x,) for x in (*rows, None)[: len(device_ids)]], [kwargs] * len(device_ids)

    parallel = wrapped(Apply(lambda self, x: torch.zeros(0, 3) if x is None else x * 1))
    parallel.scatter = scatter
    assert_matches_one_device(parallel, VECTORS, replicas=3)


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_scatter_that_was_set_on_the_object_is_that_of_the_check(is_bound):
    def scatter_in_reverse(self, inputs, kwargs, device_ids):
        called_on.append(self)
        return type(self).scatter(self, tuple(x.flip(0) for x in inputs), kwargs, device_ids)

    seen, called_on, other = [], [], wrapped(nn.ReLU())
    parallel = wrapped(Apply(lambda self, x: seen.append(x[0].tolist()) or x * 1))
    parallel.scatter = MethodType(scatter_in_reverse, parallel if is_bound else other)
    assert_matches_one_device(parallel, torch.arange(6.0)[:, None], replicas=3)
    assert seen == [[5.0], [5.0], [3.0], [1.0]] * 3  # passes
    assert parallel not in called_on
    assert (other in called_on) == (not is_bound)


OF_TORCH = {
    "gather": lambda self, outputs, device: gather(outputs, device),
    "scatter": lambda self, inputs, kwargs, devices: scatter_kwargs(inputs, kwargs, devices, dim=self.dim),
}


@pytest.mark.parametrize("step", OF_TORCH)
@pytest.mark.parametrize("around", [lambda parallel: parallel, nn.Sequential], ids=["alone", "contained"])
def test_a_step_that_calls_that_of_torch_is_named(step, around):
    parallel = wrapper_with(nn.Linear(6, 6), **{step: OF_TORCH[step]})
    with pytest.raises(RuntimeError, match=rf"your {step} calls that of torch.*call super\(\).{step}\("):
        assert_matches_one_device(around(parallel), BATCH)


GATHERED = {  # what a gather of one's own makes of the scores; which class cannot be looked into
    "object": (Result, "output of class Result"),
    "object beside a tensor": (lambda scores: {"a": scores, "b": [Result(scores)]}, r"output\['b'\]\[0\] of class Res"),
    "array": (lambda scores: scores.detach().numpy(), "output of class ndarray"),
    "dataclass": (Batch, None),
    "number": (len, None),
}


@pytest.mark.parametrize("kind", GATHERED)
def test_an_output_that_cannot_be_looked_into_is_refused_unless_a_loss_does(kind):
    make, text = GATHERED[kind]
    gather = lambda self, outputs, device: make(torch.cat(outputs))  # noqa: E731
    right, wrong = (wrapper_with(norm_or_mix(is_right), gather=gather) for is_right in (True, False))
    for parallel in (right, wrong) if text else ():
        with pytest.raises(TypeError, match=f"expected outputs to compare, but got {text}.*or pass a `loss`"):
            assert_matches_one_device(parallel, BATCH)
    if not text:
        assert_matches_one_device(right, BATCH)
    if make is Result:
        loss = lambda result: result.scores.square().mean()  # noqa: E731
        assert_matches_one_device(right, BATCH, loss=loss)
        assert_names("output of parts.0 (Apply)", wrong, BATCH, loss=loss)


LOSSES = {
    "list": (lambda outputs, device: outputs, None),
    "list, and a loss": (lambda outputs, device: outputs, lambda losses: sum(losses) / len(losses)),
    "mean": (lambda outputs, device: sum(outputs) / len(outputs), None),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_gather_of_ones_own_takes_the_loss_of_each_replica(kind):
    gather, loss = LOSSES[kind]
    parallel = wrapped(Apply(lambda self, x: x.square().mean()))
    parallel.gather = gather
    quietly(lambda: assert_matches_one_device(parallel, VECTORS, loss=loss))
    parallel.module = Apply(lambda self, x: x.square().sum())
    assert_names("the sum is that of one device; add them up", parallel, VECTORS, loss=loss)


def test_a_gather_of_ones_own_gets_fewer_outputs_of_replicas():
    parallel = wrapped(Apply(lambda self, x: (x, x) if len(x) == 4 else (x,)))
    parallel.gather = lambda outputs, device: tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
    assert_names("shapes [(4, 3), (4, 3)] on one device, [(4, 3)] in replicas", parallel, VECTORS)


def mean_of_list(outputs):
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return sum([output.square().mean() for output in outputs]) / len(outputs)


def test_a_list_that_a_gather_returns_is_joined_to_compare_it():
    parallel = wrapped(nn.ReLU(), dim=1)
    parallel.gather = lambda outputs, device: outputs
    assert_matches_one_device(parallel, torch.randn(3, 5))
    parallel = wrapped(nn.Linear(6, 3))
    parallel.gather = lambda outputs, device: outputs
    text = "outputs agree, the loss does not: ...own gather"
    assert_names(text, parallel, BATCH, loss=mean_of_list, never="depends on more")


def test_the_loss_of_one_device_is_what_the_model_returns():
    model, dims = Apply(mean_square, nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))), []
    loss = lambda losses: dims.append(losses.dim()) or losses.mean()  # noqa: E731
    quietly(lambda: assert_matches_one_device(Apply(lambda self, x: x.square().mean()), VECTORS, loss=loss))
    assert dims == [0, 1] * 3  # passes
    expected = copy.deepcopy(model)(BATCH).item()
    assert_names(f"one device returns {expected:.5g}"[:-2], convert_model(model))


def test_forward_gets_keywords_of_any_name():
    def forward(self, x, mode, replica, module, name, args, inputs, wrapper, number, index):
        return self.parts[0](x) * len([mode, replica, module, name, args, inputs, wrapper, number, index])

    kwargs = dict.fromkeys(("mode", "replica", "module", "name", "args", "inputs", "wrapper", "number", "index"), "a")
    assert_matches_one_device(wrapped(norm_or_mix(True, forward)), BATCH, kwargs=kwargs)


def test_a_forward_of_the_wrapper_is_used():
    right = wrapper_with(norm_or_mix(True), forward=lambda self, x: DataParallelWithCallback.forward(self, x * 2) + 1)
    assert_matches_one_device(right, BATCH)
    wrong = wrapper_with(
        norm_or_mix(True), forward=lambda self, x: DataParallelWithCallback.forward(self, x) - 3 * len(self.device_ids)
    )
    assert_names("your wrapper has its own forward, which the check has used", wrong)


def test_a_forward_of_the_wrapper_may_cut_the_batch_in_another_way():
    right, wrong = (
        wrapper_with(norm_or_mix(is_right), forward=lambda self, x: DataParallelWithCallback.forward(self, x[0]))
        for is_right in (True, False)
    )
    assert_matches_one_device(right, BATCH[None])
    assert_names("outputs differ, ...own forward", wrong, BATCH[None])


def test_errors_of_replicas_have_the_names_of_the_model():
    model = nn.Sequential(nn.Flatten(), Apply(lambda self, x: self.parts[0](x) if x[0] < 2 else x, nn.BatchNorm1d(1)))
    model.register_module("module", model[0])
    text = "not in replicas: ReplicaSyncError: ...1.parts.0"
    assert_names(text, wrapped(convert_model(model)), torch.arange(4.0)[:, None], never="module.1")


REFUSED = [  # options or a model; the error
    (len, {}, TypeError, "expected a torch.nn.Module"),
    (nn.Linear(3, 3), {"replicas": "a"}, TypeError, "got 'a'; pass an int"),
    (nn.Linear(3, 3), {"replicas": 0}, ValueError, "replicas of at least 1, but got 0"),
    (nn.Linear(3, 3), {"replicas": 1}, ValueError, "two replicas to compare, but got replicas=1; pass a"),
    (nn.Linear(3, 3), {"kwargs": {"input": 3.0}}, TypeError, "expected tensors to cut into chunks, but got"),
    (nn.Linear(3, 3), {"kwargs": {"input": torch.ones(0, 3)}}, ValueError, "chunks with rows, but got chunks"),
    (nn.Linear(3, 3), {"kwargs": {"input": torch.ones(1, 3)}}, ValueError, r"of \[1\] rows; pass a larger batch$"),
    (nn.Linear(3, 3), {"kwargs": {"input": VECTORS, "other": torch.ones(1)}}, ValueError, "do not belong together"),
    (nn.Linear(3, 3), {"loss": 1.0}, TypeError, "callable"),
    (nn.Linear(3, 3), {"loss": torch.Tensor.detach}, TypeError, r"but got a tensor of shape \(4, 3\); return"),
    (nn.Linear(3, 3), {"loss": lambda output: None}, TypeError, "but got NoneType; return that"),
    (nn.Linear(3, 3), {"loss": lambda output: output.detach().sum()}, ValueError, "a `loss` with a gradient, but"),
    (nn.Linear(3, 3), {"dtype": torch.float16}, ValueError, "or torch.float32, but got torch.float16"),
    (nn.LazyLinear(3), {}, RuntimeError, "LazyLinear cannot be copied.*LazyModule.*(?<!__deepcopy__ for its class)$"),
    (Uncopied(3, 3), {}, RuntimeError, "Uncopied cannot be copied.*one of a kind"),
    (Net(len, held=threading.Lock()), {}, RuntimeError, "lock' object; keep a lock or an iterator outside of the"),
    (Net(len, held=(x for x in VECTORS)), {}, RuntimeError, "Net cannot be copied.* 'generator' object; keep a"),
]


@pytest.mark.parametrize(("model", "options", "error", "message"), REFUSED)
def test_what_cannot_be_compared_is_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        assert_matches_one_device(model, **{"kwargs": {"input": VECTORS}} | options)
