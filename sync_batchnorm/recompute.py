"""Activation checkpointing: which earlier call of a layer a recomputation repeats.

NOTE [recomputation]: Activation checkpointing calls a layer again in the backward, one replica at a time. There is
no exchange then, and nothing to count: the call repeats an earlier one and takes over what that one kept. A call in
a running backward that repeats none is one of reentrant checkpointing, which differentiates each replica by itself.

The input does not tell which call is repeated: two calls may have equal inputs in this replica and different ones in a
peer. The frame that torch keeps of each checkpoint does. Hooks on saved tensors hold it, strongly while the checkpoint
records its forward, weakly while it recomputes. So calls are kept by frame, for as long as that lives: by each of them,
where they are nested. They are repeated in order, though not always to the last.

NOTE [selective checkpoints]: A policy of what to save sees every operator of a checkpointed forward, through a dispatch
mode, and its recomputation must run the same ones. Calls and repeated calls do not: the master computes for all. So the
policy sees nothing of either, and a repeated call is always computed, in one pass over the input.

Frames, hooks, modes and the running backward are private to torch, see NOTE [private names]. Where they are not found,
nothing is recalled, and the caller has to do without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from sync_batchnorm.torch_private import (
    POLICY_TYPES,
    TELLS_HOOKS,
    CheckpointFrame,
    pop_hooks,
    push_hooks,
    replace_modes,
    top_hooks,
)

__all__: list[str] = []

DIFFERENTIATED = (
    "expected a checkpointed function that takes no gradient through a synchronized batch norm, but got one that does, "
    "which a recomputation in one replica cannot repeat; take that gradient outside of the checkpoint"
)

P = ParamSpec("P")
R = TypeVar("R")
Frame = Any  # a `CheckpointFrame`
Hook = Callable[[Tensor], Any]

_kept: WeakKeyDictionary[Frame, list[tuple[Any, Any]]] = WeakKeyDictionary()  # owner and result of each call
_repeated: WeakKeyDictionary[Hook, list[Any]] = WeakKeyDictionary()  # owners of the calls of each recomputation


class _RefuseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, constant: tuple[Tensor], *_: Tensor) -> Tensor:
        # In a tuple: an argument that is returned would be a view, which cannot be changed in place.
        return constant[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        raise RuntimeError(DIFFERENTIATED)


def refuse_gradient(constant: Tensor, input: Tensor) -> Tensor:
    """Return `constant` as what it was in the first call, a function of `input`, whose gradient is refused."""
    leaf = torch.empty(0, device=input.device, requires_grad=True)  # `input` may need no gradient
    refused: Tensor = _RefuseGradient.apply((constant,), leaf, input)  # type: ignore[no-untyped-call]
    return refused


class _Checkpoints(NamedTuple):
    """The checkpoints that the running code is in."""

    recording: list[Frame]  # inside of the one that recomputes, if any
    recomputing: tuple[Frame, Hook] | None  # the hook stands for this time, as there may be several of one frame


def has_hooks() -> bool:
    """Return whether hooks on saved tensors are set in this thread; also if that cannot be told."""
    return not TELLS_HOOKS or top_hooks() is not None


@contextmanager
def without_hooks() -> Iterator[list[Hook]]:
    """Run the body without the hooks on saved tensors of this thread; give it those that pack, outermost first."""
    pairs: list[tuple[Hook, Any]] = []
    try:
        while (pair := top_hooks()) is not None:
            pairs.insert(0, pair)
            pop_hooks()
        yield [pack for pack, _ in pairs]
    finally:
        for pack, unpack in pairs:
            push_hooks(pack, unpack)


@contextmanager
def without_policies() -> Iterator[None]:
    """Run the body such that no selective checkpoint sees its operators, see NOTE [selective checkpoints]."""
    modes = replace_modes(())
    others = [mode for mode in modes if not isinstance(mode, POLICY_TYPES)]
    try:
        replace_modes(others)
        yield
    finally:
        replace_modes(modes)


def _checkpoints() -> _Checkpoints:
    checkpoints = _Checkpoints([], None)
    with without_hooks() as hooks:
        pass
    for hook in hooks:
        for cell in getattr(inspect.unwrap(hook), "__closure__", None) or ():
            try:
                held = cell.cell_contents
            except ValueError:  # The cell is empty, as in no hook of torch.
                continue
            if isinstance(held, CheckpointFrame):
                checkpoints.recording.append(held)
            elif isinstance(held, ref) and isinstance(frame := held(), CheckpointFrame):
                checkpoints = _Checkpoints([], (frame, hook))
    return checkpoints


def is_recomputing() -> bool:
    """Return whether this thread recomputes a checkpoint that is not reentrant, as far as that can be told."""
    return _checkpoints().recomputing is not None


def keep(owner: object, make_result: Callable[[], Any]) -> None:
    """Keep the result of a call for its recomputation, if a checkpoint records it.

    Args:
        owner: whose calls these are: compared by identity.
        make_result: makes the result, without a graph: a graph would keep itself alive through its checkpoint.
    """
    recording = _checkpoints().recording
    if recording:
        result = make_result()
        for frame in recording:
            _kept.setdefault(frame, []).append((owner, result))


def recall(owner: object) -> Any:
    """Return the result of the call of `owner` that the running recomputation repeats; None if there is none."""
    recomputing = _checkpoints().recomputing
    if recomputing is None:
        return None
    frame, hook = recomputing
    results = [result for caller, result in _kept.get(frame, ()) if caller is owner]
    repeated = _repeated.setdefault(hook, [])
    number = sum(caller is owner for caller in repeated)
    if number >= len(results):
        return None
    repeated.append(owner)
    return results[number]
