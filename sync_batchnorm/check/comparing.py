"""Comparing, zero where only rounding differs: tensors, trees, and the calls of modules.

One device comes first and keeps what goes into its modules and comes out. Replicas keep nothing: each of their calls is
compared with that of one device as it ends. What all replicas have been compared with is dropped, except for suspects.
"""

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, unpack_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from ..trees import children_of, leaves_of, named_leaves, with_leaves
from .twin import CheckMode, ModuleCall, Rows

__all__: list[str] = []

LEAST = 1e-6  # Smaller values are compared as if they were this large. Arbitrary.
NOT_FINITE = 1e99  # the gap where only one of two numbers is finite
SCALARS = (bool, int, float, str)


WHOLE = Rows(range(1), 1)


def tolerance_of(tensor: Tensor) -> float:
    """Return the largest difference that is none, relative to the largest value."""
    return 1e-4 if tensor.dtype in (torch.float32, torch.complex64) else 1e-6


def gap(actual: Tensor, expected: Tensor, size: float = LEAST, rounding: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value or `size`: 0.0 if small, infinite for other shapes.

    Two NaN agree. What differs by no more than `rounding` is equal.
    """
    if actual.shape != expected.shape:
        return math.inf
    tolerance = tolerance_of(expected)
    values, right = numbers_of(actual), numbers_of(expected)
    if not math.isfinite(difference := _largest(values - right)):
        equal = values.isclose(right, rtol=0.0, atol=0.0, equal_nan=True)
        difference = _largest((values - right).nan_to_num(NOT_FINITE, NOT_FINITE, -NOT_FINITE).masked_fill(equal, 0))
    if difference <= max(rounding, tolerance * size):  # which is so for most, and saves a look at the values
        return 0.0
    relative = difference / max(size, largest(expected))
    return relative if relative > tolerance else 0.0


def format_gap(by: float, actual: Tensor, expected: Tensor) -> str:
    """Return how much the gap between two tensors is, in words."""
    if by == math.inf:
        return "in its shape"
    if by >= NOT_FINITE:
        return "as only one of them is finite"
    if by < 10:
        return f"by {by:.2g} of its largest value"
    return f"by values up to {largest(actual):.2g} in place of {largest(expected):.2g}"  # which may be zero


def largest(*tensors: Tensor) -> float:
    """Return the largest finite absolute value."""
    return max([_largest(numbers_of(tensor).nan_to_num(0.0, 0.0, 0.0)) for tensor in tensors], default=0.0)


def numbers_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in float64; complex ones as pairs."""
    tensor = tensor.detach().to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).to(torch.float64)


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute value, NaN if there is one."""
    return float(torch.linalg.vector_norm(numbers, math.inf)) if numbers.numel() else 0.0


def chunk_of(whole: Tensor, chunk: Tensor, rows: Rows) -> Tensor:
    """Return the rows of a chunk, in the layout that is nearer to `chunk`.

    They lie in one block, or in each of several, as those of two views in one batch.
    """
    if rows == WHOLE:
        return whole
    return min(
        (_samples_of(whole, chunk, rows, shape) for shape in ((rows.total, -1), (-1, rows.total))),
        key=partial(gap, chunk),
    )


def _samples_of(whole: Tensor, chunk: Tensor, rows: Rows, shape: tuple[int, int]) -> Tensor:
    """Return the samples of a chunk; `shape` has those of a dimension in its rows, or in each of its rows."""
    for dim in dims_of_samples(whole, chunk, rows):
        index = torch.arange(whole.shape[dim]).reshape(shape)
        index = index[:, rows.here] if shape[0] == -1 else index[rows.here]
        whole = whole.index_select(dim, index.flatten())
    return whole


def dims_of_samples(whole: Tensor, chunk: Tensor, rows: Rows) -> list[int]:
    """Return the dimensions whose sizes are in proportion to those of `rows`, in a similarity matrix two."""
    here, total = len(rows.here), rows.total
    sizes = enumerate(zip(chunk.shape, whole.shape, strict=False))
    return [dim for dim, (size, of_all) in sizes if size * total == here * of_all and of_all and of_all % total == 0]


def leaves_by_path(actual: Any, expected: Any, rows: Rows) -> Iterator[tuple[Any, Any]]:
    """Yield what two trees have in the same places; raise a LookupError for other structures.

    A list with an item for each sample is cut to those of `rows`.
    """
    some, all_ = children_of(actual), children_of(expected)
    if not some and not all_:
        yield actual, expected
    if (len(some), len(all_)) == (len(rows.here), rows.total):
        all_ = dict(zip(some, list(all_.values())[rows.here.start :], strict=False))
    if some.keys() != all_.keys():
        raise LookupError
    for key, child in some.items():
        yield from leaves_by_path(child, all_[key], rows)


def agree(actual: Any, expected: Any, rows: Rows = WHOLE) -> bool:
    """Return whether two trees have the same tensors, numbers, flags and strings."""
    with suppress(LookupError):
        return all(_leaves_agree(*leaves, rows) for leaves in leaves_by_path(actual, expected, rows))
    return False


def _leaves_agree(actual: Any, expected: Any, rows: Rows) -> bool:
    if isinstance(actual, float) and isinstance(expected, float):
        actual, expected = (torch.tensor(number, dtype=torch.float64) for number in (actual, expected))
    if any(isinstance(actual, kind) != isinstance(expected, kind) for kind in (Tensor, PackedSequence, SCALARS)):
        return False
    if isinstance(actual, Tensor):
        return not gap(actual, chunk_of(expected, actual, rows))
    if isinstance(actual, PackedSequence):  # in which the rows of samples are mixed
        return agree(unpack_sequence(actual), unpack_sequence(expected), rows)
    return not isinstance(actual, SCALARS) or bool(actual == expected)


def mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a tree with what a function returns for each tensor."""
    return with_leaves(tree, iter([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(tree)]))


