"""`assert_matches_one_device` passes where replicas are right, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import numpy
import pytest
import torch
import torch.nn.functional as F
from checked import IMAGES, VECTORS, Apply, bind, hide, mix, quietly, wrapped
from conftest import FREE_THREADED, first_in_smoke
from helpers import Net, anatomy
from torch import nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import SynchronizedBatchNorm1d, assert_matches_one_device, convert_model, set_sbn_eps_mode

SQUARE = VECTORS[:3].clone()


def drop(self, x):
    attention = self.parts[1](x[:, None], x[:, None], x[:, None])[0][:, 0]
    scores = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]
    sequence = self.parts[2](x[:, None].expand(-1, 3, -1))[0][:, 0]
    return F.dropout(self.parts[0](x)) + torch.dropout(attention, 0.5, True) * scores + sequence


def drop_in_other_words(self, x):
    kept, _ = torch.native_dropout(x, 0.5, True)
    y = torch.dropout(input=x, p=0.5, train=True) + kept + F.alpha_dropout(x, training=True)
    y = y + torch.feature_dropout(x, 0.5, True) + F.dropout1d(x, training=True) + F.feature_alpha_dropout(x, 0.5, True)
    query = x[:, None]
    for options in ([None, 0.5], [None], []):
        y = y + F.scaled_dot_product_attention(query, query, query, *options)[:, 0]
    y = y + F.scaled_dot_product_attention(query, query, query, None, dropout_p=0.5)[:, 0]
    return y + torch.dropout_(x * 1, 0.5, True)


def drop_and_change(self, x):
    hidden = self.parts[0](x).exp()  # which its backward pass needs
    return hidden * F.dropout(hidden, training=True).add_(1.0)


def stop(self, x):
    with suppress(StopAsyncIteration):
        self.parts[0](x)
    return self.parts[1](x)


def stopping(kind):
    """Return a model with a hook that stops a call in the middle, and is caught."""

    def hook(*_):
        raise StopAsyncIteration

    model = Apply(stop, nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), nn.Linear(3, 2))
    getattr(model.parts[0][1], kind)(hook)
    return model


def stochastic_depth():
    pytest.importorskip("zoo")  # which needs torchvision
    import torchvision

    return nn.Sequential(nn.Linear(3, 3), torchvision.ops.StochasticDepth(0.5, "row"))


def in_checkpoint(self, x):
    return checkpoint(lambda y: F.dropout(self.parts[1](self.parts[0](y))).exp(), x, use_reentrant=False)


def in_thread(self, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(self.parts[0], x).result()


def in_complex_double(self, x):
    assert x.dtype == torch.complex128
    return x * 1


class Recurrent(nn.Module):
    """Has states and constants in float32, as people write them."""

    def __init__(self):
        super().__init__()
        self.lstm, self.scale = nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True), torch.ones(4, 4)
        self.dropout, self.device_ids, self.dim = nn.Dropout(), nn.Identity(), 1  # other things than ours

    def forward(self, input, lengths):
        states = torch.zeros(2, len(input), 4), torch.zeros(2, len(input), 4)
        output = self.lstm(input, states)[0].float() @ self.scale
        return {"all": output, "last": [output[torch.arange(len(input)), lengths - 1], None]}


class Siamese(nn.Module):
    """Calls a tower twice, once in a checkpoint; has parameters that are tied, frozen and unused."""

    def __init__(self):
        super().__init__()
        self.tower = convert_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)))
        self.head, self.tied, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.tied.weight, self.frozen = self.head.weight, nn.Linear(4, 4).requires_grad_(False)

    def forward(self, left, *, right):
        left, right = self.tower(left), checkpoint(self.tower, right, use_reentrant=False)
        return self.tied(self.head(left)) * self.frozen(right), left.argmax(1)


RIGHT = {
    "wrapper of torch": (lambda: nn.DataParallel(convert_model(nn.Sequential(nn.BatchNorm1d(3)))), VECTORS),
    "wrapper, another dim": (lambda: wrapped(nn.ReLU(), dim=1), torch.randn(1, 4), {"replicas": 4}),
    "no parameters": (nn.Flatten, IMAGES, {"replicas": 5}),
    "dropout": (
        lambda: Apply(
            *(drop, nn.Dropout(), nn.MultiheadAttention(3, 1, 0.5, batch_first=True), nn.LSTM(3, 3, 2, True, True, 0.5))
        ),
        VECTORS,
    ),
    "dropout in other words": (lambda: Apply(drop_in_other_words), VECTORS),
    "dropout that is changed": (lambda: Apply(drop_and_change, nn.Linear(3, 3)), VECTORS),
    "stochastic depth": (stochastic_depth, VECTORS),
    "drop path": (lambda: nn.Sequential(nn.Linear(3, 3), pytest.importorskip("timm.layers").DropPath(0.5)), VECTORS),
    "layer drop": (lambda: LayerDrop(lambda self, x: x * (random.random() >= self.layerdrop), layerdrop=0.5), VECTORS),
    "drop connect": (
        lambda: LayerDrop(lambda self, x: x * (random.random() >= self._drop_connect_rate), _drop_connect_rate=0.5),
        VECTORS,
    ),
    "hook that stops": (lambda: stopping("register_forward_hook"), VECTORS),
    "hook that stops before": (lambda: stopping("register_forward_pre_hook"), VECTORS),
    "clamp": (lambda: convert_model(nn.BatchNorm2d(3), eps_mode="clamp"), 1e-3 * IMAGES),
    "dropout in a checkpoint": (lambda: Apply(in_checkpoint, nn.Linear(3, 3), nn.Dropout()), VECTORS),
    "float32": (Recurrent, torch.randn(4, 5, 3), {"kwargs": {"lengths": torch.tensor([1, 5, 2, 3])}}),
    "float32 constant": (lambda: Apply(lambda self, x: x @ SQUARE), VECTORS),
    "float32 target": (lambda: nn.Linear(3, 3), VECTORS, {"loss": lambda output: F.mse_loss(output, VECTORS)}),
    "complex": (lambda: Apply(lambda self, x: torch.fft.rfft(x)), VECTORS),
    "complex input": (lambda: Apply(in_complex_double), torch.complex(VECTORS, VECTORS)),
    "siamese": (Siamese, VECTORS, {"kwargs": {"right": VECTORS.roll(1, 0)}}),
    "thread": (lambda: Apply(in_thread, nn.Linear(3, 3)), VECTORS.clone().requires_grad_()),
    "large values": (lambda: nn.Sequential(convert_model(nn.BatchNorm2d(3)), Apply(lambda self, x: x * 1e9)), IMAGES),
    "values beside a tensor": (lambda: Apply(lambda self, x: {"x": x, "name": "x", "is": True}), VECTORS),
    "number": (lambda: wrapped(Apply(lambda self, x: {"x": x, "n": 0.5}), out_dims={"n": None}), VECTORS),
    "script": (lambda: nn.Sequential(quietly(torch.jit.script, nn.Linear(3, 3)), nn.ReLU()), VECTORS),
    "weight norm": (lambda: quietly(nn.utils.weight_norm, nn.Linear(3, 3)), VECTORS),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), VECTORS),
    "means of replicas": (lambda: Apply(lambda self, x: hide(self, x).square().mean(), nn.Softmax(0)), VECTORS),
    "sums of replicas": (lambda: Apply(lambda self, x: x.square().sum()), VECTORS, {"loss": torch.sum}),
    "integers": (lambda: nn.Embedding(9, 3, sparse=True), torch.arange(8) % 5, {"replicas": 3}),
    "NaN": (lambda: Apply(lambda self, x: (x.log(), x * math.nan)), VECTORS),
    "zeros and None": (
        lambda: Apply(lambda self, x: x + 0 * self.parts[0](x) if len(x) > 2 else x, nn.Linear(3, 3)),
        VECTORS,
    ),
    "None and zeros": (
        lambda: Apply(lambda self, x: x + 0 * self.parts[0](x) if len(x) <= 2 else x, nn.Linear(3, 3)),
        VECTORS,
    ),
    "zeros": (lambda: Apply(lambda self, x: self.parts[0](x) * 0, nn.BatchNorm1d(3, 1e-5, 0.1, True, False)), VECTORS),
    "change of a parameter that repeats": (
        lambda: nn.Sequential(
            nn.Embedding(9, 3, max_norm=0.1),
            Net(lambda self, x: self.w.data.clamp_(0) * x, w=nn.Parameter(-torch.ones(3))),
        ),
        torch.arange(8) % 5,
    ),
    "activation in an attribute": (lambda: Net(bind("features", lambda _, x: [x, x.mean(0)])), VECTORS),
    "tensor in an attribute": (lambda: Net(bind("features", lambda _, x: x.mean(0))), VECTORS),
    "attributes that agree": (
        lambda: nn.Sequential(
            *(
                Net(bind("size", lambda _, x: float(x.shape[1])), size=3.0),
                Net(bind("nan", lambda *_: math.nan), nan=math.nan),
            ),
            *(Net(bind("close", lambda close, _: close + 1e-12), close=1.0),),
            *(Net(bind("zero", lambda zero, _: zero + 1e-13), zero=0.0),),
        ),
        VECTORS,
    ),
    "mode that forward sets": (
        lambda: Net(lambda self, x: self.bn.eval()(x), bn=convert_model(nn.BatchNorm1d(3))),
        VECTORS,
    ),
    "class that counts no calls": (
        *(lambda: convert_model(nn.Sequential(WithCall(3)), classes={WithCall: SynchronizedWithCall}), VECTORS),
    ),
    "no elements": (lambda: nn.Sequential(nn.Linear(3, 3), Apply(lambda self, x: (x * 1, x[:, :0] * 1))), VECTORS),
    "mask, in inference mode": (lambda: Apply(torch.inference_mode()(lambda self, x: x > 0)), VECTORS),
}


class LayerDrop(Net):
    __module__ = "transformers.models"


class WithCall(nn.BatchNorm1d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training).relu()


class SynchronizedWithCall(WithCall, SynchronizedBatchNorm1d):
    def forward(self, x):
        return SynchronizedBatchNorm1d.forward(self, x).relu()


@pytest.mark.parametrize("right", first_in_smoke(RIGHT))
def test_a_model_that_is_right_passes(right):
    build, input, *options = RIGHT[right]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "all chunks have 2 rows")
        assert assert_matches_one_device(build(), input, **dict(*options)) is None


def test_the_default_rule_for_eps_is_no_difference():
    set_sbn_eps_mode("clamp")
    try:
        assert_matches_one_device(convert_model(nn.BatchNorm2d(3)), 1e-3 * IMAGES)
    finally:
        set_sbn_eps_mode("plus")


def test_a_hook_of_all_modules_may_stop_a_call():
    def hook(module, args):
        if isinstance(module, nn.Tanh):
            raise StopAsyncIteration

    model = Apply(stop, nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2))
    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        assert_matches_one_device(model, VECTORS)
    finally:
        handle.remove()


def test_a_check_needs_no_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert_matches_one_device(nn.Linear(3, 3), VECTORS)


@pytest.mark.smoke
@pytest.mark.parametrize("raised", [None, AssertionError, OSError, KeyboardInterrupt])
def test_nothing_is_left_behind(raised):
    def forward(self, x):
        self.seen.add_(1)
        random.random(), numpy.random.rand(), torch.rand(1)
        if raised in (OSError, KeyboardInterrupt):
            raise raised
        return x - x.mean(0) if raised else x * 1

    model = convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Apply(forward, nn.Dropout(), seen=0)))
    model[1].eval()
    model[0].weight.grad = torch.ones(3, 3)
    input = VECTORS.clone().requires_grad_()

    def everything():
        state = {name: (value.clone(), value.grad) for name, value in model.state_dict(keep_vars=True).items()}
        generators = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
        return repr((state, input, input.grad, generators, warnings.filters, torch.is_grad_enabled())), anatomy(model)

    before = everything()
    with torch.no_grad(), nullcontext() if raised is None else pytest.raises(raised):
        assert_matches_one_device(model, input)
    assert everything() == before


def test_a_scripted_model_gets_no_gradient_from_its_copies():
    model = quietly(torch.jit.script, nn.Linear(3, 3))
    assert_matches_one_device(model, VECTORS)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_a_check_leaves_the_warnings_of_training_to_training():
    parallel = wrapped(nn.Sequential(nn.BatchNorm1d(3), nn.Flatten()))
    for _ in range(2):
        with pytest.raises(AssertionError, match="not synchronized"):
            assert_matches_one_device(parallel, VECTORS)
    with pytest.warns(UserWarning, match="1 BatchNorm layer in training mode"):
        parallel(VECTORS)


@pytest.mark.skipif(FREE_THREADED, reason="what the caller has made is freed when its thread runs, once a second")
def test_what_replicas_were_compared_with_is_dropped_as_they_run():
    alive = []

    def look(self, x):
        held = [len(held) for held in gc.get_objects() if type(held) is torch.Tensor and held.shape[1:] == (1009,)]
        alive.append(sum(held) / 4)
        return x * 1

    layers = [Apply(torch.no_grad()(lambda self, x: x + 1)) for _ in range(30)]
    with pytest.raises(AssertionError, match=r"output of 31 \(Apply\)"):
        assert_matches_one_device(nn.Sequential(*layers, Apply(look), Apply(mix)), torch.randn(4, 1009))
    # On one device and in two replicas: a pass that differs, the same with rounding, and recorded.
    on_one_device, _, in_replica_1 = alive[6:9]
    assert max(alive[0] - 4, alive[3] - 9) < 1  # Nothing is recorded.
    assert 30 < on_one_device < 50  # what goes into a call is what came out of the last one, and kept once
    assert in_replica_1 < 15, alive
