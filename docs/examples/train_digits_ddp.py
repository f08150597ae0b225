"""Train on real handwritten digits in several processes: they compute what one process computes on the whole batch.

One process and two processes print the same losses, digit by digit::

    python docs/examples/train_digits_ddp.py
    torchrun --nproc-per-node 2 docs/examples/train_digits_ddp.py

It runs on the CPU, with gloo, in float64. The digits are the 1,797 of scikit-learn, which come with its package.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from sync_batchnorm import convert_model
except ImportError as error:
    sys.exit(
        f"expected the packages of this example, but got {error}; install them, in the folder of the README, "
        "with: pip install '.[examples]'"
    )

__all__ = ["main"]

TEST_SAMPLES = 360  # a fifth of the digits
LEARNING_RATE = 0.02


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).double()


def batches(count: int, size: int, epoch: int, rank: int, world_size: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the samples of this process in each batch, and the size of the batch; the order is the same for all."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(size):
        yield batch.tensor_split(world_size)[rank], len(batch)


def train(epochs: int, batch_size: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.from_numpy(digits.images).double().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    train_images, test_images = images[:-TEST_SAMPLES], images[-TEST_SAMPLES:]
    train_labels, test_labels = labels[:-TEST_SAMPLES], labels[-TEST_SAMPLES:]

    torch.manual_seed(0)
    net = convert_model(make_net())
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    for epoch in range(1, epochs + 1):
        model.train()
        total_loss = torch.zeros((), dtype=torch.float64)
        for mine, size in batches(len(train_labels), batch_size, epoch, rank, world_size):
            loss = F.cross_entropy(model(train_images[mine]), train_labels[mine], reduction="sum") / size
            optimizer.zero_grad()
            # DistributedDataParallel averages the gradients of the processes; the loss of the batch is their sum.
            (loss * world_size).backward()
            optimizer.step()
            total_loss += loss.detach() * size
        dist.all_reduce(total_loss)
        net.eval()
        with torch.no_grad():
            correct = (net(test_images).argmax(1) == test_labels).double().mean()
        if rank == 0:
            print(f"epoch {epoch}: loss {total_loss / len(train_labels):.10f}, test accuracy {correct:.4f}", flush=True)
    if rank == 0:
        values = [value for value in net.state_dict().values() if value.is_floating_point()]
        norm = sum(float(value.square().sum()) for value in values) ** 0.5
        print(f"norm of parameters and running statistics: {norm:.8f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits in the processes that torchrun starts.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training digits (default: 5)")
    parser.add_argument("--batch", type=int, default=24, help="samples in a batch, over all processes (default: 24)")
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"expected --{name} of at least 1, but got {getattr(options, name)}; pass a positive number")

    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(options.epochs, options.batch)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
