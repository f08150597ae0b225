"""No order of threads makes the exchange hang, lose a message, deliver a wrong one, or give a wrong reason."""

import pytest
from conftest import slow
from interleavings import CHAIN, RING, Scenario, everything, explore_all, in_turns, interrupted

ABORTED = [Scenario(("a", "-"), abort=True), Scenario(("-", "a"), abort=True)]
SCENARIOS = {  # with their number, and how many interleavings there are at least
    "two": (everything(2, "ab", 1), 81, 1_000),
    "two, interrupted": (interrupted(everything(2, "a", 1, ends="")), 16, 1_000),
    "three": ([Scenario(("a", "a", "a")), Scenario(("a", "", "a"))], 2, 1_000),
    "chain": (everything(3, "ab", 1, CHAIN, ends=""), 12, 1_000),
    "one never begins": (ABORTED, 2, 50),
    "two, in turns": (in_turns(everything(2, "ab", 1)), 81, 300),
    "two, interrupted in turns": (in_turns(interrupted([Scenario(("a", "a"))])), 4, 1_000),
    "chain, in turns": (in_turns([Scenario(("a", calls, "b"), CHAIN) for calls in ("ab", "ba", "b")]), 3, 1_000),
    "one never begins its turn": (in_turns(ABORTED[1:]), 1, 10),
}
LARGE = {
    "two, two calls": (everything(2, "ab", 2), 441, 10_000),
    "all interrupted": (interrupted(everything(2, "a", 1)), 144, 20_000),
    "three, failing": (everything(3, "a", 1, ends="!"), 64, 30_000),
    "chain, failing": (everything(3, "ab", 1, CHAIN, ends="!"), 96, 50_000),
    "ring": (everything(3, "abc", 1, RING, ends=""), 27, 20_000),
    "turns": (in_turns(interrupted(everything(2, "a", 1))), 144, 5_000),
    "three, in turns": (in_turns(everything(3, "a", 1, ends="!")), 64, 1_000),
    "chain in turns": (in_turns(everything(3, "ab", 1, CHAIN, ends="")), 12, 5_000),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*SCENARIOS, *slow(*LARGE)])
def test_replicas_are_right_in_every_order(name):
    scenarios, number, least = (SCENARIOS | LARGE)[name]
    explored, interleavings = explore_all(scenarios)
    assert explored == number
    assert interleavings > least
