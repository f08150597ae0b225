"""Which tests run which statements of the package: recorded once, for `mutants.py`.

A recording runs the suite in a copy of the repository whose sources are as they are, but whose bytecode notes each
statement before it runs. (Python takes bytecode that is marked "unchecked" for any source.) So every thread is seen,
also those of autograd, which a trace function would miss, and so is every program that a test starts; a test takes
little longer. This file is a plugin of pytest in that copy, and the code of the package in it imports `ran`.
"""

from __future__ import annotations

import ast
import importlib._bootstrap_external as bootstrap  # type: ignore[import-not-found]
import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__: list[str] = []

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recorded"  # one file for each process
VARIABLE = "RECORD_FOR"  # what child processes run for: tests, and fixtures of more than one test

PROLOGUE = """
import sys
sys.path.append({tests!r})
from line_record import ran as __ran__
sys.path.remove({tests!r})
"""

_seen: set[str] = set()
_owners: list[str] = json.loads(os.environ.get(VARIABLE, "[]"))
_file: int | None = None


def ran(statement: str) -> None:
    """Note that a statement runs, the first time in each test: at once, as a process may end in any way."""
    if statement not in _seen:
        if not _seen:
            _write(_owners)
        _seen.add(statement)
        _write(statement)


def _write(entry: Any) -> None:
    """Write what a process runs for, then each statement that it runs for that; and a test, once it has ended."""
    global _file
    if _file is None:
        FOLDER.mkdir(exist_ok=True)
        _file = os.open(FOLDER / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(_file, f"{json.dumps(entry)}\n".encode())


def noting(tree: ast.Module, file: str) -> ast.Module:
    """Return a module that calls `__ran__` in front of each of its statements."""
    for node in list(ast.walk(tree)):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, field, [new for statement in value for new in _noted(statement, file)])
    return tree


def _noted(statement: ast.stmt, file: str) -> list[ast.stmt]:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
        return [statement]
    call = ast.parse(f"__ran__('{file}:{statement.lineno}')").body[0]
    for part in ast.walk(call):
        ast.copy_location(part, statement)
    return [call, statement]


def prepare(root: Path) -> None:
    """Give the package of a copy of the repository its bytecode."""
    package = root / "sync_batchnorm"
    for path in package.rglob("*.py"):
        source = path.read_bytes()
        tree = noting(ast.parse(source), path.relative_to(package).as_posix())
        first = next(i for i, statement in enumerate(tree.body) if "__ran__" in ast.dump(statement))
        tree.body[first:first] = ast.parse(PROLOGUE.format(tests=str(root / "tests"))).body
        code = compile(tree, str(path), "exec", dont_inherit=True)
        target = Path(importlib.util.cache_from_source(str(path)))
        target.parent.mkdir(exist_ok=True)
        data = bootstrap._code_to_hash_pyc(code, importlib.util.source_hash(source), checked=False)
        target.write_bytes(data)


def _now() -> float:
    return sum(os.times()[:4])  # of all threads, and of child processes that have ended


def _run_for(owners: list[str]) -> None:
    global _owners
    _owners = owners
    _seen.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    definitions = item._fixtureinfo.name2fixturedefs.values() if hasattr(item, "_fixtureinfo") else []
    shared = [_name(found[-1]) for found in definitions if _is_shared(found[-1])]
    # What a child runs counts for all tests with the fixture: it may be what the fixture started when first asked.
    os.environ[VARIABLE] = json.dumps(shared or [item.nodeid])
    _run_for([item.nodeid])
    begin, outcomes = _now(), item.stash.setdefault(OUTCOMES, [])
    yield
    _run_for([])
    seconds, passed = round(_now() - begin, 4), outcomes == ["passed"] * 3
    _write({"test": item.nodeid, "seconds": seconds, "shared": shared, "passed": passed})


OUTCOMES = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    item.stash[OUTCOMES].append(report.outcome)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Any:
    before = _owners
    if _is_shared(fixturedef):
        _run_for([*before, _name(fixturedef)])
    try:
        return (yield)
    finally:
        if _is_shared(fixturedef):
            _run_for(before)


def _is_shared(fixturedef: pytest.FixtureDef[Any]) -> bool:
    return fixturedef.scope != "function" and fixturedef.baseid.endswith(".py")


def _name(fixturedef: pytest.FixtureDef[Any]) -> str:
    return f"{fixturedef.baseid}: {fixturedef.argname}"


def collect(root: Path) -> dict[str, dict[str, Any]]:
    """Return what was recorded in a copy, by test: its seconds, shared fixtures, statements, and whether it passed."""
    statements: dict[str, set[str]] = defaultdict(set)
    found: list[dict[str, Any]] = []
    for path in (root / FOLDER.name).glob("*.jsonl"):
        owners: list[str] = []
        for entry in map(json.loads, path.read_text().splitlines()):
            if isinstance(entry, list):
                owners = entry
            elif isinstance(entry, str):
                for owner in owners:
                    statements[owner].add(entry)
            else:
                found.append(entry)
    # The first test with a shared fixture has paid for all of them, but any of them pays if it runs alone.
    costs: dict[str, float] = {}
    for entry in found:
        for owner in [entry["test"], *entry["shared"]]:
            costs[owner] = max(costs.get(owner, 0.0), entry["seconds"])
    tests = {}
    for entry in found:
        owners = [entry["test"], *entry["shared"]]
        tests[entry["test"]] = {
            "seconds": max(costs[owner] for owner in owners),
            "shared": entry["shared"],
            "passed": entry["passed"],
            "statements": sorted(set().union(*(statements[owner] for owner in owners))),
        }
    return tests
