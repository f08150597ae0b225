"""The existing library in a process of its own; `run.py` starts it. Its CUDA-only reduce and broadcast are replaced."""

from __future__ import annotations

import importlib
import sys

import torch
from batches import EPS, SHAPE, batches, small_batch, step

folder, results = sys.argv[1:]
sys.path.insert(0, folder)
existing = importlib.import_module("sync_batchnorm.batchnorm")
execute_replication_callbacks = importlib.import_module("sync_batchnorm.replicate").execute_replication_callbacks


class _AddOnCpu:
    @staticmethod
    def apply(_destination: int, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack(tensors[i::num_inputs]).sum(0) for i in range(num_inputs))


class _ShareOnCpu:
    @staticmethod
    def apply(devices: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors * len(devices)


existing.ReduceAddCoalesced, existing.Broadcast = _AddOnCpu, _ShareOnCpu

torch.set_num_threads(1)
existing.set_sbn_eps_mode("plus")
steps = []
for _, _, input, grad in batches():
    layer = existing.SynchronizedBatchNorm2d(SHAPE[1], momentum=1.0)
    steps.append(step(layer, execute_replication_callbacks, input, grad))
existing.set_sbn_eps_mode("clamp")
layer = existing.SynchronizedBatchNorm2d(SHAPE[1], eps=EPS, momentum=1.0).double()
steps.append(step(layer, execute_replication_callbacks, *small_batch()))
torch.save(steps, results)
