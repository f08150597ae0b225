"""The replication callback: what the copies of one submodule share, and who calls it on them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..meeting import DEFAULT_TIMEOUT, Coordinator, Joining, SyncMaster, joining
from ..torch_private import names_of_modules
from .replica import is_in_replica, new_coordinator, raise_foreign_layer

__all__ = ["CallbackContext", "execute_replication_callbacks"]

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
    if is_in_replica():
        for module in modules:
            refuse_training(module, module)
    execute_callbacks(modules, new_coordinator((), DEFAULT_TIMEOUT))


def execute_callbacks(modules: Sequence[nn.Module], coordinator: Coordinator) -> bool:
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


def refuse_training(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error, in a replica, for replicas inside of it that would synchronize only with each other."""
    # Layers without running statistics use the batch in eval mode too.
    for child in module.modules():
        if hasattr(type(child), _CALLBACK) and (child.training or getattr(child, "running_mean", 0) is None):
            raise_foreign_layer(wrapper)
