"""Break the package in one line at a time, and run the tests that must notice: ``python tests/mutants.py``.

The mutants are in `mutants.txt`, which explains its format. Each is applied to a copy of the repository, never
to the files themselves. Prints each mutant with its outcome; exits with 1 if one has survived without a reason, and
with 2 if tests do not run, or fail without a mutant.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PARTS = ("sync_batchnorm", "tests", "docs", "pyproject.toml")
SECONDS = 300.0  # for the tests of one mutant, of which each has its watchdog


class Mutant(NamedTuple):
    """One block of the list."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    options: tuple[str, ...]
    reason: str  # why no test can notice it; empty for all others

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"

    def applied(self) -> str:
        """Return the text of the file with the mutant in it."""
        text = (ROOT / "sync_batchnorm" / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"expected the text once, but got it {text.count(self.old)} times ({self}); adapt the list"
            )
        return text.replace(self.old, self.new)


def read_list() -> list[Mutant]:
    """Return the mutants of the list."""
    _, *blocks = Path(__file__).with_suffix(".txt").read_text().strip("\n").split("\n\n")
    return [_read(block.split("\n")) for block in blocks if not block.startswith(" ")]


def _read(block: list[str]) -> Mutant:
    file, *lines = block
    marked = {mark: [line[2:] for line in lines if line[:2].rstrip() == mark] for mark in "-+="}
    tests = tuple(line for line in lines if line.startswith("test_"))
    options = tuple(word for line in lines if line[:2] in ("--", "-k") for word in shlex.split(line))
    return Mutant(file, "\n".join(marked["-"]), "\n".join(marked["+"]), tests, options, " ".join(marked["="]))


def run(tests: Sequence[str], options: Sequence[str], mutant: Mutant | None, seconds: float) -> tuple[int | None, str]:
    """Run tests on a copy, with the mutant if given; return the exit code, None if time was up, and the last lines."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in PARTS:
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, root / part)
        if mutant is not None:
            (root / "sync_batchnorm" / mutant.file).write_text(mutant.applied())
        # Simulated GPUs must be there before torch is; everything else starts from a process that has imported it.
        context: Any = multiprocessing.get_context("spawn" if "--simulated-gpus" in options else "forkserver")
        context.set_forkserver_preload(["pytest", "torch"])
        process = context.Process(target=_run_pytest, args=(root, tests, options))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None, ""
        return process.exitcode, "\n".join((root / "output").read_text().splitlines()[-8:])


def _run_pytest(root: Path, tests: Sequence[str], options: Sequence[str]) -> None:
    os.setsid()  # so that it can be ended together with programs that tests have started
    with (root / "output").open("w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    # What is imported is the copy, also by programs that tests start.
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    import pytest

    every = ["-m", "slow or not slow"]
    sys.exit(pytest.main(["-x", "-q", "--tb=line", *every, *options, *[str(root / "tests" / test) for test in tests]]))


def fails_without_mutants(mutants: Sequence[Mutant], jobs: int) -> str:
    """Return the output of tests that fail without a mutant, and so would kill every mutant; empty if all pass."""
    together: dict[tuple[str, ...], set[str]] = defaultdict(set)  # tests, by their options
    for mutant in mutants:
        together[mutant.options].update(mutant.tests)
    for options, tests in together.items():
        code, output = run(sorted(tests), (*options, "-n", str(jobs)), None, SECONDS * len(tests))
        if code != 0:
            return output or "They take too long."
    return ""


def end_of(mutant: Mutant) -> tuple[str, str]:
    """Return how a mutant ends, and the output of tests that did not run."""
    code, output = run(mutant.tests, (*mutant.options, "-n", "0"), mutant, SECONDS)
    if code in (None, 2, 3, 4, 5):  # out of time; for pytest: interrupted, internal error, wrong usage, no tests
        return "NOT RUN", output or "They take too long."
    if code == 0:
        return ("explained" if mutant.reason else "SURVIVED"), ""
    return ("KILLED, but explained" if mutant.reason else "killed"), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="only mutants whose file or text contains this")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time (default: as many as cores)"
    )
    options = parser.parse_args()
    mutants = [mutant for mutant in read_list() if options.pattern in str(mutant)]
    for mutant in mutants:
        mutant.applied()
    begin, ends = time.monotonic(), Counter[str]()
    failure = fails_without_mutants(mutants, options.jobs)
    if failure:
        print(f"{failure}\nThese tests fail without a mutant.")
        return 2
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (end, output) in zip(mutants, pool.map(end_of, mutants), strict=True):
            ends[end] += 1
            print(f"{end:10} {mutant}", flush=True)
            for line in filter(None, [mutant.reason, *output.splitlines()]):
                print(f"           {line}", flush=True)
    counts = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    print(f"{len(mutants)} mutants in {time.monotonic() - begin:.0f} seconds: {counts or 'none'}")
    return 2 if ends["NOT RUN"] else int(ends.keys() - {"killed", "explained"} != set())


if __name__ == "__main__":
    sys.exit(main())
