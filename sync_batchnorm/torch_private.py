"""What is private in torch and used here: names, with what is lost without them, and the marks of its compiler.

NOTE [private names]: Torch may rename or drop these in any version. Other files use them by the names that this
file gives them, except for attributes of public objects, such as `_version`.
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


# The dictionaries in which a module has the hooks of its calls, and flags of those that have one, by their numbers.
HOOKS_AND_FLAGS = tuple(name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name)
HOOKS = tuple(name for name in HOOKS_AND_FLAGS if name.endswith("hooks"))
# Without it, batch norms are known by their five public classes alone, and not by those that users derive from it.
BatchNormBase = _BatchNorm
# Without it, a selective checkpoint counts the operators of a merge, which its recomputation does not repeat.
without_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
# Without it, replicas inside a transform of torch.func are wrong, with no error.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
# The number of the backward pass in this thread, or -1. Without it, a recomputation would be taken for a new call.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# Whether autocast is on for any kind of device. Without it, every call would have to switch it off.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
# For this thread. Without it, every call would pay ten times as much for `torch.no_grad`.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# How many modes are on in this thread. Without them, a thread that stays would keep the modes that `forward` leaves on.
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether the running backward pass retains the graph. Without it, every one would have to keep what it could drop.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# The hooks on saved tensors of this thread. Without it, checkpoints in replicas would not see what a layer saves.
hooks_of_thread: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
# Whether the running backward pass needs a node that is not a leaf. Without it, all gradients would be computed.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
# What compiles in this thread, or None. Without it, every call would pay for `torch.compiler.disable`.
compiler_of_thread: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
# Without it, copies to several devices would be one operator each.
foreach_copy: Callable[..., None] = torch._foreach_copy_


def fast_apply(function: type[torch.autograd.Function]) -> Any:
    """Return the `apply` of the base class in C++; that of `torch.autograd.Function` looks for transforms first."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks were registered on `tensor`, which autograd also calls with None in place of a gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Return whether a module has an attribute, without evaluating a property."""
    state = vars(module)
    parts = (state, state["_parameters"], state["_buffers"], state["_modules"])
    return hasattr(type(module), name) or any(name in part for part in parts)


def names_of_modules(module: nn.Module) -> dict[nn.Module, str]:
    """Return what `module.named_modules()` yields, by module and in the same order, in a fraction of the time."""
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
    """Return the class of what `torch.compile` makes of a module, or an empty tuple if nothing was compiled."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())


REASON = (  # which the compiler shows with `fullgraph=True`
    "expected a graph break where a synchronized batch norm exchanges with other replicas or processes, but got "
    "fullgraph=True; leave that out, or compile the functions between these layers"
)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` as one that is never compiled: `torch.compiler.disable`, which takes time only if needed."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if not torch.compiler.is_dynamo_compiling() and compiler_of_thread() is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)  # what `disable` sets too
    return run
