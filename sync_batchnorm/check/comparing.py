"""How far two tensors or trees differ, zero where only rounding does; which rows of a batch a chunk has."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..wrapper import children_of

__all__: list[str] = []

LEAST = 1e-6  # Smaller values are compared as if they were this large. Arbitrary.
NOT_FINITE = 1e99  # the gap where only one of two numbers is finite
SCALARS = (bool, int, float, str)


class Rows(NamedTuple):
    """Which rows of a batch a chunk has."""

    first: int
    number: int
    total: int


WHOLE = Rows(0, 1, 1)


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
    found, wanted = numbers_of(actual), numbers_of(expected)
    difference = _largest(found - wanted)
    if not math.isfinite(difference):
        equal = found.isclose(wanted, rtol=0.0, atol=0.0, equal_nan=True)
        difference = _largest((found - wanted).nan_to_num(NOT_FINITE, NOT_FINITE, -NOT_FINITE).masked_fill(equal, 0))
    if difference <= max(rounding, tolerance * size):  # which is so for most, and saves a look at the values
        return 0.0
    relative = difference / max(size, largest(expected))
    return relative if relative > tolerance else 0.0


def much(by: float) -> str:
    """Return how much a gap is, in words."""
    if by == math.inf:
        return "in its shape"
    return "as only one of them is finite" if by >= NOT_FINITE else f"by {by:.1e} of its largest value"


def largest(*tensors: Tensor) -> float:
    """Return the largest finite absolute value."""
    return max([_largest(numbers_of(tensor).nan_to_num(0.0, 0.0, 0.0)) for tensor in tensors], default=0.0)


def numbers_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in float64; complex ones as pairs."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute value, NaN if there is one."""
    if not numbers.numel():
        return 0.0
    low, high = numbers.aminmax()
    return max(-float(low), float(high))  # Both are NaN if one number is.


def chunk_of(whole: Tensor, like: Tensor, rows: Rows) -> Tensor:
    """Return the rows of a chunk, in the layout that is nearer to `like`; see `samples_of`."""
    wanted = range(rows.first, rows.first + rows.number)
    block = whole if rows == WHOLE else samples_of(whole, like, rows, wanted)
    if rows == WHOLE or not (by := gap(like, block)):
        return block
    blocks = samples_of(whole, like, rows, wanted, has_blocks=True)
    return blocks if gap(like, blocks) < by else block


def samples_of(whole: Tensor, like: Tensor, rows: Rows, wanted: Sequence[int], has_blocks: bool = False) -> Tensor:
    """Return the wanted samples of `whole`; `like` shows, by those of `rows`, which dimensions have samples.

    They lie in one block, or in each of several, as those of two views in one batch.
    """
    for dim, (size, whole_size) in enumerate(zip(like.shape, whole.shape, strict=False)):
        if size * rows.total == rows.number * whole_size and whole_size and whole_size % rows.total == 0:
            index = torch.arange(whole_size)
            blocks = index.reshape(-1, rows.total)[:, list(wanted)]
            index = blocks if has_blocks else index.reshape(rows.total, -1)[list(wanted)]
            whole = whole.index_select(dim, index.flatten())  # In a similarity matrix, two dimensions are samples.
    return whole


def leaves_by_path(actual: Any, expected: Any, rows: Rows) -> Iterator[tuple[Any, Any]]:
    """Yield what two trees have in the same places; raise a LookupError for other structures.

    A list with an item for each sample is cut to those of `rows`.
    """
    some, all_ = [list(children_of(tree).values()) for tree in (actual, expected)]
    if not some and not all_:
        yield actual, expected
        return
    if isinstance(actual, Mapping) and isinstance(expected, Mapping) and actual.keys() == expected.keys():
        all_ = [expected[key] for key in actual]
    elif len(some) == rows.number and len(all_) == rows.total:
        all_ = all_[rows.first : rows.first + rows.number]
    if len(some) != len(all_):
        raise LookupError
    for child, of_whole in zip(some, all_, strict=True):
        yield from leaves_by_path(child, of_whole, rows)


def agree(actual: Any, expected: Any, rows: Rows = WHOLE) -> bool:
    """Return whether two trees have the same tensors, numbers, flags and strings."""
    try:
        return all(_leaves_agree(*leaves, rows) for leaves in leaves_by_path(actual, expected, rows))
    except LookupError:
        return False


def _leaves_agree(actual: Any, expected: Any, rows: Rows) -> bool:
    if isinstance(actual, float) and isinstance(expected, float):
        actual, expected = (torch.tensor(number, dtype=torch.float64) for number in (actual, expected))
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return not gap(actual, chunk_of(expected, actual, rows))
    if isinstance(actual, SCALARS) or isinstance(expected, SCALARS):
        return bool(actual == expected)
    return isinstance(actual, Tensor) == isinstance(expected, Tensor)
