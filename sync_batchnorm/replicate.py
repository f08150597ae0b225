"""The replication callback, and two ways to have it called: `DataParallelWithCallback` and a patched `DataParallel`.

A forward of the wrapper makes its replicas, connects each of them to one `Coordinator`, and calls
`__data_parallel_replicate__` on every copy of every submodule that has it. Nothing is stored on the wrapped module: all
state belongs to the replicas and ends with them. Any module may use the callback. The only batch norms that this file
knows are those of torch: it warns if a model trains them and no module has the callback.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import attrgetter
from time import monotonic
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from sync_batchnorm import distributed, profiling
from sync_batchnorm.comm import joining
from sync_batchnorm.compilation import uncompiled
from sync_batchnorm.coordinator import DEFAULT_TIMEOUT, Coordinator
from sync_batchnorm.local_parallel import AnyDeviceDataParallel, DeviceId
from sync_batchnorm.replica import CallerState, OwnCall, Watch, is_in_replica, raise_foreign_layer, watch_of
from sync_batchnorm.torch_private import (
    BatchNormBase,
    compiled_module_type,
    in_transform,
    refuse_other_calls,
)
from sync_batchnorm.warning import ModuleSet, warn

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "execute_replication_callbacks",
    "patch_replication_callback",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
DataParallelT = TypeVar("DataParallelT", bound="DataParallel[Any]")


class CallbackContext:
    """What the copies of one submodule share during one forward; set any attribute on it.

    `SynchronizedBatchNorm2d` and its siblings put their `SyncMaster` here, for the other copies to register with.
    """

    if TYPE_CHECKING:  # Any attribute may be set, with any type.

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Call ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule of every replica that has it.

    All callbacks of copy 0 come first, then those of copy 1, and so on. The copies of one submodule share one
    `CallbackContext`; a submodule that is used under several names is called once. `DataParallelWithCallback` and
    patched objects call this function themselves; it is public for wrappers of your own.

    Args:
        modules: the replicas of one module, in the order of their copy ids.
    """
    _refuse_training_in_replica(modules[0], modules[0])
    _execute_callbacks(modules, Coordinator(span=profiling.spans_of_forward()))


def _execute_callbacks(modules: Sequence[nn.Module], coordinator: Coordinator) -> bool:
    """Execute the callbacks; return whether there are any."""
    # This walks through the first replica only; in the others, it looks up the modules that have a callback.
    contexts = [(name, CallbackContext()) for name, module in modules[0].named_modules() if _is_called_back(module)]
    for copy_id, replica in enumerate(modules):
        for name, ctx in contexts:
            module: Any = _submodule(replica, name)
            with joining(coordinator, copy_id, name or type(module).__name__):
                module.__data_parallel_replicate__(ctx, copy_id)
    return bool(contexts)


def _is_called_back(module: nn.Module) -> bool:
    return hasattr(type(module), "__data_parallel_replicate__")


def _submodule(module: nn.Module, name: str) -> nn.Module:
    submodule: nn.Module = attrgetter(name)(module) if name else module
    return submodule


