"""Draw the picture of the page on precision from the table on it, so that the picture shows the table."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # The picture is written to a file; no display is needed.
import matplotlib.pyplot as plt

PAGE = Path(__file__).parent / "precision" / "README.md"
COLORS = {"torch": "tab:blue", "older": "tab:orange", "ours": "tab:green"}


def rows() -> list[dict[str, str]]:
    """Return the rows of the table, as dictionaries by column title."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in cells]


def main() -> None:
    """Write the picture beside its page."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (kind, several), style in zip(itertools.groupby(rows(), lambda row: row["format"]), ("-", "--"), strict=True):
        points = list(several)
        ratios = [max(1.0, float(row["mean / deviation"])) for row in points]  # zero has no place on this axis
        for name, color in COLORS.items():
            errors = [float(row[f"variance: {name}"]) for row in points]
            axes.plot(ratios, errors, style, color=color, marker="o", label=f"{name}, {kind}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("mean / deviation, the first for 0")
    axes.set_ylabel("relative error of the variance")
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PAGE.with_name("precision.png"), dpi=110)


if __name__ == "__main__":
    main()
