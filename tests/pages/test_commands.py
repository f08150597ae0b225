"""Every command of a page runs, here with small numbers, in another test, in `.ci/run`; or a reason why not is here."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BENCHMARKS = "python docs/benchmarks"

# What is appended to a command so that it takes seconds.
RUN = {
    "python -m sync_batchnorm": "",
    "python -m sphinx --fail-on-warning -c docs . out/site": "",
    f"{BENCHMARKS}/plot.py": "",
    f"{BENCHMARKS}/exchange/replicas.py --rounds 5": "--rounds 2 --replicas 2 --exchanges 20",
    f"{BENCHMARKS}/exchange/processes.py": "--processes 2 --channels 64",
    f"{BENCHMARKS}/check/run.py": "--net resnet18 --images 2 --pixels 64",
    f"{BENCHMARKS}/check/run.py --images 2 --pixels 64": "--net resnet18",
    f"{BENCHMARKS}/layer/kernels.py": "",
    f"{BENCHMARKS}/memory/run.py": "",
    f"{BENCHMARKS}/network/run.py --rounds 8": "--rounds 2 --networks mobilenet_v3_large --batch 4 --size 64",
    f"{BENCHMARKS}/wrapper/run.py --rounds 30": "--rounds 2 --replicas 2",
}
NEEDS = {"sphinx": "myst_parser", "plot.py": "matplotlib", "network": "torchvision", "check/run.py": "torchvision"}
ELSEWHERE = {
    "python docs/examples/train_digits_ddp.py": "tests/processes/test_distributed.py",
    "torchrun --nproc-per-node 2 docs/examples/train_digits_ddp.py": "tests/processes/test_distributed.py",
    "torchrun --nproc-per-node 2 train.py": "tests/processes/test_distributed.py",
    "torchrun --nproc-per-node 8 train.py": "tests/processes/test_distributed.py",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint first-machine:29400 train.py": (
        "tests/processes/test_distributed.py"
    ),
    "python -m pytest FILE": "tests/pages/test_docs.py",  # by hand, as its last line says
    "python -m pytest FILE --simulated-gpus 4": ".ci/run",
    "python -m pytest --simulated-gpus 4": ".ci/run",
    "python -m pytest --patience 5": "tests/project/test_hangs.py",
    "pip install '.[docs]'": ".ci/run",
    "rm -r models/networks/sync_batchnorm": "tests/conversion/test_copied_folder.py",
    "cp -r ../sync_batchnorm/sync_batchnorm models/networks/": "tests/conversion/test_copied_folder.py",
}
IMPORTS, PROFILE = "grep -rlZE ", "python docs/examples/profile_waits.py --profile out/profile.json"  # tests below
NEEDS_NETWORK = (r"pip install \.", "pip install --no-deps", "python3 -m venv .venv", "pipx run")
COMPARES = ("git worktree add", ".* --other ", ".* --existing ", ".*/turns.py ", "diff -r ")  # with older versions
TOO_LONG = ("python .ci/mutants.py",)
SHELL = (r"\. .venv/bin/activate",)


def commands() -> list[str]:
    """Return the commands of all pages."""
    found = []
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "bash":
                code = re.sub(r"(&&|\\|\|)\n +", r"\1 ", block.code)
                found += [re.sub(r"\\ ", "", line) for line in code.splitlines()]
    return list(dict.fromkeys(found))


def reason_not_to_run(command: str) -> bool:
    return any(re.match(beginning, command) for beginning in (*NEEDS_NETWORK, *COMPARES, *TOO_LONG, *SHELL))


def run_in_copy(folder: Path, *arguments: str) -> None:
    """Run Python in a copy of the repository, as some programs write beside themselves."""
    shutil.copy(ROOT / "README.md", folder)
    for name in ("docs", "tests", "sync_batchnorm"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("command", commands())
def test_command_of_a_page_is_run_or_has_a_reason(command: str):
    where = ELSEWHERE.get(command)
    is_below = command == PROFILE or command.startswith(IMPORTS)
    assert (command in RUN) + (where is not None) + is_below + reason_not_to_run(command) == 1, command
    assert where is None or (ROOT / where).is_file()


def test_there_is_no_command_that_no_page_has():
    assert {*RUN, *ELSEWHERE} <= {*commands()}


@pytest.mark.slow
@pytest.mark.watchdog(180)
@pytest.mark.parametrize("command", RUN)
def test_command_of_a_page_runs(command: str, tmp_path: Path):
    for word, package in NEEDS.items():
        if word in command and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    _, *arguments = shlex.split(f"{command} {RUN[command]}")
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


@pytest.mark.skipif(sys.platform != "linux", reason="the page says that it needs GNU grep and sed")
def test_command_of_a_page_rewrites_imports(tmp_path: Path):
    (command,) = [command for command in commands() if command.startswith(IMPORTS)]
    kept = "from apex.parallel.sync_batchnorm import A\n"
    before = "from models.networks.sync_batchnorm.replicate import B\n    from . import sync_batchnorm\n" + kept
    after = "from sync_batchnorm.replicate import B\n    import sync_batchnorm\n" + kept
    for name in ("main.py", "models/net.py", ".venv/hidden.py", "site-packages/net.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(before)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.py")}
    rewritten = {name for name, text in found.items() if text == after}
    assert rewritten == {"main.py", "models/net.py"}
    assert all(text == before for name, text in found.items() if name not in rewritten)
