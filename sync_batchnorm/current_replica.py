"""Find the replica that runs in the current thread. Raise an error if the replica calls layers of another replica, or
of the original model.

NOTE [whose thread]: The obvious way to remember the replica of a thread is a `ContextVar`. This is not enough, because
other threads may inherit the value of the variable. A thread started by a replica may inherit the replica's context, as
by default in free-threaded Python 3.14. And a replica runs in a copy of its caller's context, where the caller may be a
replica of another wrapper. So `current_run` also compares the current thread with the thread that the coordinator
recorded for the replica.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn

from .torch_private import uncompiled

__all__: list[str] = []

# A weak reference to the `ReplicaRun` of the replica in whose context this code runs, set by `ReplicaRun.call`. It is
# weak because a thread that the replica has started may keep this context after the forward pass.
context_run: ContextVar[Callable[[], Any]] = ContextVar("sync_batchnorm_run", default=lambda: None)


def current_run() -> Any:
    """Return the `ReplicaRun` of this thread, or None outside replicas; see NOTE [whose thread]."""
    run = context_run.get()()
    return run if run is not None and run.forward_pass.coordinator.runs_here(run.number) else None


def is_in_replica() -> bool:
    """Return whether this thread runs a replica."""
    return current_run() is not None


# `torch.compile` cannot trace a `ContextVar`. With the attribute `_dynamo_marked_constant`, the compiler calls
# `is_in_replica` once, during the compilation, and takes the result for a constant. So compiled code does not notice
# whether it runs in a replica. `torch.compiler.assume_constant_result` sets the same attribute, but imports the
# compiler.
vars(is_in_replica).update(_dynamo_marked_constant=True)


def raise_if_foreign(module: nn.Module) -> None:
    """Raise an error if this thread runs a replica, and the module does not belong to this replica.

    `module` is a synchronized layer or a wrapper in training mode.
    """
    if is_in_replica():
        _raise_unless_in_replica(module)


@uncompiled  # The compiler knows no threads.
def _raise_unless_in_replica(module: nn.Module) -> None:
    run = current_run()
    if run is None or any(child is module for child in run.replica.modules()):
        return
    original = run.forward_pass.original
    name = next((name for name, child in original.named_modules() if child is module), None)
    origin = "which belongs to no replica" if name is None else "of the original module instead of its own copy"
    compiled = [child for child in original.modules() if child._compiled_call_impl is not None]
    parents = [parent for parent in compiled if any(child is module for child in parent.modules())]
    causes = (
        "Usual causes: (1) a plain list or dict: use nn.ModuleList or nn.ModuleDict; (2) a replaced forward of the "
        "model: replace the DataParallel's; (3) one outside the model: make it a submodule, or call its eval()"
    )
    if parents:  # In a replica, the copy of a compiled module still runs the compiled code of the original module.
        causes = (
            f"The cause is compile() of {type(parents[0]).__name__}: compile functions that its forward calls instead"
        )
    raise RuntimeError(
        f"{run.forward_pass.coordinator.who(run.number)} called {name or type(module).__name__}, {origin}: every "
        f"replica would train it with its own chunk of the batch. {causes}"
    )
