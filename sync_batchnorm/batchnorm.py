"""The modules: when a layer synchronizes, what it refuses; and a model's way to such layers and back.

NOTE [conversion by class]: A layer keeps its identity; all that changes is ``layer.__class__``. So everything that
holds on to the layer, or to its parameters and buffers, stays right: optimizers, hooks, other parents, plain lists. The
class alone tells the way back, and the options are attributes that are there only if they were given. A class that
computes something of its own cannot be swapped for another one: such a layer is left as it is, and named in a warning.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DataParallel
from torch.nn.utils.parametrize import is_parametrized

from sync_batchnorm import distributed
from sync_batchnorm.backends.base import BatchStatistics, RunningStatistics
from sync_batchnorm.comm import SyncMaster
from sync_batchnorm.compilation import uncompiled
from sync_batchnorm.functional import Pipe, merge_messages, sync_batch_norm
from sync_batchnorm.local_parallel import as_device, is_local
from sync_batchnorm.places import current_place
from sync_batchnorm.replicate import (
    CallbackContext,
    DataParallelWithCallback,
    Derived,
    _Callbacks,
    is_in_replica,
    patch_replication_callback,
    refuse_stranger,
    swap_class,
)
from sync_batchnorm.torch_private import BatchNormBase, infer_parameters
from sync_batchnorm.warning import ModuleSet, warn

__all__ = [
    "SynchronizedBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "assert_synchronized",
    "convert_model",
    "patch_sync_batchnorm",
    "revert_model",
    "set_sbn_eps_mode",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# NOTE [whole models of the older library]: A layer of it is pickled with a `SyncMaster`, and that one with a method of
# the layer, whose name is looked up when the model is loaded. What such a layer synchronizes by is left out then.
_STATE_OF_OLDER = ("_sync_master", "_is_parallel", "_parallel_id", "_slave_pipe")

MOST_MISSED = 16  # calls of a replica whose statistics wait until its buffers are used; arbitrary

EPS_MODES = ("plus", "clamp")
_default_eps_mode = "plus"


def set_sbn_eps_mode(mode: str) -> None:
    """Set how layers whose `eps_mode` is None keep the variance away from zero.

    Args:
        mode: ``"plus"`` for ``1 / sqrt(var + eps)``, as torch does it, the default; ``"clamp"`` for
            ``1 / sqrt(max(var, eps))``, which older libraries of this design compute when they synchronize.

    Raises:
        ValueError: for any other mode.
    """
    global _default_eps_mode
    _check_eps_mode(mode)
    _default_eps_mode = mode


def _check_eps_mode(mode: str | None) -> None:
    if mode not in EPS_MODES:
        raise ValueError(f"expected eps_mode to be one of {EPS_MODES}, but got {mode!r}; leave it out for torch's own")


def check_sync_options(eps_mode: str | None, group_size: int | None, process_group: Any = None) -> None:
    """Refuse what no layer can take.

    Raises:
        TypeError: for a `group_size` that is no int.
        ValueError: for an unknown `eps_mode`, a `group_size` below 1, or a `group_size` beside a `process_group`.
    """
    if eps_mode is not None:
        _check_eps_mode(eps_mode)
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int)):
        raise TypeError(f"expected group_size as a number of replicas, but got {group_size!r}; pass an int or None")
    if group_size is not None and group_size < 1:
        raise ValueError(f"expected group_size of at least 1, but got {group_size}; pass None for all replicas")
    if group_size is not None and process_group is not None:
        raise ValueError(
            f"expected group_size or process_group, but got {group_size} and {process_group}; group_size divides the "
            "replicas of one process, which then synchronizes with no other, so leave one of them out"
        )


class _LayerMaster(SyncMaster):
    """That of a layer: it belongs to one forward, and copied or pickled it becomes None, as a `SlavePipe` does."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class _SynchronizedBatchNorm(BatchNormBase):
    """What all synchronized layers share; not for use by itself.

    NOTE [state of a layer]: A replica gets its pipe from the replication callback and takes it along when it is
    dropped. The user's own module never holds one: class attributes are the defaults for a module whose class was
    swapped, and for everything that was pickled before.
    """

    eps_mode: str | None = None
    group_size: int | None = None
    process_group: Any = None
    _sync_pipe: Pipe | None = None
    _sync_updates_running_stats = False
    _sync_missed: list[BatchStatistics | None] | None = None
    _sync_master_device: torch.device | None = None

    _data_parallel_master: None = None  # see NOTE [whole models of the older library]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        eps_mode: str | None = None,
        group_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        without_bias = {} if bias else {"bias": False}  # Older torch has no such argument and says so.
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        self._set_sync_options(eps_mode, group_size, process_group)

    def _set_sync_options(self, eps_mode: str | None, group_size: int | None, process_group: Any) -> None:
        """Take the options that are given; those left out stay with the class, so that nothing is left to undo."""
        check_sync_options(eps_mode, group_size, process_group)
        options = {"eps_mode": eps_mode, "group_size": group_size, "process_group": process_group}
        for name, value in options.items():
            if value is not None:
                setattr(self, name, value)

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        """Connect this copy to its peers: the first of each group makes the `SyncMaster`, the others register."""
        first = 0 if self.group_size is None else copy_id - copy_id % self.group_size
        if copy_id == first:
            ctx.sync_master = _LayerMaster(merge_messages)
            tensor = self.weight if self.running_mean is None else self.running_mean
            ctx.master_device = None if tensor is None else tensor.device
        state = self.__dict__  # where an attribute is set without what `nn.Module.__setattr__` looks for, a few times
        state["_sync_pipe"] = ctx.sync_master if copy_id == first else ctx.sync_master.register_slave(copy_id)
        state["_sync_master_device"] = ctx.master_device
        state["_sync_updates_running_stats"] = copy_id == 0
        if copy_id and self.track_running_stats:
            state["_sync_missed"] = []

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            if self._sync_missed:
                self._catch_up(self._sync_missed)
            return BatchNormBase.forward(self, input)  # not that of a class which comes in between, see `convert_model`
        if self._sync_pipe is None and is_in_replica():
            refuse_stranger(self)
        group = self._active_group()
        if self._sync_pipe is None and group is None:
            self._warn_if_replica()
            return BatchNormBase.forward(self, input)
        return self._forward_synchronized(input, group)

    @uncompiled
    def _forward_synchronized(self, input: Tensor, group: distributed.Group | None) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        weight, bias, mean, var = self.weight, self.bias, self.running_mean, self.running_var
        self._check_input(input, weight, bias, mean, var)
        clamps = (self.eps_mode or _default_eps_mode) == "clamp"
        running = None
        if self.track_running_stats and (self._sync_pipe is None or self._sync_updates_running_stats):
            running = RunningStatistics(mean, var, self.num_batches_tracked, self.momentum)
        common, missed = self._has_common_parameters(), self._sync_missed
        if missed is not None and len(missed) >= MOST_MISSED:
            self._catch_up(missed)
        return sync_batch_norm(
            input,
            weight,
            bias,
            self._sync_pipe,
            self.eps,
            clamps,
            group,
            self,
            running,
            common,
            missed,
            self._sync_master_device,
        )

    @uncompiled
    def _catch_up(self, missed: list[BatchStatistics | None]) -> None:
        """Move the buffers of this replica, which are copies, as the calls of this forward have moved the first ones.

        Only where they are used, as most forwards have no call in eval mode behind one in training; and where the calls
        become many, in replicas that somebody keeps.
        """
        running = RunningStatistics(self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)
        for batch in missed:
            if batch is None:
                running.count_call()
            elif running.mean is not None:
                batch.move(running, current_place(running.mean.device))
        missed.clear()

    def _has_common_parameters(self) -> bool:
        """Return whether weight and bias are what this replica was given, as all others were.

        A module may compute others in its forward. What torch gives to a replica is listed in `_former_parameters`.
        """
        former = self.__dict__.get("_former_parameters", {})
        return former.get("weight") is self.weight and former.get("bias") is self.bias

    def _active_group(self) -> distributed.Group | None:
        """Return the group of processes to synchronize with, or None for this process alone."""
        group = distributed.active_group(None if self.group_size is not None else self.process_group)
        if group is None:
            return None
        if self._sync_pipe is None and getattr(self, "_is_replica", False):
            return None  # Replicas that do not know each other would all speak for their process, in any order.
        if self.group_size is None:
            return group
        if self._sync_pipe is None and self.group_size > 1:
            warn(
                f"{type(self).__name__} has a group_size of {self.group_size}, which counts the replicas of one "
                "process, so its statistics are those of this process; pass process_group=torch.distributed."
                f"new_subgroups({self.group_size})[0] instead to synchronize groups of processes"
            )
        return None

    @classmethod
    def convert_sync_batchnorm(cls, module: ModuleT, process_group: Any = None) -> ModuleT:
        """Do what `convert_model` does, under the name that `torch.nn.SyncBatchNorm` has for it."""
        return convert_model(module, process_group=process_group)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if state.get("process_group") is not None:
            state["process_group"] = distributed.SharedGroup(self.process_group)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {name: value for name, value in state.items() if name not in _STATE_OF_OLDER}
        shared = state.get("process_group")
        if isinstance(shared, distributed.SharedGroup):
            state["process_group"] = shared.group
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def _check_input(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None
    ) -> None:
        """Let torch's own function refuse what it refuses, in its words, before anybody is met.

        Only what looks unusual is handed to it, repeated along the batch so that one row is no reason to complain.
        """
        channels, dtype, device = input.shape[1], input.dtype, input.device
        usual = dtype.is_floating_point and channels > 0 and self.eps > 0 and (mean is None) == (var is None)
        for tensor in (weight, bias, mean, var):
            if tensor is not None:
                usual = usual and tensor.shape[0] == channels and tensor.device == device
                usual = usual and (tensor.dtype == dtype or _is_mixed(dtype, tensor.dtype))
        if usual:
            return
        mean, var = (None if buffer is None else buffer.clone() for buffer in (mean, var))
        rows = torch.cat((input[:1], input[:1]))
        with torch.no_grad():
            F.batch_norm(rows, mean, var, weight, bias, True, 0.0, self.eps)

    def _warn_if_replica(self) -> None:
        if getattr(self, "_is_replica", False) and _warned.add(self):
            warn(
                f"{type(self).__name__} trains in a replica that was never connected to its peers, so its statistics "
                "are those of one replica; wrap the model with DataParallelWithCallback alone, or call "
                "patch_replication_callback(data_parallel) on the DataParallel object around it"
            )

    def extra_repr(self) -> str:
        options = {"eps_mode": self.eps_mode, "group_size": self.group_size, "process_group": self.process_group}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        return ", ".join([super().extra_repr(), *given])  # type: ignore[no-untyped-call]


