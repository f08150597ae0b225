"""Give each replica its own states of the random generators, if replicas share a device.

The problem: replicas on one device draw random numbers from the same generator. So the numbers of a replica would
depend on the draws of the other replicas. An activation checkpoint would fail, too: it recomputes a part of the forward
pass from a saved state of the generator, but without the draws of other replicas that came in between.

The obvious way is a generator for each replica. It fails, because functions such as dropout always use the default
generator. In our way, replicas share the default generator, but each replica has its own state of it. This works
because replicas on one device run one at a time. Whenever another replica begins to run, the default generator gets the
state of this replica:

    generator    caller | replica 0 | replica 1 | replica 0 | caller
    states         c    |    s0     |    s1     |    s0'    |   c'

Here, c is the state of the caller's generator before the forward pass, and c' its state afterwards. If any replica drew
random numbers, c' is one random number ahead of c. Otherwise c' is equal to c.

NOTE [one state at a time]: Torch holds the lock of a random generator while it copies the state of the generator into a
tensor. The garbage collector may run at this point, and release the GIL to another thread. If the other thread waits
for the lock of the same generator, both threads wait forever (torch 2.13). So all reads and writes of generator states
happen under a lock of ours.
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
    """The states of random generators for replicas that run one at a time.

    Each replica has a state of its own for the generator of the CPU, and another for the generator of its device.

    The states of the replicas are seeded with the next random number from the caller's CPU generator. If any replica
    draws random numbers, the caller's generator afterwards advances by this single number. If no replica draws, the
    caller's generator keeps its state, as it would on one device.
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
        # The number of the replica that ran last. The default generators still contain the states of this replica.
        self._last: int | None = None

    def begin_turn(self, number: int) -> None:
        """Set the default generators to the states of replica `number`, which begins to run.

        First save the present states of the default generators: they belong to the replica that ran last.
        """
        with _lock:
            self._save_states()
            for generator, state in zip(self._generators[number], self._states[number], strict=True):
                generator.set_state(state)
            self._last = number

    def restore_caller(self, completed: bool = True) -> None:
        """After all replicas have run, set the default generators to the caller's states from before the forward pass.

        If a replica drew random numbers, the state of the caller's CPU generator advances by one number. It does not
        advance if the forward pass was aborted (`completed` is false).
        """
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
    """Return the default random generators for code on `device`: the CPU's generator, then the accelerator's."""
    index = device.index or 0
    others = getattr(torch.get_device_module(device), "default_generators", ())
    return [torch.default_generator, *others[index : index + 1]]
