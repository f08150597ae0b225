"""Train a net that spells handwritten digits: arguments that are not all cut by rows, on replicas as on one device.

Captions are a list of strings, one for each image; the hidden state of the RNN has its samples along dimension 1; and
every replica needs all weights of the letters. `in_dims` says so, and `out_dims` joins the lists of spelled words. The
three runs start from the same parameters and see the same batches in the same order: one device, replicas whose batch
norms do not synchronize, and replicas whose do.

The digits come with scikit-learn. Run it with ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings

try:
    import common
    import torch
    import torch.nn.functional as F
    from common import ONE_DEVICE, SYNCHRONIZED, UNSYNCHRONIZED
    from sklearn.datasets import load_digits
    from torch import Tensor, nn

    from sync_batchnorm import DataParallelWithCallback, convert_model
except ImportError as error:
    sys.exit(
        f"expected the packages of this example, but got {error}; install them, in the folder of the README, "
        "with: pip install '.[examples]'"
    )

__all__ = ["main"]

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LETTERS = " " + "".join(sorted({letter for word in WORDS for letter in word}))  # the space ends a word
LONGEST = max(map(len, WORDS)) + 1
WIDTH = 32
TEST_SAMPLES = 300


class Speller(nn.Module):
    """Spells the digit on each image, letter by letter."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU()]
        convolutions += [nn.Conv2d(16, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.SiLU()]
        self.features = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * WIDTH, WIDTH))
        self.letters, self.out = nn.Embedding(len(LETTERS), WIDTH), nn.Linear(WIDTH, len(LETTERS))
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)

    def forward(
        self, images: Tensor, captions: list[str], hidden: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, list[str]]:
        """Return the loss of each caption (N,), the last hidden state (1, N, WIDTH), and the spelled words.

        Args:
            images, captions: one for each sample.
            hidden: the state before the first letter, ``(1, N, WIDTH)``.
            weights: of each letter in the loss.
        """
        rows = [[LETTERS.index(letter) for letter in caption.ljust(LONGEST)] for caption in captions]
        target = torch.tensor(rows, device=images.device)  # (N, LONGEST)
        before = F.pad(target[:, :-1], (1, 0))  # the letter before each
        output, hidden = self.rnn(self.letters(before) + self.features(images)[:, None], hidden)
        scores = self.out(output)  # (N, LONGEST, letters)
        losses = F.cross_entropy(scores.transpose(1, 2), target, weights, reduction="none").mean(1)
        words = ["".join(LETTERS[i] for i in row).split(" ")[0] for row in scores.argmax(2).tolist()]
        return losses, hidden, words


def weights_of_letters() -> Tensor:
    """Return weights that make rare letters count as much as frequent ones."""
    text = "".join(word.ljust(LONGEST) for word in WORDS)
    weights = torch.tensor([1 / text.count(letter) for letter in LETTERS], dtype=torch.float64)
    return weights / weights.mean()


def parse_options(arguments: list[str] | None) -> tuple[list[torch.device], int, int]:
    parser = argparse.ArgumentParser(description="Spell handwritten digits, with lists and states as arguments.")
    parser.add_argument("--replicas", type=int, help="how many (default: one for each GPU, or 3 on the CPU)")
    parser.add_argument("--devices", help="of the replicas, such as cpu or 0,1")
    parser.add_argument("--steps", type=int, default=250, help="batches to train on (default: 250)")
    parser.add_argument("--seed", type=int, default=0, help="for parameters and order (default: 0)")
    given = parser.parse_args(arguments)
    common.check_at_least(parser, 1, "steps", given.steps)
    common.check_seed(parser, given.seed)
    return common.choose_devices(parser, given.devices, given.replicas, default=3), given.steps, given.seed


def main(arguments: list[str] | None = None) -> int:
    """Run the example and return the exit status: 1 if a run is not what it should be."""
    devices, steps, seed = parse_options(arguments)
    common.prepare(devices)
    warnings.filterwarnings("ignore", r"\d+ BatchNorm")  # The unsynchronized run is to show what goes wrong.
    torch.manual_seed(seed)
    nets: dict[str, nn.Module] = {ONE_DEVICE: Speller().to(devices[0], torch.float64)}
    for name in (UNSYNCHRONIZED, SYNCHRONIZED):
        nets[name] = copy.deepcopy(nets[ONE_DEVICE])
    in_dims = {"captions": 0, "hidden": 1, "weights": None}
    parallel = {
        name: DataParallelWithCallback(
            net if name == UNSYNCHRONIZED else convert_model(net), devices, in_dims=in_dims, out_dims=(0, 1, 0)
        )
        for name, net in nets.items()
        if name != ONE_DEVICE
    }
    data = load_digits()
    images = torch.tensor(data.images, device=devices[0])[:, None] / 16  # (N, 1, 8, 8), in float64
    captions = [WORDS[label] for label in data.target]
    print(f"{'':<14}  words spelled right  largest parameter difference")
    differences = {}
    for name, net in nets.items():
        train(net, parallel.get(name, net), images[TEST_SAMPLES:], captions[TEST_SAMPLES:], steps, len(devices), seed)
        right = spelled(net, images[:TEST_SAMPLES], captions[:TEST_SAMPLES])
        pairs = zip(net.parameters(), nets[ONE_DEVICE].parameters(), strict=True)
        differences[name] = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
        print(
            f"{name:<14}  {right:>19.1%}  {'-' if name == ONE_DEVICE else f'{differences[name]:.2g}':>28}", flush=True
        )
    return 0 if common.judge("after the whole training", "parameter", differences) else 1


def train(
    net: nn.Module, forward: nn.Module, images: Tensor, captions: list[str], steps: int, replicas: int, seed: int
) -> None:
    """Train `net` through `forward`, which is `net` itself or a wrapper of it."""
    generator, weights = torch.Generator().manual_seed(seed), weights_of_letters().to(images.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batch = 4 * replicas - 1  # so that the last replica gets one sample less
    for _ in range(steps):
        rows = torch.randint(len(captions), (batch,), generator=generator)
        hidden = images.new_zeros(1, batch, WIDTH)
        losses, _, _ = forward(images[rows.to(images.device)], [captions[i] for i in rows], hidden, weights=weights)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()


@torch.no_grad()
def spelled(net: nn.Module, images: Tensor, captions: list[str]) -> float:
    """Return the share of words that `net` spells right in eval mode, each letter after the right ones."""
    net.eval()
    hidden, weights = images.new_zeros(1, len(images), WIDTH), weights_of_letters().to(images.device)
    words = net(images, captions, hidden, weights)[2]
    return sum(word == caption for word, caption in zip(words, captions, strict=True)) / len(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
