"""`SyncMaster` and `SlavePipe`, the two endpoints of an exchange between replicas.

Each replica sends a message. The master collects the messages, passes them to its callback, and sends an answer to each
slave:

    sent by                         in the master's thread            returned by
    SlavePipe.run(message) ------+                               +----> SlavePipe.run(...)
                                 +--> callback(all messages) ----+
    SyncMaster.run(message) -----+                               +----> SyncMaster.run(...)

A replication callback, such as `__data_parallel_replicate__`, makes the endpoints of all replicas before the replicas
run. Replicas wait for messages and answers in the coordinator of the forward pass; see `coordinator.py`.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .coordinator import NO_SPAN, Coordinator
from .records import MASTER, Rendezvous

__all__ = ["SlavePipe", "SyncMaster"]

Messages = list[tuple[Hashable, Any]]  # (identifier, message)
MasterCallback = Callable[[Messages], Sequence[tuple[Hashable, Any]]]


@dataclass
class RunningCallback:
    """The replication callback that runs in this thread: its forward pass, replica and submodule."""

    coordinator: Coordinator
    number: int = 0  # the number of the replica
    name: str = ""  # the name of the submodule


running_callback: ContextVar[RunningCallback | None] = ContextVar("sync_batchnorm_running_callback", default=None)


class _Member:
    """The base class of `SyncMaster` and `SlavePipe`: the endpoint of one replica in an exchange between replicas."""

    _coordinator: Coordinator
    _rendezvous: Rendezvous
    identifier: Hashable

    @property
    def where(self) -> str:
        """The name of the layer and the number of the replica, for error messages."""
        return f"{self._rendezvous.name}, replica {self._rendezvous.members[self.identifier]}"

    def _interrupt(self, error: BaseException) -> None:
        self._coordinator.interrupt(self._rendezvous.members[self.identifier], error)


class SlavePipe(_Member):
    """The endpoint of a slave in an exchange: the slave sends a message to the master, and gets an answer.

    `SyncMaster.register_slave` makes a `SlavePipe` for each replica except the master, for one forward pass. Pickles
    and copies of a `SlavePipe` are None.
    """

    def __init__(self, coordinator: Coordinator, rendezvous: Rendezvous, identifier: Hashable) -> None:
        self._coordinator, self._rendezvous, self.identifier = coordinator, rendezvous, identifier

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def run_slave(self, msg: Any) -> Any:
        """Send `msg`, any object, to the master, block until the master answers, and return the answer.

        `run` is an alias.

        Raises:
            ReplicaSyncError: as from `SyncMaster.run_master`.
        """
        try:
            return self._coordinator.send(self._rendezvous, self.identifier, msg)
        except BaseException as error:
            self._interrupt(error)
            raise

    run = run_slave


class SyncMaster(_Member):
    """The endpoint of the master, usually replica 0: it collects all messages, and answers each replica.

    See "Callbacks for modules of your own" on the page "Extending".

    Args:
        master_callback: takes a list of ``(identifier, message)``, returns a list of ``(identifier, answer)``, in the
            master's thread. The master comes first, with the identifier 0, then slaves in the order of registration.
    """

    identifier = MASTER

    def __init__(self, master_callback: MasterCallback) -> None:
        if not callable(master_callback):
            raise TypeError(
                f"expected master_callback as a function, but got {master_callback!r}; pass one to answer messages"
            )
        self._master_callback = master_callback
        # A module may also make its own `SyncMaster`, outside replication callbacks, and use it in many forward passes.
        self._is_kept = running_callback.get() is None
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"master_callback": self._master_callback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SyncMaster.__init__(self, state["master_callback"])

    def reset(self) -> None:
        """Forget all slaves. Inside a replication callback, exchange in the callback's forward pass from now on."""
        callback = running_callback.get() or RunningCallback(Coordinator(), name="a SyncMaster of its own")
        self._coordinator, self._rendezvous = callback.coordinator, Rendezvous(callback.name, callback.number)
        self._coordinator.add_replica(callback.number)

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that are registered for this forward pass."""
        return len(self._rendezvous.members) - 1

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Return the pipe for one more replica. Register all of them in one thread, before `run_master`.

        Args:
            identifier: any hashable object except 0, usually the number of the replica.

        Raises:
            ValueError: if the identifier is taken.
            RuntimeError: in a callback, if this master belongs to another forward pass.
        """
        callback = running_callback.get()
        if callback is None:
            if self._rendezvous.call > 1 or self._rendezvous.messages or self._coordinator.is_over:
                self.reset()
        elif callback.coordinator is not self._coordinator:
            raise RuntimeError(
                f"expected a SyncMaster that belongs to this forward pass, but got one of another ({callback.name}, "
                f"replica {callback.number}); put it into the context in the callback of its replica, for example "
                "ctx.sync_master = self.sync_master"
            )
        number = self.nr_slaves + 1 if callback is None else callback.number
        self._rendezvous.admit(identifier, number)
        self._coordinator.add_replica(number)
        return SlavePipe(self._coordinator, self._rendezvous, identifier)

    def run_master(self, msg: Any) -> Any:
        """Block until all slaves have sent messages, run the callback on all messages, and return the master's answer.

        `run` is an alias.

        Raises:
            ReplicaSyncError: if a peer failed, ended or waits in another exchange, or after the timeout.
            RuntimeError: unless the callback returns an answer for each identifier, and for no other.
            BaseException: any error of the callback; the slaves are released.
        """
        if self._is_kept and self._coordinator.is_over:
            # All replicas of the last forward pass have ended. The module that keeps this `SyncMaster` now runs without
            # replicas.
            self.reset()
        coordinator, rendezvous = self._coordinator, self._rendezvous
        has_slaves = len(rendezvous.members) > 1
        try:
            messages = coordinator.send(rendezvous, MASTER, msg) if has_slaves else [(MASTER, msg)]
            try:
                with NO_SPAN if coordinator.span is None else coordinator.span(f"{rendezvous.name}, merging"):
                    answers = dict(self._master_callback(messages))
            except Exception as error:
                with suppress(Exception):  # A frozen dataclass refuses notes.
                    error.add_note(f"Raised in the exchange of {rendezvous}.")
                raise
            if answers.keys() != rendezvous.members.keys():
                raise RuntimeError(
                    "expected the master callback to return one result for each of "
                    f"{list(rendezvous.members)}, but got results for {list(answers)} ({rendezvous}); return a list of "
                    "(identifier, result)"
                )
            del messages  # Do not keep the messages in memory while the slaves run on.
            if has_slaves:
                coordinator.answer(rendezvous, answers)
        except BaseException as error:
            if has_slaves:
                self._interrupt(error)
            raise
        return answers[MASTER]

    run = run_master


# NOTE [tried in a meeting]: One exchange between 2, 4 and 8 threads takes about 15, 46 and 100 us with a `SimpleQueue`
# for each replica. These alternatives are not better:
#
# - one `threading.Condition` for all replicas: 28, 45 and 118 us; a `threading.Barrier`: twice that;
# - raw locks or events in place of the queues, another switch interval: no gain;
# - waiting in a loop instead of sleeping, turns under a semaphore: no gain with two replicas, little with eight;
# - merging in the replica that arrives last, another scheduling policy for the threads: NOTE [tried in a call];
# - records at no cost at all: 2 % of a step on two GPUs, so no trick to save them is worth its lines;
# - greenlets in place of threads: much faster, but then nothing of two replicas overlaps any more.
