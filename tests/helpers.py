"""What tests compare, and how closely: the tolerances are stated here, once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, convert_model


def randomize(module: nn.Module) -> nn.Module:
    """Give every batch norm of `module` a random weight, negative in its first channel, and a random bias."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._NormBase):
            if child.weight is not None:
                nn.init.uniform_(child.weight, 0.5, 1.5)
                with torch.no_grad():
                    child.weight[0].neg_()
            if child.bias is not None:
                nn.init.normal_(child.bias)
    return module


def twins(module: nn.Module, devices: Sequence[Any], **options: Any) -> tuple[nn.Module, DataParallelWithCallback]:
    """Return `module` on one device and a synchronized copy of it on `devices`, with equal random parameters."""
    home = devices[0] if devices[0] == "cpu" else f"cuda:{devices[0]}"
    plain = randomize(module).to(home)
    parallel = DataParallelWithCallback(convert_model(copy.deepcopy(plain)), devices, timeout=5.0, **options)
    return plain, parallel


TOLERANCES = {  # relative to the largest absolute value of the reference
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}


def assert_equal(actual: Tensor, expected: Tensor, what: str = "", tolerance: float | None = None) -> None:
    """Compare values, shape and dtype; the tolerance is that of the dtype, times the largest value or one."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    if not actual.dtype.is_floating_point or not actual.numel():
        assert torch.equal(actual, expected), f"{what}: {actual}, not {expected}"
        return
    tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    largest = max(1.0, float(expected.abs().max()))
    error = float((actual - expected).abs().max())
    assert error <= tolerance * largest, f"{what}: off by {error:.3g} of {largest:.3g}, allowed {tolerance:g} of it"


def assert_same_state(parallel: nn.Module, plain: nn.Module, tolerance: float | None = None) -> None:
    """Compare parameters, their gradients, and buffers of two modules, name by name."""
    actual = parallel.module if isinstance(parallel, nn.DataParallel) else parallel
    assert list(actual.state_dict()) == list(plain.state_dict())
    for name, expected in plain.state_dict().items():
        assert_equal(actual.state_dict()[name], expected, name, tolerance)
    gradients = dict(actual.named_parameters())
    for name, parameter in plain.named_parameters():
        assert (gradients[name].grad is None) == (parameter.grad is None), f"gradient of {name}"
        if parameter.grad is not None:
            assert_equal(gradients[name].grad, parameter.grad, f"gradient of {name}", tolerance)


def assert_same_step(
    plain: nn.Module, parallel: nn.Module, input: Tensor, grad: Tensor | None = None, tolerance: float | None = None
) -> None:
    """Run one forward and one backward, with a random upstream gradient, on both; compare all there is."""
    inputs = [input.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    expected, actual = plain(inputs[0]), parallel(inputs[1])
    assert_equal(actual, expected, "output", tolerance)
    grad = torch.randn_like(expected) if grad is None else grad
    expected.backward(grad)
    actual.backward(grad)
    assert_equal(inputs[1].grad, inputs[0].grad, "input gradient", tolerance)
    assert_same_state(parallel, plain, tolerance)
