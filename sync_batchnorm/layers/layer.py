"""The layers: their options, when they synchronize, and what they refuse."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import processes
from ..backends.base import LayerArguments, RunningStatistics
from ..current_replica import raise_if_foreign
from ..exchange.forward import merge_replicas, sync_batch_norm
from ..exchange.replica_call import ALONE, Connection
from ..meeting import SyncMaster
from ..messages import check_number, in_transform_error, warn_once
from ..torch_private import BatchNormBase, in_transform, uncompiled

__all__ = [
    "SynchronizedBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "set_sbn_eps_mode",
]

_HALF = (torch.float16, torch.bfloat16)  # inputs of these dtypes may come with float32 parameters
_default_eps_mode = "plus"


def set_sbn_eps_mode(mode: str) -> None:
    """Set, for the process, how layers whose `eps_mode` is None keep the variance away from zero.

    See "Two rules for eps" on the page "Usage".

    Example:
        >>> set_sbn_eps_mode("clamp")
        >>> set_sbn_eps_mode("plus")  # back to the default

    Args:
        mode: ``"plus"`` for ``1 / sqrt(var + eps)``, as torch does it, the default, or ``"clamp"`` for
            ``1 / sqrt(max(var, eps))``, as older libraries of this design.

    Raises:
        TypeError, ValueError: for any other `mode`.
    """
    global _default_eps_mode
    _check_eps_mode("mode", mode)
    _default_eps_mode = mode


def _check_eps_mode(argument: str, mode: str) -> None:
    if mode not in ("plus", "clamp"):
        error = ValueError if isinstance(mode, str) else TypeError
        raise error(f"{argument} must be 'plus' or 'clamp', got {mode!r}")


def sync_options(eps_mode: str | None, group_size: int | None, process_group: Any) -> dict[str, Any]:
    """Return the options of a synchronized layer that are not None; raise an error for those that no layer can take."""
    if eps_mode is not None:
        _check_eps_mode("eps_mode", eps_mode)
    check_number("group_size", group_size)
    processes.check_group(process_group)
    if group_size is not None and process_group is not None:
        raise ValueError(
            f"expected group_size or process_group, but got {group_size} and {process_group}; group_size divides the "
            "replicas of one process, which then synchronizes with no other, so leave one of them out"
        )
    options = {"eps_mode": eps_mode, "group_size": group_size, "process_group": process_group}
    return {name: value for name, value in options.items() if value is not None}


class _SynchronizedBatchNorm(BatchNormBase):
    """The base of all synchronized layers. The callback connects those of replicas; the user's module stays as it is.

    Class attributes are defaults for modules whose class was swapped; instances only store options that were passed.
    """

    eps_mode: str | None = None
    group_size: int | None = None
    process_group: Any = None
    _sync_connection: Connection | None = None
    _sync_layer: tuple[int, Sequence[str]] = (0, ())  # its number among those of its model, and the names of those
    _former_class: type[nn.Module] | None = None  # of a layer converted by the `classes` of `convert_model`
    _former_process_group: Any = None  # of an `nn.SyncBatchNorm` that was converted with another one

    _data_parallel_master = staticmethod(merge_replicas)  # a method of the older library, which its pickles name

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
        without_bias = {} if bias else {"bias": False}  # An older torch raises its own error.
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        self.__dict__.update(sync_options(eps_mode, group_size, process_group))

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        """Connect this copy to its peers: the first of each group makes the `SyncMaster`, the others register."""
        is_master = copy_id == 0 if self.group_size is None else copy_id % self.group_size == 0
        if is_master:
            # Not by `CallbackContext.__setattr__`, which takes longer: a new master belongs to this forward pass.
            vars(ctx)["sync_master"] = SyncMaster(merge_replicas)
            vars(ctx)["master_device"] = getattr(self.running_mean, "device", None)
        pipe = ctx.sync_master if is_master else ctx.sync_master.register_slave(copy_id)
        of_replica = self._parameters if self.__dict__.get("_is_replica") else {}
        weight, bias = of_replica.get("weight"), of_replica.get("bias")
        pools = getattr(ctx, "_sync_pools", None)  # The context of another package has none.
        self.__dict__["_sync_connection"] = Connection(pipe, copy_id, ctx.master_device, weight, bias, pools)
        if copy_id == 1 and self.training and self._active_group() is not None:
            raise RuntimeError(processes.ONE_PROCESS_A_DEVICE.format(ctx.sync_master.where))

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is self.running_var is None):
            return BatchNormBase.forward(self, input)  # `super()` could be a user's class, see `convert_model`
        if self._sync_connection is None:
            raise_if_foreign(self)
            # A process that evaluates alone would wait for ever.
            if not self.training or self._active_group() is None:
                if getattr(self, "_is_replica", False):
                    names = self._sync_layer[1]  # none of a layer that no conversion has seen
                    which = f"{len(names)}, first: {names[0]!r}" if names else f"such as a {type(self).__name__}"
                    warn_once(
                        f"synchronized BatchNorm layers ({which}) run in replicas that are not connected: each "
                        "normalizes with its own chunk of the batch. Use DataParallelWithCallback alone, or call "
                        "patch_replication_callback(data_parallel) on the DataParallel around it"
                    )
                return BatchNormBase.forward(self, input)
        return self._forward_synchronized(input)

    @uncompiled
    def _forward_synchronized(self, input: Tensor) -> Tensor:
        if in_transform():
            raise in_transform_error(type(self).__name__)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        connection, running = self._sync_connection or ALONE, None
        weight, bias = self._attributes(self.__dict__["_parameters"], "weight", "bias")
        # The only place that decides who may update running statistics: replica 0 has the buffers of the model.
        if self.training and self.track_running_stats and connection.number == 0:
            names = "running_mean", "running_var", "num_batches_tracked"
            mean, var, number = self._attributes(self.__dict__["_buffers"], *names)
            running = RunningStatistics(mean, var, number, self.momentum)
        _let_torch_check(input, weight, bias, running, self.eps)
        clamps = (self.eps_mode or _default_eps_mode) == "clamp"
        peers = self._peers() if connection is ALONE else None  # The compiler of torch 2.12 cannot pass a group.
        return sync_batch_norm(input, LayerArguments(weight, bias, self.eps, clamps, running), connection, peers)

    def _attributes(self, registered: dict[str, Any], *names: str) -> Any:
        """Return attributes as `getattr` does, in less time: of `registered`, unless `forward` has set some itself."""
        if self.__dict__.keys().isdisjoint(names):
            try:
                return list(map(registered.__getitem__, names))
            except KeyError:  # One of them is computed, as by a parametrization.
                pass
        return [getattr(self, name) for name in names]

    def _peers(self) -> processes.Peers:
        position, names = self._sync_layer
        name = names[position] if names else f"a {type(self).__name__} without a name"
        return processes.Peers(self._active_group(), name, weakref.ref(self))

    def _active_group(self) -> processes.Group | None:
        """Return the group of processes to synchronize with, or None for this process alone."""
        group = processes.active_group(self.process_group)
        if group is None or (self._sync_connection is None and getattr(self, "_is_replica", False)):
            return None  # Without connections, all replicas would call collectives, in any order.
        if self.group_size is None:
            return group
        if self._sync_connection is None and self.group_size > 1:
            warn_once(
                f"{type(self).__name__} has a group_size of {self.group_size}, which counts the replicas of one "
                "process, so its statistics are those of this process; pass process_group=torch.distributed."
                f"new_subgroups({self.group_size})[0] instead to synchronize groups of processes"
            )
        return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("tmp_running_mean", "tmp_running_var", "running_iter"):  # buffers of older libraries
            state_dict.pop(f"{prefix}_{name}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The pickle of a layer of the older library holds a `SyncMaster`, a shallow copy of a replica its connection.
        state = {name: value for name, value in state.items() if not isinstance(value, (SyncMaster, Connection))}
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("eps_mode", "group_size", "process_group")}
        chosen = [f"{name}={value}" for name, value in options.items() if value is not None]
        try:
            shown = super().extra_repr()  # type: ignore[no-untyped-call]
        except KeyError:  # Torch shows attributes of the object, of which its class may have some.
            shown = str(self.num_features)
        return ", ".join([shown, *chosen])


def _let_torch_check(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningStatistics | None, eps: float
) -> None:
    """Let torch raise its own error for arguments that it refuses, before the exchange."""
    mean, var = (None, None) if running is None else (running.mean, running.var)
    channels, dtype, device = input.shape[1], input.dtype, input.device
    valid = dtype.is_floating_point and channels > 0 and eps > 0 and (mean is None) == (var is None)
    for tensor in (weight, bias, mean, var):
        if tensor is not None:
            fits = tensor.dtype == dtype or (tensor.dtype == torch.float32 and dtype in _HALF)
            valid = valid and fits and tensor.device == device and tensor.shape == (channels,)
    if not valid:
        mean, var = (None if buffer is None else buffer.clone() for buffer in (mean, var))
        rows = torch.cat((input, input))  # A single one would be an error.
        with torch.no_grad():
            F.batch_norm(rows, mean, var, weight, bias, True, 0.0, eps)


class SynchronizedBatchNorm(_SynchronizedBatchNorm):
    """Batch normalization of ``(N, C, +)`` inputs with the statistics of the whole batch of a `DataParallel`.

    It computes ``y = (x - mean) / sqrt(var + eps) * weight + bias``, see "What is computed" on the page "How it works".
    In training mode, mean and biased variance are those of all replicas of a `DataParallelWithCallback`, or of all
    processes, weighted by elements. Each such call updates the running statistics and the counter of the wrapped module
    once, in place, with the unbiased variance. In eval mode, and with a single replica in a single process, the layer
    behaves like that of torch. Without running statistics, replicas synchronize in eval mode, too; processes do not.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), SynchronizedBatchNorm(8), nn.ReLU())
        >>> output = DataParallelWithCallback(model, ["cpu"] * 2)(torch.randn(4, 3, 5, 5))

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as of `torch.nn.BatchNorm2d`.
            float16 and bfloat16 inputs may come with float32 parameters.
        eps_mode: ``"plus"`` or ``"clamp"``, see `set_sbn_eps_mode`; None for the default that is set there.
        group_size: synchronize replicas ``0..k-1``, ``k..2k-1``, ... of one process among themselves; a remainder
            forms a smaller group. The running statistics are those of the group of replica 0. None: all replicas. See
            "Groups of replicas" on the page "Usage".
        process_group: the group of `torch.distributed` over which several processes synchronize; None: all processes.
            Torch cannot copy or pickle a group, nor a layer that has one. See "Groups of processes" on the page
            "Processes and machines".

    Shape:
        - input: ``(N, C, +)``, at least 2-D. N and ``+`` may differ between replicas, and N may be zero.
        - output: with the shape, dtype and memory format of the input.

    Raises:
        ValueError, RuntimeError, NotImplementedError: for bad input, with the texts of `torch.nn.BatchNorm2d`; a single
            value per channel only if all replicas of the group together have no other. ValueError if replicas differ in
            dtype, type of device, channels, number of dimensions, `eps`, `eps_mode` or inference mode; also for a
            `process_group` that this process does not belong to; TypeError for one that is no group. RuntimeError in
            all processes if they are seen to call different layers.
        ReplicaSyncError: if the replicas cannot exchange. If processes cannot, the error is one of `torch.distributed`.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, nn.BatchNorm1d):
    """A `SynchronizedBatchNorm` that is a `torch.nn.BatchNorm1d`: inputs are ``(N, C)`` or ``(N, C, L)``."""


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, nn.BatchNorm2d):
    """A `SynchronizedBatchNorm` that is a `torch.nn.BatchNorm2d`: inputs are ``(N, C, H, W)``."""


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, nn.BatchNorm3d):
    """A `SynchronizedBatchNorm` that is a `torch.nn.BatchNorm3d`: inputs are ``(N, C, D, H, W)``."""


SYNCHRONIZED: dict[type[BatchNormBase], type[_SynchronizedBatchNorm]] = {  # by the classes of torch
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNorm,
}
