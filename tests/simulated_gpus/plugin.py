"""The option `--simulated-gpus` of pytest: tests marked `cuda` run on simulated GPUs, and fail on every report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import simulated_gpus

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("simulated GPUs").addoption(
        "--simulated-gpus",
        type=int,
        metavar="N",
        help="run the tests marked `cuda` on N simulated GPUs (tests/simulated_gpus/README.md)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Simulate before `conftest.py` imports torch, which asks only once whether there is CUDA."""
    number = early_config.known_args_namespace.simulated_gpus
    if number is None:
        return
    try:
        simulated_gpus.simulate(number)
    except simulated_gpus.NotPossible as error:
        raise pytest.UsageError(f"--simulated-gpus: {error}") from error


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and, on simulated GPUs, what runs without them as well."""
    from torch.cuda import device_count

    simulated = simulated_gpus.is_simulated()

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("simulated"):
            return simulated
        return device_count() > 0 if item.get_closest_marker("cuda") else not simulated

    kept, left_out = [], []
    for item in items:
        (kept if is_wanted(item) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test during which a race or an unsafe reuse of memory was reported."""
    if not simulated_gpus.is_simulated():
        yield
        return
    simulated_gpus.clear()  # what fixtures of more than one test have done
    yield
    reported = simulated_gpus.reports()
    simulated_gpus.settle()
    if reported:
        shown = "\n".join(f"  {line}" for line in reported[:20])
        more = f"\n  and {len(reported) - 20} more" if len(reported) > 20 else ""
        pytest.fail(f"the simulated GPUs report {len(reported)} times:\n{shown}{more}", pytrace=False)
