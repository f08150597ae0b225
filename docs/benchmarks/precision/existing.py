"""The existing library in a process of its own; `run.py` starts it. Its CUDA-only reduce and broadcast are replaced."""

from __future__ import annotations

import sys

import torch
from batches import SHAPE, batches, step
from harness import import_existing

folder, results = sys.argv[1:]
existing, execute_replication_callbacks = import_existing(folder)

torch.set_num_threads(1)
existing.set_sbn_eps_mode("plus")
steps = []
for _, _, input, grad in batches():
    layer = existing.SynchronizedBatchNorm2d(SHAPE[1], momentum=1.0)
    steps.append(step(layer, execute_replication_callbacks, input, grad))
torch.save(steps, results)
