"""Compare tensors, trees and module calls in replicas with one device, up to rounding.

Keeping the inputs and outputs of all module calls in all replicas would take too much memory. Therefore one device runs
first and records them. Replicas record nothing: each of their calls is compared as it ends. A record is dropped once
all replicas have been compared with it, unless one of them is a suspect.
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

from ..trees import children_of, is_sequence_type, leaves_of, named_leaves, with_leaves
from .twin import CheckMode, ModuleCall, Rows

__all__: list[str] = []

LEAST = 1e-6  # Smallest size in a relative gap: tinier tensors are compared as if they were this large. Arbitrary.
NOT_FINITE = 1e99  # gap if only one of two numbers is finite
SCALARS = (bool, int, float, str)
WHOLE = Rows(range(1), 1)


def tolerance_of(tensor: Tensor) -> float:
    """Return the relative tolerance of a dtype: gaps up to it count as zero."""
    return 1e-4 if tensor.dtype in (torch.float32, torch.complex64) else 1e-6


def gap(actual: Tensor, expected: Tensor, size: float = LEAST, rounding: float = 0.0) -> float:
    """Return the largest absolute difference divided by the largest expected value.

    Differences within the tolerance, or up to `rounding`, give 0.0. Different shapes give infinity. Two NaN are equal.

    Args:
        actual, expected: the tensors.
        size: lower bound of the divisor.
        rounding: largest absolute difference that counts as rounding.
    """
    if actual.shape != expected.shape:
        return math.inf
    tolerance = tolerance_of(expected)
    values, right = numbers_of(actual), numbers_of(expected)
    if not math.isfinite(difference := _largest(values - right)):
        equal = values.isclose(right, rtol=0.0, atol=0.0, equal_nan=True)
        difference = _largest((values - right).nan_to_num(NOT_FINITE, NOT_FINITE, -NOT_FINITE).masked_fill(equal, 0))
    if difference <= max(rounding, tolerance * size):  # The common case. It saves the search for the largest value.
        return 0.0
    relative = difference / max(size, largest(expected))
    return relative if relative > tolerance else 0.0


def format_gap(by: float, actual: Tensor, expected: Tensor) -> str:
    """Describe the gap between two tensors in words."""
    if by == math.inf:
        return "in its shape"
    if by >= NOT_FINITE:
        return "as only one of them is finite"
    if by < 10:
        return f"by {by:.2g} of its largest value"
    return f"by values up to {largest(actual):.2g} in place of {largest(expected):.2g}"


def largest(*tensors: Tensor) -> float:
    """Return the largest finite absolute value."""
    return max([_largest(numbers_of(tensor).nan_to_num(0.0, 0.0, 0.0)) for tensor in tensors], default=0.0)


def numbers_of(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64. Complex numbers become pairs."""
    tensor = tensor.detach().to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).to(torch.float64)


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute value, or NaN if the tensor contains NaN."""
    return float(torch.linalg.vector_norm(numbers, math.inf)) if numbers.numel() else 0.0


def chunk_of(whole: Tensor, chunk: Tensor, rows: Rows) -> Tensor:
    """Return the rows of a chunk from a tensor of the whole batch.

    Samples may form one block, or several (`torch.cat([view1, view2])`). The layout nearer to `chunk` is taken:

        rows 1 and 2 of 4, one block     a b c d          ->  b c
        rows 1 and 2 of 4, two blocks    a b c d A B C D  ->  b c B C
    """
    if rows == WHOLE:
        return whole
    return min(
        (_samples_of(whole, chunk, rows, shape) for shape in ((rows.total, -1), (-1, rows.total))),
        key=partial(gap, chunk),
    )


def _samples_of(whole: Tensor, chunk: Tensor, rows: Rows, shape: tuple[int, int]) -> Tensor:
    """Select the samples of a chunk in each sample dimension.

    `shape` is the layout of such a dimension: (total, -1) if each sample has a block of adjacent entries, or
    (-1, total) if blocks of all samples follow one another.
    """
    for dim in dims_of_samples(whole, chunk, rows):
        index = torch.arange(whole.shape[dim]).reshape(shape)
        index = index[:, rows.here] if shape[0] == -1 else index[rows.here]
        whole = whole.index_select(dim, index.flatten())
    return whole


def dims_of_samples(whole: Tensor, chunk: Tensor, rows: Rows) -> list[int]:
    """Return the sample dimensions: their sizes are proportional to the rows. A similarity matrix has two."""
    here, total = len(rows.here), rows.total
    sizes = enumerate(zip(chunk.shape, whole.shape, strict=False))
    return [dim for dim, (size, of_all) in sizes if size * total == here * of_all and of_all and of_all % total == 0]


def leaves_by_path(actual: Any, expected: Any, rows: Rows) -> Iterator[tuple[Any, Any]]:
    """Yield (actual leaf, expected leaf) for two trees.

    A list with an entry for each sample is sliced to `rows`.

    Raises:
        LookupError: if the structures differ.
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
    """Return whether two trees have equal tensors, numbers, flags and strings."""
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
    if isinstance(actual, PackedSequence):  # Its data interleave the samples.
        return agree(unpack_sequence(actual), unpack_sequence(expected), rows)
    return not isinstance(actual, SCALARS) or bool(actual == expected)


def mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to each tensor of a tree."""
    return with_leaves(tree, iter([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(tree)]))


def as_dicts(tree: Any, function: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Convert a tree to nested dictionaries and apply a function to each tensor.

    A slice becomes the dictionary of its start, stop and step.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):
        return PackedSequence(function(tree.data), *tree[1:])
    children = children_of((tree.start, tree.stop, tree.step) if isinstance(tree, slice) else tree)
    return {key: as_dicts(child, function) for key, child in children.items()} if children else tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree in order, and those of packed sequences."""
    if isinstance(tree, (Tensor, PackedSequence)):
        return [tree if isinstance(tree, Tensor) else tree.data]
    return [tensor for child in children_of(tree).values() for tensor in tensors_of(child)]


def reaches_whole(argument: Any, on_one: Any, total: int) -> bool:
    """Return whether a replica gets a whole list or tensor with an entry for each sample, also inside of containers.

    A list of tensors does not count, because the wrapper has split each of these tensors by rows.

    Args:
        argument: an argument of the replica.
        on_one: the same argument on one device.
        total: number of samples in the batch.
    """
    if isinstance(argument, Tensor):
        return argument.dim() > 0 and len(argument) == total and argument.shape == getattr(on_one, "shape", None)
    entries = [*argument] if is_sequence_type(type(argument)) else []
    is_whole = len(entries) == total and not all(isinstance(entry, Tensor) and entry.dim() for entry in entries)
    children, others = children_of(argument), children_of(on_one)
    inside = [reaches_whole(child, others.get(key), total) for key, child in children.items()]
    return is_whole or (len(children) == len(others) and any(inside))


class RecordMode(CheckMode):
    """Record the inputs and outputs of each module call on one device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.calls: dict[tuple[str, int], ModuleCall] = {}  # in the order of their ends
        # (version, copy) of each living tensor. An output that is the next module's input is copied once.
        self._copies: MutableMapping[Tensor, tuple[int | None, Tensor]] = WeakTensorKeyDictionary()

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        call.arguments = mapped(arguments, self._copy)

    def end(self, call: ModuleCall, output: Any) -> None:
        call.output = mapped(output, self._copy)
        self.calls[call.key] = call

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor, or return its last copy if it has not been changed in place since."""
        version = None if tensor.is_inference() else tensor._version
        if version is None or tensor not in self._copies or self._copies[tensor][0] != version:
            self._copies[tensor] = version, tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self._copies[tensor][1]


