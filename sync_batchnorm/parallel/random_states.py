"""A random state for each replica of those that share a device, whose threads would draw from one generator.

NOTE [one state at a time]: Torch holds the lock of a generator while it makes the tensor of a state. If the garbage
collector runs there, it may hand the interpreter lock to another thread, and if that thread waits for the same
generator, neither goes on (torch 2.13).
"""

from collections.abc import Iterable, Mapping
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
        self._generators = {replica_id: _generators(device) for replica_id, device in devices.items()}
        distinct = dict.fromkeys([generator for own in self._generators.values() for generator in own])
        self._of_caller = dict(zip(distinct, _read(distinct), strict=True))
        self._next = torch.Generator()
        self._next.set_state(self._of_caller[torch.default_generator])
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._next))
        self._at_first: dict[int, list[Tensor]] = {
            replica_id: [torch.Generator(g.device).manual_seed(seed + replica_id).get_state() for g in generators]
            for replica_id, generators in self._generators.items()
        }
        self._states = dict(self._at_first)

    def save(self, replica_id: int) -> None:
        """Keep the state of a replica, at the end of its turn."""
        self._states[replica_id] = _read(self._generators[replica_id])

    def restore(self, replica_id: int) -> None:
        """Bring the state of a replica back, at the beginning of its turn."""
        _write(self._generators[replica_id], self._states[replica_id])

    def restore_caller(self) -> None:
        """Bring the state of the caller back, after all turns."""
        _write(self._of_caller, self._of_caller.values())
        if any(not all(map(torch.equal, states, self._at_first[i])) for i, states in self._states.items()):
            _write([torch.default_generator], [self._next.get_state()])


def _read(generators: Iterable[Any]) -> list[Tensor]:
    with _lock:
        return [generator.get_state() for generator in generators]


def _write(generators: Iterable[Any], states: Iterable[Tensor]) -> None:
    with _lock:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[Any]:
    """Return the generators that code on `device` draws from by default; the CPU's module has no list of them."""
    index = device.index or 0
    others = getattr(torch.get_device_module(device), "default_generators", ())
    return [torch.default_generator, *others[index : index + 1]]
