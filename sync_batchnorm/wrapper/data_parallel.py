"""The wrapper: `DataParallelWithCallback`, and a `DataParallel` that is patched to do what it does.

A forward pass takes four steps, which a subclass may override. What is done around a step is done whoever overrides it:

    in `_ReplicationMixin`, around it    the step: the user's own, which may call that of `AnyDeviceDataParallel`
    ---------------------------------    ------------------------------------------------------------------------
    forward: refuses tracing             scatter          cuts the arguments into chunks
    replicate: executes callbacks        replicate        copies the module
    parallel_apply: modes, failures      parallel_apply   calls a `ReplicaHandle` for each replica, in threads
                                         gather           puts the outputs together

The state of a forward pass belongs to its replicas and ends with them, except for memory on GPUs, see
NOTE [workspaces].
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
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
from .devices import DeviceId, as_device, check_transfers, checked_devices, unsupported_by_torch
from .lost_state import Look
from .replicas import check_replicable, make_replicas
from .run import ForwardPass, ReplicaHandle, call_replicas, new_coordinator, prepared_runs
from .scatter_gather import join

__all__ = ["DataParallelWithCallback", "patch_replication_callback"]

DataParallelT = TypeVar("DataParallelT", bound="DataParallel[Any]")

NO_ACCELERATOR = (
    "PyTorch finds no accelerator, so the module runs without replicas; for replicas on the CPU write "
    "DataParallelWithCallback(module, ['cpu'] * 2), or derive your own class of DataParallel from it"
)

# Which of the steps of a forward pass were those of this file, that of `scatter` with what tells how it has cut; a
# subclass may have its own. It is emptied at the end: a thread that a replica has started may keep its context.
_default_steps_run: ContextVar[dict[tuple[nn.Module, str], Any]] = ContextVar("_default_steps_run")


class AnyDeviceDataParallel(DataParallel[Any]):
    """`torch.nn.DataParallel` that also takes CPU replicas, several replicas on one device, and dimensions."""

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
            output = -1 if output == torch.device("cpu") else output_device  # as torch takes it
            super().__init__(module, device_ids, output, dim)  # type: ignore[arg-type]
            if not self.device_ids:  # Without an accelerator, torch returns before it sets these.
                self.dim, self.output_device = dim, output
                if devices:
                    warn_once(NO_ACCELERATOR)
        self.__dict__.update(options)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceId]) -> Any:
        arguments = Arguments(self, inputs, kwargs or {}, len(device_ids))
        if len(self.device_ids) > 1:  # Otherwise it may be compiled as a whole, without a `ContextVar`.
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
        return join(outputs, as_device(output_device), self.dim, by_torch, self._sync_out_dims)


class _ReplicationMixin(DataParallel[Any]):
    """Extends a `DataParallel`: it calls the callbacks, runs the replicas so that they can exchange, and warns.

    It does not work to derive this from `AnyDeviceDataParallel`, which would then come before the bases of a user's
    class: `super()` in that class would not reach them.
    """

    _sync_behind = (AnyDeviceDataParallel,)  # which `super()` in a patched class reaches, in place of torch's class
    _sync_timeout: float = DEFAULT_TIMEOUT
    _sync_in_dims: InDims = None  # also of wrappers from pickles of older versions
    _sync_out_dims: OutDims = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.__dict__.get("_is_replica"):  # in a replica of another wrapper, which has made all replicas
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
            self._check_reached("gather", "out_dims", self._sync_out_dims)
            return outputs
        finally:
            _default_steps_run.reset(token)
            steps.clear()

    def _check_reached(self, step: str, option: str, dims: Any) -> None:
        """Raise an error for dimensions that a `scatter` or `gather` of the user's own ignores."""
        # Nothing is set where somebody calls the steps.
        here = self, step
        if dims is not None and here not in _default_steps_run.get({here: None}):
            raise RuntimeError(
                f"{option} of a {type(self).__name__} would be ignored, as its own {step} does not call that of "
                f"DataParallelWithCallback; call super().{step}, or leave out {option}"
            )

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId], *args: Any, **kwargs: Any) -> list[Any]:
        self._check_reached("scatter", "in_dims", self._sync_in_dims)
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
            coordinator.abort(error, 0.0)  # for a `SyncMaster` that a module keeps
            raise
        if not contexts:
            _warn_of_plain_layers(self, module)
        forward_pass = ForwardPass(module, coordinator, partial(refuse_other_packages, module, contexts))
        return list(map(ReplicaHandle, forward_pass.prepare(replicas, devices)))

    def parallel_apply(self, replicas: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> list[Any]:
        """Run replicas; the other arguments are those of the `parallel_apply` of the extended class."""
        handles = _handles_of(self, replicas)
        runs = [handle._sync_run for handle in handles]
        forward_pass = runs[0].forward_pass
        look = Look(self, forward_pass.original, runs[0].replica)
        call = partial(super().parallel_apply, handles, *args, **kwargs)
        describe_split = _default_steps_run.get({}).get((self, "scatter"), str)
        outputs = forward_pass.apply(call, runs, lambda: " ".join(filter(None, [describe_split(), look.note()])))
        look.warn()
        # Replicas that a user has made are their own originals, and exchange elsewhere.
        is_idle = not forward_pass.coordinator.has_exchanged and forward_pass.original is not runs[0].replica
        if is_idle and any(map(_should_exchange, runs[0].replica.modules())):
            _warn_of_plain_layers(self, forward_pass.original)
        _warn_of_checkpoint(self, outputs)
        return outputs


class DataParallelWithCallback(_ReplicationMixin, AnyDeviceDataParallel):
    """`torch.nn.DataParallel` whose replicas can exchange, even on the CPU and with several replicas on one device.

    It calls ``__data_parallel_replicate__(ctx, copy_id)`` on the replicas of every submodule that has this method, as
    synchronized layers do. If a replica fails or ends while others wait for it, they are released at once, and your
    thread gets the exception, with the traceback of its replica in a note. If a batch makes a single chunk, or if the
    wrapper is a submodule of a replica, the module itself runs: no replicas, no threads, no callbacks.

    Example:
        >>> parallel = DataParallelWithCallback(convert_model(nn.BatchNorm2d(8)), ["cpu"] * 2)
        >>> output = parallel(torch.randn(4, 8, 5, 5))

    Args:
        module: the module to run in parallel. Its parameters and buffers must be on the first of `device_ids`.
        device_ids: one entry for each replica, as integers, strings or `torch.device`, see "Devices" on the page
            "Usage". They may name the CPU and repeat a device: ``["cpu"] * 4``, ``[0, 0]``. None: every accelerator;
            with none present the module runs directly.
        output_device: where the outputs are gathered. None: the first of `device_ids`.
        dim: the dimension of the inputs along which they are cut into chunks, and of the outputs for gathering.
        timeout: how many seconds a replica waits for another one that still runs, before a `ReplicaSyncError`, which
            your thread gets up to two seconds later; failures end waits at once.
        in_dims: the dimension along which an argument of `forward` is cut, by its name: an int, None to give every
            replica the whole, or a tuple or dict of these for its entries; 0 cuts a list by its entries. Tensors that
            are not named are cut along `dim`.
        out_dims: the dimension along which outputs are put together, as in `torch.vmap`; None in a tuple or dict: the
            output of replica 0; 0 joins lists.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, a bad `timeout`, `device_ids` of different kinds, and
            `in_dims` of arguments that `forward` does not have; from a call, if what it is given or what the replicas
            return cannot be cut into chunks or put together, see "Arguments and outputs" on the page "Usage".
        RuntimeError: from a call, for example if a parameter or buffer is not on the first of `device_ids`, if the
            module cannot be replicated or is traced, if shapes of outputs do not fit, or if a replica trains a
            synchronized layer that is not its own, see "Layers that do not belong to the replica" on the page
            "Troubleshooting".
        ReplicaSyncError: from a call, if the replicas cannot exchange. Any other exception of a replica is raised, too
            (a `StopIteration` as a `RuntimeError`).

    Warns:
        UserWarning: each text once, from a call of replicas: if they have BatchNorm layers in training mode, and no
            module that exchanges; of some lists that `in_dims` does not name; and of what `forward` loses, and hooks
            set on the model or read from it, see "Gradients and parameters" on the page "Troubleshooting".
    """


def patch_replication_callback(
    data_parallel: DataParallelT, *, timeout: float | None = None, in_dims: InDims = None, out_dims: OutDims = None
) -> DataParallelT:
    """Make an existing `torch.nn.DataParallel` object call the replication callbacks; return that object.

    It gets another class: a plain `DataParallel` becomes a `DataParallelWithCallback`, an object of a subclass gets a
    subclass of its class, which keeps all overridden methods. Copies and pickles of it stay patched. Patching again
    changes only the options that are given.

    Example:
        >>> parallel = patch_replication_callback(nn.DataParallel(SynchronizedBatchNorm2d(8)))

    Args:
        data_parallel: the object to patch.
        timeout: as of `DataParallelWithCallback`. None: the timeout that the object has, or 300 seconds.
        in_dims, out_dims: as of `DataParallelWithCallback`.

    Raises:
        TypeError, ValueError: if `data_parallel` is not a `DataParallel`, or for bad options.

    Warns:
        UserWarning: once, if PyTorch finds no accelerator, so that the module runs without replicas.
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
    """Give an object the class that connects its replicas, unless it has one."""
    cls: Any = type(data_parallel)
    if not issubclass(cls, _ReplicationMixin):
        patched = DataParallelWithCallback if cls is DataParallel else derived_class(cls, _ReplicationMixin)
        object.__setattr__(data_parallel, "__class__", patched)


def use_devices_of_torch(data_parallel: DataParallel[Any]) -> None:
    """Let a wrapper that is no longer patched keep only the devices on which the wrapper of torch can run replicas."""
    data_parallel.__dict__.pop("_sync_timeout", None)
    devices = tuple(map(as_device, data_parallel.device_ids))
    if unsupported_by_torch(devices):
        data_parallel.device_ids = [device.index for device in dict.fromkeys(devices) if device.type != "cpu"]


def _handles_of(wrapper: Any, replicas: Sequence[Any]) -> list[ReplicaHandle]:
    """Return a `ReplicaHandle` for each of `replicas`, all of one `ForwardPass`.

    A `parallel_apply` of the user's may have put modules or functions in place of the handles, which these call.
    """
    if {*map(type, replicas)} == {ReplicaHandle}:
        return list(replicas)
    runs = prepared_runs()
    if len(runs) != len(replicas):  # for replicas of the user's, and for a single chunk, nothing is prepared
        originals = [replica if isinstance(replica, nn.Module) else wrapper.module for replica in replicas]
        devices = list(map(as_device, wrapper.device_ids[: len(replicas)]))
        forward_pass = ForwardPass(originals[0], new_coordinator(devices, wrapper._sync_timeout))
        runs = forward_pass.prepare(originals, devices)
    return list(map(ReplicaHandle, runs, replicas))


def _checked_options(module: nn.Module, timeout: float, in_dims: InDims, out_dims: OutDims) -> dict[str, Any]:
    """Return the attributes of a wrapper of `module` for these arguments; raise an error for wrong ones."""
    check_module(module)
    check_dims(module, in_dims, out_dims)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}; pass for example 300.0")
    if not 0 < timeout <= TIMEOUT_MAX:
        raise ValueError(
            f"timeout must be more than 0 and at most {TIMEOUT_MAX:g} seconds, got {timeout!r}; pass for example 300.0"
        )
    return {"_sync_timeout": float(timeout), "_sync_in_dims": in_dims, "_sync_out_dims": out_dims}


def _should_exchange(layer: Any) -> bool:
    """Return whether a layer is connected to other replicas and in training mode."""
    return vars(layer).get("_sync_connection") is not None and layer.training and layer.group_size != 1


def _warn_of_plain_layers(wrapper: nn.Module, module: nn.Module) -> None:
    """Warn if a module of which no layer exchanges trains batch norms."""
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
    """Warn if a checkpoint is around replicas that record a graph: their threads do not have its saved-tensor hooks."""
    pack, _ = saved_tensors_hooks(True) or (None, None)
    is_around = len(outputs) > 1 and getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    if is_around and any([tensor.requires_grad for tensor in tensors_in(outputs)]):
        warn_once(
            f"expected the checkpoint inside the model, but got one around a {type(wrapper).__name__}, which saves "
            "none of the memory of its replicas; call checkpoint(self.body, input, use_reentrant=False) in forward() "
            "of the model"
        )
