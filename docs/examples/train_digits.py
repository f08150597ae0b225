"""Train a net on real handwritten digits three ways: synchronized replicas compute what one device computes.

The three runs start from the same parameters and see the same batches in the same order:

- "one device": `torch.nn.BatchNorm2d`, the whole batch on one device;
- "unsynchronized": the batch cut over replicas, `torch.nn.BatchNorm2d` in each of them, 2 samples per replica;
- "synchronized": the same replicas with `SynchronizedBatchNorm2d`.

The digits are the 1,797 of scikit-learn, which come with its package. Run it with ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

try:
    import common
    import matplotlib
    import torch
    import torch.nn.functional as F
    from common import EQUAL, ONE_DEVICE, STYLES, SYNCHRONIZED, UNSYNCHRONIZED
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from tqdm import tqdm

    from sync_batchnorm import DataParallelWithCallback, convert_model

    matplotlib.use("Agg")  # The picture is written to a file; no display is needed.
    import matplotlib.pyplot as plt
except ImportError as error:
    sys.exit(
        f"expected the packages of this example, but got {error}; install them, in the folder of the README, "
        "with: pip install '.[examples]'"
    )

__all__ = ["main"]

TEST_SAMPLES = 360  # a fifth of the digits
SAMPLES_PER_REPLICA = 2  # few, as on devices that large inputs fill: where statistics of a slice are noise
LEARNING_RATE = 0.02


@dataclass
class Options:
    """What the user chose, checked."""

    devices: list[torch.device]
    batch: int
    epochs: int
    seed: int
    dtype: torch.dtype
    picture: Path


@dataclass
class Digits:
    """Images ``(N, 1, 8, 8)`` between 0 and 1 and labels ``(N,)``."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class Curve:
    """What one run left behind, epoch by epoch."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    parameters: list[list[Tensor]] = field(default_factory=list)
    seconds_per_step: float = 0.0

    def differences(self, other: Curve) -> list[float]:
        """Return the largest absolute difference of any parameter to that of `other`, for each epoch."""
        return [
            max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self.parameters, other.parameters, strict=True)
        ]


def parse_options(arguments: list[str] | None) -> Options:
    """Read the command line; a wrong option ends the program with a sentence."""
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits with and without synchronized batch norm."
    )
    common.add_options(parser, replicas=4)
    parser.add_argument("--batch", type=int, help="samples in a batch, over all replicas (default: 2 a replica)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training digits (default: 8)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="default: float64")
    given = parser.parse_args(arguments)

    devices = common.choose_devices(parser, given.devices, given.replicas, default=4)
    replicas = len(devices)
    batch = given.batch if given.batch is not None else SAMPLES_PER_REPLICA * replicas
    train_samples = len(load_digits().target) - TEST_SAMPLES
    if not replicas <= batch <= train_samples:
        parser.error(
            f"expected a batch of {replicas} samples (one per replica) to {train_samples} (all there are to train on), "
            f"but got {batch}"
        )
    common.check_at_least(parser, 1, "epochs", given.epochs)
    common.check_seed(parser, given.seed)
    picture = common.choose_file(parser, given.output, "train_digits.png")
    return Options(devices, batch, given.epochs, given.seed, getattr(torch, given.dtype), picture)


def load(options: Options) -> Digits:
    """Split the digits at random into training and test, on the first device."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=options.dtype).unsqueeze(1) / 16  # (N, 8, 8) -> (N, 1, 8, 8)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    parts = (images[train], labels[train], images[test], labels[test])
    return Digits(*(part.to(options.devices[0]) for part in parts))


def make_net() -> nn.Module:
    """Return a net whose last batch norm sees maps of 2x2: with 2 samples, 8 values per channel."""

    def block(in_channels: int, out_channels: int, stride: int) -> nn.Module:
        conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        # Smooth, unlike ReLU: one that switches a unit because of rounding makes an error of its own, which training
        # magnifies. With ReLU two float32 runs on one device, from parameters 1e-7 apart, end 1e-2 apart.
        return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.SiLU())

    return nn.Sequential(block(1, 16, 1), block(16, 32, 2), block(32, 32, 2), nn.Flatten(), nn.Linear(128, 10))


