"""Non-reentrant activation checkpointing repeats what was computed, and counts it as on one device."""

import collections
import copy
import functools
import gc
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import device_lists, first_in_smoke, slow
from helpers import are_distinct_gpus, assert_equal, assert_same_results, assert_same_step, doubles, twins
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

checkpointed = functools.partial(checkpoint, use_reentrant=False)


class Net(nn.Module):
    """Runs a path, which is a function of itself and the input, or the name of one."""

    def __init__(self, path, checkpoints=True, **options):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.scale = nn.Parameter(torch.rand(3, 1, 1) + 0.5)
        self.bns = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))
        self.path, self.checkpoints, self.options = path, checkpoints, options

    @property
    def bn(self):
        return self.bns[0]

    def segment(self, input):
        """Save for the backward what comes before and after the layer, in ways that need the exact values."""
        return torch.tanh(self.bn(torch.tanh(input)) * self.scale)

    def run(self, function, *inputs):
        """Checkpoint a function, or only call it."""
        return checkpointed(function, *inputs, **self.options) if self.checkpoints else function(*inputs)

    def forward(self, input):
        return PATHS.get(self.path, self.path)(self, input)


def checkpointed_twins(path, devices, **options):
    return twins(Net(path, **options).double(), devices)


def assert_exact(path, devices, rows=6, steps=2, frozen=False):
    net = Net(path).double()
    net.bns.requires_grad_(not frozen)
    plain, parallel = twins(net, devices)
    for _ in range(steps):
        assert_same_step(plain, parallel, doubles(rows, 3, 4, 5, devices=devices))


def interleaved(net, x):
    a, b = net.run(net.segment, x), net.run(net.segment, x.sin())
    for _ in range(2):
        a, b = net.run(lambda a, b: net.segment(a + b), a, b), net.run(lambda a, b: net.segment(a - 2 * b), a, b)
    return a * b


def gated_without_gradients(net, x):
    gate = torch.no_grad()(net.bn)
    return net.run(lambda x: nn.functional.conv2d(gate(x) * net.conv(x), net.conv.weight), x)


def beside_branches_on_two_levels(net, x):
    inner = lambda x: net.bn(x.sin()) * x.cos() + x.tanh()  # noqa: E731
    return net.run(lambda x: net.bns[1](net.run(inner, x)) + x.tanh().sin(), net.conv(x))


