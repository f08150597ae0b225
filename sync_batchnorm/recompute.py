"""Activation checkpointing: which earlier call of a layer a recomputation repeats.

NOTE [recomputation]: Activation checkpointing calls a layer again in the backward, one replica at a time. Such a call
does not exchange, and is not counted: it repeats an earlier call and uses what that call kept. A call in a backward
that repeats none comes from reentrant checkpointing, which differentiates each replica by itself.

The input does not tell which call is repeated: two calls may have equal inputs in this replica and different ones in a
peer. The frame that torch keeps of each checkpoint does tell. Hooks on saved tensors hold the frame, strongly while the
checkpoint records its forward, weakly while it recomputes. So calls are kept by frame, as long as the frame lives; in
nested checkpoints, by each frame. They are repeated in order, though not always up to the last one.

NOTE [selective checkpoints]: The policy of a selective checkpoint sees every operator of its forward, in a dispatch
mode, and the recomputation must run the same ones. Calls and repeated calls do not: the master computes for all. So the
policy sees no operator of either, and a repeated call is always computed, in one pass over the input.

Frames, hooks, modes and the running backward are private to torch, see NOTE [private names] in `torch_private.py`. If
torch lacks one of them, no call is recalled, and the caller has to do without.
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
        # It is in a tuple: autograd would return a view of a tensor argument, which could not be changed in place.
        return constant[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        raise RuntimeError(DIFFERENTIATED)


def refuse_gradient(constant: Tensor, input: Tensor) -> Tensor:
    """Return `constant` as a function of `input`, as it was in the first call; its backward raises an error."""
    leaf = torch.empty(0, device=input.device, requires_grad=True)  # `input` may need no gradient
    refused: Tensor = _RefuseGradient.apply((constant,), leaf, input)  # type: ignore[no-untyped-call]
    return refused


class _Checkpoints(NamedTuple):
    """The checkpoints that the running code is in."""

    recording: list[Frame]  # those that record, inside of the one that recomputes, if any
    recomputing: tuple[Frame, Hook] | None  # the hook identifies one of the recomputations of a frame


def has_hooks() -> bool:
    """Return whether this thread has hooks on saved tensors; True if torch does not tell."""
    return not TELLS_HOOKS or top_hooks() is not None


@contextmanager
def without_hooks() -> Iterator[list[Hook]]:
    """Run the body without the hooks on saved tensors of this thread; yield their pack hooks, outermost first."""
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
            except ValueError:  # The cell is empty, so this is no hook of torch.
                continue
            if isinstance(held, CheckpointFrame):
                checkpoints.recording.append(held)
            elif isinstance(held, ref) and isinstance(frame := held(), CheckpointFrame):
                checkpoints = _Checkpoints([], (frame, hook))
    return checkpoints


def is_recomputing() -> bool:
    """Return whether this thread recomputes a checkpoint that is not reentrant, as far as torch tells."""
    return _checkpoints().recomputing is not None


def keep(owner: object, make_result: Callable[[], Any]) -> None:
    """Keep the result of a call for its recomputation, if a checkpoint records it.

    Args:
        owner: the object that makes these calls, compared by identity.
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