def train(net: nn.Module, forward: nn.Module, digits: Digits, options: Options, progress: tqdm) -> Curve:
    """Train `net` through `forward`, which is `net` itself or a wrapper of it."""
    curve = Curve()
    order = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=0.9)
    num_steps = options.epochs * steps_an_epoch(digits, options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    seconds = 0.0
    for _ in range(options.epochs):
        forward.train()
        start = time.perf_counter()
        for rows in torch.randperm(len(digits.train_labels), generator=order).split(options.batch):
            rows = rows.to(options.devices[0])
            loss = F.cross_entropy(forward(digits.train_images[rows]), digits.train_labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.update()
        seconds += time.perf_counter() - start
        net.eval()
        with torch.no_grad():
            logits = net(digits.test_images)
            curve.losses.append(F.cross_entropy(logits, digits.test_labels).item())
        curve.accuracies.append((logits.argmax(1) == digits.test_labels).double().mean().item())
        curve.parameters.append([parameter.detach().cpu().clone() for parameter in net.parameters()])
    curve.seconds_per_step = seconds / num_steps
    return curve


def steps_an_epoch(digits: Digits, options: Options) -> int:
    return -(-len(digits.train_labels) // options.batch)  # rounded up: the last batch may be a smaller one


def train_three_ways(options: Options) -> dict[str, Curve]:
    """Return the curves of the three runs, by name."""
    digits = load(options)
    torch.manual_seed(options.seed)
    start = make_net().to(options.devices[0], options.dtype)
    nets = {name: copy.deepcopy(start) for name in (ONE_DEVICE, UNSYNCHRONIZED, SYNCHRONIZED)}
    convert_model(nets[SYNCHRONIZED])
    # A plain nn.BatchNorm2d has no replication callback, so to it the wrapper is an ordinary nn.DataParallel. There is
    # a warning of that, which is what the unsynchronized run is there to show.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    forwards = {
        ONE_DEVICE: nets[ONE_DEVICE],
        UNSYNCHRONIZED: DataParallelWithCallback(nets[UNSYNCHRONIZED], options.devices),
        SYNCHRONIZED: DataParallelWithCallback(nets[SYNCHRONIZED], options.devices),
    }
    curves = {}
    total = len(forwards) * options.epochs * steps_an_epoch(digits, options)
    with tqdm(total=total, unit="step", mininterval=0.5) as progress:
        for name, forward in forwards.items():
            progress.set_description(f"{name:<14}")
            curves[name] = train(nets[name], forward, digits, options, progress)
    return curves


def print_table(curves: dict[str, Curve]) -> None:
    """Print what the runs ended with, one line each."""
    print(f"{'':<14}  test accuracy  test loss  largest parameter difference  seconds per step")
    for name, curve in curves.items():
        difference = "-" if name == ONE_DEVICE else f"{curve.differences(curves[ONE_DEVICE])[-1]:.2g}"
        print(
            f"{name:<14}  {curve.accuracies[-1]:>13.2%}  {curve.losses[-1]:>9.4f}  {difference:>28}"
            f"  {curve.seconds_per_step:>16.4f}"
        )


def draw(curves: dict[str, Curve], options: Options) -> None:
    """Save test loss, test accuracy and the difference to one device over the epochs."""
    epochs = range(1, options.epochs + 1)
    figure, (loss, accuracy, difference) = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    for name, curve in curves.items():
        loss.plot(epochs, curve.losses, label=name, **STYLES[name])
        accuracy.plot(epochs, [100 * value for value in curve.accuracies], **STYLES[name])
        if name != ONE_DEVICE:
            # The logarithmic axis has no place for exactly equal parameters; this is far below one rounding error.
            values = [max(value, 1e-18) for value in curve.differences(curves[ONE_DEVICE])]
            difference.semilogy(epochs, values, **STYLES[name])
    loss.set(title="Test loss", ylabel="cross entropy")
    loss.set_ylim(bottom=0)
    accuracy.set(title="Test accuracy", ylabel="percent of test digits")
    difference.set(title="Difference to one device", ylabel="largest parameter difference")
    if options.dtype == torch.float64:
        difference.axhline(EQUAL, color="black", linewidth=1, linestyle=":")
        difference.annotate("counts as equal below", (1, EQUAL), (2, -12), textcoords="offset points", fontsize=9)
    for axes in (loss, accuracy, difference):
        common.tidy(axes, "epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(
        f"1,797 handwritten digits, batches of {options.batch} on {len(options.devices)} replicas, "
        f"{str(options.dtype).removeprefix('torch.')}"
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=4)
    figure.savefig(options.picture, dpi=120)
    plt.close(figure)


def verdict(curves: dict[str, Curve], options: Options) -> bool:
    """Say whether the synchronized run is the one-device run, and return whether all is as it should be."""
    if options.dtype != torch.float64:
        print("Runs in float32 differ by rounding, so equality is checked with --dtype float64 only.")
        return True
    apart = {name: curves[name].differences(curves[ONE_DEVICE])[-1] for name in (UNSYNCHRONIZED, SYNCHRONIZED)}
    return common.judge("after the whole training", "parameter", apart)


def main(arguments: list[str] | None = None) -> int:
    """Run the example and return the exit status: 1 if a float64 run is not what it should be."""
    options = parse_options(arguments)
    common.prepare(options.devices)
    curves = train_three_ways(options)
    print_table(curves)
    draw(curves, options)
    correct = verdict(curves, options)
    print(f"The curves are in {options.picture}.")
    return 0 if correct else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
