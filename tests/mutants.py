"""Break the package in one place at a time, and run the tests that must notice: ``python tests/mutants.py``.

A mutant is a small change that a test should notice: another comparison, operator or constant, an exchange of
arguments, a condition that always or never holds, a statement or lock that is gone; never in texts and annotations.
Each mutant of a random sample is tried in a copy of the repository, with the tests that run its statement, on the CPU
and on simulated GPUs. Prints each mutant and how it ended; exits with 1 if fewer than 95 of 100 have died.

Which tests run what is recorded before, by this file as a plugin of pytest, in a copy whose bytecode notes each
statement before it runs, so that all threads are seen, also those of autograd. What other processes run counts for all
tests of the file that has started them, and what runs at import for all that run something of the same file.
"""

from __future__ import annotations

import argparse
import ast
import importlib._bootstrap_external as bootstrap
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "build", "out", "venv")  # is not part of a copy
PLACES = {"cpu": (), "4 gpus": ("--simulated-gpus", "4")}  # with the options of pytest
JOBS = os.cpu_count() or 1
BUDGET = 200.0  # seconds of tests for a mutant, in each place, after those of its own file
# Mutants that were read, as they are printed but for the line, and why no test can notice them.
EQUIVALENT: dict[str, str] = {
    "layers.py: _SynchronizedBatchNorm._check_input: `1` -> `2`": "any number of rows makes torch raise the error",
    "coordinator.py: Coordinator.abort: `monotonic() < deadline` -> `monotonic() <= deadline`": "at one instant only",
    "coordinator.py: Coordinator._find_deadlock: `not self._left and len(self._waiting) == len(rendezvous.messages)` "
    "-> `False`": "it only saves the search of a cycle where there is none",
    "__main__.py: check_parity: `9` -> `10`": "images of any size do",
    "__main__.py: check_parity: `1.5` -> `3.0`": "weights of any size do",
    "__main__.py: parsed_devices: `0` -> `False`": "the same number",
    "backends/cpu.py: Cpu.gradients: `stacked[1::2].addcmul_(stacked[::2], (rounded - mean) * invstd)` -> "
    "`stacked[1::2].addcmul_((rounded - mean) * invstd, stacked[::2])`": "the same product",
    "layers.py: _SynchronizedBatchNorm: `False` -> `True`": "each callback that gives a layer a pipe sets it",
    "layers.py: _SynchronizedBatchNorm.forward: `is_in_replica()` -> `True`": "what is called then asks again",
    "exchange.py: _exchanged: `0` -> `1`": "the name of the only replica",
    "distributed.py: gather_statistics: `dist.all_gather_into_tensor` -> `False`": "its name in an older torch",
    "backends/cpu.py: affine: `input.stride(1) == 1` -> `input.stride(1) != 1`": "the slower of two operators",
    "backends/cpu.py: is_precise: `lowest.item() >= -eps` -> `lowest.item() > -eps`": "at one value only",
    "backends/cpu.py: exact_moments: `0.0` -> `1.0`": "any finite shift does, where the mean is not finite",
    "backends/cpu.py: gradient_sums: `0.0` -> `1.0`": "an eps that the operator does not use beside an invstd",
    "replicate.py: _ReplicationMixin.replicate: `0.0` -> `1.0`": "no replica runs yet that it could wait for",
}

# The mutants.

OPPOSITES: dict[type[ast.AST], type[Any]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
}
SPECIAL = ("__", "if TYPE_", "if sys.version_info")  # which are not run, or not by this Python
SYMMETRIC = ("isinstance", "issubclass", "max", "min", "torch.mul")  # or refuse other arguments
NESTING = (ast.If, ast.For, ast.While, ast.ExceptHandler)
DROPPED = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break, ast.For)
NO_LOCK = '__import__("contextlib").nullcontext()'


class Mutant(NamedTuple):
    """One change; with the number of its line, which is only where it is today."""

    file: str
    line: int
    change: str
    source: str  # of the file, with the change
    statement: str  # as "file:line", or "file:" if it runs at import

    def __str__(self) -> str:
        return f"{self.file}: {self.change}"


