"""The synchronized batch norm layers: their options, their connection between replicas, and checks of their input.

Before each forward pass, `DataParallelWithCallback` calls a method of each layer, the replication callback. The
callback connects the copies of the layer in all replicas. A layer without such a connection exchanges with the other
processes of `torch.distributed`. If there are no other processes, the layer behaves like its base class in torch.
"""

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

_HALF = (torch.float16, torch.bfloat16)  # With half-precision inputs, torch accepts float32 parameters.
_default_eps_mode = "plus"


def set_sbn_eps_mode(mode: str) -> None:
    """Set the process-wide `eps_mode` of layers without one, see "Two rules for eps" on the page "Usage".

    Example:
        >>> set_sbn_eps_mode("clamp")
        >>> set_sbn_eps_mode("plus")  # back to the default

    Args:
        mode: ``"plus"`` for torch's ``1 / sqrt(var + eps)``, or ``"clamp"`` for ``1 / sqrt(max(var, eps))`` of older
            libraries.

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
    """Return a dict of the layer options that are not None. Raise an error if the value of an option is invalid."""
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
    """The base class of all synchronized layers.

    A layer in the user's model is never connected to other layers. Only its copies in replicas are connected, by the
    replication callback.

    The options, such as `eps_mode`, have their default values in class attributes, because the constructor of this
    class never runs for a converted layer. The `__dict__` of a layer contains only options that the user passed.
    """

    eps_mode: str | None = None
    group_size: int | None = None
    process_group: Any = None
    _sync_connection: Connection | None = None
    # For error messages: the position of this layer's name in a list, and the list itself, which contains the names of
    # all synchronized layers of the model.
    _sync_layer: tuple[int, Sequence[str]] = (0, ())
    # The class that this layer had before `convert_model(model, classes=...)` converted the layer.
    _former_class: type[nn.Module] | None = None
    # If the conversion of an `nn.SyncBatchNorm` has chosen another process group, this is the group that it had before.
    _former_process_group: Any = None

    # Pickles made by the older library refer to this method by name, so do not rename it.
    _data_parallel_master = staticmethod(merge_replicas)

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
        # Pass `bias` to torch only if it is False: the constructor of an older torch does not know this argument.
        without_bias = {} if bias else {"bias": False}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        self.__dict__.update(sync_options(eps_mode, group_size, process_group))

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        """Connect this copy of the layer, in replica `copy_id`, to the copies in the other replicas of its group.

        The first copy of each group makes a `SyncMaster`. The other copies register with this `SyncMaster`.
        """
        is_master = copy_id == 0 if self.group_size is None else copy_id % self.group_size == 0
        if is_master:
            # Store the `SyncMaster` in `vars(ctx)`, the `__dict__` of the context object. An assignment to
            # `ctx.sync_master` would take longer, because it also resets the `SyncMaster`. A new `SyncMaster` needs no
            # reset.
            vars(ctx)["sync_master"] = SyncMaster(merge_replicas)
            vars(ctx)["master_device"] = getattr(self.running_mean, "device", None)
        pipe = ctx.sync_master if is_master else ctx.sync_master.register_slave(copy_id)
        of_replica = self._parameters if self.__dict__.get("_is_replica") else {}
        weight, bias = of_replica.get("weight"), of_replica.get("bias")
        # `ctx` may come from a wrapper of another package, which has no pools of reusable memory.
        pools = getattr(ctx, "_sync_pools", None)
        self.__dict__["_sync_connection"] = Connection(pipe, copy_id, ctx.master_device, weight, bias, pools)
        if copy_id == 1 and self.training and self._active_group() is not None:
            raise RuntimeError(processes.ONE_PROCESS_A_DEVICE.format(ctx.sync_master.where))

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is self.running_var is None):
            # Call torch's `forward` directly, because `super().forward` may be the method of a user's class.
            return BatchNormBase.forward(self, input)
        if self._sync_connection is None:
            raise_if_foreign(self)
            # Processes exchange in training mode only. In eval mode, often only one process runs the model, and would
            # wait forever for the other processes.
            if not self.training or self._active_group() is None:
                if getattr(self, "_is_replica", False):
                    names = self._sync_layer[1]  # names of all layers, unknown without `convert_model`
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
        # Only replica 0 updates the running statistics, because only its layers hold the buffers of the model. The
        # layers of all other replicas hold copies. No other line chooses the replica that updates.
        if self.training and self.track_running_stats and connection.number == 0:
            names = "running_mean", "running_var", "num_batches_tracked"
            mean, var, number = self._attributes(self.__dict__["_buffers"], *names)
            running = RunningStatistics(mean, var, number, self.momentum)
        _let_torch_check(input, weight, bias, running, self.eps)
        clamps = (self.eps_mode or _default_eps_mode) == "clamp"
        # Look up the process group here. It cannot be an argument of this function: the caller, `forward`, may be
        # compiled, and compiled code cannot pass a process group to a function (torch 2.12).
        peers = self._peers() if connection is ALONE else None
        return sync_batch_norm(input, LayerArguments(weight, bias, self.eps, clamps, running), connection, peers)

    def _attributes(self, registered: dict[str, Any], *names: str) -> Any:
        """Return a list of the layer's attributes with these names, faster than `getattr`.

        The values are looked up in `registered`, the layer's dict of parameters or of buffers. `getattr` is called only
        if `forward` assigned a plain attribute of the same name, or if a value is missing in `registered`.
        """
        if self.__dict__.keys().isdisjoint(names):
            try:
                return list(map(registered.__getitem__, names))
            except KeyError:  # A parametrized weight is computed at each access, so it is missing in `registered`.
                pass
        return [getattr(self, name) for name in names]

    def _peers(self) -> processes.Peers:
        position, names = self._sync_layer
        name = names[position] if names else f"a {type(self).__name__} without a name"
        return processes.Peers(self._active_group(), name, weakref.ref(self))

    def _active_group(self) -> processes.Group | None:
        """Return the process group to synchronize with; None if this layer does not exchange with other processes."""
        group = processes.active_group(self.process_group)
        if group is None or (self._sync_connection is None and getattr(self, "_is_replica", False)):
            # The replicas of this process are not connected, so each would exchange with the other processes from its
            # own thread. The threads would call the collectives of `torch.distributed` in an arbitrary order.
            return None
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
        # State dicts saved by older libraries contain three more buffers for each layer. Remove these three keys,
        # because torch would report them as unexpected.
        for name in ("tmp_running_mean", "tmp_running_var", "running_iter"):
            state_dict.pop(f"{prefix}_{name}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Drop two attributes that must not be copied: the `SyncMaster` in pickles of the older library, and the
        # connection of a replica in a shallow copy of its layer.
        state = {name: value for name, value in state.items() if not isinstance(value, (SyncMaster, Connection))}
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("eps_mode", "group_size", "process_group")}
        chosen = [f"{name}={value}" for name, value in options.items() if value is not None]
        try:
            shown = super().extra_repr()  # type: ignore[no-untyped-call]
        # Torch's `extra_repr` looks up values such as `eps` in the layer's `__dict__`, and raises a `KeyError` if the
        # value is a class attribute instead.
        except KeyError:
            shown = str(self.num_features)
        return ", ".join([shown, *chosen])


def _let_torch_check(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningStatistics | None, eps: float
) -> None:
    """Check the arguments of a layer before an exchange. If they are invalid, let `F.batch_norm` raise an error."""
    mean, var = (None, None) if running is None else (running.mean, running.var)
    channels, dtype, device = input.shape[1], input.dtype, input.device
    valid = dtype.is_floating_point and channels > 0 and eps > 0 and (mean is None) == (var is None)
    for tensor in (weight, bias, mean, var):
        if tensor is not None:
            fits = tensor.dtype == dtype or (tensor.dtype == torch.float32 and dtype in _HALF)
            valid = valid and fits and tensor.device == device and tensor.shape == (channels,)
    if not valid:
        mean, var = (None if buffer is None else buffer.clone() for buffer in (mean, var))
        # `F.batch_norm` refuses an input with a single value per channel, which is valid here, because other replicas
        # may have more values. So pass the input concatenated with itself.
        rows = torch.cat((input, input))
        with torch.no_grad():
            F.batch_norm(rows, mean, var, weight, bias, True, 0.0, eps)


class SynchronizedBatchNorm(_SynchronizedBatchNorm):
    """Normalize ``(N, C, +)`` inputs with the batch statistics of all replicas of a `DataParallelWithCallback`.

    The formula is ``y = (x - mean) / sqrt(var + eps) * weight + bias``, see "What is computed" on the page "How it
    works". In training mode, mean and biased variance are taken over all elements of all replicas and processes; each
    call moves the running statistics of the model once, in place, with the unbiased variance. Eval mode is as in torch.
    Without running statistics, replicas synchronize in eval mode, too, but processes do not.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), SynchronizedBatchNorm(8), nn.ReLU())
        >>> output = DataParallelWithCallback(model, ["cpu"] * 2)(torch.randn(4, 3, 5, 5))

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as of `torch.nn.BatchNorm2d`.
        eps_mode: ``"plus"``, ``"clamp"``, or None for the default of `set_sbn_eps_mode`.
        group_size: number of neighboring replicas to synchronize, in one process; the last group may be smaller. None:
            all replicas. See "Groups of replicas" on the page "Usage".
        process_group: the `torch.distributed` group to synchronize. None: all processes. See "Groups of processes" on
            the page "Processes and machines".

    Shape:
        - input: ``(N, C, +)``; N, also zero, and ``+`` may differ between replicas. Its dtype is the dtype of the
          parameters, or float16 or bfloat16 beside float32.
        - output: shape, dtype and memory format of the input.

    Raises:
        ValueError, RuntimeError, NotImplementedError: for bad input, with torch's texts. A single value per channel is
            an error only if the other replicas of the group have none.
        ValueError, TypeError: if replicas differ in dtype, device type, channels, number of dimensions, `eps`,
            `eps_mode` or inference mode; for a `process_group` of the wrong type or without this process.
        RuntimeError: if processes are seen to call different layers. Other errors of processes are those of
            `torch.distributed`.
        ReplicaSyncError: if replicas cannot exchange.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, nn.BatchNorm1d):
    """A `torch.nn.BatchNorm1d` with the options of `SynchronizedBatchNorm`, for ``(N, C)`` or ``(N, C, L)``."""


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, nn.BatchNorm2d):
    """A `torch.nn.BatchNorm2d` with the options of `SynchronizedBatchNorm`, for ``(N, C, H, W)``."""


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, nn.BatchNorm3d):
    """A `torch.nn.BatchNorm3d` with the options of `SynchronizedBatchNorm`, for ``(N, C, D, H, W)``."""


# Maps each batch norm class of torch to its synchronized class.
SYNCHRONIZED: dict[type[BatchNormBase], type[_SynchronizedBatchNorm]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNorm,
}
