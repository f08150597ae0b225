"""Run the exchange of `coordinator.py` under every order of its threads: what replicas may do, and what it leads to.

The threads are real, but only one runs at a time: what `coordinator.py` imports to lock and to wait is replaced by
versions that let a scheduler decide who goes on. A depth-first search replays every sequence of its choices.

Threads use what they share, except for their mailboxes, only with the lock held. So the sections under the lock are the
steps, and what a thread does outside of them commutes with the steps of all others. Only its owner takes from a
mailbox: to take what is there commutes too, and a thread that finds its mailbox empty waits, or, where a scenario says
so, its wait is cut short. To begin a forward writes only what nobody reads before its owner waits or leaves, except
that the text of a timeout says who has started; so it is done first. The remaining steps are choices: who enters the
next section under the lock, and whose wait is cut.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field, replace
from queue import Empty
from typing import Any

import pytest

from sync_batchnorm import ReplicaSyncError, SyncMaster
from sync_batchnorm.meeting import Coordinator, RunningCallback, coordinator, records, running_callback

_run: Run | None = None  # the one that is being executed


class _Stop(BaseException):
    """Ends a thread of a run that cannot go on."""


def _held_lock() -> threading.Lock:
    """Return a lock that one thread acquires to wait, and another releases to let it go on."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Party:
    """One thread of a run: it runs only when it has the turn."""

    body: Callable[[], Any]
    turn: threading.Lock = field(default_factory=_held_lock)
    ready: Callable[[], bool] = lambda: True
    concerns_others: bool = True  # whether what it does next is a choice
    may_be_cut: bool = False
    is_cut: bool = False
    ended: bool = False
    outcome: Any = None


class Run:
    """One execution: it repeats `choices`, then takes first options; `options` counts what each choice offered."""

    def __init__(self, scenario: Scenario, bodies: Sequence[Callable[[], Any]], choices: Sequence[int]) -> None:
        self.scenario = scenario
        self.parties = [_Party(body) for body in bodies]
        self.choices = list(choices)
        self.options: list[int] = []
        self.cuts_left = scenario.cuts
        self.deadlock = False
        self._current: _Party | None = None
        self._done = _held_lock()

    def execute(self, pool: Executor) -> list[Any]:
        """Return the outcome of each party: what its body returned, or the exception that it raised."""
        global _run
        _run = self
        try:
            for party in self.parties:
                pool.submit(self._work, party)
            self._hand_over(None)
            self._done.acquire()
        finally:
            _run = None
        return [party.outcome for party in self.parties]

    def _work(self, party: _Party) -> None:
        party.turn.acquire()
        try:
            party.outcome = party.body()
        except BaseException as error:
            party.outcome = error.with_traceback(None)
        party.ended = True
        self._hand_over(party)

    def step(
        self, ready: Callable[[], bool] = lambda: True, concerns_others: bool = True, may_be_cut: bool = False
    ) -> None:
        """Let the scheduler decide who goes on; return once it is the caller, or raise what cuts its wait short."""
        party = self._current
        if party is None:
            raise RuntimeError("expected a step inside of a run")
        party.ready, party.concerns_others, party.may_be_cut = ready, concerns_others, may_be_cut
        self._hand_over(party)
        if self.deadlock:
            raise _Stop
        if party.is_cut:
            raise self.scenario.cut

    def _hand_over(self, giver: _Party | None) -> None:
        taker = self._chosen()
        self._current = taker
        if taker is giver:
            return
        (self._done if taker is None else taker.turn).release()
        if giver is not None and not giver.ended:
            giver.turn.acquire()

    def _chosen(self) -> _Party | None:
        alive = [party for party in self.parties if not party.ended]
        options = [(party, False) for party in alive if party.ready()]
        for party, _ in options:
            if not party.concerns_others:
                party.is_cut = False
                return party
        if self.cuts_left:
            options += [(party, True) for party in alive if party.may_be_cut and not party.ready()]
        if not options:
            self.deadlock = self.deadlock or bool(alive)
            return alive[0] if alive else None
        taken = 0
        if len(options) > 1:
            self.choices += [0] * (len(self.options) == len(self.choices))
            taken = self.choices[len(self.options)]
            self.options.append(len(options))
        taker, taker.is_cut = options[taken]
        self.cuts_left -= taker.is_cut
        return taker


