"""Draw the pictures of the benchmarks from the tables on their pages, so that a picture shows what its table says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # The pictures are written to files; no display is needed.
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).parent
Table = list[dict[str, str]]


def tables(page: str) -> list[Table]:
    """Return the tables of a page, each as a list of rows, which are dictionaries by column title."""
    found: list[Table] = []
    header: list[str] = []
    for line in (HERE / page / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
            found.append([])
        elif not set(line) <= set("|- "):
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


def bars(axes: Axes, labels: list[str], heights: dict[str, list[float]]) -> None:
    """Draw a group of bars for each label."""
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        places = [place + (number - (len(heights) - 1) / 2) * width for place in range(len(labels))]
        axes.bar_label(axes.bar(places, values, width, label=name), fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(labels)), labels)


def layer(axes: Axes) -> None:
    rows = [row for row in tables("layer")[0] if row["replicas"] == "2"]
    ours = [float(row["ours, ms"]) for row in rows]
    existing = [ms / float(row["ours / existing"]) for ms, row in zip(ours, rows, strict=True)]
    heights = {name: [float(row[f"{name}, ms"]) for row in rows] for name in ("BatchNorm2d", "with an exchange")}
    bars(axes, [f"{row['shape']}\n{row['format']}" for row in rows], heights | {"ours": ours, "existing": existing})
    axes.set_yscale("log")
    axes.set_ylabel("forward and backward of one layer, ms")


def network(axes: Axes) -> None:
    rows = tables("network")[0]
    names = {"synchronized": "ratio", "exchanges alone": "ratio with exchanges alone"}
    heights = {label: [float(row[name]) for row in rows] for label, name in names.items()}
    bars(axes, [f"{row['network']}\n{row['format']}" for row in rows], heights)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(0.9, None)
    axes.set_ylabel("step, by that without synchronization")


def lines(page: str, x: str, ys: list[str], ylabel: str) -> Callable[[Axes], None]:
    """Return a function that draws the columns `ys` of the first table of a page against the column `x`."""

    def draw(axes: Axes) -> None:
        rows = tables(page)[0]
        places = [float(row[x]) for row in rows]
        for y in ys:
            axes.plot(places, [float(row[y]) for row in rows], "o-", label=y)
        axes.set_xticks(places)
        axes.set_ylim(0, None)
        axes.set_xlabel(x)
        axes.set_ylabel(ylabel)

    return draw


def processes(axes: Axes) -> None:
    rows = tables("exchange")[1]
    labels = [f"{row['processes']} processes\n{row['channels']} channels" for row in rows]
    bars(axes, labels, {name: [float(row[f"{name}, us"]) for row in rows] for name in ("forward", "backward")})
    axes.set_ylabel("exchange of one layer, us")


def precision(axes: Axes) -> None:
    for kind, rows in zip(("contiguous", "channels_last"), tables("precision")[:2], strict=True):
        ratios = [max(1.0, float(row["mean / deviation"])) for row in rows]  # zero has no place on this axis
        for who, color in (("torch", "tab:blue"), ("existing", "tab:orange"), ("ours", "tab:green")):
            style = "-" if kind == "contiguous" else "--"
            errors = [float(row[f"variance: {who}"]) for row in rows]
            axes.plot(ratios, errors, style, color=color, marker="o", label=f"{who}, {kind}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("mean / deviation, the first for 0")
    axes.set_ylabel("relative error of the variance")


PICTURES: dict[str, Callable[[Axes], None]] = {
    "layer/layer": layer,
    "network/network": network,
    "exchange/replicas": lines("exchange", "replicas", ["us per exchange, median"], "us"),
    "exchange/processes": processes,
    "wrapper/wrapper": lines("wrapper", "replicas", ["without callbacks, ms", "53 synchronized layers, ms"], "ms"),
    "precision/precision": precision,
}
WIDE = (layer, processes)


def main() -> None:
    """Write the pictures beside their pages."""
    for path, draw in PICTURES.items():
        figure, axes = plt.subplots(figsize=(10 if draw in WIDE else 6, 3.6), layout="constrained")
        draw(axes)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(HERE / f"{path}.png", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
