"""The state of one forward pass: what each replica does, which replicas exchange in which layer, and whose turn it is.

The classes in this file neither wait nor lock. The lock of the `Coordinator` guards their state.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from queue import SimpleQueue
from sys import _current_frames
from time import monotonic
from traceback import format_stack
from typing import Any

__all__: list[str] = []

MASTER = 0  # the identifier of every master
STILL_RUNNING = "is still running"

# An item in the mailbox of a replica. ``(True, value)`` lets the replica continue with this value. ``(False, None)``
# tells the replica to raise the error that stopped the forward pass.
Item = tuple[bool, Any]


class Rendezvous:
    """The meeting of replicas in one layer of a forward pass, with their messages in the current exchange."""

    def __init__(self, name: str, master: int) -> None:
        self.name = name
        # Maps the identifier of each replica to its number.
        self.members: dict[Hashable, int] = {MASTER: master}
        self.messages: dict[Hashable, Any] = {}  # maps the identifier of a replica to the message it sent
        self.call = 1  # the number of the current exchange in this layer

    def __str__(self) -> str:
        return f"{self.name}, call {self.call}"

    def admit(self, identifier: Hashable, number: int) -> None:
        """Add a replica as a member, under an identifier that no other member uses."""
        if identifier in self.members:
            raise ValueError(
                f"expected an identifier that is not registered yet, but got {identifier!r} twice ({self.name}); "
                "register each slave once per forward pass; 0 is reserved for the master"
            )
        self.members[identifier] = number

    def awaited(self) -> list[int]:
        """Return the numbers of the replicas that keep other replicas waiting in the current exchange.

        Until all messages are there, the replicas wait for those that did not send a message yet. Afterwards, all other
        replicas wait for replica 0, whose callback computes the answers.
        """
        missing = [number for identifier, number in self.members.items() if identifier not in self.messages]
        return missing or [self.members[MASTER]]


@dataclass(slots=True, eq=False)
class Record:
    """The state of one replica in a forward pass, for example whether it waits in a layer, or how it ended."""

    number: int  # the number of the replica
    device: str | None  # the device of the replica; None if it is not known
    # The queue on which the waiting replica blocks until another thread puts an item into it.
    mailbox: SimpleQueue[Item]
    thread: int = 0  # the identifier of the thread that runs the replica; 0 before the replica begins and after it ends
    waits_in: Rendezvous | None = None  # the layer in which the replica waits; None if it does not wait
    ended: str = ""  # how the replica ended, as a verb phrase for messages; empty until the replica ends
    was_released: bool = False  # whether the error that broke the forward pass was raised in this replica
    # The first exception of the replica; None if there is none, or if the caller's thread has taken it.
    failure: BaseException | None = None

    def __str__(self) -> str:
        return f"replica {self.number} on device {self.device}" if self.device else f"replica {self.number}"

    def activity(self, turns: "Turns | None") -> str:
        """Return the present activity of the replica, as a verb phrase for messages: "waits in stem, call 1"."""
        if self.ended:
            return self.ended
        if self.waits_in is not None:
            return f"waits in {self.waits_in}"
        if not self.thread:
            return "has not started"
        return "waits for its turn" if turns is not None and self in turns.ready else STILL_RUNNING

    def stack(self) -> str:
        """Return the present call stack of the thread of this replica, as text."""
        frame = _current_frames().get(self.thread)
        return f"Stack of {self} at the timeout:\n{''.join(format_stack(frame)).rstrip()}"


by_number = attrgetter("number")


class Turns:
    """Let replicas that share a device run one at a time.

    If replicas ran at the same time, results could depend on the order of their threads, for example if the replicas
    draw random numbers on their device. So one replica runs at a time. Each replica is in one of three states: ready,
    running, or away. A replica is away while it waits for other replicas, and after it has ended. Whenever no replica
    is running, the ready replica with the lowest number starts to run.

                      pass_on            pass_on: it waits for others, or has ended
        --> READY ---------------> RUNNING ---------------------------------------> AWAY
              ^                resume: the message or answer has arrived             |
              +----------------------------------------------------------------------+

    A ready replica can go on, but it is not its turn yet. It blocks on its mailbox (a queue), and its answer is put
    into the mailbox when its turn begins.

    If one replica cannot continue, the coordinator raises an error in all waiting replicas, and drops this `Turns`
    object. All replicas that have not ended then run at the same time.
    """

    def __init__(self, records: Iterable[Record], begin: Callable[[int], None]) -> None:
        self.begin = begin  # a function that each replica calls with its number at the beginning of its turn
        # Maps each ready replica to the value that it gets when its turn begins.
        self.ready: dict[Record, Any] = dict.fromkeys(records)
        self.running: Record | None = None
        self.since = 0.0  # the time at which the turn of the running replica began
        self.pass_on(None)

    def resume(self, record: Record, value: Any) -> None:
        """Mark a replica as ready to run again. It continues with `value` when its turn comes."""
        self.ready[record] = value
        if self.running is None:
            self.pass_on(None)

    def pass_on(self, runner: Record | None) -> None:
        """End the turn of the replica `runner`, and start the turn of the next ready replica.

        If `runner` is a replica that is not running, do nothing. If `runner` is None, start a turn if no replica is
        running.
        """
        if self.running is runner:
            self.since = monotonic()
            record = self.running = min(self.ready, key=by_number, default=None)
            if record is not None:
                # First of all, put the value into the replica's mailbox. If Ctrl-C interrupts the next lines, the
                # replica continues nevertheless.
                record.mailbox.put((True, self.ready[record]))
                del self.ready[record]


def format_waiting(records: Iterable[Record], rendezvous: Rendezvous) -> str:
    """Name the replicas that wait in `rendezvous`, with the verb: "replica 0 and replica 2 wait"."""
    waiting = [record for record in records if record.waits_in is rendezvous]
    names = " and ".join(map(str, sorted(waiting, key=by_number)))
    return f"{names} {'wait' if len(waiting) > 1 else 'waits'}"


def remedy_for_loops(places: Iterable[Rendezvous]) -> str:
    """Return advice, as a part of an error message, for models that call a layer once for each sample.

    If no layer was called more than once, return an empty string.
    """
    if all(place.call == 1 for place in places):
        return ""
    return (
        "; if it is called for each sample, pass group_size=1 to convert_model, or call it once for all: another model"
    )
