"""Draws what this library changes, for the README: one batch on two GPUs is normalized with two means, or with one.

The outputs that it draws are those of the layers, on two replicas on the CPU.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, convert_model

BATCH = torch.tensor([-2.6, -2.1, -1.2, -0.7, 0.9, 1.3, 2.1, 2.7])  # the first half is on GPU 0
COLORS = "#1f77b4", "#ff7f0e"
WIDTH, HEIGHT = 400, 190  # of one panel


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def row(left: float, y: float, values: Tensor, means: Sequence[float]) -> list[str]:
    """Return a number line with one dot for each sample, in the colour of its GPU, and one tick for each mean."""
    middle, unit = left + WIDTH / 2, 55
    parts = [f'<path d="M{left + 20} {y}H{left + WIDTH - 20}" stroke="#999"/>']
    for mean, color in zip(means, COLORS if len(means) > 1 else ["#000"] * len(means), strict=True):
        parts.append(f'<path d="M{middle + unit * mean:.1f} {y - 20}v40" stroke="{color}" stroke-width="3"/>')
    for i, value in enumerate(values.tolist()):
        color = COLORS[i >= len(values) // 2]
        parts.append(f'<circle cx="{middle + unit * value:.1f}" cy="{y}" r="7" fill="{color}" fill-opacity="0.8"/>')
    return parts


def panel(left: float, title: str, layer: nn.Module, means: Sequence[float], result: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ BatchNorm")  # One of the two layers is not to synchronize.
        outputs = DataParallelWithCallback(layer, ["cpu"] * 2)(BATCH[:, None])[:, 0].detach()
    return [
        text(left + WIDTH / 2, 25, title, 'text-anchor="middle" font-weight="bold"'),
        *row(left, 65, BATCH, means),
        text(left + 20, 100, "normalized:"),
        *row(left, 130, outputs, []),
        text(left + WIDTH / 2, 170, result, 'text-anchor="middle"'),
    ]


def drawing() -> str:
    halves = [half.mean().item() for half in BATCH.chunk(2)]
    plain, synchronized = nn.BatchNorm1d(1), convert_model(nn.BatchNorm1d(1))
    parts = [
        *panel(0, "nn.BatchNorm: a mean for each GPU", plain, halves, "the two halves look alike"),
        *panel(WIDTH, "sync_batchnorm: one mean", synchronized, [BATCH.mean().item()], "as on one device"),
    ]
    size = f'width="{2 * WIDTH}" height="{HEIGHT}" viewBox="0 0 {2 * WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="15">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    default = Path(__file__).with_name("means.svg")
    (Path(sys.argv[1]) if len(sys.argv) > 1 else default).write_text(drawing(), encoding="utf-8")
