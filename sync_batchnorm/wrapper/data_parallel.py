"""The wrapper `DataParallelWithCallback`, and a patch that gives an existing `DataParallel` object the same behavior.

A forward pass of `DataParallel` takes four steps: `scatter`, `replicate`, `parallel_apply` and `gather`. Users override
these methods in subclasses, and call `super()` in them. We cannot put the default steps and our additions into a single
class: if a user overrides a step, our addition to this step would be lost. So two classes share the work. When an
object of a user's class is patched, the user's class stands between these two in the method resolution order:

    _ReplicationMixin                    the user's class     AnyDeviceDataParallel
    additions, always run                may override         default steps
    ----------------------------------   ------------------   ----------------------------------------------------
    forward: refuse tracing              scatter              split the arguments into chunks
    replicate: call the callbacks        replicate            copy the module
    parallel_apply: modes, failures      parallel_apply       call a `ReplicaHandle` for each replica, in threads
                                         gather               concatenate the outputs
    ----------------------------------   ------------------   ----------------------------------------------------

The replicas hold all state of a forward pass, so this state ends with the replicas. The only exception is memory on
GPUs that later forward passes use again, see NOTE [workspaces].
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import permutations
from threading import TIMEOUT_MAX
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ..backends.workspaces import pools_of
from ..current_replica import is_in_replica
from ..derived import derived_class
from ..meeting import DEFAULT_TIMEOUT
from ..messages import check_module, warn_once
from ..torch_private import BatchNormBase, has_attribute, saved_tensors_hooks, uncompiled
from ..trees import tensors_in
from .arguments import Arguments, InDims, OutDims, check_dims
from .callbacks import execute_callbacks, refuse_other_packages, refuse_training
from .lost_state import Look
from .parallel_apply import ForwardPass, ReplicaHandle, call_replicas, new_coordinator, prepared_runs
from .replicate import check_replicable, make_replicas
from .scatter_gather import gather_trees

__all__ = ["DataParallelWithCallback", "patch_replication_callback"]

DeviceId = int | str | torch.device
DataParallelT = TypeVar("DataParallelT", bound="DataParallel[Any]")

NO_ACCELERATOR = (
    "PyTorch finds no accelerator, so the module runs without replicas; for replicas on the CPU write "
    "DataParallelWithCallback(module, ['cpu'] * 2), or derive your own class of DataParallel from it"
)

# Which default steps of a wrapper, such as "scatter", ran in the current forward pass: a dict by (wrapper, step). If a
# user's class overrides a step without a call of `super()`, the step is missing. The value for "scatter" is a function
# that describes the split for error notes. The dict is emptied at the end of the forward pass, because threads started
# by user code may keep this context alive.
_default_steps_run: ContextVar[dict[tuple[nn.Module, str], Any]] = ContextVar("_default_steps_run")


class AnyDeviceDataParallel(DataParallel[Any]):
    """`torch.nn.DataParallel` with replicas on the CPU, several replicas on one device, `in_dims` and `out_dims`."""

    _sync_in_dims: InDims
    _sync_out_dims: OutDims

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        in_dims: InDims = None,
        out_dims: OutDims = None,
    ) -> None:
        options = _checked_options(module, timeout, in_dims, out_dims)
        devices: Any = checked_devices(device_ids)
        output: Any = None if output_device is None else as_device(output_device)
        if unsupported_by_torch(devices):
            nn.Module.__init__(self)
            self.module, self.dim, self.device_ids = module, dim, list(devices)
            self.output_device, self.src_device_obj = output or devices[0], devices[0]
        else:
            output = -1 if output == torch.device("cpu") else output_device  # In torch, -1 is the device id of the CPU.
            super().__init__(module, device_ids, output, dim)  # type: ignore[arg-type]
            # Without an accelerator, torch's `DataParallel` does not set `dim` and `output_device`, so set them here.
            if not self.device_ids:
                self.dim, self.output_device = dim, output
                if devices:
                    warn_once(NO_ACCELERATOR)
        self.__dict__.update(options)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        arguments = Arguments(self, inputs, kwargs or {}, len(device_ids))
        # With a single device, do not use the `ContextVar` `_default_steps_run`: torch.compile may trace such a
        # wrapper, but cannot trace a `ContextVar`.
        if len(self.device_ids) > 1:
            _default_steps_run.get({})[self, "scatter"] = arguments.describe_split
        devices = tuple(map(as_device, device_ids))
        return arguments.chunks(devices, not unsupported_by_torch(devices))

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        return make_replicas(module, list(map(as_device, device_ids)), not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        return call_replicas(_handles_of(self, replicas), inputs, kwargs)

    def gather(self, outputs: Any, output_device: DeviceId) -> Any:
        _default_steps_run.get({})[self, "gather"] = None
        by_torch = not unsupported_by_torch(tuple(map(as_device, self.device_ids)))
        return gather_trees(outputs, as_device(output_device), self.dim, by_torch, self._sync_out_dims)


class _ReplicationMixin(DataParallel[Any]):
    """Extend `forward`, `replicate` and `parallel_apply` of `DataParallel`, for example by replication callbacks.

    `AnyDeviceDataParallel` is not a base of this class. The class of a patched object is derived from the user's class
    and from this class. If `AnyDeviceDataParallel` were a base, it would come before the base classes of the user's
    class in the method resolution order, and `super()` in the user's class would skip them.
    """

    # If an object is patched, these classes come after its user's class, and before torch's `DataParallel`.
    _sync_behind = (AnyDeviceDataParallel,)
    # Default values of options. A wrapper that was loaded from a pickle of an older version lacks these options.
    _sync_timeout: float = DEFAULT_TIMEOUT
    _sync_in_dims: InDims = None
    _sync_out_dims: OutDims = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # If this wrapper is a submodule of another wrapper's replica, run its module directly in this thread.
        if self.__dict__.get("_is_replica"):
            return self.module(*inputs, **kwargs)
        if len(self.device_ids) > 1:
            return self._forward_in_replicas(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and has_attribute(module, name):
                raise AttributeError(f"{error}; the module has it: parallel.module.{name}") from None
            raise

    def extra_repr(self) -> str:
        connected = "" if type(self) is DataParallelWithCallback else "replicas connected by sync_batchnorm"
        dims = {"in_dims": self._sync_in_dims, "out_dims": self._sync_out_dims}
        named = [f"{name}={value}" for name, value in dims.items() if value is not None]
        return ", ".join(filter(None, [super().extra_repr(), connected, *named]))

    @uncompiled
    def _forward_in_replicas(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(
                "expected replicas outside torch.jit.trace, which does not see what their threads run, but got a call "
                f"of {type(self).__name__} inside, as add_graph of TensorBoard makes; trace parallel.module instead"
            )
        steps: dict[tuple[nn.Module, str], Any] = {}
        token = _default_steps_run.set(steps)
        try:
            outputs = super().forward(*inputs, **kwargs)
            self._refuse_ignored_dims("gather", "out_dims", self._sync_out_dims)
            return outputs
        finally:
            _default_steps_run.reset(token)
            steps.clear()

    def _refuse_ignored_dims(self, step: str, option: str, dims: Any) -> None:
        """Raise an error if the option `in_dims` or `out_dims` was ignored by the user's own `scatter` or `gather`."""
        key = self, step
        # The method `forward` sets `_default_steps_run`. If a user calls `scatter`, `replicate` and the other steps one
        # by one, without `forward`, the variable is not set, and this method raises no error.
        if dims is not None and key not in _default_steps_run.get({key: None}):
            raise RuntimeError(
                f"{option} of a {type(self).__name__} would be ignored, as its own {step} does not call that of "
                f"DataParallelWithCallback; call super().{step}, or leave out {option}"
            )

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId], *args: Any, **kwargs: Any) -> list[Any]:
        self._refuse_ignored_dims("scatter", "in_dims", self._sync_in_dims)
        if is_in_replica():
            refuse_training(self, module)
        if len(device_ids) == 1:
            return [module]
        check_replicable(self, module)
        devices = list(map(as_device, device_ids))
        check_transfers(frozenset(devices))
        replicas = super().replicate(module, device_ids, *args, **kwargs)  # type: ignore[arg-type]
        coordinator = new_coordinator(devices, self._sync_timeout)
        try:
            contexts = execute_callbacks(replicas, coordinator, pools_of(self))
        except BaseException as error:
            # If a replication callback fails, layers may keep a `SyncMaster` from callbacks that ran before. Abort the
            # coordinator, so that a later exchange through this `SyncMaster` raises an error instead of waiting
            # forever.
            coordinator.abort(error, 0.0)
            raise
        if not contexts:
            _warn_of_plain_layers(self, module)
        forward_pass = ForwardPass(module, coordinator, partial(refuse_other_packages, module, contexts))
        return list(map(ReplicaHandle, forward_pass.prepare(replicas, devices)))

    def parallel_apply(self, replicas: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the replicas and return their outputs. If a replica fails, raise its error in the caller's thread.

        Further arguments are passed on to the next `parallel_apply` in the method resolution order.
        """
        handles = _handles_of(self, replicas)
        runs = [handle._sync_run for handle in handles]
        forward_pass = runs[0].forward_pass
        look = Look(self, forward_pass.original, runs[0].replica)
        call = partial(super().parallel_apply, handles, *args, **kwargs)
        describe_split = _default_steps_run.get({}).get((self, "scatter"), str)
        outputs = forward_pass.apply(call, runs, lambda: " ".join(filter(None, [describe_split(), look.note()])))
        look.warn()
        # Warn about plain batch norms if no synchronized layer exchanged in this forward pass. Do not warn if the user
        # made the replicas (if `original` is a replica), because another coordinator may connect their layers.
        if not forward_pass.coordinator.has_exchanged and forward_pass.original is not runs[0].replica:
            layers: Any = [it for it in runs[0].replica.modules() if vars(it).get("_sync_connection") is not None]
            if any([layer.training and layer.group_size != 1 for layer in layers]):
                _warn_of_plain_layers(self, forward_pass.original)
        _warn_of_checkpoint(self, outputs)
        return outputs


class DataParallelWithCallback(_ReplicationMixin, AnyDeviceDataParallel):
    """A `torch.nn.DataParallel` whose replicas exchange data, also on the CPU, or several on one device.

    If a replica fails, waiting replicas stop, and your thread gets the exception with the replica's traceback in a
    note. With a single chunk, or inside a replica, the wrapper calls the module itself, without threads and callbacks.

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.BatchNorm2d(8)), ["cpu"] * 2)
        >>> output = parallel(torch.randn(4, 8, 5, 5))

    Args:
        module: the module, with parameters and buffers on the first of `device_ids`.
        device_ids: one device for each replica, see "Devices" on the page "Usage". None: all accelerators; without any,
            the module runs directly.
        output_device: device of the gathered outputs. None: the first of `device_ids`.
        dim: dimension of samples in tensors without an entry in `in_dims` or `out_dims`.
        timeout: seconds that a replica waits for a running one before a `ReplicaSyncError`, which your thread gets up
            to two seconds later.
        in_dims: dimensions of samples by argument name: an int, None, or a tuple or dict of these for entries. See
            "Arguments that are not cut by rows" on the page "Usage".
        out_dims: dimensions of samples in outputs: an int, or a tuple or dict for entries.

    Raises:
        TypeError, ValueError: for wrong arguments; from a call, if inputs cannot be split or outputs not gathered, see
            "Arguments and outputs" on the page "Usage".
        RuntimeError: from a call, if a parameter or buffer is on another device, if the module cannot be replicated or
            is traced, if output shapes do not fit, or if a replica trains a synchronized layer of another one, see
            "Layers that do not belong to the replica" on the page "Troubleshooting".
        ReplicaSyncError: from a call, if replicas cannot exchange. Other exceptions of replicas are raised unchanged,
            but `StopIteration` as a `RuntimeError`.

    Warns:
        UserWarning: see "Warnings to filter" on the page "Usage".
    """


def patch_replication_callback(
    data_parallel: DataParallelT, *, timeout: float | None = None, in_dims: InDims = None, out_dims: OutDims = None
) -> DataParallelT:
    """Turn an existing `torch.nn.DataParallel` object into a `DataParallelWithCallback`, in place; return it.

    An object of a subclass of `DataParallel` keeps its overridden methods. Copies and pickles of a patched object stay
    patched.

    Example:
        >>> parallel = patch_replication_callback(nn.DataParallel(SynchronizedBatchNorm2d(8)))

    Args:
        data_parallel: the object to patch.
        timeout, in_dims, out_dims: as in `DataParallelWithCallback`. None: unchanged, at first 300 seconds and None.

    Raises:
        TypeError, ValueError: if `data_parallel` is not a `DataParallel`, or for wrong options.

    Warns:
        UserWarning: if PyTorch finds no accelerator: the module runs without replicas.
    """
    if not isinstance(data_parallel, DataParallel):
        kind = type(data_parallel)
        raise TypeError(
            f"data_parallel must be a torch.nn.DataParallel, got {kind.__module__}.{kind.__qualname__}; (1) if that is "
            "a wrapper, derive its class from DataParallelWithCallback; (2) if it is a model, wrap it with "
            "DataParallelWithCallback"
        )
    timeout = getattr(data_parallel, "_sync_timeout", DEFAULT_TIMEOUT) if timeout is None else timeout
    options = _checked_options(data_parallel.module, timeout, in_dims, out_dims)
    if not data_parallel.device_ids:
        warn_once(NO_ACCELERATOR)
    patch(data_parallel)
    data_parallel.__dict__.update({name: value for name, value in options.items() if value is not None})
    return data_parallel


def patch(data_parallel: DataParallel[Any]) -> None:
    """Make a `DataParallel` object connect its replicas, by a change of its class. A second call has no effect."""
    cls: Any = type(data_parallel)
    if not issubclass(cls, _ReplicationMixin):
        patched = DataParallelWithCallback if cls is DataParallel else derived_class(cls, _ReplicationMixin)
        object.__setattr__(data_parallel, "__class__", patched)


def drop_unsupported_devices(data_parallel: DataParallel[Any]) -> None:
    """Drop the devices that `nn.DataParallel` does not support, after the patch of a wrapper is removed.

    `nn.DataParallel` supports neither the CPU nor several replicas on one device.
    """
    data_parallel.__dict__.pop("_sync_timeout", None)
    devices = tuple(map(as_device, data_parallel.device_ids))
    if unsupported_by_torch(devices):
        data_parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]


def _handles_of(wrapper: Any, replicas: Sequence[Any]) -> list[ReplicaHandle]:
    """Return a `ReplicaHandle` for each object in `replicas`. All handles belong to one `ForwardPass`.

    A user's `parallel_apply` may replace handles by functions or modules that call the handles. Such a function or
    module gets a new handle, for the `ReplicaRun` that `replicate` prepared at the same index of the list.
    """
    if {*map(type, replicas)} == {ReplicaHandle}:
        return list(replicas)
    runs = prepared_runs()
    # `replicate` has not prepared any runs if the user made the replicas, or if there is a single chunk.
    if len(runs) != len(replicas):
        originals = [replica if isinstance(replica, nn.Module) else wrapper.module for replica in replicas]
        devices = list(map(as_device, wrapper.device_ids[: len(replicas)]))
        forward_pass = ForwardPass(originals[0], new_coordinator(devices, wrapper._sync_timeout))
        runs = forward_pass.prepare(originals, devices)
    return list(map(ReplicaHandle, runs, replicas))


def _checked_options(module: nn.Module, timeout: float, in_dims: InDims, out_dims: OutDims) -> dict[str, Any]:
    """Check the options of a wrapper, and return a dict with the attributes that store these options."""
    check_module(module)
    check_dims(module, in_dims, out_dims)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}; pass for example 300.0")
    if not 0 < timeout <= TIMEOUT_MAX:
        raise ValueError(
            f"timeout must be more than 0 and at most {TIMEOUT_MAX:g} seconds, got {timeout!r}; pass for example 300.0"
        )
    return {"_sync_timeout": float(timeout), "_sync_in_dims": in_dims, "_sync_out_dims": out_dims}


def _warn_of_plain_layers(wrapper: nn.Module, module: nn.Module) -> None:
    """Warn if a module contains batch norm layers that are in training mode and do not synchronize."""
    norms = [(name, child) for name, child in module.named_modules() if isinstance(child, BatchNormBase)]
    plain = [name for name, norm in norms if norm.training and not hasattr(norm, "__data_parallel_replicate__")]
    if plain:
        layers, do = ("layer", "does") if len(plain) == 1 else ("layers", "do")
        warn_once(
            f"{len(plain)} BatchNorm {layers} in training mode (first: {plain[0] or 'the module itself'!r}) {do} not "
            f"synchronize in a {type(wrapper).__name__}: each replica normalizes with its own chunk of the batch. Call "
            "convert_model(model), or filter this warning if that is intended"
        )


def _warn_of_checkpoint(wrapper: nn.Module, outputs: list[Any]) -> None:
    """Warn if the call of the wrapper is inside `torch.utils.checkpoint.checkpoint`.

    A checkpoint around the wrapper saves no memory: torch sets the saved-tensor hooks of the checkpoint only in the
    caller's thread, not in the threads of replicas.
    """
    pack, _ = saved_tensors_hooks(True) or (None, None)
    is_around = len(outputs) > 1 and getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    if is_around and any([tensor.requires_grad for tensor in tensors_in(outputs)]):
        warn_once(
            f"expected the checkpoint inside the model, but got one around a {type(wrapper).__name__}, which saves "
            "none of the memory of its replicas; call checkpoint(self.body, input, use_reentrant=False) in forward() "
            "of the model"
        )


# Devices.


@lru_cache(maxsize=256)
def as_device(device: DeviceId) -> torch.device:
    """Return the `torch.device` for a device id. All ids of one device give the same result.

    For example, ``0``, ``"cuda"`` and ``"cuda:0"`` all become ``cuda:0`` on a machine with CUDA.
    """
    if isinstance(device, int) and device != -1:
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cuda" if accelerator is None else accelerator.type, device)
    device = torch.device("cpu" if device == -1 else device)  # In `output_device`, torch writes -1 for the CPU.
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0)


@lru_cache(maxsize=256)
def unsupported_by_torch(devices: tuple[torch.device, ...]) -> bool:
    """Return whether the devices include the CPU, or one device twice: torch's scatter and gather refuse both."""
    distinct = set(devices)
    return torch.device("cpu") in distinct or len(distinct) < len(devices)


