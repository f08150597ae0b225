"""The versions of torch and Python that are claimed are those that passed, by the table of the contributing page."""

from __future__ import annotations

import re

from repository import ROOT

SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
OLDEST = re.search(r'"torch>=([\d.]+)"', SETUP)[1]
PYTHONS = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', SETUP))


def rows() -> list[dict[str, str]]:
    """Return the table of what has passed."""
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    lines = page.split("\n## Versions\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_everything_that_is_claimed_is_in_the_table_and_has_passed():
    assert not [row for row in rows() if row["failed"] != "0" or int(row["passed"]) < 1000]
    assert min((row["torch"] for row in rows()), key=lambda torch: [*map(int, torch.split("."))]) == OLDEST
    assert {row["Python"].rpartition(".")[0] for row in rows()} == PYTHONS
    assert "Free Threading" not in SETUP


def test_workflow_and_command_have_the_oldest_torch_and_every_python_of_the_table():
    for file in (".github/workflows/ci.yml", "noxfile.py"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"torch=={OLDEST} " in text
        assert set(re.findall(r'"(3\.\d+)"', text)) == PYTHONS
    for pin in re.search(r'"pinned": "(.+)"', text)[1].split():
        assert f'"{pin}"' in SETUP
