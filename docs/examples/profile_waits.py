"""Which layer waits for which replica: read from a profile, printed as a table, and drawn.

A small net trains for some steps on replicas of which one is slow, under `torch.profiler`, and the profile is exported.
The table and the picture are made from that file, so it can be one of your own: ``--profile FILE``. (Only for layers
without a `group_size`: exchanges of several groups are not told apart.)

A layer waits for the replica that computes longest before it. Who arrives last does not tell: replicas that share a
device run one at a time, so the replica with the last turn arrives last, however fast it is.

Run it with ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

try:
    import common
    import matplotlib
    import torch
    from torch import Tensor, nn
    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

    from sync_batchnorm import CallbackContext, DataParallelWithCallback, convert_model

    matplotlib.use("Agg")  # The picture is written to a file; no display is needed.
    import matplotlib.pyplot as plt
except ImportError as error:
    sys.exit(
        f"expected the packages of this example, but got {error}; install them, in the folder of the README, "
        "with: pip install '.[examples]'"
    )

__all__ = ["main", "read_profile", "table_of"]

PREFIX = "sync_batchnorm: "
SLOW_LAYER = "features.1.1"  # in front of it, one replica is slow
WARMUP = 3  # steps before the profile: first calls take longer
# By Okabe and Ito.
FORWARD, WAITING, TURN, MERGING = "#D0D0D0", "#E69F00", "#F7F7F7", "#0072B2"


@dataclass
class Options:
    """What the user chose, checked."""

    devices: list[torch.device]
    steps: int
    delay: float  # seconds
    seed: int
    profile: Path | None
    picture: Path


@dataclass
class Span:
    """Something that took time, in one thread; in milliseconds."""

    name: str
    thread: int
    start: float
    end: float


@dataclass
class Exchange:
    """One call of one layer by all replicas: the wait of each, from when it arrived, and the merge of the master."""

    layer: str
    waits: dict[int, Span]
    merging: Span
    took: dict[int, float] = field(default_factory=dict)  # milliseconds of each replica's own code before it arrived

    @property
    def slowest(self) -> int:
        """The replica for which the others waited."""
        return max(self.took, key=lambda replica: self.took[replica])


@dataclass
class Forward:
    """One forward of the wrapper: the span of each replica, and the exchanges in their order."""

    replicas: dict[int, Span]
    exchanges: list[Exchange]

    @property
    def begin(self) -> float:
        return min(span.start for span in self.replicas.values())

    @property
    def end(self) -> float:
        return max(span.end for span in self.replicas.values())


@dataclass
class Row:
    """What the table says about a layer."""

    blamed: int  # the replica that took longest, over all exchanges
    times_slowest: int
    exchanges: int
    mean_took: dict[int, float]  # milliseconds before the layer, by replica


def parse_options(arguments: list[str] | None) -> Options:
    """Read the command line; a wrong option ends the program with a sentence."""
    parser = argparse.ArgumentParser(description="Show which layer waits for which replica.")
    common.add_options(parser, replicas=4)
    parser.add_argument("--steps", type=int, default=10, help="steps that are recorded (default: 10)")
    parser.add_argument("--delay", type=float, default=20, help="milliseconds of the slow replica (default: 20)")
    parser.add_argument("--profile", type=Path, help="an exported profile, .json or .json.gz, to read instead")
    given = parser.parse_args(arguments)
    common.check_at_least(parser, 1, "steps", given.steps)
    common.check_seed(parser, given.seed)
    if not 0 < given.delay <= 10_000:
        parser.error(f"expected --delay of more than 0 and up to 10000 milliseconds, but got {given.delay:g}")
    if given.profile is not None and not given.profile.is_file():
        parser.error(f"expected --profile with an exported profile, but got {str(given.profile)!r}")
    devices = common.choose_devices(parser, given.devices, given.replicas, default=4)
    picture = common.choose_file(parser, given.output, "profile_waits.png")
    return Options(devices, given.steps, given.delay / 1000, given.seed, given.profile, picture)


class Slow(nn.Module):
    """Takes longer in one replica, as on a device that does something else too."""

    def __init__(self, replica: int, seconds: float) -> None:
        super().__init__()
        self.replica, self.seconds, self.is_slow = replica, seconds, False

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.is_slow = copy_id == self.replica

    def forward(self, input: Tensor) -> Tensor:
        if self.is_slow:
            time.sleep(self.seconds)
        return input


def make_net(slow: Slow) -> nn.Sequential:
    """Return a net with the BatchNorm layers features.0.1, features.1.1 and features.2.1."""

    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    net = nn.Sequential()
    net.features = nn.Sequential(block(3, 16), block(16, 16), block(16, 24))
    net.features[0].append(slow)
    net.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return net


def slow_replica(options: Options) -> int:
    return min(2, len(options.devices) - 1)


def make_profile(options: Options) -> Path:
    """Train under the profiler and return the file that it exported."""
    torch.manual_seed(options.seed)
    net = convert_model(make_net(Slow(slow_replica(options), options.delay))).to(options.devices[0])
    parallel = DataParallelWithCallback(net, options.devices)
    images = torch.randn(2 * len(options.devices), 3, 48, 48, device=options.devices[0])
    labels = torch.randint(10, (len(images),), device=options.devices[0])

    def step() -> None:
        nn.functional.cross_entropy(parallel(images), labels).backward()

    for _ in range(WARMUP):
        step()
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # also those of the replicas
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, experimental_config=every_thread) as prof:
        for _ in range(options.steps):
            step()
    path = options.picture.with_suffix(".json")
    prof.export_chrome_trace(str(path))
    return path


def read_profile(path: Path) -> list[Forward]:
    """Return the forwards that an exported profile has.

    Raises:
        ValueError: if it has no exchange.
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = [
        Span(event["name"].removeprefix(PREFIX), event["tid"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)
    ]
    spans.sort(key=lambda span: span.start)
    forwards: list[Forward] = []
    for span in spans:
        if re.match(r"replica \d+", span.name):
            # Replicas of one forward run at the same time.
            if not forwards or span.start > forwards[-1].end:
                forwards.append(Forward({}, []))
            forwards[-1].replicas[int(span.name.split()[1])] = span
    for forward in forwards:
        forward.exchanges = find_exchanges(forward.replicas, spans)
    forwards = [forward for forward in forwards if forward.exchanges]
    if not forwards:
        raise ValueError(
            "it has no exchange of replicas; record all threads, with "
            "experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)"
        )
    return forwards


def find_exchanges(replicas: dict[int, Span], spans: list[Span]) -> list[Exchange]:
    """Put together the spans of each exchange: in each layer the first waits and the first merge, and so on."""
    waits: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))  # by layer and replica
    merges: dict[str, list[Span]] = defaultdict(list)  # by layer
    for replica, whole in replicas.items():
        for span in spans:
            if span.thread == whole.thread and whole.start <= span.start and span.end <= whole.end:
                layer, _, what = span.name.rpartition(", ")
                if what == "waiting":
                    waits[layer][replica].append(span)
                elif what == "merging":
                    merges[layer].append(span)
    exchanges = [
        Exchange(layer, {replica: ahead[call] for replica, ahead in waits[layer].items() if call < len(ahead)}, merging)
        for layer, calls in merges.items()
        for call, merging in enumerate(calls)
    ]
    exchanges.sort(key=lambda exchange: exchange.merging.start)
    for replica, whole in replicas.items():
        begin = whole.start  # A span begins when the turn of its replica does.
        for exchange in exchanges:
            if replica in exchange.waits:
                wait = exchange.waits[replica]
                exchange.took[replica] = wait.start - begin
                begin = exchange.merging.end if exchange.merging.thread == whole.thread else wait.end
    return exchanges


