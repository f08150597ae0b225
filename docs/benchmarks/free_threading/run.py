"""Time one layer, forward and backward, in one interpreter with its lock on and off: ours and `nn.BatchNorm2d`.

Run it with a free-threaded Python. Each contender has a process of its own; all of them take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Remote, environment, interleave, median_ratio

SHAPES = [(64, 56, 56), (512, 7, 7), (8, 4, 4)]
KINDS = ("unsynchronized", "synchronized")
LOCKS = {"with": "1", "without": "0"}


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the contenders
    script = str(Path(__file__).with_name("contender.py"))
    print(environment())
    print("| shape | replicas | BatchNorm2d, ms | ours, ms | ours / BatchNorm2d ", end="")
    print("| BatchNorm2d without the lock, ms | ours without the lock, ms | ours / BatchNorm2d, without the lock |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for replicas in options.replicas:
            size = (max(replicas, 8), *shape)  # one sample for each of them at the least
            steps = {}
            for lock, setting in LOCKS.items():
                os.environ["PYTHON_GIL"] = setting
                for kind in KINDS:
                    words = [lock, kind, ",".join(map(str, size)), str(replicas), str(options.layers)]
                    steps[f"{lock} {kind}"] = Remote(script, *words)
            seconds = interleave(steps, options.rounds)
            row = [str(size), str(replicas)]
            for lock in LOCKS:
                plain, ours = (seconds[f"{lock} {kind}"] for kind in KINDS)
                row += [f"{1e3 * statistics.median(taken) / options.layers:.3f}" for taken in (plain, ours)]
                row.append(f"{median_ratio(ours, plain):.2f}")
            for remote in steps.values():
                remote.close()
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
