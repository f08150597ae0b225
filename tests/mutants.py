"""Break the package in one place at a time, and run the tests that must notice: ``python tests/mutants.py``.

The mutants are those of `mutation.py`, found in the code as it is. Each is tried in a copy of the repository, with the
tests that run the statement it changes, as recorded by `line_record.py`: first on the CPU, then, if none fails, on
simulated GPUs. Prints each mutant, how it ended, and by which test; exits with 1 if more than 5 of 100 have survived,
or more than a tenth of the sample is listed as equivalent.

A mutant survives if all these tests pass. They are tried in order of their processor time, but of each test function
one set of parameters first; a mutant that has passed tests of `BUDGET` seconds on the CPU, or on simulated GPUs,
survives there without the rest. A statement that no test runs is "not covered", which counts as survived.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple

import line_record
import pytest
from mutation import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
PARTS = ("sync_batchnorm", "tests", "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE")
CACHE = ROOT / "out" / "mutants"
OPTIONS = {"cpu": (), "4 gpus": ("--simulated-gpus", "4"), "1 gpu": ("--simulated-gpus", "1")}
BUDGET = {"cpu": 60.0, "4 gpus": 30.0, "1 gpu": 30.0}  # seconds of processor time, as recorded
FIRST, FILES = 3.0, 4  # seconds, and files of tests, in the first process, which is enough for most mutants

Recorded = dict[str, dict[str, Any]]  # by test, see `line_record.collect`


class Equivalent(NamedTuple):
    """Mutants of one function that were read, and change nothing that a test could notice."""

    file: str
    function: str
    change: str  # a piece of it
    reason: str

    def __contains__(self, mutant: object) -> bool:
        return isinstance(mutant, Mutant) and self[:2] == mutant[:2] and self.change in mutant.change


EQUIVALENT = [
    Equivalent(
        "distributed.py",
        "count_up_to",
        "next_sequence_number()) > 1:",
        "The room that it leaves is arbitrary.",
    ),
    Equivalent(
        "backends/cuda.py",
        "_counts",
        "`if len(set(counts)) == 1:` -> `if False:`",
        "Either way makes this tensor; that of equal counts is quicker.",
    ),
    Equivalent(
        "backends/cuda.py",
        "Cuda.normalize",
        "mean, invstd, 1.0, out=out)`",
        "The operator has the inverse standard deviation, and does not use eps.",
    ),
    Equivalent(
        "places.py",
        "Streams.to_place",
        "`return tensor` -> `pass`",
        "What is on its device already comes back from `to` as it is.",
    ),
    Equivalent(
        "places.py",
        "in_order_with_engine",
        "`if stream is None:` -> `if False:`",
        "On CUDA every place has a stream; this is asked for the type checker.",
    ),
    Equivalent(
        "coordinator.py",
        "Coordinator.leave",
        "-> `caught = None if False",
        "What is made of no error is not used.",
    ),
    Equivalent(
        "distributed.py",
        "peers_of_call",
        "_calls.get(group, 1)",
        "Processes compare the numbers of their calls; with which number all of them begin is the same to them.",
    ),
    Equivalent(
        "errors.py",
        "CapturedError.__init__",
        "-> `if sys.version_info <= (3, 11)",
        "A version has more than two parts, so it is never equal to these two.",
    ),
    Equivalent(
        "errors.py",
        "CapturedError.__init__",
        'get("__notes__", ())',
        "Python 3.10 alone runs it.",
    ),
    Equivalent(
        "backends/base.py",
        "RunningStatistics.update",
        "-> `if self.mean is None or False:`",
        "A layer with only one of the two buffers is refused before, in the words of torch.",
    ),
    Equivalent(
        "backends/base.py",
        "RunningStatistics.update",
        "-> `if False or self.var is None:`",
        "A layer with only one of the two buffers is refused before, in the words of torch.",
    ),
    Equivalent(
        "functional.py",
        "merge_messages",
        "torch.is_inference_mode_enabled() or any(",
        "To leave an inference mode that is off changes nothing.",
    ),
    Equivalent(
        "backends/joined.py",
        "Joined.takes",
        "0 < input.numel() < JOINED`",
        "Where the joined computation begins is a matter of speed; others give the same numbers.",
    ),
    Equivalent(
        "functional.py",
        "sync_moments",
        "`if has_hooks:` -> `if True:`",
        "Without hooks on saved tensors no checkpoint is found; looking for one only takes time.",
    ),
    Equivalent(
        "functional.py",
        "sync_batch_norm",
        "`if has_hooks:` -> `if True:`",
        "Without hooks on saved tensors no checkpoint is found; looking for one only takes time.",
    ),
    Equivalent(
        "autograd.py",
        "Call.record",
        "order.token = results[-2]",
        "Whichever result the next node takes, it comes after this one.",
    ),
    Equivalent(
        "local_parallel.py",
        "AnyDeviceDataParallel.gather",
        "as_device(device) for device in self.device_ids]):` -> `if False:`",
        "Either of two right operators gathers; that of torch is one call for all devices.",
    ),
    Equivalent(
        "backends/cpu.py",
        "fast_moments",
        "-> `if input.dim() != 2 or not input.is_contiguous():",
        "Either operator gives these numbers; which one is quicker depends on the format.",
    ),
    Equivalent(
        "backends/cuda.py",
        "_counts",
        "return (torch.full((len(counts),), counts[0], dtype=dtype, device=place.device),)` -> `pass`",
        "Equal counts may also be made one by one, which takes more calls.",
    ),
    Equivalent(
        "backends/base.py",
        "per_channel",
        "if like.dim() >= 2 else vector",
        "For two dimensions the view is one of the same shape.",
    ),
    Equivalent(
        "backends/base.py",
        "Backend.merge",
        "or parts[:2]`",
        "Parts without elements are all alike: zeros.",
    ),
    Equivalent(
        "backends/general.py",
        "General.normalize",
        "-> `torch.mul(factor, centered, out=out)`",
        "The order of two factors does not matter.",
    ),
    Equivalent(
        "backends/general.py",
        "General.normalize",
        "-> `torch.addcmul(per_channel(bias, input), factor, centered, out=out)`",
        "The order of two factors does not matter.",
    ),
    Equivalent(
        "backends/general.py",
        "General.rest",
        "max(batch.count, 2)",
        "A count of one is refused in the forward; with no elements at all, there is nothing to divide.",
    ),
    Equivalent(
        "coordinator.py",
        "Coordinator.has_caused",
        "`with self._lock:` -> ",
        "What broke a coordinator is set once and stays, so it can be read without the lock.",
    ),
    Equivalent(
        "backends/cpu.py",
        "fast_moments",
        "None if True else unused.clone()",
        "The operator takes the dtype of its results from the running mean alone.",
    ),
    Equivalent(
        "backends/cuda.py",
        "Cuda.gradient_sums",
        "wants = [weight is not None and True for",
        "The operator then also returns a sum that nobody takes.",
    ),
    Equivalent(
        "__main__.py",
        "check_parity",
        "-> `input = ",
        "The numbers are arbitrary.",
    ),
    Equivalent(
        "__main__.py",
        "check_copy",
        "`wait_for([source, target])` -> `pass`",
        "Only the times of real GPUs are wrong without it.",
    ),
    Equivalent(
        "__main__.py",
        "check_parity",
        "-> `for channels, height in ((",
        "The sizes are arbitrary.",
    ),
    Equivalent(
        "torch_private.py",
        "top_hooks",
        "_top_hooks(False)",
        "Whether torch also tells its hooks while the compiler traces them, which never traces what asks for them.",
    ),
    Equivalent(
        "__main__.py",
        "check_copy",
        "-> `for size in (64, 2 << 24):`",
        "The sizes are arbitrary.",
    ),
    Equivalent(
        "__main__.py",
        "check_broadcast",
        "-> `sent = torch.arange(2 << 20",
        "The sizes are arbitrary.",
    ),
]


def sources() -> dict[str, str]:
    """Return the files of the package."""
    package = ROOT / "sync_batchnorm"
    return {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}


def sample(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """Return some of the mutants, in the order of the files."""
    chosen = random.Random(seed).sample(range(len(mutants)), min(number, len(mutants)))
    return [mutants[index] for index in sorted(chosen)]


def _copy_to(root: Path) -> None:
    root.mkdir(exist_ok=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, root / part)


# The recording.


def _hash(paths: Iterable[Path]) -> str:
    found = hashlib.sha256(f"{platform.python_version()} {version('torch')}".encode())
    for path in sorted(paths):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def recorded(place: str, quick: bool, anew: bool, jobs: int) -> Recorded:
    """Return which tests run what, from the cache as far as it is not older than the package and the tests.

    A file of tests that has changed is recorded again; a change of anything else concerns all of them.
    """
    path = CACHE / f"{'quick' if quick else 'all'} {place}.json.gz"
    test_files = {file.name: file for file in (ROOT / "tests").glob("test_*.py")}
    others = {file for part in PARTS for file in [ROOT / part, *(ROOT / part).rglob("*")] if file.suffix in _SUFFIXES}
    common = _hash(others - {*test_files.values(), *(ROOT / "tests" / name for name in _FOR_MUTANTS)})
    hashes = {name: _hash([file]) for name, file in test_files.items()}
    state: dict[str, Any] = {}
    if path.exists() and not anew:
        state = json.loads(gzip.decompress(path.read_bytes()))
    if state.get("common") != common:
        state = {"common": common, "hashes": {}, "tests": {}}
    stale = sorted(name for name in hashes if state["hashes"].get(name) != hashes[name])
    fresh = {f"tests/{name}" for name in hashes} - {f"tests/{name}" for name in stale}
    kept = {test: found for test, found in state["tests"].items() if test.partition("::")[0] in fresh}
    state |= {"hashes": hashes, "tests": kept | (_record(place, quick, stale, jobs) if stale else {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(state).encode(), 1))
    return state["tests"]


_FOR_MUTANTS = ("mutants.py", "mutation.py", "preloaded.py")  # what the recording does not use
_SUFFIXES = (".py", ".toml", ".cpp", ".h")


def _record(place: str, quick: bool, files: Sequence[str], jobs: int) -> Recorded:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _copy_to(root)
        line_record.prepare(root)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "line_record", "-n", str(jobs), *OPTIONS[place]]
        marks = ["-m", "not slow" if quick else "slow or not slow"]
        environment = os.environ | {"PYTHONPATH": folder}
        paths = [f"tests/{file}" for file in files]
        ran = subprocess.run([*command, *marks, *paths], cwd=root, env=environment, capture_output=True, text=True)
        if ran.returncode not in (0, 1, 5):  # all passed, some failed, or there were none
            sys.exit(f"The tests cannot be recorded:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}")
        found = line_record.collect(root)
    left_out = [test for test in found if not found[test]["passed"]]
    seconds = f"{time.monotonic() - begin:.0f} seconds"
    print(f"recorded {len(found)} tests ({place}) in {seconds}; {len(left_out)} did not pass, and are left out")
    for test in left_out:
        print(f"    {test}")
    sys.stdout.flush()
    return found


# The run of one mutant.


def tests_of(mutant: Mutant, tests: Recorded) -> list[str]:
    """Return the tests that cover a mutant, in the order to try them."""
    passed = [test for test, found in tests.items() if found["passed"]]
    covering = [test for test in passed if not mutant.reached.isdisjoint(tests[test]["statements"])]
    if mutant.function == "module" and not covering:
        covering = passed  # It ran when the package was imported, before the first of them.
    covering.sort(key=lambda test: (tests[test]["seconds"], test))
    times, ranks = Counter[str](), {}
    for test in covering:
        function = test.partition("[")[0]
        ranks[test] = times[function]
        times[function] += 1
    return sorted(covering, key=ranks.__getitem__)


def first_of(covering: Sequence[str], file: str, tests: Recorded) -> list[str]:
    """Return the tests to try first, from few files, as each takes time to import."""
    times = Counter(test.partition("::")[0] for test in covering)
    own = file.partition("/")[0].removesuffix(".py")  # one file of tests for all files of a subpackage
    times[f"tests/test_{own}.py"] *= len(covering)  # its own comes before all others
    few = {name for name, _ in times.most_common(FILES)}
    names = [test for test in covering if test.partition("::")[0] in few]
    return names[: within_budget(names, tests, FIRST)]


def within_budget(names: Sequence[str], tests: Recorded, budget: float) -> int:
    """Return how many of some tests, at least one, take no longer than `budget` together."""
    paid, seconds = set[str](), 0.0
    for number, name in enumerate(names):
        shared = set(tests[name]["shared"])
        if not shared or shared - paid:  # otherwise the fixture is there, which is nearly all of its time
            seconds += tests[name]["seconds"]
        if seconds > budget:
            return max(1, number)
        paid |= shared
    return len(names)


class _Chosen:
    """A plugin of pytest: runs the given tests, in their order but file by file, and knows the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        # File by file, or fixtures that the tests of a file share would be made again and again.
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        ordered = sorted(tests, key=lambda test: files.index(test.partition("::")[0]))
        self.order = {test: index for index, test in enumerate(ordered)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])
        if len(items) < len(self.order):
            self.failed = f"the collection, in which {len(self.order) - len(items)} of {len(self.order)} tests are gone"
            items.clear()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"the import of {report.nodeid}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            hung = ", which did not come back" * ("something hangs" in report.longreprtext)
            self.failed = self.failed or report.nodeid + hung


