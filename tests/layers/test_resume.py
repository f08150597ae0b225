"""A run that is resumed from its state dicts computes, bit for bit, what the uninterrupted one does."""

import copy
import io

import pytest
import torch
from conftest import every_kernel
from helpers import FORMATS, randomize
from torch import nn

from sync_batchnorm import DataParallelWithCallback, convert_model

pytestmark = [*every_kernel, pytest.mark.once("kernel", "kind")]


def with_infinity(batch):
    batch[1, 2, 0, 0] = torch.inf
    return batch


UNUSUAL = {
    "usual": lambda batch: batch,
    "infinity": with_infinity,
    "nan": lambda batch: with_infinity(batch) * 0,
    "large-mean": lambda batch: batch + 1e4,
    "large-mean-in-one-replica": lambda batch: batch + torch.tensor([1e4, 0, 0, 0, 0]).view(-1, 1, 1, 1),
    "constant": lambda batch: batch * 0 + 3,
    "overflow": lambda batch: batch * 1e30,
}


def run(model):
    """Return a wrapper on two CPU replicas, and its optimizer."""
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(model)), ["cpu"] * 2, timeout=5.0)
    return parallel, torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)


def step(parallel, optimizer, batch, grad):
    """Train with `batch`, and return all that the step computes. As a gradient scaler does, skip what overflows."""
    optimizer.zero_grad()
    input = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    output = parallel(input)
    output.backward(grad)
    grads = [parameter.grad for parameter in parallel.parameters()]
    if all(bool(found.isfinite().all()) for found in grads):
        optimizer.step()
    state = [tensor.clone() for tensor in parallel.state_dict().values()]
    return [output.detach(), input.grad, *grads, *state]


def net(kind):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    return randomize(model).to(memory_format=FORMATS[kind])


def batches(kind):
    """Return batches with the gradients of their outputs: one before the unusual one, that one, and some after it."""
    made = [(torch.randn(5, 4, 9, 9) + 0.5, torch.randn(5, 6, 7, 7)) for _ in range(4)]
    return [[tensor.contiguous(memory_format=FORMATS[kind]) for tensor in pair] for pair in made]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_run_that_is_resumed_after_an_unusual_batch_is_the_uninterrupted_one(unusual, kind):
    model, steps = net(kind), batches(kind)
    steps[1][0] = UNUSUAL[unusual](steps[1][0])
    first, second, file = run(model), run(model), io.BytesIO()
    for pair in steps[:2]:
        step(*first, *pair)
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file), strict=True):
        part.load_state_dict(state)
    for pair in steps[2:]:
        for one, other in zip(step(*second, *pair), step(*first, *pair), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
