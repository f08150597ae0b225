"""The call of a replica: the modes of its caller, what the coordinator is told, and which replica a thread runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn

from sync_batchnorm import distributed
from sync_batchnorm.compilation import uncompiled
from sync_batchnorm.coordinator import Coordinator
from sync_batchnorm.errors import ReplicaSyncError
from sync_batchnorm.torch_private import mark_constant

__all__: list[str] = []


class CallerState:
    """Grad mode, inference mode, and autocast with its dtype, as they are in the thread that makes this object.

    All of these are local to a thread. Torch's own `parallel_apply` passes on grad mode, and whether autocast is on.
    """

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        accelerator = torch.accelerator.current_accelerator()
        device_types = ["cpu", accelerator.type] if accelerator is not None else ["cpu"]
        self._autocast = [
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in device_types
            if torch.is_autocast_enabled(device_type)
        ]

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context that sets these modes in another thread."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode() if self._inference else torch.set_grad_enabled(self._grad))
        for device_type, dtype in self._autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self._cache))
        return stack


class Watch:
    """Runs a replica when it is called, and tells the coordinator when it begins and how it ends.

    A user's own `parallel_apply` or `forward` may call a replica, and a hook may raise in a replica: the coordinator
    must be told of both. All callers call the root of a replica. So each root has a `Watch`, in the attribute that
    `Module.compile` uses: `Module.__call__` calls the object in it with its own arguments, and copies and pickles of a
    module do not contain it. Both are private to torch (2.1 to 2.15): `refuse_other_calls` checks the first, and
    `_called` detects a copy that has the attribute nevertheless.
    """

    def __init__(
        self, original: nn.Module, replica: nn.Module, coordinator: Coordinator, replica_id: int, state: CallerState
    ) -> None:
        self.original = original
        self.coordinator = coordinator
        self.replica_id = replica_id
        self.state = state
        self.raises = False  # whether `_Callbacks.parallel_apply` raises the errors of this replica
        self._replica = ref(replica)  # weak, since the replica holds this object

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules of the replica."""
        replica = self._replica()
        return () if replica is None else replica.modules()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # for copies and pickles that a method of the user makes

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica: Any = self._replica()
        called: Any = self._called() or replica
        if called is not replica:
            return called._call_impl(*args, **kwargs)
        token = _running.set(self)
        try:
            with self.state.entered(), distributed.in_order(), self.coordinator.forward_of(self.replica_id):
                return replica._call_impl(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            if not self.raises:
                raise
            # Torch's `parallel_apply` keeps an Exception for its caller, but loses any other exception.
            raise ReplicaSyncError(f"{type(error).__name__} in replica {self.replica_id}") from None
        finally:
            _running.reset(token)

    def _called(self) -> nn.Module | None:
        """Return the module that is called; None if it cannot be determined.

        A copy that was made as in ``twin.__dict__ = self.__dict__.copy()`` has this object too, and must run itself.
        Only the frame of `Module.__call__` knows which module is called.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "_wrapped_call_impl":
            frame = frame.f_back
        module = None if frame is None else frame.f_locals.get("self")
        return module if isinstance(module, nn.Module) and watch_of(module) is self else None


_running: ContextVar[Watch | None] = ContextVar("sync_batchnorm_running", default=None)  # the replica of this thread


class OwnCall(nn.Module):
    """Wraps a replica whose class overrides `__call__`, so that all of `__call__` counts as its forward."""

    def __init__(self, replica: nn.Module) -> None:
        super().__init__()
        self.replica = replica
        self.training = replica.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.replica(*args, **kwargs)


def watch_of(module: nn.Module) -> Watch | None:
    """Return the watch of the replica whose root is `module`; None for any other module."""
    watch = module.__dict__.get("_compiled_call_impl")
    return watch if isinstance(watch, Watch) else None


def is_in_replica() -> bool:
    """Return whether this thread runs a replica."""
    return _running.get() is not None


# This has the effect of `torch.compiler.assume_constant_result`, which would import the compiler (torch 2.13): the
# compiler cannot trace a `ContextVar`, and takes the result that it gets while tracing as a constant.
mark_constant(is_in_replica)


def raise_foreign_layer(foreign: nn.Module) -> None:
    """Raise an error if a layer or wrapper that trains in the replica of this thread does not belong to it.

    Raises:
        RuntimeError: naming the replica, and the name of `foreign` if it belongs to the wrapped module itself.
    """
    watch = _running.get()
    if watch is None or any(module is foreign for module in watch.modules()):
        return
    who = watch.coordinator.who(watch.replica_id)
    names = [name for name, module in watch.original.named_modules() if module is foreign]
    if names:
        raise RuntimeError(
            f"expected the copy of {names[0] or 'the module'} that belongs to {who}, but got the one of the wrapped "
            "module itself, which belongs to no replica; let the forward reach its layers through attributes of "
            "self that are modules (nn.ModuleList instead of a list), and wrap the forward of the DataParallel instead "
            "of that of the module, or that of its class"
        )
    raise RuntimeError(
        f"expected a layer or wrapper that is registered in the wrapped module, but got a {type(foreign).__name__} "
        f"that is not ({who}), so that every replica would train it with its own chunk of the batch; make it a "
        "submodule of the model, or call its eval()"
    )
