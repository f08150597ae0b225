"""The state of one forward pass: a record of each replica, a rendezvous of each layer, and the turns.

Nothing here waits or locks. The lock of the `Coordinator` guards all of this state.
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

Item = tuple[bool, Any]  # (True, value to continue with), or (False, None) after a break


class Rendezvous:
    """One layer of a forward pass: the replicas that exchange in it, and their messages in the current exchange."""

    def __init__(self, name: str, master: int) -> None:
        self.name = name
        self.members: dict[Hashable, int] = {MASTER: master}  # identifier -> number of the replica
        self.messages: dict[Hashable, Any] = {}  # identifier -> message in the current exchange
        self.call = 1  # the number of the current exchange

    def __str__(self) -> str:
        return f"{self.name}, call {self.call}"

    def admit(self, identifier: Hashable, number: int) -> None:
        """Add a replica to the members, under this identifier."""
        if identifier in self.members:
            raise ValueError(
                f"expected an identifier that is not registered yet, but got {identifier!r} twice ({self.name}); "
                "register each slave once per forward pass; 0 is reserved for the master"
            )
        self.members[identifier] = number

    def awaited(self) -> list[int]:
        """Return the replicas without a message in the current exchange; if none, the master, whose callback runs."""
        missing = [number for identifier, number in self.members.items() if identifier not in self.messages]
        return missing or [self.members[MASTER]]


@dataclass(slots=True, eq=False)
class Record:
    """The state of one replica in a forward pass, as its coordinator sees it."""

    number: int
    device: str | None  # None for an unlisted replica
    mailbox: SimpleQueue[Item]  # The replica waits for an item in it.
    thread: int = 0  # the identifier of the thread that runs the replica; 0 before and afterwards
    waits_in: Rendezvous | None = None
    ended: str = ""  # the way in which it ended, for messages; empty until then
    was_released: bool = False  # whether it got the error of the break
    failure: BaseException | None = None  # its first exception, until `take_failure` hands it to the caller

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

    The order in which threads run would otherwise change results, for example of random numbers on that device. Each
    replica is in one of three states. Whenever no replica is running, the ready replica with the lowest number runs.

                      pass_on            pass_on: it waits for others, or has ended
        --> READY ---------------> RUNNING ---------------------------------------> AWAY
              ^                                                                      |
              +----------------------------------------------------------------------+
                               resume: the message or answer has arrived

    A ready replica waits on its mailbox until its turn begins, even if its answer has arrived. The turns end when the
    forward pass breaks: the coordinator drops this object, and all waiting replicas get the error and run at once.
    """

    def __init__(self, records: Iterable[Record], begin: Callable[[int], None]) -> None:
        self.begin = begin  # Each replica calls it with its number when its turn has begun.
        self.ready: dict[Record, Any] = dict.fromkeys(records)  # replica -> value to continue with
        self.running: Record | None = None
        self.since = 0.0  # when the turn of the running replica began
        self.pass_on(None)

    def resume(self, record: Record, value: Any) -> None:
        """Mark an absent replica as ready: it continues with `value` when its turn comes."""
        self.ready[record] = value
        if self.running is None:
            self.pass_on(None)

    def pass_on(self, runner: Record | None) -> None:
        """Start the turn of the next ready replica, if `runner` has the turn now (None: if nobody has it)."""
        if self.running is runner:
            self.since = monotonic()
            record = self.running = min(self.ready, key=by_number, default=None)
            if record is not None:
                record.mailbox.put((True, self.ready[record]))  # first, so that Ctrl-C in between loses no release
                del self.ready[record]


def format_waiting(records: Iterable[Record], rendezvous: Rendezvous) -> str:
    """Name the replicas that wait in `rendezvous`, with the verb: "replica 0 and replica 2 wait"."""
    waiting = [record for record in records if record.waits_in is rendezvous]
    names = " and ".join(map(str, sorted(waiting, key=by_number)))
    return f"{names} {'wait' if len(waiting) > 1 else 'waits'}"


def remedy_for_loops(places: Iterable[Rendezvous]) -> str:
    """Return the remedy for a loop over samples, or "" if no layer was called more than once."""
    if all(place.call == 1 for place in places):
        return ""
    return (
        "; if it is called for each sample, pass group_size=1 to convert_model, or call it once for all: another model"
    )
