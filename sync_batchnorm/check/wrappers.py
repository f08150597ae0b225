"""The wrapper around a copy of a model: it scatters, gathers and forwards as that of the user, on CPUs."""

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import nn

from ..wrapper import Arguments, DataParallelWithCallback, Replica, tensors_in
from .comparing import Rows
from .copies import InDouble

__all__: list[str] = []

_METHODS = ("scatter", "gather", "forward")


class CheckedWrapper(DataParallelWithCallback):
    """A wrapper of CPU replicas, each of which runs in a mode of its own."""

    overridden: tuple[str, ...] = ()  # which of the methods are those of the user's wrapper
    modes: Sequence[InDouble]
    returned: Sequence[Any]  # what each replica has returned

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(self.device_ids) > 1:
            return super().forward(*inputs, **kwargs)
        args, kwargs_of = self.scatter(inputs, kwargs, self.device_ids)
        output = self.module(*as_tuple(args[0]), **kwargs_of[0])
        return self.gather([output], self.output_device) if "gather" in self.overridden else output

    def parallel_apply(self, replicas: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        for replica, mode in zip(replicas, self.modes, strict=False):
            replica.__dict__["_sync_mode"] = mode
            object.__setattr__(replica, "__class__", _ReplicaInMode)
        self.returned = super().parallel_apply(replicas, *args, **kwargs)
        return list(self.returned)


class _ReplicaInMode(Replica):
    _sync_mode: InDouble

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._sync_mode:
            return super().__call__(*args, **kwargs)


def wrapper_like(wrapper: nn.DataParallel[Any] | None, module: nn.Module, number: int) -> CheckedWrapper:
    """Return a wrapper for so many CPU replicas of `module`, with the methods and attributes of the user's wrapper."""
    made = CheckedWrapper(module, ["cpu"] * number)
    if wrapper is None:
        return made
    cls: Any = vars(type(wrapper)).get("_sync_original", type(wrapper))  # of a patched object, the user's class
    of_class = [name for name in _METHODS if _overrides(cls, name)]
    of_object = [name for name in _METHODS[:2] if name in vars(wrapper)]
    if of_class or of_object:
        bases = (CheckedWrapper,) if issubclass(CheckedWrapper, cls) else (cls, CheckedWrapper)
        names = {"replicate": CheckedWrapper.replicate, "parallel_apply": CheckedWrapper.parallel_apply}
        if "forward" not in of_class:
            names["forward"] = CheckedWrapper.forward
        made_class: Any = type(cls.__name__, bases, {**names, "overridden": (*of_class, *of_object)})
        object.__setattr__(made, "__class__", made_class)
    kept = {*vars(nn.Module()), "device_ids", "output_device", "src_device_obj"}
    made.__dict__.update({name: value for name, value in vars(wrapper).items() if name not in kept})
    made.__dict__["_modules"] = {**vars(wrapper)["_modules"], "module": module}
    for name in of_object:
        function = vars(wrapper)[name]
        is_bound = getattr(function, "__self__", None) is wrapper
        made.__dict__[name] = MethodType(function.__func__, made) if is_bound else function
    return made


def _overrides(cls: Any, name: str) -> bool:
    inherited = [getattr(base, name) for base in (nn.DataParallel, DataParallelWithCallback)]
    return getattr(cls, name) not in (*inherited, None)


def as_tuple(args: Any) -> tuple[Any, ...]:
    """Return the arguments of one replica, as the `parallel_apply` of torch takes them."""
    return tuple(args) if isinstance(args, (list, tuple)) else (args,)


def rows_of_chunks(parallel: CheckedWrapper, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Rows]:
    """Return which rows each replica gets; raise an error for fewer than two chunks."""
    number = len(parallel.device_ids)
    if number < 2:
        raise ValueError(f"expected at least two replicas to compare, but got replicas={number}; pass a larger number")
    if not tensors_in((inputs, kwargs)):
        raise ValueError("expected a batch to cut into chunks, but got inputs without a tensor; pass the whole batch")
    if {"scatter", "forward"}.intersection(parallel.overridden):
        sizes = _sizes_of_scatter(parallel, inputs, kwargs)
    else:
        sizes = Arguments(parallel, inputs, kwargs, number).sizes
    if len(sizes) < 2 and "forward" in parallel.overridden:  # which may cut the batch in another way
        sizes = [1] * number
    if len(sizes) < 2 or not sum(sizes):
        raise ValueError(f"expected at least two chunks with rows, but got chunks of {sizes} rows; pass a larger batch")
    return [Rows(sum(sizes[:i]), size, sum(sizes)) for i, size in enumerate(sizes)]


def _sizes_of_scatter(parallel: CheckedWrapper, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the number of rows of each chunk: of the first tensors whose sizes add up to one of the batch."""
    chunks = list(zip(*parallel.scatter(inputs, kwargs, parallel.device_ids), strict=False))
    totals = {size for tensor in tensors_in((inputs, kwargs)) for size in tensor.shape if size}
    of_chunks = [tensors_in(chunk) for chunk in chunks]
    for i, tensor in enumerate(of_chunks[0] if of_chunks else ()):
        for dim in sorted(range(tensor.dim()), key=lambda dim: dim not in (parallel.dim, parallel.dim + tensor.dim())):
            sizes = [part[i].shape[dim] if i < len(part) and part[i].dim() > dim else 0 for part in of_chunks]
            if sum(sizes) in totals:
                return sizes
    lists = [next((leaf for leaf in as_tuple(args) if isinstance(leaf, (list, tuple))), ()) for args, _ in chunks]
    return [len(items) for items in lists]  # with an item for each sample
