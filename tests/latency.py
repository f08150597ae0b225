"""Print how long it takes from a failure in a replica to the error in the caller, over all kinds of failures.

``python tests/latency.py`` (with the package installed) goes through every kind, place, replica and wrapper of
`test_failures.py`; the time starts when the replica begins to fail, and ends when the caller catches the error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from scripted import WRAPPERS, R, Scripted, batch, raising, scripted
from test_failures import COMPLETED, DIVERGENCES
from torch import Tensor

Step = Callable[[Scripted, Tensor], Any]


def matrix() -> Iterator[tuple[str, str, Step]]:
    """Yield every failure: its name, the place where it happens, and what the replica does there."""
    for place in COMPLETED:
        for error in (ValueError("one"), torch.OutOfMemoryError("one"), KeyboardInterrupt(), SystemExit(1)):
            yield f"{type(error).__name__} {place}", place, raising(error)
    for name, (place, step, _, _) in DIVERGENCES.items():
        yield name, place, step
    for width in (3, 5):
        yield f"{width} channels", "before", lambda model, x, width=width: model.stem(x[:, :1].repeat(1, width))


def seconds_to_error(wrapper: str, replica: int, place: str, step: Step) -> float:
    """Return the time from the failure to the error."""
    failed = 0.0

    def timed(model: Scripted, x: Tensor) -> Any:
        nonlocal failed
        failed = time.perf_counter()
        return step(model, x)

    parallel = WRAPPERS[wrapper](scripted((replica, place, timed)))
    try:
        parallel(*batch())
    except BaseException:
        return time.perf_counter() - failed
    raise RuntimeError(f"expected an error, but got none ({wrapper}, replica {replica}, {place})")


def main() -> None:
    """Measure everything and print the longest of each wrapper."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="how often each failure is caused")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for wrapper in WRAPPERS:
        times = []
        for name, place, step in matrix():
            if wrapper == "own-forward" and name.startswith(("KeyboardInterrupt", "SystemExit")):
                continue  # There they only end a thread of the user's own.
            for replica in range(R):
                for _ in range(options.repeat):
                    times.append((seconds_to_error(wrapper, replica, place, step), name, replica))
        longest, name, replica = max(times)
        median = sorted(times)[len(times) // 2][0]
        print(
            f"{wrapper}: {len(times)} failures, median {1000 * median:.1f} ms, longest {1000 * longest:.1f} ms "
            f"({name}, replica {replica})"
        )


if __name__ == "__main__":
    main()
