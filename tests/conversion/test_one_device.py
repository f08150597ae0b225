"""`assert_matches_one_device` compares what will train, and refuses what it cannot compare."""

from __future__ import annotations

import threading
from types import MethodType

import pytest
import torch
from checked import VECTORS, Apply, mix, quietly, wrapped
from helpers import Net
from torch import nn

from sync_batchnorm import (
    DataParallelWithCallback,
    assert_matches_one_device,
    convert_model,
    patch_replication_callback,
)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise NotImplementedError("one of a kind")


class CutsLists(DataParallelWithCallback):
    """Cuts a list of samples, and returns a list."""

    replicate = parallel_apply = None  # what a check does not need

    def scatter(self, inputs, kwargs, device_ids):
        (samples,) = inputs
        size = -(-len(samples) // len(device_ids))
        return [(samples[i : i + size],) for i in range(0, len(samples), size)], [kwargs] * len(device_ids)

    def gather(self, outputs, output_device):
        return outputs


class OfTorch(nn.DataParallel):
    """Gives each replica the batch in another order of columns."""

    def scatter(self, inputs, kwargs, device_ids):
        return super().scatter(tuple(x.flip(1) for x in inputs), kwargs, device_ids)


class NeverCalled(nn.DataParallel):
    def __call__(self, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize("number", [4, 3])
def test_a_wrapper_says_how_many_replicas_there_are(number):
    model = Apply(lambda self, x: x * 1 if len(x) < 3 else x * 2)
    parallel = DataParallelWithCallback(model, ["cpu"] * number)
    parallel.device_ids = list(range(number))  # as on GPUs: the check needs none
    batch = torch.randn(8, 3)
    assert_matches_one_device(model, batch)
    assert_matches_one_device(parallel, batch, replicas=2)
    with pytest.raises(AssertionError, match=f"in replica {0 if number == 4 else 2}"):
        assert_matches_one_device(parallel, batch)


@pytest.mark.parametrize("wrapper", [nn.DataParallel(nn.ReLU()), wrapped(nn.ReLU())], ids=["no device", "two"])
def test_a_wrapper_of_fewer_than_two_devices_is_compared_with_two(wrapper):
    wrapper.device_ids = wrapper.device_ids[:1]
    assert_matches_one_device(wrapper, VECTORS)


@pytest.mark.parametrize("word", ["mode", "replica", "module", "name", "args", "inputs", "wrapper", "number", "index"])
def test_forward_gets_keywords_of_any_name(word):
    namespace = {}
    exec(f"def forward(self, x, {word}):\n    return self.parts[0](x) * len({word})", namespace)
    parallel = wrapped(convert_model(Apply(namespace["forward"], nn.BatchNorm1d(3))))
    assert_matches_one_device(parallel, VECTORS, kwargs={word: "generator"})


def headed(inside, head):
    """Return a model with a wrapper inside, whose gathered output goes on in the model."""
    backbone = wrapped(convert_model(nn.Sequential(nn.Linear(3, 4), *inside)))
    return Net(lambda self, x: self.head(self.backbone(x * 1)), backbone=backbone, head=head)


HEADS = {
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)),
    "converted norm": lambda: convert_model(nn.BatchNorm1d(4)),
    "mix": lambda: Apply(mix),
    "random numbers": lambda: Apply(lambda self, x: x + torch.rand_like(x)),
    "loss": lambda: Apply(lambda self, x: x.square().mean()),
}


@pytest.mark.parametrize("head", HEADS)
def test_what_stands_outside_of_a_wrapper_gets_the_whole_batch(head):
    assert_matches_one_device(headed([nn.BatchNorm1d(4)], HEADS[head]()), VECTORS[:3])


