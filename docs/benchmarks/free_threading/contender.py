"""A row of layers in a process of its own, whose interpreter has its lock on or off; `run.py` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import CpuReplicas, keep_freed_memory, serve, training_step

from sync_batchnorm import convert_model, execute_replication_callbacks

lock, kind, shape, replicas, layers = sys.argv[1:]
if sys._is_gil_enabled() != (lock == "with"):
    raise RuntimeError(f"expected an interpreter {lock} its lock, but got the other; see PYTHON_GIL")
keep_freed_memory()
torch.set_num_threads(1)
size = [int(n) for n in shape.split(",")]
model = nn.Sequential(*[nn.BatchNorm2d(size[1]) for _ in range(int(layers))])
if kind == "synchronized":
    model = convert_model(model)
step = training_step(
    CpuReplicas(model, int(replicas), execute_replication_callbacks), torch.randn(size), torch.randn(size)
)
serve(step)
