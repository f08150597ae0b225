"""A run that is resumed from its state dicts computes, bit for bit, what the uninterrupted one does."""

import io

import pytest
import torch
from conftest import first_in_smoke, slow, usual_kernels
from helpers import FORMATS, twins
from torch import nn

UNUSUAL = {
    "usual": 1.0,
    "infinity": torch.tensor([1.0, torch.inf, 1.0, 1.0, 1.0]).view(-1, 1, 1, 1),
    "nan": torch.nan,
    "constant": 0.0,
    "overflow": 1e30,
    "large in one replica": torch.tensor([1e4, 1.0, 1.0, 1.0, 1.0]).view(-1, 1, 1, 1),
}


def step(parallel, optimizer, batch, grad):
    """Train with `batch`, and return all that the step computes. As a gradient scaler does, skip what overflows."""
    optimizer.zero_grad()
    input = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    output = parallel(input)
    output.backward(grad)
    grads = [parameter.grad for parameter in parallel.parameters()]
    if all(bool(grad.isfinite().all()) for grad in grads):
        optimizer.step()
    return [output.detach(), input.grad, *grads, *(tensor.clone() for tensor in parallel.state_dict().values())]


@usual_kernels
@pytest.mark.parametrize("kind", ["contiguous", *slow("channels_last")])
@pytest.mark.parametrize("unusual", first_in_smoke(UNUSUAL))
def test_run_that_is_resumed_after_an_unusual_batch_is_the_uninterrupted_one(unusual, kind):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    pairs = [(torch.randn(5, 4, 9, 9) + 0.5, torch.randn(5, 6, 7, 7)) for _ in range(4)]
    pairs[1] = (pairs[1][0] * UNUSUAL[unusual], pairs[1][1])
    pairs = [[tensor.contiguous(memory_format=FORMATS[kind]) for tensor in pair] for pair in pairs]
    parallels, file = [twins(model.to(memory_format=FORMATS[kind]), ["cpu"] * 2)[1] for _ in range(2)], io.BytesIO()
    runs = [(parallel, torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)) for parallel in parallels]
    for pair in pairs[:2]:
        step(*runs[0], *pair)
    torch.save([part.state_dict() for part in runs[0]], file)
    file.seek(0)
    for part, state in zip(runs[1], torch.load(file), strict=True):
        part.load_state_dict(state)
    for pair in pairs[2:]:
        for expected, actual in zip(step(*runs[0], *pair), step(*runs[1], *pair), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
