"""`assert_matches_one_device` passes where replicas are right, without a warning, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy
import pytest
import torch
import torch.nn.functional as F
from checked import (
    BATCH,
    IMAGES,
    VECTORS,
    Apply,
    behind,
    bind,
    built,
    follow_gradient,
    gated,
    hide,
    mean_square,
    mix,
    quietly,
    tower,
    try_first,
    views,
    with_hook,
    with_norm,
    wrapped,
)
from conftest import FREE_THREADED, first_in_smoke, slow
from helpers import Net, anatomy
from torch import nn
from torch.autograd import grad
from torch.func import functional_call, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, assert_matches_one_device, convert_model


def drop(self, x):
    query = x[:, None]
    attention = self.parts[1](query, query, query)[0][:, 0]
    sequence = self.parts[2](query.expand(-1, 3, -1))[0][:, 0]
    return F.dropout(self.parts[0](x)) + torch.dropout(attention, 0.5, True) + sequence


def drop_in_other_words(self, x):
    kept, _ = torch.native_dropout(x, 0.5, True)
    y = torch.dropout(input=x, p=0.5, train=True) + kept + F.alpha_dropout(x, training=True)
    y = y + torch.feature_dropout(x, 0.5, True) + F.dropout1d(x, training=True) + F.feature_alpha_dropout(x, 0.5, True)
    query = x[:, None]
    for options in ([None, 0.5], [None], []):
        y = y + F.scaled_dot_product_attention(query, query, query, *options)[:, 0]
    y = y + F.scaled_dot_product_attention(query, query, query, None, dropout_p=0.5)[:, 0]
    return y + torch.dropout_(x * 1, 0.5, True)


def drop_in_checkpoint(self, x):
    return checkpoint(lambda y: F.dropout(self.parts[1](self.parts[0](y))).exp(), x, use_reentrant=False)


def raise_stop(*_):
    raise StopAsyncIteration


def stop_inside():
    """Return a model with a hook that stops a call in the middle, and is caught."""
    inside = nn.Sequential(nn.Linear(6, 6), with_hook(nn.ReLU(), raise_stop), nn.Linear(6, 6))
    return Apply(lambda self, x: self.parts[1](try_first(self, x)), inside, nn.Linear(6, 2))


def run_in_thread(self, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(self.parts[0], x).result()


def stay_complex(self, x):
    assert x.dtype == torch.complex128
    return x * 1


def rotate(self, x):
    assert self.factors.imag.all()
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 3, 2)) * self.factors).flatten(1)


def grow_table(self, x):
    if self.table is None or len(self.table) < len(x):
        self.table = torch.arange(len(x))
    return x + 0 * self.table[: len(x), None]


def set_rows(self, x):
    self.block.rows, self.rows = len(x), x.shape[0]
    return self.block(self.first(x))


def swin():
    block = Net(lambda self, x: self.norm(x).reshape(self.rows, -1), norm=nn.BatchNorm1d(8), rows=0)
    return convert_model(Net(set_rows, first=nn.Linear(6, 8), block=block))


def with_norm_behind(*modules):
    return convert_model(behind(nn.BatchNorm1d(6), *modules))


def tagged():
    model = with_norm_behind()
    model[0].weight.tag = model[1].running_mean.tag = 3
    return nn.Sequential(model, Net(lambda self, x: x * self.weight[0].tag, weight=[model[0].weight]))


def compiled():
    model = with_norm_behind()
    quietly(model[0].compile)
    return nn.Sequential(model, Net(quietly(torch.compile, lambda self, x: x * 2)))


def attributes_that_agree():
    return nn.Sequential(
        Net(bind("size", lambda _, x: float(x.shape[1])), size=6.0),
        Net(bind("nan", lambda *_: math.nan), nan=math.nan),
        Net(bind("close", lambda close, _: close + 1e-12), close=1.0),
        Net(bind("zero", lambda zero, _: zero + 1e-13), zero=0.0),
    )


class LayerDrop(Net):
    __module__ = "transformers.models"


class MovesByDevice(nn.Linear):
    cpu = None

    def to(self, device):
        return super().to(torch.device(device))


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
        self.tower = convert_model(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)))
        self.head, self.tied, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.tied.weight, self.frozen = self.head.weight, nn.Linear(4, 4).requires_grad_(False)

    def forward(self, left, right):
        left, right = self.tower(left), checkpoint(self.tower, right, use_reentrant=False)
        return self.tied(self.head(left)) * self.frozen(right), left.argmax(1)


def normalize_always(self, x, norm):
    return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1)


def right(model, *inputs, **options):
    return model, inputs or (BATCH,), options


EMBEDDED = torch.arange(8) % 5
SQUARE = BATCH.T @ BATCH
ROTATIONS = torch.polar(torch.ones(3), torch.tensor([0.1, 1.0, 2.0]))

RIGHT = {
    # Dropout, which is switched off
    "dropout": right(
        lambda: Apply(
            drop, nn.Dropout(), nn.MultiheadAttention(6, 1, 0.5, batch_first=True), nn.LSTM(6, 6, 2, True, True, 0.5)
        )
    ),
    "dropout in other words": right(drop_in_other_words),
    "dropout that is changed": right(  # and which its backward pass needs
        lambda: Apply(lambda self, x: (h := self.parts[0](x).exp()) * F.dropout(h, 0.5).add_(1.0), nn.Linear(6, 6))
    ),
    "dropout in a checkpoint": right(lambda: Apply(drop_in_checkpoint, nn.Linear(6, 6), nn.Dropout())),
    "stochastic depth": right(lambda: behind(pytest.importorskip("torchvision.ops").StochasticDepth(0.5, "row"))),
    "layer drop": right(lambda: LayerDrop(lambda self, x: x * (random.random() >= self.layerdrop), layerdrop=0.5)),
    "drop connect": right(
        lambda: LayerDrop(lambda self, x: x * (random.random() >= self._drop_connect_rate), _drop_connect_rate=0.5)
    ),
    # Kinds of numbers
    "float32": right(Recurrent, torch.randn(4, 5, 3), torch.tensor([1, 5, 2, 3])),
    "float32 constant": right(lambda self, x: x @ SQUARE),
    "float32 target": right(lambda: nn.Linear(6, 6), loss=lambda output: F.mse_loss(output, BATCH)),
    "complex": right(lambda self, x: torch.fft.rfft(x)),
    "complex input": right(stay_complex, torch.complex(BATCH, BATCH)),
    "complex parameter": right(lambda: Net(rotate, factors=nn.Parameter(ROTATIONS))),
    "complex buffer": right(lambda: Net(rotate, factors=nn.Buffer(ROTATIONS))),
    "integers": right(lambda: nn.Embedding(9, 3, sparse=True), EMBEDDED, replicas=3),
    "weight that is renormalized": right(lambda: nn.Embedding(9, 3, max_norm=0.1), EMBEDDED),
    "large values": right(
        lambda: nn.Sequential(convert_model(nn.BatchNorm2d(3)), Apply(lambda self, x: x * 1e9)), IMAGES
    ),
    "NaN": right(lambda self, x: (x.log(), x * math.nan)),
    "mask, in inference mode": right(torch.inference_mode()(lambda self, x: x > 0)),
    "no elements": right(lambda: behind(Apply(lambda self, x: (x * 1, x[:, :0] * 1)))),
    # Gradients that are zero, or asked for in forward
    "zeros and None": right(lambda: Apply(lambda self, x: hide(self, x) if len(x) > 3 else x, nn.Linear(6, 6))),
    "None and zeros": right(lambda: Apply(lambda self, x: hide(self, x) if len(x) < 4 else x, nn.Linear(6, 6))),
    "zeros": right(lambda: Apply(lambda self, x: self.parts[0](x) * 0, nn.BatchNorm1d(6, 1e-5, 0.1, True, False))),
    "gates of zeros": right(lambda: convert_model(gated(nn.BatchNorm1d(6)))),
    "softmax and sum": right(lambda: behind(nn.Softmax(1)), loss=torch.sum),
    "last norm without affine": right(lambda: convert_model(behind(nn.BatchNorm1d(6, affine=False))), loss=torch.sum),
    "mean of a softmax": right(lambda: with_norm_behind(nn.Softmax(1)), loss=torch.mean),
    "gradient of an input": right(
        lambda: Apply(lambda self, x: grad(self.parts[0](x.requires_grad_()).sum(), x, create_graph=True)[0], tower()),
        loss=torch.sum,
    ),
    "gradient in forward": right(lambda: Apply(follow_gradient, behind(nn.LayerNorm(6), nn.Tanh()))),
    "jacrev and vmap": right(lambda: Apply(lambda self, x: vmap(jacrev(self.parts[0]))(x).sum(1), behind(nn.Tanh()))),
    "functional_call": right(
        lambda: Apply(
            lambda self, x: functional_call(self.parts[0], dict(self.parts[0].named_parameters()), x), tower()
        )
    ),
    # State that is no state of training, or is the same
    "activations in an attribute": right(lambda: Net(bind("features", lambda _, x: [x, x.mean(0)]))),
    "attributes that agree": right(attributes_that_agree),
    "attributes of parameters": right(tagged),
    "sizes that each forward sets": right(swin),
    "table filled in the first forward": right(lambda: Net(grow_table, table=None)),
    "growing table": right(lambda: Net(grow_table, table=torch.arange(1))),
    "number that is counted": right(lambda: Net(lambda self, x: setattr(self, "n", self.n + len(x)) or x * 1, n=0)),
    "buffer that each forward writes": right(
        lambda: Apply(lambda self, x: (self.last.copy_(x.detach().mean()), x * 1)[1], last=0.0)
    ),
    "parameter changed alike": right(Net(lambda self, x: self.w.data.clamp_(0) * x, w=nn.Parameter(-torch.ones(6)))),
    "mode that forward sets": right(
        lambda: Net(lambda self, x: self.bn.eval()(x), bn=convert_model(nn.BatchNorm1d(6)))
    ),
    # Norms
    "clamp": right(lambda: convert_model(nn.BatchNorm2d(3), eps_mode="clamp"), 1e-3 * IMAGES),
    "class that counts no calls": right(
        lambda: with_norm(lambda self, x, norm: normalize_always(self, x, norm).relu(), torch.relu)
    ),
    "two views": right(lambda: convert_model(views(nn.BatchNorm1d(8)))),
    "two towers": right(Siamese, BATCH, BATCH.roll(1, 0)),
    # Modules that are copied with care
    "no parameters": right(nn.Flatten(), IMAGES, replicas=5),
    "script": right(lambda: nn.Sequential(quietly(torch.jit.script, nn.Linear(6, 6)), nn.ReLU())),
    "script with buffers": right(lambda: quietly(torch.jit.script, behind(nn.BatchNorm1d(6).eval()))),
    "weight norm": right(lambda: quietly(nn.utils.weight_norm, nn.Linear(6, 6))),
    "spectral norm": right(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))),
    "a `to` of its own": right(lambda: MovesByDevice(6, 3)),
    "hook that stops": right(stop_inside),
    "thread": right(lambda: Apply(run_in_thread, nn.Linear(6, 6)), BATCH.clone().requires_grad_()),
    "mix that nobody uses": right(lambda: Apply(lambda self, x: (self.parts[0](x), x * 1)[1], Apply(mix))),
    # Wrappers, and what is no tensor of rows
    "wrapper of torch": right(lambda: nn.DataParallel(convert_model(nn.Sequential(nn.BatchNorm1d(6))))),
    "wrapper, another dim": right(lambda: wrapped(nn.ReLU(), dim=1), torch.randn(1, 4), replicas=4),
    "values beside a tensor": right(lambda self, x: {"x": x, "name": "x", "is": True}),
    "number": right(lambda: wrapped(Apply(lambda self, x: {"x": x, "n": 0.5}), out_dims={"n": None})),
    "number that all replicas return": right(
        lambda: Apply(lambda self, x: (self.parts[0](x), self.parts[0].weight.sum()), nn.Linear(6, 6))
    ),
    "sums of replicas": right(lambda self, x: x.square().sum(), loss=torch.sum),
    "sums that the model adds up": right(
        lambda: Apply(lambda self, x: self.parts[0](x).sum(), wrapped(Apply(lambda self, x: x.square().sum())))
    ),
}
COSTLY = {  # by their imports
    "compiled": right(compiled),
    "drop path": right(lambda: behind(pytest.importorskip("timm.layers").DropPath(0.5))),
}


@pytest.mark.parametrize("name", [*first_in_smoke(RIGHT), *slow(*COSTLY)])
def test_a_right_model_passes_without_a_warning(name):
    model, inputs, options = (RIGHT | COSTLY)[name]
    assert assert_matches_one_device(built(model), *inputs, **options) is None


def test_equal_chunks_of_scalars_are_warned_of_as_they_hide_a_mean():
    with pytest.warns(UserWarning, match="all chunks have 2 rows, .* pass 3 samples, unless those of your") as caught:
        assert_matches_one_device(Apply(mean_square, nn.Linear(3, 3)), VECTORS)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("number", [2, 3, 8])
def test_a_mean_of_each_chunk_is_found_with_twice_the_replicas_less_one_samples(number):
    with pytest.raises(AssertionError, match="the mean weighted by rows is that of one device"):
        assert_matches_one_device(Apply(mean_square, nn.Linear(6, 3)), torch.randn(2 * number - 1, 6), replicas=number)


def test_a_hook_of_all_modules_may_stop_a_call():
    hook = lambda module, args: raise_stop() if isinstance(module, nn.ReLU) else None  # noqa: E731
    with nn.modules.module.register_module_forward_pre_hook(hook):
        assert_matches_one_device(stop_inside(), BATCH)


def test_a_check_needs_no_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert_matches_one_device(nn.Linear(6, 3), BATCH)


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


def test_parameters_get_no_gradient_from_a_script_or_a_loss_that_uses_them():
    script, model, judge = quietly(torch.jit.script, nn.Linear(6, 3)), nn.Linear(6, 3), nn.Linear(3, 1)
    judge.weight.grad = torch.ones(1, 3)
    assert_matches_one_device(script, BATCH)
    assert_matches_one_device(
        model, BATCH, loss=lambda output: judge(output).mean() + sum(p.square().sum() for p in model.parameters())
    )
    assert [parameter.grad for parameter in [*script.parameters(), *model.parameters(), judge.bias]] == [None] * 5
    assert torch.equal(judge.weight.grad, torch.ones(1, 3))


def test_what_the_wrapper_warns_of_is_left_to_the_training():
    parallel = wrapped(nn.Sequential(nn.BatchNorm1d(6), nn.Flatten()))
    for _ in range(2):
        with pytest.raises(AssertionError, match="not synchronized"):
            assert_matches_one_device(parallel, BATCH)
    with pytest.warns(UserWarning, match="1 BatchNorm layer in training mode"):
        parallel(BATCH)
    late = Net(bind("step", lambda step, _: step + 1), step=0)
    assert_matches_one_device(late, BATCH)
    with pytest.warns(UserWarning, match=r"forward\(\) of Net set step .* of replica 0"):
        DataParallelWithCallback(late, ["cpu"] * 2)(BATCH)


@pytest.mark.skipif(FREE_THREADED, reason="what the caller has made is freed when its thread runs, once a second")
def test_what_replicas_were_compared_with_is_dropped_as_they_run():
    alive = []
    gc.collect()
    gc.freeze()  # `get_objects` leaves out what there is now.

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
