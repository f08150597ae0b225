"""Train a net on real handwritten digits three ways: synchronized replicas compute what one device computes.

The three runs start from the same parameters and see the same batches in the same order:

- "one device": `torch.nn.BatchNorm2d`, the whole batch on one device;
- "unsynchronized": the batch cut over replicas, `torch.nn.BatchNorm2d` in each of them, 2 samples a replica;
- "synchronized": the same replicas with `SynchronizedBatchNorm2d`.

The digits are the 1,797 of scikit-learn, which come with its package. Run it with ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

try:
    import matplotlib
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from tqdm import tqdm

    from sync_batchnorm import DataParallelWithCallback, convert_model

    matplotlib.use("Agg")  # The picture is written to a file; no display is needed.
    import matplotlib.pyplot as plt
except ImportError as error:
    sys.exit(
        f"expected the packages of this example, but got {error}; install them, in the folder of the README, "
        "with: pip install '.[test]'"
    )

__all__ = ["main"]

TEST_SAMPLES = 360  # a fifth of the digits
SAMPLES_A_REPLICA = 2  # few, as on devices that large inputs fill: where statistics of a slice are noise
EQUAL = 1e-8  # what the largest parameter difference in float64 may be after the whole training
LEARNING_RATE = 0.02

ONE_DEVICE, UNSYNCHRONIZED, SYNCHRONIZED = "one device", "unsynchronized", "synchronized"


@dataclass
class Options:
    """What the user chose, checked."""

    devices: list[torch.device]
    batch: int
    epochs: int
    seed: int
    dtype: torch.dtype
    output: Path


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
    seconds_a_step: float = 0.0

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
    parser.add_argument("--replicas", type=int, help="number of replicas (default: one for each GPU, or 4)")
    parser.add_argument("--batch", type=int, help="samples in a batch, over all replicas (default: 2 a replica)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training digits (default: 8)")
    parser.add_argument(
        "--devices",
        help="devices, separated by commas, that the replicas use in turn, as cpu or 0,1 or cuda:0 "
        "(default: all GPUs if there are several, otherwise cpu)",
    )
    parser.add_argument("--seed", type=int, default=0, help="for parameters, split and order (default: 0)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="default: float64")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    given = parser.parse_args(arguments)

    gpus = torch.cuda.device_count()
    names = given.devices.split(",") if given.devices else [str(i) for i in range(gpus)] if gpus > 1 else ["cpu"]
    replicas = given.replicas if given.replicas is not None else len(names) if len(names) > 1 else 4
    if replicas < 2:
        parser.error(f"expected at least 2 replicas, but got {replicas}; there is nothing to synchronize in one")
    batch = given.batch if given.batch is not None else SAMPLES_A_REPLICA * replicas
    train_samples = len(load_digits().target) - TEST_SAMPLES
    if not replicas <= batch <= train_samples:
        parser.error(
            f"expected a batch of {replicas} samples (one a replica) to {train_samples} (all there are to train on), "
            f"but got {batch}"
        )
    if given.epochs < 1:
        parser.error(f"expected at least 1 epoch, but got {given.epochs}")
    try:
        devices = [_usable_device(names[i % len(names)]) for i in range(replicas)]
        DataParallelWithCallback(nn.Identity(), devices)
    except (RuntimeError, AssertionError, ValueError) as error:  # Torch without CUDA raises an AssertionError.
        parser.error(f"expected devices of this machine, but got {given.devices!r}: {error}")
    try:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "train_digits.png").unlink(
            missing_ok=True
        )  # Otherwise an old picture might pass for a new one.
    except OSError as error:
        parser.error(f"expected an output folder that can be written to, but got {str(given.output)!r}; {error}")
    if not -(2**63) <= given.seed < 2**64:
        parser.error(f"expected a seed of 64 bits, but got {given.seed}")
    return Options(devices, batch, given.epochs, given.seed, getattr(torch, given.dtype), given.output)


def _usable_device(name: str) -> torch.device:
    device = torch.device(int(name)) if name.strip().isdigit() else torch.device(name.strip())
    torch.zeros(1, device=device).item()
    return device


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
    """Return a net whose last batch norm sees maps of 2x2: with 2 samples, 8 values a channel."""

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
    curve.seconds_a_step = seconds / num_steps
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
    forwards = {
        ONE_DEVICE: nets[ONE_DEVICE],
        # A plain nn.BatchNorm2d has no replication callback, so to it the wrapper is an ordinary nn.DataParallel.
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
    print(f"{'':<14}  test accuracy  test loss  largest parameter difference  seconds a step")
    for name, curve in curves.items():
        difference = "-" if name == ONE_DEVICE else f"{curve.differences(curves[ONE_DEVICE])[-1]:.2g}"
        print(
            f"{name:<14}  {curve.accuracies[-1]:>13.2%}  {curve.losses[-1]:>9.4f}  {difference:>28}"
            f"  {curve.seconds_a_step:>14.4f}"
        )


def draw(curves: dict[str, Curve], options: Options, path: Path) -> None:
    """Save test loss, test accuracy and the difference to one device over the epochs."""
    # Colours by Okabe and Ito, which stay apart for colour-blind readers; width, dash and marker tell the lines apart
    # without colour. The synchronized line lies on the one-device line, which is wide enough to be seen under it.
    styles = {
        ONE_DEVICE: {"color": "#B0B0B0", "linewidth": 7, "solid_capstyle": "round"},
        UNSYNCHRONIZED: {"color": "#D55E00", "linewidth": 1.8, "linestyle": "--", "marker": "s", "markersize": 5},
        SYNCHRONIZED: {"color": "#0072B2", "linewidth": 1.8, "marker": "o", "markersize": 5},
    }
    epochs = range(1, options.epochs + 1)
    figure, (loss, accuracy, difference) = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    for name, curve in curves.items():
        loss.plot(epochs, curve.losses, label=name, **styles[name])
        accuracy.plot(epochs, [100 * value for value in curve.accuracies], **styles[name])
        if name != ONE_DEVICE:
            # The logarithmic axis has no place for exactly equal parameters; this is far below one rounding error.
            values = [max(value, 1e-18) for value in curve.differences(curves[ONE_DEVICE])]
            difference.semilogy(epochs, values, **styles[name])
    loss.set(title="Test loss", ylabel="cross entropy")
    loss.set_ylim(bottom=0)
    accuracy.set(title="Test accuracy", ylabel="percent of test digits")
    difference.set(title="Difference to one device", ylabel="largest parameter difference")
    if options.dtype == torch.float64:
        difference.axhline(EQUAL, color="black", linewidth=1, linestyle=":")
        difference.annotate("counts as equal below", (1, EQUAL), (2, -12), textcoords="offset points", fontsize=9)
    for axes in (loss, accuracy, difference):
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"1,797 handwritten digits, batches of {options.batch} on {len(options.devices)} replicas, "
        f"{str(options.dtype).removeprefix('torch.')}"
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=4)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def verdict(curves: dict[str, Curve], options: Options) -> bool:
    """Say whether the synchronized run is the one-device run, and return whether all is as it should be."""
    apart = {name: curves[name].differences(curves[ONE_DEVICE])[-1] for name in (UNSYNCHRONIZED, SYNCHRONIZED)}
    if options.dtype != torch.float64:
        print("Runs in float32 differ by rounding, so equality is checked with --dtype float64 only.")
        return True
    for name, expected in ((SYNCHRONIZED, True), (UNSYNCHRONIZED, False)):
        equal = apart[name] <= EQUAL
        print(
            f"{'As expected' if equal == expected else 'NOT as expected'}: after the whole training the {name} run "
            f"{'equals' if equal else 'differs from'} the one-device run: largest difference {apart[name]:.2g}, "
            f"and up to {EQUAL:g} counts as equal."
        )
    return apart[SYNCHRONIZED] <= EQUAL < apart[UNSYNCHRONIZED]


def main(arguments: list[str] | None = None) -> int:
    """Run the example and return the exit status: 1 if a float64 run is not what it should be."""
    options = parse_options(arguments)
    if options.devices[0].type == "cpu":
        # The replicas are threads of one process and share the cores; a convolution of this size needs one of them.
        torch.set_num_threads(1)
    print(f"{len(options.devices)} replicas on {', '.join(dict.fromkeys(map(str, options.devices)))}", flush=True)
    curves = train_three_ways(options)
    print_table(curves)
    path = options.output / "train_digits.png"
    draw(curves, options, path)
    correct = verdict(curves, options)
    print(f"The curves are in {path}.")
    return 0 if correct else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
