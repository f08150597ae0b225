"""The roster alone: what breaks a wait, at which moment, and what it says."""

from __future__ import annotations

import threading
import time

import pytest

from sync_batchnorm import ReplicaSyncError
from sync_batchnorm.circle import MASTER, Circle
from sync_batchnorm.roster import Roster

TAKE_ALL = lambda messages: [(identifier, messages) for identifier, _ in messages]  # noqa: E731


def circle_of(roster, name="layer", replicas=(0, 1)):
    circle = Circle(name)
    for replica in replicas:
        roster.admit(circle, MASTER if replica == replicas[0] else replica or "replica 0", replica)
    return circle


class Waiting:
    """A replica that waits in a meeting, in a thread of its own."""

    def __init__(self, roster, circle, replica):
        self.error = None
        self.result = None
        identifier = next(key for key, member in circle.members.items() if member == replica)

        def run():
            try:
                callback = TAKE_ALL if identifier == MASTER else None
                self.result = roster.meet(circle, identifier, f"from {replica}", callback)
            except ReplicaSyncError as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        while f"{replica} waits in" not in repr(roster) and self.thread.is_alive():
            time.sleep(0)  # give way

    def outcome(self):
        self.thread.join()
        return self.result if self.error is None else self.error


def test_repr_says_what_everybody_does():
    roster = Roster(["cpu"] * 4)
    circle = circle_of(roster)
    waiting = Waiting(roster, circle, 0)
    roster.leave(2)
    assert repr(roster) == "Roster(0 waits in layer, call 1, 1 has not started, 2 left its forward, 3 has not started)"
    roster.leave(3, OSError())
    assert repr(roster).endswith("3 failed with OSError; broken)")
    assert "waits" not in repr(roster)
    assert isinstance(waiting.outcome(), ReplicaSyncError)
    assert repr(Roster()) == "Roster(nobody)"


def test_replica_that_leaves_releases_who_waits():
    roster = Roster(["cpu", "cuda:0"])
    waiting = Waiting(roster, circle_of(roster), 0)
    roster.leave(1)
    assert str(waiting.outcome()) == (
        "expected every replica to call layer equally often, but got replica 1 on device cuda:0, which left its "
        "forward, while replica 0 on device cpu waits (layer, call 1); "
        "make every replica call every synchronized layer in every forward"
    )


def test_replica_that_waits_for_one_that_left_is_told_at_once():
    roster = Roster(["cpu"] * 2)
    roster.leave(1)
    assert "replica 1 on device cpu, which left" in str(Waiting(roster, circle_of(roster), 0).outcome())


def test_only_those_who_wait_for_the_one_that_left_are_named():
    roster = Roster(["cpu"] * 4)
    waiting = [Waiting(roster, circle_of(roster, "layer", pair), pair[0]) for pair in ((0, 1), (2, 3))]
    roster.leave(1)
    for replica in waiting:
        assert "which left its forward, while replica 0 on device cpu waits (layer" in str(replica.outcome())


def test_replica_that_leaves_after_its_last_call_breaks_nothing():
    roster = Roster(["cpu"] * 2)
    circle = circle_of(roster)
    waiting = Waiting(roster, circle, 1)
    assert roster.meet(circle, MASTER, "from 0", TAKE_ALL) == [(0, "from 0"), (1, "from 1")]
    assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]
    roster.leave(0)
    roster.leave(1)
    assert roster.failure() is None
    assert "broken" not in repr(roster)


def test_circle_over_three_layers_is_found():
    roster = Roster(["cpu"] * 3)
    circles = [circle_of(roster, name, pair) for name, pair in (("a", (0, 1)), ("b", (1, 2)), ("c", (2, 0)))]
    waiting = [Waiting(roster, circles[i], i) for i in range(3)]
    texts = {str(replica.outcome()) for replica in waiting}
    assert texts == {
        "expected all replicas to reach the same layer, but got replica 0 on device cpu in a, call 1, "
        "replica 1 on device cpu in b, call 1, replica 2 on device cpu in c, call 1; "
        "make every replica call the synchronized layers in the same order"
    }


