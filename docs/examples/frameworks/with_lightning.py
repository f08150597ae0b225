"""Lightning 2.6.6: a model is converted before it is passed to Lightning, which starts a process for each device.

Lightning starts the second process by itself; `torchrun --nproc-per-node 2` in the place of `python` works, too::

    python docs/examples/frameworks/with_lightning.py

- On GPUs (not run) pass `accelerator="gpu"`, and on two machines `num_nodes=2`; see docs/processes.md.
- `sync_batchnorm=True` of the `Trainer` would replace all layers, even converted ones, by `torch.nn.SyncBatchNorm`.
- The sampler that Lightning inserts shuffles, and repeats samples if the data do not divide evenly between processes.
"""

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sync_batchnorm import convert_model


class Task(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(model, data, batch_size, processes):
    """Train with steps of `batch_size` samples in all processes together."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=processes, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Task(convert_model(model)), DataLoader(data, batch_size // processes))
    return model


def make_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


if __name__ == "__main__":
    train(make_net(), TensorDataset(torch.randn(16, 3, 8, 8), torch.randint(3, (16,))), 8, processes=2)
