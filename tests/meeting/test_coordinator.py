"""The coordinator alone: what breaks a forward, what it says then, and whom it names.

Every order of threads is tried in `test_interleavings.py`.
"""

import itertools
import linecache
import re
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress

import pytest

from sync_batchnorm import ReplicaSyncError, SyncMaster
from sync_batchnorm.meeting import Coordinator, RunningCallback, running_callback
from sync_batchnorm.meeting.records import MASTER, Rendezvous


def layer_of(name="layer", replicas=(0, 1)):
    rendezvous = Rendezvous(name, replicas[0])
    for replica in replicas[1:]:
        rendezvous.admit(replica or "replica 0", replica)
    return rendezvous


def call(coordinator, rendezvous, replica):
    """Call as `replica`; each gets all messages."""
    identifier = next(key for key, member in rendezvous.members.items() if member == replica)
    if identifier != MASTER:
        return coordinator.send(rendezvous, identifier, f"from {replica}")
    messages = coordinator.send(rendezvous, MASTER, f"from {replica}")
    coordinator.answer(rendezvous, dict.fromkeys(rendezvous.members, messages))
    return messages


class Waiting:
    """A replica that waits in a layer, in a thread of its own; takes nothing before somebody asks for its outcome."""

    def __init__(self, coordinator, rendezvous, replica):
        @contextmanager
        def span(name):
            waits.set()
            self.may_take.wait()
            yield

        def run():
            try:
                self.outcome_ = call(coordinator, rendezvous, replica)
            except ReplicaSyncError as error:
                self.outcome_ = error

        waits, self.may_take, coordinator.span = threading.Event(), threading.Event(), span
        self.thread = threading.Thread(target=run, daemon=True)  # A test that fails asks for no outcome.
        self.thread.start()
        waits.wait()
        coordinator.span = None

    def outcome(self):
        self.may_take.set()
        self.thread.join()
        return self.outcome_


def test_merge_that_exchanges_with_those_who_wait_for_it_is_a_cycle():
    coordinator = Coordinator(["cpu"] * 2)
    outer, inner = layer_of("outer"), layer_of("inner")
    waiting = Waiting(coordinator, outer, 1)
    coordinator.send(outer, MASTER, None)
    with pytest.raises(ReplicaSyncError, match=r"to reach the same layer, but got replica 0 .* in inner, call 1, "):
        coordinator.send(inner, MASTER, None)
    assert isinstance(waiting.outcome(), ReplicaSyncError)


def test_three_replicas_that_wait_for_each_other_in_a_circle_are_named():
    coordinator = Coordinator(["cpu"] * 3)
    waiting = [Waiting(coordinator, layer_of(str(pair), pair), pair[0]) for pair in ((1, 2), (2, 0))]
    with pytest.raises(
        ReplicaSyncError, match=r"got replica 0 .* in layer, .* 1 .* in \(1, 2\), .* 2 .* in \(2, 0\), "
    ):
        call(coordinator, layer_of(), 0)
    assert [type(replica.outcome()) for replica in waiting] == [ReplicaSyncError] * 2


def test_second_thread_of_a_replica_is_refused_while_the_first_waits():
    coordinator = Coordinator(["cpu"] * 2)
    waiting = Waiting(coordinator, layer_of("stem"), 1)
    text = (
        "expected one thread of a replica to exchange at a time, but replica 1 on device cpu called head in one thread "
        "while another one waits in stem, call 1; call synchronized layers in the thread that runs forward"
    )
    with pytest.raises(ReplicaSyncError, match=f"^{text}$"):
        call(coordinator, layer_of("head"), 1)
    assert str(waiting.outcome()) == text


def test_second_thread_of_the_master_is_refused_while_the_first_merges():
    coordinator, layer = Coordinator(["cpu"] * 2), layer_of()
    waiting = Waiting(coordinator, layer, 1)
    coordinator.send(layer, MASTER, None)
    for act in (lambda: coordinator.send(layer, MASTER, None), lambda: coordinator.answer(layer, {1: "the answer"})):
        with pytest.raises(ReplicaSyncError, match=r"replica 0 on device cpu called layer in one thread while another"):
            act()
    assert "one thread of a replica" in str(waiting.outcome())


