"""A pass recorded at the borders of modules: which calls get what they get on one device, and return something else.

One device comes first and keeps what goes into its modules and comes out. Replicas keep nothing: each of their calls is
compared with that of one device as it ends. What all replicas have been compared with is dropped, except for suspects.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..wrapper import leaves_of, with_leaves
from .comparing import Rows, agree, chunk_of, gap, leaves_by_path
from .copies import Call, CallKey, InDouble

__all__: list[str] = []


class OneDevice(InDouble):
    """Keeps what goes into each call and comes out, until all replicas have been compared with it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.calls: dict[CallKey, Call] = {}  # by their ends
        self._copies: dict[int, tuple[Any, int | None, Tensor]] = {}  # by the id of a tensor, with it and its version

    def begin(self, call: Call, arguments: Any) -> None:
        call.arguments = self._copied(arguments)

    def end(self, call: Call, output: Any) -> None:
        call.output = self._copied(output)
        self.calls[call.key] = call

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._copies.clear()

    def _copied(self, tree: Any) -> Any:
        return with_leaves(tree, iter([self._copy(x) if isinstance(x, Tensor) else x for x in leaves_of(tree)]))

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, the same one until the tensor is changed in place."""
        version = None if tensor.is_inference() else tensor._version
        reference, version_then, copied = self._copies.get(id(tensor), (lambda: None, None, tensor))
        if reference() is not tensor or version is None or version != version_then:
            copied = tensor.detach().clone()
            self._copies[id(tensor)] = weakref.ref(tensor), version, copied
        return copied


class Compared(InDouble):
    """Compares each call in a replica with that on one device."""

    def __init__(self, one: OneDevice, replica: int, rows: Sequence[Rows], model: nn.Module) -> None:
        super().__init__(one.dtype)
        self._one, self._replica, self._rows, self._replicas = one, replica, rows[replica], len(rows)
        self._model = model  # the copy that has replicas

    def begin(self, call: Call, arguments: Any) -> None:
        on_one = self._one.calls.get(call.key)
        if on_one is not None and on_one.arguments is not None:
            call.agrees = agree(arguments, on_one.arguments, self._rows)
            if call.agrees:
                leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(arguments)]
                call.arguments = with_leaves(arguments, iter(leaves))  # in containers of its own, without a graph

    def end(self, call: Call, output: Any) -> None:
        on_one = self._one.calls.get(call.key)
        if on_one is None or on_one.arguments is None:
            return
        for actual, right in _compared(output, on_one.output, self._rows):
            if (by := gap(actual, right)) > call.gap:
                call.gap, call.where = by, _rows_that_differ(actual, right, self._rows.number)
        call.module, call.replica, call.arguments = None, self._replica, call.arguments if call.gap else None
        on_one.in_replicas.append(call)
        is_compared = len(on_one.in_replicas) == self._replicas
        if is_compared and not suspects_in(on_one, self._model):
            on_one.arguments = on_one.output = None


class Corrected(InDouble):
    """Lets one call in a replica return what it returns on one device."""

    def __init__(self, dtype: torch.dtype, on_one: Call, rows: Rows) -> None:
        super().__init__(dtype)
        self._on_one, self._rows = on_one, rows

    def end(self, call: Call, output: Any) -> Any:
        if call.key != self._on_one.key:
            return None
        right = {id(actual): right for actual, right in _compared(output, self._on_one.output, self._rows)}
        return with_leaves(output, iter([_corrected(leaf, right.get(id(leaf))) for leaf in leaves_of(output)]))


def suspects_in(call: Call, model: nn.Module) -> list[Call]:
    """Return where a call gets what it gets on one device, and returns something else; `model` has replicas.

    What a layer that synchronizes returns depends on what it gets in all replicas.
    """
    modules = dict(model.named_modules())[call.key[0]].modules()
    synchronizes = any(hasattr(module, "__data_parallel_replicate__") for module in modules)
    if synchronizes and not all(found.agrees for found in call.in_replicas):
        return []
    suspects = [found for found in call.in_replicas if found.agrees and found.gap]
    return sorted(suspects, key=lambda found: found.replica)  # They have ended in any order.


def _compared(output: Any, on_one: Any, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of an output, and what its rows are on one device; not numbers and selections."""
    try:
        pairs = list(leaves_by_path(output, on_one, rows))
    except LookupError:
        return
    for actual, whole in pairs:
        if not isinstance(actual, Tensor) or not isinstance(whole, Tensor) or whole.numel() == 1:  # a replica's loss
            continue
        right = chunk_of(whole, actual, rows)
        # What has as many rows as its values say, as x[x > 0], says nothing; what is padded does.
        is_padded = actual.dim() == right.dim() > 1 and len(actual) == len(right)
        if actual.shape == right.shape or is_padded:
            yield actual, right


def _rows_that_differ(actual: Tensor, right: Tensor, number: int) -> list[int]:
    """Return which samples of a replica differ; none if its first dimension is not that of samples."""
    if actual.shape != right.shape or not actual.dim() or len(actual) != number:
        return []
    return [i for i in range(number) if gap(actual[i], right[i])]


def _corrected(actual: Any, right: Tensor | None) -> Any:
    """Return the right output, with the gradient of the one that it replaces."""
    if right is None or (actual.shape == right.shape and not gap(actual, right)):
        return actual
    if actual.shape == right.shape and actual.is_floating_point() and bool(actual.isfinite().all()):
        return actual + (right - actual).detach()
    return right.clone()
