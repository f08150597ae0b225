"""The replication callback, and two ways to have it called: `DataParallelWithCallback` and a patched `DataParallel`.

A forward of the wrapper makes its replicas, connects them to one `Coordinator`, and calls `__data_parallel_replicate__`
on every copy of every submodule that has it. All state belongs to the replicas and ends with them.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.autograd import profiler
from torch.nn.parallel import DataParallel

from .meeting import DEFAULT_TIMEOUT, PATIENCE, Coordinator, Joining, SyncMaster, joining, without_frames
from .parallel.data_parallel import (
    NO_ACCELERATOR,
    AnyDeviceDataParallel,
    DeviceId,
    as_device,
    check_copies,
    checked_timeout,
    unsupported_by_torch,
)
from .refusals import check_replicable, warn_of_plain_layers, warn_once
from .replica import Replica, Run, caller_modes, current_replica, raise_foreign_layer
from .torch_private import BatchNormBase, names_of_modules, uncompiled

__all__ = ["CallbackContext", "DataParallelWithCallback", "execute_replication_callbacks", "patch_replication_callback"]

DataParallelT = TypeVar("DataParallelT", bound="DataParallel[Any]")
_CALLBACK = "__data_parallel_replicate__"


class CallbackContext:
    """What the copies of one submodule share during one forward; set any attribute on it.

    A `SyncMaster` that is put here belongs to this forward, and its master is the replica of the callback that runs.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, SyncMaster) and vars(self).get(name) is not value:
            value.begin_anew()
        object.__setattr__(self, name, value)


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Call ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule that has it; for wrappers of your own.

    `modules` are the replicas of one module, in the order of their copy ids. All callbacks of copy 0 come first, then
    those of copy 1, and so on. The copies of one submodule share one `CallbackContext`.
    """
    for module in modules:
        _refuse_training(module, module)
    _execute_callbacks(modules, _coordinator())


def _execute_callbacks(modules: Sequence[nn.Module], coordinator: Coordinator) -> bool:
    """Execute the callbacks; return whether there are any."""
    named = names_of_modules(modules[0]).items()
    contexts = {name: CallbackContext() for module, name in named if hasattr(type(module), _CALLBACK)}
    here = Joining(coordinator)
    token = joining.set(here)
    try:
        for here.replica_id, replica in enumerate(modules):
            for name, ctx in contexts.items():
                module: Any = replica
                for part in name.split(".") if name else ():
                    module = module._modules[part]  # `getattr` takes ten times as long
                here.name = name or type(module).__name__
                module.__data_parallel_replicate__(ctx, here.replica_id)
    finally:
        joining.reset(token)
    return bool(contexts)


def _coordinator(device_ids: Sequence[DeviceId] = (), timeout: float = DEFAULT_TIMEOUT) -> Coordinator:
    """Return the coordinator of a forward pass, which makes spans in the profile if a profiler is active."""

    def span(name: str) -> AbstractContextManager[Any]:
        return profiler.record_function(f"sync_batchnorm: {name}")

    devices = [str(as_device(device)) for device in device_ids]
    return Coordinator(devices, timeout, span if profiler._is_profiler_enabled else None)


def _refuse_training(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error in a replica, for replicas inside of it that would synchronize only with each other."""
    # Layers without running statistics use the batch in eval mode too.
    for child in module.modules() if current_replica.get() is not None else ():
        if hasattr(type(child), _CALLBACK) and (child.training or getattr(child, "running_mean", 0) is None):
            raise_foreign_layer(wrapper)


class _ReplicationMixin(DataParallel[Any]):
    """Extends a `DataParallel`: it watches its replicas, calls the callbacks, and picks the error to raise."""

    _sync_timeout: float = DEFAULT_TIMEOUT

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.__dict__.get("_is_replica"):  # in a replica of another wrapper, which has made all replicas
            return self.module(*inputs, **kwargs)
        if len(self.device_ids) > 1:
            return self._forward_in_replicas(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    @uncompiled
    def _forward_in_replicas(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId], *args: Any, **kwargs: Any) -> list[Any]:
        _refuse_training(self, module)
        if len(device_ids) == 1:
            return [module]
        check_replicable(self, module)
        check_copies(frozenset(map(as_device, device_ids)))
        replicas = super().replicate(module, device_ids, *args, **kwargs)  # type: ignore[arg-type]
        coordinator = _coordinator(device_ids, self._sync_timeout)
        try:
            has_callbacks = _execute_callbacks(replicas, coordinator)
        except BaseException as error:
            coordinator.abort(error, 0.0)  # for a `SyncMaster` that a module keeps
            raise
        if not has_callbacks:
            warn_of_plain_layers(self, module)
        run = Run(module, coordinator, caller_modes())
        return [Replica(replica, run, i) for i, replica in enumerate(replicas)]

    def parallel_apply(self, replicas: Sequence[nn.Module], *args: Any, **kwargs: Any) -> list[Any]:
        """Run replicas; what follows them is what the `parallel_apply` of the extended class takes."""
        watched: list[Any] = list(replicas)
        if not isinstance(watched[0], Replica):  # the module itself, for a single chunk, or replicas of the user's
            run = Run(watched[0], _coordinator(self.device_ids[: len(watched)], self._sync_timeout))
            watched = [Replica(replica, run, i) for i, replica in enumerate(watched)]
        run, coordinator = watched[0]._sync_run, watched[0]._sync_run.coordinator
        run.modes = caller_modes()
        coordinator.expect([replica._sync_id for replica in watched])
        try:
            outputs: list[Any] = super().parallel_apply(watched, *args, **kwargs)
            failure = coordinator.failure()
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            failure = None if interrupted else coordinator.failure()  # asked before replicas fail because of the abort
            coordinator.abort(error, PATIENCE if interrupted else 0.0)
            if failure is None:
                raise
        if failure is None:
            return outputs
        who, failed = failure
        del failure
        try:  # The wrapper around this one shows the frames of both.
            raise failed if current_replica.get() is not None else without_frames(failed, who)
        finally:
            del failed  # Its traceback refers to this frame.


