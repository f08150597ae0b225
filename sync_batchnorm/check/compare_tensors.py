"""Compare tensors and nested containers in a replica with those on one device, with a tolerance."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from ..trees import children_of, is_sequence_type, leaves_of, named_leaves, with_leaves

__all__: list[str] = []


class Rows(NamedTuple):
    """The rows of a replica's chunk."""

    here: range  # indices of these rows in the batch
    total: int  # number of rows of the batch


# A relative difference is the absolute difference, divided by the largest value of the tensor, or by this number if the
# largest value is smaller. The number is arbitrary.
LEAST = 1e-6
NOT_FINITE = 1e99  # stands for the gap between two numbers if only one of them is finite
SCALARS = (bool, int, float, str)
WHOLE = Rows(range(1), 1)  # stands for all rows of the batch, however many there are


def tolerance_of(tensor: Tensor) -> float:
    """Return the largest relative difference that still counts as zero; it depends on the dtype of the tensor."""
    return 1e-4 if tensor.dtype in (torch.float32, torch.complex64) else 1e-6


def gap(actual: Tensor, expected: Tensor, size: float = LEAST, rounding: float = 0.0) -> float:
    """Return the gap between two tensors: their largest absolute difference, divided by the largest expected value.

    The gap is 0.0 if the difference is within the tolerance of the dtype, or at most `rounding`. It is infinite for
    tensors of different shapes. Two NaN are equal.

    Args:
        actual, expected: the tensors.
        size: the divisor, if the largest expected value is smaller.
        rounding: largest absolute difference that counts as rounding.
    """
    if actual.shape != expected.shape:
        return math.inf
    tolerance = tolerance_of(expected)
    values, right = numbers_of(actual), numbers_of(expected)
    if not math.isfinite(difference := _largest(values - right)):
        equal = values.isclose(right, rtol=0.0, atol=0.0, equal_nan=True)
        difference = _largest((values - right).nan_to_num(NOT_FINITE, NOT_FINITE, -NOT_FINITE).masked_fill(equal, 0))
    # If the difference is small, skip the search for the largest value, which takes time.
    if difference <= max(rounding, tolerance * size):
        return 0.0
    relative = difference / max(size, largest(expected))
    return relative if relative > tolerance else 0.0


def format_gap(by: float, actual: Tensor, expected: Tensor) -> str:
    """Describe the difference between two tensors in words."""
    if by == math.inf:
        return "in its shape"
    if by >= NOT_FINITE:
        return "as only one of them is finite"
    if by < 10:
        return f"by {by:.2g} of its largest value"
    return f"by values up to {largest(actual):.2g} in place of {largest(expected):.2g}"


def largest(*tensors: Tensor) -> float:
    """Return the largest finite absolute value of several tensors, or 0.0."""
    return max([_largest(numbers_of(tensor).nan_to_num(0.0, 0.0, 0.0)) for tensor in tensors], default=0.0)


