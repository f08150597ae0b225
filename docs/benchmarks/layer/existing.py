"""The existing library in a process of its own; `run.py` starts it. Its CUDA-only reduce and broadcast are replaced."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import CpuReplicas, serve, training_step

folder, shape, channels_last, replicas, layers = sys.argv[1:]
sys.path.insert(0, folder)
import sync_batchnorm.batchnorm as existing  # noqa: E402
from sync_batchnorm.replicate import execute_replication_callbacks  # noqa: E402


class _AddOnCpu:
    @staticmethod
    def apply(_destination: int, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack(tensors[i::num_inputs]).sum(0) for i in range(num_inputs))


class _ShareOnCpu:
    @staticmethod
    def apply(devices: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors * len(devices)


existing.ReduceAddCoalesced, existing.Broadcast = _AddOnCpu, _ShareOnCpu
existing.set_sbn_eps_mode("plus")

torch.set_num_threads(1)
size = [int(n) for n in shape.split(",")]
memory_format = torch.channels_last if channels_last == "1" else torch.contiguous_format
model = nn.Sequential(*[existing.SynchronizedBatchNorm2d(size[1]) for _ in range(int(layers))])
input = torch.randn(size).contiguous(memory_format=memory_format)
grad = torch.randn(size).contiguous(memory_format=memory_format)
serve(training_step(CpuReplicas(model, int(replicas), execute_replication_callbacks), input, grad))