class DataParallelWithCallback(_ReplicationMixin, AnyDeviceDataParallel):
    """`torch.nn.DataParallel` whose replicas can exchange, also on the CPU and with several replicas on one device.

    If a replica fails or ends while others wait for it, they are released at once, and the caller gets its exception,
    with its traceback in a note. If a batch makes a single chunk, or in a replica of another wrapper, the module itself
    runs: no replicas, no threads, no callbacks (see `execute_replication_callbacks`).

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.BatchNorm2d(8)), ["cpu"] * 2)
        >>> output = parallel(torch.randn(4, 8, 5, 5))

    Args:
        module: the module to run in parallel. It must live on the first of `device_ids`.
        device_ids: one entry for each replica, as integers, strings or `torch.device`. They may name the CPU and repeat
            a device: ``["cpu"] * 4``, ``[0, 0]``. None: every accelerator; with none present the module runs directly.
        output_device: where the outputs are gathered. None: the first of `device_ids`.
        dim: the dimension of the inputs along which they are cut into chunks, and of the outputs for gathering.
        timeout: seconds after which a wait for another replica ends with a `ReplicaSyncError`; failures end it at once.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, a bad `timeout`, and `device_ids` of different kinds; from
            a call, if its arguments make different numbers of chunks, or the replicas return different structures.
        RuntimeError: from a call, if a parameter or buffer is not on the first of `device_ids`, if the module cannot be
            replicated, if copies between devices lose data, or if a replica trains a synchronized layer that does not
            belong to it, also in another wrapper, or that synchronizes several processes.
        ReplicaSyncError: from a call, if the replicas cannot exchange.

    Warns:
        UserWarning: once, from a call that trains batch norms of torch if nothing in the module synchronizes.
    """


def patch_replication_callback(data_parallel: DataParallelT, *, timeout: float = DEFAULT_TIMEOUT) -> DataParallelT:
    """Make an existing `torch.nn.DataParallel` object call the replication callbacks; return that object.

    Only its class changes: a plain `DataParallel` becomes a `DataParallelWithCallback`, an object of a subclass gets a
    subclass of its class, which keeps all overridden methods. Copies and pickles of it stay patched. Patching again
    changes nothing, not even the `timeout`, which is that of `DataParallelWithCallback`.

    Example:
        >>> parallel = patch_replication_callback(nn.DataParallel(SynchronizedBatchNorm2d(8)))

    Raises:
        TypeError, ValueError: if `data_parallel` is not a `DataParallel`, or for a bad `timeout`.
    """
    if not isinstance(data_parallel, DataParallel):
        raise TypeError(
            f"data_parallel must be a torch.nn.DataParallel, got {type(data_parallel).__name__}; "
            "wrap the module with DataParallelWithCallback"
        )
    timeout = checked_timeout(timeout)
    if not data_parallel.device_ids:
        warn_once(NO_ACCELERATOR)
    return patch(data_parallel, timeout)


def patch(data_parallel: DataParallelT, timeout: float = DEFAULT_TIMEOUT) -> DataParallelT:
    """Patch an object as `patch_replication_callback` does, without its checks and its warning."""
    if not isinstance(data_parallel, _ReplicationMixin):
        cls: Any = type(data_parallel)
        patched = DataParallelWithCallback if cls is DataParallel else derived_class(cls, _ReplicationMixin)
        object.__setattr__(data_parallel, "__class__", patched)
        data_parallel.__dict__["_sync_timeout"] = timeout
    return data_parallel


def use_devices_of_torch(data_parallel: DataParallel[Any]) -> None:
    """Leave a wrapper that is not patched any more those of its devices that torch's own can run replicas on."""
    data_parallel.__dict__.pop("_sync_timeout", None)
    devices = list(map(as_device, data_parallel.device_ids))
    if unsupported_by_torch(devices):
        data_parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]


class DynamicSubclass(nn.Module):
    """The base of classes that are derived from the user's at run time; a pickle names the user's, to derive again."""

    _sync_original: type[nn.Module]
    _sync_base: type[nn.Module]

    def __init_subclass__(cls) -> None:
        pass  # not the user's, which may register classes

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, args, *rest = tuple(super().__reduce_ex__(protocol))
        call = [self._sync_original if item is type(self) else item for item in (function, *args)]
        return _derived, (self._sync_original, self._sync_base, *call), *rest


def _derived(original: Any, base: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return the module that `function` makes, and let its class be derived again if it is the original one."""
    module = function(*args)
    if type(module) is original:
        object.__setattr__(module, "__class__", derived_class(original, base))  # type: ignore[arg-type]
    return module


@functools.lru_cache(maxsize=256)
def derived_class(original: Any, base: Any) -> Any:
    """Return a class that is derived from `base` and `original`, and takes the arguments of `original`."""

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return _derived(original, base, super(DynamicSubclass, self).__deepcopy__, memo)

    names = {name: getattr(original, name) for name in ("__module__", "__doc__", "__init__")}
    if hasattr(original, "__deepcopy__"):
        names["__deepcopy__"] = __deepcopy__
    name = f"Synchronized{original.__name__}" if issubclass(base, BatchNormBase) else original.__name__
    return type(name, (DynamicSubclass, base, original), {**names, "_sync_original": original, "_sync_base": base})
