"""Decide which thread of the exchange goes on: what the search through its interleavings runs on.

The threads are real, but only one runs at a time: `Lock` and `SimpleQueue`, as `coordinator.py` imports them, are
replaced by versions that ask the scheduler before they go on. A depth-first search replays every sequence of its
choices.

Threads use what they share, except for their mailboxes, only with the lock held. So the sections under the lock are the
steps, and what a thread does outside of them commutes with the steps of all others. Only its owner takes from a
mailbox: to take what is there commutes too, and a thread that finds its mailbox empty waits, or, where a scenario says
so, runs out of time. To begin a forward writes only what nobody reads before its owner waits or leaves, except that the
text of a timeout says who has started; so it is done first. The remaining steps are choices: who enters the next
section under the lock, and whose time runs out. With ``fine=True`` every operation of lock and queue is a choice,
including release of the lock and beginning of a forward; tests compare the outcomes of both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from sync_batchnorm import coordinator, errors

_run: Run | None = None  # the one that is being executed


class _Stop(BaseException):
    """Ends a thread of a run that cannot go on."""


class _Baton:
    """Lets one thread wait until another gives it the turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.give, self.take = self._lock.release, self._lock.acquire


class _Party:
    """One thread of a run: it runs only when it has the turn."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self.body = body
        self.turn = _Baton()
        self.needs_own_parallel = True  # whether what it does next concerns nobody else
        self.ready: Callable[[], bool] = _always
        self.may_time_out = False
        self.timed_out = False
        self.ended = False
        self.outcome: Any = None


def _always() -> bool:
    return True


class Run:
    """One execution: it repeats `choices`, then takes first options; `options` counts what each choice offered."""

    def __init__(self, bodies: Sequence[Callable[[], Any]], choices: Sequence[int], timeouts: int, fine: bool) -> None:
        self.parties = [_Party(body) for body in bodies]
        self.choices = list(choices)
        self.options: list[int] = []
        self.timeouts = timeouts
        self.fine = fine
        self.deadlock = False
        self._current: _Party | None = None
        self._done = _Baton()

    def execute(self, pool: Pool) -> list[Any]:
        """Return the outcome of each party: what its body returned, or the exception that it raised."""
        global _run
        _run = self
        try:
            for party in self.parties:
                pool.start(lambda party=party: self._work(party))
            self._hand_over(None)
            self._done.take()
        finally:
            _run = None
        return [party.outcome for party in self.parties]

    def _work(self, party: _Party) -> None:
        party.turn.take()
        try:
            party.outcome = party.body()
        except BaseException as error:
            party.outcome = error.with_traceback(None)
        party.ended = True
        self._hand_over(party)

    def step(
        self, ready: Callable[[], bool] = _always, needs_own_parallel: bool = False, may_time_out: bool = False
    ) -> bool:
        """Let the scheduler decide who goes on; return, once it is the caller, whether its time ran out."""
        party = self._current
        if party is None:
            raise RuntimeError("expected a step inside of a run")
        party.ready, party.needs_own_parallel, party.may_time_out = (
            ready,
            needs_own_parallel and not self.fine,
            may_time_out,
        )
        party.timed_out = False
        self._hand_over(party)
        if self.deadlock:
            raise _Stop
        return party.timed_out

    def _hand_over(self, giver: _Party | None) -> None:
        taker = self._chosen()
        self._current = taker
        if taker is giver:
            return
        if taker is None:
            self._done.give()
            return
        taker.turn.give()
        if giver is not None and not giver.ended:
            giver.turn.take()

    def _chosen(self) -> _Party | None:
        alive = [party for party in self.parties if not party.ended]
        options = [(party, False) for party in alive if party.ready()]
        for party, _ in options:
            if party.needs_own_parallel:
                return party
        if self.timeouts:
            options += [(party, True) for party in alive if party.may_time_out and not party.ready()]
        if not options:
            self.deadlock = self.deadlock or bool(alive)
            return alive[0] if alive else None
        taken = 0
        if len(options) > 1:
            position = len(self.options)
            if position == len(self.choices):
                self.choices.append(0)
            self.options.append(len(options))
            taken = self.choices[position]
        taker, taker.timed_out = options[taken]
        self.timeouts -= taker.timed_out
        return taker


class Pool:
    """Threads that are used again: to start them would take most of the time."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[SimpleQueue[Any]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, body: Callable[[], None]) -> None:
        try:
            orders = self._idle.get_nowait()
        except Empty:
            orders = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(orders,), daemon=True)
            self._threads.append(thread)
            thread.start()
        orders.put(body)

    def _serve(self, orders: SimpleQueue[Any]) -> None:
        while (body := orders.get()) is not None:
            body()
            self._idle.put(orders)

    def close(self) -> None:
        for _ in self._threads:
            self._idle.get().put(None)
        for thread in self._threads:
            thread.join()


class _CooperativeLock:
    def __init__(self) -> None:
        self.held = False

    def __enter__(self) -> None:
        if _run is not None:
            _run.step(lambda: not self.held)
        self.held = True

    def __exit__(self, *args: Any) -> None:
        self.held = False
        if _run is not None and _run.fine:
            _run.step()


class _CooperativeQueue:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        if _run is not None and _run.fine:
            _run.step()
        self.items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not self.items or (_run is not None and _run.fine):
            if _run is None:
                raise RuntimeError("expected something in the mailbox")
            if _run.step(lambda: bool(self.items), needs_own_parallel=True, may_time_out=timeout is not None):
                raise Empty
        return self.items.pop(0)


@contextmanager
def cooperative() -> Iterator[Pool]:
    """Replace what `coordinator.py` waits with, and for speed the traceback that nobody reads."""
    pool = Pool()
    saved = coordinator.Lock, coordinator.SimpleQueue, errors.traceback
    coordinator.Lock, coordinator.SimpleQueue, errors.traceback = _CooperativeLock, _CooperativeQueue, _ShortTraceback
    try:
        yield pool
    finally:
        coordinator.Lock, coordinator.SimpleQueue, errors.traceback = saved
        pool.close()


class _ShortTraceback:
    @staticmethod
    def format_exception(kind: type[BaseException], error: BaseException, trace: Any) -> list[str]:
        return [repr(error)]
