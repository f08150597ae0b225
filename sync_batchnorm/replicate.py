"""The replication callback, and two ways to have it called: `DataParallelWithCallback` and a patched `DataParallel`.

A forward of the wrapper makes its replicas, connects each of them to one `Coordinator`, and calls
`__data_parallel_replicate__` on every copy of every submodule that has it. All state belongs to the replicas and ends
with them. Any module may use the callback.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.autograd import profiler
from torch.nn.parallel import DataParallel

from .comm import SyncMaster, joining
from .coordinator import DEFAULT_TIMEOUT, PATIENCE, Coordinator
from .dynamic_subclass import make_subclass, swap_class
from .errors import without_frames
from .parallel.data_parallel import (
    NO_ACCELERATOR,
    AnyDeviceDataParallel,
    DeviceId,
    as_device,
    check_copies,
    unsupported_by_torch,
)
from .refusals import check_replicable, warn_of_plain_layers, warn_once
from .replica import CallerModes, Replica, Run, is_in_replica, raise_foreign_layer
from .torch_private import names_of_modules, uncompiled

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "execute_replication_callbacks",
    "patch_replication_callback",
]

DataParallelT = TypeVar("DataParallelT", bound="DataParallel[Any]")


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
    """Call ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule of every replica that has it.

    All callbacks of copy 0 come first, then those of copy 1, and so on. The copies of one submodule share one
    `CallbackContext`. For wrappers of your own: those of this library do this themselves.

    Args:
        modules: the replicas of one module, in the order of their copy ids.
    """
    _refuse_training_in_replica(modules[0], modules[0])
    _execute_callbacks(modules, Coordinator(span=spans_of_forward()))


def _execute_callbacks(modules: Sequence[nn.Module], coordinator: Coordinator) -> bool:
    """Execute the callbacks; return whether there are any."""
    names = [name for module, name in names_of_modules(modules[0]).items() if _is_called_back(module)]
    contexts = [(name, name.split("."), CallbackContext()) for name in names]
    with joining(coordinator) as here:
        for here.replica_id, replica in enumerate(modules):
            for name, path, ctx in contexts:
                module: Any = replica
                for part in path if name else ():
                    module = module._modules[part]  # `getattr` takes ten times as long
                here.name = name or type(module).__name__
                module.__data_parallel_replicate__(ctx, here.replica_id)
    return bool(contexts)


def spans_of_forward() -> Callable[[str], AbstractContextManager[Any]] | None:
    """Return the function that makes the spans of a forward pass in the profile, or None if no profiler is active."""
    return _span if profiler._is_profiler_enabled else None


def _span(name: str) -> AbstractContextManager[Any]:
    return profiler.record_function(f"sync_batchnorm: {name}")


def _is_called_back(module: nn.Module) -> bool:
    return hasattr(type(module), "__data_parallel_replicate__")


def _refuse_training_in_replica(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error for replicas inside of a replica that would synchronize only with each other."""
    if is_in_replica():
        for child in module.modules():  # Layers without running statistics use the batch in eval mode too.
            if _is_called_back(child) and (child.training or getattr(child, "running_mean", 0) is None):
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

    def replicate(
        self, module: nn.Module, device_ids: Sequence[DeviceId], *args: Any, **kwargs: Any
    ) -> list[nn.Module]:
        if len(device_ids) == 1:
            return [module]
        _refuse_training_in_replica(self, module)
        check_replicable(self, module)
        check_copies(frozenset(map(as_device, device_ids)))
        replicas = super().replicate(module, device_ids, *args, **kwargs)  # type: ignore[arg-type]
        coordinator = Coordinator(list(map(str, map(as_device, device_ids))), self._sync_timeout, spans_of_forward())
        try:
            has_callbacks = _execute_callbacks(replicas, coordinator)
        except BaseException as error:
            coordinator.abort(error, 0.0)  # for a `SyncMaster` that a module keeps
            raise
        if not has_callbacks:
            warn_of_plain_layers(self, module)
        modes = CallerModes()
        return [Replica(replica, Run(module, coordinator, i, modes)) for i, replica in enumerate(replicas)]

    def parallel_apply(self, replicas: Sequence[nn.Module], *args: Any, **kwargs: Any) -> list[Any]:
        """Run replicas; what follows them is what the `parallel_apply` of the extended class takes."""
        modes = CallerModes()
        watched = [replica for replica in replicas if isinstance(replica, Replica)]
        if not watched:  # the module itself, for a single chunk, or replicas that the user has made
            coordinator = Coordinator(
                list(map(str, map(as_device, self.device_ids[: len(replicas)]))), self._sync_timeout
            )
            watched = [Replica(replica, Run(replica, coordinator, i, modes)) for i, replica in enumerate(replicas)]
            replicas = watched
        coordinator = watched[0]._sync_run.coordinator
        coordinator.expect([replica._sync_run.replica_id for replica in watched])
        for replica in watched:
            replica._sync_run.modes = modes
        try:
            outputs: list[Any] = super().parallel_apply(replicas, *args, **kwargs)
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            failure = None if interrupted else coordinator.failure()  # asked before replicas fail because of the abort
            coordinator.abort(error, PATIENCE if interrupted else 0.0)
            if failure is None:
                raise
        else:
            failure = coordinator.failure()
            if failure is None:
                return outputs
        who, failed = failure
        del failure
        try:  # The wrapper around this one shows the frames of both.
            raise failed if is_in_replica() else without_frames(failed, who)
        finally:
            del failed  # Its traceback refers to this frame.


