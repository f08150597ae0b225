"""Break the package in one line at a time, and run the tests that must notice: ``python tests/mutants.py``.

The mutants stand in `mutant_list.py`. Each is applied to a copy of the repository, never to the files themselves. Prints
each mutant with its end, and exits with 1 if one has survived; with 2 if tests fail without a mutant, or do not run.
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
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
PARTS = ("sync_batchnorm", "tests", "docs", "pyproject.toml")
SECONDS = 120.0  # for the tests of one mutant; one that hangs is noticed


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the text of the file with the mutant in it."""
    text = (root / "sync_batchnorm" / f"{mutant.file}.py").read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}.py has {text.count(mutant.old)} times what should be there once: {mutant.old}")
    return text.replace(mutant.old, mutant.new)


def arguments(tests: str, root: Path = ROOT) -> list[str]:
    """Return what pytest is given: names of tests become paths, options stay as they are."""
    return [str(root / "tests" / part) if part.startswith("test_") else part for part in shlex.split(tests)]


def run(tests: str, mutant: Mutant | None, seconds: float) -> tuple[int | None, str]:
    """Run tests on a copy that has the mutant; return the exit code, None if time was up, and the last lines."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in PARTS:
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, root / part)
        if mutant is not None:
            (root / "sync_batchnorm" / f"{mutant.file}.py").write_text(mutated(mutant))
        # Simulated GPUs must be there before torch is; everything else starts from a process that has imported it.
        context: Any = multiprocessing.get_context("spawn" if "--simulated-gpus" in tests else "forkserver")
        context.set_forkserver_preload(["pytest", "torch"])
        process = context.Process(target=_run_pytest, args=(root, arguments(tests, root)))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None, ""
        return process.exitcode, "\n".join((root / "output").read_text().splitlines()[-8:])


def _run_pytest(root: Path, arguments: list[str]) -> None:
    os.setsid()  # so that it can be ended together with programs that tests have started
    with (root / "output").open("w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    # The copy is what is imported, also by programs that tests start. Files of equal size and time would share bytecode.
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
    import pytest

    sys.exit(pytest.main(["-x", "-q", "--tb=line", *arguments]))


def fails_without_mutants(mutants: Sequence[Mutant]) -> str:
    """Return what the tests say that fail in any case, and would kill every mutant; empty if there are none."""
    together: dict[str, set[str]] = defaultdict(set)  # tests, by their options
    for mutant in mutants:
        names = [part for part in shlex.split(mutant.tests) if part.startswith("test_")]
        options = shlex.join(part for part in shlex.split(mutant.tests) if part not in names)
        together[options].update(names)
    for options, names in together.items():
        code, output = run(" ".join([*sorted(names), options]), None, len(names) * SECONDS)
        if code != 0:
            return output
    return ""


def end_of(mutant: Mutant) -> tuple[str, str]:
    """Return the verdict on a mutant, and the output that explains it."""
    code, output = run(mutant.tests, mutant, SECONDS)
    if code in (2, 3, 4, 5):  # as pytest counts: interrupted, internal error, usage error, nothing collected
        return "DID NOT RUN", output
    if code == 0:
        return ("explained" if mutant.survives else "SURVIVED"), ""
    return ("KILLED, though explained" if mutant.survives else "killed"), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="only mutants of files, or with texts, that contain it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time (default: one for a core)")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if options.pattern in f"{m.file}.py {m.old} {m.new}"]
    for mutant in mutants:
        mutated(mutant)
    begin = time.monotonic()
    failure = fails_without_mutants(mutants)
    if failure:
        print(f"{failure}\nThese tests fail without a mutant.")
        return 2
    counts: dict[str, int] = defaultdict(int)
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (verdict, output) in zip(mutants, pool.map(end_of, mutants), strict=True):
            counts[verdict] += 1
            print(f"{verdict:10} {mutant.file}.py: {mutant.old!r} -> {mutant.new!r}", flush=True)
            if verdict not in ("killed", "explained"):
                print(f"           {mutant.tests}\n{output}", flush=True)
            elif mutant.survives:
                print(f"           {mutant.survives}", flush=True)
    ends = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    print(f"{len(mutants)} mutants in {time.monotonic() - begin:.0f} s: {ends}")
    if "DID NOT RUN" in counts:
        return 2
    return 0 if counts.keys() <= {"killed", "explained"} else 1


if __name__ == "__main__":
    sys.exit(main())
