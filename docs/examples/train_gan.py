"""Train a GAN with a gradient penalty on replicas: a gradient of a gradient, through synchronized batch norm.

The penalty is R1: half the mean of the squared gradient of the discriminator's output with respect to the real images
(Mescheder, Geiger and Nowozin 2018, equation 9). Its own gradient differentiates the backward pass of every BatchNorm
layer once more. Generator and discriminator both have such layers. For the first steps three pairs of nets are trained
side by side, from the same parameters and with the same batches, in float64:

- "one device": `torch.nn.BatchNorm1d`, the whole batch on one device;
- "unsynchronized": the batch cut over replicas, `torch.nn.BatchNorm1d` in each of them;
- "synchronized": the same replicas with `SynchronizedBatchNorm1d`; this pair then goes on until it draws digits.

The digits are the 1,797 of scikit-learn, which come with its package. Run it with ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from dataclasses import dataclass
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

NOISE = 16  # numbers from which the generator makes an image
WIDTH = 128
BATCH = 64
PENALTY = 1.0  # the factor of the R1 penalty
LEARNING_RATE = 0.005
SAMPLES = 6, 8  # rows and columns of generated images in the picture


@dataclass
class Options:
    """What the user chose, checked."""

    devices: list[torch.device]
    steps: int
    compared: int
    seed: int
    picture: Path


def parse_options(arguments: list[str] | None) -> Options:
    """Read the command line; a wrong option ends the program with a sentence."""
    parser = argparse.ArgumentParser(description="Train a GAN with a gradient penalty on handwritten digits.")
    common.add_options(parser, replicas=2)
    parser.add_argument("--steps", type=int, default=600, help="steps of the synchronized pair (default: 600)")
    parser.add_argument(
        "--compared",
        type=int,
        default=20,
        help="first steps, in which the other pairs are trained too; later ones are of little use, because training "
        "magnifies rounding errors (default: 20)",
    )
    given = parser.parse_args(arguments)
    common.check_at_least(parser, 1, "compared", given.compared)
    common.check_at_least(parser, given.compared, "steps", given.steps)
    common.check_seed(parser, given.seed)
    devices = common.choose_devices(parser, given.devices, given.replicas, default=2)
    if len(devices) > BATCH // 2:
        parser.error(
            f"expected at most {BATCH // 2} replicas, but got {len(devices)}; plain layers need 2 of the {BATCH} "
            "samples on each"
        )
    picture = common.choose_file(parser, given.output, "train_gan.png")
    return Options(devices, given.steps, given.compared, given.seed, picture)


def make_generator() -> nn.Module:
    """Return a net from ``(N, 16)`` to images ``(N, 1, 8, 8)`` between 0 and 1."""
    return nn.Sequential(
        nn.Linear(NOISE, WIDTH, bias=False),
        nn.BatchNorm1d(WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.BatchNorm1d(WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, 64),
        nn.Sigmoid(),
        nn.Unflatten(1, (1, 8, 8)),
    )


def make_discriminator() -> nn.Module:
    """Return a net from images ``(N, 1, 8, 8)`` to one number each, larger for those that it takes for real."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.BatchNorm1d(WIDTH),
        nn.SiLU(),  # smooth: a second derivative through ReLU would see the BatchNorm layers only
        nn.Linear(WIDTH, 1),
    )