def _is_mixed(input: torch.dtype, parameter: torch.dtype) -> bool:
    return parameter == torch.float32 and input in (torch.float16, torch.bfloat16)


_warned = ModuleSet()  # of their missing callback


class SynchronizedBatchNorm(_SynchronizedBatchNorm):
    """Batch normalization of ``(N, C, +)`` inputs with the statistics of the whole batch of a `DataParallel`.

    .. math:: y = (x - \\mathrm{mean}) / \\sqrt{\\mathrm{var} + \\mathrm{eps}} \\cdot \\mathrm{weight} + \\mathrm{bias}

    In training mode, inside of a `DataParallelWithCallback`, mean and (biased) variance are those of the batches of all
    replicas together, weighted by elements; forward and backward equal those of one device on the whole batch. In eval
    mode, or with a single replica, the layer is the layer of torch that it inherits from. The running statistics and
    the counter of the wrapped module are updated in place, once for each call, with the unbiased variance.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: the weight of this call in the running statistics; None for their cumulative average.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers. float16 and bfloat16 inputs may also meet float32 parameters.
        bias: whether there is a bias beside the weight; on a torch that has this argument.
        eps_mode: ``"plus"`` or ``"clamp"``, see `set_sbn_eps_mode`; None for the default that is set there.
        group_size: synchronize replicas ``0..k-1``, ``k..2k-1``, ... among themselves; a remainder forms a smaller
            group. The running statistics are those of the group of replica 0. None: all replicas. Groups of replicas
            lie inside of one process and do not synchronize with another one.
        process_group: the `torch.distributed` group over which processes synchronize once it is initialized with more
            than one process; None: all processes. The replicas of each process come first. Copies of the layer share
            the group, a pickle cannot hold it.

    Shape:
        - input: ``(N, C, +)``, at least 2-D. N may be zero, and differ between replicas.
        - output: as the input, in shape, dtype and memory format.

    Raises:
        ValueError, RuntimeError, NotImplementedError: as `torch.nn.BatchNorm2d`, in its words, for bad input; one value
            per channel is refused only if it is the only one of all replicas.
        ValueError: also for a `process_group` that this process does not belong to.
        ReplicaSyncError: if the replicas cannot meet. If processes cannot, the error is that of `torch.distributed`.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, nn.BatchNorm1d):
    """`SynchronizedBatchNorm` that is a `torch.nn.BatchNorm1d`: inputs are ``(N, C)`` or ``(N, C, L)``."""


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, nn.BatchNorm2d):
    """`SynchronizedBatchNorm` that is a `torch.nn.BatchNorm2d`: inputs are ``(N, C, H, W)``."""


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, nn.BatchNorm3d):
    """`SynchronizedBatchNorm` that is a `torch.nn.BatchNorm3d`: inputs are ``(N, C, D, H, W)``."""


_SYNCHRONIZED: dict[type[BatchNormBase], type[_SynchronizedBatchNorm]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNorm,
}
_PLAIN: dict[type[nn.Module], type[BatchNormBase]] = {ours: plain for plain, ours in _SYNCHRONIZED.items()}

# What a synchronized layer has beyond a plain one. On an instance, it is an option or the state of a replica.
_RESERVED = frozenset(name for name in vars(_SynchronizedBatchNorm) if not hasattr(BatchNormBase, name))
_FORMER_GROUP = "_former_process_group"  # of an `nn.SyncBatchNorm` for which `convert_model` was given another one
_FORMER_CLASS = "_former_class"  # of a layer for whose class `convert_model` was given a synchronized one
# What a synchronized layer needs from a layer of another class: some may be None.
_NEEDED = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "eps", "momentum", "num_features")
# The methods by which a layer computes, is copied and is pickled. A class that has its own version of one is left as it
# is, see NOTE [conversion by class].
_COMPUTES = ("forward", "__call__", "__getstate__", "__reduce__", "__reduce_ex__")


def convert_model(
    module: ModuleT,
    *,
    classes: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    eps_mode: str | None = None,
    group_size: int | None = None,
    process_group: Any = None,
) -> ModuleT:
    """Make every BatchNorm layer of `module` synchronized, in place, and return `module`.

    `torch.nn.BatchNorm1d/2d/3d` become `SynchronizedBatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` becomes
    `SynchronizedBatchNorm`, a subclass that keeps the forward of torch becomes a synchronized subclass of itself, as
    timm's `BatchNormAct2d` does, and `torch.nn.DataParallel` becomes `DataParallelWithCallback`. Only classes change:
    modules, parameters, buffers, hooks, flags and attributes are the same objects as before, so it may be called before
    or after an optimizer is built, on a part of a model or all of it, and on the module inside of a
    `DistributedDataParallel`. Synchronized layers that are already there are left alone, their options included.
    `revert_model` is the way back.

    Args:
        module: the model, or a single layer.
        classes: which synchronized class stands for which class of yours that normalizes and then does something else.
            ``class SynchronizedNormAct(NormAct, SynchronizedBatchNorm2d): pass`` is one where the forward of `NormAct`
            calls ``super().forward(input)``; otherwise it needs a forward of its own, which computes the same from
            ``SynchronizedBatchNorm2d.forward(self, input)``. Layers of exactly that class become layers of the other.
        eps_mode: of the converted layers, as the other two options: see `SynchronizedBatchNorm`.
        group_size: see there.
        process_group: see there. None keeps the group that a `torch.nn.SyncBatchNorm` has.

    Raises:
        TypeError, ValueError: for bad options, before anything is changed: also for a class in `classes` that is not
            derived from the one that it stands for and from a synchronized one, or whose forward is only one of them,
            and for a layer that lacks what a synchronized one has, like `num_batches_tracked`.

    Warns:
        UserWarning: one warning that names every layer which was left as it is, why, and what to do about it: layers
            with a forward of their own, lazy layers without an input so far, parametrized and scripted layers.
    """
    modules = _named_modules(module)
    check_sync_options(eps_mode, group_size, process_group)
    classes = dict(classes or {})
    _check_classes(classes, modules)
    left: dict[str, list[str]] = {}
    for name, child in modules:
        if isinstance(child, nn.DataParallel):
            patch_replication_callback(child)
        elif _is_scripted(child):
            why = f"{child.original_name} is compiled by TorchScript; convert the model that was compiled instead"
            left.setdefault(why, []).append(name)
        elif type(child) in classes or (
            isinstance(child, BatchNormBase) and not isinstance(child, _SynchronizedBatchNorm)
        ):
            reason = _make_synchronized(child, classes, eps_mode, group_size, process_group)
            if reason:
                left.setdefault(f"{type(child).__name__} {reason}", []).append(name)
    _warn_of(left, "convert_model left BatchNorm layers as they are, which do not synchronize")
    return module


def revert_model(module: ModuleT) -> ModuleT:
    """Undo `convert_model` in place and return `module`: nothing in it refers to this library any more.

    Layers get back the class that they had, and lose the options. What never had another class becomes what it
    corresponds to: `SynchronizedBatchNorm1d/2d/3d` the `torch.nn.BatchNorm1d/2d/3d`, `SynchronizedBatchNorm` the
    `torch.nn.SyncBatchNorm`, `DataParallelWithCallback` the `torch.nn.DataParallel`. A `DataParallel` cannot run
    replicas on the CPU or several on one device: one that has such `device_ids` gets each accelerator once instead, or
    none for the CPU, where it then runs its module directly.

    Warns:
        UserWarning: one warning that names every module of a class that somebody derived from those of this library. It
            is left as it is, since there is no class to go back to.
    """
    left: dict[str, list[str]] = {}
    for name, child in _named_modules(module):
        if isinstance(child, _Callbacks):
            reverted = _revert_parallel(child)
        elif isinstance(child, _SynchronizedBatchNorm):
            reverted = _revert_layer(child)
        else:
            continue
        if not reverted:
            reason = "is derived from a class of sync_batchnorm; give it the class that you want, by hand"
            if is_parametrized(child):
                reason = "is parametrized; remove its parametrizations first"
            left.setdefault(f"{type(child).__name__} {reason}", []).append(name)
    _warn_of(left, "revert_model left modules as they are, which need sync_batchnorm")
    return module


def _named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}; pass the model itself")
    return list(module.named_modules())


def _warn_of(left: dict[str, list[str]], what: str) -> None:
    if left:
        lines = [
            f"- {', '.join(name or '(the module itself)' for name in names)}: {why}" for why, names in left.items()
        ]
        warn(f"{what}, {sum(map(len, left.values()))} in all:\n" + "\n".join(lines))


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in module.original_name


def _check_classes(classes: dict[type[nn.Module], type[nn.Module]], modules: list[tuple[str, nn.Module]]) -> None:
    for plain, ours in classes.items():
        plain_name, our_name = (cls.__name__ if isinstance(cls, type) else repr(cls) for cls in (plain, ours))
        if not isinstance(plain, type) or not isinstance(ours, type) or not issubclass(ours, _SynchronizedBatchNorm):
            raise TypeError(
                f"expected a synchronized class to stand for {plain_name}, but got {our_name}; derive one, as in "
                f"class Synchronized{plain_name}({plain_name}, SynchronizedBatchNorm2d)"
            )
        if plain is ours or not issubclass(ours, plain):
            raise TypeError(
                f"expected a subclass of {plain_name} to stand for it, but got {our_name}; derive it from both, as in "
                f"class {our_name}({plain_name}, SynchronizedBatchNorm2d)"
            )
        computing = [cls for cls in ours.__mro__ if "forward" in vars(cls)]
        if computing[0] is _SynchronizedBatchNorm and plain.forward is not BatchNormBase.forward:
            raise TypeError(
                f"expected a class that does what {plain_name} does, but got {our_name}, whose forward is that of a "
                f"synchronized layer alone; name {plain_name} first among its bases, or write a forward"
            )
        for cls in computing:
            if cls is _SynchronizedBatchNorm or not issubclass(plain, cls):
                break  # what somebody has written for a synchronized class
            code = getattr(inspect.unwrap(vars(cls)["forward"]), "__code__", None)
            if code is not None and "__class__" not in code.co_freevars:
                plain_name = cls.__name__
                raise TypeError(
                    f"expected a class that synchronizes, but got {our_name} with the forward of {plain_name}, which "
                    "never calls super().forward(input); write a forward that computes the same from "
                    "SynchronizedBatchNorm2d.forward(self, input)"
                )
    for name, child in modules:
        missing = [needed for needed in _NEEDED if type(child) in classes and not hasattr(child, needed)]
        if missing:
            plain_name = type(child).__name__
            raise TypeError(
                f"expected {missing[0]} in every layer of {plain_name}, but got none in "
                f"{name or 'the module itself'}; leave this class out"
            )


def _make_synchronized(
    layer: nn.Module,
    classes: Mapping[type[nn.Module], type[nn.Module]],
    eps_mode: str | None,
    group_size: int | None,
    process_group: Any,
) -> str | None:
    """Convert one layer, or return why it is left."""
    given = classes.get(type(layer)) or _of_timm(type(layer))
    reason = _reason_to_leave(layer, given is not None)
    if reason:
        return reason
    if isinstance(layer, LazyModuleMixin):
        # NOTE [lazy layers with parameters]: Loading a state dict gives a lazy layer its parameters, but only its first
        # forward makes it an ordinary one. This is what that forward calls (torch 1.8 to 2.13); it makes no parameters.
        infer_parameters(layer, layer, (torch.empty(0),))
    cls = type(layer)
    try:
        swap_class(layer, given or _SYNCHRONIZED.get(cls) or _mixed(cls))  # type: ignore[arg-type]
    except Exception as error:  # whatever a metaclass or `__init_subclass__` of the user's own may raise
        return f"does not take a synchronized subclass ({error}); derive its class from a synchronized one"
    if process_group is not None and cls is nn.SyncBatchNorm:
        layer.__dict__[_FORMER_GROUP] = layer.process_group
    if cls in classes:
        layer.__dict__[_FORMER_CLASS] = cls
    layer._set_sync_options(eps_mode, group_size, process_group)  # type: ignore[operator]
    return None


def _of_timm(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the synchronized class for that of timm which normalizes and activates, and which timm calls anything."""
    if cls.__name__ != "BatchNormAct2d" or cls.__module__.partition(".")[0] != "timm":
        return None
    try:
        from sync_batchnorm.timm import SynchronizedBatchNormAct2d
    except ImportError:  # a timm from before `timm.layers`
        return None
    return SynchronizedBatchNormAct2d if issubclass(SynchronizedBatchNormAct2d, cls) else None


