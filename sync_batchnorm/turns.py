"""Turns: replicas that share a device run one at a time, so that no result depends on the order of their threads."""

from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Any

__all__: list[str] = []

Item = tuple[bool, Any]
BEGIN: Item = (True, None)  # what each replica gets first


class Turns:
    """Whose turn it is in a forward pass: that of the lowest replica that can run, until it waits or ends.

    A replica can run if there is an item for its mailbox, which is put there when its turn begins. The lock of the
    coordinator guards all this.

    Args:
        replica_ids: those that take turns; each has one at the beginning.
        mailboxes: those of all replicas.
        begin: called by a replica when its turn has begun, with its number.
    """

    def __init__(
        self, replica_ids: Collection[int], mailboxes: Mapping[int, Any], begin: Callable[[int], None]
    ) -> None:
        self._mailboxes, self.begin = mailboxes, begin
        self.pending = dict.fromkeys(replica_ids, BEGIN)  # the replicas that can run, with their items
        self._begin_next()

    def add(self, replica_id: int, item: Item) -> None:
        """Let a replica run that has waited."""
        self.pending[replica_id] = item
        if self.runs is None:
            self._begin_next()

    def end(self, replica_id: int) -> None:
        """End the turn of a replica, if it has one: it waits from now on, or has ended."""
        if replica_id == self.runs:
            self._begin_next()

    def _begin_next(self) -> None:
        self.since = monotonic()
        self.runs: int | None = min(self.pending, default=None)
        if self.runs is not None:
            self._mailboxes[self.runs].put(self.pending.pop(self.runs))
