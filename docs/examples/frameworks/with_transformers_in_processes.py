"""The `Trainer` of transformers 5.23.0 in several processes: a plain one, with a converted model.

Start it with a process for each device::

    torchrun --nproc-per-node 2 docs/examples/frameworks/with_transformers_in_processes.py

- `use_cpu=True` on a machine without GPUs: otherwise each process trains by itself, without a word.
- `average_tokens_across_devices=False`: otherwise the `Trainer` multiplies the loss, and so all gradients, by the
  number of processes, if the loss of the model is a mean over samples, as here. It does so without this library, too.
- The last batch equals that of one process only if the data divide evenly: otherwise samples are repeated.
"""

import os

import torch
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from sync_batchnorm import convert_model


def train(model, data, batch_size):
    """Train with steps of `batch_size` samples in all processes together."""
    arguments = TrainingArguments(
        "runs",
        use_cpu=not torch.cuda.is_available(),
        average_tokens_across_devices=False,
        per_device_train_batch_size=batch_size // int(os.environ.get("WORLD_SIZE", 1)),
        num_train_epochs=2,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(convert_model(model), arguments, train_dataset=data).train()
    return model


config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3)

if __name__ == "__main__":
    data = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 3} for i in range(24)]
    train(ResNetForImageClassification(config), data, batch_size=12)
