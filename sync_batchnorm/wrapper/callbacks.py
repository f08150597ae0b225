"""Call the replication callback ``__data_parallel_replicate__(ctx, copy_id)`` of each submodule, in all replicas.

A layer in one replica cannot reach its copies in the other replicas. So before the forward pass, the caller's thread
calls the callbacks of all copies of a layer with the same context object. The callback in replica 0 stores a
`SyncMaster` in this context. The callbacks in the other replicas register with this `SyncMaster`:

                    replica 0                             replica 1
    ctx of "bn1"    ctx.sync_master = SyncMaster(...)     pipe = ctx.sync_master.register_slave(1)
    ctx of "bn2"    ctx.sync_master = SyncMaster(...)     pipe = ctx.sync_master.register_slave(1)
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..current_replica import is_in_replica, raise_if_foreign
from ..meeting import DEFAULT_TIMEOUT, Coordinator, RunningCallback, SlavePipe, SyncMaster, running_callback
from ..torch_private import names_of_modules
from .parallel_apply import new_coordinator

__all__ = ["CallbackContext", "execute_replication_callbacks"]

_CALLBACK = "__data_parallel_replicate__"


class CallbackContext:
    """The object that all copies of one submodule share during one forward pass. Callbacks can set any attribute on it.

    Callbacks get this object as `ctx`. If a callback sets a `SyncMaster` as an attribute of this object, the
    `SyncMaster` is reset for this forward pass, and the current replica becomes its master.
    """

    # The memory pools of the wrapper for exchanges on GPUs. All forward passes of the wrapper share them.
    _sync_pools: object = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, SyncMaster) and vars(self).get(name) is not value:
            value.reset()
        object.__setattr__(self, name, value)


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Call ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule that defines it. For wrappers of your own.

    All callbacks of replica 0 are called first, then those of replica 1, and so on. All copies of a submodule share one
    `CallbackContext`. `modules` are the replicas of one module, in order.

    Raises:
        TypeError, ValueError: if `modules` is not a list of modules, or is empty.
    """
    is_list = isinstance(modules, (Sequence, nn.ModuleList))
    others = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)] if is_list else []
    if others or not is_list:
        wrong = f"a list with {others[0]}" if others else type(modules).__name__
        raise TypeError(
            f"expected a list with the replicas of one module, but got {wrong}; pass what replicate() returns"
        )
    if not modules:
        raise ValueError("expected the replicas of a module, but got an empty list; pass what replicate() returns")
    if is_in_replica():
        for module in modules:
            refuse_training(module, module)
    execute_callbacks(modules, new_coordinator((), DEFAULT_TIMEOUT))


def execute_callbacks(
    modules: Sequence[nn.Module], coordinator: Coordinator, pools: object = None
) -> dict[str, CallbackContext]:
    """Call the replication callbacks of all replicas; return the `CallbackContext` of each submodule by its name."""
    named = names_of_modules(modules[0]).items()
    contexts = {name: CallbackContext() for module, name in named if hasattr(type(module), _CALLBACK)}
    for ctx in contexts.values():
        vars(ctx)["_sync_pools"] = pools
    paths = [(name, name.split(".") if name else (), ctx) for name, ctx in contexts.items()]
    current = RunningCallback(coordinator)
    token = running_callback.set(current)
    try:
        for current.number, replica in enumerate(modules):
            for name, path, ctx in paths:
                module: Any = replica
                for child in path:
                    module = module._modules[child]  # `getattr` would take ten times as long.
                current.name = name or type(module).__name__
                module.__data_parallel_replicate__(ctx, current.number)
    finally:
        running_callback.reset(token)
    return contexts


def refuse_training(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error if a wrapper that runs inside another wrapper's replica would train synchronized layers.

    The inner wrapper would make replicas of its own. Synchronized layers would exchange among these replicas, but not
    with the other replicas of the outer wrapper.
    """
    for child in module.modules():
        if hasattr(type(child), _CALLBACK) and _uses_batch(child):
            raise_if_foreign(wrapper)


def refuse_other_packages(module: nn.Module, contexts: Mapping[str, object]) -> None:
    """Raise an error if replicas share a device, and a layer uses the `SyncMaster` of another package.

    Replicas on one device run in turns: a replica that waits in a layer lets the next replica run. A layer of another
    package, such as a copy of this one, keeps the turn while it waits, so the replicas that it waits for never run.
    """
    for name, ctx in contexts.items():
        packages = list(filter(None, map(_package_of_pipe, vars(ctx).values())))
        layer = module.get_submodule(name) if packages else None
        if layer is not None and _uses_batch(layer):
            raise RuntimeError(
                f"expected layers and wrapper of one package, but got {name or 'the module itself'} "
                f"({type(layer).__name__}) of {packages[0]} in a wrapper of {__package__.removesuffix('.wrapper')}, "
                "whose replicas on one device run one at a time, so that one which waits in that layer would keep the "
                "others from running; import both from the same package"
            )


def _package_of_pipe(value: object) -> str | None:
    """If the value is a `SyncMaster` or `SlavePipe` of another package, return the name of that package.

    For other values, and for the `SyncMaster` and `SlavePipe` of this package, return None.
    """
    if isinstance(value, (SyncMaster, SlavePipe)):
        return None
    # Copies of this package, and the older library, also name their classes `SyncMaster` and `SlavePipe`.
    modules = [cls.__module__ for cls in type(value).__mro__ if cls.__name__ in ("SyncMaster", "SlavePipe")]
    return re.sub(r"\.(comm|meeting\.pipes)$", "", modules[0]) if modules else None


def _uses_batch(layer: nn.Module) -> bool:
    """Return whether a batch norm layer normalizes with batch statistics, rather than with its running statistics."""
    return layer.training or getattr(layer, "running_mean", 0) is None
