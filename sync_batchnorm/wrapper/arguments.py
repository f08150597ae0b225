"""Split the arguments of a call of the wrapper into chunks for replicas, each tensor along its own dimension.

Each tensor is split along its dimension in `in_dims`, or, without an entry in `in_dims`, along `dim` of the wrapper. A
replica must get rows of the same samples from all tensors. So the wrapper raises an error if the numbers of rows of two
tensors cannot be split in the same proportion.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from ..messages import warn_once
from ..trees import UNSPECIFIED, Dims, Index, Leaf, Path, Tree, format_dims, format_path, has_to_method, leaves_of
from .scatter_gather import scatter_tree

__all__: list[str] = []

_IN_DIMS = "name the dimension of its samples in in_dims, or None there if every replica needs the whole"

InDims = Mapping[str, Dims] | None  # the `in_dims` of the user: name of an argument -> dimension of the samples
OutDims = Dims

# A cache, because `inspect.signature` is slow: for each `forward` method, the kind of each parameter by its name. The
# kinds are constants of `inspect`, such as `Parameter.VAR_POSITIONAL`.
_kinds: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def parameters_of(module: nn.Module) -> dict[str, int]:
    """Return the kind of each parameter of a module's `forward`, by the name of the parameter.

    A kind is a constant of `inspect`, such as `Parameter.VAR_POSITIONAL` for ``*args``.

    If `inspect` cannot read the signature of `forward`, assume ``forward(*inputs, **kwargs)``.
    """
    while isinstance(module, DataParallel):  # The `forward` of a `DataParallel` passes any arguments to its module.
        module = module.module
    children = dict(module.named_children()) if type(module).__module__.startswith("torch.") else {}
    forward = children.get("_orig_mod", module).forward  # torch.compile stores the original module as `_orig_mod`.
    method = getattr(forward, "__func__", forward)
    try:
        if method not in _kinds:
            parameters = signature(forward).parameters
            _kinds[method] = {name: parameter.kind for name, parameter in parameters.items()}
        return _kinds[method]
    except (TypeError, ValueError):
        return {"inputs": Parameter.VAR_POSITIONAL, "kwargs": Parameter.VAR_KEYWORD}


def check_dims(module: nn.Module, in_dims: Any, out_dims: Any) -> None:
    """Raise an error for dimensions of a wrong type, and for names that are no arguments of the module's `forward`."""
    if not isinstance(in_dims, (dict, type(None))):
        raise TypeError(f"in_dims must be a dict by the names of arguments, such as {{'mask': None}}, got {in_dims!r}")
    for name, dims in [*(in_dims or {}).items(), ("out_dims", out_dims)]:
        if any([dim is not None and type(dim) is not int for dim in leaves_of(dims)]):
            raise TypeError(f"dimensions must be ints or None, or a tuple or dict of such, got {dims!r} for {name}")
    kinds = parameters_of(module) if in_dims else {}
    others = [name for name, kind in kinds.items() if kind is Parameter.VAR_KEYWORD]
    if unknown := [name for name in in_dims or () if (name in others if name in kinds else not others)]:
        raise ValueError(
            f"in_dims names {unknown}, but forward of {type(module).__name__} takes {list(kinds)}; use these names, "
            "and for further keyword arguments their own"
        )


def chunk_sizes(rows: int, most: int) -> list[int]:
    """Return the number of rows in each chunk, if `torch.chunk` splits a tensor with `rows` rows into `most` chunks.

    The result may have fewer chunks than `most`, as with `torch.chunk`. Zero rows make `most` empty chunks.
    """
    size = math.ceil(rows / most)
    return [min(size, rows - first) for first in range(0, rows, size)] if rows else [0] * most


def _shares(rows: int, most: int) -> list[float]:
    """Return the fraction of all rows that each chunk gets, if `rows` rows are split into at most `most` chunks."""
    return [size / (rows or 1) for size in chunk_sizes(rows, most)]


_format_in_dims = functools.partial(format_dims, "in_dims")


