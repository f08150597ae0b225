"""A random state for each replica of those that share a device, whose threads would draw from one generator.

NOTE [one state at a time]: Torch holds the lock of a generator while it makes the tensor of a state. If the garbage
collector runs there, it may hand the interpreter lock to another thread, and if that thread waits for the same
generator, neither goes on (torch 2.13).
"""

from collections.abc import Mapping
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

_lock = RLock()  # see NOTE [one state at a time]


class RandomStates:
    """The random states of replicas that take turns: that of the CPU, and that of the device of each.

    The seed of all is what the caller's generator for the CPU would draw next. If a replica draws, this generator moves
    on by that one number, however many the replicas draw; otherwise it stays as it is, as on one device.
    """

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        self._generators = {number: _generators(device) for number, device in devices.items()}
        with _lock:
            distinct = dict.fromkeys(chain.from_iterable(self._generators.values()))
            self._of_caller = {generator: generator.get_state() for generator in distinct}
        self._next = torch.Generator()
        self._next.set_state(self._of_caller[torch.default_generator])
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._next))
        self._at_first: dict[int, list[Tensor]] = {
            number: [torch.Generator(g.device).manual_seed(seed + number).get_state() for g in generators]
            for number, generators in self._generators.items()
        }
        self._states = dict(self._at_first)
        self._last: int | None = None  # whose states the generators have

    def begin_turn(self, number: int) -> None:
        """Give the generators the states of a replica, and keep those of the one that had the last turn."""
        with _lock:
            self._keep_states()
            for generator, state in zip(self._generators[number], self._states[number], strict=True):
                generator.set_state(state)
            self._last = number

    def restore_caller(self, completed: bool = True) -> None:
        """Bring the states of the caller back, after all turns; after a forward that was aborted, just as they were."""
        with _lock:
            if completed:
                self._keep_states()
                if not all([all(map(torch.equal, self._states[i], first)) for i, first in self._at_first.items()]):
                    self._of_caller[torch.default_generator] = self._next.get_state()
            for generator, state in self._of_caller.items():
                generator.set_state(state)

    def _keep_states(self) -> None:
        if self._last is not None:
            self._states[self._last] = list(map(torch.Generator.get_state, self._generators[self._last]))


def _generators(device: torch.device) -> list[Any]:
    """Return the default generators that code on `device` draws from: that of the CPU, and that of an accelerator."""
    index = device.index or 0
    others = getattr(torch.get_device_module(device), "default_generators", ())
    return [torch.default_generator, *others[index : index + 1]]
