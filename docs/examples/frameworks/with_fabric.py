"""Fabric of Lightning 2.6.6: a model is converted before `setup`; a process for each device.

Fabric starts the second process by itself::

    python docs/examples/frameworks/with_fabric.py

- On GPUs (not run) pass `accelerator="gpu"`.
- `setup` returns a wrapper of a `DistributedDataParallel`; see docs/processes.md.
- A sampler that Fabric inserts repeats samples where the data do not divide evenly between the processes.
"""

import torch
from lightning import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sync_batchnorm import convert_model


def train(model, data, batch_size, processes):
    """Train with steps of `batch_size` samples in all processes together."""
    fabric = Fabric(accelerator="cpu", devices=processes, strategy="ddp")
    fabric.launch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel, optimizer = fabric.setup(convert_model(model), optimizer)
    for images, labels in fabric.setup_dataloaders(DataLoader(data, batch_size // processes)):
        optimizer.zero_grad()
        fabric.backward(cross_entropy(parallel(images), labels))
        optimizer.step()
    return model


def make_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


if __name__ == "__main__":
    train(make_net(), TensorDataset(torch.randn(16, 3, 8, 8), torch.randint(3, (16,))), 8, processes=2)