def table_of(forwards: list[Forward]) -> dict[str, Row]:
    """Return a row for each layer, in the order of the first forward."""
    by_layer: dict[str, list[Exchange]] = defaultdict(list)
    for forward in forwards:
        for exchange in forward.exchanges:
            by_layer[exchange.layer].append(exchange)
    table = {}
    for layer, exchanges in by_layer.items():
        took: dict[int, float] = defaultdict(float)
        for exchange in exchanges:
            for replica, milliseconds in exchange.took.items():
                took[replica] += milliseconds / len(exchanges)
        blamed = max(took, key=lambda replica: took[replica])
        times_slowest = sum(exchange.slowest == blamed for exchange in exchanges)
        table[layer] = Row(blamed, times_slowest, len(exchanges), dict(sorted(took.items())))
    return table


def print_table(table: dict[str, Row]) -> None:
    """Print what the replicas took before each layer, one line for each."""
    replicas = sorted({replica for row in table.values() for replica in row.mean_took})
    width = max(len("layer"), *map(len, table))
    print(f"{'':<{width}}               the slowest  mean time in ms that a replica computes before the layer")
    print(f"{'layer':<{width}}  waits for           in  " + "  ".join(f"{replica:>6}" for replica in replicas))
    for layer, row in table.items():
        took = [f"{row.mean_took[replica]:.2f}" if replica in row.mean_took else "-" for replica in replicas]
        print(
            f"{layer:<{width}}  {f'replica {row.blamed}':<10}  {f'{row.times_slowest} of {row.exchanges}':>11}  "
            + "  ".join(f"{milliseconds:>6}" for milliseconds in took)
        )