def test_chain_of_waiting_replicas_is_no_circle():
    roster = Roster(["cpu"] * 3)
    first, second = circle_of(roster, "a", (0, 1)), circle_of(roster, "b", (1, 2))
    waiting = [Waiting(roster, first, 0), Waiting(roster, second, 1)]
    assert "broken" not in repr(roster)
    roster.meet(second, 2, "from 2", None)
    assert waiting[1].outcome() == [(0, "from 1"), (2, "from 2")]
    roster.meet(first, 1, "from 1", None)
    assert waiting[0].outcome() == [(0, "from 0"), (1, "from 1")]


def test_callback_that_meets_those_who_wait_for_it_is_a_circle():
    roster = Roster(["cpu"] * 2)
    outer, inner = circle_of(roster, "outer"), circle_of(roster, "inner")
    waiting = Waiting(roster, outer, 1)
    with pytest.raises(ReplicaSyncError, match=r"to reach the same layer, but got replica 0 .* in inner, call 1, "):
        roster.meet(outer, MASTER, 0, lambda messages: roster.meet(inner, MASTER, 0, TAKE_ALL))
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_groups_do_not_wait_for_each_other():
    roster = Roster(["cpu"] * 4)
    circles = [circle_of(roster, "layer", pair) for pair in ((0, 1), (2, 3))]
    waiting = Waiting(roster, circles[0], 0)
    for replica in (2, 3):
        roster.leave(replica)
    assert "broken" not in repr(roster)
    roster.meet(circles[0], 1, "from 1", None)
    assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]


def test_second_thread_of_a_replica_is_refused():
    roster = Roster(["cpu"] * 2)
    waiting = Waiting(roster, circle_of(roster, "stem"), 1)
    with pytest.raises(RuntimeError) as caught:
        roster.meet(circle_of(roster, "head"), 1, None, None)
    assert str(caught.value) == (
        "expected one thread of a replica to exchange at a time, but got replica 1 on device cpu calling head while it "
        "waits in stem, call 1; call synchronized layers from one thread of each replica"
    )
    roster.interrupt(1, caught.value)
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_timeout_names_who_came_and_who_did_not():
    roster = Roster(["cpu"] * 3, timeout=0.01)
    with roster.seat(2), pytest.raises(TimeoutError) as caught:
        roster.meet(circle_of(roster, "layer", (0, 1, 2)), MASTER, None, TAKE_ALL)
    assert str(caught.value).startswith(
        "expected all replicas within 0.01 seconds, but got a timeout while replica 0 on device cpu waits for replica "
        "1 on device cpu, which has not started and replica 2 on device cpu, which is running (layer, call 1); "
    )


def test_first_reason_is_the_one_that_everybody_gets():
    roster = Roster(["cpu"] * 2)
    roster.leave(0, ValueError())
    roster.abort(OSError())
    with pytest.raises(ReplicaSyncError, match="got ValueError in replica 0"):
        roster.meet(circle_of(roster), 1, None, None)


def test_break_that_was_interrupted_is_finished_by_the_next():
    roster = Roster(["cpu"] * 2)
    waiting = Waiting(roster, circle_of(roster), 0)
    roster._broken = (ReplicaSyncError, "the first reason")  # Ctrl-C came right after this
    roster.abort(KeyboardInterrupt())
    assert str(waiting.outcome()) == "the first reason"


def test_originals_are_shown_before_what_they_caused_and_low_replicas_before_high_ones():
    roster = Roster(["cpu"] * 4)
    roster.leave(3, ValueError("original"))
    with pytest.raises(ReplicaSyncError) as caught:
        roster.meet(circle_of(roster), MASTER, None, TAKE_ALL)
    roster.leave(0, caught.value)
    roster.leave(2, ValueError("another original"))
    failure = roster.failure()
    assert failure is not None
    assert failure.replica_id == 2
    assert roster.failure() is None


def test_replica_that_failed_for_a_reason_of_another_roster_is_an_original():
    roster = Roster(["cpu"] * 2)
    roster.abort(OSError())
    roster.leave(1, ReplicaSyncError("of an inner wrapper"))
    roster.leave(0, ReplicaSyncError(roster._broken[1]))
    assert roster.failure().replica_id == 1


