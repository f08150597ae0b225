"""The private names of torch that are used here, each of them once, and what is lost without it.

NOTE [private names]: Torch may rename or drop these in any version, and no other file of the package names them. A name
that torch lacks is listed in `MISSING`, which `python -m sync_batchnorm` prints; the comment above each name says what
happens then.

This package also uses private attributes of modules and tensors. If torch lacks one that is marked with *, the import
raises an error.

===========================================  ==========================================================================
attribute                                    what is lost without it
===========================================  ==========================================================================
``_parameters``, ``_buffers``, ``_modules``  * what replicas are filled with
``_replicate_for_data_parallel``             * the copy of a module in a replica
``_call_impl``                               * the call of a replica
``_compiled_call_impl``                      notice of the end of a replica: `refuse_other_calls` refuses it
``_wrapped_call_impl``                       a copy with the attributes of a replica runs the replica, not itself
``_check_input_dim``                         * the error for an input with a wrong number of dimensions
``_forward_hooks``                           * that there is one warning for a module and its replicas
``_version``                                 * notice of a tensor that is changed in place
``_is_replica``                              the warning of a layer without peers; a wrapper in a replica makes its own
``_former_parameters``                       the knowledge that weights are equal: replicas of torch multiply their own
===========================================  ==========================================================================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

_required: list[tuple[object, str]] = [
    (nn.modules.batchnorm, "_BatchNorm"),
    (nn.BatchNorm1d, "_check_input_dim"),
    (Tensor, "_version"),
    (nn.Module, "_call_impl"),
    (nn.Module, "_replicate_for_data_parallel"),
    *((nn.Module(), name) for name in ("_buffers", "_forward_hooks", "_modules", "_parameters")),
]
_dropped = [name for owner, name in _required if not hasattr(owner, name)]
if _dropped:
    raise ImportError(
        f"expected a torch that has {_dropped}, but got torch {torch.__version__}; use a torch that this version of "
        "sync_batchnorm was tested with"
    )

BatchNormBase = nn.modules.batchnorm._BatchNorm  # the class of all batch norm layers

MISSING: list[str] = []  # the names below that this torch does not have


def _find(name: str, otherwise: Any) -> Any:
    """Return what torch has under `name`; if that is missing, add it to `MISSING` and return `otherwise`."""
    try:
        return resolve_name(name)
    except (AttributeError, ImportError):
        MISSING.append(name)
        return otherwise


def _reader(name: str, otherwise: Any) -> Callable[[], Any]:
    """Return a function that returns the current value of `name`, which changes."""
    _find(name, otherwise)
    owner, _, attribute = name.rpartition(".")
    return functools.partial(getattr, resolve_name(owner), attribute, otherwise)


def _method(name: str) -> Callable[..., object]:
    """Return a function that calls the method `name` of a node, or does nothing if the node has none.

    The method is looked up on the node itself, since the compiler may pass a stand-in for a node.
    """
    _find(name, None)
    attribute = name.rpartition(".")[2]
    return lambda node, *args: getattr(node, attribute, lambda *_: None)(*args)


# The autograd engine, and the nodes of a graph.

# The number of the backward that runs in this thread; -1 if there is none. Without it, a recomputation by reentrant
# checkpointing is not recognized: replicas fail with another error, and without replicas a call is counted twice.
graph_task_id: Callable[[], int] = _find("torch._C._current_graph_task_id", lambda: -1)

# Whether the running backward retains the graph. Without it, the nodes of a graph stay numbered as long as it is alive,
# also after its last backward.
keeps_graph: Callable[[], bool] = _find("torch._C._autograd._get_current_graph_task_keep_graph", lambda: True)

# Whether the running backward executes a node. Without it, gradients that are not needed are computed, and dropped.
_will_execute: Callable[[Any], bool] = _find("torch._C._will_engine_execute_node", lambda node: True)


def will_run(node: Any) -> bool:
    """Return whether the running backward goes on to `node`; True if torch does not tell."""
    try:
        return node is not None and _will_execute(node)
    except RuntimeError:  # A leaf, in `torch.autograd.grad`: torch does not tell.
        return True


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Do what ``function.apply(*args)`` does, outside of transforms of `torch.func`.

    ``Function.apply`` itself also searches all arguments for tensors of transforms that have ended. If there is no
    method that it overrides, it is called, which takes longer.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)(*args)


# Frees the tensors that a node has saved, as torch does at the end of a backward that does not retain the graph.
# Without it, the saved tensors of a node that never runs live as long as the node.
free_saved: Callable[[Any], object] = _method("torch.autograd.function.BackwardCFunction.maybe_clear_saved_tensors")

# The number of the next node of this thread, and a setter for that of a node. Without them, the order of backwards is
# right only with one replica in each process, and gradients of parameters arrive at the end of a backward.
next_sequence_number: Callable[[], int] = _find("torch.autograd._get_sequence_nr", lambda: sys.maxsize)
set_sequence_number: Callable[[Any, int], object] = _method(
    "torch.autograd.function.BackwardCFunction._set_sequence_nr"
)

# The level of forward-mode differentiation; -1 outside of it. Without it, every tensor is checked for a tangent.
dual_level: Callable[[], int] = _reader("torch.autograd.forward_ad._current_level", 0)

# Whether this thread is inside of a transform of `torch.func`. Without it, torch raises its own error for the nodes of
# this library.
in_transform: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active", lambda: False)


# Hooks on saved tensors, dispatch modes, and activation checkpointing, as 2.13 has them. See `recompute.py`.

# Without one of the three, all replicas are treated as if they had hooks, and all checkpoints are refused as if they
# were reentrant.
_top_hooks: Any = _find("torch._C._autograd._top_saved_tensors_default_hooks", None)
pop_hooks: Any = _find("torch._C._autograd._pop_saved_tensors_default_hooks", None)
push_hooks: Any = _find("torch._C._autograd._push_saved_tensors_default_hooks", None)
TELLS_HOOKS = None not in (_top_hooks, pop_hooks, push_hooks)


def top_hooks() -> tuple[Callable[[Tensor], Any], Any] | None:
    """Return the innermost hooks on saved tensors of this thread, to pack and to unpack; None if there are none."""
    hooks: tuple[Callable[[Tensor], Any], Any] | None = _top_hooks(True) if TELLS_HOOKS else None
    return hooks


# Without one of the three, selective checkpoints see operators that a recomputation does not run; torch refuses most.
_number_of_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", lambda: 0)
_pop_mode: Any = _find("torch.utils._python_dispatch._pop_mode", None)
_push_mode: Any = _find("torch.utils._python_dispatch._push_mode", None)


def has_modes() -> bool:
    """Return whether this thread has dispatch modes, which can be replaced."""
    return _number_of_modes() > 0 and None not in (_pop_mode, _push_mode)


def replace_modes(modes: Sequence[Any]) -> list[Any]:
    """Make `modes` the dispatch modes of this thread, outermost first; return the former ones."""
    former = [_pop_mode() for _ in range(_number_of_modes())]
    for mode in modes:
        _push_mode(mode)
    return former[::-1]


# The modes of a selective checkpoint, while it records and while it recomputes. What is lost is as above.
POLICY_TYPES = (
    _find("torch.utils.checkpoint._CachingTorchDispatchMode", ()),
    _find("torch.utils.checkpoint._CachedTorchDispatchMode", ()),
)

# The frame that torch keeps of a checkpoint. Without it, all checkpoints are refused as if they were reentrant.
CheckpointFrame: Any = _find("torch.utils.checkpoint._CheckpointFrame", ())


# Replicas.

# Without it, tensors made from a subclass of `Tensor` have that subclass, and its functions are called.
plain_tensors: Callable[[], AbstractContextManager[Any]] = _find("torch._C.DisableTorchFunctionSubclass", nullcontext)

# Without it, torch makes the replicas on distinct devices, which takes the host longer.
Broadcast: Any = _find("torch.nn.parallel._functions.Broadcast", None)

# Makes a lazy layer that has its parameters an ordinary one. Without it, such a layer is not converted.
infer_parameters: Any = _find("torch.nn.modules.lazy.LazyModuleMixin._infer_parameters", None)


@functools.cache
def refuse_other_calls() -> None:
    """Raise an error for a torch whose modules do not call the object in `_compiled_call_impl`."""
    module = nn.Module()
    module.__dict__.update(forward=lambda: False, _compiled_call_impl=lambda: True)
    if not module():
        raise RuntimeError(
            "expected modules that call what Module.compile() has put into them, but got those of torch "
            f"{torch.__version__}, with which the end of a replica would not be noticed; use a torch that this version "
            "of sync_batchnorm was tested with"
        )


# The profiler. Without these there are no spans, or no span that says which threads are not recorded.

profiler_runs: Callable[[], bool] = _reader("torch.autograd.profiler._is_profiler_enabled", False)  # in any thread
_profiler_type: Any = _find("torch._C._autograd._profiler_type", None)


def profiler_of_thread() -> str:
    """Return the name of what records this thread, if it does not record all; "" if torch does not tell."""
    return "" if _profiler_type is None else _profiler_type().name


# The compiler is not imported here, since that takes a second. The attributes that the functions below set tell it the
# same, once it is imported, as the functions of `torch.compiler`.


def compiler_is_imported() -> bool:
    """Return whether the compiler may be running. Without its name, see NOTE [compiled callers]."""
    return "torch._dynamo" in sys.modules


def compiled_module_type() -> Any:
    """Return the class of what `torch.compile` makes of a module. Without it, such a module is not refused."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())


def mark_uncompiled(function: Callable[..., Any], reason: str) -> None:
    """Have the compiler break the graph at `function`. Without these names it does so later, and explains less."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)


def mark_constant(function: Callable[[], Any]) -> None:
    """Have the compiler treat the result of `function` as a constant. Without the name it cannot trace the function."""
    vars(function).update(_dynamo_marked_constant=True)
