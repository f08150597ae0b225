"""The replication callback: what the copies of one submodule share, and who calls it on them."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn

from ..backends.workspaces import WorkspacePools
from ..current_replica import is_in_replica, raise_if_foreign
from ..meeting import DEFAULT_TIMEOUT, Coordinator, RunningCallback, SlavePipe, SyncMaster, running_callback
from ..torch_private import names_of_modules
from .run import new_coordinator

__all__ = ["CallbackContext", "execute_replication_callbacks"]

_CALLBACK = "__data_parallel_replicate__"


class CallbackContext:
    """What all copies of one submodule share during one forward pass; set any attribute on it.

    The callbacks get it as `ctx`, see "Callbacks for modules of your own" on the page "Extending". A `SyncMaster` that
    is put here belongs to this forward pass, and its master is the replica whose callback puts it here.
    """

    _sync_pools: "ref[WorkspacePools] | None" = None  # that the forward passes of a wrapper share

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, SyncMaster) and vars(self).get(name) is not value:
            value.reset()
        object.__setattr__(self, name, value)


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Call ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule that has it; for wrappers of your own.

    `modules` are the replicas of one module, in order. All callbacks of replica 0 come first, then the callbacks of
    replica 1, and so on. The copies of one submodule share one `CallbackContext`.

    Raises:
        TypeError, ValueError: if `modules` is no list of modules, or is empty.
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
    modules: Sequence[nn.Module], coordinator: Coordinator, pools: "ref[WorkspacePools] | None" = None
) -> dict[str, CallbackContext]:
    """Execute the callbacks; return the context of each submodule that has one, by name."""
    named = names_of_modules(modules[0]).items()
    contexts = {name: CallbackContext() for module, name in named if hasattr(type(module), _CALLBACK)}
    for ctx in contexts.values():
        vars(ctx)["_sync_pools"] = pools
    paths = [(name, name.split(".") if name else (), ctx) for name, ctx in contexts.items()]
    here = RunningCallback(coordinator)
    token = running_callback.set(here)
    try:
        for here.number, replica in enumerate(modules):
            for name, path, ctx in paths:
                module: Any = replica
                for part in path:
                    module = module._modules[part]  # `getattr` takes ten times as long
                here.name = name or type(module).__name__
                module.__data_parallel_replicate__(ctx, here.number)
    finally:
        running_callback.reset(token)
    return contexts


def refuse_training(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error in a replica whose forward calls a wrapper that trains synchronized layers.

    The inner wrapper would synchronize its own replicas with each other, and with nobody outside.
    """
    for child in module.modules():
        if hasattr(type(child), _CALLBACK) and _uses_batch(child):
            raise_if_foreign(wrapper)


def refuse_other_packages(module: nn.Module, contexts: Mapping[str, object]) -> None:
    """Raise an error if a layer of `module`, whose replicas take turns, exchanges by the pipes of another package.

    That package knows nothing of turns: a replica that waits in such a layer would keep its turn forever.
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
    """Return the package of a master or pipe that is none of this package; None for everything else."""
    if isinstance(value, (SyncMaster, SlavePipe)):
        return None
    # So they are called in copies of this package and in the older library, too.
    modules = [cls.__module__ for cls in type(value).__mro__ if cls.__name__ in ("SyncMaster", "SlavePipe")]
    return re.sub(r"\.(comm|meeting\.pipes)$", "", modules[0]) if modules else None


def _uses_batch(layer: nn.Module) -> bool:
    """Return whether a layer with a callback normalizes with the batch, not with running statistics."""
    return layer.training or getattr(layer, "running_mean", 0) is None
