"""The run of one replica: in the modes of its caller, and such that its peers learn when it begins and how it ends."""

from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .coordinator import Coordinator

__all__: list[str] = []


class CallerModes:
    """Grad mode, inference mode, and autocast with its dtype, as they are in the thread that makes this object."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        accelerator = torch.accelerator.current_accelerator()
        self._autocast = []
        for device_type in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(device_type):
                self._autocast.append((device_type, torch.get_autocast_dtype(device_type)))

    def enter(self, stack: ExitStack) -> None:
        """Enter these modes in the thread that calls this; `stack` leaves them."""
        stack.enter_context(torch.inference_mode() if self._inference else torch.set_grad_enabled(self._grad))
        for device_type, dtype in self._autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self._cache))


@dataclass
class Run:
    """One run of a replica."""

    original: nn.Module  # the wrapped module
    coordinator: Coordinator  # of the forward
    replica_id: int
    modes: CallerModes

    def fail(self, error: BaseException) -> None:
        """Record that the replica has ended with `error`."""
        self.coordinator.leave(self.replica_id, error)


class Replica(nn.Module):
    """Runs a replica of the wrapped module, once: all who call replicas call this. Its attributes are the replica's."""

    _sync_replica: nn.Module
    _sync_run: Run

    def __init__(self, module: nn.Module, run: Run) -> None:
        # Not that of `nn.Module`: parameters, submodules and hooks are the replica's too.
        self.__dict__.update(_sync_replica=module, _sync_run=run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync_replica, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sync_replica, name, value)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self._sync_replica.named_modules(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._sync_run
        span = run.coordinator.begin(run.replica_id)
        token = current_replica.set(self)
        try:
            with span, ExitStack() as modes:
                run.modes.enter(modes)
                output = self._sync_replica(*args, **kwargs)
        except BaseException as error:
            run.fail(error)
            raise
        finally:
            current_replica.reset(token)
        run.coordinator.leave(run.replica_id)
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
    who = run.coordinator.who(run.replica_id)
    names = [name for name, module in run.original.named_modules() if module is foreign]
    which = names[0] if names and names[0] else type(foreign).__name__
    whose = "of the original module instead of its own copy" if names else "which belongs to no replica"
    raise RuntimeError(
        f"{who} called {which}, {whose}: every replica would train it with its own chunk of the batch. Usual causes: "
        "(1) a plain list or dict: use nn.ModuleList or nn.ModuleDict; (2) a replaced forward of the model: replace "
        "that of the DataParallel; (3) a layer or wrapper outside the model: make it a submodule, or call its eval()"
    )
