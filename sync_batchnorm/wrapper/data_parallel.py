"""The wrapper: `DataParallelWithCallback`, and a `DataParallel` that is patched to do what it does.

A forward pass takes four steps: scatter the inputs, replicate the module, call the replicas, gather the outputs.
`AnyDeviceDataParallel` takes them for any devices, `_ReplicationMixin` connects the replicas. The state of a forward
pass belongs to its replicas and ends with them.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ..meeting import DEFAULT_TIMEOUT, PATIENCE, without_frames
from ..refusals import (
    check_module,
    check_replicable,
    checked_timeout,
    tracing_error,
    unused_dims_error,
    warn_of_plain_layers,
    warn_once,
)
from ..torch_private import has_attribute, uncompiled
from .arguments import Arguments, check_dims
from .bound import detach_what_was_bound_again
from .callbacks import execute_callbacks, layer_of_another_package, refuse_training
from .copies import make_replicas
from .derived import derived_class
from .devices import DeviceId, as_device, check_copies, checked_devices, unsupported_by_torch
from .lost_state import begin_watching, warn_of_lost_hooks, warn_of_lost_state
from .run import ForwardPass, Run, is_in_replica, new_coordinator
from .scatter_gather import cut, is_on, join
from .threads import call_replicas
from .trees import USUAL, Dims

__all__ = ["DataParallelWithCallback", "patch_replication_callback"]

DataParallelT = TypeVar("DataParallelT", bound="DataParallel[Any]")

NO_ACCELERATOR = (
    "PyTorch finds no accelerator, so the module runs without replicas; for replicas on the CPU write "
    "DataParallelWithCallback(module, ['cpu'] * 2), or derive your own class of DataParallel from it"
)

InDims = Mapping[str, Dims]

# Which of the steps of a forward pass were those of this file; a subclass may have its own.
_reached: ContextVar[set[str]] = ContextVar("_reached")


class AnyDeviceDataParallel(DataParallel[Any]):
    """`torch.nn.DataParallel` that also takes CPU replicas, several replicas on one device, and dimensions."""

    in_dims: InDims | None
    out_dims: Dims

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        in_dims: InDims | None = None,
        out_dims: Dims = None,
    ) -> None:
        check_module(module)
        check_dims(module, in_dims, out_dims)
        timeout = checked_timeout(timeout)
        devices: Any = checked_devices(device_ids)
        output: Any = None if output_device is None else as_device(output_device)
        if unsupported_by_torch(devices):
            nn.Module.__init__(self)
            self.module, self.dim, self.device_ids = module, dim, list(devices)
            self.output_device, self.src_device_obj = output or devices[0], devices[0]
        else:
            torch_output: Any = -1 if output == torch.device("cpu") else output_device
            super().__init__(module, device_ids, torch_output, dim)  # type: ignore[arg-type]
            if not self.device_ids:  # Without an accelerator, torch returns before it sets these.
                self.dim, self.output_device = dim, torch_output
                if devices:
                    warn_once(NO_ACCELERATOR)
        self._sync_timeout, self.in_dims, self.out_dims = timeout, in_dims, out_dims

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        if len(self.device_ids) > 1:
            _reached.get(set()).add("scatter")
        kwargs = kwargs or {}
        if not inputs and not kwargs:
            return (), ()
        devices = list(map(as_device, device_ids))
        arguments = Arguments(self, inputs, kwargs, len(devices))
        if len(devices) > 1:
            # PyTorch would make a chunk for every device if an argument has no tensors, and pad the other arguments.
            devices = devices[: len(arguments.sizes)]
        if len(devices) == 1 and is_on(arguments.tree, devices[0]):
            return (inputs,), (kwargs,)  # There is nothing to cut into chunks.
        chunks = cut(arguments.tree, arguments.dims, devices, not unsupported_by_torch(tuple(devices)))
        return tuple(zip(*map(arguments.split, chunks), strict=True))

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        return make_replicas(module, list(map(as_device, device_ids)), not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        devices = list(map(as_device, self.device_ids[: len(replicas)]))
        return call_replicas(self.module, replicas, inputs, kwargs, devices)

    def gather(self, outputs: Any, output_device: DeviceId) -> Any:
        _reached.get(set()).add("gather")
        by_torch = not unsupported_by_torch(tuple(map(as_device, self.device_ids)))
        dims = USUAL if self.out_dims is None else self.out_dims
        return join(outputs, as_device(output_device), self.dim, by_torch, dims)


class _ReplicationMixin(DataParallel[Any]):
    """Extends a `DataParallel`: it watches its replicas, calls the callbacks, and picks the error to raise."""

    _sync_behind = (AnyDeviceDataParallel,)  # which `super()` in a patched class reaches, in place of torch's class
    _sync_timeout: float = DEFAULT_TIMEOUT
    in_dims: InDims | None = None  # also of wrappers from pickles of older versions
    out_dims: Dims = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.__dict__.get("_is_replica"):  # in a replica of another wrapper, which has made all replicas
            return self.module(*inputs, **kwargs)
        if len(self.device_ids) > 1:
            return self._forward_in_replicas(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        modules: dict[str, Any] = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if modules.get("module") is not None and has_attribute(modules["module"], name):
                raise AttributeError(f"{error}; the module has it: parallel.module.{name}") from None
            raise

    def extra_repr(self) -> str:
        connected = "" if type(self) is DataParallelWithCallback else "replicas connected by sync_batchnorm"
        dims = [f"{name}={getattr(self, name)}" for name in ("in_dims", "out_dims") if getattr(self, name) is not None]
        return ", ".join(filter(None, [super().extra_repr(), connected, *dims]))

    @uncompiled
    def _forward_in_replicas(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise tracing_error(self)
        token = _reached.set(set())
        try:
            outputs = super().forward(*inputs, **kwargs)
            self._check_reached("gather", self.out_dims)
            return outputs
        finally:
            _reached.reset(token)

    def _check_reached(self, step: str, dims: Any) -> None:
        if dims is not None and step not in _reached.get({step}):  # which is not set where somebody calls the steps
            raise unused_dims_error(self, step)

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId], *args: Any, **kwargs: Any) -> list[Any]:
        self._check_reached("scatter", self.in_dims)
        if is_in_replica():
            refuse_training(self, module)
        detach_what_was_bound_again(module)  # in the last backward pass, too
        if len(device_ids) == 1:
            return [module]
        check_replicable(self, module)
        devices = list(map(as_device, device_ids))
        check_copies(frozenset(devices))
        replicas = super().replicate(module, device_ids, *args, **kwargs)  # type: ignore[arg-type]
        coordinator = new_coordinator(device_ids, self._sync_timeout)
        try:
            contexts = execute_callbacks(replicas, coordinator)
        except BaseException as error:
            coordinator.abort(error, 0.0)  # for a `SyncMaster` that a module keeps
            raise
        if not contexts:
            warn_of_plain_layers(self, module)
        forward_pass = ForwardPass(module, coordinator)
        if len(set(devices)) < len(devices):  # Then replicas take turns.
            forward_pass.layer_of_another_package = layer_of_another_package(module, contexts)
        forward_pass.inherit()  # for replicas that are not called by `parallel_apply`
        return [Run(replica, forward_pass, i, devices[i]) for i, replica in enumerate(replicas)]

    def parallel_apply(self, replicas: Sequence[nn.Module], *args: Any, **kwargs: Any) -> list[Any]:
        """Run replicas; the other arguments are those of the `parallel_apply` of the extended class."""
        runs = self._sync_runs(replicas)
        forward_pass, coordinator = runs[0]._sync_pass, runs[0]._sync_pass.coordinator
        coordinator.expect([run._sync_number for run in runs])
        state = begin_watching(self, runs[0]._sync_replica) if len(runs) > 1 else None
        try:
            outputs: list[Any] = super().parallel_apply(runs, *args, **kwargs)
            failure = coordinator.take_failure()
            detach_what_was_bound_again(forward_pass.original)
        except BaseException as error:
            # Asked before replicas fail because of the abort; not for Ctrl-C, which is what the user wants to see.
            failure = coordinator.take_failure() if isinstance(error, Exception) else None
            coordinator.abort(error, PATIENCE)  # Late replicas would draw from the generators, and write into buffers.
            if forward_pass.random_states is not None:
                forward_pass.random_states.restore_caller(completed=False)
            if failure is None:
                raise
        if failure is None:
            if state is not None:
                warn_of_lost_state(runs[0]._sync_replica, state)
                warn_of_lost_hooks([run._sync_replica for run in runs])
            return outputs
        who, failed = failure
        del failure
        try:  # The wrapper around this one shows the frames of both.
            raise failed if is_in_replica() else without_frames(failed, who)
        finally:
            del failed  # Its traceback refers to this frame.

    def _sync_runs(self, replicas: Sequence[nn.Module]) -> list[Any]:
        """Return a `Run` for each of `replicas`, all of one `ForwardPass`, run in the modes of this thread."""
        runs: list[Any] = list(replicas)
        if not isinstance(runs[0], Run):  # the module itself, for a single chunk, or replicas of the user's
            devices = list(map(as_device, self.device_ids[: len(runs)]))
            forward_pass = ForwardPass(runs[0], new_coordinator(devices, self._sync_timeout))
            runs = [Run(replica, forward_pass, i, devices[i]) for i, replica in enumerate(runs)]
        forward_pass = runs[0]._sync_pass
        forward_pass.inherit()
        if len(runs) == 1:
            forward_pass.context = None  # It runs in this thread, as on one device.
        return runs


class DataParallelWithCallback(_ReplicationMixin, AnyDeviceDataParallel):
    """`torch.nn.DataParallel` whose replicas can exchange, even on the CPU and with several replicas on one device.

    It calls ``__data_parallel_replicate__(ctx, copy_id)`` on the replicas of every submodule that has this method, as
    synchronized layers do. If a replica fails or ends while others wait for it, they are released at once, and your
    thread gets its exception, with its traceback in a note. If a batch makes a single chunk, or if the wrapper is a
    submodule of a replica, the module itself runs: no replicas, no threads, no callbacks.

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.BatchNorm2d(8)), ["cpu"] * 2)
        >>> output = parallel(torch.randn(4, 8, 5, 5))

    Args:
        module: the module to run in parallel. Its parameters and buffers must be on the first of `device_ids`.
        device_ids: one entry for each replica, as integers, strings or `torch.device`, see "Devices" in docs/usage.md.
            They may name the CPU and repeat a device: ``["cpu"] * 4``, ``[0, 0]``. None: every accelerator; with none
            present the module runs directly.
        output_device: where the outputs are gathered. None: the first of `device_ids`.
        dim: the dimension of the inputs along which they are cut into chunks, and of the outputs for gathering.
        timeout: seconds after which a wait for another replica ends with a `ReplicaSyncError`; failures end it at once.
        in_dims: the dimension along which an argument of `forward` is cut, by its name: an int, None to give every
            replica the whole, or a tuple or dict of these for its entries; 0 cuts a list by its entries. Arguments
            that are not named are cut along `dim`.
        out_dims: the dimension along which outputs are put together, as in `torch.vmap`; None in a tuple or dict: the
            output of replica 0; 0 joins lists.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, a bad `timeout`, `device_ids` of different kinds, and
            `in_dims` of arguments that `forward` does not have; from
            a call, if what it is given or what the replicas return cannot be cut into chunks or put together, see
            "Arguments and outputs" in docs/usage.md.
        RuntimeError: from a call, if a parameter or buffer is not on the first of `device_ids`, if the module cannot be
            replicated or is traced, if copies between devices lose data, if a replica trains a synchronized layer that
            is not its own, see "Layers that do not belong to the replica" in docs/troubleshooting.md, or for several
            replicas in one of several processes, see "Several processes" in docs/processes.md.
        ReplicaSyncError: from a call, if the replicas cannot exchange. Any other exception of a replica is raised, too.

    Warns:
        UserWarning: once each, from a call that trains BatchNorm layers if none of them synchronizes; of a list whose
            tensors have other rows than the batch, see "Arguments that are not cut by rows" in docs/usage.md; and of
            what `forward` loses, see "State that is lost" in docs/troubleshooting.md.
    """


def patch_replication_callback(
    data_parallel: DataParallelT,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    in_dims: InDims | None = None,
    out_dims: Dims = None,
) -> DataParallelT:
    """Make an existing `torch.nn.DataParallel` object call the replication callbacks; return that object.

    It gets the `timeout` and another class: a plain `DataParallel` becomes a `DataParallelWithCallback`, an object of a
    subclass gets a subclass of its class, which keeps all overridden methods. Copies and pickles of it stay patched.
    Patching again changes only `in_dims` and `out_dims`, where they are given.

    Example:
        >>> parallel = patch_replication_callback(nn.DataParallel(SynchronizedBatchNorm2d(8)))

    Args:
        data_parallel: the object to patch.
        timeout, in_dims, out_dims: as of `DataParallelWithCallback`.

    Raises:
        TypeError, ValueError: if `data_parallel` is not a `DataParallel`, or for a bad `timeout`.

    Warns:
        UserWarning: once, if PyTorch finds no accelerator, so that the module runs without replicas.
    """
    if not isinstance(data_parallel, DataParallel):
        raise TypeError(
            f"data_parallel must be a torch.nn.DataParallel, got {type(data_parallel).__name__}; "
            "wrap the module with DataParallelWithCallback"
        )
    timeout = checked_timeout(timeout)
    check_dims(data_parallel.module, in_dims, out_dims)
    if not data_parallel.device_ids:
        warn_once(NO_ACCELERATOR)
    return patch(data_parallel, timeout, in_dims, out_dims)


def patch(
    data_parallel: DataParallelT, timeout: float = DEFAULT_TIMEOUT, in_dims: InDims | None = None, out_dims: Dims = None
) -> DataParallelT:
    """Patch an object as `patch_replication_callback` does, without its checks and its warning."""
    if not isinstance(data_parallel, _ReplicationMixin):
        cls: Any = type(data_parallel)
        patched = DataParallelWithCallback if cls is DataParallel else derived_class(cls, _ReplicationMixin)
        object.__setattr__(data_parallel, "__class__", patched)
        data_parallel.__dict__["_sync_timeout"] = timeout
    given = {"in_dims": in_dims, "out_dims": out_dims}
    data_parallel.__dict__.update({name: dims for name, dims in given.items() if dims is not None})
    return data_parallel


def use_devices_of_torch(data_parallel: DataParallel[Any]) -> None:
    """Let a wrapper that is no longer patched keep only the devices on which the wrapper of torch can run replicas."""
    data_parallel.__dict__.pop("_sync_timeout", None)
    devices = tuple(map(as_device, data_parallel.device_ids))
    if unsupported_by_torch(devices):
        data_parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]
