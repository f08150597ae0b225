"""What is recorded of each replica of a forward pass, of their turns, and of each place where they meet.

Nothing here waits or locks: the lock of the `Coordinator` guards all records of its forward pass.
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
RUNS = "is still running"

Item = tuple[bool, Any]  # (True, what the replica goes on with), or (False, None) after a break


class Rendezvous:
    """Where replicas meet in one layer of a forward pass: the members, and what they have sent in the present call."""

    def __init__(self, name: str, master: int) -> None:
        self.name = name
        self.members: dict[Hashable, int] = {MASTER: master}  # the numbers of replicas, by identifier
        self.messages: dict[Hashable, Any] = {}
        self.call = 1

    def __str__(self) -> str:
        return f"{self.name}, call {self.call}"

    def admit(self, identifier: Hashable, number: int) -> None:
        """Make a replica a member, under the name `identifier`."""
        if identifier in self.members:
            raise ValueError(
                f"expected an identifier that is not registered yet, but got {identifier!r} twice ({self.name}); "
                "register each slave once per forward pass; 0 is reserved for the master"
            )
        self.members[identifier] = number

    def awaited(self) -> list[int]:
        """Return the replicas that the present call waits for: those that are missing, or the master that merges."""
        missing = [number for identifier, number in self.members.items() if identifier not in self.messages]
        return missing or [self.members[MASTER]]


@dataclass(slots=True, eq=False)
class Record:
    """What the coordinator knows of one replica: what it does, has done, and will get."""

    number: int
    device: str | None  # None for a replica that was not listed
    mailbox: SimpleQueue[Item]  # on which it waits
    thread: int = 0  # the identifier of the thread that runs it; 0 before and after
    waits_in: Rendezvous | None = None
    ended: str = ""  # how, as messages say it; empty if it has not
    was_released: bool = False  # whether it got the error of the break
    failure: BaseException | None = None  # what it raised first, until the caller has asked

    def __str__(self) -> str:
        return f"replica {self.number} on device {self.device}" if self.device else f"replica {self.number}"

    def activity(self, turns: "Turns | None") -> str:
        """Return what the replica does, in words that follow its name in a message."""
        if self.ended:
            return self.ended
        if self.waits_in is not None:
            return f"waits in {self.waits_in}"
        if not self.thread:
            return "has not started"
        return "waits for its turn" if turns is not None and self in turns.ready else RUNS

    def stack(self) -> str:
        """Return what the thread of this replica executes now."""
        frame = _current_frames().get(self.thread)
        return f"Stack of {self} at the timeout:\n{''.join(format_stack(frame)).rstrip()}"


class Records(dict[int, Record]):
    """The records of the replicas, by number.

    That of a replica which was not listed is made when it is first asked for: with the lock held, since two threads
    might otherwise make one each.
    """

    def __missing__(self, number: int) -> Record:
        record = self[number] = Record(number, None, SimpleQueue())
        return record


by_number = attrgetter("number")


class Turns:
    """Replicas that share a device run one at a time, so that no result depends on the order of their threads.

    Each of them is in one of three states. Whenever no replica is running, the lowest that is ready runs.

                      pass_on                 pass_on: it waits, or has ended
        --> READY ---------------> RUNNING -------------------------------------------> AWAY
              ^                                                                          |
              +--------------------------------------------------------------------------+
                           resume: what it waits for is there

    A ready replica waits on its mailbox until its turn begins, even if it has its answer. The turns end when the
    forward pass breaks: the coordinator then drops this object, and all who wait get the error and run at once.
    """

    def __init__(self, records: Iterable[Record], begin: Callable[[int], None]) -> None:
        self.begin = begin  # each replica calls it with its number when its turn has begun
        self.ready: dict[Record, Any] = dict.fromkeys(records)  # with the values that they go on with
        self.running: Record | None = None
        self.since = 0.0  # when this replica began to run
        self.pass_on(None)

    def resume(self, record: Record, value: Any) -> None:
        """Let a replica that is away go on with `value` when its turn comes."""
        self.ready[record] = value
        if self.running is None:
            self.pass_on(None)

    def pass_on(self, runner: Record | None) -> None:
        """Let the lowest replica that is ready run, if `runner` has run until now; None: if none has."""
        if self.running is runner:
            self.since = monotonic()
            record = self.running = min(self.ready, key=by_number, default=None)
            if record is not None:
                record.mailbox.put((True, self.ready[record]))  # first, so that Ctrl-C in between loses no release
                del self.ready[record]


def those_who_wait(records: Iterable[Record], rendezvous: Rendezvous) -> str:
    """Return who of `records` waits in `rendezvous`, with the verb: "replica 0 and replica 2 wait"."""
    waiting = [record for record in records if record.waits_in is rendezvous]
    names = " and ".join(map(str, sorted(waiting, key=by_number)))
    return f"{names} {'wait' if len(waiting) > 1 else 'waits'}"


def remedy_for_loops(places: Iterable[Rendezvous]) -> str:
    """Return what to do about a loop over samples, if a layer was called more than once; otherwise nothing."""
    if all(place.call == 1 for place in places):
        return ""
    return (
        "; if it is called for each sample, pass group_size=1 to convert_model, or call it once for all: another model"
    )
