"""The replicas of one forward: which run, wait for which others, or have ended, and what breaks the forward.

This is the only file that blocks, and it knows nothing of tensors. Replicas wait in one method only,
`Coordinator._wait`, each on a mailbox of its own.

NOTE [who may break an exchange]: The lock of a coordinator guards all state of its forward. A coordinator breaks at
most once. The thread in which one of these conditions becomes true breaks it at once:

1. a replica fails or is interrupted (`leave` with an error, `interrupt`), or the caller no longer waits for the
   replicas (`abort`);
2. a replica ends while another waits for it (`leave`), or a replica starts to wait for one that has ended;
3. a replica starts to wait for one that waits for it, directly or through others (`_find_deadlock`): an exchange needs
   all its members, so a cycle in the wait-for graph can never be resolved;
4. the wait of a replica reaches the timeout (`Coordinator._wait`).

Breaking empties `_waiting` and puts one item, ``(delivered, value)``, into the mailbox of each replica that was in it.
Delivering a result removes the replica from `_waiting` under the same lock. So until a break, a mailbox never holds
more than one item. A replica that got its result before the break returns it, and all replicas get the error in their
next exchange at the latest. A broken coordinator stays broken: the next forward makes its own.

NOTE [rounds]: A user may call `replicate` once, and then run the replicas several times, in rounds. A replica in its
second round may wait for a peer that has ended its first round, and not begun its second. So an ended replica counts as
gone only for replicas that have begun no more rounds than it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from threading import Lock
from time import monotonic
from typing import Any

from sync_batchnorm import errors
from sync_batchnorm.errors import CapturedError, ReplicaSyncError, ReplicaTimeoutError

__all__: list[str] = []

DEFAULT_TIMEOUT = 300.0
MASTER = 0  # the identifier of every master

MasterCallback = Callable[[list[tuple[Hashable, Any]]], Sequence[tuple[Hashable, Any]]]

_NO_SPAN: AbstractContextManager[Any] = nullcontext()


def no_span(name: str) -> AbstractContextManager[Any]:
    """Return a context that does nothing."""
    return _NO_SPAN


class Exchange:
    """One call of one layer: which replicas have called, and their messages."""

    __slots__ = ("members", "messages", "name", "number")

    def __init__(self, name: str, number: int, members: dict[Hashable, int]) -> None:
        self.name = name
        self.number = number
        self.members = members
        self.messages: dict[Hashable, Any] = {}

    def __str__(self) -> str:
        return f"{self.name}, call {self.number}"

    def needed(self) -> list[int]:
        """Return the replicas that the exchange waits for: those that have not called, or the master that merges."""
        missing = [replica for identifier, replica in self.members.items() if identifier not in self.messages]
        return missing or [self.members[MASTER]]


class SyncGroup:
    """The replicas that exchange through one `SyncMaster` during one forward. The first member is the master."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[Hashable, int] = {}  # identifier -> replica
        self.calls: dict[Hashable, int] = {}
        self.exchanges: dict[int, Exchange] = {}  # the incomplete ones, by number of the call

    @property
    def is_used(self) -> bool:
        """Whether a member has called."""
        return any(self.calls.values())

    def add(self, identifier: Hashable, replica_id: int) -> None:
        """Make `replica_id` a member, under the name `identifier`."""
        if identifier in self.members:
            raise ValueError(
                f"expected an identifier that is not registered yet, but got {identifier!r} twice ({self.name}); "
                "register each slave once a forward, and leave 0 to the master"
            )
        self.members[identifier] = replica_id
        self.calls[identifier] = 0


