"""Every command of a page runs with its smallest arguments, here or where it says; what cannot run says why not."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from repository import PAGES, ROOT, TINY, blocks_of, copy_without_caches, output_of
from simulated_gpus.build import NotPossible, built_extension

BENCHMARKS, EXAMPLES = "python docs/benchmarks", "python docs/examples"
BENCHMARK_PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*/README.md"))
EXISTING = ROOT / "out" / "existing"  # where the commands of the pages install the older library
# Twenty mutants of a file, as a page has it, take long; this one dies, whatever the seed chooses.
MUTANT = "--sample 1 --tests tests/meeting/test_pipes.py --file 'SyncMaster.run_master: `len(rendezvous'"

# What is appended to a command so that it takes seconds: of an option that is given twice, the last one counts.
# Commands that become equal run once.
RUN = {
    "python -m sync_batchnorm": "",
    "python -m sphinx --fail-on-warning -c docs . out/site": "",
    "python docs/make_api.py": "",
    "python .ci/mutants.py --sample 20 --file meeting/coordinator.py": MUTANT,
    **{f"{EXAMPLES}/{name}.py": small for name, small in TINY.items()},
    f"{BENCHMARKS}/plot.py": "",
    f"{BENCHMARKS}/check/run.py": "--net resnet18",
    f"{BENCHMARKS}/conversion/run.py": "--at-most 1",
    f"{BENCHMARKS}/exchange/processes.py": "--processes 2 --channels 64",
    f"{BENCHMARKS}/exchange/processes.py --other /tmp/other": "--processes 2 --channels 64 --rounds 2",
    f"{BENCHMARKS}/gpu/run.py --existing out/existing --parts steps": "--parts errors kernels --rounds 1",
    f"{BENCHMARKS}/host/step.py": "--steps 2 --numbers 2",
    f"{BENCHMARKS}/host/step.py --other /tmp/other --nets resnet50": '--steps 2 --numbers 2 --nets resnet50 "a layer"',
    f"{BENCHMARKS}/layer/run.py --existing out/existing": "--rounds 1 --layers 1",
    f"{BENCHMARKS}/memory/run.py": "",
    f"{BENCHMARKS}/network/run.py": "--rounds 2 --networks mobilenet_v3_large --batch 4 --size 64",
    f"{BENCHMARKS}/precision/run.py --existing out/existing": "",
}
NEEDS = {
    **{"sphinx": "myst_parser", "examples": "matplotlib", "digits": "sklearn", "plot.py": "matplotlib"},
    **dict.fromkeys(("network/run", "check/run", "host", "gpu/", "segment"), "torchvision"),
    "conversion": "timm",
}
PROFILE = f"{EXAMPLES}/profile_waits.py --profile out/profile.json"
ELSEWHERE = {  # by whom or why not
    re.escape(PROFILE): "test_profile_that_a_page_records_is_summarized_by_its_command",
    r"(torchrun --nproc-per-node 2|python) docs/examples/train_digits_ddp\.py": "processes/test_distributed.py",
    r"torchrun .*train\.py": "processes/test_distributed.py",
    r"diff .*|rm .*|cp .*": "conversion/test_older_library.py has a folder of this package in the place of another",
    r"python -m pytest( .*)?": "they are these tests",
    r"(pip|git|pipx) .*|python3 -m venv .*|\. .*/activate": "installs, or fetches what others need",
}


def commands() -> set[str]:
    """Return the lines of blocks of bash of all pages, and programs in other blocks and in backquotes."""
    found = []
    for page in PAGES:
        for block in blocks_of(page):
            lines = re.split(r"\n| && ", re.sub(r"\\\n *|(?<=&&|.\|)\n *", " ", block.code))
            pattern = "" if block.language == "bash" else r"python (-m |\S+\.py)"
            found += [line for line in lines if re.match(pattern, line)]
        found += re.findall(r"`((?:python|torchrun) [^`]+)`", page.read_text(encoding="utf-8"))
    return {" ".join(command.removeprefix(".venv/bin/").split()) for command in found} - {""}


def run_in_copy(folder: Path, *arguments: str) -> str:
    """Run Python in a copy of the repository, as some programs write beside themselves."""
    for name in ("README.md", "LICENSE", "CITATION.cff", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "tests", "sync_batchnorm", ".ci"):
        copy_without_caches(ROOT / name, folder / name)
    environment = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SIMULATED_GPUS": "1"}
    return output_of([sys.executable, *arguments], folder, **environment)


def test_every_command_of_a_page_runs_here_or_elsewhere():
    found, elsewhere = commands(), "|".join(ELSEWHERE)
    assert {command for command in found if command in RUN or not re.fullmatch(elsewhere, command)} == set(RUN)


def skip_without_what_it_needs(command: str) -> None:
    for word, package in NEEDS.items():
        if word in command and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    if "--existing" in command and not EXISTING.exists():
        pytest.skip("needs the older library: pip install --no-deps --target out/existing sync-batchnorm==0.0.1")
    if any(word in command for word in ("host", "gpu/", "mutants")):
        try:
            built_extension()
        except NotPossible as reason:
            pytest.skip(str(reason))


def heads_of_tables(text: str) -> list[str]:
    return re.findall(r"^\|.+\|(?=\n\|--)", text, re.MULTILINE)


@pytest.mark.parametrize("page", BENCHMARK_PAGES, ids=lambda page: page.parent.name)
def test_page_of_a_benchmark_has_one_table(page: Path):
    assert len(heads_of_tables(page.read_text(encoding="utf-8"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", dict.fromkeys(f"{command} {small}".rstrip() for command, small in RUN.items()))
def test_command_of_a_page_runs(command: str, tmp_path: Path):
    skip_without_what_it_needs(command)
    copy_without_caches(ROOT / "sync_batchnorm", tmp_path / "other" / "sync_batchnorm")
    command = command.replace("/tmp/other", f"{tmp_path}/other").replace("out/existing", str(EXISTING))
    _, *arguments = shlex.split(command)
    printed = run_in_copy(tmp_path, *(["-W", "error"] if command.startswith("python docs") else []), *arguments)
    page = ROOT / Path(arguments[0]).with_name("README.md")
    if page in BENCHMARK_PAGES and not {"--parts", "--other"} & set(arguments):
        assert heads_of_tables(printed) == heads_of_tables(page.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_profile_that_a_page_records_is_summarized_by_its_command(tmp_path: Path):
    for package in ("matplotlib", "torchvision"):
        pytest.importorskip(package)
    (code,) = [block.code for block in blocks_of(ROOT / "docs/diagnosing.md") if "export_chrome_trace" in block.code]
    importable = "import sys; sys.path.append('docs/examples'); import common; common.import_torchvision()\n"
    run_in_copy(tmp_path, "-c", importable + code)
    for command in (PROFILE, PROFILE.partition(" --")[0]):
        (tmp_path / "out" / "profile_waits.png").unlink(missing_ok=True)
        run_in_copy(tmp_path, *shlex.split(command)[1:])
        assert (tmp_path / "out" / "profile_waits.png").exists()