class Pair:
    """A generator, a discriminator, how they are called, and their optimizers."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module, devices: list[torch.device] | None) -> None:
        self.nets = generator, discriminator
        self.generate, self.judge = (
            (generator, discriminator)
            if devices is None
            else (DataParallelWithCallback(net, devices) for net in self.nets)
        )
        self.optimizers = [torch.optim.Adam(net.parameters(), LEARNING_RATE, betas=(0.5, 0.9)) for net in self.nets]

    def step(self, real: Tensor, noise: Tensor) -> float:
        """Update the discriminator, then the generator; return the penalty."""
        of_generator, of_discriminator = self.optimizers
        with torch.no_grad():
            fake = self.generate(noise)
        real.requires_grad_()
        of_real, of_fake = self.judge(real), self.judge(fake)
        # With create_graph the gradient can be differentiated: loss.backward() goes through this backward too.
        (slope,) = torch.autograd.grad(of_real.sum(), real, create_graph=True)
        penalty = slope.square().sum(dim=(1, 2, 3)).mean() / 2
        loss = F.softplus(-of_real).mean() + F.softplus(of_fake).mean() + PENALTY * penalty
        of_discriminator.zero_grad()
        loss.backward()
        of_discriminator.step()

        loss = F.softplus(-self.judge(self.generate(noise))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        return penalty.item()

    def difference(self, other: Pair) -> float:
        """Return the largest absolute difference of any parameter to that of `other`."""
        pairs = [
            (mine, theirs)
            for net, other_net in zip(self.nets, other.nets, strict=True)
            for mine, theirs in zip(net.parameters(), other_net.parameters(), strict=True)
        ]
        return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


@dataclass
class Result:
    """Differences to one device after each compared step, and the penalty of the last of them, by name of the run."""

    differences: dict[str, list[float]]
    penalties: dict[str, float]
    real: Tensor  # (N, 1, 8, 8)
    samples: Tensor  # (48, 1, 8, 8)


def make_pairs(options: Options) -> dict[str, Pair]:
    """Return three pairs with the same parameters."""
    torch.manual_seed(options.seed)
    nets = [net.to(options.devices[0], torch.float64) for net in (make_generator(), make_discriminator())]
    synchronized = [convert_model(copy.deepcopy(net)) for net in nets]
    # A plain nn.BatchNorm1d has no replication callback, so to it the wrapper is an ordinary nn.DataParallel. There is
    # a warning of that, which is what the unsynchronized run is there to show.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    return {
        UNSYNCHRONIZED: Pair(*copy.deepcopy(nets), options.devices),
        SYNCHRONIZED: Pair(*synchronized, options.devices),
        ONE_DEVICE: Pair(*nets, None),
    }


def train(options: Options) -> Result:
    """Train the three pairs side by side, then the synchronized one alone."""
    home = options.devices[0]
    digits = torch.tensor(load_digits().images, device=home).unsqueeze(1) / 16  # (N, 8, 8) -> (N, 1, 8, 8)
    pairs = make_pairs(options)
    random = torch.Generator().manual_seed(options.seed)

    def noise(count: int) -> Tensor:
        return torch.randn(count, NOISE, dtype=torch.float64, generator=random).to(home)

    differences: dict[str, list[float]] = {UNSYNCHRONIZED: [], SYNCHRONIZED: []}
    penalties: dict[str, float] = {}
    with tqdm(total=options.steps, unit="step", mininterval=0.5) as progress:
        for step in range(options.steps):
            rows = torch.randint(len(digits), (BATCH,), generator=random)
            real, of_step = digits[rows.to(home)], noise(BATCH)
            if step < options.compared:
                penalties = {name: pair.step(real.clone(), of_step) for name, pair in pairs.items()}
                for name, values in differences.items():
                    values.append(pairs[name].difference(pairs[ONE_DEVICE]))
            else:
                pairs[SYNCHRONIZED].step(real, of_step)
            progress.update()
    generator = pairs[SYNCHRONIZED].nets[0].eval()
    with torch.no_grad():
        samples = generator(noise(SAMPLES[0] * SAMPLES[1]))
    return Result(differences, penalties, digits.cpu(), samples.cpu())


def print_table(result: Result, options: Options) -> None:
    """Print what the pairs had in the last step that was compared, one line each."""
    print(f"{f'step {options.compared}':<14}  gradient penalty  largest parameter difference")
    for name in (ONE_DEVICE, UNSYNCHRONIZED, SYNCHRONIZED):
        difference = "-" if name == ONE_DEVICE else f"{result.differences[name][-1]:.2g}"
        print(f"{name:<14}  {result.penalties[name]:>16.12f}  {difference:>28}")


def draw(result: Result, options: Options) -> None:
    """Save the differences over the compared steps, and generated digits beside real ones."""
    figure, (difference, real, samples) = plt.subplots(
        1, 3, figsize=(13, 4), layout="constrained", width_ratios=[1.2, 1, 1]
    )
    for name, values in result.differences.items():
        # The logarithmic axis has no place for exactly equal parameters; this is far below one rounding error.
        steps = range(1, len(values) + 1)
        difference.semilogy(steps, [max(value, 1e-18) for value in values], label=name, **STYLES[name])
    difference.axhline(EQUAL, color="black", linewidth=1, linestyle=":")
    difference.annotate("counts as equal below", (1, EQUAL), (2, -12), textcoords="offset points", fontsize=9)
    difference.set(title="Difference to one device", ylabel="largest parameter difference")
    difference.xaxis.get_major_locator().set_params(integer=True)
    difference.legend(frameon=False, loc="center right")
    common.tidy(difference, "step")
    for axes, images, title in (
        (real, result.real, "Real digits"),
        (samples, result.samples, f"Generated after {options.steps} synchronized steps"),
    ):
        axes.imshow(tiled(images).numpy(), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=title, xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    figure.suptitle(f"GAN with R1 gradient penalty, batches of {BATCH} on {len(options.devices)} replicas, float64")
    figure.savefig(options.picture, dpi=110)
    plt.close(figure)


def tiled(images: Tensor) -> Tensor:
    """Return the first images as one, with an empty line of pixels between them."""
    rows, columns = SAMPLES
    padded = F.pad(images[: rows * columns], (1, 1, 1, 1))  # (N, 1, 8, 8) -> (N, 1, 10, 10)
    return padded.view(rows, columns, 10, 10).transpose(1, 2).reshape(rows * 10, columns * 10)


def main(arguments: list[str] | None = None) -> int:
    """Run the example and return the exit status: 1 if a pair is not what it should be."""
    options = parse_options(arguments)
    common.prepare(options.devices)
    result = train(options)
    print_table(result, options)
    draw(result, options)
    differences = {name: values[-1] for name, values in result.differences.items()}
    correct = common.judge(f"after {options.compared} steps", "parameter", differences)
    print(f"Differences and samples are in {options.picture}.")
    return 0 if correct else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
