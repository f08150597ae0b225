"""The private names of torch, and the marks of its compiler. A comment at each says the loss without it.

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


# Attributes of a module: dictionaries of its hooks, and of flags for single hooks (`_forward_hooks_with_kwargs`).
HOOKS_AND_FLAGS = tuple(name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name)
HOOKS = tuple(name for name in HOOKS_AND_FLAGS if name.endswith("hooks"))
# Without it: only torch's five public classes are recognized as batch norms, not the classes that users derive.
BatchNormBase = _BatchNorm
# Without it: a selective checkpoint counts the operators of a merge, and its recomputation does not repeat them.
without_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
# Without it: replicas inside a transform of torch.func are wrong, with no error.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
# The number of the backward pass in this thread, or -1. Without it: a recomputation would count as a new exchange.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# Whether autocast is on for any kind of device. Without it: every exchange would have to switch it off.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
# For this thread. Without it: every exchange would pay ten times as much for `torch.no_grad`.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# How many modes are on in this thread. Without them: an idle thread would keep the modes that `forward` left on.
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether the running backward pass retains the graph. Without it: no backward pass could free its tensors.
retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# The hooks on saved tensors in this thread, or None. Without it: checkpoints in replicas would not see saved tensors.
saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
# Whether the running backward pass executes an inner node. Without it: every backward pass would compute all gradients.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
# The compiler that is active in this thread, or None. Without it: every call would pay for `torch.compiler.disable`.
active_compiler: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
# Without it: copies to several devices would be one operator each.
foreach_copy: Callable[..., None] = torch._foreach_copy_


def fast_apply(function: type[torch.autograd.Function]) -> Any:
    """Return the `apply` of the C++ base class, which does not look for transforms of torch.func first."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has hooks. Autograd calls them with None if there is no gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Return whether a module has an attribute, without evaluating a property."""
    state = vars(module)
    tables = (state, state["_parameters"], state["_buffers"], state["_modules"])
    return hasattr(type(module), name) or any(name in table for table in tables)


def names_of_modules(module: nn.Module) -> dict[nn.Module, str]:
    """Return the name of each module, in the order of `module.named_modules()`, in a fraction of its time."""
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
    """Return the class of compiled modules, or an empty tuple if the compiler was never imported."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())


REASON = (  # The compiler shows this text with `fullgraph=True`.
    "expected a graph break where a synchronized batch norm exchanges with other replicas or processes, but got "
    "fullgraph=True; leave that out, or compile the functions between these layers"
)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it is never compiled, like `torch.compiler.disable`, but without its usual cost."""
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