class Coordinator:
    """The replicas of one forward: which run, wait for which others, or have ended, and whether the forward broke.

    Args:
        devices: the device of each replica, as text for messages. Replicas that are not listed may be admitted later.
        timeout: seconds after which a wait ends with a `ReplicaTimeoutError`.
        span: returns the context of a forward, wait or merge for its name, as a profile shows it.
    """

    def __init__(
        self,
        devices: Sequence[str] = (),
        timeout: float = DEFAULT_TIMEOUT,
        span: Callable[[str], AbstractContextManager[Any]] = no_span,
    ) -> None:
        self.timeout = timeout
        self._span = span
        self._lock = Lock()
        self._devices = dict(enumerate(devices))
        self._mailboxes: dict[int, SimpleQueue[tuple[bool, Any]]] = {
            replica: SimpleQueue() for replica in self._devices
        }
        self._rounds: dict[int, int] = {}  # how many each replica has begun, see NOTE [rounds]
        self._inside: set[int] = set()
        self._waiting: dict[int, Exchange] = {}
        self._left: dict[int, str] = {}
        self._broken: tuple[type[ReplicaSyncError], str] | None = None
        self._swallowed = True  # whether no caller got an error yet: replicas may have caught the break
        self._departures: SimpleQueue[int] = SimpleQueue()  # the replicas that ended after the break
        self._failures: list[tuple[bool, int, CapturedError]] = []

    def __repr__(self) -> str:
        states = ", ".join(f"{replica} {self._state(replica)}" for replica in self._mailboxes)
        return f"{type(self).__name__}({states or 'no replicas'}{'; broken' if self._broken else ''})"

    def who(self, replica_id: int) -> str:
        """Return the name of a replica in messages."""
        device = self._devices.get(replica_id)
        return f"replica {replica_id} on device {device}" if device else f"replica {replica_id}"

    def admit(self, sync_group: SyncGroup, identifier: Hashable, replica_id: int) -> None:
        """Make a replica, which may be one that is not listed, a member of `sync_group` under the name `identifier`."""
        with self._lock:
            sync_group.add(identifier, replica_id)
            self._mailboxes.setdefault(replica_id, SimpleQueue())

    def call(self, replica_ids: Collection[int]) -> None:
        """Record that these replicas, and no others, are about to be called."""
        with self._lock:
            for replica_id in self._mailboxes:
                if replica_id not in replica_ids and replica_id not in self._inside:
                    self._rounds[replica_id] = self._rounds.get(replica_id, 0) + 1
                    self._left[replica_id] = "was given no input"

    @contextmanager
    def forward_of(self, replica_id: int) -> Iterator[None]:
        """Run the body as the forward of a replica: when it ends, peers that wait for the replica are released at once.

        If a replica calls itself in its forward, only the end of the outermost call counts.
        """
        with self._lock:
            outermost = replica_id not in self._inside
            if outermost:
                self._inside.add(replica_id)
                self._rounds[replica_id] = self._rounds.get(replica_id, 0) + 1
                self._left.pop(replica_id, None)
        try:
            with self._span(self.who(replica_id)):
                yield
        except BaseException as error:
            if outermost:
                self.leave(replica_id, error)
            raise
        if outermost:
            self.leave(replica_id)

    def leave(self, replica_id: int, error: BaseException | None = None) -> None:
        """Record that a replica has ended, and release all replicas if one would wait for it in vain."""
        # Made without the lock held, since it reads source files, and may run code of the user.
        caught = None if error is None else CapturedError(error, replica_id, self._devices.get(replica_id, "unknown"))
        with self._lock:
            self._inside.discard(replica_id)
            if self._broken is not None:
                self._departures.put(replica_id)
            if error is not None and caught is not None:
                self._left[replica_id] = f"failed with {type(error).__name__}"
                self._failures.append((self._caused(error), replica_id, caught))
                self._break(ReplicaSyncError, errors.failed_text(self.who(replica_id), error))
                return
            self._left[replica_id] = "left its forward"
            for waiting, exchange in self._waiting.items():
                if replica_id in exchange.needed() and self._is_gone(replica_id, waiting):
                    return self._break(ReplicaSyncError, self._left_text(replica_id, exchange))

    def interrupt(self, replica_id: int, error: BaseException) -> None:
        """Release all replicas, because an exception took one of them out of an exchange.

        `leave` records the rest when the forward of that replica ends.
        """
        with self._lock:
            self._break(ReplicaSyncError, errors.failed_text(self.who(replica_id), error))

    def abort(self, error: BaseException) -> None:
        """Release all replicas, because the thread that started them no longer waits for them."""
        with self._lock:
            self._swallowed = False
            self._break(ReplicaSyncError, errors.aborted_text(error))

    def drain(self, seconds: float) -> None:
        """Wait up to `seconds` for the running replicas to notice that they were released; then abandon them."""
        deadline = monotonic() + seconds
        with suppress(Empty):
            while self._inside:
                self._departures.get(timeout=max(0.0, deadline - monotonic()))

    def raise_if_swallowed(self) -> None:
        """Raise the error that broke this coordinator, if replicas have caught it and returned.

        Raises:
            ReplicaSyncError: if they have.
        """
        with self._lock:
            if self._broken is None or not self._swallowed:
                return
            self._swallowed = False
            error_type, text = self._broken
        raise error_type(errors.swallowed_text(text))

    def has_caused(self, error: BaseException) -> bool:
        """Return whether `error` is the error of the break, or was raised while that one was handled."""
        with self._lock:
            return self._caused(error)

    def failure(self) -> CapturedError | None:
        """Return the failure to raise, or None, and forget all failures.

        An original failure comes before those that it has caused, and then that of the lowest replica comes first.
        """
        with self._lock:
            shown = min(self._failures, key=lambda item: item[:2])[2] if self._failures else None
            self._failures.clear()
        return shown

    def exchange(
        self, sync_group: SyncGroup, identifier: Hashable, message: Any, callback: MasterCallback | None
    ) -> Any:
        """Exchange `message` with the other members of `sync_group`; block until the result is there.

        The master passes the `callback`, which runs in its thread once all members have called.
        """
        replica_id = sync_group.members[identifier]
        with self._span(f"{sync_group.name}, waiting"):
            with self._lock:
                exchange = self._arrive(sync_group, identifier, message)
                complete = len(exchange.messages) == len(sync_group.members)
                if complete:
                    del sync_group.exchanges[exchange.number]
                    if callback is None:
                        self._deliver(sync_group.members[MASTER], None)
                if callback is None or not complete:
                    self._waiting[replica_id] = exchange
                    if not complete:
                        self._find_deadlock(replica_id, exchange)
            if callback is None:
                return self._wait(replica_id)
            if not complete:
                self._wait(replica_id)
        messages = [(member, exchange.messages[member]) for member in sync_group.members]
        try:
            with self._span(f"{sync_group.name}, merging"):
                results = dict(callback(messages))
        except Exception as error:
            errors.add_note(error, f"Raised in the exchange of {exchange}.")
            raise
        if results.keys() != sync_group.members.keys():
            raise RuntimeError(
                f"expected the master callback to return one result for each of {list(sync_group.members)}, "
                f"but got results for {list(results)} ({exchange}); return a list of (identifier, result)"
            )
        with self._lock:
            self._raise_if_broken()
            for member, replica in sync_group.members.items():
                if member != identifier:
                    self._deliver(replica, results[member])
        return results[identifier]

    def _wait(self, replica_id: int) -> Any:
        mailbox = self._mailboxes[replica_id]
        try:
            delivered, value = mailbox.get(timeout=self.timeout)
        except Empty:
            with self._lock:
                # An item may have been put after the wait ended and before the lock was taken.
                if replica_id in self._waiting:
                    self._break(ReplicaTimeoutError, self._timeout_text(self._waiting[replica_id]))
            delivered, value = mailbox.get()
        if not delivered:
            error_type, text = value
            raise error_type(text)
        return value

    # All methods below are called with the lock held.

    def _arrive(self, sync_group: SyncGroup, identifier: Hashable, message: Any) -> Exchange:
        self._raise_if_broken()
        replica_id = sync_group.members[identifier]
        if replica_id in self._waiting:
            text = errors.second_thread_text(self.who(replica_id), str(self._waiting[replica_id]), sync_group.name)
            raise RuntimeError(text)
        number = sync_group.calls[identifier] = sync_group.calls[identifier] + 1
        exchange = sync_group.exchanges.get(number)
        if exchange is None:
            exchange = sync_group.exchanges[number] = Exchange(sync_group.name, number, sync_group.members)
        exchange.messages[identifier] = message
        return exchange

    def _deliver(self, replica_id: int, value: Any) -> None:
        del self._waiting[replica_id]
        self._mailboxes[replica_id].put((True, value))

    def _break(self, error_type: type[ReplicaSyncError], text: str) -> None:
        # Ctrl-C may interrupt this method: then the next break releases the remaining replicas.
        if self._broken is None:
            self._broken = (error_type, text)
        for replica_id in list(self._waiting):
            self._mailboxes[replica_id].put((False, self._broken))
            del self._waiting[replica_id]

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            error_type, text = self._broken
            raise error_type(text)

    def _caused(self, error: BaseException) -> bool:
        return self._broken is not None and errors.is_caused_by(error, self._broken[1])

    def _is_gone(self, peer: int, replica_id: int) -> bool:
        """Return whether `peer` has ended and will not call where `replica_id` waits, see NOTE [rounds]."""
        return peer in self._left and self._rounds.get(peer, 0) >= self._rounds.get(replica_id, 0)

    def _find_deadlock(self, replica_id: int, exchange: Exchange) -> None:
        """Break if the wait that `replica_id` begins in `exchange` can never end."""
        if not self._left and len(self._waiting) == len(exchange.messages):
            return  # No replica has ended, and all that wait are in this exchange.
        seen: set[int] = set()
        todo = exchange.needed()
        gone = next((peer for peer in todo if self._is_gone(peer, replica_id)), None)
        if gone is not None:
            return self._break(ReplicaSyncError, self._left_text(gone, exchange))
        while todo:
            peer = todo.pop()
            if peer == replica_id:
                return self._break(ReplicaSyncError, errors.deadlock_text(self._places(self._waiting)))
            if peer in self._waiting and peer not in seen:
                seen.add(peer)
                todo += self._waiting[peer].needed()

    # The texts of the messages.

    def _state(self, replica_id: int) -> str:
        if replica_id in self._left:
            return self._left[replica_id]
        if replica_id in self._waiting:
            return f"waits in {self._waiting[replica_id]}"
        return "is running" if replica_id in self._rounds else "has not started"

    def _places(self, replica_ids: Collection[int]) -> str:
        return ", ".join(f"{self.who(replica)} in {self._waiting[replica]}" for replica in sorted(replica_ids))

    def _wait_text(self, exchange: Exchange) -> str:
        waiting = sorted(replica for replica, other in self._waiting.items() if other is exchange)
        return f"{' and '.join(map(self.who, waiting))} {'wait' if len(waiting) > 1 else 'waits'}"

    def _left_text(self, replica_id: int, exchange: Exchange) -> str:
        who, how = self.who(replica_id), self._left[replica_id]
        return errors.left_text(exchange.name, who, how, self._wait_text(exchange), str(exchange))

    def _timeout_text(self, exchange: Exchange) -> str:
        late = " and ".join(f"{self.who(replica)}, which {self._state(replica)}" for replica in exchange.needed())
        return errors.timeout_text(self.timeout, self._wait_text(exchange), late, str(exchange))