class CompareMode(CheckMode):
    """Compare each module call in replica `number` with its record from one device."""

    def __init__(self, one: RecordMode, number: int, rows: Sequence[Rows], model: nn.Module) -> None:
        super().__init__(one.dtype)
        self._one, self._number, self._rows, self._model = one, number, rows, model  # model: the copy with replicas
        self.gets_other: ModuleCall | None = None  # first call with other inputs than on one device

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        on_one = self._one.calls.get(call.key)
        if on_one and agree(arguments, on_one.arguments, self._rows[self._number]):
            # A new container without a graph: `forward` may change a list of arguments, and a graph would take memory.
            call.arguments = mapped(arguments, Tensor.detach)
        else:
            self.gets_other = self.gets_other or call

    def end(self, call: ModuleCall, output: Any) -> None:
        if on_one := self._one.calls.get(call.key):
            agrees = call.arguments is not None
            call.gap = describe_gap(output, on_one.output, self._rows[self._number]) if agrees else ("", "")
            call.module, call.arguments = None, call.arguments if any(call.gap) else None
            on_one.in_replicas[self._number] = call if agrees else None
            if len(on_one.in_replicas) == len(self._rows) and not suspects_in(on_one, self._model):
                del self._one.calls[call.key]


class PatchMode(CheckMode):
    """Patch the output of one module call in a replica with its value from one device."""

    def __init__(self, dtype: torch.dtype, on_one: ModuleCall, rows: Rows) -> None:
        super().__init__(dtype)
        self._on_one, self._rows = on_one, rows

    def end(self, call: ModuleCall, output: Any) -> Any:
        pairs = compared(output, self._on_one.output, self._rows) if call.key == self._on_one.key else ()
        right = {id(actual): corrected(actual, right) for actual, right in pairs if gap(actual, right)}
        return mapped(output, lambda actual: right.get(id(actual), actual)) if right else None


def contains_synchronized(module: nn.Module) -> bool:
    """Return whether a module is or contains a layer that exchanges its statistics between replicas."""
    return any(hasattr(child, "__data_parallel_replicate__") for child in module.modules())


def suspects_in(call: ModuleCall, model: nn.Module) -> dict[int, ModuleCall]:
    """Return the replicas' calls with right inputs and a wrong output, by the number of the replica.

    The output of a synchronized layer depends on the inputs in all replicas. Such a call is a suspect only if the
    inputs in all replicas agree with one device.

    Args:
        call: the call on one device, after the same call in all replicas.
        model: the copy of the model with replicas.
    """
    if None in call.in_replicas.values() and contains_synchronized(model.get_submodule(call.key[0])):
        return {}
    suspects = {number: other for number, other in call.in_replicas.items() if other and any(other.gap)}
    return dict(sorted(suspects.items()))  # Replicas end in any order.


def describe_gap(output: Any, on_one: Any, rows: Rows) -> tuple[str, str]:
    """Return the name of the tensor with the largest gap in a replica's output, and this gap in words.

    Return ("", "") if all tensors of the output agree with one device.
    """
    names = {id(leaf): name for name, leaf in named_leaves(output, "output")}
    largest_gap, description = 0.0, ("", "")
    for actual, right in compared(output, on_one, rows):
        if (by := gap(actual, right)) > largest_gap:
            largest_gap, description = by, (names[id(actual)], format_gap(by, actual, right))
    return description


def compared(output: Any, on_one: Any, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tensor in the replica, its rows on one device) for each tensor of an output.

    One-element tensors, such as losses, and tensors of incomparable shapes, such as selections, are left out.
    """
    with suppress(LookupError):
        for actual, whole in list(leaves_by_path(output, on_one, rows)):
            if not isinstance(actual, Tensor) or not isinstance(whole, Tensor) or whole.numel() == 1:
                continue  # A loss of the chunk may differ from the loss of the batch.
            right = chunk_of(whole, actual, rows)
            if fits(actual, right):
                yield actual, right


def fits(actual: Tensor, right: Tensor) -> bool:
    """Return whether two tensors can be compared: same shape, or same rows with another padding."""
    return actual.shape == right.shape or (actual.dim() == right.dim() > 1 and len(actual) == len(right))


def corrected(actual: Tensor, right: Tensor) -> Tensor:
    """Return the correct output, connected to the graph of the replaced one, so that gradients still flow."""
    corrected = right.clone()
    if actual.requires_grad and bool(actual.isfinite().all()):  # inf - inf would be NaN.
        # Padded shapes may differ, so only their common part is connected.
        corrected[tuple(map(slice, actual.shape))] += (actual - actual.detach())[tuple(map(slice, right.shape))]
    return corrected
