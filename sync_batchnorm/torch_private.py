"""What is private in torch and used here: names, without which a torch is refused, and the marks of its compiler.

NOTE [private names]: Torch may rename or drop these in any version. Other files use them by the names that this
file gives them, except for attributes of public objects, such as `_version`.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn

__all__: list[str] = []

P = ParamSpec("P")
R = TypeVar("R")

_REQUIRED = {
    "torch.nn.BatchNorm1d._check_input_dim": "the error for an input with a wrong number of dimensions",
    "torch.nn.Module._replicate_for_data_parallel": "the copy of a module in a replica",
    "torch.Tensor._version": "notice of a parameter that is changed in place",
    "torch.Tensor._backward_hooks": "whether a parameter has hooks",
    "torch.Tensor._post_accumulate_grad_hooks": "whether a parameter has hooks that follow its gradient",
    "torch._C._is_any_autocast_enabled": "whether autocast is enabled for any kind of device",
    "torch._C._set_grad_enabled": "what `torch.no_grad` does, in a tenth of its time",
    "torch._C._current_graph_task_id": "whether a backward runs in this thread",
    "torch._C._autograd._top_saved_tensors_default_hooks": "whether a thread has hooks on saved tensors",
    "torch._C._autograd._get_current_graph_task_keep_graph": "whether the running backward retains the graph",
    "torch._C._will_engine_execute_node": "which gradients the running backward needs",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "whether this thread compiles what it runs",
    "torch._C._are_functorch_transforms_active": "whether this thread is inside of a transform of torch.func",
    "torch.utils._python_dispatch._disable_current_modes": "operators that a selective checkpoint does not count",
    "torch.autograd.profiler._is_profiler_enabled": "whether a profiler runs, in any thread",
}
_ATTRIBUTES = ("_parameters", "_buffers", "_modules")  # of every module; replicas are filled with them

# The names of the dictionaries in which a module has the hooks of its calls. Their keys are the numbers of hooks: some
# hold the hooks, and some hold a flag of those hooks that have it, under the name of the former and what the flag says.
_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name]
FLAGS_OF_HOOKS = tuple(name for name in _HOOKS if any(name.startswith(f"{other}_") for other in _HOOKS))
HOOKS = tuple(name for name in _HOOKS if name not in FLAGS_OF_HOOKS)
# An attribute of every module: None without backward hooks, False with those of the older kind, which PyTorch has
# deprecated: `torch.nn.Module.register_backward_hook`.
KIND_OF_BACKWARD_HOOKS = "_is_full_backward_hook"

_names: dict[str, Any] = {}
for _name in _REQUIRED:
    with suppress(AttributeError, ImportError):
        _names[_name] = resolve_name(_name)
_missing = [name for name in _REQUIRED if name not in _names]
_missing += [f"torch.nn.Module.{name}" for name in _ATTRIBUTES if not hasattr(nn.Module(), name)]
if _missing:
    raise ImportError(
        f"expected a torch that has {_missing}, but got torch {torch.__version__}; use a torch that this version of "
        "sync_batchnorm was tested with"
    )

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    BatchNormBase = _BatchNorm
else:
    BatchNormBase = nn.BatchNorm1d.__base__  # the class of all batch norm layers
without_modes: Callable[[], AbstractContextManager[Any]] = _names["torch.utils._python_dispatch._disable_current_modes"]
in_transform: Callable[[], bool] = _names["torch._C._are_functorch_transforms_active"]
graph_task_id: Callable[[], int] = _names["torch._C._current_graph_task_id"]  # of this thread; -1 outside of a backward
any_autocast: Callable[[], bool] = _names["torch._C._is_any_autocast_enabled"]
set_grad_enabled: Callable[[bool], None] = _names["torch._C._set_grad_enabled"]  # of this thread
keeps_graph: Callable[[], bool] = _names["torch._C._autograd._get_current_graph_task_keep_graph"]
hooks_of_thread: Callable[[bool], Any] = _names["torch._C._autograd._top_saved_tensors_default_hooks"]
will_run: Callable[[Any], bool] = _names["torch._C._will_engine_execute_node"]  # a node that is not a leaf


def fast_apply(function: type[torch.autograd.Function]) -> Any:
    """Return the `apply` of the base class in C++; that of `torch.autograd.Function` looks for transforms first."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks were registered on `tensor`, which autograd also calls with None in place of a gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Return whether a module has an attribute, without evaluating a property."""
    state = vars(module)
    return name in state or hasattr(type(module), name) or any(name in state[part] for part in _ATTRIBUTES)


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


def original_module(module: nn.Module) -> Any:
    """Return what `torch.compile` has made a module of, or the module itself."""
    return module._orig_mod if isinstance(module, compiled_module_type()) else module


REASON = (  # which the compiler shows with `fullgraph=True`
    "expected a graph break where a synchronized batch norm exchanges with other replicas or processes, but got "
    "fullgraph=True; leave that out, or compile the functions between these layers"
)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` as one that is never compiled: `torch.compiler.disable`, which takes time only if needed."""
    disabled: Callable[P, R] | None = None
    compiler_of_thread: Callable[[], Any] = _names["torch._C._dynamo.eval_frame.get_eval_frame_callback"]

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