def _refuse_training_in_replica(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error for replicas inside of a replica that would synchronize only with each other."""
    if is_in_replica() and any(child.training and _is_called_back(child) for child in module.modules()):
        raise_foreign_layer(wrapper)


def _bare(cls: type[ModuleT], derive: Callable[[type[ModuleT]], type[ModuleT]] | None = None) -> ModuleT:
    """Return an object without attributes, which unpickling or copying then sets.

    Its class is ``derive(cls)``, or `cls` in pickles of version 1.1 that hold a replica, which have no `derive`.
    """
    cls = cls if derive is None else derive(cls)
    return cls.__new__(cls)


class Derived(nn.Module):
    """The base of all classes that are derived here from a class of the user's.

    A pickle names the user's class, and loading derives from it again.
    """

    _original: type[nn.Module]
    _derive: Callable[[Any], type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = tuple(super().__reduce_ex__(protocol))
        return _bare, (self._original, self._derive), *rest


def swap_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `cls` the class of `module`, also if `module.__setattr__` sets attributes of another module."""
    object.__setattr__(module, "__class__", cls)


class _Unregistered(nn.Module):
    """The base of classes that are made here. It skips the user's `__init_subclass__`, which may register them."""

    def __init_subclass__(cls) -> None:
        pass


# Seconds that an interrupted caller waits for its replicas: arbitrary, longer than most operations take. The program
# probably ends then, and it would abort if a daemon thread were inside of torch ("terminate called without an active
# exception").
_PATIENCE = 1.0


def _give_up(coordinators: Sequence[Coordinator], error: BaseException) -> None:
    """Release the replicas, because their caller no longer waits for them."""
    for coordinator in coordinators:
        coordinator.abort(error)
    if not isinstance(error, Exception):
        deadline = monotonic() + _PATIENCE
        for coordinator in coordinators:
            coordinator.drain(max(0.0, deadline - monotonic()))


def _refuse_what_cannot_be_replicated(wrapper: DataParallel[Any], module: nn.Module) -> None:
    """Raise an error for a module that cannot be replicated, before anything is changed.

    Raises:
        RuntimeError: naming the submodules; also inside of a transform of `torch.func`, which is active in its own
            thread only.
    """
    if in_transform():
        raise RuntimeError(
            "expected replicas outside of the transforms of torch.func, but got a call of "
            f"{type(wrapper).__name__} inside of one, such as grad or vmap; use torch.autograd.grad, with "
            "create_graph=True for gradients of gradients, or call the wrapped module itself"
        )
    compiled_type = compiled_module_type()
    compiled = []
    for name, child in module.named_modules():
        if isinstance(child, compiled_type):
            compiled.append(name or "the module itself")
        elif (
            isinstance(child, DataParallel)
            and len(child.device_ids) > 1
            and type(child).forward is not _Callbacks.forward
        ):
            raise RuntimeError(
                f"expected one wrapper around the replicas, but got {name or 'the module itself'!r} "
                f"({type(child).__name__}) inside of a {type(wrapper).__name__}; put its .module in its place, or "
                "call patch_replication_callback on it, and it leaves the replicas to the outer one"
            )
    if compiled:
        # A replica of such a module would share its dictionary, and both would lose their submodules (torch 2.13).
        raise RuntimeError(
            f"expected modules that can be replicated, but got {compiled} from torch.compile (their attribute "
            "_orig_mod is the module); put the module back in its place, and compile functions that its forward calls"
        )


def _detach_from_originals(module: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Bind methods that are attributes, as in ``self.forward = self.forward_quick``, to the modules of each replica.

    A replica has the attributes of the original, and a bound method among them would run the original. A compiled call
    would do so too, and is removed with a warning.
    """
    names = {child: name for name, child in module.named_modules()}
    compiled = []
    for child, name in names.items():
        bound = {
            key: (value.__func__, names[value.__self__])
            for key, value in child.__dict__.items()
            if type(value) is MethodType and isinstance(value.__self__, nn.Module) and value.__self__ in names
        }
        if child.__dict__.get("_compiled_call_impl") is not None:  # of `Module.compile`: a closure over the original
            compiled.append(name or "the module itself")
            for replica in replicas:
                _submodule(replica, name).__dict__["_compiled_call_impl"] = None
        for replica in replicas if bound else ():
            for key, (function, owner) in bound.items():
                copy, itself = _submodule(replica, name), _submodule(replica, owner)
                method = MethodType(function, itself)
                # A method of another module may have been bound before the class of that module was converted.
                copy.__dict__[key] = method if copy is itself else getattr(itself, function.__name__, method)
    if compiled:
        warn(
            f"expected modules that replicas can run as they are, but got {compiled} compiled by Module.compile(), "
            "which holds for the original alone, so replicas run them uncompiled; put @torch.compile on functions "
            "that their forward calls"
        )


_warned = ModuleSet()  # wrappers of models that were not converted


def _warn_of_plain_layers(wrapper: nn.Module, module: nn.Module) -> None:
    """Warn once for each wrapper whose module trains batch norms and has nothing that could synchronize."""
    plain = [name for name, child in module.named_modules() if isinstance(child, BatchNormBase) and child.training]
    if plain and _warned.add(wrapper):
        first = plain[0] or "the module itself"
        warn(
            f"expected batch norms that synchronize in the replicas of a {type(wrapper).__name__}, but got "
            f"{len(plain)} in training mode, none of which does, from {first!r} on; call convert_model(model), or "
            "filter this warning if every replica is meant to normalize with its own chunk of the batch"
        )


# The coordinators of the call of a wrapper that runs in this thread.
_coordinators: ContextVar[list[Coordinator]] = ContextVar("sync_batchnorm_coordinators")


class _Callbacks(DataParallel[Any]):
    """Extends a `DataParallel`: it watches its replicas, calls the callbacks, and picks the error to raise."""

    _sync_timeout: float = DEFAULT_TIMEOUT

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.__dict__.get("_is_replica"):  # in a replica of another wrapper, which has made all replicas
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    @uncompiled
    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        if len(device_ids) == 1 and not (distributed.has_peers() and torch.is_grad_enabled()):
            # With peers, a single chunk runs as a replica too: see NOTE [order of a backward] in `distributed.py`.
            return [module]
        refuse_other_calls()
        _refuse_training_in_replica(self, module)
        _refuse_what_cannot_be_replicated(self, module)
        replicas: list[nn.Module] = super().replicate(module, device_ids)  # type: ignore[arg-type]
        _detach_from_originals(module, replicas)
        devices = [str(device) for device in device_ids]
        coordinator = Coordinator(devices, self._sync_timeout, profiling.spans_of_forward())
        _coordinators.get([]).append(coordinator)
        if not _execute_callbacks(replicas, coordinator):
            _warn_of_plain_layers(self, module)
        replicas = [r if type(r).__call__ is nn.Module.__call__ else OwnCall(r) for r in replicas]
        state = CallerState()
        for replica_id, replica in enumerate(replicas):
            watch = Watch(module, replica, coordinator, replica_id, state)
            replica.__dict__["_compiled_call_impl"] = watch
        return replicas

    @uncompiled
    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Any, kwargs: Any) -> list[Any]:
        watches = [watch for watch in map(watch_of, replicas) if watch is not None]
        if not watches:
            return super().parallel_apply(replicas, inputs, kwargs)
        state = CallerState()
        for watch in watches:
            watch.state, watch.raises = state, True
        coordinator = watches[0].coordinator
        coordinator.call([watch.replica_id for watch in watches])
        try:
            with profiling.recorded_in_part():
                outputs: list[Any] = super().parallel_apply(replicas, inputs, kwargs)
        except BaseException as error:
            if coordinator in _coordinators.get([]):
                coordinator.abort(error)  # and `__call__` waits for the replicas
            else:
                _give_up([coordinator], error)
            # Any other exception was raised in this thread while replicas ran, as by Ctrl-C: see `Watch`.
            failure = coordinator.failure() if isinstance(error, Exception) else None
            if failure is None:
                raise
        else:
            coordinator.raise_if_swallowed()
            distributed.count_all_calls()  # before the nodes that gather the outputs
            return outputs
        finally:
            for watch in watches:
                watch.raises = False
        raise failure.rebuild()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A user's own `forward` may run the replicas without `parallel_apply`. However it ends, the replicas are
        # released, and the original error is raised instead of one that is only its consequence.
        coordinators: list[Coordinator] = []
        token = _coordinators.set(coordinators)
        try:
            output = super().__call__(*args, **kwargs)
            for coordinator in coordinators:
                coordinator.raise_if_swallowed()
            return output
        except BaseException as error:
            failure = None
            _give_up(coordinators, error)
            for coordinator in coordinators:
                if failure is None and coordinator.has_caused(error):
                    failure = coordinator.failure()
            if failure is None:
                raise
        finally:
            _coordinators.reset(token)
        raise failure.rebuild()


class DataParallelWithCallback(_Callbacks, AnyDeviceDataParallel):
    """`torch.nn.DataParallel` whose replicas can exchange, also on the CPU and with several replicas on one device.

    After it has replicated the module, it calls ``__data_parallel_replicate__(ctx, copy_id)`` on every copy of every
    submodule that has it; this is how `SynchronizedBatchNorm2d` and its siblings find their peers. If a replica fails
    or ends while others wait for it, they are released at once and the caller gets the original exception.

    If a batch makes a single chunk, the module itself runs: no replicas, no threads, no callbacks. Only if several
    processes of `torch.distributed` train together does it run in a replica, as with larger batches. A wrapper inside
    of a replica runs its module directly too; the outer wrapper calls the callbacks in it.

    Args:
        module: the module to run in parallel. It must live on the first of `device_ids`.
        device_ids: one entry for each replica, as integers, strings or `torch.device`. They may name the CPU and repeat
            a device: ``["cpu"] * 4``, ``[0, 0]``. None: every accelerator; with none present the module runs directly.
        output_device: where the outputs are gathered. None: the first of `device_ids`.
        dim: the dimension of the inputs along which they are cut into chunks, and of the outputs for gathering.
        timeout: seconds after which a wait of one replica for another ends with a `ReplicaSyncError`. This is a last
            resort: failures are noticed at once.

    Raises:
        TypeError, ValueError: for a bad `timeout`.
        ValueError: for `device_ids` of different kinds; from a call, if its arguments make different numbers of chunks,
            or the replicas return different structures.
        RuntimeError: from a call, if a parameter or buffer is not on the first of `device_ids`, if the module cannot be
            replicated, or if a replica trains a synchronized layer that does not belong to it, also in another
            wrapper.
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

    Only the class of the object changes: a plain `DataParallel` becomes a `DataParallelWithCallback`, an object of a
    subclass gets a subclass of its class, which keeps all overridden methods. Copies and pickles of it stay patched.
    Patching again changes nothing, not even the timeout.

    Args:
        data_parallel: the object to patch.
        timeout: seconds after which a wait of one replica for another ends with a `ReplicaSyncError`.

    Raises:
        TypeError: if it is not a `DataParallel`, or for a bad `timeout`.
        ValueError: for a bad `timeout`.
    """
    if not isinstance(data_parallel, DataParallel):
        raise TypeError(
            f"expected an instance of torch.nn.DataParallel, but got {type(data_parallel).__name__}; "
            "wrap the module with DataParallelWithCallback"
        )
    timeout = _checked_timeout(timeout)
    if not isinstance(data_parallel, _Callbacks):
        cls = type(data_parallel)
        patched = DataParallelWithCallback if cls is DataParallel else _patched(cls)  # type: ignore[arg-type]
        swap_class(data_parallel, patched)
        data_parallel.__dict__["_sync_timeout"] = timeout
    return data_parallel


@functools.lru_cache(maxsize=256)
def _patched(cls: type[DataParallel[Any]]) -> type[DataParallel[Any]]:
    names = {"__module__": cls.__module__, "_original": cls, "_derive": staticmethod(_patched)}
    return type(cls.__name__, (_Unregistered, Derived, _Callbacks, cls), names)


def _checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"expected timeout as a number of seconds, but got {timeout!r}; pass for example 300.0")
    # `threading.TIMEOUT_MAX` is the longest wait that the platform can express.
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"expected timeout between 0 and {threading.TIMEOUT_MAX:g} seconds, but got {timeout!r}; "
            "pass for example 300.0"
        )
    return float(timeout)
