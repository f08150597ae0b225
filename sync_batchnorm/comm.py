"""Threads meet and exchange: `SyncMaster` and `SlavePipe`, the two ends of an exchange between replicas.

No torch: a message may be anything. Who waits for whom, and what releases a wait, is the business of `roster.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from sync_batchnorm.circle import MASTER, Circle
from sync_batchnorm.roster import MasterCallback, Roster

__all__ = ["SlavePipe", "SyncMaster"]


class _Joining(NamedTuple):
    roster: Roster
    replica_id: int
    name: str


_joining: ContextVar[_Joining | None] = ContextVar("sync_batchnorm_joining", default=None)


@contextmanager
def joining(roster: Roster, replica_id: int, name: str) -> Iterator[None]:
    """Let what is made or registered in the body belong to a replica of `roster`, under the name of its layer."""
    token = _joining.set(_Joining(roster, replica_id, name))
    try:
        yield
    finally:
        _joining.reset(token)


class _End:
    """What master and slaves have in common: a place in a circle."""

    _roster: Roster
    _circle: Circle
    identifier: Hashable

    @property
    def where(self) -> str:
        """The layer and the replica that this end belongs to, as errors name them."""
        return f"{self._circle.name}, replica {self._circle.members[self.identifier]}"

    def _meet(self, message: Any, callback: MasterCallback | None) -> Any:
        roster, circle = self._roster, self._circle
        try:
            return roster.meet(circle, self.identifier, message, callback)
        except BaseException as error:
            # Who does not get its result here never will: the peers must not wait, also where no wrapper watches.
            roster.interrupt(circle.members[self.identifier], error)
            raise


class SlavePipe(_End):
    """The end that a slave holds: it sends a message to its `SyncMaster` and receives the result.

    Made by `SyncMaster.register_slave`. It belongs to one forward: pickled or copied, it becomes ``None``.
    """

    def __init__(self, roster: Roster, circle: Circle, identifier: Hashable) -> None:
        self._roster = roster
        self._circle = circle
        self.identifier = identifier

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identifier!r}, {self._circle.name})"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def run_slave(self, msg: Any) -> Any:
        """Send `msg` to the master and return what its callback has for this slave.

        Blocks the calling thread until all registered replicas have called as often as this one.

        Raises:
            ReplicaSyncError: if the others cannot come: one failed, left, waits elsewhere, or the timeout is over.
        """
        return self._meet(msg, None)


class SyncMaster(_End):
    """The end that the master holds: it collects the messages of all replicas and sends each its result.

    Make one in `__data_parallel_replicate__` of copy 0, put it into the context, and let the other copies register:
    then it belongs to that forward, and whatever ends the forward of a replica releases the others. One that a module
    keeps from forward to forward starts anew with the first slave that registers in a new one. Its pickle holds the
    callback alone.

    Args:
        master_callback: runs in the thread of the master. It gets a list of ``(identifier, message)``, the master's own
            first under the identifier 0, the slaves in the order in which they registered, and returns a list of
            ``(identifier, result)`` with one for each.
    """

    identifier = MASTER

    def __init__(self, master_callback: MasterCallback) -> None:
        self._master_callback = master_callback
        here = _joining.get()
        if here is None:
            self._begin(Roster(), "a SyncMaster of its own", 0)
        else:
            self._begin(here.roster, here.name, here.replica_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._circle.name}, {self.nr_slaves} slaves)"

    def __getstate__(self) -> dict[str, Any]:
        return {"master_callback": self._master_callback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SyncMaster.__init__(self, state["master_callback"])

    def _begin(self, roster: Roster, name: str, master: int) -> None:
        self._roster = roster
        self._circle = Circle(name)
        roster.admit(self._circle, MASTER, master)

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that have registered for this forward."""
        return len(self._circle.members) - 1

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Return the pipe for one more replica. Call it before the first `run_master`, from one thread.

        Args:
            identifier: anything hashable but 0, usually the number of the copy.

        Raises:
            ValueError: if the identifier is taken.
        """
        here = _joining.get()
        if here is None:
            if self._circle.is_used:  # Who registered for the last exchange, and whatever ended it, is forgotten.
                self._begin(Roster(), self._circle.name, 0)
        elif here.roster is not self._roster or self._circle.is_used:
            self._begin(here.roster, here.name, 0)
        self._roster.admit(self._circle, identifier, self.nr_slaves + 1 if here is None else here.replica_id)
        return SlavePipe(self._roster, self._circle, identifier)

    def run_master(self, msg: Any) -> Any:
        """Collect the messages of all slaves, run the callback on them and `msg`, and return the master's result.

        Blocks the calling thread until all registered slaves have called as often as the master.

        Raises:
            ReplicaSyncError: if the others cannot come: one failed, left, waits elsewhere, or the timeout is over.
            RuntimeError: if the callback does not return one result for each identifier.
            BaseException: what the callback raises; the slaves are released.
        """
        return self._meet(msg, self._master_callback)
