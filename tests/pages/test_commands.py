"""Every program that a page runs with Python does so, with small numbers; others run elsewhere, or say why not here."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from repository import PAGES, ROOT, blocks_of, copy_without_caches, output_of

BENCHMARKS = "python docs/benchmarks"

# What is appended to a command so that it takes seconds.
RUN = {
    "python -m sync_batchnorm": "",
    "python -m sphinx --fail-on-warning -c docs . out/site": "",
    f"{BENCHMARKS}/plot.py": "",
    f"{BENCHMARKS}/exchange/replicas.py --rounds 5": "--rounds 2 --replicas 2 --exchanges 20",
    f"{BENCHMARKS}/exchange/processes.py": "--processes 2 --channels 64",
    f"{BENCHMARKS}/check/run.py": "--images 2 --pixels 64 --net resnet18",
    f"{BENCHMARKS}/check/run.py --images 2 --pixels 64": "--net resnet18",
    f"{BENCHMARKS}/layer/kernels.py": "",
    f"{BENCHMARKS}/memory/run.py": "",
    f"{BENCHMARKS}/network/run.py --rounds 8": "--rounds 2 --networks mobilenet_v3_large --batch 4 --size 64",
    f"{BENCHMARKS}/wrapper/run.py --rounds 30": "--rounds 2 --replicas 2",
}
NEEDS = {"sphinx": "myst_parser", "plot.py": "matplotlib", "network": "torchvision", "check/run.py": "torchvision"}
PROFILE = "python docs/examples/profile_waits.py --profile out/profile.json"  # in a test of its own
# Programs that other tests run, those that compare with an older version, and what takes hours or is pytest itself.
ELSEWHERE = r"python (docs/examples/train_digits_ddp|.* --(other|existing) |.*/turns\.py |-m pytest|\.ci/mutants\.py)"


def programs() -> set[str]:
    """Return the commands of all pages that begin with Python."""
    blocks = [block.code for page in PAGES for block in blocks_of(page) if block.language == "bash"]
    lines = [line for code in blocks for line in re.sub(r"\\\n *", "", code).splitlines()]
    return {line for line in lines if line.startswith("python ")}


def run_in_copy(folder: Path, *arguments: str) -> None:
    """Run Python in a copy of the repository, as some programs write beside themselves."""
    for name in ("README.md", "LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "tests", "sync_batchnorm"):
        copy_without_caches(ROOT / name, folder / name)
    environment = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    output_of([sys.executable, *arguments], folder, **environment)


def test_programs_of_pages_are_those_that_run_here_or_elsewhere():
    assert {line for line in programs() if not re.match(ELSEWHERE, line)} == {*RUN, PROFILE}


@pytest.mark.slow
@pytest.mark.watchdog(180)
@pytest.mark.parametrize("command", dict.fromkeys(f"{command} {small}".rstrip() for command, small in RUN.items()))
def test_command_of_a_page_runs(command: str, tmp_path: Path):
    for word, package in NEEDS.items():
        if word in command and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    _, *arguments = shlex.split(command)
    run_in_copy(tmp_path, *arguments)


@pytest.mark.slow
@pytest.mark.watchdog(180)
def test_profile_that_a_page_records_is_summarized_by_its_command(tmp_path: Path):
    for package in ("matplotlib", "torchvision"):
        pytest.importorskip(package)
    (code,) = [block.code for block in blocks_of(ROOT / "docs/diagnosing.md") if "export_chrome_trace" in block.code]
    importable = "import sys; sys.path.append('docs/examples'); import common; common.import_torchvision()\n"
    run_in_copy(tmp_path, "-c", importable + code)
    run_in_copy(tmp_path, *shlex.split(PROFILE)[1:])
    assert (tmp_path / "out" / "profile_waits.png").exists()