def beside_a_gradient_inside(net, x):
    def body(x):
        (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return net.bn(x * slope) + x.tanh()

    return net.run(body, net.conv(x))


def outside_the_loss(net, x):
    """Leave out the outputs of other GPUs than the first; the loss depends on their inputs by the statistics."""
    x = net.conv(x)
    y = net.run(net.bn, x)
    return y if x.device.index in (0, None) else x


USUAL = {
    "around all": lambda net, x: net.run(lambda x: net.segment(net.conv(x)), x),
    "several calls": lambda net, x: net.run(lambda x: net.segment(net.segment(x) + net.segment(3 * x)), x),
    "nested": lambda net, x: net.run(
        lambda x: net.segment(net.run(lambda x: net.run(net.segment, x) * net.segment(2 * x), x)), x
    ),
    "interleaved": interleaved,
    "beside calls that are not checkpointed": lambda net, x: net.segment(net.run(net.segment, net.segment(x))),
    "without gradients inside": lambda net, x: net.run(lambda x: net.segment(x) * torch.no_grad()(net.segment)(x), x),
    "gated without gradients": gated_without_gradients,
    "only the layer": lambda net, x: net.run(net.bn, net.conv(x)) * net.scale,
    "in a row": lambda net, x: functools.reduce(lambda x, bn: net.run(lambda x: bn(x.tanh()).tanh(), x), net.bns, x),
}
ENDS = {
    # What multiplies an output without a gradient saves less for the backward than it would beside one that needs one.
    "factor of a constant": lambda net, x: net.run(lambda x: net.bn(x.detach()) * net.scale * x, x),
    "ends in a constant": lambda net, x: net.run(lambda x: torch.tanh(x) + net.bn(x.detach()), net.conv(x)),
    "ends in a layer": lambda net, x: net.run(
        lambda x: net.bns[1](net.run(lambda x: net.bn(x.sin()), x).cos()), net.conv(x)
    ),
}
BRANCHES = {
    "beside a branch that saves": lambda net, x: net.run(lambda x: net.bn(x) + x.tanh(), net.conv(x)),
    "beside branches on two levels": beside_branches_on_two_levels,
    "beside a gradient": beside_a_gradient_inside,
}
PATHS = {**USUAL, **ENDS, **BRANCHES, "outside the loss": outside_the_loss}


@pytest.mark.parametrize("early_stop", [True, *slow(False)], ids=["early-stop", "no-early-stop"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("path", first_in_smoke([*USUAL, *ENDS]))
def test_checkpointed_step_is_exact_and_counted_as_on_one_device(devices, path, frozen, early_stop):
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        assert_exact(path, devices, frozen=frozen)


@pytest.mark.parametrize("rows", [7, 1, 0])
@pytest.mark.parametrize("path", ["interleaved", *slow("nested")])
@pytest.mark.parametrize("devices", device_lists(4))
def test_checkpointed_step_is_exact_on_any_number_of_chunks_and_on_empty_ones(devices, path, rows):
    assert_exact(path, devices, rows)


@pytest.mark.parametrize("momentum", [0.3, None], ids=str)
def test_second_backward_pass_counts_once_more(devices, momentum):
    def step(model):
        output = model(data)
        output.backward(data.sin(), retain_graph=True)
        output.backward(data.cos())
        return [output]

    plain, parallel = checkpointed_twins("interleaved", devices)
    for module in (plain, parallel.module):
        module.bn.momentum = momentum
    data = doubles(6, 3, 4, 5, devices=devices)
    assert_same_results(plain, parallel, step)


def test_only_call_is_repeated_whatever_its_input():
    def with_another_dropout(net, x):
        return net.run(lambda x: torch.tanh(net.bn(nn.functional.dropout(x))), x)

    _, parallel = checkpointed_twins(with_another_dropout, ["cpu"] * 2, preserve_rng_state=False)
    parallel(doubles(4, 3, 4, 5)).sum().backward()


def tripled_where_small(x):
    """Return what equals the input in the replica of large values, and differs from it in the other."""
    return torch.where(x.abs().amax((1, 2, 3), keepdim=True) < 100, 3 * x, x)


EQUAL_CALLS = {
    "two segments": lambda net, x: net.run(net.segment, x) - net.run(net.segment, tripled_where_small(x)) * 2,
    "one segment": lambda net, x: net.run(lambda x: net.segment(x) - net.segment(tripled_where_small(x)) * 2, x),
}


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "varied"])
@pytest.mark.parametrize("path", EQUAL_CALLS.values(), ids=EQUAL_CALLS)
def test_calls_with_equal_inputs_here_and_others_in_the_peer_are_refused(devices, path, constant, monkeypatch):
    monkeypatch.setattr(Net, "segment", lambda net, input: torch.tanh(net.bn(input) * net.scale))
    plain, parallel = checkpointed_twins(path, devices)
    data = doubles(4, 3, 4, 5, devices=devices)
    data[:2] = 150.0 if constant else data[:2] + 150
    output = parallel(data.requires_grad_())
    assert_equal(output, plain(data))
    with pytest.raises(RuntimeError, match=r"got 2 calls of bns\.0, replica 0 that this may repeat"):
        output.backward(torch.randn_like(output))


def test_calls_that_differ_in_the_number_of_rows_alone_are_told_apart(devices):
    def with_all_rows_twice(net, x):
        signs = x.detach().sign()  # constant in each replica, with a mean and variance that rounding leaves alone
        once, twice = (net.run(lambda x: net.bn(x) * net.scale, rows) for rows in (signs, torch.cat((signs, signs))))
        return once * twice.chunk(2)[1] * x

    plain, parallel = checkpointed_twins(with_all_rows_twice, devices)
    data = doubles(4, 3, 4, 5, devices=devices).abs()
    data[:2] *= -1
    assert_same_step(plain, parallel, data)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_two_views_of_which_one_is_not_finite_have_its_gradients(value):
    _, parallel = checkpointed_twins(lambda net, x: net.run(net.bn, x) * net.run(net.bn, 2 * x), ["cpu"] * 2)
    data = doubles(4, 3, 4, 5)
    data[0, :, 0, 0] = value
    output = parallel(data)
    output.backward(torch.randn_like(output))
    assert parallel.module.bn.weight.grad.isnan().all()


@pytest.mark.parametrize("path", ["around all", "interleaved", "nested"])
def test_gradient_penalty_through_a_checkpoint_is_exact(devices, path):
    data = doubles(4, 3, 4, 5, devices=devices)
    weights = torch.randn_like(data)

    def step(model):
        input = data.clone().requires_grad_()
        output = model(input)
        (grad,) = torch.autograd.grad((output * weights).sum(), input, create_graph=True)
        ((grad.flatten(1).norm(dim=1) - 1).square().sum() + (output * weights.sin()).sum()).backward()
        return [output, grad]

    assert_same_results(*checkpointed_twins(path, devices), step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_checkpoint_under_autocast_is_the_step_without_it(dtype):
    _, parallel = twins(Net("around all"), ["cpu"] * 2)
    data, states = torch.randn(4, 3, 6, 5), []
    for parallel.module.checkpoints in (False, True):
        copied, input = copy.deepcopy(parallel), data.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            output = copied(input)
        output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
        states.append([output, input.grad, *(p.grad for p in copied.parameters() if p.grad is not None)])
    for a, b in zip(*states, strict=True):
        assert_equal(b, a, tolerance=0)


AROUND_THE_WRAPPER = "expected the checkpoint inside the model"


@pytest.mark.parametrize(("inner", "use_reentrant"), [(True, True), (True, False), (False, True), (False, False)])
def test_checkpoint_around_the_wrapper_is_exact(devices, inner, use_reentrant):
    data, grad = (doubles(4, 3, 4, 5, devices=devices) for _ in range(2))

    def step(model):
        input = data.clone().requires_grad_()
        checkpoint(lambda x: torch.tanh(model(torch.tanh(x))), input, use_reentrant=use_reentrant).backward(grad)
        return [input.grad]

    path = "around all" if inner else lambda net, x: net.segment(net.conv(x))
    with nullcontext() if use_reentrant else pytest.warns(UserWarning, match=AROUND_THE_WRAPPER):
        assert_same_results(*checkpointed_twins(path, devices), step)


@pytest.mark.parametrize("after", [nn.Identity(), torch.tanh], ids=["ends in wrapper", "ends in tanh"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_checkpoint_around_the_wrapper_that_saves_no_memory_is_told_once(devices, training, after):
    _, parallel = checkpointed_twins(lambda net, x: net.segment(net.conv(x)), devices)
    data, model = doubles(4, 3, 4, 5, devices=devices), parallel.train(training)
    with pytest.warns(UserWarning, match=AROUND_THE_WRAPPER) as warned:
        checkpointed(lambda x: after(model(x)), data).sum().backward()
    checkpointed(lambda x: after(model(x)), data).sum().backward()  # Warnings are errors.
    assert [Path(warning.filename).name for warning in warned] == ["test_checkpoint.py"]


def under_hooks_of_the_user(parallel, data):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), torch.autograd.graph.save_on_cpu():
        return parallel(data)


QUIET = {
    "single chunk": lambda parallel, data: checkpointed(parallel, data[:1]),
    "no graph": torch.no_grad()(checkpointed),
    "constants": lambda parallel, data: checkpointed(lambda x: parallel.requires_grad_(False)(x) * 2, data),
    "teacher": lambda parallel, data: checkpointed(
        lambda x: parallel.module.conv(x) * torch.no_grad()(parallel)(x), data
    ),
    "reentrant": lambda parallel, data: checkpoint(parallel, data.requires_grad_(), use_reentrant=True),
    "hooks": under_hooks_of_the_user,
}


@pytest.mark.parametrize("call", QUIET.values(), ids=QUIET)
def test_other_checkpoints_and_hooks_around_the_wrapper_are_not_warned_of(devices, call):
    _, parallel = checkpointed_twins(lambda net, x: net.segment(net.conv(x)), devices)
    output = call(parallel, doubles(4, 3, 4, 5, devices=devices))  # Warnings are errors.
    if output.requires_grad:
        output.sum().backward()


def with_forces_inside(net, x):  # The recomputation has no graph of the statistics, which it would differentiate.
    def body(x):
        y = net.segment(x)
        (force,) = torch.autograd.grad(y, x, torch.cos(x.detach()), create_graph=True)
        return torch.cat((y, force), 1)

    return net.run(body, x * 1.0)


def bound_late(net, x):
    for bn in [*net.bns, *net.bns]:  # Of layers that are called once, torch notices nothing.
        x = net.run(lambda x: torch.tanh(bn(torch.tanh(x))), x)  # noqa: B023
    return x


class Reversible(torch.autograd.Function):
    """Keeps no graph: its backward calls `function` again, and differentiates that."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            output = ctx.function(leaf)
        return None, *torch.autograd.grad(output, (leaf, *parameters), grad)


REFUSED = {  # with the remedy
    "reentrant": (lambda net, x: checkpoint(net.segment, x, use_reentrant=True), "pass use_reentrant=False to torch"),
    "forces": (with_forces_inside, "and call torch.autograd.grad through the layer outside checkpoints"),
    "bound-late": (bound_late, r"(?s)^(?!.*use_reentrant).*got 0 calls of bns\.1, replica \d that.*bind the loop"),
    "reversible": (
        lambda net, x: Reversible.apply(net.bn, net.conv(x), net.bn.weight, net.bn.bias),
        "Reversible blocks and odeint_adjoint recompute, too: keep such layers out of them",
    ),
}


@pytest.mark.parametrize(("path", "message"), REFUSED.values(), ids=REFUSED)
# Torch 2.8 fails to take its hooks off when the generator of a checkpoint that was left by an error is collected.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object _checkpoint_without_reentrant_generator")
@pytest.mark.parametrize("devices", device_lists(2, slow=[3]))
def test_recomputation_of_something_else_is_refused_with_the_remedy(devices, path, message):
    _, parallel = checkpointed_twins(path, devices)
    if path is with_forces_inside and are_distinct_gpus(devices):
        # Replicas recompute the segments of each other at the same time, which PyTorch may notice first.
        message += "|A different number of tensors was saved"
    input = doubles(6, 3, 4, 5, devices=devices).requires_grad_()
    with pytest.raises(RuntimeError, match=message):  # in the forward if that takes the gradient
        parallel(input).square().sum().backward()
    parallel.module.path = "in a row"
    output = parallel(doubles(6, 3, 4, 5, devices=devices))  # and nothing is left of it
    output.backward(torch.randn_like(output))


@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize("path", BRANCHES)
@pytest.mark.parametrize("devices", device_lists(4, slow=[2]))
def test_branches_of_a_checkpoint_do_not_disturb_each_other(devices, path):
    assert_exact(path, devices, 8, steps=10)


@pytest.mark.parametrize("path", ["only the layer", "outside the loss", *BRANCHES])
@pytest.mark.parametrize("devices", device_lists(2, slow=[4]))
def test_replica_is_recomputed_in_the_thread_of_its_device(devices, path):
    threads = collections.defaultdict(set)

    def note(bn, args):
        threads[args[0].device, goes_back].add(threading.get_ident())

    _, parallel = checkpointed_twins(path, devices)
    parallel.module.bn.register_forward_pre_hook(note)
    for _ in range(3):
        goes_back = False
        output = parallel(doubles(8, 3, 4, 5, devices=devices))
        goes_back = True
        output.backward(torch.randn_like(output))
    recomputing = [used for (_, goes_back), used in threads.items() if goes_back]
    assert len(set.union(*recomputing)) == len(recomputing) == len(set(devices))


@pytest.mark.parametrize("backward", [True, False], ids=["after-a-backward", "without-a-backward"])
@pytest.mark.parametrize("path", ["interleaved", "nested"])
def test_checkpoints_keep_nothing_alive(path, backward):
    _, parallel = checkpointed_twins(path, ["cpu"] * 2)
    data = doubles(4, 3, 4, 5).requires_grad_()
    kept = weakref.ref(data)
    output = parallel(data)
    if backward:
        output.backward(torch.randn_like(output))
    del output, data
    gc.collect()
    assert kept() is None


def with_operators_of_the_merge(net, x):
    """Use what the master merges with: its operators must not count as those of the checkpoint."""

    def body(x):
        y = torch.cat((net.bn(net.conv(x)), torch.sin(x))) * net.scale
        y = torch.addcmul(y, y, torch.tanh(y)) + y.mean(1, True) + torch.stack((y, y.cos())).sum(0)
        return net.bns[1](y).chunk(2)[0] * y.chunk(2)[1]

    return net.run(body, x * 1.0)


OPERATORS = ("cat", "stack", "mul", "addcmul", "add", "mean", "sum", "clone", "batch_norm", "group_norm", "")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("devices", device_lists(2, slow=[4]))
def test_every_policy_has_the_gradients_of_one_device(devices, operator):
    def policy(context, called, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in str(called) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    plain, parallel = checkpointed_twins(with_operators_of_the_merge, devices, context_fn=contexts)
    # Torch refuses to save what counts a call. A norm that it saves counts a call twice, but its statistics once.
    plain.checkpoints = operator not in ("add", "batch_norm", "")
    assert_same_step(plain, parallel, doubles(8, 3, 4, 5, devices=devices), counts=plain.checkpoints)
