"""Break the package in one place at a time, and run the tests that must notice: ``python .ci/mutants.py``.

A mutant is a small change that a test should notice: another comparison, operator or constant, an exchange of
arguments, a condition that always or never holds, a statement or lock that is gone; never in texts and annotations.
Each mutant of a random sample is tried in a copy of the repository, on the CPU and on simulated GPUs: first with the
quick tests of the files and folders that are named like its file, then with those of the others, then with the slow
tests of the former. Prints each mutant and how it ended; a person reads those that survived, since some change nothing
that a test could notice. Exits with 1 if fewer than 90 of 100 have died.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(".git", ".venv", ".nox", ".*_cache", "__pycache__", "build", "out")  # not in a copy
PLACES = {"cpu": (), "4 gpus": ("--simulated-gpus", "4")}  # with the options of pytest
JOBS = os.cpu_count() or 1
LIMIT = 1200.0  # seconds, after which tests that hang are killed

# The mutants.

OPPOSITES: dict[type[ast.AST], type[Any]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
}
SPECIAL = ("__", "if TYPE_", "if sys.version_info")  # which are not run, or not by this Python
SYMMETRIC = ("isinstance", "issubclass", "max", "min", "torch.mul")  # or refuse other arguments
SYMMETRIC += ("torch.equal", "torch.promote_types", "math.isclose", "suppress", "agree", "_agree")
NESTING = (ast.If, ast.For, ast.While, ast.ExceptHandler)
DROPPED = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break, ast.For)
NO_LOCK = '__import__("contextlib").nullcontext()'


class Mutant(NamedTuple):
    file: str
    line: int
    change: str
    source: str  # of the file, with the change

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


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
            change = f"{'.'.join(names) or 'module'}: `{' '.join(before.split())}` -> `{text}`"
            yield Mutant(file, node.lineno, change, changed)


def all_mutants() -> list[Mutant]:
    """Return the mutants of the package, in a fixed order."""
    package = ROOT / "sync_batchnorm"
    files = {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}
    return [mutant for file, source in files.items() for mutant in mutants_of(file, source)]


# The tests.


def all_tests() -> list[str]:
    """Return all files of tests but the one that reads the code as a linter does: a mutant must die of what it does."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return [file for file in files if not file.endswith("test_lint.py")]


def tests_for(file: str, tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files of tests that are, or whose folder is, named like a file of the package; and the others."""
    names = {part.strip("_") for part in Path(file).with_suffix("").parts}
    near: list[str] = []
    far: list[str] = []
    for path in map(Path, tests):
        is_near = names & {path.parent.name, path.stem.removeprefix("test_")}
        (near if is_near else far).append(str(path))
    return near, far


def run_pytest(root: Path, *arguments: str) -> str:
    """Run pytest in a copy up to the first failure; return its line, or an empty text if there is none."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--timeout", "60", *arguments]
    env = os.environ | {"PYTHONPATH": str(root)}
    with (root / "output").open("w") as file:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=file, stderr=file, start_new_session=True)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the programs that tests have started
    if process.wait() in (0, 5):  # 5 if no test is for this place
        return ""
    lines = (root / "output").read_text().splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), f"status {process.returncode}")


def end_of(mutant: Mutant, base: Path, tests: Sequence[str]) -> tuple[str, str]:
    """Try a mutant; return how it ended, and why."""
    near, far = tests_for(mutant.file, tests)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "copy"
        shutil.copytree(base, root)
        (root / "sync_batchnorm" / mutant.file).write_text(mutant.source)
        for marks, files in (("not slow", near), ("not slow", far), ("slow", near)):
            for place, options in PLACES.items():
                failure = run_pytest(root, "-m", marks, *options, *files) if files else ""
                if failure:
                    return "killed", f"by {failure} ({place})"
    return "survived", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="how many mutants to try (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (default: 1)")
    parser.add_argument("--file", default="", help="only mutants whose file, function or change contains this")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="instead of all tests")
    options = parser.parse_args()
    tests = options.tests or all_tests()
    mutants = [mutant for mutant in all_mutants() if options.file in str(mutant)]
    chosen = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    print(f"{len(mutants)} mutants, of which {len(chosen)} are tried, with seed {options.seed}", flush=True)
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        base = Path(folder)
        shutil.copytree(ROOT, base, ignore=IGNORED, dirs_exist_ok=True)
        for place in PLACES.values():
            if failure := run_pytest(base, *place, *tests):
                sys.exit(f"The tests fail without a mutant: {failure}")
        ends = pool.map(lambda mutant: end_of(mutant, base, tests), chosen)
        for mutant, (end, detail) in zip(chosen, ends, strict=True):
            counts[end] += 1
            print(f"{end:11} {mutant}\n            {detail}", flush=True)
    print(f"{counts['killed']} of {len(chosen)} died: {dict(counts)}")
    return int(counts["killed"] < 0.9 * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