def walk(node: ast.AST, around: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the nodes that may change, each with those around it, the nearest first."""
    special = isinstance(node, (ast.Assign, ast.AnnAssign, ast.If)) and ast.unparse(node).startswith(SPECIAL)
    # Of `zip`, whose arguments are equally long, and of caches, which are large enough.
    sizes = isinstance(node, ast.keyword) and node.arg in ("strict", "maxsize")
    if special or sizes or isinstance(node, ast.JoinedStr):
        return
    yield node, around
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                yield from walk(child, (node, *around))


def with_(node: Any, **fields: Any) -> str:
    """Return the text of a node with other fields."""
    return ast.unparse(type(node)(**vars(node) | fields))


def changes(node: Any, around: Sequence[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Yield what can stand instead of a node, or of a part of it."""
    conditions = [node.test] if isinstance(node, (ast.If, ast.IfExp)) else getattr(node, "ifs", [])
    yield from ((condition, constant) for condition in conditions for constant in ("True", "False"))
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            yield node, with_(node, ops=[*node.ops[:i], OPPOSITES[type(operator)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BoolOp):
        yield node, with_(node, op=OPPOSITES[type(node.op)]())
        yield from ((value, str(isinstance(node.op, ast.And))) for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPPOSITES and "'" not in ast.unparse(node):
        yield node, with_(node, op=OPPOSITES[type(node.op)]())
    elif isinstance(node, ast.Call) and ast.unparse(node.func) not in SYMMETRIC:
        for i, (one, other) in enumerate(pairwise(node.args)):
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                yield node, with_(node, args=[*node.args[:i], other, one, *node.args[i + 2 :]])
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        opposite = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node, repr(opposite if isinstance(node.value, int) else 2 * node.value or 1.0)
    elif isinstance(node, ast.With):
        yield from ((item.context_expr, NO_LOCK) for item in node.items if item.optional_vars is None)
    call = isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    stored = isinstance(node, ast.Assign) and not any(isinstance(target, ast.Name) for target in node.targets)
    nested = isinstance(node, ast.Return) and any(isinstance(outer, NESTING) for outer in around)  # not the last one
    if isinstance(node, DROPPED) or call or stored or nested:
        yield node, "pass"


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield the mutants of a file, each with as many lines as the file."""
    encoded, known = source.encode(), {source}
    starts = [0, *accumulate(len(line) for line in encoded.splitlines(keepends=True))]
    for parent, around in walk(ast.parse(source)):
        for node, text in changes(parent, around):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = encoded[begin:end].decode()
            filled = text + "\n" * (before.count("\n") - text.count("\n"))
            filled = f"({filled})" if isinstance(node, ast.expr) else filled
            changed = (encoded[:begin] + filled.encode() + encoded[end:]).decode()
            if changed in known or text == ast.unparse(node):
                continue
            known.add(changed)
            outer = (parent, *around)
            names = [part.name for part in reversed(outer) if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
            statement = next(i for i, part in enumerate(outer) if isinstance(part, ast.stmt))
            in_function = any(isinstance(part, ast.FunctionDef) for part in outer[statement + 1 :])
            covered = f"{file}:{outer[statement].lineno if in_function else ''}"
            change = f"{'.'.join(names) or 'module'}: `{' '.join(before.split())}` -> `{text}`"
            yield Mutant(file, node.lineno, change, changed, covered)


def all_mutants() -> list[Mutant]:
    """Return the mutants of the package, in a fixed order."""
    package = ROOT / "sync_batchnorm"
    files = {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}
    return [mutant for file, source in files.items() for mutant in mutants_of(file, source)]


# The plugin of pytest, in a copy of the repository.

CHOSEN = ROOT / "chosen.json"  # the tests to run, in this order; without this file, all run and are recorded
_own_process = 0 if "PYTEST_CURRENT_TEST" in os.environ else os.getpid()  # not that of a program that a test starts
_seen: set[str] = set()
_test = ""


def _write(*entry: Any) -> None:
    with (ROOT / f"recorded.{os.getpid()}").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def ran(statement: str) -> None:
    """Note that a statement runs, the first time in each test: at once, as a process may end in any way."""
    global _test
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # which pytest sets, and processes inherit
    if test != _test:
        _test = test
        _seen.clear()
    if test and statement not in _seen:
        _seen.add(statement)
        _write(statement, test if os.getpid() == _own_process else test.partition("::")[0])


def pytest_runtest_logreport(report: Any) -> None:
    if not CHOSEN.exists():
        _write(report.nodeid, report.when, report.outcome == "passed", report.duration)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if CHOSEN.exists():
        order = {test: number for number, test in enumerate(json.loads(CHOSEN.read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def note_statements(root: Path) -> None:
    """Give the package of a copy the bytecode that calls `ran` in front of each statement."""
    for path in (root / "sync_batchnorm").rglob("*.py"):
        source, file = path.read_bytes(), path.relative_to(root / "sync_batchnorm").as_posix()
        tree = ast.parse(source)
        for node in list(ast.walk(tree)):
            for field, value in ast.iter_fields(node):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    setattr(node, field, [new for statement in value for new in _noted(statement, file)])
        code = compile(tree, str(path), "exec", dont_inherit=True)
        target = Path(importlib.util.cache_from_source(str(path)))
        target.parent.mkdir(exist_ok=True)
        hashed = importlib.util.source_hash(source)
        target.write_bytes(bootstrap._code_to_hash_pyc(code, hashed, checked=False))


def _noted(statement: ast.stmt, file: str) -> list[ast.stmt]:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
        return [statement]
    call = ast.parse(f"__import__('mutants').ran('{file}:{statement.lineno}')").body[0]
    for part in ast.walk(call):
        ast.copy_location(part, statement)
    return [call, statement]


class Record(NamedTuple):
    """What the tests of one place have run."""

    seconds: dict[str, float]  # by test that has passed
    tests: dict[str, set[str]]  # by statement; also whole files of tests

    def covering(self, statement: str) -> tuple[list[str], list[str]]:
        """Return the tests to try: those of the file and the folder of the statement, and some of the others."""
        reached = [
            key for key in self.tests if key == statement or (statement[-1] == ":" and key.startswith(statement))
        ]
        names = set().union(*(self.tests[key] for key in reached))
        found = [test for test in self.seconds if test in names or test.partition("::")[0] in names]
        found.sort(key=lambda test: (self.seconds[test], test))
        cases = defaultdict[str, Iterator[int]](count)
        found.sort(key=lambda test: next(cases[test.partition("[")[0]]))  # one case of each function before the next
        files = [f"/test_{part.removesuffix('.py')}.py::" for part in statement.partition(":")[0].split("/")]
        nearest = [test for test in found if any(file in test for file in files)]
        others = [test for test in found if test not in nearest]
        sums = accumulate(self.seconds[test] for test in others)
        return nearest, [test for test, total in zip(others, sums, strict=True) if total <= BUDGET or test == others[0]]


def run_pytest(root: Path, *arguments: str, limit: float | None = None) -> tuple[int, str]:
    """Run pytest in a copy, with this plugin; return its exit status and output. At the limit, in seconds, kill it."""
    env = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", *arguments]
    with (root / "output").open("w") as file:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=file, stderr=file, start_new_session=True)
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the programs that tests have started
    return process.wait(), (root / "output").read_text()


def record(place: str, marks: str) -> Record:
    """Run all tests, and return which of them run what."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, ignore=IGNORED, dirs_exist_ok=True)
        note_statements(Path(folder))
        status, output = run_pytest(Path(folder), "-n", str(JOBS), "-m", marks, *PLACES[place])
        if status not in (0, 1):
            sys.exit(f"The tests cannot be recorded:\n{output[-3000:]}")
        entries = [json.loads(line) for path in Path(folder).glob("recorded.*") for line in path.open()]
    tests, reports = defaultdict[str, set[str]](set), defaultdict[str, dict[str, Any]](dict)
    for name, key, *report in entries:
        if report:
            reports[name][key] = report
        else:
            tests[name].add(key)
    ended = {test: [sum(column) for column in zip(*phases.values(), strict=True)] for test, phases in reports.items()}
    seconds = {test: duration for test, (passed, duration) in ended.items() if passed == 3}  # set up, called, torn down
    print(
        f"{place}: {len(seconds)} tests have passed and are recorded, {len(ended) - len(seconds)} have not", flush=True
    )
    return Record(seconds, tests)


def end_of(mutant: Mutant, records: dict[str, Record], base: Path) -> tuple[str, str]:
    """Try a mutant; return how it ended, and by which test or after how many."""
    if str(mutant) in EQUIVALENT:
        return "equivalent", EQUIVALENT[str(mutant)]
    passed = []
    for place, found in records.items():
        # The nearest are enough for most mutants, and each further file takes time to import.
        for tests in filter(None, found.covering(mutant.statement)):
            tests.sort(key=lambda test: test.partition("::")[0])
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                root = Path(folder) / "copy"
                shutil.copytree(base, root)
                (root / "sync_batchnorm" / mutant.file).write_text(mutant.source)
                (root / CHOSEN.name).write_text(json.dumps(tests))
                options = ["-m", "slow or not slow", "-x", "-n", "0", *PLACES[place]]
                limit = 60 + 10 * sum(found.seconds[test] for test in tests)
                status, output = run_pytest(root, *options, *{test.partition("::")[0] for test in tests}, limit=limit)
            if status:
                failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return "killed", f"by {[*failures, f'status {status}'][0]} ({place})"
            passed.append(f"{len(tests)} tests passed ({place})")
    return ("survived" if passed else "not covered"), "; ".join(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="how many mutants to try (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (default: 1)")
    parser.add_argument("--file", default="", help="only mutants whose file, function or change contains this")
    parser.add_argument("--quick", action="store_true", help="with the tests of the quick suite only")
    options = parser.parse_args()
    mutants = [mutant for mutant in all_mutants() if options.file in str(mutant)]
    chosen = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    print(f"{len(mutants)} mutants, of which {len(chosen)} are tried, with seed {options.seed}", flush=True)
    marks = "not slow" if options.quick else "slow or not slow"
    records = {place: record(place, marks) for place in PLACES}
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        base = Path(folder)
        shutil.copytree(ROOT, base, ignore=IGNORED, dirs_exist_ok=True)
        run_pytest(base, "-n", "0", "--collect-only")  # makes the bytecode of all tests
        ends = pool.map(lambda mutant: end_of(mutant, records, base), chosen)
        for mutant, (end, detail) in zip(chosen, ends, strict=True):
            counts[end] += 1
            print(f"{end:11} {mutant.file}:{mutant.line}: {mutant.change}\n            {detail}", flush=True)
    print(f"{counts['killed']} of {len(chosen) - counts['equivalent']} that are not equivalent died: {dict(counts)}")
    return int(counts["killed"] < 0.95 * (len(chosen) - counts["equivalent"]))


if __name__ == "__main__":
    sys.exit(main())
