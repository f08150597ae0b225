"""No order of threads makes the exchange hang, lose a message, deliver a wrong one, or give a wrong reason."""

import pytest
from interleavings import CHAIN, Scenario, everything, explore_all, interrupted


@pytest.mark.watchdog(120)
@pytest.mark.parametrize(
    ("scenarios", "number", "least"),
    [
        pytest.param(everything(2, "ab", 1), 81, 1_000, id="two"),
        pytest.param(interrupted(everything(2, "a", 1, ends="")), 16, 1_000, id="two, interrupted"),
        pytest.param(everything(3, "a", 1, ends=""), 8, 1_000, id="three"),
        pytest.param(everything(3, "ab", 1, CHAIN, ends=""), 12, 1_000, id="chain"),
        pytest.param(
            [Scenario(("a", "-"), abort=True), Scenario(("-", "a"), abort=True)], 2, 50, id="one never begins"
        ),
        pytest.param(everything(2, "ab", 2), 441, 10_000, id="two, two calls", marks=pytest.mark.slow),
        pytest.param(interrupted(everything(2, "a", 1)), 144, 20_000, id="all interrupted", marks=pytest.mark.slow),
        pytest.param(everything(3, "a", 1, ends="!"), 64, 30_000, id="three, failing", marks=pytest.mark.slow),
        pytest.param(everything(3, "ab", 1, CHAIN, ends="!"), 96, 50_000, id="chain, failing", marks=pytest.mark.slow),
    ],
)
def test_replicas_are_right_in_every_order(scenarios, number, least):
    explored, interleavings = explore_all(scenarios)
    assert explored == number
    assert interleavings > least
