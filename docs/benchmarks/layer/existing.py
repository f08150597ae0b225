"""The existing library in a process of its own; `run.py` starts it. Its CUDA-only reduce and broadcast are replaced."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import FORMATS, CpuReplicas, import_existing, keep_freed_memory, serve, training_step

folder, shape, kind, replicas, layers = sys.argv[1:]
existing, execute_replication_callbacks = import_existing(folder)
existing.set_sbn_eps_mode("plus")
keep_freed_memory()
torch.set_num_threads(1)
size = [int(n) for n in shape.split(",")]
model = nn.Sequential(*[existing.SynchronizedBatchNorm2d(size[1]) for _ in range(int(layers))])
input, grad = (torch.randn(size).contiguous(memory_format=FORMATS[kind]) for _ in range(2))
serve(training_step(CpuReplicas(model, int(replicas), execute_replication_callbacks), input, grad))
