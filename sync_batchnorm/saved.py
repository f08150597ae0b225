"""Who saves the inputs and weights of a call for its backward.

NOTE [who saves what]: The node of a call saves the inputs and weights of all replicas, except those of a replica with
hooks on saved tensors: hooks belong to a thread, and activation checkpointing counts what they see. Such a replica
saves its own tensors, in a node that never runs (`_Save`), where the node of the call reads them. Two replicas may each
call `torch.autograd.grad` in their forward; torch frees what a node has saved after the first one. So the first
backward that does not use all replicas gives each of them such a node (`_divide`). From then on, the tensors of a
replica are freed when a backward has used them, and torch itself detects tensors that were freed, or changed in place,
as if each replica had a layer of its own.

NOTE [several backwards at once]: Several replicas may run such backwards in their threads at the same time. Without the
GIL, torch 2.12 guards neither saved tensors nor the Python objects of neighboring nodes: two threads that free or make
them at once crash the process. So both are read only with the lock of the call held. Only the first backward reads the
tensors of the node, and frees them at once: then torch frees nothing, and others read the replicas' nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from sync_batchnorm.places import Place
from sync_batchnorm.recompute import without_hooks
from sync_batchnorm.torch_private import free_saved

__all__: list[str] = []


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, saved: tuple[Tensor | None, ...]) -> Tensor:
        ctx.save_for_backward(*saved)
        return leaf


def save_for_hooks(input: Tensor, weight: Tensor | None) -> Tensor:
    """Save the tensors of one replica in a node of its own, see NOTE [who saves what].

    Returns:
        The output of that node. Up to torch 2.12, the node lives as long as this output.
    """
    leaf = torch.empty(0, device="cpu", requires_grad=True)
    saved: Tensor = _Save.apply(leaf, (input, weight))  # type: ignore[no-untyped-call]
    return saved


class SavedTensors:
    """The inputs and weights of a call.

    Args:
        own: what `save_for_hooks` has returned for each replica; None if the node of the call saves its tensors.
    """

    def __init__(self, own: list[Tensor | None]) -> None:
        self._own: list[Any] = own
        self._divided = False  # whether each replica has a node of its own
        self.lock = Lock()  # see NOTE [several backwards at once]

    def unpack(self, node: Any, pairs: int, of_all: bool) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return the tensors that the node of the call has saved.

        Args:
            node: the `ctx` of its running backward.
            pairs: the number of pairs, which it has saved first.
            of_all: whether this backward uses the tensors of all replicas.

        Returns:
            The pairs, if a graph is recorded; and inputs and weights in turn, unless the replicas' nodes have them.
        """
        with self.lock:
            saved: Sequence[Any] = ()
            graph = torch.is_grad_enabled()
            if graph or not self._divided:
                saved = node.saved_tensors
            if not of_all and not self._divided:
                self._divide(saved[pairs:])
                free_saved(node)
            return saved[:pairs] if graph else (), () if self._divided else saved[pairs:]

    def _divide(self, saved: Sequence[Any]) -> None:
        """Save the tensors of each replica, which the node of the call has saved, in a node of its own."""
        with torch.enable_grad(), without_hooks():  # The hooks of this thread are for what the caller computes.
            for i, before in enumerate(self._own):
                if before is None:
                    self._own[i] = save_for_hooks(*saved[2 * i : 2 * i + 2])
        self._divided = True

    def of_replica(self, i: int, saved: Sequence[Tensor | None], place: Place) -> Sequence[Tensor | None]:
        """Return input and weight of a replica, from the result of `unpack` or from a node of its own."""
        if self._own[i] is None:
            return saved[2 * i : 2 * i + 2]
        with place.entered():  # Hooks may compute to unpack.
            own: Sequence[Tensor | None] = self._own[i].grad_fn.saved_tensors
        return own

    def free(self, i: int) -> None:
        """Free the tensors in a replica's own node after a backward. Torch does not, as that node never runs."""
        if self._own[i] is not None:
            free_saved(self._own[i].grad_fn)
