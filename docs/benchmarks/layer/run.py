"""Time one layer, forward and backward, on CPU replicas: ours, `nn.BatchNorm2d` and the older library.

`--layers` of them run in a row, so that the cost of starting threads is shared; the figures are for one layer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import (
    FORMATS,
    CpuReplicas,
    Remote,
    environment,
    interleave,
    keep_freed_memory,
    median_ratio,
    print_head,
    print_row,
    training_step,
)

from sync_batchnorm import convert_model, execute_replication_callbacks

SHAPES = [(8, 64, 56, 56), (8, 256, 28, 28), (8, 512, 7, 7), (4, 8, 4, 4)]
PLAIN, OURS, EXISTING = "nn.BatchNorm2d", "ours", "the older library"


def contenders(shape: tuple[int, ...], kind: str, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return the steps to time."""
    input, grad = (torch.randn(shape).contiguous(memory_format=FORMATS[kind]) for _ in range(2))
    plain = nn.Sequential(*[nn.BatchNorm2d(shape[1]) for _ in range(options.layers)])
    steps: dict[str, Any] = {}
    for name, model in ((PLAIN, plain), (OURS, convert_model(copy.deepcopy(plain)))):
        replicas = CpuReplicas(model, options.replicas, execute_replication_callbacks)
        steps[name] = training_step(replicas, input, grad)
    if options.existing is not None:
        script = str(Path(__file__).with_name("existing.py"))
        words = [",".join(map(str, shape)), kind, options.replicas, options.layers]
        steps[EXISTING] = Remote(script, options.existing, *map(str, words))
    return steps


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--existing", help="folder into which sync-batchnorm==0.0.1 was installed")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    print(environment())
    rivals = [PLAIN] if options.existing is None else [PLAIN, EXISTING]
    print_head("input", "format", f"{PLAIN}, ms", f"{OURS}, ms", *(f"{OURS} / {rival}" for rival in rivals))
    for shape in SHAPES:
        size = (max(options.replicas, shape[0]), *shape[1:])  # at least one sample for each replica
        for kind in FORMATS:
            steps = contenders(size, kind, options)
            seconds = interleave(steps, options.rounds)
            ms = [1e3 * statistics.median(seconds[name]) / options.layers for name in (PLAIN, OURS)]
            ratios = [median_ratio(seconds[OURS], seconds[rival]) for rival in rivals]
            print_row(size, kind, *(f"{time:.2f}" for time in ms), *(f"{ratio:.2f}" for ratio in ratios))
            if EXISTING in steps:
                steps[EXISTING].close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
