"""How far two tensors differ, as a number: zero where only rounding differs."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

TOLERANCE = 1e-6  # the largest difference that is none, relative to the largest value; also the least such value
ROUNDING = 1e-9  # the largest relative difference by rounding in float64 that real nets have shown
NOT_FINITE = 1e99  # the gap where only one of two numbers is finite


class Rows(NamedTuple):
    """Which rows of a batch a chunk has."""

    first: int
    number: int
    total: int


WHOLE = Rows(0, 1, 1)


def gap(actual: Tensor, expected: Tensor, floor: float = TOLERANCE, rows: Rows = WHOLE) -> float:
    """Return the largest difference, relative to the largest value or `floor`: 0.0 if small, infinite for other shapes.

    Two NaN agree. `rows`: those that `actual` has of `expected`.
    """
    for dim, (size, whole_size) in enumerate(zip(actual.shape, expected.shape, strict=False)):
        if size * rows.total == rows.number * whole_size:  # as in both dimensions of a similarity matrix
            expected = expected.narrow(dim, rows.first * whole_size // rows.total, size)
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = _numbers(actual), _numbers(expected)
    difference = _largest(actual - expected)
    if not math.isfinite(difference):
        equal = actual.isclose(expected, rtol=0.0, atol=0.0, equal_nan=True)
        difference = _largest((actual - expected).nan_to_num(NOT_FINITE, NOT_FINITE, -NOT_FINITE).masked_fill(equal, 0))
    if difference <= TOLERANCE * floor:  # which is so for most, and saves a look at the values
        return 0.0
    relative = difference / (max(floor, largest(expected)) or 1.0)
    return relative if relative > TOLERANCE else 0.0


def largest(*tensors: Tensor) -> float:
    """Return the largest finite absolute value."""
    found = 0.0
    for tensor in tensors:
        numbers = _numbers(tensor)
        value = _largest(numbers)
        found = max(found, value if math.isfinite(value) else _largest(numbers.nan_to_num(0.0, 0.0, 0.0)))
    return found


def _numbers(tensor: Tensor) -> Tensor:
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
