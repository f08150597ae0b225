"""The private names of torch that this library uses, and decorators that tell torch.compile how to treat a function.

The comment above each private name tells why this library needs the name, and the consequence if torch drops it.

NOTE [private names]: Torch may rename or drop a private name in any version. So other files import it from this file,
under a name of our own. Private attributes of public objects, such as `_version`, are the exception.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _python_dispatch

__all__: list[str] = []

P = ParamSpec("P")
R = TypeVar("R")


# The names of the attributes in which a module stores its hooks, and flags for single hooks. An example of flags is
# `_forward_hooks_with_kwargs`.
HOOKS_AND_FLAGS = tuple(name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name)
HOOKS = tuple(name for name in HOOKS_AND_FLAGS if name.endswith("hooks"))
# The base class of torch's batch norms. Without this class, only torch's five public classes would be recognized as
# batch norms, and not the classes that users derive from it.
BatchNormBase = _BatchNorm
# Switches off dispatch modes in a `with` block, for the merge of statistics. The dispatch mode of a selective
# checkpoint expects the operators of the forward pass again in the recomputation, which does not merge statistics.
without_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
# Returns whether a transform of torch.func is active, such as vmap. Replicas would return wrong outputs inside a
# transform, so the library raises an error if this function returns True.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Returns the number of the backward pass that runs in this thread, or -1. A layer that is called in a backward pass is
# called by a checkpoint, which recomputes: it must not start a new exchange.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# Returns whether autocast is on for any type of device. Without this function, every exchange would have to switch off
# autocast, even if autocast is not on.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
# Switches the recording of gradients on or off in this thread. Without this function, every exchange would use
# `torch.no_grad`, which takes ten times as long.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# These two functions return how many `__torch_function__` modes and dispatch modes are active in this thread. Without
# them, a mode that a replica's `forward` left active would also act on the next replica in this thread.
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Returns whether the running backward pass retains the graph. Without this function, a backward pass would have to keep
# all saved inputs.
retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# Returns the saved-tensor hooks that are set in this thread, or None. Without this function, the library could not pass
# the tensors that it saves to these hooks, as a checkpoint needs.
saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
# Returns whether the running backward pass executes a given node of the graph. Without this function, every backward
# pass would compute the gradients of all inputs, even those that nobody needs.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
# Returns the compiler that is active in this thread, or None. If none is active, the slow `torch.compiler.disable` is
# not needed.
active_compiler: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
# Copies a list of tensors to several devices in one call. Without this function, each device would need a call.
foreach_copy: Callable[..., None] = torch._foreach_copy_


def fast_apply(function: type[torch.autograd.Function]) -> Any:
    """Return the `apply` method of an autograd function, without torch's check for transforms of torch.func."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has gradient hooks.

    A node with several outputs may get gradients for only some of them. Autograd then calls the hooks of the other
    outputs, too, with None.
    """
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Return whether a module has an attribute of this name, without evaluating a property."""
    state = vars(module)
    tables = (state, state["_parameters"], state["_buffers"], state["_modules"])
    return hasattr(type(module), name) or any(name in table for table in tables)


def names_of_modules(module: nn.Module) -> dict[nn.Module, str]:
    """Return all submodules of `module` with their names, like `named_modules()`, but in a fraction of the time."""
    names: dict[nn.Module, str] = {}
    stack: list[tuple[str, nn.Module | None]] = [("", module)]
    while stack:
        name, child = stack.pop()
        if child is not None and child not in names:
            names[child] = name
            prefix = f"{name}." if name else ""
            for key, submodule in reversed(child._modules.items()):
                stack.append((prefix + key, submodule))
    return names


def compiled_module_type() -> Any:
    """Return the class of modules compiled by `torch.compile`, or an empty tuple if the compiler was never imported."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())


REASON = (  # The compiler shows this text with `fullgraph=True`.
    "expected a graph break where a synchronized batch norm exchanges with other replicas or processes, but got "
    "fullgraph=True; leave that out, or compile the functions between these layers"
)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that `torch.compile` never compiles it.

    `torch.compiler.disable` has the same effect, but makes each call of the function slower than this decorator does.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if not torch.compiler.is_dynamo_compiling() and active_compiler() is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)  # as `disable` does
    return run
