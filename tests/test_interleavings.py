"""No order of threads makes the exchange hang, lose a message, deliver a wrong one, or give a wrong reason.

The rest of what can be explored takes minutes: ``python tests/interleavings.py``.
"""

from __future__ import annotations

import pytest
from interleavings import Scenario, explore, explore_all, interrupted, plain
from scheduler import cooperative

from sync_batchnorm.coordinator import Coordinator, Exchange


@pytest.mark.watchdog(60)
def test_two_parties_are_right_in_every_order():
    number, interleavings = explore_all(plain(2, "ab", 2))
    assert number == 196
    assert interleavings > 1_000


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(
    ("calls", "scenarios", "least"), [(1, 48, 700), pytest.param(2, 108, 3_000, marks=pytest.mark.slow)]
)
def test_two_parties_that_are_interrupted_are_right_in_every_order(calls, scenarios, least):
    number, interleavings = explore_all(interrupted(2, "a", calls))
    assert number == scenarios
    assert interleavings > least


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(
    ("calls", "scenarios", "least"), [(1, 64, 1_000), pytest.param(2, 216, 10_000, marks=pytest.mark.slow)]
)
def test_three_parties_are_right_in_every_order(calls, scenarios, least):
    number, interleavings = explore_all(plain(3, "a", calls))
    assert number == scenarios
    assert interleavings > least


@pytest.mark.watchdog(60)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(("a", "a")), id="meets", marks=pytest.mark.slow),
        pytest.param(Scenario(("a", "")), id="leaves"),
        pytest.param(Scenario(("a", "!")), id="fails"),
        pytest.param(Scenario(("a",), abort=True), id="aborts"),
        pytest.param(Scenario(("a", "!"), timeouts=1), id="times-out", marks=pytest.mark.slow),
    ],
)
def test_choosing_at_every_operation_finds_no_other_outcome(scenario):
    with cooperative() as pool:
        coarse, fine = explore(scenario, pool), explore(scenario, pool, fine=True)
    # Taking the handle is no choice in the coarse search: only a timeout tells whether somebody has started.
    fine = {outcome.replace("which has not started", "which is running") for outcome in fine}
    assert coarse.keys() == fine


def test_search_finds_a_deadlock_that_nobody_notices(monkeypatch):
    monkeypatch.setattr(Coordinator, "_find_deadlock", lambda *args: None)
    with pytest.raises(AssertionError, match="deadlock"):
        explore_all([Scenario(("ab", "ba"))])


def test_search_finds_a_release_that_comes_too_early_to_be_heard(monkeypatch):
    """The peer leaves before the other waits: only a replica that checks for it when it begins to wait can tell."""
    monkeypatch.setattr(Coordinator, "_is_gone", lambda self, peer, replica_id: False)
    with pytest.raises(AssertionError, match="deadlock"):
        explore_all([Scenario(("a", ""))])


def test_search_finds_a_timeout_that_races_with_a_delivery(monkeypatch):
    def does_not_look_again(self, replica_id):
        try:
            delivered, value = self._mailboxes[replica_id].get(timeout=self.timeout)
        except Exception:
            raise self._broken_by_timeout() from None
        if not delivered:
            raise value[0](value[1])
        return value

    def broken_by_timeout(self):
        with self._lock:
            self._break(RuntimeError, "expected nothing, but got a timeout")
        return RuntimeError("expected nothing, but got a timeout")

    monkeypatch.setattr(Coordinator, "_wait", does_not_look_again)
    monkeypatch.setattr(Coordinator, "_broken_by_timeout", broken_by_timeout, raising=False)
    with pytest.raises(AssertionError):
        explore_all([Scenario(("a", "a"), timeouts=1)])


def test_search_finds_a_result_that_goes_to_the_wrong_call(monkeypatch):
    original = Coordinator._arrive

    def always_the_first_call(self, sync_group, identifier, message):
        sync_group.calls[identifier] = 0
        return original(self, sync_group, identifier, ("stale", message))

    monkeypatch.setattr(Coordinator, "_arrive", always_the_first_call)
    with pytest.raises(AssertionError, match="but got"):
        explore_all([Scenario(("aa", "aa"))])


def test_search_finds_a_peer_that_is_never_released(monkeypatch):
    monkeypatch.setattr(Exchange, "needed", lambda self: [])
    with pytest.raises(AssertionError, match="deadlock"):
        explore_all([Scenario(("aa", "a"))])
