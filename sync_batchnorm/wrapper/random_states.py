"""Give each replica random states of its own, if replicas share a device.

The problem: threads on one device draw from one generator, so the numbers of a replica would depend on the draws of the
others. A checkpoint that restores the generator and recomputes would draw other numbers than its forward pass.

The obvious way is a generator for each replica. It fails: functions such as dropout take no generator, they use the
default one. Our way: such replicas take turns anyway, so each turn begins with an exchange of the default generator's
state.

    generator    caller | replica 0 | replica 1 | replica 0 | caller
    states         c    |    s0     |    s1     |    s0'    |  c', the next state after c if any replica drew

NOTE [one state at a time]: Torch holds the lock of a generator while it makes the tensor of a state. The garbage
collector may run at this point and hand the interpreter lock to another thread. If that thread waits for the lock of
the generator, both wait forever (torch 2.13). So one lock of ours surrounds all reads and writes of states.
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
    """The random states of replicas that take turns: each replica's for the CPU and for its device.

    They are seeded with the next number from the caller's CPU generator. If any replica draws, this generator advances
    by that single number, however many numbers the replicas draw. If no replica draws, it stays, as on one device.
    """

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        self._generators = {number: _generators(device) for number, device in devices.items()}
        with _lock:
            distinct = dict.fromkeys(chain.from_iterable(self._generators.values()))
            self._caller_states = {generator: generator.get_state() for generator in distinct}
        self._next = torch.Generator()
        self._next.set_state(self._caller_states[torch.default_generator])
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._next))
        self._initial_states: dict[int, list[Tensor]] = {
            number: [torch.Generator(g.device).manual_seed(seed + number).get_state() for g in generators]
            for number, generators in self._generators.items()
        }
        self._states = dict(self._initial_states)
        self._last: int | None = None  # the replica with the last turn: the generators hold its states

    def begin_turn(self, number: int) -> None:
        """Save the states of the replica with the last turn, and set the states of replica `number`."""
        with _lock:
            self._save_states()
            for generator, state in zip(self._generators[number], self._states[number], strict=True):
                generator.set_state(state)
            self._last = number

    def restore_caller(self, completed: bool = True) -> None:
        """Restore the caller's states after all turns; advance them if a replica drew, unless the pass was aborted."""
        with _lock:
            if completed:
                self._save_states()
                if not all([all(map(torch.equal, self._states[i], old)) for i, old in self._initial_states.items()]):
                    self._caller_states[torch.default_generator] = self._next.get_state()
            for generator, state in self._caller_states.items():
                generator.set_state(state)

    def _save_states(self) -> None:
        if self._last is not None:
            self._states[self._last] = list(map(torch.Generator.get_state, self._generators[self._last]))


def _generators(device: torch.device) -> list[Any]:
    """Return the default generators for code on `device`: the CPU's, then the accelerator's."""
    index = device.index or 0
    others = getattr(torch.get_device_module(device), "default_generators", ())
    return [torch.default_generator, *others[index : index + 1]]
