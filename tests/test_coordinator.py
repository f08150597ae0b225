"""The coordinator alone: what breaks a wait, at which moment, and what it says."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest

from sync_batchnorm import ReplicaSyncError
from sync_batchnorm.coordinator import MASTER, Coordinator, SyncGroup

TAKE_ALL = lambda messages: [(identifier, messages) for identifier, _ in messages]  # noqa: E731


def group_of(coordinator, name="layer", replicas=(0, 1)):
    sync_group = SyncGroup(name)
    for replica in replicas:
        coordinator.admit(sync_group, MASTER if replica == replicas[0] else replica or "replica 0", replica)
    return sync_group


class Waiting:
    """A replica that waits in an exchange, in a thread of its own."""

    def __init__(self, coordinator, sync_group, replica):
        self.error = None
        self.result = None
        identifier = next(key for key, member in sync_group.members.items() if member == replica)

        def run():
            try:
                callback = TAKE_ALL if identifier == MASTER else None
                self.result = coordinator.exchange(sync_group, identifier, f"from {replica}", callback)
            except ReplicaSyncError as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        while f"{replica} waits in" not in repr(coordinator) and self.thread.is_alive():
            time.sleep(0)  # give way

    def outcome(self):
        self.thread.join()
        return self.result if self.error is None else self.error


def test_replica_is_admitted_while_nobody_else_changes_the_lists():
    coordinator, sync_group = Coordinator(["cpu"] * 2), SyncGroup("layer")
    thread = threading.Thread(target=coordinator.admit, args=(sync_group, MASTER, 0))
    with coordinator._lock:
        thread.start()
        thread.join(0.05)
        assert not sync_group.members
    thread.join()
    assert sync_group.members == {MASTER: 0}


def test_repr_says_what_everybody_does():
    coordinator = Coordinator(["cpu"] * 4)
    sync_group = group_of(coordinator)
    waiting = Waiting(coordinator, sync_group, 0)
    coordinator.leave(2)
    assert (
        repr(coordinator)
        == "Coordinator(0 waits in layer, call 1, 1 has not started, 2 left its forward, 3 has not started)"
    )
    coordinator.leave(3, OSError())
    assert repr(coordinator).endswith("3 failed with OSError; broken)")
    assert "waits" not in repr(coordinator)
    assert isinstance(waiting.outcome(), ReplicaSyncError)
    assert repr(Coordinator()) == "Coordinator(no replicas)"


def test_replica_that_leaves_releases_who_waits():
    coordinator = Coordinator(["cpu", "cuda:0"])
    waiting = Waiting(coordinator, group_of(coordinator), 0)
    coordinator.leave(1)
    assert str(waiting.outcome()) == (
        "expected every replica to call layer equally often, but got replica 1 on device cuda:0, which left its "
        "forward, while replica 0 on device cpu waits (layer, call 1); "
        "make every replica call every synchronized layer in every forward"
    )


def test_replica_that_waits_for_one_that_left_is_told_at_once():
    coordinator = Coordinator(["cpu"] * 2)
    coordinator.leave(1)
    assert "replica 1 on device cpu, which left" in str(Waiting(coordinator, group_of(coordinator), 0).outcome())


def test_only_those_who_wait_for_the_one_that_left_are_named():
    coordinator = Coordinator(["cpu"] * 4)
    waiting = [Waiting(coordinator, group_of(coordinator, "layer", pair), pair[0]) for pair in ((0, 1), (2, 3))]
    coordinator.leave(1)
    for replica in waiting:
        assert "which left its forward, while replica 0 on device cpu waits (layer" in str(replica.outcome())


def test_replica_that_leaves_after_its_last_call_breaks_nothing():
    coordinator = Coordinator(["cpu"] * 2)
    sync_group = group_of(coordinator)
    waiting = Waiting(coordinator, sync_group, 1)
    assert coordinator.exchange(sync_group, MASTER, "from 0", TAKE_ALL) == [(0, "from 0"), (1, "from 1")]
    assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]
    coordinator.leave(0)
    coordinator.leave(1)
    assert coordinator.failure() is None
    assert "broken" not in repr(coordinator)


def test_cycle_over_three_layers_is_found():
    coordinator = Coordinator(["cpu"] * 3)
    sync_groups = [group_of(coordinator, name, pair) for name, pair in (("a", (0, 1)), ("b", (1, 2)), ("c", (2, 0)))]
    waiting = [Waiting(coordinator, sync_groups[i], i) for i in range(3)]
    texts = {str(replica.outcome()) for replica in waiting}
    assert texts == {
        "expected all replicas to reach the same layer, but got replica 0 on device cpu in a, call 1, "
        "replica 1 on device cpu in b, call 1, replica 2 on device cpu in c, call 1; "
        "make every replica call the synchronized layers in the same order"
    }


def test_chain_of_waiting_replicas_is_no_cycle():
    coordinator = Coordinator(["cpu"] * 3)
    first, second = group_of(coordinator, "a", (0, 1)), group_of(coordinator, "b", (1, 2))
    waiting = [Waiting(coordinator, first, 0), Waiting(coordinator, second, 1)]
    assert "broken" not in repr(coordinator)
    coordinator.exchange(second, 2, "from 2", None)
    assert waiting[1].outcome() == [(0, "from 1"), (2, "from 2")]
    coordinator.exchange(first, 1, "from 1", None)
    assert waiting[0].outcome() == [(0, "from 0"), (1, "from 1")]


def test_callback_that_meets_those_who_wait_for_it_is_a_cycle():
    coordinator = Coordinator(["cpu"] * 2)
    outer, inner = group_of(coordinator, "outer"), group_of(coordinator, "inner")
    waiting = Waiting(coordinator, outer, 1)
    with pytest.raises(ReplicaSyncError, match=r"to reach the same layer, but got replica 0 .* in inner, call 1, "):
        coordinator.exchange(outer, MASTER, 0, lambda messages: coordinator.exchange(inner, MASTER, 0, TAKE_ALL))
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_groups_do_not_wait_for_each_other():
    coordinator = Coordinator(["cpu"] * 4)
    sync_groups = [group_of(coordinator, "layer", pair) for pair in ((0, 1), (2, 3))]
    waiting = Waiting(coordinator, sync_groups[0], 0)
    for replica in (2, 3):
        coordinator.leave(replica)
    assert "broken" not in repr(coordinator)
    coordinator.exchange(sync_groups[0], 1, "from 1", None)
    assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]


def test_second_thread_of_a_replica_is_refused():
    coordinator = Coordinator(["cpu"] * 2)
    waiting = Waiting(coordinator, group_of(coordinator, "stem"), 1)
    with pytest.raises(RuntimeError) as caught:
        coordinator.exchange(group_of(coordinator, "head"), 1, None, None)
    assert str(caught.value) == (
        "expected one thread of a replica to exchange at a time, but got replica 1 on device cpu calling head while it "
        "waits in stem, call 1; call synchronized layers from one thread of each replica"
    )
    coordinator.interrupt(1, caught.value)
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_timeout_names_who_came_and_who_did_not():
    coordinator = Coordinator(["cpu"] * 3, timeout=0.01)
    with coordinator.forward_of(2), pytest.raises(TimeoutError) as caught:
        coordinator.exchange(group_of(coordinator, "layer", (0, 1, 2)), MASTER, None, TAKE_ALL)
    assert str(caught.value).startswith(
        "expected all replicas within 0.01 seconds, but got a timeout while replica 0 on device cpu waits for replica "
        "1 on device cpu, which has not started and replica 2 on device cpu, which is running (layer, call 1); "
    )


def test_first_reason_is_the_one_that_everybody_gets():
    coordinator = Coordinator(["cpu"] * 2)
    coordinator.leave(0, ValueError())
    coordinator.abort(OSError())
    with pytest.raises(ReplicaSyncError, match="got ValueError in replica 0"):
        coordinator.exchange(group_of(coordinator), 1, None, None)


def test_break_that_was_interrupted_is_finished_by_the_next():
    coordinator = Coordinator(["cpu"] * 2)
    waiting = Waiting(coordinator, group_of(coordinator), 0)
    coordinator._broken = (ReplicaSyncError, "the first reason")  # Ctrl-C came right after this
    coordinator.abort(KeyboardInterrupt())
    assert str(waiting.outcome()) == "the first reason"


def test_originals_are_shown_before_what_they_caused_and_low_replicas_before_high_ones():
    coordinator = Coordinator(["cpu"] * 4)
    coordinator.leave(3, ValueError("original"))
    with pytest.raises(ReplicaSyncError) as caught:
        coordinator.exchange(group_of(coordinator), MASTER, None, TAKE_ALL)
    coordinator.leave(0, caught.value)
    coordinator.leave(2, ValueError("another original"))
    failure = coordinator.failure()
    assert failure is not None
    assert failure.replica_id == 2
    assert coordinator.failure() is None


def test_first_of_several_failures_of_one_replica_is_shown():
    coordinator = Coordinator(["cpu"] * 2)
    for text in ("first", "second"):
        coordinator.leave(1, ValueError(text))
    assert "first" in str(coordinator.failure().rebuild())


def test_replica_that_failed_for_a_reason_of_another_coordinator_is_an_original():
    coordinator = Coordinator(["cpu"] * 2)
    coordinator.abort(OSError())
    coordinator.leave(1, ReplicaSyncError("of an inner wrapper"))
    coordinator.leave(0, ReplicaSyncError(coordinator._broken[1]))
    assert coordinator.failure().replica_id == 1


def test_replica_that_begins_its_next_round_does_not_miss_one_that_has_not_begun_it():
    coordinator = Coordinator(["cpu"] * 2)
    sync_group = group_of(coordinator)
    for replica in (0, 1):
        with coordinator.forward_of(replica):
            pass
    with coordinator.forward_of(0):
        waiting = Waiting(coordinator, sync_group, 0)
        assert "broken" not in repr(coordinator)
        with coordinator.forward_of(1):
            coordinator.exchange(sync_group, 1, "from 1", None)
        assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]


def test_replica_that_leaves_its_first_round_is_waited_for_in_the_second():
    coordinator = Coordinator(["cpu"] * 2)
    sync_group = group_of(coordinator)
    with coordinator.forward_of(0):
        pass
    with coordinator.forward_of(1), coordinator.forward_of(0):
        waiting = Waiting(coordinator, sync_group, 0)
    assert "1 left its forward" in repr(coordinator)
    assert "broken" not in repr(coordinator)
    with coordinator.forward_of(1):
        coordinator.exchange(sync_group, 1, "from 1", None)
    assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]


def test_replica_that_is_still_inside_when_others_are_called_again_has_not_left():
    coordinator = Coordinator(["cpu"] * 2)
    with coordinator.forward_of(1):
        coordinator.call([0])
        assert "1 is running" in repr(coordinator)
        waiting = Waiting(coordinator, group_of(coordinator), 0)
        assert "broken" not in repr(coordinator)
        coordinator.abort(OSError())
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_inner_call_of_a_replica_does_not_let_it_leave():
    coordinator = Coordinator(["cpu"] * 2)
    with coordinator.forward_of(0):
        with coordinator.forward_of(0):
            assert "0 is running" in repr(coordinator)
        assert "0 is running" in repr(coordinator)
    assert "0 left its forward" in repr(coordinator)


def test_caught_error_of_an_inner_call_is_no_failure():
    coordinator = Coordinator(["cpu"] * 2)
    with coordinator.forward_of(0), pytest.raises(ValueError, match="inner"), coordinator.forward_of(0):
        raise ValueError("inner")
    assert coordinator.failure() is None


def test_drain_waits_for_those_inside_but_not_for_ever():
    coordinator = Coordinator(["cpu"] * 2)
    with coordinator.forward_of(1):
        waiting = Waiting(coordinator, group_of(coordinator), 0)
        coordinator.abort(KeyboardInterrupt())
        waiting.outcome()
        coordinator.drain(0.01)
    coordinator.drain(10.0)
    assert "1 left its forward" in repr(coordinator)


def test_drain_ends_when_the_last_of_those_inside_has_left():
    coordinator = Coordinator(["cpu"] * 2)
    inside, leave = threading.Barrier(3), [threading.Event() for _ in range(2)]

    class Departures(SimpleQueue):
        """Lets the last replica leave when the drain asks for a second departure."""

        asked = 0

        def get(self, timeout):
            self.asked += 1
            if self.asked == 2:
                leave[1].set()
            return super().get(timeout=timeout)

    def stays(replica):
        with coordinator.forward_of(replica):
            inside.wait()
            leave[replica].wait()

    threads = [threading.Thread(target=stays, args=(replica,)) for replica in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    coordinator._departures = Departures()
    coordinator.abort(KeyboardInterrupt())
    leave[0].set()
    threads[0].join()
    coordinator.drain(1000.0)  # Much longer than the watchdog waits: it is the departures that end it.
    left = "1 left its forward" in repr(coordinator)
    leave[1].set()
    threads[1].join()
    assert left


def test_departures_are_noted_from_the_break_on():
    coordinator = Coordinator(["cpu"])
    for _ in range(10):
        with coordinator.forward_of(0):
            pass
    assert coordinator._departures.empty()  # which would grow with every round


def test_result_that_comes_after_the_break_reaches_nobody():
    coordinator = Coordinator(["cpu"] * 2)
    sync_group = group_of(coordinator)
    waiting = Waiting(coordinator, sync_group, 1)

    def merges_too_late(messages):
        coordinator.abort(OSError())
        return TAKE_ALL(messages)

    with pytest.raises(ReplicaSyncError, match="got OSError in its thread"):
        coordinator.exchange(sync_group, MASTER, "from 0", merges_too_late)
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_error_that_takes_long_to_print_does_not_hold_up_the_others():
    coordinator = Coordinator(["cpu"] * 3)

    class Slow(Exception):
        def __str__(self):
            coordinator.leave(2)  # would block if the lock was held
            return "slow"

    coordinator.leave(1, Slow())
    assert "2 left its forward" in repr(coordinator)
