"""No order of threads makes the exchange hang, lose a message, deliver a wrong one, or give a wrong reason."""

from __future__ import annotations

from queue import Empty

import pytest
from interleavings import CHAIN, Scenario, cooperative, everything, explore, explore_all, interrupted

from sync_batchnorm import ReplicaSyncError
from sync_batchnorm.coordinator import Coordinator, Rendezvous


@pytest.mark.watchdog(120)
@pytest.mark.parametrize(
    ("scenarios", "number", "least"),
    [
        pytest.param(everything(2, "ab", 1), 81, 1_000, id="two"),
        pytest.param(interrupted(everything(2, "a", 1, ends="!")), 64, 5_000, id="two, interrupted"),
        pytest.param(everything(3, "a", 1, ends=""), 8, 1_000, id="three"),
        pytest.param(everything(3, "ab", 1, CHAIN, ends=""), 12, 1_000, id="chain"),
        pytest.param(
            [Scenario(("a", "-"), abort=True), Scenario(("-", "a"), abort=True)], 2, 50, id="one never begins"
        ),
        pytest.param(everything(2, "ab", 2), 441, 10_000, id="two, two calls", marks=pytest.mark.slow),
        pytest.param(interrupted(everything(2, "a", 1)), 144, 20_000, id="all interrupted", marks=pytest.mark.slow),
        pytest.param(everything(3, "a", 1, ends="!"), 64, 30_000, id="three, failing", marks=pytest.mark.slow),
        pytest.param(everything(3, "ab", 1, CHAIN, ends="!"), 96, 50_000, id="chain, failing", marks=pytest.mark.slow),
        pytest.param(
            [Scenario(("a", "a|b")), Scenario(("a|b", "a"))], 2, 10_000, id="several threads", marks=pytest.mark.slow
        ),
    ],
)
def test_replicas_are_right_in_every_order(scenarios, number, least):
    explored, interleavings = explore_all(scenarios)
    assert explored == number
    assert interleavings > least


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(("a", "a")), id="meets", marks=pytest.mark.slow),
        pytest.param(Scenario(("a", "")), id="leaves"),
        pytest.param(Scenario(("a", "!")), id="fails"),
        pytest.param(Scenario(("a", "-"), abort=True), id="aborts"),
        pytest.param(Scenario(("a", "!"), cuts=1), id="times-out", marks=pytest.mark.slow),
    ],
)
def test_choosing_at_every_operation_finds_no_other_outcome(scenario):
    with cooperative() as pool:
        coarse, fine = explore(scenario, pool), explore(scenario, pool, fine=True)
    # To begin a forward is no choice in the coarse search: only a timeout tells whether somebody has started.
    fine = {outcome.replace("which has not started", "which is running") for outcome in fine}
    assert coarse.keys() == fine


def _waits_without_looking_again(self, replica_id, rendezvous):
    try:
        delivered, value = self._mailboxes[replica_id].get(timeout=self.timeout)
    except Empty:
        with self._lock:
            self._break(ReplicaSyncError, "got a timeout")
        raise ReplicaSyncError("got a timeout") from None
    if not delivered:
        raise value[0](value[1])
    return value


def _breaks_without_a_release(self, error_type, text):
    self._broken = self._broken or (error_type, text)


def _aborts_without_a_release(self, error, seconds):
    with self._lock:
        _breaks_without_a_release(self, ReplicaSyncError, "got KeyboardInterrupt in its thread")


arrive = Coordinator._arrive


def _arrives_with_an_old_message(self, rendezvous, identifier, message):
    arrive(self, rendezvous, identifier, (message[0], (message[1][0], 1)))


def _answers_after_a_break(self, rendezvous, answers):
    with self._lock:
        rendezvous.messages = {}
        rendezvous.call += 1
        for member, replica_id in rendezvous.members.items():
            if replica_id in self._waiting and member in answers:
                self._deliver(replica_id, answers[member])


def _does_nothing(*args):
    pass


@pytest.mark.parametrize(
    ("cls", "name", "wrong", "scenario", "match"),
    [
        (Coordinator, "_find_deadlock", _does_nothing, Scenario(("ab", "ba")), "deadlock"),
        (Coordinator, "_find_deadlock", _does_nothing, Scenario(("a", "")), "deadlock"),
        (Coordinator, "_break_by_absence", _does_nothing, Scenario(("a", "")), "deadlock"),
        (Rendezvous, "awaited", lambda self: [], Scenario(("aa", "a")), "deadlock"),
        (Coordinator, "_break", _breaks_without_a_release, Scenario(("a", "!")), "deadlock"),
        (Coordinator, "abort", _aborts_without_a_release, Scenario(("a", "-"), abort=True), "deadlock"),
        (Coordinator, "_wait", _waits_without_looking_again, Scenario(("a", "a"), cuts=1), "some only"),
        (Coordinator, "_arrive", _arrives_with_an_old_message, Scenario(("aa", "aa")), "wrong answer"),
        (Coordinator, "answer", _answers_after_a_break, Scenario(("a", "a"), abort=True), "got by|some only"),
    ],
)
def test_search_finds_what_is_wrong(monkeypatch, cls, name, wrong, scenario, match):
    monkeypatch.setattr(cls, name, wrong)
    with pytest.raises(AssertionError, match=match):
        explore_all([scenario])
