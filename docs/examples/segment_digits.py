"""Train a segmentation net of torchvision with one image per replica, where unsynchronized batch norm does harm.

Handwritten digits are written over photographs, each with a brightness and a tint of its own, and for every pixel the
net says which digit it belongs to, if any. The three runs start from the same parameters and see the same batches in
the same order:

- "one device": `torch.nn.BatchNorm2d`, the whole batch on one device;
- "unsynchronized": one image per replica, `torch.nn.BatchNorm2d` in each of them;
- "synchronized": the same replicas with `SynchronizedBatchNorm2d`.

Digits and photographs come with scikit-learn. Run it with ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import common
    import matplotlib
    import torch
    import torch.nn.functional as F
    from common import ONE_DEVICE, STYLES, SYNCHRONIZED, UNSYNCHRONIZED
    from sklearn.datasets import load_digits, load_sample_images
    from torch import Tensor, nn
    from tqdm import tqdm

    from sync_batchnorm import DataParallelWithCallback, convert_model

    torchvision = common.import_torchvision()
    matplotlib.use("Agg")  # The picture is written to a file; no display is needed.
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
except ImportError as error:
    sys.exit(
        f"expected the packages of this example, but got {error}; install them, in the folder of the README, "
        "with: pip install '.[examples]'"
    )

__all__ = ["main"]

SIZE = 64  # of a scene, in pixels: its height and its width
DIGITS = 4  # the digits 0 to 3 are written; more would need a longer training
CLASSES = ["background", *map(str, range(DIGITS))]
# By Okabe and Ito, in an order that is also one of lightness.
CLASS_COLOURS = ListedColormap(["#F2F2F2", "#E69F00", "#56B4E9", "#009E73", "#000000"])
TEST_SCENES = 80
EVALUATIONS = 8  # in a run
SHOWN = 6  # scenes in the picture: the first ones of the test
LEARNING_RATE = 0.002
BACKGROUND_WEIGHT = 0.2  # of its pixels in the loss: there are five of them for each pixel of a digit


@dataclass
class Options:
    """What the user chose, checked."""

    devices: list[torch.device]
    steps: int
    seed: int
    picture: Path


@dataclass
class Scenes:
    """Images ``(N, 3, 64, 64)``, whose light may go beyond 0 and 1, and the class of each pixel ``(N, 64, 64)``."""

    images: Tensor
    masks: Tensor

    def to(self, device: torch.device) -> Scenes:
        return Scenes(self.images.to(device), self.masks.to(device))


@dataclass
class Curve:
    """What one run left behind: the loss of every step, and each evaluation on the test scenes."""

    train_losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    mean_ious: list[float] = field(default_factory=list)
    predictions: Tensor | None = None  # (SHOWN, 64, 64), of the last evaluation
    gradient_difference: float = 0.0  # to one device, largest, on the first batch in float64


def parse_options(arguments: list[str] | None) -> Options:
    """Read the command line; a wrong option ends the program with a sentence."""
    parser = argparse.ArgumentParser(description="Segment digits on photographs, with one image per replica.")
    common.add_options(parser, replicas=4)
    parser.add_argument("--steps", type=int, default=400, help="batches to train on (default: 400)")
    given = parser.parse_args(arguments)
    common.check_at_least(parser, EVALUATIONS, "steps", given.steps)
    common.check_seed(parser, given.seed)
    devices = common.choose_devices(parser, given.devices, given.replicas, default=4)
    return Options(devices, given.steps, given.seed, common.choose_file(parser, given.output, "segment_digits.png"))


def make_scenes(options: Options) -> tuple[Scenes, Scenes]:
    """Return scenes to train and to test on, which share no digit and no part of a photograph."""
    generator = torch.Generator().manual_seed(options.seed)
    data = load_digits()
    order = torch.randperm(len(data.target), generator=generator).numpy()
    order = order[data.target[order] < DIGITS]
    inks = torch.tensor(data.images[order], dtype=torch.float32) / 16
    labels = torch.tensor(data.target[order])
    photographs = [
        F.interpolate(torch.tensor(image).permute(2, 0, 1)[None] / 255.0, scale_factor=0.5, mode="area")[0]
        for image in load_sample_images().images
    ]
    held_out = len(labels) // 5
    cut = photographs[0].shape[-1] * 2 // 3  # left of it to train, right of it to test
    train = write_digits(
        options.steps * len(options.devices),
        inks[held_out:],
        labels[held_out:],
        [photograph[..., :cut] for photograph in photographs],
        generator,
    )
    test = write_digits(
        TEST_SCENES,
        inks[:held_out],
        labels[:held_out],
        [photograph[..., cut:] for photograph in photographs],
        generator,
    )
    return train, test


def write_digits(
    count: int, inks: Tensor, labels: Tensor, photographs: list[Tensor], generator: torch.Generator
) -> Scenes:
    """Write one digit over a random part of a photograph, in a random size, place and colour, under a random light."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    images = torch.empty(count, 3, SIZE, SIZE)
    masks = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for image, mask in zip(images, masks, strict=True):
        photograph = photographs[integer(0, len(photographs) - 1)]
        top, left = integer(0, photograph.shape[1] - SIZE), integer(0, photograph.shape[2] - SIZE)
        image.copy_(photograph[:, top : top + SIZE, left : left + SIZE])
        size, which = integer(SIZE // 2, SIZE * 3 // 4), integer(0, len(labels) - 1)
        top, left = integer(0, SIZE - size), integer(0, SIZE - size)
        place = (..., slice(top, top + size), slice(left, left + size))
        ink = F.interpolate(inks[which][None, None], (size, size), mode="bilinear", align_corners=False)[0, 0]
        opacity = ((ink - 0.15) / 0.2).clamp(0, 1)
        colour = uniform(0, 0.3, 3, 1, 1) + (0.0 if image[place].mean() > 0.5 else 0.7)  # dark on light, light on dark
        image[place] = image[place] * (1 - opacity) + colour * opacity
        mask[place][opacity > 0.5] = labels[which] + 1
        # Day, dusk or a cast of colour: what differs from image to image is what statistics of one image get wrong.
        contrast, brightness = uniform(0.5, 1.5), uniform(-0.3, 0.3)
        image.copy_((image * uniform(0.7, 1.3, 3, 1, 1) - 0.5) * contrast + 0.5 + brightness)
    return Scenes(images, masks)


def make_net() -> nn.Module:
    """Return the FCN of torchvision on the first half of a ResNet-18: 12 BatchNorm layers."""
    trunk = torchvision.models.resnet18(weights=None)
    features = torchvision.models._utils.IntermediateLayerGetter(trunk, {"layer2": "out"})  # (N, 128, 8, 8)
    head = torchvision.models.segmentation.fcn.FCNHead(128, len(CLASSES))
    for module in head.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # Each replica draws its own masks, so no run would be comparable with another.
    return torchvision.models.segmentation.FCN(features, head)


def loss_of(logits: Tensor, masks: Tensor) -> Tensor:
    weight = torch.ones(len(CLASSES), dtype=logits.dtype, device=logits.device)
    weight[0] = BACKGROUND_WEIGHT
    return F.cross_entropy(logits, masks, weight)


def evaluate(net: nn.Module, test: Scenes, curve: Curve) -> None:
    """Add test loss, accuracy and mean intersection over union of `net` in eval mode to its curve."""
    net.eval()
    with torch.no_grad():
        logits = net(test.images)["out"]
    predictions = logits.argmax(1)
    pairs = (test.masks * len(CLASSES) + predictions).flatten()
    confusion = torch.bincount(pairs, minlength=len(CLASSES) ** 2).view(len(CLASSES), len(CLASSES)).double()
    both = confusion.diag()
    either = confusion.sum(0) + confusion.sum(1) - both
    curve.steps.append(len(curve.train_losses))
    curve.losses.append(loss_of(logits, test.masks).item())
    curve.accuracies.append((both.sum() / confusion.sum()).item())
    curve.mean_ious.append((both / either.clamp(min=1)).mean().item())
    curve.predictions = predictions[:SHOWN].cpu()
    net.train()


def train(net: nn.Module, forward: nn.Module, train: Scenes, test: Scenes, options: Options, progress: tqdm) -> Curve:
    """Train `net` through `forward`, which is `net` itself or a wrapper of it."""
    curve = Curve()
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=options.steps)
    batch = len(options.devices)
    for step, (images, masks) in enumerate(zip(train.images.split(batch), train.masks.split(batch), strict=True), 1):
        loss = loss_of(forward(images)["out"], masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        curve.train_losses.append(loss.item())
        progress.update()
        if step * EVALUATIONS // options.steps > (step - 1) * EVALUATIONS // options.steps:
            evaluate(net, test, curve)
    return curve


def three_ways(start: nn.Module, devices: list[torch.device]) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return, for each run, a copy of `start` and what is called to train it."""
    nets = {name: copy.deepcopy(start) for name in (ONE_DEVICE, UNSYNCHRONIZED, SYNCHRONIZED)}
    convert_model(nets[SYNCHRONIZED])
    # A plain nn.BatchNorm2d has no replication callback, so to it the wrapper is an ordinary nn.DataParallel. There is
    # a warning of that, which is what the unsynchronized run is there to show.
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")
    return {
        ONE_DEVICE: (nets[ONE_DEVICE], nets[ONE_DEVICE]),
        UNSYNCHRONIZED: (nets[UNSYNCHRONIZED], DataParallelWithCallback(nets[UNSYNCHRONIZED], devices)),
        SYNCHRONIZED: (nets[SYNCHRONIZED], DataParallelWithCallback(nets[SYNCHRONIZED], devices)),
    }


def gradients_of_first_batch(start: nn.Module, scenes: Scenes, devices: list[torch.device]) -> dict[str, list[Tensor]]:
    """Return the gradient of every parameter on the first batch, for each run, in float64."""
    images, masks = scenes.images[: len(devices)].double(), scenes.masks[: len(devices)]
    gradients = {}
    for name, (net, forward) in three_ways(copy.deepcopy(start).double(), devices).items():
        parameters = list(net.parameters())
        gradients[name] = list(torch.autograd.grad(loss_of(forward(images)["out"], masks), parameters))
    return gradients


def run(options: Options) -> tuple[dict[str, Curve], Scenes]:
    """Return the curves of the three runs, by name, and the test scenes."""
    home = options.devices[0]
    training, test = (scenes.to(home) for scenes in make_scenes(options))
    torch.manual_seed(options.seed)
    start = make_net().to(home)
    gradients = gradients_of_first_batch(start, training, options.devices)
    curves = {}
    with tqdm(total=3 * options.steps, unit="step", mininterval=0.5) as progress:
        for name, (net, forward) in three_ways(start, options.devices).items():
            progress.set_description(f"{name:<14}")
            curves[name] = train(net, forward, training, test, options, progress)
            curves[name].gradient_difference = max(
                float((mine - theirs).abs().max())
                for mine, theirs in zip(gradients[name], gradients[ONE_DEVICE], strict=True)
            )
    return curves, test


def print_table(curves: dict[str, Curve]) -> None:
    """Print what the runs ended with, one line each."""
    print(f"{'':<14}  mean IoU  pixel accuracy  test loss  gradient difference on the first batch")
    for name, curve in curves.items():
        difference = "-" if name == ONE_DEVICE else f"{curve.gradient_difference:.2g}"
        print(
            f"{name:<14}  {curve.mean_ious[-1]:>8.2%}  {curve.accuracies[-1]:>14.2%}  {curve.losses[-1]:>9.4f}"
            f"  {difference:>38}"
        )


def draw(curves: dict[str, Curve], test: Scenes, options: Options) -> None:
    """Save curves of loss and mean IoU, and what the three nets say of the first test scenes."""
    figure = plt.figure(figsize=(14, 7.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.5])
    draw_curves(left, curves)
    draw_predictions(right, curves, test)
    figure.suptitle(
        f"FCN on ResNet-18 blocks, one image of {SIZE}x{SIZE} on each of {len(options.devices)} replicas, "
        f"{options.steps} steps"
    )
    figure.savefig(options.picture, dpi=110)
    plt.close(figure)


def draw_curves(figure: Any, curves: dict[str, Curve]) -> None:
    train_loss, test_loss, mean_iou = figure.subplots(3, 1, sharex=True)
    for name, curve in curves.items():
        window = max(1, len(curve.train_losses) // EVALUATIONS)
        means = [sum(curve.train_losses[step - window : step]) / window for step in curve.steps]
        train_loss.plot(curve.steps, means, label=name, **STYLES[name])
        test_loss.plot(curve.steps, curve.losses, **STYLES[name])
        mean_iou.plot(curve.steps, [100 * value for value in curve.mean_ious], **STYLES[name])
    train_loss.set(title="Training loss, mean since the last point", ylabel="cross entropy")
    test_loss.set(title="Test loss, in eval mode", ylabel="cross entropy")
    mean_iou.set(title="Test mean IoU, in eval mode", ylabel="percent")
    for axes in (train_loss, test_loss, mean_iou):
        common.tidy(axes, "step" if axes is mean_iou else "")
        axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=3)


def draw_predictions(figure: Any, curves: dict[str, Curve], test: Scenes) -> None:
    rows = {
        "image": test.images[:SHOWN].cpu().clamp(0, 1).movedim(1, -1),  # (N, 3, H, W) -> (N, H, W, 3)
        "truth": test.masks[:SHOWN].cpu(),
        **{name: curve.predictions for name, curve in curves.items()},
    }
    grid = figure.subplots(len(rows), SHOWN)
    for axes_of_row, (name, pictures) in zip(grid, rows.items(), strict=True):
        for axes, picture in zip(axes_of_row, pictures, strict=True):
            axes.imshow(picture.numpy(), cmap=CLASS_COLOURS, vmin=0, vmax=len(CLASSES) - 1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("#B0B0B0")
        axes_of_row[0].set_ylabel(name)
    patches = [Patch(facecolor=CLASS_COLOURS(i), edgecolor="#B0B0B0", label=name) for i, name in enumerate(CLASSES)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(CLASSES), frameon=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the example and return the exit status: 1 if the gradients of a run are not what they should be."""
    options = parse_options(arguments)
    common.prepare(options.devices)
    curves, test = run(options)
    print_table(curves)
    draw(curves, test, options)
    differences = {name: curve.gradient_difference for name, curve in curves.items()}
    correct = common.judge("on the first batch, in float64,", "gradient", differences)
    print(f"Curves and predictions are in {options.picture}.")
    return 0 if correct else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