FAULTS = {
    "mix": ([Apply(mix)], r"output of backbone\.module\.1 \(Apply\), .*begins with `x.mean\(0\)`"),
    "size": ([nn.BatchNorm1d(4), Apply(lambda self, x: x * len(x))], r"output of backbone\.module\.2 \(Apply\)"),
    "counter": (
        [nn.Tanh(), Apply(lambda self, x: setattr(self, "n", getattr(self, "n", 0) + 1) or x * self.n)],
        r"in pass 2: .*so backbone\.module\.2\.n differs from",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_wrapper_that_a_model_contains_is_named(fault):
    inside, message = FAULTS[fault]
    model = headed(inside, nn.Linear(4, 2))
    with pytest.raises(AssertionError, match=message):
        assert_matches_one_device(model, VECTORS[:3])
    assert model.backbone.device_ids == [torch.device("cpu")] * 2


class OwnHead(DataParallelWithCallback):
    """Has a module beside the one that it replicates."""

    def __init__(self, module):
        super().__init__(module, ["cpu"] * 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(super().forward(x))


def test_what_a_wrapper_has_beside_its_module_stays_as_it_is():
    model = nn.Sequential(OwnHead(nn.Linear(3, 4)), nn.BatchNorm1d(4))
    assert_matches_one_device(model, VECTORS[:3])
    assert model[0].norm.num_batches_tracked == 0


def test_a_model_that_contains_several_wrappers_is_refused():
    model = Net(
        lambda self, x: self.a(x) @ self.b(x).T, a=wrapped(nn.Linear(3, 4)), b=nn.Sequential(wrapped(nn.ReLU()))
    )
    text = r"one wrapper, but got a, b.0 in a Net; check each alone, as in assert_matches_one_device\(model.a, ...\)"
    with pytest.raises(ValueError, match=text):
        assert_matches_one_device(model, VECTORS)


def test_of_wrappers_in_each_other_the_outermost_one_makes_the_replicas():
    inside = nn.Sequential(wrapped(convert_model(nn.BatchNorm1d(4))), wrapped(nn.ReLU()))
    assert_matches_one_device(headed([inside], nn.BatchNorm1d(4)), VECTORS[:3])
    assert_matches_one_device(wrapped(nn.Sequential(nn.Linear(3, 4), inside)), VECTORS[:3])
    with pytest.raises(AssertionError, match=r"output of backbone\.module\.2 \(Apply\)"):
        assert_matches_one_device(headed([inside, Apply(mix)], nn.BatchNorm1d(4)), VECTORS[:3])


def test_nothing_of_a_wrapper_is_called_that_scatters_and_gathers_as_torch_does():
    assert_matches_one_device(NeverCalled(nn.ReLU()), VECTORS)


def test_a_wrapper_that_scatters_and_gathers_in_its_own_way_does_so_in_the_check():
    samples, batch_norm = list(torch.randn(5, 3)), convert_model(nn.BatchNorm1d(3))  # chunks of 2, 2 and 1
    model = Apply(lambda self, samples: {"x": self.parts[0](torch.stack(samples)), "number": 1}, batch_norm)
    parallel = CutsLists(model, ["cpu"] * 3)
    assert_matches_one_device(parallel, samples)
    assert_matches_one_device(
        parallel, samples, loss=lambda outputs: torch.cat([output["x"] for output in outputs]).square().mean()
    )
    parallel.module.parts[0] = Apply(mix)
    with pytest.raises(AssertionError, match=r"output of parts.0 \(Apply\), in replica 0"):
        assert_matches_one_device(parallel, samples)


@pytest.mark.parametrize("patch", [lambda parallel: parallel, patch_replication_callback], ids=["torch's", "patched"])
def test_a_wrapper_of_torch_scatters_in_its_own_way(patch):
    seen = []
    parallel = OfTorch(Apply(lambda self, x: seen.append(x[0].tolist()) or x * 1))
    assert_matches_one_device(quietly(patch, parallel), torch.arange(12.0).reshape(4, 3))
    assert seen == [[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [8.0, 7.0, 6.0]] * 3  # passes
    assert_matches_one_device(parallel, torch.ones(4, 3, requires_grad=True))


def test_a_scatter_of_ones_own_cuts_another_dimension():
    parallel = wrapped(Apply(lambda self, x: x * 1), dim=1)
    parallel.scatter = lambda inputs, kwargs, device_ids: (
        [(x,) for x in inputs[0].tensor_split(len(device_ids), 1)],
        [kwargs] * len(device_ids),
    )
    assert_matches_one_device(parallel, torch.randn(3, 4))
    parallel.module = Apply(lambda self, x: x - x.mean(1, keepdim=True))
    with pytest.raises(AssertionError, match=r"begins with `x.mean\(1, keepdim=True\)`"):
        assert_matches_one_device(parallel, torch.randn(3, 4))


def test_a_scatter_of_ones_own_may_leave_replicas_without_a_tensor():
    def scatter(inputs, kwargs, device_ids):
        rows = inputs[0].split(2) if len(device_ids) > 1 else inputs
        return [(x,) for x in (*rows, None)[: len(device_ids)]], [kwargs] * len(device_ids)

    parallel = wrapped(Apply(lambda self, x: torch.zeros(0, 3) if x is None else x * 1))
    parallel.scatter = scatter
    assert_matches_one_device(parallel, VECTORS, replicas=3)


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
    with pytest.raises(AssertionError, match="the sum is that of one device; add them up"):
        assert_matches_one_device(parallel, VECTORS, loss=loss)


def test_a_gather_of_ones_own_gets_fewer_outputs_of_replicas():
    parallel = wrapped(Apply(lambda self, x: (x, x) if len(x) == 4 else (x,)))
    parallel.gather = lambda outputs, device: tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
    with pytest.raises(AssertionError, match=r"shapes \[\(4, 3\), \(4, 3\)\] on one device, \[\(4, 3\)\] in replicas"):
        assert_matches_one_device(parallel, VECTORS)


def test_a_gather_of_ones_own_lists_outputs_of_another_dimension():
    parallel = wrapped(nn.ReLU(), dim=1)
    parallel.gather = lambda outputs, device: outputs
    assert_matches_one_device(parallel, torch.randn(3, 5))


def test_a_loss_gets_on_one_device_what_the_model_returns():
    dims = []
    model = Apply(lambda self, x: x.square().mean())
    loss = lambda losses: dims.append(losses.dim()) or losses.mean()  # noqa: E731
    quietly(lambda: assert_matches_one_device(model, VECTORS, loss=loss))
    assert dims == [0, 1] * 3  # passes


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


def test_errors_of_replicas_have_the_names_of_the_model():
    model = nn.Sequential(nn.Flatten(), Apply(lambda self, x: self.parts[0](x) if x[0] < 2 else x, nn.BatchNorm1d(1)))
    model.register_module("module", model[0])
    with pytest.raises(AssertionError, match=r"not in replicas: ReplicaSyncError: .*\b1\.parts\.0\b") as caught:
        assert_matches_one_device(wrapped(convert_model(model)), torch.arange(4.0)[:, None])
    assert "module.1" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (len, {}, TypeError, "expected a torch.nn.Module"),
        (nn.Linear(3, 3), {"replicas": "a"}, TypeError, "got 'a'; pass an int"),
        (nn.Linear(3, 3), {"replicas": 0}, ValueError, "replicas of at least 1, but got 0"),
        (nn.Linear(3, 3), {"replicas": 1}, ValueError, "two replicas to compare, but got replicas=1; pass a"),
        (nn.Linear(3, 3), {"kwargs": {"input": 3.0}}, TypeError, "expected tensors to cut into chunks, but got"),
        (nn.Linear(3, 3), {"loss": torch.Tensor.detach}, TypeError, "one element, but got a tensor of shape"),
        (nn.Linear(3, 3), {"kwargs": {"input": torch.ones(0, 3)}}, ValueError, "chunks with rows, but got chunks"),
        (nn.Linear(3, 3), {"kwargs": {"input": torch.ones(1, 3)}}, ValueError, r"of \[1\] rows; pass a larger batch$"),
        (nn.Linear(3, 3), {"kwargs": {"input": VECTORS, "other": torch.ones(1)}}, ValueError, "do not belong together"),
        (nn.Linear(3, 3), {"loss": 1.0}, TypeError, "callable"),
        (nn.Linear(3, 3), {"loss": lambda output: output}, TypeError, r"of shape \(4, 3\); return that of"),
        (nn.Linear(3, 3), {"loss": lambda output: None}, TypeError, "but got NoneType; return that"),
        (nn.Linear(3, 3), {"loss": lambda output: output.detach().sum()}, ValueError, "a `loss` with a gradient, but"),
        (nn.Linear(3, 3), {"dtype": torch.float16}, ValueError, "or torch.float32, but got torch.float16"),
        (
            nn.LazyLinear(3),
            {},
            RuntimeError,
            "LazyLinear cannot be copied.*LazyModule.*(?<!__deepcopy__ for its class)$",
        ),
        (Uncopied(3, 3), {}, RuntimeError, "Uncopied cannot be copied.*one of a kind"),
        (
            Net(len, held=threading.Lock()),
            {},
            RuntimeError,
            "'_thread.lock' object; keep a lock or an iterator outside of the model, or",
        ),
        (
            Net(len, held=(x for x in VECTORS)),
            {},
            RuntimeError,
            "Net cannot be copied.* 'generator' object; keep a lock or an iterator",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        assert_matches_one_device(model, **{"kwargs": {"input": VECTORS}} | options)


def test_an_error_on_one_device_reaches_the_caller_with_a_note():
    only_float32 = Apply(lambda self, x: x if x.dtype == torch.float32 else float("only float32"))
    with pytest.raises(ValueError, match="only float32") as caught:
        assert_matches_one_device(only_float32, VECTORS)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "This is from a copy of the model on one device: on the CPU, in float64; for operators without"
    )
    assert_matches_one_device(only_float32, VECTORS, dtype=torch.float32)
