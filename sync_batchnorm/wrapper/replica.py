"""The run of one replica: in the modes of its caller, and such that its peers learn when it begins and how it ends."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from ..meeting import Coordinator
from .devices import DeviceId, as_device

__all__: list[str] = []


def caller_modes() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return what makes the contexts of the grad mode, inference mode, and autocast with its dtype, of this thread."""
    grad = partial(torch.set_grad_enabled, torch.is_grad_enabled())
    modes: list[Any] = [torch.inference_mode if torch.is_inference_mode_enabled() else grad]
    accelerator = torch.accelerator.current_accelerator()
    for device_type in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
        if torch.is_autocast_enabled(device_type):
            dtype, cache = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
            modes.append(partial(torch.autocast, device_type, dtype=dtype, cache_enabled=cache))
    return modes


def new_coordinator(device_ids: Sequence[DeviceId], timeout: float) -> Coordinator:
    """Return the coordinator of a forward pass, which makes spans in the profile if a profiler is active."""

    def span(name: str) -> AbstractContextManager[Any]:
        return profiler.record_function(f"sync_batchnorm: {name}")

    devices = list(map(str, map(as_device, device_ids)))
    return Coordinator(devices, timeout, span if profiler._is_profiler_enabled else None)


@dataclass
class Run:
    """What the replicas of one forward have in common."""

    original: nn.Module  # the wrapped module
    coordinator: Coordinator
    modes: Sequence[Callable[[], AbstractContextManager[Any]]] = ()  # those of the caller


class Replica(nn.Module):
    """Runs a replica of the wrapped module, once: all who call replicas call this. Its attributes are the replica's."""

    _sync_replica: nn.Module
    _sync_run: Run
    _sync_id: int

    def __init__(self, module: nn.Module, run: Run, replica_id: int) -> None:
        # Not that of `nn.Module`: parameters, submodules and hooks are the replica's too.
        self.__dict__.update(_sync_replica=module, _sync_run=run, _sync_id=replica_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync_replica, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sync_replica, name, value)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self._sync_replica.named_modules(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        coordinator, replica_id = self._sync_run.coordinator, self._sync_id
        span = coordinator.begin(replica_id)
        token = current_replica.set(self)
        try:
            with span, ExitStack() as stack:
                for mode in self._sync_run.modes:
                    stack.enter_context(mode())
                output = self._sync_replica(*args, **kwargs)
        except BaseException as error:
            coordinator.leave(replica_id, error)
            raise
        finally:
            current_replica.reset(token)
        coordinator.leave(replica_id)
        return output

    forward = __call__


current_replica: ContextVar[Replica | None] = ContextVar("sync_batchnorm_replica", default=None)  # of this thread


def is_in_replica() -> bool:
    """Return whether this thread runs a replica."""
    return current_replica.get() is not None


# As `torch.compiler.assume_constant_result` does, which would import the compiler. It cannot trace a `ContextVar`, and
# so keeps the answer of the first call: what it has compiled outside of replicas does not ask again inside.
vars(is_in_replica).update(_dynamo_marked_constant=True)


def raise_foreign_layer(foreign: nn.Module) -> None:
    """Raise an error if this is the thread of a replica to which a layer or wrapper that trains does not belong."""
    replica = current_replica.get() if is_in_replica() else None
    if replica is None or any(module is foreign for module in replica.modules()):
        return
    run = replica._sync_run
    who = run.coordinator.who(replica._sync_id)
    name = next((name for name, module in run.original.named_modules() if module is foreign), None)
    which = name or type(foreign).__name__
    whose = "which belongs to no replica" if name is None else "of the original module instead of its own copy"
    raise RuntimeError(
        f"{who} called {which}, {whose}: every replica would train it with its own chunk of the batch. Usual causes: "
        "(1) a plain list or dict: use nn.ModuleList or nn.ModuleDict; (2) a replaced forward of the model: replace "
        "that of the DataParallel; (3) a layer or wrapper outside the model: make it a submodule, or call its eval()"
    )