def _reason_to_leave(layer: nn.Module, has_class: bool) -> str | None:
    """Return why a layer cannot be converted; `has_class` if there is a synchronized class that stands for its own."""
    cls = type(layer)
    if isinstance(layer, LazyModuleMixin) and (infer_parameters is None or layer.has_uninitialized_params()):
        return "is lazy and has seen no input; run one batch through the model, then convert it"
    if is_parametrized(layer):
        return "is parametrized; convert the model before its layers are parametrized"
    if cls is not nn.SyncBatchNorm and isinstance(layer, nn.SyncBatchNorm):
        return "is a subclass of torch.nn.SyncBatchNorm; derive it from SynchronizedBatchNorm"
    own = next((name for name in _COMPUTES if name in vars(layer)), None)
    if own is not None:
        return f"has a {own} of its own, set on the object; convert the model before, or put a torch.nn.BatchNorm there"
    own = next((name for name in _COMPUTES if getattr(cls, name, None) is not _of_torch(cls, name)), None)
    if own is not None and not has_class:
        nearest = next((_SYNCHRONIZED[base] for base in cls.__mro__ if base in _SYNCHRONIZED), SynchronizedBatchNorm)
        ours = f"Synchronized{cls.__name__}"
        return (
            f"has a {own} of its own; write class {ours}({cls.__name__}, {nearest.__name__}) and call "
            f"convert_model(model, classes={{{cls.__name__}: {ours}}}), see its documentation"
        )
    expected = {"process_group", "convert_sync_batchnorm"} if cls is nn.SyncBatchNorm else set()
    clashes = sorted(name for name in _RESERVED - expected if hasattr(cls, name) or hasattr(layer, name))
    if clashes:
        return f"has a {clashes[0]} of its own, a name that synchronized layers need; rename it"
    return None