class DataParallelWithCallback(_ReplicationMixin, AnyDeviceDataParallel):
    """`torch.nn.DataParallel` whose replicas can exchange, also on the CPU and with several replicas on one device.

    It calls the callbacks of all replicas, see `execute_replication_callbacks`. If a replica fails or ends while others
    wait for it, they are released at once. The caller gets the exception of the replica, with a note that has the
    replica's traceback as text. If a batch makes a single chunk, or in a replica of another wrapper, the module itself
    runs: no replicas, no threads, no callbacks.

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.BatchNorm2d(8)), ["cpu"] * 2)
        >>> output = parallel(torch.randn(4, 8, 5, 5))

    Args:
        module: the module to run in parallel. It must live on the first of `device_ids`.
        device_ids: one entry for each replica, as integers, strings or `torch.device`. They may name the CPU and repeat
            a device: ``["cpu"] * 4``, ``[0, 0]``. None: every accelerator; with none present the module runs directly.
        output_device: where the outputs are gathered. None: the first of `device_ids`.
        dim: the dimension of the inputs along which they are cut into chunks, and of the outputs for gathering.
        timeout: seconds after which a wait for another replica ends with a `ReplicaSyncError`. This is a last resort:
            failures are noticed at once.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, and a bad `timeout`.
        ValueError: for `device_ids` of different kinds; from a call, if its arguments make different numbers of chunks,
            or the replicas return different structures.
        RuntimeError: from a call, if a parameter or buffer is not on the first of `device_ids`, if the module cannot be
            replicated, if copies from one device to another lose data, if a replica trains a synchronized layer that
            does not belong to it, also in another wrapper, or if `torch.distributed` has several processes and a
            replica trains a layer that synchronizes them.
        ReplicaSyncError: from a call, if the replicas cannot exchange.

    Warns:
        UserWarning: once, from a call that trains batch norms of torch if nothing in the module synchronizes.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        timeout = _checked_timeout(timeout)
        super().__init__(module, device_ids, output_device, dim)
        self._sync_timeout = timeout


def patch_replication_callback(data_parallel: DataParallelT, *, timeout: float = DEFAULT_TIMEOUT) -> DataParallelT:
    """Make an existing `torch.nn.DataParallel` object call the replication callbacks; return that object.

    Only its class changes: a plain `DataParallel` becomes a `DataParallelWithCallback`, an object of a subclass gets a
    subclass of its class, which keeps all overridden methods. Copies and pickles of it stay patched. Patching again
    changes nothing, not even the timeout.

    Example:
        >>> parallel = patch_replication_callback(nn.DataParallel(SynchronizedBatchNorm2d(8)))

    Args:
        data_parallel: the object to patch.
        timeout: seconds after which a wait of one replica for another ends with a `ReplicaSyncError`.

    Raises:
        TypeError: if it is not a `DataParallel`, or for a bad `timeout`.
        ValueError: for a bad `timeout`.
    """
    if not isinstance(data_parallel, DataParallel):
        raise TypeError(
            f"data_parallel must be a torch.nn.DataParallel, got {type(data_parallel).__name__}; "
            "wrap the module with DataParallelWithCallback"
        )
    timeout = _checked_timeout(timeout)
    if not data_parallel.device_ids:
        warn_once(NO_ACCELERATOR)
    return patch(data_parallel, timeout)


def patch(data_parallel: DataParallelT, timeout: float = DEFAULT_TIMEOUT) -> DataParallelT:
    """Patch an object as `patch_replication_callback` does, without its checks and its warning."""
    if not isinstance(data_parallel, _ReplicationMixin):
        cls = type(data_parallel)
        patched = DataParallelWithCallback if cls is DataParallel else _patched(cls)  # type: ignore[arg-type]
        swap_class(data_parallel, patched)
        data_parallel.__dict__["_sync_timeout"] = timeout
    return data_parallel


def use_devices_of_torch(data_parallel: DataParallel[Any]) -> None:
    """Leave a wrapper that is not patched any more those of its devices that torch's own can run replicas on."""
    data_parallel.__dict__.pop("_sync_timeout", None)
    devices = list(map(as_device, data_parallel.device_ids))
    if unsupported_by_torch(devices):
        data_parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]


@functools.lru_cache(maxsize=256)
def _patched(cls: type[DataParallel[Any]]) -> type[DataParallel[Any]]:
    return make_subclass(cls.__name__, _ReplicationMixin, cls, _patched)  # type: ignore[no-any-return]


def _checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}; pass for example 300.0")
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout must be between 0 and {threading.TIMEOUT_MAX:g} seconds, got {timeout!r}; pass for example 300.0"
        )
    return float(timeout)
