"""Time the passes that a layer is made of, each alone, in one thread and in the cache: the floor of a layer."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import environment, keep_freed_memory

from sync_batchnorm.backends.cpu import Cpu, affine, gradient_sums, line_of

SHAPE, ROUNDS = (4, 64, 56, 56), 60


def operators(memory_format: torch.memory_format) -> dict[str, Callable[[], object]]:
    """Return the operators by name, on data of `memory_format`."""
    x, dy, other = (torch.randn(SHAPE).contiguous(memory_format=memory_format) for _ in range(3))
    channels = SHAPE[1]
    zeros, ones = torch.zeros(channels), torch.ones(channels)
    vector = torch.rand(channels)
    line = line_of(vector, vector)
    spread = vector.view(1, -1, 1, 1)
    backward = torch.ops.aten.native_batch_norm_backward.default

    return {
        "a copy, `clone`": x.clone,
        "`nn.BatchNorm2d`, forward": lambda: F.batch_norm(x, zeros.clone(), ones.clone(), vector, vector, True),
        "`nn.BatchNorm2d`, backward": lambda: backward(
            dy, x, vector, None, None, zeros, ones, True, 0.0, [True, True, True]
        ),
        "ours: statistics": lambda: Cpu().statistics(x, 0.0),
        "ours: normalize, and the linear part of the input gradient": lambda: affine(x, line),
        "ours: both sums of the backward": lambda: gradient_sums(dy, x, zeros, ones),
        "ours: add the scaled gradient": lambda: other.addcmul_(dy, spread),
        "not used: `batch_norm_update_stats`": lambda: torch.batch_norm_update_stats(x, None, None, 0.0),
    }


def microseconds(operator: Callable[[], object]) -> float:
    """Return the median time of a call."""
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        operator()
        taken.append(time.perf_counter() - start)
    return 1e6 * statistics.median(taken[ROUNDS // 6 :])


def main() -> None:
    """Print the table of the README, with the sums of what is ours."""
    torch.set_num_threads(1)
    keep_freed_memory()
    print(environment())
    print(f"| {SHAPE}, us | contiguous | channels_last |\n|---|---|---|")
    found = [
        {name: microseconds(operator) for name, operator in operators(memory_format).items()}
        for memory_format in (torch.contiguous_format, torch.channels_last)
    ]
    for us in found:
        made, normalize, sums, add = (us[name] for name in us if name.startswith("ours"))
        us["**ours, forward**"] = made + normalize
        us["**ours, backward**"] = sums + normalize + add
    for name in found[0]:
        print(f"| {name} | {found[0][name]:.0f} | {found[1][name]:.0f} |")


if __name__ == "__main__":
    main()
