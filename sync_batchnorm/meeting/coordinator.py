"""The replicas of one forward pass: which run, wait for which others, or have ended, and what breaks the forward pass.

This file knows nothing of tensors. Replicas wait in `Coordinator._wait` only, each on a mailbox of its own. What is
known of a replica is in its `Record`, and whose turn it is in `Turns`. Two attributes repeat what the records say, so
that no exchange has to look at all of them: until a break, `_waiting` has the replicas with `waits_in`, and
`_one_has_ended` says whether any has `ended`.

NOTE [who may break a forward]: The lock of a coordinator guards all state of its forward pass. A coordinator breaks at
most once: immediately, in the thread in which one of these conditions becomes true:

1. a replica fails or is interrupted (`leave` with an error, `interrupt`), or the caller no longer waits (`abort`);
2. a replica ends while another waits for it (`leave`), or a replica starts to wait for one that has ended;
3. a replica starts to wait for one that waits for it, directly or through others (`_find_deadlock`): a call needs all
   members of its rendezvous, so a cycle in the wait-for graph can never be resolved;
4. the wait of a replica reaches the timeout (`_wait`);
5. a replica starts to exchange in a second thread while another of its threads is in an exchange (`send`).

Whoever puts an `Item` into the mailbox of a replica takes that replica out of `_waiting`, so no mailbox holds more than
one. A replica that got its answer before the break returns it, and all replicas get the error in their next call at the
latest. A broken coordinator stays broken: the next forward pass makes its own.

NOTE [tried in a meeting]: One exchange between 2, 4 and 8 threads takes about 15, 46 and 100 us with a `SimpleQueue`
for each replica. These are not better:

- one condition of the module threading for all: 28, 45 and 118 us; a barrier of it: twice that;
- raw locks or events in place of the queues, another switch interval: no gain;
- waiting in a loop instead of sleeping, turns under a semaphore: no gain with two replicas, little with eight;
- the last replica that arrives merges, another scheduling policy for the threads: NOTE [tried in a call];
- records that cost nothing at all: 2 % of a step on two GPUs, so these are not worth a trick;
- greenlets in place of threads: these would bring most, but then nothing of two replicas overlaps any more.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from math import inf
from queue import Empty, SimpleQueue
from threading import Lock, get_ident
from time import monotonic, sleep
from typing import Any, NoReturn

from .errors import ReplicaSyncError, ReplicaTimeoutError
from .records import MASTER, RUNS, Record, Records, Rendezvous, Turns, by_number, remedy_for_loops, those_who_wait

__all__: list[str] = []

DEFAULT_TIMEOUT = 300.0
# How many seconds a caller that was interrupted, or whose replicas reached the timeout, waits for those that still run:
# exiting while a replica is inside a torch operation aborts the process.
PATIENCE = 1.0
LATE = 1.0  # seconds by which no wait is late unless the process was suspended

Span = Callable[[str], AbstractContextManager[Any]]
NO_SPAN: AbstractContextManager[Any] = nullcontext()


class Coordinator:
    """The replicas of one forward pass, and how they meet.

    Args:
        devices: the device of each replica, for messages. Replicas that are not listed may exchange too.
        timeout: seconds after which a wait ends with a `ReplicaTimeoutError`.
        span: returns the context of a run, wait or merge for its name, as a profile shows it.
    """

    def __init__(self, devices: Sequence[str] = (), timeout: float = DEFAULT_TIMEOUT, span: Span | None = None) -> None:
        self.timeout = timeout
        self.span = span
        self.has_exchanged = False  # whether any call of a layer has ended
        self._lock = Lock()
        self._records = Records()
        for number, device in enumerate(devices):
            self._records[number] = Record(number, device, SimpleQueue())
        self._listed = list(self._records.values())
        self._waiting: list[Record] = []  # in the order in which they came
        self._turns: Turns | None = None  # None if all replicas run at once
        self._one_has_ended = False
        self._broken: ReplicaSyncError | None = None  # what all replicas get a copy of
        self._end_of_patience = inf

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended."""
        return bool(self._listed) and all([record.ended for record in self._listed])

    @property
    def has_given_up(self) -> bool:
        """Whether the time is over that replicas have to end after a break; one that still runs is taken for stuck."""
        return monotonic() > self._end_of_patience

    def who(self, number: int) -> str:
        """Return the name of a listed replica in messages."""
        return str(self._listed[number])

    def runs_here(self, number: int) -> bool:
        """Return whether this thread runs a replica; one that inherits the context of a replica need not."""
        return self._listed[number].thread == get_ident()

    # How a forward pass begins and ends.

    def expect(self, numbers: Collection[int]) -> None:
        """Record, before any of them runs, that these replicas and no others will be called."""
        for record in self._listed:
            if record.number not in numbers:
                self._one_has_ended = True
                record.ended = "was given no input"

    def take_turns(self, numbers: Collection[int], begin: Callable[[int], None]) -> None:
        """Let replicas run one at a time, until the forward pass ends or breaks; see `Turns`."""
        with self._lock:
            if self._broken is None:
                self._turns = Turns(map(self._records.__getitem__, numbers), begin)

    def begin(self, number: int) -> AbstractContextManager[Any]:
        """Record that a replica runs, which it may once, and wait for its turn; return the span of its run."""
        with self._lock:
            record = self._records[number]
            if self._broken is not None and (record.ended or record.was_released):
                self._raise_broken(record)
            if record.thread or record.ended:
                raise RuntimeError(
                    f"expected each replica to run once, but {record} was called twice; call replicate again for each "
                    "forward pass"
                )
            record.thread = get_ident()
            takes_turns = self._turns is not None
        if takes_turns:
            self._wait(record)
        return NO_SPAN if self.span is None else self.span(str(record))

    def leave(self, number: int, failure: BaseException | None = None) -> None:
        """Record that a replica has ended, and release all replicas if one would wait for it in vain.

        The first `failure` counts; it is None if the replica returned. A replica that returns although a break has
        released it has caught the `ReplicaSyncError`, which is an error, too.
        """
        with self._lock:
            record = self._records[number]
            if record.failure is not None:
                return
            self._one_has_ended = True
            record.thread, record.ended = 0, "left its forward"
            if failure is not None:
                record.failure = failure
                return self._break_by(record, type(failure))
            if self._turns is not None:
                self._turns.pass_on(record)
            if record.was_released:
                raise type(self._broken)(  # type: ignore[misc]
                    "expected every ReplicaSyncError to leave forward(), but a replica caught one and carried on; put "
                    f"the try around the call of the wrapper. The error that it caught: {self._broken}"
                )
            for other in self._waiting:
                if other.waits_in is not None and number in other.waits_in.awaited():
                    return self._break_by_absence(record, other.waits_in)

    def lose_thread(self, number: int) -> bool:
        """Record that the thread of a replica has ended; return whether the replica did not begin to run in it."""
        record = self._listed[number]
        if record.thread:
            text = f"expected {record} to run until forward() ends, but its thread was ended; end only your own threads"
            self.leave(number, RuntimeError(text))
        return not record.ended

    def interrupt(self, number: int, error: BaseException) -> None:
        """Release all replicas, because an exception took one of them out of a rendezvous. `leave` records it later."""
        with self._lock:
            self._break_by(self._records[number], type(error))

    def abort(self, error: BaseException, seconds: float) -> None:
        """Release all replicas, because their caller no longer waits; give them `seconds` to notice that."""
        with self._lock:
            for record in self._listed:
                if not record.thread and not record.ended:
                    record.ended = "was not called"
            self._break(
                f"expected the caller to wait for all replicas, but got {type(error).__name__} in its thread; "
                "this replica was stopped as a consequence"
            )
            records = list(self._records.values())
        deadline = monotonic() + seconds
        while any([record.thread for record in records]) and monotonic() < deadline:
            sleep(0.01)

    def take_failure(self) -> tuple[str, BaseException] | None:
        """Return who failed first, as far as that is known, and the error, or None; forget all failures."""
        failures: list[tuple[tuple[bool, bool, int], str, Any]] = []  # each with its rank
        with self._lock:
            # Loops: after Ctrl-C in a comprehension here, the lock would stay held (Python 3.12 and 3.13).
            for record in self._records.values():
                if (error := record.failure) is not None:
                    rank = record.was_released, isinstance(error, ReplicaSyncError), record.number
                    failures.append((rank, str(record), error))
                    record.failure = None
            if not failures and self.has_given_up:  # The replicas that were released are still on their way out.
                for record in self._records.values():
                    if record.was_released:
                        failures.append(((True, True, record.number), str(record), copy(self._broken)))
        return min(failures)[1:] if failures else None

    # One call of a layer.

    def send(self, rendezvous: Rendezvous, identifier: Hashable, message: Any) -> Any:
        """Send the message of a member; block until there is an answer, which for the master is all messages."""
        with self._lock:
            record = self._records[rendezvous.members[identifier]]
            if self._broken is not None:
                self._raise_broken(record)
            is_busy = record.waits_in is not None or identifier in rendezvous.messages
            is_ready = self._turns is not None and record in self._turns.ready
            if is_busy or is_ready or not record.mailbox.empty():  # Another thread has not taken its answer yet.
                self._break(  # for all replicas, since the error of this thread may reach nobody
                    f"expected one thread of a replica to exchange at a time, but {record} called {rendezvous.name} "
                    f"in one thread while another one waits in {record.waits_in or rendezvous}; call synchronized "
                    "layers in the thread that runs forward"
                )
                self._raise_broken(record)
            self._begin_wait(record, rendezvous, identifier, message)
        with NO_SPAN if self.span is None else self.span(f"{rendezvous.name}, waiting"):
            return self._wait(record)

    def answer(self, rendezvous: Rendezvous, answers: dict[Hashable, Any]) -> None:
        """Deliver the answers of the master to the slaves, which ends the call."""
        with self._lock:
            if self._broken is not None:
                self._raise_broken(self._records[rendezvous.members[MASTER]])
            self.has_exchanged = True
            rendezvous.messages = {}
            rendezvous.call += 1
            for member, number in rendezvous.members.items():
                if member != MASTER:
                    self._deliver(self._records[number], answers[member])

    def _wait(self, record: Record) -> Any:
        mailbox, since = record.mailbox, monotonic()
        while True:
            try:
                delivered, value = mailbox.get(timeout=max(0.0, since + self.timeout - monotonic()))
                break
            except Empty:
                since = self._waited(record, since)
        if not delivered:
            raise copy(self._broken)  # type: ignore[misc]
        if (turns := self._turns) is not None:
            turns.begin(record.number)
        return value

    def _waited(self, record: Record, since: float) -> float:
        """Break if a replica has waited too long; return the time from which its wait counts: `since`, or later."""
        with self._lock:
            now = monotonic()
            if now > since + self.timeout + LATE:  # This process was suspended, and all replicas with it.
                return now
            if self._turns is not None and self._turns.since > since:  # Another replica runs than did at that time.
                return self._turns.since
            if record.mailbox.empty():  # Otherwise an item was put just now.
                self._break_by_timeout(record)
            return now

    # All methods below are called with the lock held.

    def _begin_wait(self, record: Record, rendezvous: Rendezvous, identifier: Hashable, message: Any) -> None:
        """Record the message of a replica that waits from now on; wake the master if it is the last of the call."""
        members, messages = rendezvous.members, rendezvous.messages
        messages[identifier] = message
        self._waiting.append(record)
        record.waits_in = rendezvous
        if len(messages) == len(members):
            in_order = list(zip(members, map(messages.get, members), strict=True))
            self._deliver(self._records[members[MASTER]], in_order)
        elif self._one_has_ended or len(self._waiting) != len(messages):  # Otherwise all that wait, wait here.
            self._find_deadlock(record, rendezvous)
        if self._turns is not None:
            self._turns.pass_on(record)

    def _deliver(self, record: Record, value: Any) -> None:
        """Let a replica go on with `value`, now or when its turn comes."""
        if self._turns is None:
            record.mailbox.put((True, value))  # first, so that Ctrl-C in between loses no release
        else:
            self._turns.resume(record, value)
        record.waits_in = None
        self._waiting.remove(record)

    def _raise_broken(self, record: Record) -> NoReturn:
        record.was_released = True
        raise copy(self._broken)  # type: ignore[misc]

    def _break(self, text: str, kind: type[ReplicaSyncError] = ReplicaSyncError, notes: Sequence[str] = ()) -> None:
        # Ctrl-C may interrupt this method: then the next break releases the remaining replicas.
        if self._broken is None:
            error = kind(text)
            for note in notes:
                error.add_note(note)
            self._broken = error
            self._end_of_patience = monotonic() + (self.timeout if kind is ReplicaSyncError else PATIENCE)
        ready = {} if self._turns is None else self._turns.ready
        for record in self._records.values():
            if record.waits_in is not None:  # A kept `SyncMaster` would keep the messages too.
                record.waits_in.messages = dict.fromkeys(record.waits_in.messages)
            if record.waits_in is not None or record in ready:
                record.mailbox.put((False, None))
                record.was_released = True
                record.waits_in = None
        self._waiting.clear()
        self._turns = None

    def _awaited(self, rendezvous: Rendezvous) -> list[Record]:
        return [self._records[number] for number in rendezvous.awaited()]

    def _find_deadlock(self, record: Record, rendezvous: Rendezvous) -> None:
        """Break if the wait that begins with `record` can never end."""
        todo = self._awaited(rendezvous)
        for peer in todo:
            if peer.ended:
                return self._break_by_absence(peer, rendezvous)
        seen: set[Record] = set()
        while todo:
            peer = todo.pop()
            if peer is record:
                waiting = sorted(self._waiting, key=by_number)
                places = ", ".join(f"{other} in {other.waits_in}" for other in waiting)
                loops = remedy_for_loops(other.waits_in for other in waiting if other.waits_in is not None)
                return self._break(
                    f"expected all replicas to reach the same layer, but got {places}; make every replica call the "
                    f"synchronized layers in the same order{loops}"
                )
            if peer.waits_in is not None and peer not in seen:
                seen.add(peer)
                todo += self._awaited(peer.waits_in)

    def _break_by(self, record: Record, kind: type[BaseException]) -> None:
        self._break(
            f"expected all replicas to finish, but got {kind.__name__} in {record}; fix that error, this replica was "
            "stopped as a consequence"
        )

    def _break_by_absence(self, record: Record, rendezvous: Rendezvous) -> None:
        self._break(
            f"expected every replica to call {rendezvous.name} the same number of times, but {record} "
            f"{record.ended} while {those_who_wait(self._waiting, rendezvous)} for it ({rendezvous}); make every "
            f"replica call every synchronized layer in every forward pass{remedy_for_loops([rendezvous])}"
        )

    def _break_by_timeout(self, record: Record) -> None:
        remedy = "pass a longer timeout= if it is only slow"
        rendezvous = record.waits_in or (self._waiting[0].waits_in if self._waiting else None)
        if rendezvous is not None:
            peers = self._awaited(rendezvous)
            late = " and ".join(f"{peer}, which {peer.activity(self._turns)}" for peer in peers)
            text = f"{those_who_wait(self._waiting, rendezvous)} for {late} ({rendezvous})"
            if not all(peer.thread for peer in peers):
                remedy += ", and run each replica in its own thread: one after another in one thread, they deadlock"
        else:
            peers = [] if self._turns is None or self._turns.running is None else [self._turns.running]
            late = " and ".join(f"{peer} {peer.activity(self._turns)}" for peer in peers)
            text = f"{record} waits for its turn while {late}"
            remedy += (
                "; replicas on one device run one at a time, and may wait for each other only in an exchange of their "
                "forward pass: let a replicate of yours call super().replicate, and make each SyncMaster in a callback"
            )
        self._break(
            f"expected all replicas within {self.timeout:g} seconds, but {text}; {remedy}",
            ReplicaTimeoutError,
            [peer.stack() for peer in peers if peer.activity(self._turns) == RUNS],
        )
