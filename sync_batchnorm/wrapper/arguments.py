"""What a wrapper refuses or warns of among the arguments that it cuts, and how many chunks they make."""

import math
from collections import Counter, UserList, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..refusals import warn_once
from .trees import cut_children_of, nodes_of, tensors_in

__all__: list[str] = []

Span = tuple[Any, int, int]  # a list, and where its leaves begin and end among all leaves
NO_ROWS, NOTHING = -1, -2  # in place of a number of rows: what is no tensor with such a dimension; None


def number_of_chunks(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], dim: int, most: int
) -> int:
    """Return how many chunks along `dim` arguments with these leaves make, at most one for each of several devices.

    Raises an error for arguments of which replicas cannot get their rows, and warns of lists that are not cut.
    """
    _check(inputs, kwargs, leaves, most)
    if len(leaves) > len(inputs) + len(kwargs):  # Otherwise no argument has two leaves.
        _warn_of_lists(inputs, kwargs, leaves, dim)
    return _number_of_chunks([leaf for leaf in leaves if isinstance(leaf, Tensor)], dim, most)


def _check(inputs: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], replicas: int) -> None:
    has_tensors = False
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            has_tensors = True
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise _uncut_error(inputs, kwargs, leaf)
        elif isinstance(leaf, PackedSequence):
            raise _uncut_error(inputs, kwargs, leaf)
    if not has_tensors:
        types = ", ".join(dict.fromkeys([type(leaf).__name__ for leaf in leaves]))
        raise TypeError(
            f"expected tensors to cut into chunks, but got arguments of {types} only, of which each of {replicas} "
            "replicas would process the whole; pass tensors with a row for each sample (torch.from_numpy(array) for a "
            "NumPy array, a dict or a dataclass of tensors for an object), or call the wrapped module itself"
        )


def _warn_of_lists(inputs: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], dim: int) -> None:
    """Warn once of a list or tuple that seems to have one entry for each sample: it is not cut by samples."""
    spans: list[Span] = []
    end = 0
    for argument in (*inputs, *kwargs.values()):
        end = _add_spans(argument, end, spans)
    rows = [_rows(leaf, dim) for leaf in leaves]
    found = _list_by_sample(rows, spans) or _lists_alone((*inputs, *kwargs.values()), rows)
    if found is None:
        return
    named = [*nodes_of(inputs, "inputs"), *nodes_of(kwargs, "kwargs")]
    where = next(path for path, node in named if node is found)
    warn_once(
        f"{where}, a {type(found).__name__}, seems to have one entry for each sample, but only tensors are cut by "
        f"samples: each tensor in it is cut along dimension {dim}, and everything else goes to every replica as a "
        "whole, so that replicas compute with entries of other samples. Derive a class from DataParallelWithCallback, "
        "with a scatter(self, inputs, kwargs, device_ids) that gives each replica the entries of its samples: "
        "docs/usage.md shows one, under 'Lists with one entry per sample'. If it is no such list, filter this warning"
    )


def _add_spans(tree: Any, start: int, spans: list[Span]) -> int:
    """Add all lists and tuples with the places of their leaves, which begin at `start`; return where they end."""
    children = cut_children_of(tree)
    if not children:
        return start + 1
    end = start
    for child in children:
        end = _add_spans(child, end, spans)
    if _is_list(tree) and len(tree) > 1:
        spans.append((tree, start, end))
    return end


def _is_list(tree: Any) -> bool:
    """Return whether a container may have an entry for each sample; named tuples and shapes have none."""
    return type(tree) is tuple or isinstance(tree, (list, UserList, deque))


def _list_by_sample(rows: Sequence[int], spans: Sequence[Span]) -> Any:
    """Return a list that is as long as the batch, and holds more than tensors with a row for each sample."""
    numbers = Counter(rows)
    for node, start, end in spans:
        of_batch = rows[start:end].count(len(node))
        if numbers[len(node)] > of_batch and of_batch + rows[start:end].count(NOTHING) < end - start:
            return node
    return None


def _lists_alone(arguments: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the first of several lists of one length, where no other argument has tensors, and their rows differ.

    So a detector takes images and boxes of all sizes.
    """
    with_tensors = [argument for argument in arguments if tensors_in(argument)]
    lengths = {len(argument) if _is_list(argument) else 1 for argument in with_tensors}
    differ = len(set(rows) - {NOTHING, NO_ROWS}) > 1
    return with_tensors[0] if len(with_tensors) > 1 and len(lengths) == 1 and 1 not in lengths and differ else None


def _rows(leaf: Any, dim: int) -> int:
    """Return the number of rows of a leaf that may be one for each sample."""
    if leaf is None:
        return NOTHING
    is_cut = isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim()
    return leaf.shape[dim] if is_cut else NO_ROWS


def _uncut_error(inputs: tuple[Any, ...], kwargs: dict[str, Any], leaf: Any) -> TypeError:
    """Return the error for a leaf that has no rows to cut."""
    named = [*nodes_of(inputs, "inputs"), *nodes_of(kwargs, "kwargs")]
    where = next(path for path, node in named if node is leaf)
    if isinstance(leaf, PackedSequence):
        what, why = "a PackedSequence", "its rows are time steps of all samples"
        remedy = "the padded tensor and the lengths, and call pack_padded_sequence in forward"
    elif leaf.is_nested:
        what, why = "a nested tensor", "its samples have different sizes"
        remedy = "torch.nested.to_padded_tensor(tensor, 0.0) and the lengths, and nest it in forward"
    else:
        what, why = f"a tensor of layout {leaf.layout}", "only dense tensors have rows to cut"
        remedy = "tensor.to_dense(), or make what every replica needs as a whole a buffer of the module"
    return TypeError(f"{where} is {what}, which cannot be cut into chunks for replicas: {why}; pass {remedy}")


def _number_of_chunks(tensors: Sequence[Tensor], dim: int, most: int) -> int:
    """Return how many chunks along `dim` tensors, except for scalars, make; raise an error if they differ."""
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor.dim()] or [()] * len(tensors)
    numbers = []
    for shape in shapes:
        if not -len(shape) <= dim < len(shape):
            numbers.append(0)
        elif shape[dim]:
            rows = math.ceil(shape[dim] / most)  # in each chunk but the last, as `torch.chunk` cuts them
            numbers.append(math.ceil(shape[dim] / rows))
        else:
            numbers.append(most)  # empty chunks
    if 0 in numbers or len(set(numbers)) > 1:
        raise ValueError(
            f"tensors of shapes {shapes} make {numbers} chunks along dimension {dim} for {most} devices, but must all "
            "make the same number; give every tensor a row for each sample, and make what every replica "
            "needs as a whole a buffer of the module; a list with one entry for each sample needs a scatter of its own"
        )
    return numbers[0]
