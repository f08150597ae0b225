"""What the rows that a module returns depend on besides their own rows of the input: it is called again to find out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import _SynchronizedBatchNorm
from ..wrapper import leaves_of, tensors_in, with_leaves
from .comparing import Rows, gap

__all__: list[str] = []

SAMPLES = (
    "what it returns for a sample depends on other samples of the batch, as with x.mean(0), x.std(), x[0] or padding "
    "to the longest sample"
)
PLACE = "what it returns for a sample depends on its place in the batch, as with torch.arange(len(x))"
SIZE = "what it returns for a sample depends on the number of samples, as with x / len(x)"
STATE = (
    "it returns the same for these rows when it is called again on one device, without the others: look for a cache, "
    "what it keeps on itself, and arguments that are no tensors"
)


class Probe:
    """A call of a module in a replica, with what the module got on one device, where it can be called again."""

    def __init__(self, arguments: Any, whole: Sequence[Tensor], rows: Rows) -> None:
        """`arguments` has the arguments in the replica, with some `rows` of the tensors `whole`."""
        self._arguments, self._rows = arguments, rows
        self._tensors = list(zip(whole, map(self._dims, tensors_in(arguments), whole), strict=True))

    def _dims(self, some: Tensor, whole: Tensor) -> list[int]:
        """Return the dimensions of the samples: there, `some` has as many of all rows as the replica has samples."""
        sizes = enumerate(zip(some.shape, whole.shape, strict=True))
        return [dim for dim, (size, all_) in sizes if size * self._rows.total == self._rows.number * all_]

    def dependence(self, module: nn.Module) -> str | None:
        """Return on what the rows of the replica depend that `module`, on one device, returns; None if that is open.

        Synchronized layers of the module, a copy, keep to their running statistics from now on.
        """
        first, number, total = self._rows
        here, everywhere = range(first, first + number), range(total)
        has_norms = _fix_statistics(module)
        expected = self._outputs(module, everywhere)
        alone = self._outputs(module, here)
        dims = [self._dims(some, whole) for some, whole in zip(alone, expected, strict=True)]

        def differs(rows: Sequence[int], where: Sequence[int]) -> bool:
            """Return whether the rows of the replica become others in a batch of `rows`, where they are `where`."""
            found = zip(self._outputs(module, rows), expected, dims, strict=True)
            return any(gap(_selected(o, d, where, total), _selected(e, d, here, total)) for o, e, d in found)

        if not any(gap(_selected(e, d, here, total), o) for o, e, d in zip(alone, expected, dims, strict=True)):
            return None if has_norms else STATE
        if differs([i if i in here else first for i in everywhere], here):
            return SAMPLES
        if differs([(i + first) % total for i in everywhere], range(number)):
            return PLACE
        return SIZE

    def tells_apart(self, module: nn.Module, other: nn.Module) -> bool:
        """Return whether two modules return different outputs for the whole batch."""
        everywhere = range(self._rows.total)
        pairs = zip(self._outputs(module, everywhere), self._outputs(other, everywhere), strict=True)
        return any(gap(actual, expected) for actual, expected in pairs)

    def _outputs(self, module: nn.Module, rows: Sequence[int]) -> list[Tensor]:
        """Return what the module returns for these rows of the batch."""
        chosen = iter([_selected(tensor, dims, rows, self._rows.total) for tensor, dims in self._tensors])
        leaves = leaves_of(self._arguments)
        args, kwargs = with_leaves(
            self._arguments, iter([next(chosen) if isinstance(x, Tensor) else x for x in leaves])
        )
        with torch.no_grad():
            return [output.clone() for output in tensors_in(module(*args, **kwargs))]


def _selected(tensor: Tensor, dims: Sequence[int], rows: Sequence[int], total: int) -> Tensor:
    """Return a copy of a tensor of `total` samples with `rows` of them; in a dimension, a sample may have several."""
    tensor = tensor.clone()  # as the module may change it
    for dim in dims:
        each = tensor.shape[dim] // total
        tensor = tensor.index_select(dim, torch.tensor([row * each + i for row in rows for i in range(each)]))
    return tensor


def _fix_statistics(module: nn.Module) -> bool:
    """Let synchronized layers, which mix samples rightly, use their running statistics; return whether any do."""
    norms = [child for child in module.modules() if isinstance(child, _SynchronizedBatchNorm) and child.training]
    for norm in norms:
        norm.training = False
    return bool(norms)
