"""Random schedules of replicas that fail at random, and what each must lead to.

``python tests/schedules.py --count 10000 --seed 0`` runs as many as you like, and prints how they ended.

A schedule says for each replica which layers it calls, in which order, and how it ends. NOTE [what must happen]: An
exchange needs all replicas, so the calls that complete are the longest prefix that the calls of all replicas have in
common. No wait breaks before that prefix is complete, and a replica that fails by itself right after it does fail,
whatever has broken the waits of the others by then. Only where some replicas leave and others wait in different layers,
timing decides which of the two reasons the error names.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from conftest import within
from helpers import assert_equal
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, ReplicaSyncError, SynchronizedBatchNorm1d

WIDTH = 3


class Planned(Exception):
    """The failure of a replica that a schedule asks for."""


@dataclass
class Schedule:
    """What every replica does: the layers that it calls, and how it ends."""

    seed: int
    calls: list[list[int]]
    ends: list[str]  # "return", "raise", or "wide": the last call hands its layer one channel too many
    affine: list[bool]  # of each layer; one that is not has no running statistics either, and so no width of its own
    rows: int
    changes: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, seed: int) -> Schedule:
        """Make the schedule of `seed`: one sequence of calls for all, and up to two changes of it in some replicas."""
        rng = random.Random(seed)
        replicas, layers = rng.randint(2, 8), rng.randint(1, 5)
        sequence = [rng.randrange(layers) for _ in range(rng.randint(1, 2 * layers))]
        affine = [rng.random() < 0.6 for _ in range(layers)]
        calls = [list(sequence) for _ in range(replicas)]
        schedule = cls(seed, calls, ["return"] * replicas, affine, rng.randint(1, 3))
        for what in rng.sample(["raise", "wide", "leave", "skip", "repeat", "swap"], rng.choice([0, 1, 1, 1, 2])):
            schedule._change(what, rng.randrange(replicas), rng)
        return schedule

    def _change(self, what: str, replica: int, rng: random.Random) -> None:
        calls = self.calls[replica]
        place = rng.randrange(len(calls) + 1)
        if what in ("raise", "leave"):
            del calls[place:]
            self.ends[replica] = "raise" if what == "raise" else "return"
        elif place < len(calls):
            if what == "wide":
                del calls[place + 1 :]
                self.ends[replica] = "wide"
            elif what == "skip":
                del calls[place]
            elif what == "repeat":
                calls.insert(place, calls[place])
            else:
                other = rng.randrange(len(calls))
                calls[place], calls[other] = calls[other], calls[place]
        if not calls and self.ends[replica] == "wide":
            self.ends[replica] = "return"
        self.changes.append(f"{what} in replica {replica} at {place}")

    def common(self) -> list[int]:
        """Return the calls that complete."""
        met = [calls[:-1] if end == "wide" else calls for calls, end in zip(self.calls, self.ends, strict=True)]
        together = itertools.takewhile(lambda layers: len(set(layers)) == 1, zip(*met, strict=False))
        return [layers[0] for layers in together]

    def causes(self) -> list[str]:
        """Return what the error may say, as patterns; none if nothing fails. See NOTE [what must happen]."""
        common = len(self.common())
        own: list[str] = []
        left: list[int] = []
        waiting: dict[int, int] = {}
        for replica, (calls, end) in enumerate(zip(self.calls, self.ends, strict=True)):
            is_wide = end == "wide" and len(calls) == common + 1
            if is_wide and self.affine[calls[common]]:
                own.append(rf"^Caught RuntimeError in replica {replica} on device cpu\.\n")
            elif len(calls) > common:
                waiting[replica] = calls[common]
            elif end == "raise":
                own.append(rf"^Caught Planned in replica {replica} on device cpu\.\n")
            else:
                left.append(replica)
        if own:
            return own[:1]
        layers = "|".join(str(layer) for layer in sorted(set(waiting.values())))
        if len(waiting) == len(self.calls) and len(set(waiting.values())) == 1:
            return [r"^Caught ValueError in replica 0 on device cpu\.\n(.|\n)*expected inputs of one dtype.*, \d\)"]
        causes = [rf"to call layers\.({layers}) equally often, but got replica {r} on device cpu, which" for r in left]
        if len(set(waiting.values())) > 1:
            causes.append(rf"to reach the same layer, but got .*layers\.({layers}), call")
        return causes if waiting else []


class Net(nn.Module):
    """Calls its layers as a schedule says."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SynchronizedBatchNorm1d(WIDTH, affine=affine, track_running_stats=affine) for affine in schedule.affine
        ).double()
        self.schedule = schedule

    def forward(self, x: Tensor, replica: Tensor) -> Tensor:
        schedule, number = self.schedule, int(replica[0])
        calls, end = schedule.calls[number], schedule.ends[number]
        rng = random.Random(1000 * schedule.seed + number)
        for place, layer in enumerate(calls):
            for _ in range(rng.choice([0, 0, 1, 5])):
                time.sleep(0)  # give way to another thread
            if end == "wide" and place == len(calls) - 1:
                x = torch.cat((x, x[:, :1]), 1)
            x = self.layers[layer](x * 1.5 + 0.5)
        if end == "raise":
            raise Planned(number)
        return x

    def on_one_device(self, x: Tensor, calls: Sequence[int]) -> Tensor:
        for layer in calls:
            x = self.layers[layer](x * 1.5 + 0.5)
        return x