class Run(NamedTuple):
    """What came of some tests with a mutant."""

    killed_by: str  # empty if they passed
    seconds: float  # of processor time


def run(base: Path, tests: Sequence[str], options: Sequence[str], mutant: Mutant | None, limit: float) -> Run:
    """Run tests on a copy of `base`, with the mutant if given."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "copy"
        shutil.copytree(base, root)
        if mutant is not None:
            path = root / "sync_batchnorm" / mutant.file
            path.write_text(mutant.applied(path.read_text()))
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
        # Simulated GPUs must be there before torch is; everything else starts from a process that has imported it.
        context: Any = multiprocessing.get_context("spawn" if "--simulated-gpus" in options else "forkserver")
        context.set_forkserver_preload(["preloaded"])
        process = context.Process(target=_run_pytest, args=(root, tests, options))
        with _starting:
            process.start()
        process.join(limit)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return Run(f"the time limit of {limit:.0f} seconds", limit)
        result = root / "result.json"
        if result.exists():
            return Run(*json.loads(result.read_text()))
        return Run(f"the end of the process, with exit code {process.exitcode}", 0.0)


_starting = threading.Lock()


def _run_pytest(root: Path, tests: Sequence[str], options: Sequence[str]) -> None:
    os.setsid()  # so that it can be ended together with programs that tests have started
    with (root / "output").open("w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    # What is imported is the copy, also by programs that tests start.
    os.chdir(root)
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests"))]
    os.environ["PYTHONPATH"] = str(root)
    chosen = _Chosen(tests)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    arguments = ["-x", "-q", "-n", "0", "--tb=short", "-m", "slow or not slow", *options, *files]
    code = None
    try:
        code = pytest.main(arguments, plugins=[chosen])
    finally:  # Threads that were left behind make the end of pytest an exception.
        if code == pytest.ExitCode.USAGE_ERROR:
            chosen.failed = "the import of tests/conftest.py"
        elif code != pytest.ExitCode.OK:
            chosen.failed = chosen.failed or f"the end of pytest, with {code!r}"
        (root / "result.json").write_text(json.dumps([chosen.failed, sum(os.times()[:4])]))


class End(NamedTuple):
    """How a mutant ended."""

    word: str
    detail: str
    seconds: float


def end_of(mutant: Mutant, records: dict[str, Recorded], base: Path) -> End:
    """Try a mutant, and return how it ended."""
    for equivalent in EQUIVALENT:
        if mutant in equivalent:
            return End("equivalent", equivalent.reason, 0.0)
    seconds, details = 0.0, list[str]()
    for place, tests in records.items():
        covering = tests_of(mutant, tests)
        if not covering or (place == "1 gpu" and details):
            continue
        first = first_of(covering, mutant.file, tests)
        rest = [test for test in covering[: within_budget(covering, tests, BUDGET[place])] if test not in first]
        for part in filter(None, (first, rest)):
            limit = 60.0 + 10.0 * sum(tests[test]["seconds"] for test in part)
            result = run(base, part, OPTIONS[place], mutant, limit)
            seconds += result.seconds
            if result.killed_by:
                return End("killed", f"by {result.killed_by}" + f" ({place})" * (place != "cpu"), seconds)
        details.append(f"{len(first) + len(rest)} of {len(covering)} tests passed ({place})")
    return End("survived" if details else "not covered", "; ".join(details), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="how many mutants to try (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (default: 1)")
    parser.add_argument("--file", default="", help="only mutants whose file, function or change contains this")
    parser.add_argument("--quick", action="store_true", help="with the tests of the quick suite only")
    parser.add_argument("--record", action="store_true", help="record anew which tests run what")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time (default: as many as cores)"
    )
    options = parser.parse_args()
    begin = time.monotonic()
    mutants = mutants_of(sources())
    chosen = sample([mutant for mutant in mutants if options.file in str(mutant)], options.sample, options.seed)
    print(f"{len(mutants)} mutants, of which {len(chosen)} are tried, with seed {options.seed}", flush=True)
    records: dict[str, Recorded] = {}
    for place in OPTIONS:
        if place != "1 gpu" or not all(any(tests_of(mutant, tests) for tests in records.values()) for mutant in chosen):
            records[place] = recorded(place, options.quick, options.record, options.jobs)
    ends = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        base = Path(folder) / "base"
        _copy_to(base)
        # So that the copies have the bytecode of all tests.
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only"]
        environment = os.environ | {"PYTHONPATH": str(base), "PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run(command, cwd=base, env=environment, capture_output=True, check=True)
        os.environ["PYTHONPATH"] = str(ROOT / "tests")  # where processes find what they import first
        for mutant, end in zip(chosen, pool.map(lambda mutant: end_of(mutant, records, base), chosen), strict=True):
            ends.append(end)
            print(f"{end.word:11} {mutant.file}:{mutant.line}: {mutant.function}: {mutant.change}", flush=True)
            print(f"            {end.detail}" * bool(end.detail), flush=True)
    counts = Counter(end.word for end in ends)
    died, others = counts["killed"], len(ends) - counts["equivalent"]
    print(", ".join(f"{number} {word}" for word, number in counts.most_common()))
    print(f"{died} of {others} that are not equivalent died ({100 * died / max(others, 1):.1f} of 100)")
    spent = sum(end.seconds for end in ends)
    print(f"{time.monotonic() - begin:.0f} seconds, {spent:.0f} of processor time for the mutants")
    return int(100 * died < 95 * others or 10 * counts["equivalent"] > len(ends))


if __name__ == "__main__":
    sys.exit(main())
