"""The coordinator of a forward pass: let its replicas exchange, and release all of them once one cannot continue.

The problem: each replica runs in a thread of its own, and needs messages of the others in every synchronized layer. The
obvious way is a `threading.Barrier` for each layer. It opens when all replicas have come. If a replica raises an error,
returns early, or waits in another layer, the barrier stays closed: all others hang, and a timeout cannot name the
cause.

Our way: the coordinator has a `Record` of each replica, and therefore knows when a wait can never end. It then
*breaks*: it releases all replicas, with an error that names the replica and its fault. One exchange goes like this:

      replica 1, a slave             coordinator               replica 0, the master

      send(message) ------------> messages of the layer <---------- send(message)
        waits on its mailbox              |                           waits on its mailbox
                                  all members have sent
                                          +---- all messages -----> runs the callback
        takes its answer <-------- answer of each slave <---------- answer(answers)

Messages can be any object; this file does not import torch. Replicas wait in `Coordinator._wait` only, each on its own
mailbox. Two attributes repeat facts from the records, so that an exchange need not look at all records: `_waiting`
lists the records with `waits_in` set, until a break, and `_one_has_ended` is true if any record has `ended` set.

NOTE [who may break a forward]: The lock of a coordinator guards all state of its forward pass. A coordinator breaks at
most once: immediately, in the thread in which one of these conditions becomes true:

1. a replica fails or is interrupted (`leave` with an error, `interrupt`), or the caller no longer waits (`abort`);
2. a replica ends while another waits for it (`leave`), or a replica starts to wait for one that has ended;
3. a replica starts to wait for a replica that waits for it, directly or through others (`_break_on_deadlock`): an
   exchange needs all members of its rendezvous, so a cycle in the wait-for graph can never be resolved;
4. the wait of a replica reaches the timeout (`_wait`);
5. a replica starts to exchange in a second thread while another of its threads is in an exchange (`send`).

Whoever puts an `Item` into the mailbox of a replica takes that replica out of `_waiting`, so a mailbox holds at most
one item. A replica whose answer came before the break returns it. Every replica gets the error in its next exchange at
the latest. A broken coordinator stays broken: the next forward pass makes its own.
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
from .records import MASTER, STILL_RUNNING, Record, Rendezvous, Turns, by_number, format_waiting, remedy_for_loops

__all__: list[str] = []

DEFAULT_TIMEOUT = 300.0
# Seconds for which the caller waits for running replicas after Ctrl-C or a timeout. It does not leave them at once,
# because exiting while a replica is inside a torch operation aborts the process.
PATIENCE = 1.0
LATE = 1.0  # seconds; a wait that ends later than this after its deadline shows that the process was suspended

Span = Callable[[str], AbstractContextManager[Any]]
NO_SPAN: AbstractContextManager[Any] = nullcontext()


class Coordinator:
    """Coordinate the replicas of one forward pass: their start and end, their turns, and their exchanges.

    Args:
        devices: the device of each replica, for messages. Unlisted replicas may exchange too.
        timeout: seconds after which a wait ends with a `ReplicaTimeoutError`.
        span: takes the name of a run, wait or merge; returns the context manager that shows it in a profile.
    """

    def __init__(self, devices: Sequence[str] = (), timeout: float = DEFAULT_TIMEOUT, span: Span | None = None) -> None:
        self.timeout = timeout
        self.span = span
        self.has_exchanged = False  # whether any exchange is complete
        self._lock = Lock()
        self._records: dict[int, Record] = {}  # by the number of the replica
        for number, device in enumerate(devices):
            self._records[number] = Record(number, device, SimpleQueue())
        self._listed = list(self._records.values())
        self._waiting: list[Record] = []  # in the order in which they came
        self._turns: Turns | None = None  # None if all replicas run at once
        self._one_has_ended = False
        self._broken: ReplicaSyncError | None = None  # the error of the break, copied for each replica
        self._end_of_patience = inf

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended."""
        return bool(self._listed) and all([record.ended for record in self._listed])

    @property
    def has_given_up(self) -> bool:
        """Whether a replica that still runs counts as stuck, because the time to end after a break is over."""
        return monotonic() > self._end_of_patience

    def who(self, number: int) -> str:
        """Return the number and the device of a listed replica, for messages."""
        return str(self._listed[number])

    def runs_here(self, number: int) -> bool:
        """Return whether the current thread runs this replica. Inheriting the context of a replica is not enough."""
        return self._listed[number].thread == get_ident()

    # The beginning and the end of a forward pass.

    def expect(self, numbers: Collection[int]) -> None:
        """Mark the listed replicas outside `numbers` as ended, because they get no input. Call it before any runs."""
        for record in self._listed:
            if record.number not in numbers:
                self._one_has_ended = True
                record.ended = "was given no input"

    def take_turns(self, numbers: Collection[int], begin: Callable[[int], None]) -> None:
        """Let these replicas run one at a time, until the forward pass ends or breaks; see `Turns`."""
        with self._lock:
            if self._broken is None:
                self._turns = Turns([self._listed[number] for number in numbers], begin)

    def begin(self, number: int) -> AbstractContextManager[Any]:
        """Mark the replica as running (allowed once), wait for its turn, and return its profiler span."""
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
        """Mark the replica as ended. Break if it failed, or if another replica waits for it.

        `failure` is None if the replica returned; only the first failure is recorded. A replica that returns after a
        break has released it must have caught the `ReplicaSyncError`. That is an error, too.
        """
        with self._lock:
            record = self._record(number)
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
        """Mark the replica as failed if its thread ended while it ran; return whether it never began to run."""
        record = self._listed[number]
        if record.thread:
            text = f"expected {record} to run until forward() ends, but its thread was ended; end only your own threads"
            self.leave(number, RuntimeError(text))
        return not record.ended

    def interrupt(self, number: int, error: BaseException) -> None:
        """Release all replicas, because an exception ended the wait of this one. `leave` records the error later."""
        with self._lock:
            self._break_by(self._record(number), type(error))

    def abort(self, error: BaseException, seconds: float) -> None:
        """Release all replicas, because their caller no longer waits; wait up to `seconds` for them to end."""
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
        """Return name and error of the failed replica with the lowest rank, or None; forget all failures.

        An error of a replica that was not released comes before the errors that follow from a break, any other error
        before a `ReplicaSyncError`, and a lower replica before a higher one.
        """
        failures: list[tuple[tuple[bool, bool, int], str, Any]] = []  # (order as above, replica, error)
        with self._lock:
            # Loops: after Ctrl-C in a comprehension here, the lock would stay held (Python 3.12 and 3.13).
            for record in self._records.values():
                if (error := record.failure) is not None:
                    order = record.was_released, isinstance(error, ReplicaSyncError), record.number
                    failures.append((order, str(record), error))
                    record.failure = None
            if not failures and self.has_given_up:  # The replicas that were released are still on their way out.
                for record in self._records.values():
                    if record.was_released:
                        failures.append(((True, True, record.number), str(record), copy(self._broken)))
        return min(failures)[1:] if failures else None

    # One exchange.

    def send(self, rendezvous: Rendezvous, identifier: Hashable, message: Any) -> Any:
        """Send the message of a member, and block until it can continue.

        Return the answer of the master. The master itself gets a list of ``(identifier, message)`` of all members.
        """
        with self._lock:
            record = self._record(rendezvous.members[identifier])
            if self._broken is not None:
                self._raise_broken(record)
            is_busy = record.waits_in is not None or identifier in rendezvous.messages
            is_ready = self._turns is not None and record in self._turns.ready
            # An item in the mailbox is the answer for another thread, which has not taken it yet.
            if is_busy or is_ready or not record.mailbox.empty():
                self._break(  # for all replicas, because an error in this thread alone may never reach the caller
                    f"expected one thread of a replica to exchange at a time, but {record} called {rendezvous.name} "
                    f"in one thread while another one waits in {record.waits_in or rendezvous}; call synchronized "
                    "layers in the thread that runs forward"
                )
                self._raise_broken(record)
            # No variable refers to all messages: it would keep all tensors in them alive until this replica wakes up.
            rendezvous.messages[identifier] = message
            self._waiting.append(record)
            record.waits_in, number_of_messages = rendezvous, len(rendezvous.messages)
            if number_of_messages == len(rendezvous.members):  # Wake the master.
                self._deliver(
                    self._records[rendezvous.members[MASTER]],
                    list(zip(rendezvous.members, map(rendezvous.messages.get, rendezvous.members), strict=True)),
                )
            elif self._one_has_ended or len(self._waiting) != number_of_messages:  # Otherwise all that wait do so here.
                self._break_on_deadlock(record, rendezvous)
            if self._turns is not None:
                self._turns.pass_on(record)
        with NO_SPAN if self.span is None else self.span(f"{rendezvous.name}, waiting"):
            return self._wait(record)

    def answer(self, rendezvous: Rendezvous, answers: dict[Hashable, Any]) -> None:
        """Deliver the answers of the master to the slaves, and thereby complete the exchange."""
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
        """Block until the mailbox of the replica has an item; return its value, or raise the error of the break.

        The timeout counts from the last beginning of a turn, or from the last suspension of the process.
        """
        mailbox, since = record.mailbox, monotonic()
        while True:
            try:
                delivered, value = mailbox.get(timeout=max(0.0, since + self.timeout - monotonic()))
                break
            except Empty:
                since = self._restart_or_break(record, since)
        if not delivered:
            raise copy(self._broken)  # type: ignore[misc]
        if (turns := self._turns) is not None:
            turns.begin(record.number)
        return value

    def _restart_or_break(self, record: Record, since: float) -> float:
        """Break if the wait that began at `since` is too long; otherwise return the time from which it counts."""
        with self._lock:
            now = monotonic()
            if now > since + self.timeout + LATE:  # This process was suspended, and all replicas with it.
                return now
            if self._turns is not None and self._turns.since > since:  # Another turn began during this wait.
                return self._turns.since
            if record.mailbox.empty():  # Otherwise an item came just now, and the next look finds it.
                self._break_by_timeout(record)
            return now

    # All methods below are called with the lock held.

    def _record(self, number: int) -> Record:
        """Return the record of a replica. An unlisted replica gets one when it is first asked for."""
        if number not in self._records:
            self._records[number] = Record(number, None, SimpleQueue())
        return self._records[number]

    def _deliver(self, record: Record, value: Any) -> None:
        """Let a waiting replica continue with `value`, now or when its turn comes."""
        if self._turns is None:
            record.mailbox.put((True, value))  # first, so that Ctrl-C in between loses no release
        else:
            self._turns.resume(record, value)
        record.waits_in = None
        self._waiting.remove(record)

    def _raise_broken(self, record: Record) -> NoReturn:
        """Raise the error of the break in the thread of this replica."""
        record.was_released = True
        raise copy(self._broken)  # type: ignore[misc]

    def _break(self, text: str, kind: type[ReplicaSyncError] = ReplicaSyncError, notes: Sequence[str] = ()) -> None:
        """Store the error of the first break, end the turns, and release all replicas that wait.

        Ctrl-C may interrupt this method: then the next break releases the remaining replicas.
        """
        if self._broken is None:
            error = kind(text)
            for note in notes:
                error.add_note(note)
            self._broken = error
            self._end_of_patience = monotonic() + (self.timeout if kind is ReplicaSyncError else PATIENCE)
        ready = {} if self._turns is None else self._turns.ready
        for record in self._records.values():
            if record.waits_in is not None:  # A `SyncMaster` that a module keeps would keep these messages alive.
                record.waits_in.messages = dict.fromkeys(record.waits_in.messages)
            if record.waits_in is not None or record in ready:
                record.mailbox.put((False, None))
                record.was_released = True
                record.waits_in = None
        self._waiting.clear()
        self._turns = None

    def _awaited(self, rendezvous: Rendezvous) -> list[Record]:
        return [self._record(number) for number in rendezvous.awaited()]

    def _break_on_deadlock(self, record: Record, rendezvous: Rendezvous) -> None:
        """Break if the wait of this replica can never end: for an ended replica, or in a cycle of waits.

        Depth-first search in the wait-for graph, from the replicas that the rendezvous still needs.
        """
        to_visit = self._awaited(rendezvous)
        for peer in to_visit:
            if peer.ended:
                return self._break_by_absence(peer, rendezvous)
        visited: set[Record] = set()
        while to_visit:
            peer = to_visit.pop()
            if peer is record:
                waiting = sorted(self._waiting, key=by_number)
                places = ", ".join(f"{other} in {other.waits_in}" for other in waiting)
                loops = remedy_for_loops(other.waits_in for other in waiting if other.waits_in is not None)
                return self._break(
                    f"expected all replicas to reach the same layer, but got {places}; make every replica call the "
                    f"synchronized layers in the same order{loops}"
                )
            if peer.waits_in is not None and peer not in visited:
                visited.add(peer)
                to_visit += self._awaited(peer.waits_in)

    def _break_by(self, record: Record, kind: type[BaseException]) -> None:
        """Break because this replica got an exception of class `kind`."""
        self._break(
            f"expected all replicas to finish, but got {kind.__name__} in {record}; fix that error, this replica was "
            "stopped as a consequence"
        )

    def _break_by_absence(self, record: Record, rendezvous: Rendezvous) -> None:
        """Break because this replica has ended, and the rendezvous still needs it."""
        self._break(
            f"expected every replica to call {rendezvous.name} the same number of times, but {record} "
            f"{record.ended} while {format_waiting(self._waiting, rendezvous)} for it ({rendezvous}); make every "
            f"replica call every synchronized layer in every forward pass{remedy_for_loops([rendezvous])}"
        )

    def _break_by_timeout(self, record: Record) -> None:
        """Break because this replica waited too long, in a rendezvous or for its turn.

        The error names the replicas that it waited for. Notes show the stack of each one that is still running. If it
        waited for its turn, but another replica waits in a rendezvous, the error names that rendezvous: it is nearer to
        the cause.
        """
        remedy = "pass a longer timeout= if it is only slow"
        rendezvous = record.waits_in or (self._waiting[0].waits_in if self._waiting else None)
        if rendezvous is not None:
            peers = self._awaited(rendezvous)
            late = " and ".join(f"{peer}, which {peer.activity(self._turns)}" for peer in peers)
            text = f"{format_waiting(self._waiting, rendezvous)} for {late} ({rendezvous})"
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
            [peer.stack() for peer in peers if peer.activity(self._turns) == STILL_RUNNING],
        )


# NOTE [tried in a meeting]: One exchange between 2, 4 and 8 threads takes about 15, 46 and 100 us with a `SimpleQueue`
# for each replica. These alternatives are not better:
#
# - one `threading.Condition` for all replicas: 28, 45 and 118 us; a `threading.Barrier`: twice that;
# - raw locks or events in place of the queues, another switch interval: no gain;
# - waiting in a loop instead of sleeping, turns under a semaphore: no gain with two replicas, little with eight;
# - merging in the replica that arrives last, another scheduling policy for the threads: NOTE [tried in a call];
# - records at no cost at all: 2 % of a step on two GPUs, so no trick to save them is worth its lines;
# - greenlets in place of threads: much faster, but then nothing of two replicas overlaps any more.
