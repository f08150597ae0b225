"""Run the suite with every version of torch and Python that is claimed, and print the table of the contributing page.

The Python that runs this gets the oldest torch that setup.py allows, the one that it pins, and the newest that pip
finds. Every other Python of this machine gets the pinned torch. Each pair gets an environment of its own, with what the
suite needs beside torch: as pinned, or the newest that fits, or not at all, which the table then says.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
ABOUT = "import sys; print('.'.join(map(str, sys.version_info[:3])) + sys.abiflags, sys.executable)"
HEADER = ("Python", "torch", "passed", "skipped", "failed", "without")


class Pair(NamedTuple):
    python: str
    executable: str
    torch: str


def setup_argument(name: str) -> ast.expr:
    """Return an argument of the call in setup.py."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"]
    return next(keyword.value for keyword in calls[0].keywords if keyword.arg == name)


def oldest_torch() -> str:
    """Return the oldest torch that setup.py allows."""
    (requirement,) = ast.literal_eval(setup_argument("install_requires"))
    return str(requirement).removeprefix("torch>=")


def oldest_python() -> tuple[int, int]:
    """Return the oldest Python that setup.py allows."""
    major, minor = str(ast.literal_eval(setup_argument("python_requires"))).removeprefix(">=").split(".")
    return int(major), int(minor)


def pinned_versions() -> dict[str, str]:
    """Return the pinned versions of what the suite needs, by name."""
    return dict(re.findall(r'"([\w-]+)==([\d.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8")))


def newest_torch() -> str:
    """Return the newest torch that pip finds for this Python."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return found.split("(")[1].split(")")[0].partition("+")[0]


def pythons() -> dict[str, str]:
    """Return the executables of all Pythons found that setup.py allows, by version; this one comes first.

    On the search path, as python3.N, and among those of pyenv. A build without the interpreter lock is none of them.
    """
    names = [f"python3.{minor}" for minor in range(oldest_python()[1], 30)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [sys.executable, *filter(None, map(shutil.which, names)), *pyenv.glob("versions/*/bin/python")]
    found: dict[str, str] = {}
    for candidate in candidates:
        about = subprocess.run([candidate, "-c", ABOUT], capture_output=True, text=True)
        if about.returncode:  # as of a pyenv shim for a version that is not chosen
            continue
        version, executable = about.stdout.split(maxsplit=1)
        major, minor = map(int, version.split(".")[:2])
        if (major, minor) >= oldest_python() and not version.endswith("t"):
            found.setdefault(version, executable.strip())
    return found


def pairs() -> Iterator[Pair]:
    """Return what is to be run."""
    pinned, found = pinned_versions()["torch"], pythons()
    (first, executable), *others = found.items()
    for torch in dict.fromkeys((oldest_torch(), pinned, newest_torch())):
        yield Pair(first, executable, torch)
    for python, executable in others:
        yield Pair(python, executable, pinned)


def prepare(pair: Pair, folder: Path) -> list[str]:
    """Make the environment of `pair`; return the packages that cannot be had for it."""
    python = str(folder / "bin" / "python")
    subprocess.run([pair.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    # Together, since some torch takes no newer setuptools; an older one, which comes with Python, builds no wheel.
    subprocess.run([*pip, f"torch=={pair.torch}", "setuptools>=77"], check=True)
    absent = []
    for name, pin in pinned_versions().items():
        if name in ("torch", "setuptools", "ruff"):
            continue
        for requirement in (f"{name}=={pin}", f"{name}>={pin.partition('.')[0]}"):
            command = [*pip, f"torch=={pair.torch}", requirement]
            if subprocess.run(command, capture_output=True).returncode == 0:
                break
        else:
            absent.append(name)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ROOT], check=True)
    return absent


def run(pair: Pair, folder: Path, arguments: list[str]) -> list[str]:
    """Run the suite for `pair` in an environment at `folder`; return the row of the table."""
    absent = prepare(pair, folder)
    report = folder / "report.xml"
    command = [folder / "bin" / "python", "-m", "pytest", "-q", "-rs", f"--junitxml={report}", *arguments]
    subprocess.run(command, cwd=ROOT)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    passed = total - skipped - failed
    return [pair.python, pair.torch, str(passed), str(skipped), str(failed), ", ".join(absent)]


def main() -> None:
    """Run what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a pattern of pairs, as in '3.11.7 2.8'")
    parser.add_argument("arguments", nargs="*", help="of pytest, after --")
    options = parser.parse_args()
    rows = []
    for pair in pairs():
        if re.search(options.only, f"{pair.python} {pair.torch}"):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run(pair, Path(folder), options.arguments))
    for row in (HEADER, ["---"] * len(HEADER), *rows):
        print(f"| {' | '.join(row)} |")
    sys.exit(any(row[4] != "0" for row in rows))


if __name__ == "__main__":
    main()