def test_replica_that_begins_its_next_round_does_not_miss_one_that_has_not_begun_it():
    roster = Roster(["cpu"] * 2)
    circle = circle_of(roster)
    for replica in (0, 1):
        with roster.seat(replica):
            pass
    with roster.seat(0):
        waiting = Waiting(roster, circle, 0)
        assert "broken" not in repr(roster)
        with roster.seat(1):
            roster.meet(circle, 1, "from 1", None)
        assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]


def test_replica_that_leaves_its_first_round_is_waited_for_in_the_second():
    roster = Roster(["cpu"] * 2)
    circle = circle_of(roster)
    with roster.seat(0):
        pass
    with roster.seat(1), roster.seat(0):
        waiting = Waiting(roster, circle, 0)
    assert "1 left its forward" in repr(roster)
    assert "broken" not in repr(roster)
    with roster.seat(1):
        roster.meet(circle, 1, "from 1", None)
    assert waiting.outcome() == [(0, "from 0"), (1, "from 1")]


def test_replica_that_is_still_inside_when_others_are_called_again_has_not_left():
    roster = Roster(["cpu"] * 2)
    with roster.seat(1):
        roster.call([0])
        assert "1 is running" in repr(roster)
        waiting = Waiting(roster, circle_of(roster), 0)
        assert "broken" not in repr(roster)
        roster.abort(OSError())
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_inner_call_of_a_replica_does_not_let_it_leave():
    roster = Roster(["cpu"] * 2)
    with roster.seat(0):
        with roster.seat(0):
            assert "0 is running" in repr(roster)
        assert "0 is running" in repr(roster)
    assert "0 left its forward" in repr(roster)


def test_caught_error_of_an_inner_call_is_no_failure():
    roster = Roster(["cpu"] * 2)
    with roster.seat(0), pytest.raises(ValueError, match="inner"), roster.seat(0):
        raise ValueError("inner")
    assert roster.failure() is None


def test_drain_waits_for_those_inside_but_not_for_ever():
    roster = Roster(["cpu"] * 2)
    with roster.seat(1):
        waiting = Waiting(roster, circle_of(roster), 0)
        roster.abort(KeyboardInterrupt())
        waiting.outcome()
        roster.drain(0.01)
    roster.drain(10.0)
    assert "1 left its forward" in repr(roster)


def test_drain_ends_when_the_last_of_those_inside_has_left():
    roster = Roster(["cpu"] * 3)
    inside, drained, leave = threading.Barrier(3), threading.Event(), [threading.Event() for _ in range(2)]

    def stays(replica):
        with roster.seat(replica):
            inside.wait()
            leave[replica].wait()

    def drains():
        roster.drain(1000.0)  # Much longer than the watchdog waits: it is the departures that end it.
        drained.set()

    threads = [threading.Thread(target=stays, args=(replica,)) for replica in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    with roster.seat(2):
        pass  # leaves before the break
    roster.abort(KeyboardInterrupt())
    threads.append(threading.Thread(target=drains))
    threads[2].start()
    leave[0].set()
    threads[0].join()
    assert not drained.is_set()
    leave[1].set()
    for thread in threads:
        thread.join()
    assert drained.is_set()


def test_departures_are_noted_from_the_break_on():
    roster = Roster(["cpu"])
    for _ in range(10):
        with roster.seat(0):
            pass
    assert roster._departures.empty()  # which would grow with every round


def test_result_that_comes_after_the_break_reaches_nobody():
    roster = Roster(["cpu"] * 2)
    circle = circle_of(roster)
    waiting = Waiting(roster, circle, 1)

    def merges_too_late(messages):
        roster.abort(OSError())
        return TAKE_ALL(messages)

    with pytest.raises(ReplicaSyncError, match="got OSError in its thread"):
        roster.meet(circle, MASTER, "from 0", merges_too_late)
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_error_that_takes_long_to_print_does_not_hold_up_the_others():
    roster = Roster(["cpu"] * 3)

    class Slow(Exception):
        def __str__(self):
            roster.leave(2)  # would stand still if the lock was held
            return "slow"

    roster.leave(1, Slow())
    assert "2 left its forward" in repr(roster)
