"""Random numbers of replicas that share a generator: a warning where a recomputation may draw them again.

Torch has one generator for each device. The threads of replicas on one device draw from it in any order, and activation
checkpointing remembers the state that it has when a function begins: not where the draws of that replica begin among
those of the others. Nothing of torch's operators tells who draws, so replicas cannot be given generators of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sync_batchnorm import recompute

__all__: list[str] = []

_CPU = torch.device("cpu")


@contextmanager
def watched(devices: Sequence[torch.device]) -> Iterator[None]:
    """Run the body, which calls one replica on each of `devices`, and warn if they draw where they are checkpointed."""
    if not torch.is_grad_enabled() or len(devices) < 2:
        yield
        return
    # All threads share the generator of the CPU, wherever their replicas compute.
    shared = list(dict.fromkeys([_CPU, *[device for device in devices if devices.count(device) > 1]]))
    states, around, known = [_state(device) for device in shared], recompute.is_recording(), recompute.recorded()
    yield
    drawn = [
        str(device) for device, state in zip(shared, states, strict=True) if not torch.equal(_state(device), state)
    ]
    if drawn and (around or recompute.recorded() - known):
        warnings.warn(
            "expected a random generator for each replica in a forward with activation checkpointing, but got draws "
            f"of {len(devices)} replicas from the one of {' and '.join(drawn)}; a checkpointed function that draws, as "
            "dropout does, draws other numbers when it is recomputed, and its gradients are wrong, so keep draws out "
            "of checkpointed functions (whether these were inside of one cannot be told), or give every replica a "
            "device of its own",
            stacklevel=12,
        )


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