@contextmanager
def switching_often() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def play(seed: int) -> str:
    """Run the schedule of `seed` and then a good forward on the same wrapper; compare both with what they must lead to.

    Return how it ended: the word for a message, or "no error".
    """
    schedule = Schedule.make(seed)
    torch.manual_seed(seed)
    net = Net(schedule)
    parallel = DataParallelWithCallback(net, ["cpu"] * len(schedule.calls), timeout=60.0)
    causes, common = schedule.causes(), schedule.common()
    ended = "no error"
    if causes:
        ended = _fail(parallel, schedule, causes)
        schedule.calls, schedule.ends = [common] * len(schedule.calls), ["return"] * len(schedule.calls)
    _succeed(parallel, schedule, common)
    return ended


def _batch(schedule: Schedule) -> tuple[Tensor, Tensor]:
    number = len(schedule.calls)
    x = torch.randn(schedule.rows * number, WIDTH, dtype=torch.float64)
    return x, torch.arange(number).repeat_interleave(schedule.rows)


def _fail(parallel: DataParallelWithCallback, schedule: Schedule, causes: Sequence[str]) -> str:
    x, replica = _batch(schedule)
    reference = copy.deepcopy(parallel.module)
    reference.on_one_device(x, schedule.common())
    try:
        parallel(x, replica)
    except (Planned, ReplicaSyncError, RuntimeError, ValueError) as error:
        text, kind = str(error), type(error).__name__
    else:
        raise AssertionError(f"expected one of {causes}, but got no error ({schedule})")
    if not any(re.search(cause, text) for cause in causes):
        raise AssertionError(f"expected one of {causes}, but got {text} ({schedule})")
    _compare_statistics(parallel.module, reference, schedule)
    if kind != "ReplicaSyncError":
        return kind
    return f"{kind}: {'diverged' if 'same layer' in text else 'left'}"


def _succeed(parallel: DataParallelWithCallback, schedule: Schedule, calls: Sequence[int]) -> None:
    x, replica = _batch(schedule)
    reference = copy.deepcopy(parallel.module)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, actual = reference.on_one_device(inputs[0], calls), parallel(inputs[1], replica)
    assert_equal(actual, expected, f"output ({schedule})", 1e-8)
    if calls:
        grad = torch.randn_like(expected)
        expected.backward(grad)
        actual.backward(grad)
        assert_equal(inputs[1].grad, inputs[0].grad, f"input gradient ({schedule})", 1e-6)
    _compare_statistics(parallel.module, reference, schedule)


def _compare_statistics(actual: nn.Module, expected: nn.Module, schedule: Schedule) -> None:
    for name, value in expected.state_dict().items():
        assert_equal(actual.state_dict()[name], value, f"{name} ({schedule})", 1e-8)


def main() -> None:
    """Run schedules until all are done or one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="how many schedules")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = threading.active_count()
    ended: Counter[str] = Counter()
    start = time.perf_counter()
    with switching_often():
        for seed in range(options.seed, options.seed + options.count):
            ended[within(30.0, lambda seed=seed: play(seed))] += 1
    seconds = time.perf_counter() - start
    for what, number in ended.most_common():
        print(f"{number:6} {what}")
    print(
        f"{ended.total()} schedules, all as expected, {seconds:.0f} s, {threading.active_count() - before} threads left"
    )


if __name__ == "__main__":
    main()
