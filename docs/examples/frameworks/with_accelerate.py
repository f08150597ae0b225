"""Accelerate 1.15.0: what `prepare` returns, converted; a process for each device.

Without GPUs, this starts two processes::

    torchrun --nproc-per-node 2 docs/examples/frameworks/with_accelerate.py

`accelerate launch --cpu --num_processes 2` starts one: it makes several on the CPU only with MPI, which was not tried.
On GPUs, which was not tried either, `accelerate launch` starts a process for each.

- `prepare` returns a `DistributedDataParallel`; see docs/processes.md.
- `prepare` repeats samples until all processes have the same number, so the last batch equals that of one process only
  if the data divide evenly.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sync_batchnorm import convert_model


def train(model, data, batch_size):
    """Train with steps of `batch_size` samples in all processes together."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(data, batch_size // accelerator.num_processes)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    convert_model(model)
    for images, labels in batches:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(images), labels))
        optimizer.step()
    return accelerator.unwrap_model(model)


def make_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


if __name__ == "__main__":
    train(make_net(), TensorDataset(torch.randn(16, 3, 8, 8), torch.randint(3, (16,))), 8)
