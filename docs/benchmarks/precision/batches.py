"""The batches of the precision benchmark, the same in every process, and what a layer makes of them.

Nothing here imports a synchronized batch norm: the layer under test is handed in, in its own kind of replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import FORMATS, CpuReplicas

SHAPE = (8, 32, 48, 48)  # so large that each replica computes its own moments
RATIOS = (0.0, 1e2, 1e3, 1e4, 1e6)  # of mean and deviation, in every channel
REPLICAS = 4

Callbacks = Callable[..., None]


def batches() -> Iterator[tuple[str, float, Tensor, Tensor]]:
    """Yield name of the format, ratio, input and upstream gradient, in float32."""
    for name, memory_format in FORMATS.items():
        for ratio in RATIOS:
            torch.manual_seed(0)
            sizes = 1 + 0.3 * torch.rand(1, SHAPE[1], 1, 1, dtype=torch.float64)
            means = ratio * sizes * torch.randn(1, SHAPE[1], 1, 1, dtype=torch.float64).sign()
            input = (torch.randn(SHAPE, dtype=torch.float64) + means).float()
            grad = torch.randn(SHAPE)
            yield (
                name,
                ratio,
                input.contiguous(memory_format=memory_format),
                grad.contiguous(memory_format=memory_format),
            )


def step(layer: nn.Module, callbacks: Callbacks | None, input: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Run one forward and backward, on replicas if there are `callbacks`, and return its results."""
    torch.manual_seed(1)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(SHAPE[1]) + 0.5)
        layer.bias.copy_(torch.randn(SHAPE[1]))
    model = layer if callbacks is None else CpuReplicas(layer, REPLICAS, callbacks)
    leaf = input.clone(memory_format=torch.preserve_format).requires_grad_()
    output = model(leaf)
    output.backward(grad)
    return {
        "variance": layer.running_var.detach().clone(),
        "output": output.detach(),
        "input gradient": leaf.grad,
    }