class _CooperativeLock:
    """The lock of the only coordinator that is used at a time; its sections have no steps inside."""

    held = False

    def __enter__(self) -> None:
        if _run is not None:
            _run.step()
        _CooperativeLock.held = True

    def __exit__(self, *args: Any) -> None:
        _CooperativeLock.held = False


def _with_the_lock_held(method: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        assert _CooperativeLock.held, f"{method.__name__} without the lock"
        return method(*args, **kwargs)

    return checked


class _CooperativeQueue(list[Any]):
    put = list.append

    def empty(self) -> bool:
        return not self

    def get(self, timeout: float | None = None) -> Any:
        if _run is not None and not self:
            _run.step(lambda: bool(self), concerns_others=False, may_be_cut=timeout is not None)
        return self.pop(0)


def _cooperative_sleep(seconds: float) -> None:
    """Let the caller go on when all replicas have ended."""
    if _run is not None:
        *replicas, _ = _run.parties
        _run.step(lambda: all(party.ended for party in replicas))


# What changes the records.
CHANGES = [(Coordinator, name) for name in ("_deliver", "_break")]
CHANGES += [(records.Turns, "pass_on"), (records.Turns, "resume")]


@contextmanager
def cooperative() -> Iterator[Executor]:
    """Replace what `coordinator.py` waits with; return threads that are used again: to start them takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "Lock", _CooperativeLock)
        patch.setattr(coordinator, "SimpleQueue", _CooperativeQueue)
        patch.setattr(coordinator, "sleep", _cooperative_sleep)
        for owner, name in CHANGES:
            patch.setattr(owner, name, _with_the_lock_held(getattr(owner, name)))
        for module in (coordinator, records):
            patch.setattr(module, "monotonic", lambda: 0.0)
        with ThreadPoolExecutor(16) as pool:
            yield pool


class Failing(Exception):
    """What a replica raises at a ``!`` of its script, and what a merge raises that fails."""


@dataclass(frozen=True)
class Scenario:
    """What each replica does: it calls the layers named by the letters, and then returns.

    A ``!`` at the end lets it fail instead, a ``?`` lets it catch the error of an exchange and return. A replica whose
    script is ``-`` never begins.
    """

    scripts: tuple[str, ...]
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of layers that are not for all replicas
    merge_fails: bool = False
    abort: bool = False  # whether the caller gives up, at any moment
    cuts: int = 0  # how many waits are cut short, at any moment
    cut: type[BaseException] = Empty  # by a timeout, or by Ctrl-C
    turns: bool = False  # whether replicas run one at a time

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        everybody = tuple(range(len(self.scripts)))
        return {name: self.members.get(name, everybody) for name in sorted(set("".join(self.scripts)) - set("!?-"))}

    def calls(self) -> list[str]:
        return [script.rstrip("!?-") for script in self.scripts]

    def completing(self) -> list[int]:
        """Return how many calls of each replica complete, in whatever order: those that all members come to."""
        done = [0] * len(self.scripts)
        todo = [iter(script) for script in self.calls()]
        upcoming = [next(script, "") for script in todo]
        while ready := [members for name, members in self.layers.items() if {upcoming[i] for i in members} == {name}]:
            for replica in ready[0]:
                done[replica] += 1
                upcoming[replica] = next(todo[replica], "")
        return done


class _Scene:
    """A scenario that is executed: its coordinator, its replicas, and what they got."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.number = len(scenario.scripts)
        self.coordinator = Coordinator(["cpu"] * self.number, timeout=1.0)
        self.pipes: dict[str, dict[int, Any]] = {}
        self.completed: list[list[tuple[str, int]]] = [[] for _ in scenario.scripts]
        here = RunningCallback(self.coordinator)
        token = running_callback.set(here)
        for here.name, members in scenario.layers.items():
            here.number = members[0]
            master = SyncMaster(self._merge)
            self.pipes[here.name] = {members[0]: master}
            for here.number in members[1:]:
                self.pipes[here.name][here.number] = master.register_slave(f"replica {here.number}")
        running_callback.reset(token)
        if scenario.turns:
            self.coordinator.take_turns(range(self.number), self._check_turn)
        else:
            for replica, script in enumerate(scenario.scripts):
                if script != "-":
                    self.coordinator.begin(replica)

    def _check_turn(self, replica: int) -> None:
        turns, record = self.coordinator._turns, self.coordinator._records[replica]
        assert turns is None or turns.running is record, f"replica {replica} runs in the turn of another"

    def bodies(self) -> list[Callable[[], Any]]:
        bodies: list[Callable[[], Any]] = [
            lambda replica=replica, script=script: Context().run(self._forward, replica, script)
            for replica, script in enumerate(self.scenario.scripts)
        ]
        if self.scenario.abort:
            bodies.append(lambda: self.coordinator.abort(KeyboardInterrupt(), 1.0))
        return bodies

    def _merge(self, messages: list[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
        if self.scenario.merge_fails:
            raise Failing
        return [(receiver, (receiver, messages)) for receiver, _ in messages]

    def _forward(self, replica: int, script: str) -> None:
        """Do what a thread of the wrapper does."""
        if script == "-":
            return
        error: BaseException | None = None
        try:
            if self.scenario.turns:
                self.coordinator.begin(replica)
            self._play(replica, script)
        except BaseException as raised:
            error = raised
        try:
            self.coordinator.leave(replica, error)
        except ReplicaSyncError as swallowed:
            self.coordinator.leave(replica, swallowed)
            raise
        if error is not None:
            raise error

    def _play(self, replica: int, script: str) -> None:
        try:
            for token in script.rstrip("?"):
                self._check_turn(replica)
                if token == "!":
                    raise Failing
                call = (token, sum(layer == token for layer, _ in self.completed[replica]) + 1)
                identifiers = [f"replica {i}" if position else 0 for position, i in enumerate(self.pipes[token])]
                messages = [(name, (i, call)) for name, i in zip(identifiers, self.pipes[token], strict=True)]
                pipe = self.pipes[token][replica]
                answer = pipe.run((replica, call))
                assert answer == (pipe.identifier, messages), f"wrong answer: {answer}"
                self.completed[replica].append(call)
        except ReplicaSyncError:
            if not script.endswith("?"):
                raise

    def check(self, run: Run, outcomes: Sequence[Any]) -> None:
        """Compare what happened with what may happen."""
        assert not run.deadlock, "deadlock"
        assert not self.coordinator._waiting, "somebody is still registered as waiting"
        assert self.coordinator.is_over, "not over"
        for outcome in outcomes:
            assert not isinstance(outcome, AssertionError), outcome
        items = [len(replica.mailbox) for replica in self.coordinator._records.values()]
        allowed = 0 if self.coordinator._broken is None else 1 + self.scenario.cuts
        assert max(items, default=0) <= allowed, "an item that nobody took"
        self._check_outcomes(outcomes[: self.number])
        self._check_shown(outcomes[: self.number])

    def _check_outcomes(self, outcomes: Sequence[Any]) -> None:
        scenario, completing = self.scenario, self.scenario.completing()
        is_cut_off = scenario.abort or scenario.cuts > 0
        reasons = self._reasons(completing)
        if not any(outcomes) and not scenario.abort:
            assert self.coordinator._broken is None, "broken, although everybody got by"
        some = scenario.turns or scenario.cut is KeyboardInterrupt  # Another's break may come before one's own turn.
        for name, members in scenario.layers.items():
            numbers = {sum(layer == name for layer, _ in self.completed[replica]) for replica in members}
            assert len(numbers) == 1 or some, f"{name} was completed by some only"
        given = {str(o).rpartition("it caught: ")[2] for o in outcomes if isinstance(o, ReplicaSyncError)}
        assert len(given) <= 1, f"two reasons: {given}"
        for text in given:
            assert any(reason in text for reason in reasons), f"expected one of {reasons}, but got {text}"
        for replica, outcome in enumerate(outcomes):
            script, calls = scenario.scripts[replica], scenario.calls()[replica]
            completed, possible = len(self.completed[replica]), completing[replica]
            assert completed <= possible, f"replica {replica} completed {completed} calls of {possible}"
            if not is_cut_off and not scenario.merge_fails and not scenario.members and not scenario.turns:
                assert completed == possible, f"replica {replica} was stopped after {completed} calls of {possible}"
                assert isinstance(outcome, Failing) == (script == calls[:possible] + "!"), "failed, or should have"
            if outcome is None:
                assert completed == len(calls), f"replica {replica} got by"
                assert not script.endswith("!"), f"replica {replica} did not fail"
            elif isinstance(outcome, Failing):
                own = script.endswith("!") and completed == len(calls)
                assert own or scenario.merge_fails, f"replica {replica} failed"
            elif not isinstance(outcome, ReplicaSyncError):
                assert scenario.cuts, repr(outcome)
                assert type(outcome) is scenario.cut, repr(outcome)

    def _reasons(self, completing: Sequence[int]) -> list[str]:
        """Return what the error that releases replicas may say; nothing if none may be released."""
        scenario, calls = self.scenario, self.scenario.calls()
        ended = [replica for replica in range(self.number) if completing[replica] == len(calls[replica])]
        upcoming = {calls[i][completing[i]] for i in range(self.number) if i not in ended}
        reasons = [f"got Failing in replica {i} " for i in ended if scenario.scripts[i].endswith("!")]
        if upcoming:
            reasons += [f"but replica {i} on device cpu left" for i in ended]
        if len(upcoming) > 1:
            reasons.append("to reach the same layer")
        if scenario.abort:
            reasons.append("got KeyboardInterrupt in its thread")
        if scenario.cuts:
            reasons.append("all replicas within" if scenario.cut is Empty else "got KeyboardInterrupt in replica ")
        if scenario.merge_fails:
            reasons += [f"got Failing in replica {members[0]} " for members in scenario.layers.values()]
        return reasons

    def _check_shown(self, outcomes: Sequence[Any]) -> None:
        """An original comes before an error that it has caused, and a low replica before a high one."""
        shown = self.coordinator.take_failure()
        failed = [
            (self.coordinator._records[replica].was_released, isinstance(outcome, ReplicaSyncError), replica)
            for replica, outcome in enumerate(outcomes)
            if outcome is not None
        ]
        if not failed:
            assert shown is None, f"{shown} is shown"
            return
        replica = min(failed)[-1]
        assert shown == (self.coordinator.who(replica), outcomes[replica]), f"{shown} is shown"


def explore(scenario: Scenario, pool: Executor) -> int:
    """Run `scenario` in every order, check each, and return how many there are."""
    interleavings = 0
    choices: list[int] = []
    while True:
        scene = _Scene(scenario)
        run = Run(scenario, scene.bodies(), choices)
        outcomes = run.execute(pool)
        interleavings += 1
        try:
            scene.check(run, outcomes)
        except AssertionError as error:
            raise AssertionError(f"{error} ({scenario}, choices {run.choices}, outcomes {outcomes})") from None
        choices = run.choices
        while choices and choices[-1] + 1 == run.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return interleavings
        choices[-1] += 1


def everything(
    replicas: int, layers: str, longest: int, members: dict[str, tuple[int, ...]] | None = None, ends: str = "!?"
) -> Iterator[Scenario]:
    """Yield everything that `replicas` can do with up to `longest` calls of `layers` each."""
    calls = ["".join(call) for number in range(longest + 1) for call in itertools.product(layers, repeat=number)]
    members = members or {}
    possible = [
        [call + end for call in calls if all(i in members.get(name, (i,)) for name in call) for end in ("", *ends)]
        for i in range(replicas)
    ]
    for scripts in itertools.product(*possible):
        yield Scenario(scripts, members)


def in_turns(scenarios: Iterable[Scenario]) -> Iterator[Scenario]:
    """Yield each with replicas that run one at a time."""
    return (replace(scenario, turns=True) for scenario in scenarios)


def interrupted(scenarios: Iterable[Scenario]) -> Iterator[Scenario]:
    """Yield each while the caller gives up, a wait runs out of time or is interrupted, or the merge fails."""
    for scenario in scenarios:
        for what in ({"abort": True}, {"cuts": 1}, {"cuts": 1, "cut": KeyboardInterrupt}, {"merge_fails": True}):
            yield replace(scenario, **what)


def explore_all(scenarios: Iterable[Scenario]) -> tuple[int, int]:
    """Explore all scenarios; return how many there were, and how many interleavings."""
    number = interleavings = 0
    with cooperative() as pool:
        for scenario in scenarios:
            number += 1
            interleavings += explore(scenario, pool)
    return number, interleavings


CHAIN = {"a": (0, 1), "b": (1, 2)}  # Replica 1 takes part in two layers, the others in one.
RING = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
