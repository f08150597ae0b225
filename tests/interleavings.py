"""Run the exchange of `coordinator.py` under every order of its threads: a scheduler decides who takes the next step.

``python tests/interleavings.py`` explores more than the test run has time for, and prints the numbers.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from scheduler import Pool, Run, cooperative

from sync_batchnorm import comm
from sync_batchnorm.comm import SyncMaster
from sync_batchnorm.coordinator import Coordinator
from sync_batchnorm.errors import ReplicaSyncError


class Failing(Exception):
    """What a party raises at a ``!`` of its script."""


@dataclass(frozen=True)
class Scenario:
    """What each party does: it calls the layers named by the letters, and then leaves, or fails if there is a ``!``."""

    scripts: tuple[str, ...]
    abort: bool = False  # whether the caller gives up, at any moment
    timeouts: int = 0  # how many waits may run out of time, at any moment
    reduction_fails: bool = False


class _Scene:
    """A scenario that is executed: its coordinator, its parties, and what they got."""

    def __init__(self, scenario: Scenario, fine: bool) -> None:
        self.scenario = scenario
        self.number = len(scenario.scripts)
        self.coordinator = Coordinator(["cpu"] * self.number, timeout=1.0)
        self.pipes: dict[str, list[Any]] = {}
        self.completed: list[list[tuple[str, int]]] = [[] for _ in scenario.scripts]
        for layer in sorted(set("".join(scenario.scripts)) - {"!"}):
            with comm.joining(self.coordinator, 0, layer):
                master = SyncMaster(self._reduce)
            self.pipes[layer] = [master]
            for party in range(1, self.number):
                with comm.joining(self.coordinator, party, layer):
                    self.pipes[layer].append(master.register_slave(party))
        self.handles = [self.coordinator.forward_of(party) for party in range(self.number)]
        self.enters_forwards = fine
        if not fine:
            for handle in self.handles:
                handle.__enter__()

    def bodies(self) -> list[Callable[[], Any]]:
        bodies: list[Callable[[], Any]] = [lambda i=i: self._play(i) for i in range(self.number)]
        return [*bodies, lambda: self.coordinator.abort(KeyboardInterrupt())] if self.scenario.abort else bodies

    def _reduce(self, messages: list[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
        if self.scenario.reduction_fails:
            raise Failing(0)
        return [(receiver, (receiver, messages)) for receiver, _ in messages]

    def _play(self, party: int) -> None:
        with ExitStack() as stack:
            if self.enters_forwards:
                stack.enter_context(self.handles[party])
            else:
                stack.push(self.handles[party].__exit__)
            for token in self.scenario.scripts[party]:
                if token == "!":
                    raise Failing(party)
                pipe = self.pipes[token][party]
                call = (token, sum(layer == token for layer, _ in self.completed[party]) + 1)
                result = pipe.run_slave((party, call)) if party else pipe.run_master((party, call))
                expected = (party, [(i, (i, call)) for i in range(self.number)])
                if result != expected:
                    raise AssertionError(f"expected {expected}, but got {result}")
                self.completed[party].append(call)

    def check(self, run: Run, outcomes: Sequence[Any]) -> str:
        """Compare what happened with what may happen; return it in one line."""
        scenario, expected = self.scenario, Expectation(self.scenario.scripts)
        assert not run.deadlock, "deadlock"
        assert not self.coordinator._waiting, "somebody is still registered as waiting"
        broken = self.coordinator._broken is not None
        left_over = [len(mailbox.items) for mailbox in self.coordinator._mailboxes.values()]
        assert sum(left_over) == 0 or (broken and max(left_over) == 1), "an item that nobody took"
        for call in set(itertools.chain(*self.completed)):
            assert all(call in completed for completed in self.completed), f"{call} was completed by some only"
        parties = outcomes[: self.number]
        texts = {str(outcome) for outcome in parties if isinstance(outcome, ReplicaSyncError)}
        assert len(texts) <= 1, f"two reasons: {texts}"
        may_stop = scenario.abort or scenario.timeouts > 0 or scenario.reduction_fails or expected.must_fail
        for party, outcome in enumerate(parties):
            calls = len(self.completed[party])
            assert calls <= expected.common, f"party {party} completed {calls} calls of {expected.common}"
            if outcome is None:
                assert party in expected.left, f"party {party} got by"
            elif isinstance(outcome, ReplicaSyncError):
                assert may_stop, f"party {party} was stopped: {outcome}"
                self._check_reason(str(outcome), expected)
            else:
                assert isinstance(outcome, Failing), repr(outcome)
                assert outcome.args[0] == party
                assert scenario.reduction_fails or (party in expected.failing and calls == expected.common)
        self._check_shown(parties)
        return "; ".join("done" if outcome is None else str(outcome) or repr(outcome) for outcome in parties)

    def _check_reason(self, text: str, expected: Expectation) -> None:
        scenario = self.scenario
        reasons = [f"got Failing in replica {party} " for party in expected.failing]
        reasons += [f"got replica {party} on device cpu, which left" for party in expected.left if expected.blocked]
        reasons += ["to reach the same layer"] if expected.diverge else []
        reasons += ["got KeyboardInterrupt in its thread"] if scenario.abort else []
        reasons += ["got a timeout"] if scenario.timeouts else []
        reasons += ["got Failing in replica 0 "] if scenario.reduction_fails else []
        assert any(reason in text for reason in reasons), f"expected one of {reasons}, but got {text}"

    def _check_shown(self, parties: Sequence[Any]) -> None:
        shown = self.coordinator.failure()
        originals = [i for i, outcome in enumerate(parties) if isinstance(outcome, Failing)]
        released = [i for i, outcome in enumerate(parties) if isinstance(outcome, ReplicaSyncError)]
        first = (originals + released)[:1]
        assert (shown.replica_id if shown else None) == (first[0] if first else None), "another failure is shown"


class Expectation:
    """What scripts must lead to, in whatever order they run: the calls that all have in common complete, and no others.

    Every exchange needs all parties, so the calls that can complete are the longest common prefix of the scripts.
    """

    def __init__(self, scripts: Sequence[str]) -> None:
        calls = [script.rstrip("!") for script in scripts]
        together = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*calls, strict=False))
        self.common = len(list(together))
        ended = [party for party, script in enumerate(calls) if len(script) == self.common]
        self.failing = [party for party in ended if scripts[party].endswith("!")]
        self.left = [party for party in ended if not scripts[party].endswith("!")]
        self.blocked = [party for party in range(len(scripts)) if party not in ended]
        self.diverge = len({calls[party][self.common] for party in self.blocked}) > 1
        self.must_fail = bool(self.failing or self.blocked)


def explore(scenario: Scenario, pool: Pool, fine: bool = False) -> Counter[str]:
    """Run `scenario` in every order, check each, and return how often each outcome came."""
    seen: Counter[str] = Counter()
    choices: list[int] = []
    while True:
        scene = _Scene(scenario, fine)
        run = Run(scene.bodies(), choices, scenario.timeouts, fine)
        outcomes = run.execute(pool)
        try:
            seen[scene.check(run, outcomes)] += 1
        except AssertionError as error:
            raise AssertionError(f"{error} ({scenario}, choices {run.choices}, outcomes {outcomes})") from None
        choices = run.choices
        while choices and choices[-1] + 1 == run.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return seen
        choices[-1] += 1


def scripts(layers: str, longest: int) -> list[str]:
    """Return every script of at most `longest` calls, with and without a failure at its end."""
    calls = ["".join(call) for number in range(longest + 1) for call in itertools.product(layers, repeat=number)]
    return [script + end for script in calls for end in ("", "!")]


def plain(parties: int, layers: str, longest: int) -> Iterator[Scenario]:
    """Yield everything that `parties` can do with up to `longest` calls of `layers`."""
    for combination in itertools.product(scripts(layers, longest), repeat=parties):
        yield Scenario(combination)


def interrupted(parties: int, layers: str, longest: int) -> Iterator[Scenario]:
    """Yield the same, while the caller gives up, a wait runs out of time, or the reduction fails."""
    for combination in itertools.product(scripts(layers, longest), repeat=parties):
        yield Scenario(combination, abort=True)
        yield Scenario(combination, timeouts=1)
        yield Scenario(combination, reduction_fails=True)


def doubly_interrupted(parties: int, layers: str, longest: int) -> Iterator[Scenario]:
    """Yield the same, while the caller gives up and two waits run out of time."""
    for combination in itertools.product(scripts(layers, longest), repeat=parties):
        yield Scenario(combination, abort=True, timeouts=2)


def explore_all(scenarios: Iterable[Scenario], fine: bool = False) -> tuple[int, int]:
    """Explore all scenarios; return how many there were, and how many interleavings."""
    number = interleavings = 0
    with cooperative() as pool:
        for scenario in scenarios:
            number += 1
            interleavings += explore(scenario, pool, fine).total()
    return number, interleavings


def main() -> None:
    """Explore everything and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    two_calls = [Scenario(("aa",) * 3, abort=True), Scenario(("aa",) * 3, timeouts=1)]
    for name, scenarios in (
        ("two parties, up to two calls of two layers", plain(2, "ab", 2)),
        ("the same, interrupted", interrupted(2, "ab", 2)),
        ("the same, interrupted up to three times", doubly_interrupted(2, "ab", 2)),
        ("three parties, up to two calls of two layers", plain(3, "ab", 2)),
        ("three parties, up to one call, interrupted", interrupted(3, "a", 1)),
        ("three parties, two calls each, interrupted", two_calls),
    ):
        start = time.perf_counter()
        number, interleavings = explore_all(scenarios)
        seconds = time.perf_counter() - start
        print(f"{name}: {number} scenarios, {interleavings} interleavings, {seconds:.0f} s, all right", flush=True)


if __name__ == "__main__":
    main()
