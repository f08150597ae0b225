"""`SyncMaster` and `SlavePipe`, the two sides of an exchange between replicas. Messages can be any object."""

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .coordinator import NO_SPAN, Coordinator
from .errors import add_note
from .records import MASTER, Rendezvous

__all__ = ["SlavePipe", "SyncMaster"]

Messages = list[tuple[Hashable, Any]]  # by identifier
MasterCallback = Callable[[Messages], Sequence[tuple[Hashable, Any]]]


@dataclass
class RunningCallback:
    """For which forward pass, replica and submodule the replication callback runs that this thread runs now."""

    coordinator: Coordinator
    number: int = 0
    name: str = ""


running_callback: ContextVar[RunningCallback | None] = ContextVar("sync_batchnorm_running_callback", default=None)


class _Member:
    """The base class of master and slave: one member of a `Rendezvous`."""

    _coordinator: Coordinator
    _rendezvous: Rendezvous
    identifier: Hashable

    @property
    def where(self) -> str:
        """The layer and the replica, as errors name them."""
        return f"{self._rendezvous.name}, replica {self._rendezvous.members[self.identifier]}"

    def _interrupt(self, error: BaseException) -> None:
        self._coordinator.interrupt(self._rendezvous.members[self.identifier], error)


class SlavePipe(_Member):
    """The side of a slave in an exchange, which every replica has that is not the master.

    `SyncMaster.register_slave` makes it, for one forward pass. A pickle or copy of it is None.
    """

    def __init__(self, coordinator: Coordinator, rendezvous: Rendezvous, identifier: Hashable) -> None:
        self._coordinator, self._rendezvous, self.identifier = coordinator, rendezvous, identifier

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def run_slave(self, msg: Any) -> Any:
        """Send `msg`, any object, to the master; block until its callback has run; return its answer for this slave.

        `run` is the same, here and in the `SyncMaster`.

        Raises:
            ReplicaSyncError: if a peer failed, has ended or waits in another exchange, or after the timeout.
        """
        try:
            return self._coordinator.send(self._rendezvous, self.identifier, msg)
        except BaseException as error:
            self._interrupt(error)
            raise

    run = run_slave


class SyncMaster(_Member):
    """The side of the master, usually replica 0, in an exchange: it collects the messages of all and answers each.

    Make one in `__data_parallel_replicate__` of replica 0, put it into the context, and let the other copies of the
    module register, see "Callbacks for modules of your own" on the page "Extending". A module may also keep one and put
    it into the context of every forward pass, where it begins anew. A pickle of it has only the callback.

    Args:
        master_callback: runs in the thread of the master. It gets a list of ``(identifier, message)``: first the
            message of the master, whose identifier is 0, then the messages of the slaves, in the order in which they
            registered. It returns a list of ``(identifier, answer)`` with an answer for each.
    """

    identifier = MASTER

    def __init__(self, master_callback: MasterCallback) -> None:
        if not callable(master_callback):
            raise TypeError(
                f"expected master_callback as a function, but got {master_callback!r}; pass one to answer messages"
            )
        self._master_callback = master_callback
        self._is_kept = running_callback.get() is None  # by a module, across forward passes
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"master_callback": self._master_callback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SyncMaster.__init__(self, state["master_callback"])

    def reset(self) -> None:
        """Forget all slaves; belong to the forward pass whose callback runs in this thread, if one does."""
        here = running_callback.get() or RunningCallback(Coordinator(), name="a SyncMaster of its own")
        self._coordinator, self._rendezvous = here.coordinator, Rendezvous(here.name, here.number)

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that have registered for this forward pass."""
        return len(self._rendezvous.members) - 1

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Return the pipe for one more replica. Call it before `run_master`, from one thread.

        Args:
            identifier: anything hashable but 0, usually the number of the copy.

        Raises:
            ValueError: if the identifier is taken.
            RuntimeError: in a callback, if this object belongs to another forward pass.
        """
        here = running_callback.get()
        if here is None:
            if self._rendezvous.call > 1 or self._rendezvous.messages or self._coordinator.is_over:
                self.reset()
        elif here.coordinator is not self._coordinator:
            raise RuntimeError(
                f"expected a SyncMaster that belongs to this forward pass, but got one of another ({here.name}, "
                f"replica {here.number}); put it into the context in the callback of its replica, for example "
                "ctx.sync_master = self.sync_master"
            )
        number = self.nr_slaves + 1 if here is None else here.number
        self._rendezvous.admit(identifier, number)
        return SlavePipe(self._coordinator, self._rendezvous, identifier)

    def run_master(self, msg: Any) -> Any:
        """Block until all slaves have called; run the callback on all messages, and return the master's answer.

        `run` is the same, here and in the `SlavePipe`.

        Raises:
            ReplicaSyncError: if a peer failed, has ended or waits in another exchange, or after the timeout.
            RuntimeError: unless the callback returns answers for exactly these identifiers.
            BaseException: what the callback raises; the slaves are released.
        """
        if self._is_kept and self._coordinator.is_over:  # The module that keeps this now runs without replicas.
            self.reset()
        coordinator, rendezvous = self._coordinator, self._rendezvous
        if len(rendezvous.members) == 1:
            return self._run_callback(rendezvous, [(MASTER, msg)])[MASTER]
        try:
            answers = self._run_callback(rendezvous, coordinator.send(rendezvous, MASTER, msg))
            coordinator.answer(rendezvous, answers)
        except BaseException as error:
            self._interrupt(error)
            raise
        return answers[MASTER]

    run = run_master

    def _run_callback(self, rendezvous: Rendezvous, messages: Messages) -> dict[Hashable, Any]:
        span = self._coordinator.span
        try:
            with NO_SPAN if span is None else span(f"{rendezvous.name}, merging"):
                answers = dict(self._master_callback(messages))
        except Exception as error:
            add_note(error, f"Raised in the exchange of {rendezvous}.")
            raise
        if answers.keys() != rendezvous.members.keys():
            raise RuntimeError(
                f"expected the master callback to return one result for each of {list(rendezvous.members)}, but got "
                f"results for {list(answers)} ({rendezvous}); return a list of (identifier, result)"
            )
        return answers
