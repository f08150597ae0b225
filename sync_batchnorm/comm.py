"""`SyncMaster` and `SlavePipe`, the two ends of an exchange between the threads of replicas.

This file does not import torch: a message may be anything. Only `coordinator.py` blocks and releases threads.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from sync_batchnorm.coordinator import MASTER, Coordinator, MasterCallback, SyncGroup

__all__ = ["SlavePipe", "SyncMaster"]


class _Joining(NamedTuple):
    coordinator: Coordinator
    replica_id: int
    name: str


_joining: ContextVar[_Joining | None] = ContextVar("sync_batchnorm_joining", default=None)


@contextmanager
def joining(coordinator: Coordinator, replica_id: int, name: str) -> Iterator[None]:
    """Let masters and slaves that are made in the body belong to a replica of `coordinator`, for the layer `name`."""
    token = _joining.set(_Joining(coordinator, replica_id, name))
    try:
        yield
    finally:
        _joining.reset(token)


class _End:
    """The base class of master and slave: a member of a `SyncGroup`."""

    _coordinator: Coordinator
    _sync_group: SyncGroup
    identifier: Hashable

    @property
    def where(self) -> str:
        """The layer and the replica that this end belongs to, as errors name them."""
        return f"{self._sync_group.name}, replica {self._sync_group.members[self.identifier]}"

    def _exchange(self, message: Any, callback: MasterCallback | None) -> Any:
        coordinator, sync_group = self._coordinator, self._sync_group
        try:
            return coordinator.exchange(sync_group, self.identifier, message, callback)
        except BaseException as error:
            # A replica that fails here gets no result, so its peers must not wait for it, even if no wrapper handles
            # the error.
            coordinator.interrupt(sync_group.members[self.identifier], error)
            raise


class SlavePipe(_End):
    """The end that a slave holds: it sends a message to its `SyncMaster` and receives the result.

    Made by `SyncMaster.register_slave`. It belongs to one forward: a pickle or copy of it is ``None``.
    """

    def __init__(self, coordinator: Coordinator, sync_group: SyncGroup, identifier: Hashable) -> None:
        self._coordinator = coordinator
        self._sync_group = sync_group
        self.identifier = identifier

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identifier!r}, {self._sync_group.name})"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def run_slave(self, msg: Any) -> Any:
        """Send `msg` to the master and return what its callback has for this slave.

        Blocks the calling thread until all registered replicas have called as often as this one.

        Raises:
            ReplicaSyncError: if a peer failed, ended its forward or waits in another exchange, or after the timeout.
        """
        return self._exchange(msg, None)


class SyncMaster(_End):
    """The end that the master holds: it collects the messages of all replicas and sends each its result.

    Make one in `__data_parallel_replicate__` of copy 0, put it into the context, and let the other copies register. It
    then belongs to that forward: if the forward of one replica ends, the others no longer wait for it. A `SyncMaster`
    that a module keeps for several forwards starts anew when the first slave registers in a new forward. Its pickle
    holds only the callback.

    Args:
        master_callback: runs in the thread of the master. It gets a list of ``(identifier, message)``: first that of
            the master, whose identifier is 0, then those of the slaves, in the order in which they registered. It
            returns a list of ``(identifier, result)`` with one for each.
    """

    identifier = MASTER

    def __init__(self, master_callback: MasterCallback) -> None:
        self._master_callback = master_callback
        here = _joining.get()
        if here is None:
            self._begin(Coordinator(), "a SyncMaster of its own", 0)
        else:
            self._begin(here.coordinator, here.name, here.replica_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sync_group.name}, {self.nr_slaves} slaves)"

    def __getstate__(self) -> dict[str, Any]:
        return {"master_callback": self._master_callback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SyncMaster.__init__(self, state["master_callback"])

    def _begin(self, coordinator: Coordinator, name: str, master: int) -> None:
        self._coordinator = coordinator
        self._sync_group = SyncGroup(name)
        coordinator.admit(self._sync_group, MASTER, master)

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that have registered for this forward."""
        return len(self._sync_group.members) - 1

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Return the pipe for one more replica. Call it before the first `run_master`, from one thread.

        Args:
            identifier: anything hashable but 0, usually the number of the copy.

        Raises:
            ValueError: if the identifier is taken.
        """
        here = _joining.get()
        if here is None:
            if self._sync_group.is_used:  # Start anew: forget the slaves, and how their exchanges ended.
                self._begin(Coordinator(), self._sync_group.name, 0)
        elif here.coordinator is not self._coordinator or self._sync_group.is_used:
            self._begin(here.coordinator, here.name, 0)
        self._coordinator.admit(self._sync_group, identifier, self.nr_slaves + 1 if here is None else here.replica_id)
        return SlavePipe(self._coordinator, self._sync_group, identifier)

    def run_master(self, msg: Any) -> Any:
        """Collect the messages of all slaves, run the callback on them and `msg`, and return the master's result.

        Blocks the calling thread until all registered slaves have called as often as the master.

        Raises:
            ReplicaSyncError: if a peer failed, ended its forward or waits in another exchange, or after the timeout.
            RuntimeError: if the callback does not return one result for each identifier.
            BaseException: what the callback raises; the slaves are released.
        """
        return self._exchange(msg, self._master_callback)