def checked_devices(device_ids: Sequence[DeviceId] | None) -> tuple[torch.device, ...]:
    """Return the devices for the `device_ids` of a wrapper; an empty tuple if `device_ids` is None.

    Raise an error if `device_ids` is not a list, or names both the CPU and accelerators.
    """
    if isinstance(device_ids, str) or not isinstance(device_ids, (Sequence, type(None))):
        raise TypeError(f"device_ids must be a list, got {device_ids!r}; pass for example ['cpu'] * 2 or [0, 1]")
    devices = tuple(map(as_device, device_ids or ()))
    if unsupported_by_torch(devices) and len({device.type for device in devices}) > 1:
        raise ValueError(
            f"device_ids must be accelerators or the CPU, not both, got {[str(device) for device in devices]}; "
            "leave out the devices of one kind"
        )
    return devices


@lru_cache(maxsize=256)
def check_transfers(devices: frozenset[torch.device]) -> None:
    """Raise an error if copies between two of the devices arrive with wrong data.

    A set of devices that passed is not checked again. With some drivers and settings of the IOMMU, peer-to-peer copies
    between GPUs lose data without an error:
    https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257, https://github.com/pytorch/pytorch/issues/132397.
    """
    # Tests call this function with accelerators that the machine does not have. Do not check such devices.
    if len(devices) < 2 or not torch.accelerator.is_available():
        return
    for i, (source, target) in enumerate(permutations(devices, 2)):
        # Copy different numbers between each pair of devices. If a copy fails, the target's memory may still hold the
        # numbers of an earlier pair, and equal numbers would hide the failure.
        expected = torch.arange(i, 65536 + i, dtype=torch.int32, device="cpu")
        on_source = expected.to(source)
        if torch.equal(on_source.cpu(), expected) and not torch.equal(on_source.to(target).cpu(), expected):
            raise RuntimeError(
                f"a copy from {source} to {target} does not arrive, though it does by way of the CPU: training on "
                "both would go wrong without an error. Make peer-to-peer copies work, for example with the kernel "
                "parameter iommu=pt, or by disabling the IOMMU and PCI ACS; or use one of these devices"
            )
