"""The versions of torch and Python that are claimed are those that passed, by the table of the contributing page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import versions

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"


def rows() -> list[dict[str, str]]:
    """Return the table of what has passed."""
    lines = PAGE.read_text(encoding="utf-8").split("\n## Versions\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_table_is_the_one_that_the_command_prints():
    assert tuple(rows()[0]) == versions.HEADER


def test_everything_in_the_table_has_passed():
    assert [row for row in rows() if row["failed"] != "0" or int(row["passed"]) < 1000] == []


def test_oldest_torch_that_is_allowed_has_passed():
    passed = {row["torch"] for row in rows()}
    assert min(passed, key=lambda version: [int(part) for part in version.split(".")]) == versions.oldest_torch()


def test_every_python_of_the_classifiers_has_passed():
    prefix = "Programming Language :: Python :: 3."
    classifiers = ast.literal_eval(versions.setup_argument("classifiers"))
    claimed = {line.removeprefix(prefix) for line in classifiers if line.startswith(prefix)}
    assert claimed == {row["Python"].split(".")[1] for row in rows()}
    assert not [line for line in classifiers if ":: Free Threading ::" in line]


def test_workflow_has_the_oldest_torch_and_every_python_of_the_table():
    workflow = (PAGE.parents[1] / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert f"torch=={versions.oldest_torch()} " in workflow
    assert {row["Python"].rpartition(".")[0] for row in rows()} == set(re.findall(r'"(3\.\d+)"', workflow))


def test_python_that_runs_the_command_gets_the_oldest_and_the_pinned_torch(monkeypatch):
    monkeypatch.setattr(versions, "newest_torch", lambda: "99.0.0")
    monkeypatch.setattr(versions, "pythons", lambda: {"3.11.7": "this", "3.13.5": "another"})
    oldest, pinned = versions.oldest_torch(), versions.pinned_versions()["torch"]
    assert list(versions.pairs()) == [
        versions.Pair("3.11.7", "this", oldest),
        versions.Pair("3.11.7", "this", pinned),
        versions.Pair("3.11.7", "this", "99.0.0"),
        versions.Pair("3.13.5", "another", pinned),
    ]