def draw(forward: Forward, picture: Path) -> None:
    """Save one forward: a row for each replica, with its waits and what the master merges."""
    replicas = sorted(forward.replicas)
    begin = forward.begin
    rows = {forward.replicas[replica].thread: row for row, replica in enumerate(replicas)}
    figure, axes = plt.subplots(figsize=(11, 2.0 + 0.55 * len(replicas)), layout="constrained")
    labels = {
        FORWARD: "a replica computes",
        WAITING: "it waits for others",
        TURN: "it waits for its turn, or for a core",
        MERGING: "replica 0 merges",
    }

    def bar(span: Span, colour: str, height: float, **style: Any) -> None:
        label = labels.pop(colour, None)
        left, row = span.start - begin, rows[span.thread]
        axes.barh(row, span.end - span.start, height, left, color=colour, label=label, zorder=2, **style)

    for span in forward.replicas.values():
        bar(span, FORWARD, 0.8)
    for exchange in forward.exchanges:
        for span in exchange.waits.values():
            answered = min(span.end, exchange.merging.end)
            bar(replace(span, end=answered), WAITING, 0.56, hatch="//", edgecolor="white", linewidth=0)
            bar(replace(span, start=answered), TURN, 0.56)
        bar(exchange.merging, MERGING, 0.56)
        at = exchange.merging.end - begin
        axes.axvline(at, color=MERGING, linewidth=0.8, linestyle=":", zorder=1)
        axes.text(at, -0.65, exchange.layer, rotation=40, rotation_mode="anchor", color=MERGING, fontsize=9)
    worst = max(forward.exchanges, key=lambda exchange: exchange.took[exchange.slowest])
    arrival, took = worst.waits[worst.slowest], worst.took[worst.slowest]
    if took > 0.15 * (forward.end - begin):  # room for a text
        middle, text = arrival.start - took / 2 - begin, f"what {worst.layer}\nwaits for"
        axes.text(middle, rows[arrival.thread], text, ha="center", va="center", fontsize=9, zorder=3)
    names = [f"replica {replica}" for replica in replicas]
    axes.set_yticks(range(len(replicas)), names)
    axes.set_ylim(len(replicas) - 0.5, -0.55)
    common.tidy(axes, "ms since the forward pass began")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run the example and return the exit status: 1 if the table does not blame the replica that is slow."""
    options = parse_options(arguments)
    path = options.profile
    if path is None:
        common.prepare(options.devices)
        path = make_profile(options)
    try:
        forwards = read_profile(path)
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"expected an exported profile, but got {type(error).__name__} from {path}: {error}")
    table = table_of(forwards)
    print_table(table)
    # What else the machine does makes a forward longer, never shorter.
    draw(min(forwards, key=lambda forward: forward.end - forward.begin), options.picture)
    print(f"The shortest forward is in {options.picture}; the profile is {path}.")
    if options.profile is not None:
        return 0
    blamed, slow = table[SLOW_LAYER].blamed, slow_replica(options)
    how = "As expected" if blamed == slow else "NOT as expected"
    print(f"{how}: {SLOW_LAYER} waits for replica {blamed}, and the slow one is replica {slow}.")
    return 0 if blamed == slow else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