def test_second_thread_of_a_replica_does_not_take_the_answer_of_the_first():
    coordinator, layer = Coordinator(["cpu"] * 2), layer_of()
    waiting = Waiting(coordinator, layer, 1)
    messages = call(coordinator, layer, 0)
    with pytest.raises(ReplicaSyncError, match="expected one thread of a replica"):
        call(coordinator, layer, 1)
    assert waiting.outcome() == messages


def test_second_thread_of_a_replica_does_not_exchange_before_the_turn_of_the_first():
    coordinator = Coordinator(["cpu"] * 2)
    coordinator.take_turns([0, 1], lambda replica: None)
    with pytest.raises(ReplicaSyncError, match=r"but replica 1 .* called layer in one .* waits in layer, call 1;"):
        call(coordinator, layer_of(), 1)


def test_timeout_names_a_replica_that_waits_elsewhere():
    coordinator = Coordinator(["cpu"] * 3)
    waiting = Waiting(coordinator, layer_of("stem", (1, 2)), 1)
    coordinator.timeout = 0.01
    text = r"but replica 0 .* waits for replica 1 .*, which waits in stem, call 1 \(head,"
    with pytest.raises(TimeoutError, match=text):
        call(coordinator, layer_of("head"), 0)
    assert isinstance(waiting.outcome(), TimeoutError)


def test_timeout_of_a_wait_for_a_turn_names_those_who_wait_in_a_layer_first():
    coordinator = Coordinator(["cpu"] * 3)
    coordinator.take_turns(range(3), lambda replica: None)
    coordinator.begin(0)
    waiting = Waiting(coordinator, layer_of("stem", (0, 1, 2)), 0)
    coordinator.begin(1)
    coordinator.timeout = 0.01
    text = (
        "but replica 0 on device cpu waits for replica 1 on device cpu, which is still running and replica 2 on device "
        "cpu, which waits for its turn (stem, call 1)"
    )
    with pytest.raises(TimeoutError, match=re.escape(text)):
        coordinator.begin(2)
    assert text in str(waiting.outcome())


def test_wait_that_ends_late_because_the_process_was_suspended_goes_on(monkeypatch):
    """The clock of the first wait jumps to an hour later; then the peer comes."""
    clock = iter([0.0, 0.0, 3600.0])
    coordinator, layer = Coordinator(["cpu"] * 2, timeout=0.01), layer_of()
    peer = threading.Thread(target=call, args=(coordinator, layer, 1))

    def monotonic():
        if (now := next(clock, None)) == 3600.0:
            coordinator.timeout = 10.0
            return now
        if now is None and not peer.ident:
            peer.start()
        return 3600.0 if now is None else now

    monkeypatch.setattr("sync_batchnorm.meeting.coordinator.monotonic", monotonic)
    assert call(coordinator, layer, 0) == [(0, "from 0"), (1, "from 1")]
    peer.join()


def test_wait_for_a_turn_may_last_as_long_as_each_turn_before_it(monkeypatch):
    clock = iter([0.0, 10.0, 6.0, 10.5, 16.0, 12.0])  # When the wait reads it at 10 and 16, a turn ends, at 6 and 12.
    ends = {10.0: lambda: coordinator.leave(0), 16.0: lambda: coordinator.leave(1)}
    coordinator = Coordinator(["cpu"] * 3, timeout=10.0)
    coordinator.take_turns(range(3), lambda replica: None)
    read = lambda: (now := next(clock), now in ends and ends[now]())[0]  # noqa: E731
    for module in ("coordinator", "records"):
        monkeypatch.setattr(f"sync_batchnorm.meeting.{module}.monotonic", read)
    coordinator.begin(2)


