"""The replica that the current thread runs, and the refusal of layers that belong to no replica or to another one.

NOTE [whose thread]: A replica runs in a copy of the context of its caller, which may itself be a replica of another
wrapper, and a thread that a replica starts may inherit its context, as by default in free-threaded Python 3.14. So a
`ContextVar` alone does not say which replica a thread runs: the number of the thread must be that of the replica, too.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn

from .torch_private import uncompiled

__all__: list[str] = []

# The `ReplicaRun` of this context, set by `wrapper/run.py`. A weak reference: a thread that the replica has started may
# keep its context longer than the forward pass lasts.
running: ContextVar[Callable[[], Any]] = ContextVar("sync_batchnorm_run", default=lambda: None)


def current_run() -> Any:
    """Return the run of the replica that this thread runs, or None; see NOTE [whose thread]."""
    run = running.get()()
    return run if run is not None and run.forward_pass.coordinator.runs_here(run.number) else None


def is_in_replica() -> bool:
    """Return whether this thread runs a replica."""
    return current_run() is not None


# As `torch.compiler.assume_constant_result` does, which would import the compiler. It cannot trace a `ContextVar`, and
# so keeps the answer of the first call: what it has compiled outside of replicas does not ask again inside.
vars(is_in_replica).update(_dynamo_marked_constant=True)


def raise_foreign_layer(foreign: nn.Module) -> None:
    """Raise an error if this is the thread of a replica to which a layer or wrapper that trains does not belong."""
    if is_in_replica():
        _refuse_unless_its_own(foreign)


@uncompiled  # The compiler knows no threads.
def _refuse_unless_its_own(foreign: nn.Module) -> None:
    run = current_run()
    if run is None or any(module is foreign for module in run.replica.modules()):
        return
    forward_pass = run.forward_pass
    who = forward_pass.coordinator.who(run.number)
    name = next((name for name, module in forward_pass.original.named_modules() if module is foreign), None)
    which = name or type(foreign).__name__
    whose = "which belongs to no replica" if name is None else "of the original module instead of its own copy"
    compiled = [child for child in forward_pass.original.modules() if child._compiled_call_impl is not None]
    around = [type(child).__name__ for child in compiled if any(module is foreign for module in child.modules())]
    causes = (
        "Usual causes: (1) a plain list or dict: use nn.ModuleList or nn.ModuleDict; (2) a replaced forward of the "
        "model: replace that of the DataParallel; (3) a layer or wrapper outside the model: make it a submodule, or "
        "call its eval()"
    )
    if around:  # whose replicas have what was compiled of the original
        causes = f"The cause is compile() of {around[0]}: compile functions that its forward calls instead"
    raise RuntimeError(
        f"{who} called {which}, {whose}: every replica would train it with its own chunk of the batch. {causes}"
    )
