"""The replicas of one forward: who runs, who waits for whom, who left, and when all of it breaks.

This is the only file that blocks, and it knows nothing of tensors. Every wait happens in one place, `Roster._wait`, on
a mailbox that belongs to the waiting replica alone.

NOTE [who may break a meeting]: All state of a forward is guarded by the lock of its roster. A roster breaks at most
once, and whoever finds the reason breaks it, at the moment it becomes true:

1. a replica that fails or is interrupted (`Roster.leave` with an error, `Roster.abort`);
2. a replica that leaves while somebody waits for it (`Roster.leave`), or that starts to wait for somebody who has left;
3. a replica that starts to wait for one that, over any number of others, waits for it (`Roster._find_deadlock`): a
   meeting needs all its members, so any circle of waiting replicas can never be resolved;
4. a replica whose time is up (`Roster._wait`).

Breaking empties `_waiting` and puts one envelope into the mailbox of each replica that was in it. Delivering a result
takes the replica out of `_waiting` under the same lock. So a mailbox never holds more than one envelope, and a replica
that got its result before the break returns it and learns of the break at its next meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from sync_batchnorm.errors import Caught, ReplicaSyncError, ReplicaTimeoutError

__all__: list[str] = []

DEFAULT_TIMEOUT = 300.0
MASTER = 0  # the identifier of every master

MasterCallback = Callable[[list[tuple[Hashable, Any]]], Sequence[tuple[Hashable, Any]]]


class _Meeting:
    """One call of one layer: who has arrived, and with what."""

    __slots__ = ("members", "messages", "name", "number")

    def __init__(self, name: str, number: int, members: dict[Hashable, int]) -> None:
        self.name = name
        self.number = number
        self.members = members
        self.messages: dict[Hashable, Any] = {}

    def __str__(self) -> str:
        return f"{self.name}, call {self.number}"

    def missing(self) -> list[int]:
        """Return the replicas that have not arrived, in order."""
        return [replica for identifier, replica in self.members.items() if identifier not in self.messages]

    def needed(self) -> list[int]:
        """Return the replicas without which the meeting cannot end: those missing, or the master at work."""
        return self.missing() or [self.members[MASTER]]


class Circle:
    """The replicas that exchange through one `SyncMaster` during one forward. The first member is the master."""

    def __init__(self, roster: Roster, name: str, master: int) -> None:
        self.roster = roster
        self.name = name
        self.members: dict[Hashable, int] = {MASTER: master}  # identifier -> replica
        self.calls: dict[Hashable, int] = {MASTER: 0}
        self.history: dict[Hashable, list[Any]] = {MASTER: []}
        self.meetings: dict[int, _Meeting] = {}  # the incomplete ones, by number of the call
        roster.admit(master)

    def add(self, identifier: Hashable, replica_id: int) -> None:
        if identifier in self.members:
            raise ValueError(
                f"expected an identifier that is not registered yet, but got {identifier!r} twice ({self.name}); "
                "register each slave once a forward, and leave 0 to the master"
            )
        self.members[identifier] = replica_id
        self.calls[identifier] = 0
        self.history[identifier] = []
        self.roster.admit(replica_id)


class Roster:
    """The replicas of one forward: who runs, who waits for whom, who left, and whether it broke.

    Args:
        devices: the device of each replica, as text for messages. Replicas that are not listed may be admitted later.
        timeout: seconds after which a wait ends with a `ReplicaTimeoutError`.
    """

    def __init__(self, devices: Sequence[str] = (), timeout: float = DEFAULT_TIMEOUT) -> None:
        self.timeout = timeout
        self._lock = Lock()
        self._devices = dict(enumerate(devices))
        self._mailboxes: dict[int, SimpleQueue[tuple[bool, Any]]] = {
            replica: SimpleQueue() for replica in self._devices
        }
        self._started: set[int] = set()
        self._waiting: dict[int, _Meeting] = {}
        self._left: dict[int, str] = {}
        self._broken: tuple[type[ReplicaSyncError], str] | None = None
        self._failures: list[tuple[bool, int, Caught]] = []

    def __repr__(self) -> str:
        states = ", ".join(f"{replica}: {self._state(replica)}" for replica in self._mailboxes)
        return f"{type(self).__name__}({states or 'nobody'}{'; broken' if self._broken else ''})"

    def admit(self, replica_id: int) -> None:
        """Make room for a replica that was not listed at the start."""
        self._mailboxes.setdefault(replica_id, SimpleQueue())

    def has_left(self, replica_id: int) -> bool:
        """Tell whether the replica has returned from its forward, or failed in it."""
        return replica_id in self._left

    @contextmanager
    def seat(self, replica_id: int) -> Iterator[None]:
        """Run the body as the forward of a replica: peers that wait for it learn at once when it ends, and how."""
        with self._lock:
            self._started.add(replica_id)
            self._left.pop(replica_id, None)
        try:
            yield
        except BaseException as error:
            self.leave(replica_id, error)
            raise
        self.leave(replica_id)

    def leave(self, replica_id: int, error: BaseException | None = None) -> None:
        """Record that a replica is gone, and release everybody who would wait for it in vain."""
        with self._lock:
            if replica_id in self._left:
                return
            self._waiting.pop(replica_id, None)
            if error is None:
                self._left[replica_id] = "returned"
                waiting = next((m for m in self._waiting.values() if replica_id in m.needed()), None)
                if waiting is not None:
                    self._break(ReplicaSyncError, self._left_text(replica_id, waiting))
                return
            self._left[replica_id] = f"failed with {type(error).__name__}"
            secondary = self._broken is not None and isinstance(error, ReplicaSyncError)
            self._failures.append((secondary, replica_id, Caught(error, replica_id, self._device(replica_id))))
            self._break(ReplicaSyncError, self._failed_text(replica_id, error))

    def interrupt(self, replica_id: int, error: BaseException) -> None:
        """Release everybody, because an exception took a replica out of a meeting; its seat will say the rest."""
        with self._lock:
            self._waiting.pop(replica_id, None)
            self._break(ReplicaSyncError, self._failed_text(replica_id, error))

    def abort(self, error: BaseException) -> None:
        """Release everybody, because the thread that started the replicas no longer waits for them."""
        with self._lock:
            self._break(
                ReplicaSyncError,
                f"expected the caller to wait for all replicas, but got {type(error).__name__} in its thread; "
                "this replica was only released",
            )

    def failure(self) -> Caught | None:
        """Return the failure to show, and forget all: originals before those they caused, then the lowest replica."""
        shown = min(self._failures, key=lambda item: item[:2])[2] if self._failures else None
        self._failures.clear()
        return shown

    def meet(self, circle: Circle, identifier: Hashable, message: Any, callback: MasterCallback | None) -> Any:
        """Exchange `message` with the other members of `circle`; block until the result is there.

        The master passes the `callback`, which runs in its thread once everybody has arrived.
        """
        replica_id = circle.members[identifier]
        with self._lock:
            self._raise_if_broken()
            circle.calls[identifier] += 1
            number = circle.calls[identifier]
            meeting = circle.meetings.get(number)
            if meeting is None:
                meeting = circle.meetings[number] = _Meeting(circle.name, number, circle.members)
            meeting.messages[identifier] = message
            complete = len(meeting.messages) == len(circle.members)
            if complete:
                del circle.meetings[number]
                if callback is None:
                    self._deliver(circle.members[MASTER], None)
            if callback is None or not complete:
                self._waiting[replica_id] = meeting
                if not complete:
                    self._find_deadlock(replica_id, meeting)
        if callback is None:
            return self._wait(replica_id)
        if not complete:
            self._wait(replica_id)
        messages = [(member, meeting.messages[member]) for member in circle.members]
        results = dict(callback(messages))
        if results.keys() != circle.members.keys():
            raise RuntimeError(
                f"expected the master callback to return one result for each of {list(circle.members)}, "
                f"but got results for {list(results)} ({meeting}); return a list of (identifier, result)"
            )
        with self._lock:
            self._raise_if_broken()
            for member, replica in circle.members.items():
                if member != identifier:
                    self._deliver(replica, results[member])
        return results[identifier]

    def _wait(self, replica_id: int) -> Any:
        mailbox = self._mailboxes[replica_id]
        try:
            delivered, value = mailbox.get(timeout=self.timeout)
        except Empty:
            with self._lock:
                # Something may have been put in between the end of the wait and the lock.
                if replica_id in self._waiting:
                    self._break(ReplicaTimeoutError, self._timeout_text(self._waiting[replica_id]))
            delivered, value = mailbox.get()
        if not delivered:
            error_type, text = value
            raise error_type(text)
        return value

    # The lock is held by the caller of everything below.

    def _deliver(self, replica_id: int, value: Any) -> None:
        del self._waiting[replica_id]
        self._mailboxes[replica_id].put((True, value))

    def _break(self, error_type: type[ReplicaSyncError], text: str) -> None:
        if self._broken is not None:
            return
        self._broken = (error_type, text)
        for replica_id in self._waiting:
            self._mailboxes[replica_id].put((False, self._broken))
        self._waiting.clear()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            error_type, text = self._broken
            raise error_type(text)

    def _find_deadlock(self, replica_id: int, meeting: _Meeting) -> None:
        """Break if `replica_id`, which begins to wait in `meeting`, does so in vain."""
        if not self._left and len(self._waiting) == len(meeting.messages):
            return  # Nobody has left, and all who wait are in this meeting.
        seen: set[int] = set()
        ahead = meeting.missing()
        while ahead:
            peer = ahead.pop()
            if peer in self._left:
                return self._break(ReplicaSyncError, self._left_text(peer, meeting))
            if peer == replica_id:
                return self._break(ReplicaSyncError, self._circle_text())
            if peer in self._waiting and peer not in seen:
                seen.add(peer)
                ahead += self._waiting[peer].missing()

    # What the messages say.

    def _device(self, replica_id: int) -> str:
        return self._devices.get(replica_id, "unknown")

    def _who(self, replica_id: int) -> str:
        device = self._devices.get(replica_id)
        return f"replica {replica_id} on device {device}" if device else f"replica {replica_id}"

    def _state(self, replica_id: int) -> str:
        if replica_id in self._left:
            return self._left[replica_id]
        if replica_id in self._waiting:
            return f"waits in {self._waiting[replica_id]}"
        return "is running" if replica_id in self._started else "has not started"

    def _join(self, meeting: _Meeting) -> str:
        return " and ".join(self._who(replica) for replica, other in sorted(self._waiting.items()) if other is meeting)

    def _failed_text(self, replica_id: int, error: BaseException) -> str:
        return (
            f"expected all replicas to finish, but got {type(error).__name__} in {self._who(replica_id)}; "
            "mend that error, this replica was only released"
        )

    def _left_text(self, replica_id: int, meeting: _Meeting) -> str:
        return (
            f"expected every replica to call {meeting.name} equally often, but got {self._who(replica_id)} "
            f"leaving its forward while {self._join(meeting)} waits ({meeting}); "
            "make every replica call every synchronized layer in every forward"
        )

    def _circle_text(self) -> str:
        places = ", ".join(f"{self._who(replica)} in {meeting}" for replica, meeting in sorted(self._waiting.items()))
        return (
            f"expected all replicas to reach the same layer, but got {places}; "
            "make every replica call the synchronized layers in the same order"
        )

    def _timeout_text(self, meeting: _Meeting) -> str:
        late = ", ".join(f"{self._who(replica)}, which {self._state(replica)}" for replica in meeting.needed())
        return (
            f"expected all replicas within {self.timeout:g} seconds, but got only {self._join(meeting)} and not {late} "
            f"({meeting}); pass a longer timeout if it is only slow, and run replicas in threads of their own: one "
            "after another in one thread they can never meet"
        )
