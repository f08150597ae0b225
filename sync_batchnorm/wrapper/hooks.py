"""The hooks of a model in its replicas: those that are methods of the model are methods of the replica there.

NOTE [hooks of replicas]: A hook of a layer that is a method of a replica refers to the replica, which refers to the
layer: a cycle, which would keep each replica, with what its hooks keep, until Python's collector runs. So a layer keeps
such a hook in a form that refers to the replica weakly, and hands out the method itself. What takes that along, as the
graph takes along backward hooks, keeps the replica alive for as long as it may call the hook.

A checkpoint takes along the layer, and asks it for its hooks in the backward pass. Inside a checkpoint, a layer keeps
the method itself, too.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from ..torch_private import FLAGS_OF_HOOKS, HOOKS, KIND_OF_BACKWARD_HOOKS, hooks_of_thread

__all__: list[str] = []

References = dict[nn.Module, "ref[nn.Module]"]  # the modules of one replica, weakly, by the original
_METHODS = (MethodType, partial, nn.Module)  # what may refer to the modules of a replica


def bind(value: Any, of_replica: Callable[[nn.Module], nn.Module]) -> Any:
    """Return a bound method or a partial with the modules of a replica in place of the originals."""
    if isinstance(value, nn.Module):
        return of_replica(value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, bind(value.__self__, of_replica))
    if not isinstance(value, partial):
        return value
    keywords = {name: bind(argument, of_replica) for name, argument in value.keywords.items()}
    arguments = [bind(argument, of_replica) for argument in value.args]
    result = partial(bind(value.func, of_replica), *arguments, **keywords)
    result.__dict__.update({name: bind(item, of_replica) for name, item in value.__dict__.items()})
    return result


def copy_hooks(copy: nn.Module, module: nn.Module, references: References, records: bool) -> None:
    """Give a copy of a module dictionaries of hooks of its own: what a replica registers ends with it.

    Hooks that are methods or submodules of the model become those of the replica, whose modules `references` will have
    when it is complete. `records` says whether it records a graph.
    """
    state, original = vars(copy), vars(module)
    for name in HOOKS:
        hooks = original[name]
        is_bound = hooks and any([isinstance(hook, _METHODS) for hook in hooks.values()])
        state[name] = _HooksOfReplica(hooks, references, records) if is_bound else hooks.copy()
    for name in FLAGS_OF_HOOKS:
        state[name] = original[name].copy()
    state[KIND_OF_BACKWARD_HOOKS] = original[KIND_OF_BACKWARD_HOOKS]  # which the copy of a graph module lacks
    # Hooks of the older kind refer to the replica weakly: in the backward pass, PyTorch would say that it is dead.
    if original["_backward_hooks"] and original[KIND_OF_BACKWARD_HOOKS] is False:
        refuse = partial(_refuse_older_hook, copy)
        state["_backward_hooks"] = OrderedDict.fromkeys(original["_backward_hooks"], refuse)


def _refuse_older_hook(module: nn.Module, *args: Any) -> None:
    """Raise an error in place of a backward hook of the older kind, in the backward pass of a replica."""
    raise RuntimeError(
        f"expected full backward hooks in replicas, but got {type(module).__name__} with those of "
        "register_backward_hook, which PyTorch calls with a replica that has ended; call register_full_backward_hook "
        "instead"
    )


class _WeakHook(NamedTuple):
    """A hook of the model, which is bound to the modules of a replica when it is handed out."""

    hook: Any
    references: References

    def bound(self) -> Any:
        return bind(self.hook, self._of_replica)

    @property
    def __self__(self) -> Any:
        """The module of the replica: the compiler of torch 2.8 looks at what the method is bound to."""
        return self._of_replica(self.hook.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook, as the compiler does, and who looks it up by its number."""
        hook = self.hook
        if isinstance(hook, MethodType) and isinstance(hook.__self__, nn.Module):  # The compiler cannot make a method.
            return hook.__func__(self._of_replica(hook.__self__), *args, **kwargs)
        return self.bound()(*args, **kwargs)

    def _of_replica(self, module: nn.Module) -> nn.Module:
        reference = self.references.get(module)
        copy = module if reference is None else reference()
        if copy is None:
            raise RuntimeError(
                f"expected a replica that is in use, but got a call of a hook of {type(module).__name__}, whose "
                "replica has ended; keep the replica, self, where you keep the layer that has the hook"
            )
        return copy


class _HooksOfReplica(OrderedDict[int, Any]):
    """The hooks of a layer of a replica, see NOTE [hooks of replicas]."""

    def __init__(self, hooks: Mapping[int, Any], references: References, records: bool) -> None:
        super().__init__()
        self._records = records
        for key, hook in hooks.items():
            self[key] = _WeakHook(hook, references) if isinstance(hook, _METHODS) else hook

    def items(self) -> Any:
        pairs = list(super().items())
        # Those of the newer kind have hooks on saved tensors; the older ones run without a graph.
        is_in_checkpoint = hooks_of_thread(True) is not None or torch.is_grad_enabled() < self._records
        for i, (key, hook) in enumerate(pairs):
            if isinstance(hook, _WeakHook):
                pairs[i] = key, hook.bound()
                if is_in_checkpoint:
                    self[key] = pairs[i][1]
        return pairs

    def values(self) -> Any:
        return [hook for _, hook in self.items()]

    def copy(self) -> Any:
        return OrderedDict(self.items())

    def __reduce__(self) -> Any:
        return OrderedDict, (self.items(),)  # In a copy of the model, the hooks are methods of the copy.