def _of_torch(cls: type[nn.Module], name: str) -> Any:
    # Python 3.10 has no `__getstate__` to inherit.
    return getattr(nn.SyncBatchNorm if cls is nn.SyncBatchNorm else BatchNormBase, name, None)


def _revert_layer(layer: _SynchronizedBatchNorm) -> bool:
    plain = layer.__dict__.get(_FORMER_CLASS) or _PLAIN.get(type(layer)) or vars(type(layer)).get("_original")
    if plain is None or is_parametrized(layer):
        return False
    swap_class(layer, plain)
    former = layer.__dict__.pop(_FORMER_GROUP, layer.__dict__.get("process_group"))
    for name in (*_RESERVED, _FORMER_CLASS):
        layer.__dict__.pop(name, None)
    if plain is nn.SyncBatchNorm:
        layer.process_group = former
    return True


def _revert_parallel(parallel: _Callbacks) -> bool:
    ours = type(parallel) is DataParallelWithCallback
    plain = nn.DataParallel if ours else vars(type(parallel)).get("_original")
    if plain is None:
        return False
    swap_class(parallel, plain)
    parallel.__dict__.pop("_sync_timeout", None)
    devices = [as_device(device) for device in parallel.device_ids]
    if is_local(devices):
        parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]
    return True