def numbers_of(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64. A complex number becomes a pair of real numbers."""
    tensor = tensor.detach().to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).to(torch.float64)


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute value of a tensor, or NaN if the tensor contains NaN."""
    return float(torch.linalg.vector_norm(numbers, math.inf)) if numbers.numel() else 0.0


def chunk_of(whole: Tensor, chunk: Tensor, rows: Rows) -> Tensor:
    """From a tensor of the whole batch, return the rows that belong to a replica's chunk.

    A tensor may hold the samples of the batch once, or several times one after another, as after
    `torch.cat([view1, view2])`. Of these two layouts, the function takes the layout with the smaller gap to `chunk`:

        rows 1 and 2 of 4 samples, once     a b c d          ->  b c    (lower and upper case: view 1 and view 2)
        rows 1 and 2 of 4 samples, twice    a b c d A B C D  ->  b c B C

    Args:
        whole: the tensor on one device.
        chunk: the same tensor in the replica.
        rows: indices, in the whole batch, of the rows that the replica gets.
    """
    if rows == WHOLE:
        return whole
    return min(
        (_samples_of(whole, chunk, rows, shape) for shape in ((rows.total, -1), (-1, rows.total))),
        key=partial(gap, chunk),
    )


def _samples_of(whole: Tensor, chunk: Tensor, rows: Rows, shape: tuple[int, int]) -> Tensor:
    """Select the samples of a replica's chunk from `whole`, a tensor of the whole batch.

    `shape` is the layout of the N samples along a dimension. With (N, -1), the entries of a sample are adjacent, as in
    a a b b for two samples. With (-1, N), the entries of a sample are N places apart, as in a b a b.
    """
    for dim in dims_of_samples(whole, chunk, rows):
        index = torch.arange(whole.shape[dim]).reshape(shape)
        index = index[:, rows.here] if shape[0] == -1 else index[rows.here]
        whole = whole.index_select(dim, index.flatten())
    return whole


def dims_of_samples(whole: Tensor, chunk: Tensor, rows: Rows) -> list[int]:
    """Return the dimensions that hold samples. Their sizes are proportional to the number of rows.

    A similarity matrix has two such dimensions.
    """
    here, total = len(rows.here), rows.total
    sizes = enumerate(zip(chunk.shape, whole.shape, strict=False))
    return [dim for dim, (size, of_all) in sizes if size * total == here * of_all and of_all and of_all % total == 0]


def leaves_by_path(actual: Any, expected: Any, rows: Rows) -> Iterator[tuple[Any, Any]]:
    """Walk through two nested containers at once, and yield (leaf in the replica, leaf on one device).

    If a list has an entry for each sample, each entry in the replica is paired with the entry of the same sample on one
    device.

    Raises:
        LookupError: if the containers have different keys or lengths.
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
    """Return whether the tensors, numbers, flags and strings of a replica equal those on one device."""
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
    if isinstance(actual, PackedSequence):  # Unpack, because the data tensor of a `PackedSequence` interleaves samples.
        return agree(unpack_sequence(actual), unpack_sequence(expected), rows)
    return not isinstance(actual, SCALARS) or bool(actual == expected)


def mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested containers, with a function applied to each tensor."""
    return with_leaves(tree, iter([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(tree)]))


def as_dicts(tree: Any, function: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Convert nested containers to nested dictionaries, and apply a function to each tensor.

    A slice becomes a dictionary of its start, stop and step.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):
        return PackedSequence(function(tree.data), *tree[1:])
    children = children_of((tree.start, tree.stop, tree.step) if isinstance(tree, slice) else tree)
    return {key: as_dicts(child, function) for key, child in children.items()} if children else tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of nested containers in order. For a packed sequence, take its data tensor."""
    if isinstance(tree, (Tensor, PackedSequence)):
        return [tree if isinstance(tree, Tensor) else tree.data]
    return [tensor for child in children_of(tree).values() for tensor in tensors_of(child)]


def is_unsplit(argument: Any, on_one: Any, total: int) -> bool:
    """Return whether the wrapper failed to split an argument that has an entry for each sample.

    The argument may be a tensor, or a list with an entry for each sample, or a container with such tensors or lists
    inside. A list of tensors is split in another way (the rows of each tensor are split), so the result is False for
    it.

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
    inside = [is_unsplit(child, others.get(key), total) for key, child in children.items()]
    return is_whole or (len(children) == len(others) and any(inside))


def gap_text(output: Any, on_one: Any, rows: Rows) -> tuple[str, str]:
    """Compare a replica's output with one device; return (name of the tensor with the largest gap, gap in words).

    Return two empty strings if the output agrees with one device.
    """
    names = {id(leaf): name for name, leaf in named_leaves(output, "output")}
    largest_gap, description = 0.0, ("", "")
    for actual, right in compared(output, on_one, rows):
        if (by := gap(actual, right)) > largest_gap:
            largest_gap, description = by, (names[id(actual)], format_gap(by, actual, right))
    return description


def compared(output: Any, on_one: Any, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """For each tensor of an output, yield (tensor in the replica, the same rows of the tensor on one device).

    Two kinds of tensors are left out: tensors with one element, such as a loss, and tensors whose shape does not fit
    the replica's chunk, such as a selection of rows by their values.
    """
    with suppress(LookupError):
        leaves = list(leaves_by_path(output, on_one, rows))
        for actual, whole in [pair for pair in leaves if isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)]:
            # Leave out tensors with one element, because they may be losses. The loss of a chunk usually differs from
            # the loss of the whole batch, even if the replica computes its loss correctly.
            if whole.numel() != 1 and fits(actual, right := chunk_of(whole, actual, rows)):
                yield actual, right


def fits(actual: Tensor, right: Tensor) -> bool:
    """Return whether two tensors can be compared.

    Tensors of the same shape can be compared, and so can tensors whose rows are padded to different lengths: tensors
    with the same number of rows and of dimensions.
    """
    return actual.shape == right.shape or (actual.dim() == right.dim() > 1 and len(actual) == len(right))


def corrected(actual: Tensor, right: Tensor) -> Tensor:
    """Return a tensor that has the values of `right`, and can replace the wrong tensor `actual` in the graph.

    In the backward pass, gradients for the returned tensor flow on to `actual`, the tensor that it replaces.

    Args:
        actual: the wrong tensor, in the graph.
        right: the right values, from one device.
    """
    corrected = right.clone()
    if actual.requires_grad and bool(actual.isfinite().all()):  # inf - inf would be NaN.
        # The two tensors may be padded to different shapes. Then gradients flow only through the entries that both
        # have.
        corrected[tuple(map(slice, actual.shape))] += (actual - actual.detach())[tuple(map(slice, right.shape))]
    return corrected