def test_replica_that_runs_on_is_given_up_after_the_timeout_or_a_second_after_it(monkeypatch):
    clock, given_up = [0.0], []
    monkeypatch.setattr("sync_batchnorm.meeting.coordinator.monotonic", lambda: clock[0])
    late, failed = [Coordinator(["cpu"] * 2, timeout=seconds) for seconds in (0.0, 5.0)]
    with pytest.raises(TimeoutError):
        call(late, layer_of(), 0)
    failed.leave(0, ValueError())
    for clock[0] in (0.5, 1.5, 4.5, 5.5):
        given_up.append((late.has_given_up, failed.has_given_up))
    assert given_up == [(False, False), (True, False), (True, False), (True, True)]
    names = [coordinator.take_failure()[0] for coordinator in (late, failed)]
    assert names == ["replica 0 on device cpu"] * 2


def test_replica_that_failed_for_a_reason_of_another_coordinator_is_an_original():
    coordinator = Coordinator(["cpu"] * 2)
    coordinator.abort(OSError(), 0.0)
    coordinator.leave(1, ReplicaSyncError("of an inner wrapper"))
    with pytest.raises(ReplicaSyncError) as caught:
        call(coordinator, layer_of(), 0)
    coordinator.leave(0, caught.value)
    assert str(coordinator.take_failure()[1]) == "of an inner wrapper"


class ControlC:
    """Interrupts its thread before a given line of what replicas exchange with.

    Not before what a ``with`` does: it takes and gives back a lock, and Python handles no signal in between.
    """

    def __init__(self, line):
        self.lines_left = line

    def trace(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.endswith(("/coordinator.py", "/records.py", "/pipes.py")):
            return None
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            self.lines_left -= 1
            if not self.lines_left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *args):
        sys.settrace(None)


def test_timeout_names_a_replica_whose_end_was_interrupted():
    texts = []
    for line in range(1, 10):
        coordinator = Coordinator(["cpu"] * 2, timeout=0.01)
        waiting = Waiting(coordinator, layer_of(), 0)
        with suppress(KeyboardInterrupt), ControlC(line):
            coordinator.leave(1)
        texts.append(str(waiting.outcome()))
    assert any("waits for replica 1 on device cpu, which left its forward (layer, call 1)" in text for text in texts)


class Pair:
    """Two replicas that exchange once, each in a thread of its own."""

    def __init__(self):
        self.coordinator, self.errors, self.one_waits = Coordinator(["cpu"] * 2, span=self.span), [], threading.Event()
        here = RunningCallback(self.coordinator)
        token = running_callback.set(here)
        master = SyncMaster(lambda messages: messages)
        here.number = 1
        self.ends = [master, master.register_slave(1)]
        running_callback.reset(token)

    def span(self, name):
        if name.endswith("waiting"):
            self.one_waits.set()
        return nullcontext()

    def run(self, replica):
        """Do what a wrapper does that runs a replica."""
        try:
            self.coordinator.begin(replica)
            try:
                self.ends[replica].run(replica)
            except BaseException as error:
                self.coordinator.leave(replica, error)
                raise
            self.coordinator.leave(replica)
        except BaseException as error:
            self.coordinator.abort(error, 0.0)
            self.errors.append(type(error))


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("order", ["comes first", "comes last", "in turns"])
def test_control_c_at_any_line_of_an_exchange_releases_the_peer(replica, order):
    for line in itertools.count(1):
        pair = Pair()
        if order == "in turns":
            pair.coordinator.take_turns([0, 1], lambda replica: None)
        peer = threading.Thread(target=pair.run, args=(1 - replica,))
        peer.start()
        if order == "comes last":
            pair.one_waits.wait()
        with ControlC(line) as control_c:
            pair.run(replica)
        peer.join()
        if control_c.lines_left > 0:
            assert pair.errors == []
            break
        assert KeyboardInterrupt in pair.errors
        assert set(pair.errors) <= {KeyboardInterrupt, ReplicaSyncError}
    assert line > 20


def test_replica_begins_once_after_a_break_too_unless_the_caller_has_gone():
    coordinator = Coordinator(["cpu"] * 3)
    coordinator.leave(2, ValueError())
    coordinator.begin(0)
    coordinator.abort(OSError(), 0.0)
    with pytest.raises(ReplicaSyncError, match="got ValueError in replica 2 on device cpu; fix that error"):
        coordinator.begin(1)
    with pytest.raises(RuntimeError, match="expected each replica to run once, but replica 0 on device cpu was called"):
        coordinator.begin(0)
