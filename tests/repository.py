"""The repository: the code of its pages, copies of its package, and programs in processes of their own."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sync_batchnorm

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGE = Path(sync_batchnorm.__file__).parent  # wherever it was imported from
TINY = {  # what lets the examples run for seconds
    "train_digits": "--epochs 1 --batch 96 --replicas 3",
    "segment_digits": "--steps 8 --replicas 2",
    "train_gan": "--steps 9 --compared 8 --replicas 3",
    "caption_digits": "--steps 8 --replicas 3",
}


def copy_without_caches(folder: Path, target: Path) -> None:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


def output_of(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Run a program that succeeds in a folder, with no path to this copy of the package; return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    result = subprocess.run(command, cwd=folder, env=inherited | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Block(NamedTuple):
    """A block of code of a page."""

    page: Path
    section: str  # the heading of the second level above it
    language: str
    line: int  # of the first line of the code, counted from 1
    code: str

    def run(self, names: dict[str, Any]) -> None:
        """Run the code with these names; the empty lines make a traceback name the line of the page."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), names)


def blocks_of(page: Path) -> Iterator[Block]:
    section, fence, language, start, lines = "", "", "", 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        opening = re.match(r"(```+)(\S*)", line)
        if fence and line.strip() == fence:
            yield Block(page, section, language, start, "\n".join(lines) + "\n")
            fence = ""
        elif fence:
            lines.append(line)
        elif opening:
            fence, language, start, lines = opening[1], opening[2], number + 1, []
        elif line.startswith("## "):
            section = line[3:]
    assert not fence, f"{page.name}: the block of line {start} has no end"
