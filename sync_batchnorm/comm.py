"""`SyncMaster` and `SlavePipe`, the ends of an exchange between threads of replicas. A message may be anything."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .coordinator import MASTER, Coordinator, MasterCallback, Rendezvous

__all__ = ["SlavePipe", "SyncMaster"]


@dataclass
class _Joining:
    """The replication callback that runs in this thread."""

    coordinator: Coordinator
    replica_id: int = 0
    name: str = ""


_joining: ContextVar[_Joining | None] = ContextVar("sync_batchnorm_joining", default=None)


@contextmanager
def joining(coordinator: Coordinator) -> Iterator[_Joining]:
    """Let masters and slaves that are made in the body belong to a forward."""
    here = _Joining(coordinator)
    token = _joining.set(here)
    try:
        yield here
    finally:
        _joining.reset(token)


class _End:
    """The base class of master and slave: a member of a `Rendezvous`."""

    _coordinator: Coordinator
    _rendezvous: Rendezvous
    identifier: Hashable
    remembered: tuple[Any, ...] = ()  # of the calls in this forward, for activation checkpointing; see `checkpoint.py`

    @property
    def where(self) -> str:
        """The layer and the replica, as errors name them."""
        return f"{self._rendezvous.name}, replica {self._rendezvous.members[self.identifier]}"

    def _interrupt(self, error: BaseException) -> None:
        self._coordinator.interrupt(self._rendezvous.members[self.identifier], error)


class SlavePipe(_End):
    """The end that `SyncMaster.register_slave` makes for a slave, for one forward: a pickle or copy is ``None``."""

    def __init__(self, coordinator: Coordinator, rendezvous: Rendezvous, identifier: Hashable) -> None:
        self._coordinator = coordinator
        self._rendezvous = rendezvous
        self.identifier = identifier

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def run_slave(self, msg: Any) -> Any:
        """Send `msg` to the master and return what its callback has for this slave; block until it has.

        Raises:
            ReplicaSyncError: if a peer failed, ended its forward or waits in another exchange, or after the timeout.
        """
        try:
            return self._coordinator.send(self._rendezvous, self.identifier, msg)
        except BaseException as error:
            self._interrupt(error)
            raise

    run = run_slave


class SyncMaster(_End):
    """The end that the master holds: it collects the messages of all replicas and sends each its answer.

    Make one in `__data_parallel_replicate__` of copy 0, put it into the context, and let the other copies register. It
    then belongs to that forward. A module may also keep a `SyncMaster`: one that a callback puts into its context
    begins anew, with the replica of that callback as the master. Its pickle holds only the callback.

    Args:
        master_callback: runs in the thread of the master. It gets a list of ``(identifier, message)``: first that of
            the master, whose identifier is 0, then those of the slaves, in the order in which they registered. It
            returns a list of ``(identifier, answer)`` with one for each.
    """

    identifier = MASTER

    def __init__(self, master_callback: MasterCallback) -> None:
        if not callable(master_callback):
            raise TypeError(
                f"expected master_callback as a function, but got {master_callback!r}; pass what answers all messages"
            )
        self._master_callback = master_callback
        here = _joining.get()
        self._is_kept = here is None  # by a module, from forward to forward
        self._begin(here or _Joining(Coordinator(), name="a SyncMaster of its own"))

    def __getstate__(self) -> dict[str, Any]:
        return {"master_callback": self._master_callback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SyncMaster.__init__(self, state["master_callback"])

    def _begin(self, here: _Joining) -> None:
        self._coordinator = here.coordinator
        self._rendezvous = Rendezvous(here.name, here.replica_id)
        self.remembered = ()

    def join(self) -> None:
        """Become the master of the replica whose callback runs, if a module has kept this from another forward."""
        here = _joining.get()
        if here is not None and self._coordinator is not here.coordinator:
            self._begin(here)

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that have registered for this forward."""
        return len(self._rendezvous.members) - 1

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Return the pipe for one more replica. Call it before the first `run_master`, from one thread.

        Args:
            identifier: anything hashable but 0, usually the number of the copy.

        Raises:
            ValueError: if the identifier is taken.
            RuntimeError: in a callback, if this object belongs to another forward.
        """
        here = _joining.get()
        if here is None:
            used = self._rendezvous.call > 1 or self._rendezvous.messages
            if used or self._coordinator.is_over:  # Forget the slaves, and how that ended.
                self._begin(_Joining(Coordinator(), name=self._rendezvous.name))
        elif here.coordinator is not self._coordinator:
            raise RuntimeError(
                f"expected a SyncMaster that belongs to this forward, but got one of another ({here.name}, replica "
                f"{here.replica_id}); put it into the context in the callback of its replica, as in "
                "ctx.sync_master = self.sync_master"
            )
        replica_id = self.nr_slaves + 1 if here is None else here.replica_id
        self._rendezvous.admit(identifier, replica_id)
        return SlavePipe(self._coordinator, self._rendezvous, identifier)

    def run_master(self, msg: Any) -> Any:
        """Block until all slaves have called; run the callback on all messages, and return the master's answer.

        Raises:
            ReplicaSyncError: if a peer failed, ended its forward or waits in another exchange, or after the timeout.
            RuntimeError: if the callback does not return one answer for each identifier.
            BaseException: what the callback raises; the slaves are released.
        """
        coordinator, rendezvous, callback = self._coordinator, self._rendezvous, self._master_callback
        if not self.nr_slaves or (self._is_kept and coordinator.is_over):  # kept by a module that now runs by itself
            return coordinator.merged(rendezvous, callback, [(MASTER, msg)])[MASTER]
        try:
            answers = coordinator.merged(rendezvous, callback, coordinator.send(rendezvous, MASTER, msg))
            coordinator.answer(rendezvous, answers)
        except BaseException as error:
            self._interrupt(error)
            raise
        return answers[MASTER]

    run = run_master
