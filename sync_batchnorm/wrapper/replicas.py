"""The replicas of a module. Those on one device share the memory of their parameters; other devices have copies.

NOTE [conversions in replicas]: The replicas of PyTorch have no parameters that could be moved, so a forward that moves
its layers to a fixed device runs in them. A replica of this package has parameters, and keeps them on its device:
`to`, `cuda` and `half` may change its dtype, and never its device. All these methods call `nn.Module._apply`, which is
wrapped when the first replicas are made, and is what it was for all modules that belong to no replica. An attribute of
the replica's modules in place of the method does not work: a class may override the method, and a copy of the module's
dictionary would take along what converts the original.

NOTE [hooks of replicas]: Each replica has dictionaries of hooks of its own, so what it registers ends with it. The
hooks of the model are those of PyTorch: `self` of one that is a method is the model. To bind it to each replica does
not work: the layer refers to the replica then, and through it the graph to itself, so that replicas stay forever.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from ..messages import in_transform_error
from ..torch_private import HOOKS_AND_FLAGS, compiled_module_type, has_hooks, in_transform, names_of_modules

__all__: list[str] = []

Devices = Sequence[torch.device]
_BOUND = {MethodType, partial}  # what may hold a module, such as a `forward` that was set on an object
Tensors = dict[int, Tensor]  # the tensors of one replica, by the id of the original


class _Mark:
    """What marks the modules of replicas; a `deepcopy` or pickle of one belongs to no replica, and has None."""

    def __reduce__(self) -> Any:
        return type(None), ()


_MARK = _Mark()


def _two_aliases(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return two views of `tensor`, in the graph, which share its version counter; two copies if it is sparse."""
    return (tensor[...], tensor[...]) if tensor.layout == torch.strided else (tensor.clone(), tensor.clone())


