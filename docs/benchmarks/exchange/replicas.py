"""Time the exchange between replicas alone: empty messages through a `SyncMaster`, by number of replicas."""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import environment

from sync_batchnorm import SyncMaster


def microseconds(replicas: int, exchanges: int) -> float:
    """Return the time of one exchange."""
    master = SyncMaster(lambda messages: messages)
    pipes = [master.register_slave(i) for i in range(1, replicas)]
    start = threading.Barrier(replicas)

    def slave(i: int) -> None:
        start.wait()
        for _ in range(exchanges):
            pipes[i].run_slave(None)

    threads = [threading.Thread(target=slave, args=(i,)) for i in range(replicas - 1)]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for _ in range(exchanges):
        master.run_master(None)
    taken = time.perf_counter() - begin
    for thread in threads:
        thread.join()
    return 1e6 * taken / exchanges


def main() -> None:
    """Print the first table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--exchanges", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(environment())
    print("| replicas | us per exchange, median | us per exchange and replica |")
    print("|---|---|---|")
    rounds = [[microseconds(n, options.exchanges) for n in options.replicas] for _ in range(options.rounds)]
    for replicas, taken in zip(options.replicas, zip(*rounds, strict=True), strict=True):
        median = statistics.median(taken)
        print(f"| {replicas} | {median:.0f} | {median / replicas:.1f} |")


if __name__ == "__main__":
    main()
