"""The replicas of one forward: which run, wait for which others, or have ended, and what breaks the forward.

This file knows nothing of tensors. Replicas wait in `Coordinator._wait` only, each on a mailbox of its own.

NOTE [who may break a forward]: The lock of a coordinator guards all state of its forward. A coordinator breaks at most
once, at once, in the thread in which one of these conditions becomes true:

1. a replica fails or is interrupted (`leave` with an error, `interrupt`), or the caller no longer waits (`abort`);
2. a replica ends while another waits for it (`leave`), or a replica starts to wait for one that has ended;
3. a replica starts to wait for one that waits for it, directly or through others (`_find_deadlock`): a call needs all
   members of its rendezvous, so a cycle in the wait-for graph can never be resolved;
4. the wait of a replica reaches the timeout (`_wait`).

Whoever puts an item, ``(delivered, value)``, into the mailbox of a replica takes that replica out of `_waiting`, so no
mailbox holds more than one. A replica that got its answer before the break returns it, and all replicas get the error
in their next call at the latest. A broken coordinator stays broken: the next forward makes its own.

NOTE [turns]: Replicas that share a device run one at a time, so that no result depends on the order of their threads:
the lowest that can run, until it waits or ends. A replica can run if there is an item for its mailbox (`_pending`),
which is put there when its turn begins.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from math import inf
from queue import Empty, SimpleQueue
from sys import _current_frames
from threading import Lock, get_ident
from time import monotonic, sleep
from traceback import format_stack
from typing import Any, NoReturn

from .errors import ReplicaSyncError, ReplicaTimeoutError

__all__: list[str] = []

DEFAULT_TIMEOUT = 300.0
# How many seconds a caller that was interrupted, or whose replicas reached the timeout, waits for those that still run:
# exiting while a replica is inside a torch operation aborts the process.
PATIENCE = 1.0
LATE = 1.0  # seconds by which no wait is late unless the process was suspended
MASTER = 0  # the identifier of every master

Item = tuple[bool, Any]
Messages = list[tuple[Hashable, Any]]  # by identifier
Mailbox = SimpleQueue[Item]
MasterCallback = Callable[[Messages], Sequence[tuple[Hashable, Any]]]

RUNS = "is still running"
NO_SPAN: AbstractContextManager[Any] = nullcontext()


class Rendezvous:
    """Where the replicas of one forward meet in one layer: its members, and what they have sent in the present call."""

    def __init__(self, name: str, master: int) -> None:
        self.name = name
        self.members: dict[Hashable, int] = {MASTER: master}  # identifier -> replica
        self.messages: dict[Hashable, Any] = {}
        self.call = 1

    def __str__(self) -> str:
        return f"{self.name}, call {self.call}"

    def admit(self, identifier: Hashable, replica_id: int) -> None:
        """Make a replica a member, under the name `identifier`."""
        if identifier in self.members:
            raise ValueError(
                f"expected an identifier that is not registered yet, but got {identifier!r} twice ({self.name}); "
                "register each slave once per forward pass; 0 is reserved for the master"
            )
        self.members[identifier] = replica_id

    def awaited(self) -> list[int]:
        """Return the replicas that the present call waits for: those that are missing, or the master that merges."""
        missing = [replica for identifier, replica in self.members.items() if identifier not in self.messages]
        return missing or [self.members[MASTER]]


class Coordinator:
    """The replicas of one forward, and how they meet.

    Args:
        devices: the device of each replica, for messages. Replicas that are not listed may exchange too.
        timeout: seconds after which a wait ends with a `ReplicaTimeoutError`.
        span: returns the context of a run, wait or merge for its name, as a profile shows it.
    """

    def __init__(
        self,
        devices: Sequence[str] = (),
        timeout: float = DEFAULT_TIMEOUT,
        span: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.timeout = timeout
        self.span = span
        self._lock = Lock()
        self._devices = dict(enumerate(devices))
        self._mailboxes: dict[int, Mailbox] = defaultdict(SimpleQueue)
        self._running: dict[int, int] = {}  # the replicas that run, with the threads in which they do
        self._waiting: dict[int, Rendezvous] = {}
        self._begin_turn: Callable[[int], None] | None = None  # None if replicas run at once; see NOTE [turns]
        self._pending: dict[int, Item] = {}  # the replicas that can run, with what they will get
        self._runs: int | None = None  # whose turn it is
        self._turn_since = -inf
        self._left: dict[int, str] = {}  # how each replica that has ended did so
        self._broken: ReplicaSyncError | None = None  # what all replicas get a copy of
        self._end_of_patience = inf
        self._released: set[int] = set()  # the replicas that got the error of the break
        self._failures: dict[int, BaseException] = {}

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended."""
        return bool(self._devices) and len(self._left) == len(self._devices)

    @property
    def has_given_up(self) -> bool:
        """Whether a replica runs on longer than it may after the break: it is stuck."""
        return monotonic() > self._end_of_patience

    def who(self, replica_id: int) -> str:
        """Return the name of a replica in messages."""
        device = self._devices.get(replica_id)
        return f"replica {replica_id} on device {device}" if device else f"replica {replica_id}"

    # How a forward begins and ends.

    def expect(self, replica_ids: Collection[int]) -> None:
        """Record, before any of them runs, that these replicas and no others will be called."""
        for replica_id in self._devices:
            if replica_id not in replica_ids:
                self._left[replica_id] = "was given no input"

    def take_turns(self, replica_ids: Collection[int], begin: Callable[[int], None]) -> None:
        """Let replicas run one at a time, until the forward pass ends or breaks; see NOTE [turns].

        Each calls `begin` with its number when its turn has begun.
        """
        with self._lock:
            if self._broken is None:
                self._begin_turn, self._pending = begin, dict.fromkeys(replica_ids, (True, None))
                self._end_turn(None)

    def begin(self, replica_id: int) -> AbstractContextManager[Any]:
        """Record that a replica runs, which it may once, and wait for its turn; return the span of its run."""
        with self._lock:
            if replica_id in self._left and self._broken is not None:
                self._raise_broken(replica_id)
            if replica_id in self._running or replica_id in self._left:
                raise RuntimeError(
                    f"expected each replica to run once, but {self.who(replica_id)} was called twice; call replicate "
                    "again for each forward pass"
                )
            self._running[replica_id] = get_ident()
            # The break that ends the turns leaves an item for those that have not begun. A mailbox is made under this
            # lock: two threads that make one at once may each get its own.
            takes_turns = not self._mailboxes[replica_id].empty() or self._begin_turn is not None
        if takes_turns:
            _taking_turns.set((self, replica_id))
            self._wait(replica_id)
        return NO_SPAN if self.span is None else self.span(self.who(replica_id))

    def leave(self, replica_id: int, failure: BaseException | None = None) -> None:
        """Record that a replica has ended, and release all replicas if one would wait for it in vain.

        The first `failure` counts; it is None if the replica returned. That is an error if it was released from a call,
        since it has caught the error of that.
        """
        with self._lock:
            if replica_id in self._failures:
                return
            self._running.pop(replica_id, None)
            self._left[replica_id] = "left its forward"
            if failure is not None:
                self._failures[replica_id] = failure
                return self._break_by(replica_id, type(failure))
            self._end_turn(replica_id)
            if replica_id in self._released:
                raise type(self._broken)(  # type: ignore[misc]
                    "expected every ReplicaSyncError to leave forward(), but a replica caught one and carried on; put "
                    f"the try around the call of the wrapper. The error that it caught: {self._broken}"
                )
            for rendezvous in self._waiting.values():
                if replica_id in rendezvous.awaited():
                    return self._break_by_absence(replica_id, rendezvous)

    def interrupt(self, replica_id: int, error: BaseException) -> None:
        """Release all replicas, because an exception took one of them out of a rendezvous; `leave` records the rest."""
        with self._lock:
            self._break_by(replica_id, type(error))

    def abort(self, error: BaseException, seconds: float) -> None:
        """Release all replicas, because their caller no longer waits; give them `seconds` to notice that."""
        with self._lock:
            for replica_id in self._devices:
                if replica_id not in self._running:
                    self._left.setdefault(replica_id, "was not called")
            self._break(
                f"expected the caller to wait for all replicas, but got {type(error).__name__} in its thread; "
                "this replica was stopped as a consequence"
            )
        deadline = monotonic() + seconds
        while self._running and monotonic() < deadline:
            sleep(0.01)

    def failure(self) -> tuple[str, BaseException] | None:
        """Return who failed first, as far as that is known, and the error, or None; forget all failures."""
        with self._lock:
            failures, self._failures = self._failures, {}
            if not failures and self.has_given_up:  # The replicas that were released are still on their way out.
                failures = {replica_id: copy(self._broken) for replica_id in self._released}  # type: ignore[misc]

        def rank(replica_id: int) -> tuple[bool, bool, int]:
            return replica_id in self._released, isinstance(failures[replica_id], ReplicaSyncError), replica_id

        first = min(failures, key=rank, default=None)
        return None if first is None else (self.who(first), failures[first])

    # One call of a layer.

    def send(self, rendezvous: Rendezvous, identifier: Hashable, message: Any) -> Any:
        """Send the message of a member; block until there is an answer, which for the master is all messages."""
        members, replica_id = rendezvous.members, rendezvous.members[identifier]
        with self._lock:
            messages = rendezvous.messages
            if self._broken is not None:
                self._raise_broken(replica_id)
            is_busy = replica_id in self._waiting or identifier in messages
            has_answer = not self._mailboxes[replica_id].empty() or replica_id in self._pending
            if is_busy or has_answer:  # which another thread has not taken yet
                raise RuntimeError(
                    f"expected one thread of a replica to exchange at a time, but got {self.who(replica_id)} calling "
                    f"{rendezvous.name} while it waits in {self._waiting.get(replica_id, rendezvous)}; call "
                    "synchronized layers from one thread of each replica"
                )
            messages[identifier] = message
            self._waiting[replica_id] = rendezvous
            if len(messages) == len(members):
                # After Ctrl-C in a comprehension here, the lock would stay held (Python 3.12 and 3.13).
                self._deliver(members[MASTER], list(zip(members, map(messages.get, members), strict=True)))
            else:
                self._find_deadlock(replica_id, rendezvous)
            self._end_turn(replica_id)
        with NO_SPAN if self.span is None else self.span(f"{rendezvous.name}, waiting"):
            turn = _taking_turns.get()
            if turn is None or turn[0] is self:
                return self._wait(replica_id)
            with turn[0]._pause(turn[1]):  # for pipes that do not belong to the forward pass of the wrapper
                return self._wait(replica_id)

    def answer(self, rendezvous: Rendezvous, answers: dict[Hashable, Any]) -> None:
        """Deliver the answers of the master to the slaves, which ends the call."""
        with self._lock:
            if self._broken is not None:
                self._raise_broken(rendezvous.members[MASTER])
            rendezvous.messages = {}
            rendezvous.call += 1
            for member, replica_id in rendezvous.members.items():
                if member != MASTER:
                    self._deliver(replica_id, answers[member])

    @contextmanager
    def _pause(self, replica_id: int) -> Iterator[None]:
        """Let others have their turns inside the block."""
        with self._lock:
            self._end_turn(replica_id)
        try:
            yield
        finally:
            with self._lock:
                takes_turns = self._begin_turn is not None
                if takes_turns:
                    self._pending[replica_id] = (True, None)
                    self._end_turn(None)
            if takes_turns:
                self._wait(replica_id)

    def _wait(self, replica_id: int) -> Any:
        mailbox, since = self._mailboxes[replica_id], monotonic()
        while True:
            try:
                delivered, value = mailbox.get(timeout=max(0.0, since + self.timeout - monotonic()))
                break
            except Empty:
                since = self._waited(replica_id, since)
        if not delivered:
            raise copy(self._broken)  # type: ignore[misc]
        if (begin_turn := self._begin_turn) is not None:
            begin_turn(replica_id)
        return value

    def _waited(self, replica_id: int, since: float) -> float:
        """Break if the wait of a replica `since` a time has lasted too long; return since when it waits now."""
        with self._lock:
            now = monotonic()
            if now > since + self.timeout + LATE:  # This process was suspended, and all replicas with it.
                return now
            if self._turn_since > since:  # Another replica runs than did at that time.
                return self._turn_since
            if self._mailboxes[replica_id].empty():  # Otherwise an item was put just now.
                self._break_by_timeout(replica_id)
            return now

    # All methods below are called with the lock held.

    def _deliver(self, replica_id: int, value: Any) -> None:
        if self._begin_turn is None:
            self._mailboxes[replica_id].put((True, value))  # first, so that Ctrl-C in between loses no release
        else:
            self._pending[replica_id] = (True, value)
            self._end_turn(None)
        del self._waiting[replica_id]

    def _end_turn(self, replica_id: int | None) -> None:
        """End the turn of a replica, if it has one; None if no replica has. The lowest that can run has the next."""
        if replica_id == self._runs and self._begin_turn is not None:
            self._turn_since = monotonic()
            self._runs = min(self._pending, default=None)
            if self._runs is not None:
                self._mailboxes[self._runs].put(self._pending.pop(self._runs))

    def _raise_broken(self, replica_id: int) -> NoReturn:
        self._released.add(replica_id)
        raise copy(self._broken)  # type: ignore[misc]

    def _break(self, text: str, kind: type[ReplicaSyncError] = ReplicaSyncError, notes: Sequence[str] = ()) -> None:
        # Ctrl-C may interrupt this method: then the next break releases the remaining replicas.
        if self._broken is None:
            error = kind(text)
            for note in notes:
                error.add_note(note)
            self._broken = error
            self._end_of_patience = monotonic() + (self.timeout if kind is ReplicaSyncError else PATIENCE)
        for rendezvous in self._waiting.values():
            rendezvous.messages = dict.fromkeys(rendezvous.messages)  # A kept `SyncMaster` would keep them too.
        self._begin_turn = self._runs = None
        for waits in (self._waiting, self._pending):
            for replica_id in list(waits):
                self._mailboxes[replica_id].put((False, None))
                self._released.add(replica_id)
                del waits[replica_id]

    def _find_deadlock(self, replica_id: int, rendezvous: Rendezvous) -> None:
        """Break if the wait that `replica_id` begins can never end."""
        if not self._left and len(self._waiting) == len(rendezvous.messages):
            return  # No replica has ended, and all that wait are here.
        todo = rendezvous.awaited()
        for peer in todo:
            if peer in self._left:
                return self._break_by_absence(peer, rendezvous)
        seen: set[int] = set()
        while todo:
            peer = todo.pop()
            if peer == replica_id:
                places = ", ".join(f"{self.who(one)} in {self._waiting[one]}" for one in sorted(self._waiting))
                return self._break(
                    f"expected all replicas to reach the same layer, but got {places}; make every replica call the "
                    "synchronized layers in the same order"
                )
            if peer in self._waiting and peer not in seen:
                seen.add(peer)
                todo += self._waiting[peer].awaited()

    def _break_by(self, replica_id: int, kind: type[BaseException]) -> None:
        self._break(
            f"expected all replicas to finish, but got {kind.__name__} in {self.who(replica_id)}; fix that error, this "
            "replica was stopped as a consequence"
        )

    def _break_by_absence(self, replica_id: int, rendezvous: Rendezvous) -> None:
        self._break(
            f"expected every replica to call {rendezvous.name} the same number of times, but {self.who(replica_id)} "
            f"{self._left[replica_id]} while {self._wait_text(rendezvous)} for it ({rendezvous}); make every replica "
            "call every synchronized layer in every forward pass"
        )

    def _break_by_timeout(self, replica_id: int) -> None:
        remedy = "pass a longer timeout= if it is only slow"
        rendezvous = self._waiting.get(replica_id) or next(iter(self._waiting.values()), None)
        if rendezvous is not None:
            peers = rendezvous.awaited()
            late = " and ".join(f"{self.who(peer)}, which {self._state(peer)}" for peer in peers)
            text = f"{self._wait_text(rendezvous)} for {late} ({rendezvous})"
            if any(peer not in self._running for peer in peers):
                remedy += ", and run each replica in its own thread: one after another in one thread, they deadlock"
        else:
            peers = [] if self._runs is None else [self._runs]
            late = " and ".join(f"{self.who(peer)} {self._state(peer)}" for peer in peers)
            text = f"{self.who(replica_id)} waits for its turn while {late}"
            remedy += "; replicas on one device run one at a time, and may wait for each other only in an exchange"
        self._break(
            f"expected all replicas within {self.timeout:g} seconds, but {text}; {remedy}",
            ReplicaTimeoutError,
            [self._stack(peer) for peer in peers if self._state(peer) == RUNS],
        )

    def _stack(self, replica_id: int) -> str:
        frame = _current_frames().get(self._running[replica_id])
        return f"Stack of {self.who(replica_id)} at the timeout:\n{''.join(format_stack(frame)).rstrip()}"

    def _state(self, replica_id: int) -> str:
        if replica_id in self._left:
            return self._left[replica_id]
        if replica_id in self._waiting:
            return f"waits in {self._waiting[replica_id]}"
        if replica_id not in self._running:
            return "has not started"
        return "waits for its turn" if replica_id in self._pending else RUNS

    def _wait_text(self, rendezvous: Rendezvous) -> str:
        waiting = sorted(replica for replica, other in self._waiting.items() if other is rendezvous)
        return f"{' and '.join(map(self.who, waiting))} {'wait' if len(waiting) > 1 else 'waits'}"


# The forward pass and the replica whose turns this thread takes.
_taking_turns: ContextVar[tuple[Coordinator, int] | None] = ContextVar("sync_batchnorm_turn", default=None)