class RecordMode(CheckMode):
    """Keeps what goes into each call and comes out, until all replicas have been compared with it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.calls: dict[tuple[str, int], ModuleCall] = {}  # by their ends
        # The version and the copy of each tensor, as long as that lives, in the forward pass.
        self._copies: MutableMapping[Tensor, tuple[int | None, Tensor]] = WeakTensorKeyDictionary()

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        call.arguments = mapped(arguments, self._copy)

    def end(self, call: ModuleCall, output: Any) -> None:
        call.output = mapped(output, self._copy)
        self.calls[call.key] = call

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, the same one until the tensor is changed in place."""
        version = None if tensor.is_inference() else tensor._version
        if version is None or tensor not in self._copies or self._copies[tensor][0] != version:
            self._copies[tensor] = version, tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self._copies[tensor][1]


class CompareMode(CheckMode):
    """Compares each call in a replica with that on one device."""

    def __init__(self, one: RecordMode, number: int, rows: Sequence[Rows], model: nn.Module) -> None:
        super().__init__(one.dtype)
        self._one, self._number, self._rows, self._model = one, number, rows, model  # the copy that has replicas
        self.gets_other: ModuleCall | None = None  # the first call that does not get what it gets on one device

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        on_one = self._one.calls.get(call.key)
        call.agrees = on_one is not None and agree(arguments, on_one.arguments, self._rows[self._number])
        # In containers of its own, without a graph.
        call.arguments = mapped(arguments, Tensor.detach) if call.agrees else None
        self.gets_other = self.gets_other or (None if call.agrees else call)

    def end(self, call: ModuleCall, output: Any) -> None:
        on_one = self._one.calls.get(call.key)
        if on_one is None:
            return
        names = {id(leaf): name for name, leaf in named_leaves(output, "output")}
        for actual, right in compared(output, on_one.output, self._rows[self._number]):
            if (by := gap(actual, right)) > call.gap:
                call.gap, call.part, call.how = by, names[id(actual)], format_gap(by, actual, right)
        call.module, call.number, call.arguments = None, self._number, call.arguments if call.gap else None
        on_one.in_replicas.append(call)
        if len(on_one.in_replicas) == len(self._rows) and not suspects_in(on_one, self._model):
            del self._one.calls[call.key]


class PatchMode(CheckMode):
    """Lets one call in a replica return what it returns on one device."""

    def __init__(self, dtype: torch.dtype, on_one: ModuleCall, rows: Rows) -> None:
        super().__init__(dtype)
        self._on_one, self._rows = on_one, rows

    def end(self, call: ModuleCall, output: Any) -> Any:
        pairs = compared(output, self._on_one.output, self._rows) if call.key == self._on_one.key else ()
        right = {id(actual): corrected(actual, right) for actual, right in pairs if gap(actual, right)}
        return mapped(output, lambda actual: right.get(id(actual), actual)) if right else None


def suspects_in(call: ModuleCall, model: nn.Module) -> list[ModuleCall]:
    """Return where a call gets what it gets on one device, and returns something else; `model` has replicas.

    What a layer that synchronizes returns depends on what it gets in all replicas.
    """
    modules = model.get_submodule(call.key[0]).modules()
    synchronizes = any(hasattr(module, "__data_parallel_replicate__") for module in modules)
    if synchronizes and not all(other.agrees for other in call.in_replicas):
        return []
    # They have ended in any order.
    return sorted([other for other in call.in_replicas if other.agrees and other.gap], key=lambda other: other.number)


def compared(output: Any, on_one: Any, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of an output, and what its rows are on one device; not numbers and selections."""
    with suppress(LookupError):
        for actual, whole in list(leaves_by_path(output, on_one, rows)):
            if not isinstance(actual, Tensor) or not isinstance(whole, Tensor) or whole.numel() == 1:
                continue  # The loss of a replica is no chunk.
            right = chunk_of(whole, actual, rows)
            if fits(actual, right):
                yield actual, right


def fits(actual: Tensor, right: Tensor) -> bool:
    """Return whether two tensors can be compared: a padded one can, one with as many rows as values say cannot."""
    return actual.shape == right.shape or (actual.dim() == right.dim() > 1 and len(actual) == len(right))


def corrected(actual: Tensor, right: Tensor) -> Tensor:
    """Return the right output, with the gradient of the one that it replaces."""
    corrected = right.clone()
    if actual.requires_grad and bool(actual.isfinite().all()):  # Its shape differs where it is padded.
        corrected[tuple(map(slice, actual.shape))] += (actual - actual.detach())[tuple(map(slice, right.shape))]
    return corrected
