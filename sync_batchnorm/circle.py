"""Who exchanges through one `SyncMaster` during one forward, and its calls: data that a `Roster` guards."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__: list[str] = []

MASTER = 0  # the identifier of every master


class Meeting:
    """One call of one layer: who has arrived, and with what."""

    __slots__ = ("members", "messages", "name", "number")

    def __init__(self, name: str, number: int, members: dict[Hashable, int]) -> None:
        self.name = name
        self.number = number
        self.members = members
        self.messages: dict[Hashable, Any] = {}

    def __str__(self) -> str:
        return f"{self.name}, call {self.number}"

    def needed(self) -> list[int]:
        """Return the replicas without which the meeting cannot end: those missing, or the master at work."""
        missing = [replica for identifier, replica in self.members.items() if identifier not in self.messages]
        return missing or [self.members[MASTER]]


class Circle:
    """The replicas that exchange through one `SyncMaster` during one forward. The first member is the master."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[Hashable, int] = {}  # identifier -> replica
        self.calls: dict[Hashable, int] = {}
        self.meetings: dict[int, Meeting] = {}  # the incomplete ones, by number of the call

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
