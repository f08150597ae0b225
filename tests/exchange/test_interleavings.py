"""No order of threads makes the exchange hang, lose a message, deliver a wrong one, or give a wrong reason."""

import pytest
from interleavings import CHAIN, RING, Scenario, everything, explore_all, in_turns, interrupted


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scenarios", "number", "least"),
    [
        pytest.param(everything(2, "ab", 1), 81, 1_000, id="two"),
        pytest.param(interrupted(everything(2, "a", 1, ends="")), 16, 1_000, id="two, interrupted"),
        pytest.param(everything(3, "a", 1, ends=""), 8, 1_000, id="three"),
        pytest.param(everything(3, "ab", 1, CHAIN, ends=""), 12, 1_000, id="chain"),
        pytest.param(everything(3, "abc", 1, RING, ends=""), 27, 100, id="ring"),
        pytest.param(
            [Scenario(("a", "-"), abort=True), Scenario(("-", "a"), abort=True)], 2, 50, id="one never begins"
        ),
        pytest.param(in_turns(everything(2, "ab", 1)), 81, 300, id="two, in turns"),
        pytest.param(in_turns(interrupted(everything(2, "a", 1, ends=""))), 16, 300, id="two, interrupted in turns"),
        pytest.param(in_turns(everything(3, "ab", 1, CHAIN, ends="")), 12, 100, id="chain, in turns"),
        pytest.param(in_turns([Scenario(("-", "a"), abort=True)]), 1, 10, id="one never begins its turn"),
        pytest.param(everything(2, "ab", 2), 441, 10_000, id="two, two calls", marks=pytest.mark.slow),
        pytest.param(interrupted(everything(2, "a", 1)), 144, 20_000, id="all interrupted", marks=pytest.mark.slow),
        pytest.param(everything(3, "a", 1, ends="!"), 64, 30_000, id="three, failing", marks=pytest.mark.slow),
        pytest.param(everything(3, "ab", 1, CHAIN, ends="!"), 96, 50_000, id="chain, failing", marks=pytest.mark.slow),
        pytest.param(in_turns(interrupted(everything(2, "a", 1))), 144, 5_000, id="turns", marks=pytest.mark.slow),
        pytest.param(
            in_turns(everything(3, "a", 1, ends="!")), 64, 1_000, id="three, in turns", marks=pytest.mark.slow
        ),
    ],
)
def test_replicas_are_right_in_every_order(scenarios, number, least):
    explored, interleavings = explore_all(scenarios)
    assert explored == number
    assert interleavings > least
