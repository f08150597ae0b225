"""The coordinator of a forward pass: it lets the replicas exchange, and stops all of them if one cannot continue.

The problem: each replica runs in a thread of its own, and needs messages of the other replicas in every synchronized
layer. The obvious way is a `threading.Barrier` for each layer, which opens when all replicas have come. But one replica
may raise an error, return early, or wait in another layer. Then the barrier stays closed, all other replicas hang, and
a timeout cannot name the cause.

Our way: the coordinator keeps a `Record` of each replica, and therefore knows when a wait can never end. The
coordinator then *breaks* the forward pass: it releases all waiting replicas with an error. The error names the replica
at fault, and its fault. One exchange goes like this:

      replica 1, a slave             coordinator               replica 0, the master
      ------------------             -----------               ---------------------
      send(message) ------------> messages of the layer <---------- send(message)
        waits on its mailbox              |                           waits on its mailbox
                                  all members have sent
                                          +---- all messages -----> runs the callback
        takes its answer <-------- answer of each slave <---------- answer(answers)

A message can be any object: this file does not import torch. All replicas wait in `Coordinator._wait`, and each replica
waits on its own mailbox, a `SimpleQueue`.

Two attributes of a coordinator repeat facts from the records of the replicas, so that an exchange need not read all
records. `_waiting` lists the records of all replicas that wait in a layer. `_one_has_ended` is true once any replica
has ended.

NOTE [who may break a forward]: The lock of a coordinator guards all state of its forward pass. A coordinator breaks the
forward pass at most once. It does so immediately, in the thread in which one of these conditions becomes true:

1. a replica fails or is interrupted (`leave` with an error, `interrupt`), or the caller no longer waits (`abort`);
2. a replica ends while another replica waits for it (`leave`), or a replica starts to wait for an ended replica;
3. a replica starts to wait for a replica that waits for it, directly or through others (`_break_on_deadlock`): an
   exchange needs all members of its rendezvous, so a cycle in the wait-for graph can never be resolved;
4. the wait of a replica reaches the timeout (`_wait`);
5. a replica starts to exchange in a second thread while another of its threads is in an exchange (`send`).

Only a waiting replica gets an item into its mailbox, and from then on it no longer counts as waiting. So a mailbox
never holds more than one item.

If a replica gets its answer just before the forward pass breaks, `send` still returns this answer, and the replica's
next exchange raises the error. After a break, a coordinator is never used again: the next forward pass makes a new one.
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
# The number of seconds for which the caller's thread waits for running replicas after Ctrl-C or a timeout. Without this
# wait, the program could exit while a replica is inside a torch operation, and the process would abort.
PATIENCE = 1.0
# If a wait ends more than this number of seconds after its deadline, the whole process must have been suspended.
LATE = 1.0

Span = Callable[[str], AbstractContextManager[Any]]
NO_SPAN: AbstractContextManager[Any] = nullcontext()


class Coordinator:
    """Coordinate the replicas of one forward pass: their start and end, their turns, and their exchanges.

    Args:
        devices: the device of each replica, for messages. Replicas without an entry may exchange, too.
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
        self._waiting: list[Record] = []  # the records of waiting replicas, in the order in which they began to wait
        self._turns: Turns | None = None  # the turns of the replicas; None if the replicas run at the same time
        self._one_has_ended = False
        self._broken: ReplicaSyncError | None = None  # the error that broke the forward pass; each replica gets a copy
        self._end_of_patience = inf

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended."""
        return bool(self._listed) and all([record.ended for record in self._listed])

    @property
    def has_given_up(self) -> bool:
        """Whether the forward pass broke long ago, so that a replica that still runs counts as stuck."""
        return monotonic() > self._end_of_patience

    def who(self, number: int) -> str:
        """Return the number and the device of a replica as text, for messages."""
        return str(self._listed[number])

    def runs_here(self, number: int) -> bool:
        """Return whether the current thread is the thread that runs this replica.

        Threads that the replica has started are other threads, even if they inherited its context variables.
        """
        return self._listed[number].thread == get_ident()

    # The methods below begin and end the forward pass, or the run of one replica.

    def add_replica(self, number: int) -> None:
        """Add a replica that is not listed, such as a replica in the exchange of a user's own `SyncMaster`."""
        with self._lock:
            if number not in self._records:
                self._records[number] = Record(number, None, SimpleQueue())

    def expect(self, numbers: Collection[int]) -> None:
        """Mark all replicas without an input as ended, so that no other replica waits for them.

        `numbers` are the numbers of the replicas that get an input. Call this method before any replica runs.
        """
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
        """Mark the replica as running, wait for its turn, and return a context manager for its run.

        The context manager shows the run of the replica in a profile. If the replica already ran in this forward pass,
        raise an error.
        """
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
        """Mark the replica as ended. If it failed, or if another replica waits for it, stop all replicas with an error.

        `failure` is the exception of the replica, or None if the replica returned. Only the first failure is stored.

        If the replica was stopped by a `ReplicaSyncError`, but returned nevertheless, its `forward` must have caught
        this error. This is not allowed, so this method raises an error.
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
        """Mark the replica as failed if its thread ended in the middle of its `forward`.

        Return True if the replica never began to run.
        """
        record = self._listed[number]
        if record.thread:
            text = f"expected {record} to run until forward() ends, but its thread was ended; end only your own threads"
            self.leave(number, RuntimeError(text))
        return not record.ended

    def interrupt(self, number: int, error: BaseException) -> None:
        """Release all replicas with an error, because an exception interrupted this replica in an exchange.

        The exception itself is stored later, when the replica ends with it and calls `leave`.
        """
        with self._lock:
            self._break_by(self._records[number], type(error))

    def abort(self, error: BaseException, seconds: float) -> None:
        """Release all replicas with an error, because the caller's thread no longer waits for their outputs.

        After the replicas are released, wait until all of them have ended, but at most for the given number of seconds.
        """
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
        """Choose the failed replica to report, and return its name and its error; return None if no replica failed.

        If several replicas failed, choose one by three rules. First, prefer a replica that failed by itself to a
        replica that was stopped. Second, prefer any other error to a `ReplicaSyncError`. Third, prefer the replica with
        the lowest number. Forget all failures afterwards.
        """
        failures: list[tuple[tuple[bool, bool, int], str, Any]] = []  # (rank by these rules, replica, error)
        with self._lock:
            # These are loops, because Ctrl-C in a comprehension would leave the lock held (Python 3.12 and 3.13).
            for record in self._records.values():
                if (error := record.failure) is not None:
                    order = record.was_released, isinstance(error, ReplicaSyncError), record.number
                    failures.append((order, str(record), error))
                    record.failure = None
            # If the forward pass broke without a failed replica, and some replicas did not end in time, report the
            # error that broke it.
            if not failures and self.has_given_up:
                for record in self._records.values():
                    if record.was_released:
                        failures.append(((True, True, record.number), str(record), copy(self._broken)))
        return min(failures)[1:] if failures else None

    # The methods below run one exchange between replicas.

    def send(self, rendezvous: Rendezvous, identifier: Hashable, message: Any) -> Any:
        """Send one replica's message in an exchange, and block until the result of the exchange is there.

        For a slave, return the answer of the master. For the master, return the messages of all replicas, as a list of
        ``(identifier, message)``.
        """
        with self._lock:
            record = self._records[rendezvous.members[identifier]]
            if self._broken is not None:
                self._raise_broken(record)
            is_busy = record.waits_in is not None or identifier in rendezvous.messages
            is_ready = self._turns is not None and record in self._turns.ready
            # If the mailbox is not empty, another thread of this replica has not taken its answer yet.
            if is_busy or is_ready or not record.mailbox.empty():
                # Release all replicas with an error, because an error in this thread alone may never reach the caller.
                self._break(
                    f"expected one thread of a replica to exchange at a time, but {record} called {rendezvous.name} "
                    f"in one thread while another one waits in {record.waits_in or rendezvous}; call synchronized "
                    "layers in the thread that runs forward"
                )
                self._raise_broken(record)
            # Do not keep the list of messages in a variable: their tensors would stay alive while this replica waits.
            rendezvous.messages[identifier] = message
            self._waiting.append(record)
            record.waits_in, number_of_messages = rendezvous, len(rendezvous.messages)
            if number_of_messages == len(rendezvous.members):  # All messages are here: wake the master.
                self._deliver(
                    self._records[rendezvous.members[MASTER]],
                    list(zip(rendezvous.members, map(rendezvous.messages.get, rendezvous.members), strict=True)),
                )
            elif self._one_has_ended or len(self._waiting) != number_of_messages:
                # Another replica has ended, or waits in another layer. So the wait of this replica may never end.
                self._break_on_deadlock(record, rendezvous)
            if self._turns is not None:
                self._turns.pass_on(record)
        with NO_SPAN if self.span is None else self.span(f"{rendezvous.name}, waiting"):
            return self._wait(record)

    def answer(self, rendezvous: Rendezvous, answers: dict[Hashable, Any]) -> None:
        """Deliver the answers of the master to all slaves, and thereby complete the exchange."""
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
        """Block until the mailbox of the replica holds an item, and return the value in the item.

        If the forward pass breaks, for example by a timeout, raise the error that broke it. The timeout starts again
        when another replica begins its turn, or when the process continues after it was suspended.
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
        """Break the forward pass if the timeout is over for a wait that began at the time `since`.

        Return the time at which this wait began, or at which its timeout started again.
        """
        with self._lock:
            now = monotonic()
            if now > since + self.timeout + LATE:  # The whole process was suspended, so the timeout starts again.
                return now
            if self._turns is not None and self._turns.since > since:  # Another turn began during this wait.
                return self._turns.since
            if record.mailbox.empty():  # If an item has just arrived, the next `get` returns it.
                self._break_by_timeout(record)
            return now

    # The callers of all methods below hold the lock of the coordinator.

    def _deliver(self, record: Record, value: Any) -> None:
        """Deliver `value` to a replica that waits in a layer: at once, or at its next turn if replicas take turns."""
        if self._turns is None:
            # First of all, put the value into the replica's mailbox: even if Ctrl-C comes next, the replica continues.
            record.mailbox.put((True, value))
        else:
            self._turns.resume(record, value)
        record.waits_in = None
        self._waiting.remove(record)

    def _raise_broken(self, record: Record) -> NoReturn:
        """In the thread of this replica, raise the error that broke the forward pass."""
        record.was_released = True
        raise copy(self._broken)  # type: ignore[misc]

    def _break(self, text: str, kind: type[ReplicaSyncError] = ReplicaSyncError, notes: Sequence[str] = ()) -> None:
        """Break the forward pass: store an error, raise it in all waiting replicas, and end all turns.

        If the forward pass is already broken, the first error stays, and this method only releases the replicas that
        still wait. A second call may be necessary because Ctrl-C interrupted the first one.
        """
        if self._broken is None:
            error = kind(text)
            for note in notes:
                error.add_note(note)
            self._broken = error
            self._end_of_patience = monotonic() + (self.timeout if kind is ReplicaSyncError else PATIENCE)
        ready = {} if self._turns is None else self._turns.ready
        for record in self._records.values():
            if record.waits_in is not None:
                # A module may keep its `SyncMaster` for a long time. Drop the messages of this exchange, so that they
                # do not stay in memory as long.
                record.waits_in.messages = dict.fromkeys(record.waits_in.messages)
            if record.waits_in is not None or record in ready:
                record.mailbox.put((False, None))
                record.was_released = True
                record.waits_in = None
        self._waiting.clear()
        self._turns = None

    def _awaited(self, rendezvous: Rendezvous) -> list[Record]:
        return [self._records[number] for number in rendezvous.awaited()]

    def _break_on_deadlock(self, record: Record, rendezvous: Rendezvous) -> None:
        """Break the forward pass if the wait of this replica can never end.

        A wait can never end if a replica waits for an ended replica, or if replicas wait for each other in a cycle. To
        find a cycle through this replica, search the wait-for graph depth-first, from the replicas for which this
        replica waits.
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
        """Break the forward pass, because this replica got an exception of class `kind`."""
        self._break(
            f"expected all replicas to finish, but got {kind.__name__} in {record}; fix that error, this replica was "
            "stopped as a consequence"
        )

    def _break_by_absence(self, record: Record, rendezvous: Rendezvous) -> None:
        """Break the forward pass, because this replica has ended while other replicas wait for it in a layer."""
        self._break(
            f"expected every replica to call {rendezvous.name} the same number of times, but {record} "
            f"{record.ended} while {format_waiting(self._waiting, rendezvous)} for it ({rendezvous}); make every "
            f"replica call every synchronized layer in every forward pass{remedy_for_loops([rendezvous])}"
        )

    def _break_by_timeout(self, record: Record) -> None:
        """Break the forward pass, because this replica waited for longer than the timeout, in a layer or for its turn.

        The error names the replicas for which this replica waited. If those replicas still run, notes on the error show
        their call stacks.

        If this replica waits for its turn, and another replica waits in a layer, the error describes the other wait,
        which is nearer to the cause.
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
                "; replicas on one device run in turns, and may wait only in an exchange: let your "
                "replicate call super().replicate, and make each SyncMaster in a callback"
            )
        self._break(
            f"expected all replicas within {self.timeout:g} seconds, but {text}; {remedy}",
            ReplicaTimeoutError,
            [peer.stack() for peer in peers if peer.activity(self._turns) == STILL_RUNNING],
        )