@functools.lru_cache(maxsize=256)
def _mixed(cls: type[BatchNormBase]) -> type[_SynchronizedBatchNorm]:
    """Return the synchronized subclass of `cls`, a class that has the forward of torch."""
    kinds = [_SYNCHRONIZED[base] for base in cls.__mro__ if base in _SYNCHRONIZED]
    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__init__": cls.__init__,  # so that ``type(layer)(...)`` takes the arguments that it always took
        "_original": cls,
        "_derive": staticmethod(_mixed),
    }
    bases = (Derived, *(kinds[:1] or [_SynchronizedBatchNorm]), cls)
    return types.new_class(f"Synchronized{cls.__name__}", bases, {}, lambda ns: ns.update(namespace))


class _Patch:
    """What `patch_sync_batchnorm` keeps: how many contexts are open, and what it puts back when none is."""

    lock = threading.Lock()
    depth = 0
    before: ClassVar[dict[type[BatchNormBase], Any]] = {}
    left: ClassVar[dict[str, int]] = {}  # why layers were left as they are, and how many


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Let `torch.nn.BatchNorm1d/2d/3d` build synchronized layers inside of this context, for building a model.

    Every layer that is built becomes what `convert_model` makes of it, also in code that took the class before, as in
    ``from torch.nn import BatchNorm2d`` or as a default argument. Only the `__init__` of the three classes is replaced,
    for the whole process, and put back when the last of nested or concurrent contexts is left, also by an exception.

    Warns:
        UserWarning: when the last context is left: one warning that names the classes of layers which were left as they
            are, and why.
    """
    with _Patch.lock:
        if not _Patch.depth:
            for cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                _Patch.before[cls] = vars(cls).get("__init__")
                cls.__init__ = _synchronizing(cls.__init__)  # type: ignore[method-assign]
        _Patch.depth += 1
    left: dict[str, int] = {}
    try:
        yield
    finally:
        with _Patch.lock:
            _Patch.depth -= 1
            if not _Patch.depth:
                for patched, init in _Patch.before.items():
                    if init is not None:
                        patched.__init__ = init  # type: ignore[method-assign]
                    elif "__init__" in vars(patched):  # unless somebody else has taken it away
                        del patched.__init__
                _Patch.before.clear()
                left, _Patch.left = _Patch.left, {}
    if left:
        reasons = "".join(f"\n- {number} layers: {why}" for why, number in left.items())
        warn(f"patch_sync_batchnorm left BatchNorm layers as they are, which do not synchronize:{reasons}")


def _synchronizing(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: BatchNormBase, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # A class that was derived from another one in a context keeps this function, which then does nothing.
        if _Patch.depth and not isinstance(self, _SynchronizedBatchNorm):
            reason = _make_synchronized(self, {}, None, None, None)
            if reason:
                why = f"{type(self).__name__} {reason}"
                with _Patch.lock:
                    _Patch.left[why] = _Patch.left.get(why, 0) + 1

    return __init__


def assert_synchronized(model: nn.Module) -> None:
    """Check that every batch norm of `model` would synchronize in its next forward; return if so.

    Call it on the wrapped model, in training mode. Layers that are in eval mode on purpose, like those of a frozen
    backbone, are named as well. A wrapper of one device is fine: one replica has the whole batch. Whether every replica
    will call every layer cannot be seen from here; if one does not, the forward fails at once.

    Args:
        model: the wrapper, or whatever contains it.

    Raises:
        RuntimeError: naming every `torch.nn.BatchNorm1d/2d/3d`, `torch.nn.SyncBatchNorm` and synchronized layer that
            would normalize with less than the whole batch, with the reason for each.
    """
    found = list(_unsynchronized(model))
    if found:
        layers = "".join(
            f"\n  {name or 'the model itself'} ({type(layer).__name__}): {why}" for name, layer, why in found
        )
        raise RuntimeError(
            f"expected every batch norm of the model to synchronize, but got {len(found)} that would not:{layers}"
        )


def _unsynchronized(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    wrappers = [(module, set(module.modules())) for module in model.modules() if isinstance(module, DataParallel)]
    for name, layer in model.named_modules():
        if isinstance(layer, BatchNormBase):
            why = _why_unsynchronized(layer, [wrapper for wrapper, modules in wrappers if layer in modules])
            if why is not None:
                yield name, layer, why


def _why_unsynchronized(layer: BatchNormBase, wrappers: Sequence[DataParallel[nn.Module]]) -> str | None:
    if isinstance(layer, nn.SyncBatchNorm):
        return "it synchronizes processes, not the replicas of one; call convert_model(model)"
    if not isinstance(layer, _SynchronizedBatchNorm):
        return "it is not synchronized; call convert_model(model)"
    if not layer.training:
        return "it is in eval mode; call model.train(), or leave it if it is frozen on purpose"
    # The outermost of nested wrappers makes the replicas, and a layer may be in several that are not nested.
    for wrapper in wrappers:
        if not isinstance(wrapper, _Callbacks):
            return f"its {type(wrapper).__name__} does not connect replicas; call patch_replication_callback on it"
    among_processes = layer.group_size is None and distributed.active_group(layer.process_group) is not None
    if not wrappers and not among_processes:
        return "no wrapper is around it; wrap the model with DataParallelWithCallback"
    return None
