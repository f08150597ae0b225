"""Time training steps on CPU replicas, which run one at a time, against another version of the library."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[3]
NETS = {  # blocks, channels, size of the images, replicas
    "4 small blocks": (4, 8, 8, 2),
    "4 small blocks, 4 replicas": (4, 8, 8, 4),
    "20 small blocks, 4 replicas": (20, 8, 8, 4),
    "4 large blocks": (4, 64, 56, 2),
}


def serve(connection: Connection, folder: str) -> None:
    """Be the process of one version: for each name and number that arrive, run so many steps of a net."""
    sys.path.insert(0, folder)
    from sync_batchnorm import DataParallelWithCallback, convert_model

    nets = {}
    for name, (blocks, channels, size, replicas) in NETS.items():
        widths = [3] + [channels] * blocks
        layers = [[nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()] for i, o in itertools.pairwise(widths)]
        net = convert_model(nn.Sequential(*[layer for block in layers for layer in block]))
        nets[name] = DataParallelWithCallback(net, ["cpu"] * replicas), torch.randn(2 * replicas, 3, size, size)
    while message := connection.recv():
        name, steps = message
        net, input = nets[name]
        start = time.perf_counter()
        for _ in range(steps):
            net.zero_grad()
            output = net(input)
            output.backward(torch.full_like(output, 0.1))
        connection.send((time.perf_counter() - start) / steps)


def main() -> None:
    """Print the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", help="folder of another version of the library")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    connections = []
    for folder in (str(ROOT), options.other):
        connection, other_end = spawn.Pipe()
        spawn.Process(target=serve, args=(other_end, folder), daemon=True).start()
        connections.append(connection)
    print("| net | ours, ms | the other version, ms | ratio |\n|---|---|---|---|")
    for name in NETS:
        seconds: list[list[float]] = [[], []]
        for _ in range(1 + options.blocks):
            for connection, own in zip(connections, seconds, strict=True):
                connection.send((name, options.steps))
                own.append(connection.recv())
        ours, other = (1e3 * statistics.median(own[1:]) for own in seconds)  # after a warm-up
        print(f"| {name} | {ours:.1f} | {other:.1f} | {ours / other:.2f} |", flush=True)
    for connection in connections:
        connection.send(None)


if __name__ == "__main__":
    main()