class Arguments:
    """The positional and keyword arguments of one call of a wrapper, and their split into chunks.

    Args:
        most: the number of devices, and therefore the largest possible number of chunks.
    """

    def __init__(self, wrapper: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> None:
        self._wrapper, self._inputs, self._kwargs, self._most = wrapper, inputs, kwargs, most
        self._in_dims = wrapper._sync_in_dims
        # The number of rows in each chunk; an empty list if the wrapper does not split the arguments.
        self.sizes = self._sizes() if most > 1 and (inputs or kwargs) else []

    def chunks(self, devices: Sequence[torch.device], by_torch: bool) -> Sequence[Sequence[Any]]:
        """Return two lists: the positional arguments of each chunk, and the keyword arguments of each chunk.

        Without any arguments, there are no chunks, as in torch. A single chunk is not copied if it is already on the
        device of its replica.
        """
        if not self._inputs and not self._kwargs:
            return (), ()
        if self._most > 1:
            # If there are fewer chunks than devices, leave the last devices unused. `nn.DataParallel` copies arguments
            # without tensors for every device, and then calls the replicas on the last devices with these arguments
            # only.
            devices = devices[: len(self.sizes)]
        if len(devices) == 1 and self._are_on(devices[0]):
            return (self._inputs,), (self._kwargs,)
        return tuple(
            zip(*map(self._args_and_kwargs, scatter_tree(self.tree, self.dims, devices, by_torch)), strict=True)
        )

    def _are_on(self, device: torch.device) -> bool:
        """Return whether a single replica on `device` can use the arguments without a copy or transfer."""
        values = (*self._inputs, *self._kwargs.values())
        if not self._in_dims and all([type(value) is Tensor and value.device == device for value in values]):
            return True  # torch.compile (torch 2.8) cannot trace the code below, so return early.

        def is_ready(leaf: Leaf) -> bool:
            if isinstance(leaf.value, Tensor):
                return leaf.value.device == device
            return not leaf.splits_by_entry() and (leaf.dim is not None or not has_to_method(type(leaf.value)))

        return all(map(is_ready, self.tree.leaves))

    @functools.cached_property
    def tree(self) -> Tree:
        """All arguments of the call as one tree: a dict from the parameter names of `forward` to the arguments.

        Arguments that `forward` collects in ``*args`` are in a dict of their own, under the name of ``*args``. The keys
        of this dict are the indices of the arguments.
        """
        inputs, kwargs = self._inputs, self._kwargs
        # The names of parameters are needed only to look up entries in `in_dims`, and for errors about the split.
        kinds = parameters_of(self._wrapper.module) if self._in_dims or self._most > 1 else {}
        names = [name for name, kind in kinds.items() if kind < Parameter.VAR_POSITIONAL]
        arguments: dict[str, Any] = dict(zip(names, inputs, strict=False))
        self._num_named, self._rest = len(arguments), ""
        # Positional arguments for ``*args`` are stored in a dict, not in a tuple. The tree takes a tuple for a list
        # with an entry for each sample if `in_dims` names dimension 0 for it.
        if len(inputs) > len(names):
            self._rest = next((name for name, kind in kinds.items() if kind is Parameter.VAR_POSITIONAL), "inputs")
            self._rest = f"*{self._rest}" if self._rest in kwargs else self._rest
            arguments[self._rest] = dict(zip(map(Index, range(len(inputs))), inputs[len(names) :], strict=False))
        for name in arguments.keys() & kwargs.keys():
            raise TypeError(
                f"forward of {type(self._wrapper.module).__name__} got multiple values for argument {name!r}"
            )
        return Tree(arguments | kwargs, self._in_dims or UNSPECIFIED)

    def _args_and_kwargs(self, chunk: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Separate one chunk of the tree of all arguments into (positional arguments, keyword arguments)."""
        others = chunk.pop(self._rest).values() if self._rest else ()
        names = list(chunk)
        return (*map(chunk.pop, names[: self._num_named]), *others), chunk

    @functools.cached_property
    def dims(self) -> list[int | None]:
        """The dimension along which each leaf of `tree` is split; None if the leaf is no tensor, or is not split."""
        return list(map(self._dim_of, self.tree.leaves))

    def describe_split(self) -> str:
        """Return a text for the note on an error: how many rows of each tensor argument go to each replica.

        The text describes tensors that were split without an entry in `in_dims`. If there are none, it is empty.
        """
        cut: list[str] = []
        for leaf, dim in zip(self.tree.leaves, self.dims, strict=True):
            if leaf.dim is UNSPECIFIED and dim is not None:
                sizes = " + ".join(map(str, chunk_sizes(leaf.value.shape[dim], self._most)))
                cut.append(f"{format_path(leaf.path)} of shape {tuple(leaf.value.shape)} into {sizes}")
        shown = ", ".join([*cut[:4], f"and {len(cut) - 4} more tensors"] if len(cut) > 5 else cut)
        how = f"The wrapper cut along dimension {self._wrapper.dim}, as in_dims names no other"
        return f"{how}: {shown}." if cut else ""

    def _dim_of(self, leaf: Leaf) -> int | None:
        if leaf.dim is None or not isinstance(leaf.value, Tensor) or (leaf.dim is UNSPECIFIED and not leaf.value.dim()):
            return None
        return leaf.resolve_dim(self._wrapper.dim, _IN_DIMS)

    def _sizes(self) -> list[int]:
        """Return the number of rows in each chunk. Raise an error if arguments disagree about these numbers."""
        for path, kind in self.tree.unreachable:
            raise self._uncut_error(path, f"a {kind} that holds tensors")
        rows = list(map(self._rows, self.tree.leaves, self.dims))
        cut = [(number, leaf) for number, leaf in zip(rows, self.tree.leaves, strict=True) if number is not None]
        if not cut:
            values = leaves_of([leaf.value for leaf in self.tree.leaves])
            kinds = ["whole Tensor" if isinstance(value, Tensor) else type(value).__name__ for value in values]
            raise TypeError(
                f"expected tensors to cut into chunks, but got arguments of {', '.join(dict.fromkeys(kinds))} only, of "
                f"which each of {self._most} replicas would process the whole; pass tensors with a row for each sample "
                "(torch.from_numpy(array) for an array), name dimensions in in_dims, or call the wrapped module"
            )
        batch = cut[0][0]
        for number, leaf in cut:
            if number != batch and _shares(number, self._most) != _shares(batch, self._most):
                raise self._unequal_error(batch, cut[0][1], number, leaf)
        self._warn_of_lists(rows, batch)
        return chunk_sizes(batch, self._most)

    def _rows(self, leaf: Leaf, dim: int | None) -> int | None:
        """Return how many rows or list entries of a leaf to split; None if every replica gets the whole leaf."""
        path, value, named = leaf
        if leaf.splits_by_entry():
            return len(value)
        if dim is None:
            is_in_list = isinstance(value, Tensor) and named is UNSPECIFIED and self._outermost_list(path)
            if is_in_list or (type(named) is int and len(path) == 1 and value is not None):
                raise self._uncut_error(path, f"a {type(value).__name__} without dimensions")
            return None
        if value.is_nested or value.layout is not torch.strided:
            raise self._uncut_error(path, "a nested tensor" if value.is_nested else f"a tensor of {value.layout}")
        return int(value.shape[dim])

    def _outermost_list(self, path: Path) -> Path | None:
        """Return the path of the list that contains a leaf; of several nested lists, the path of the outermost one.

        Lists for which `in_dims` names a dimension are left out.
        """
        return next((path[:i] for i in range(1, len(path) + 1) if path[:i] in self.tree.lists), None)

    def _remedy_for_lists(self, *paths: Path) -> str:
        """Return advice for an error message: `in_dims` for the lists that contain the leaves at `paths`.

        If such a list holds one entry for each sample, the user should pass dimension 0 for the list in `in_dims`.
        """
        lists = dict.fromkeys(filter(None, map(self._outermost_list, paths)))
        return "".join([f", {_format_in_dims(path, 0)} for a list with an entry for each sample" for path in lists])

    def _uncut_error(self, path: Path, what: str) -> TypeError:
        return TypeError(
            f"{format_path(path)}, {what}, cannot be cut into chunks for replicas; pass dense tensors with a row for "
            "each sample (padded ones and their lengths, tensor.to_dense(), a dict or dataclass for an object)"
            f"{self._remedy_for_lists(path)}, or {_format_in_dims(path, None)} if every replica needs the whole"
        )

    def _unequal_error(self, rows: int, one: Leaf, rows_of_other: int, two: Leaf) -> ValueError:
        odd = one if one.splits_by_entry() else two
        dims = (0,) * len(odd.value) or None if isinstance(odd.value, tuple) else None
        remedy = "its tensors have the rows" if dims else "every replica needs the whole"
        return ValueError(
            f"{format_path(one.path)} has {rows} rows, but {format_path(two.path)} has {rows_of_other}, so that "
            f"replicas would get rows that do not belong together; {_remedy_for_rows(odd)}"
            f"{self._remedy_for_lists(one.path, two.path)}, or pass {_format_in_dims(odd.path, dims)} to the wrapper "
            f"if {remedy}"
        )

    def _warn_of_lists(self, rows: list[int | None], batch: int) -> None:
        """Warn if a list may hold one entry for each sample, but the wrapper splits each entry instead of the list.

        If a tensor in a list does not have as many rows as the batch, the warning names the list.
        """
        for path, (entries, start, end) in self.tree.lists.items():
            if len(entries) > 1 and not {*rows[start:end]} <= {batch, None}:
                return warn_once(
                    f"{format_path(path)}, a {type(entries).__name__}, is not cut by its entries: every replica gets "
                    "some rows of each of its tensors, and everything else as a whole; if it has an entry for "
                    f"each sample, pass {_format_in_dims(path, 0)} to the wrapper, otherwise name the dimensions of "
                    "its entries there"
                )


def _remedy_for_rows(leaf: Leaf) -> str:
    """Return the remedy for an argument whose number of rows does not fit the other arguments."""
    path = format_path(leaf.path)
    if leaf.dim is UNSPECIFIED:
        return f"name the dimension of the samples of {path} in in_dims"
    if leaf.splits_by_entry():
        return f"in_dims names {path} as a list with an entry for each sample: pass as many"
    shape = tuple(leaf.value.shape)
    return f"in_dims names dimension {leaf.dim} of {path} of shape {shape}: name another one if that has its samples"