def _broadcast(devices: Devices, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of tensors on each of several distinct devices, those on the first device first."""
    copies = comm.broadcast_coalesced(tensors, devices)  # type: ignore[no-untyped-call]
    for i, tensor in enumerate(tensors):
        if tensor.is_complex():  # PyTorch copies complex numbers as pairs of real ones.
            for on_device in copies:
                on_device[i] = torch.view_as_complex(on_device[i])
    return tuple(chain.from_iterable(copies))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, devices: Devices, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices = devices
        ctx.set_materialize_grads(False)
        outputs, needed = _broadcast(devices, *tensors), ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*[output for i, output in enumerate(outputs) if not needed[i % len(needed)]])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add up the gradients of all copies; a tensor of which no copy has a gradient gets none."""
        number, devices = len(ctx.needs_input_grad) - 1, ctx.devices
        grads_of = [[grad for grad in grads[i::number] if grad is not None] for i in range(number)]
        if not torch.is_grad_enabled():  # PyTorch adds up many tensors in few copies, but not differentiably.
            whole = [i for i in range(number) if len(grads_of[i]) == len(devices) and not grads_of[i][0].is_complex()]
            of_devices = list(zip(*[grads_of[i] for i in whole], strict=True))
            sums = comm.reduce_add_coalesced(of_devices, devices[0])  # type: ignore[no-untyped-call]
            for i, added in zip(whole, sums, strict=True):
                grads_of[i] = [added]
        return None, *[_sum(one, devices[0]) for one in grads_of]


def _sum(grads: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Return the sum of gradients on `device`, or None if there are none."""
    # A `to` that does nothing takes time, too.
    return reduce(torch.add, [grad if grad.device == device else grad.to(device) for grad in grads]) if grads else None


def check_replicable(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error inside a transform or `FakeTensorMode`, or for the first submodule that is from torch.compile."""
    if in_transform():
        raise in_transform_error(type(wrapper).__name__)
    if type(torch.empty(0)).__name__ == "FakeTensor":
        raise RuntimeError(
            "expected replicas outside torch.export and FakeTensorMode, which their threads do not know, but got a "
            f"call of {type(wrapper).__name__} inside; use its module, in eval mode"
        )
    compiled_type = compiled_module_type()
    named = names_of_modules(module).items() if compiled_type else ()
    compiled = [repr(name) if name else "the model" for child, name in named if isinstance(child, compiled_type)]
    if compiled:  # A replica of it would share its dictionary, and both would lose their submodules (torch 2.13).
        raise RuntimeError(
            f"expected modules that can be replicated, but {compiled[0]} is what torch.compile returned; "
            "put the original module, its attribute _orig_mod, back in its place, and compile functions that its "
            "forward calls"
        )


def make_replicas(module: nn.Module, devices: Devices, detach: bool) -> list[nn.Module]:
    """Return one replica of `module`, which is on the first of `devices`, for each of them.

    Gradients add up in the tensors of `module`, unless `detach` is true. The first replica on the first device has the
    buffers of the module itself, all others have copies.
    """
    _keep_replicas_on_their_devices()
    modules = list(names_of_modules(module))
    differentiable: Tensors = {}
    plain: Tensors = {}
    for child in modules:
        differentiable.update({id(p): p for p in child._parameters.values() if p is not None})
        for buffer in child._buffers.values():
            if buffer is not None:
                (differentiable if buffer.requires_grad and not detach else plain)[id(buffer)] = buffer
    with torch.DisableTorchFunctionSubclass():  # plain tensors, as PyTorch makes; of a subclass, all results are views
        tensors = _tensors_of_replicas(differentiable, plain, devices, detach)
    is_enabled = gc.isenabled()
    # Thousands of new objects, none of them garbage yet, would set off collections of all objects. Only who
    # disables these enables them again: another thread may do so between the two lines, when it has built its replicas.
    if is_enabled:
        gc.disable()
    try:
        bound = [(child, name, it) for child in modules for name, it in vars(child).items() if type(it) in _BOUND]
        return [_replica(modules, tensor_of, bound) for tensor_of in tensors]
    finally:
        if is_enabled:
            gc.enable()


def _tensors_of_replicas(differentiable: Tensors, plain: Tensors, devices: Devices, detach: bool) -> list[Tensors]:
    """Return the tensors of each replica: copies on each device, and aliases for replicas that share one."""
    distinct = list(dict.fromkeys(devices))
    originals = differentiable | plain
    on_distinct = [originals]
    if len(distinct) > 1:
        on_distinct = _on_each(distinct, differentiable, _broadcast if detach else _Broadcast.apply)
        for copies, more in zip(on_distinct, _on_each(distinct, plain, _broadcast), strict=True):
            copies.update(more)
    tensors = [on_distinct[distinct.index(device)].copy() for device in devices]
    for i, device in enumerate(devices):
        if device in devices[i + 1 :]:
            present, following = tensors[i], tensors[devices.index(device, i + 1)]
            # The next replica gets one of two views, and splits it again. So autograd adds up gradients in pairs, and
            # their sums do not depend on the order in which it runs replicas.
            for key in differentiable:
                present[key], following[key] = _two_aliases(present[key])
            for key in plain:
                following[key] = present[key].detach().clone()
    with_attributes = {key: vars(original) for key, original in originals.items() if vars(original)}
    for tensor_of in tensors:
        for key, attributes in with_attributes.items():
            vars(tensor_of[key]).update(attributes)
    return tensors


def _on_each(devices: Devices, originals: Tensors, broadcast: Callable[..., Any]) -> list[Tensors]:
    """Return for each device the copies that `broadcast` makes of the originals."""
    copies: list[Tensors] = [{} for _ in devices]
    # A node calls the hooks of its inputs even if they have no gradient, so what has hooks gets a node of its own.
    groups: dict[int, Tensors] = {}
    for key, tensor in originals.items():
        groups.setdefault(key if has_hooks(tensor) or tensor.grad_fn is not None else 0, {})[key] = tensor
    for group in groups.values():
        outputs = broadcast(devices, *group.values())
        for i, on_device in enumerate(copies):
            on_device.update(zip(group, outputs[i * len(group) : (i + 1) * len(group)], strict=True))
    return copies


def _replica(modules: Sequence[nn.Module], tensor_of: Tensors, bound: Sequence[tuple[Any, str, Any]]) -> nn.Module:
    """Return a replica of the first of `modules`, the others being its submodules, with the tensors of `tensor_of`.

    `bound` has the attributes of all that may hold modules: each has its module and its name.
    """
    copy_of: dict[nn.Module, nn.Module] = {}
    for module in modules:
        # RNNs, lazy and scripted modules override this hook of torch. For all others, `_shell` does the same faster.
        replicate: Any = module._replicate_for_data_parallel
        is_usual = getattr(replicate, "__func__", None) is nn.Module._replicate_for_data_parallel
        copy_of[module] = copy = _shell(module) if is_usual else replicate()
        vars(copy)["_sync_mark"] = _MARK
        _copy_hooks(copy, module)
        if type(module).__setattr__ is nn.Module.__setattr__:
            _register_tensors(copy, module, tensor_of)
        else:
            _set_tensors(copy, module, tensor_of)
    for module, copy in copy_of.items():
        for name, child in module._modules.items():
            if child is not None:
                copy._modules[name] = copy_of[child]
    for module, name, value in bound:
        vars(copy_of[module])[name] = _bind(value, copy_of)
    return copy_of[modules[0]]


def _bind(value: Any, copy_of: Any) -> Any:
    """Return a bound method or a partial with the modules of a replica in place of the originals."""
    if isinstance(value, nn.Module):
        return copy_of.get(value, value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _bind(value.__self__, copy_of))
    if not isinstance(value, partial):
        return value
    keywords = {name: _bind(argument, copy_of) for name, argument in value.keywords.items()}
    result = partial(_bind(value.func, copy_of), *[_bind(argument, copy_of) for argument in value.args], **keywords)
    result.__dict__.update({name: _bind(item, copy_of) for name, item in value.__dict__.items()})
    return result


def _copy_hooks(copy: nn.Module, module: nn.Module) -> None:
    """Give a copy of a module dictionaries of hooks of its own, see NOTE [hooks of replicas]."""
    state, original = vars(copy), vars(module)
    for name in HOOKS_AND_FLAGS:
        state[name] = original[name].copy()
    is_full = original["_is_full_backward_hook"]
    state["_is_full_backward_hook"] = is_full  # which the copy of a graph module lacks
    # Hooks of the older kind refer to the replica weakly: in the backward pass, PyTorch would say that it is dead.
    if original["_backward_hooks"] and is_full is False:
        refuse = partial(_refuse_older_hook, copy)  # which this keeps
        state["_backward_hooks"] = OrderedDict.fromkeys(original["_backward_hooks"], refuse)


def _refuse_older_hook(module: nn.Module, *args: Any) -> None:
    """Raise an error in place of a backward hook of the older kind, in the backward pass of a replica."""
    raise RuntimeError(
        f"expected full backward hooks in replicas, but got {type(module).__name__} with those of "
        "register_backward_hook, which PyTorch calls with a replica that has ended; call register_full_backward_hook "
        "instead"
    )


def _shell(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has no parameters, and the buffers and submodules of the original."""
    copy, state = module.__new__(type(module)), module.__dict__.copy()
    object.__setattr__(copy, "__dict__", state)  # in half the time of an update
    state["_parameters"], state["_is_replica"] = {}, True
    state["_buffers"], state["_modules"] = state["_buffers"].copy(), state["_modules"].copy()
    return copy


def _register_tensors(copy: nn.Module, module: nn.Module, tensor_of: Tensors) -> None:
    """Set parameters and buffers where `nn.Module.__setattr__` would, which takes longer than all the rest."""
    for name, parameter in module._parameters.items():
        copy._parameters[name] = None if parameter is None else tensor_of[id(parameter)]  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            copy._buffers[name] = tensor_of[id(buffer)]


def _set_tensors(copy: Any, module: nn.Module, tensor_of: Tensors) -> None:
    """Set parameters and buffers as attributes of a module that has a `__setattr__` of its own."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            setattr(copy, name, tensor_of[id(tensor)])
    if not isinstance(module, torch.jit.ScriptModule):  # which has no dictionaries of its own
        for name in module._parameters:
            copy.__dict__.pop(name, None)
        _register_tensors(copy, module, tensor_of)


def _keep_replicas_on_their_devices() -> None:
    """Let conversions leave modules of replicas on their devices; see NOTE [conversions in replicas]."""
    apply: Any = nn.Module._apply
    if hasattr(apply, "_sync_converts"):
        return

    @wraps(apply)
    def convert(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        if vars(self).get("_sync_mark") is None:
            return apply(self, fn, *args, **kwargs)

        def on_its_device(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.device == tensor.device else tensor.to(result.dtype)

        parameters: Any = self._parameters
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = on_its_device(parameter)
        # PyTorch would ask for the `grad` of the parameters, which are no leaves, and warn.
        vars(self)["_parameters"] = {}
        try:
            return apply(self, on_its_device, *args, **kwargs)
        finally:
            vars(self)["_parameters"] = parameters

    convert._sync_converts = True  # type: ignore[attr-defined]
    nn.Module._apply = convert  # type: ignore[method-assign]
