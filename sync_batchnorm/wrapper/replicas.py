"""Make the replicas of a module: replicas on one device share the memory of parameters, other devices get copies.

The obvious way, a copy of all parameters for each replica, would multiply the memory of the model on a shared device.
So each device gets one copy in the graph, and the replicas on this device get views of it:

    parameter --broadcast--> on cuda:0 --two views--> replica 0
                                                  --> replica 1
                             on cuda:1 --two views--> replica 2
                                                  --> replica 3

The backward pass adds up the gradients of two views, then of all devices. Buffers are not in the graph: replica 0 has
the model's own buffers, every other replica has copies.

NOTE [conversions in replicas]: In `nn.DataParallel`, replicas have no parameters, so a `forward` that moves its layers
to a fixed device still works. Our replicas have parameters, and must keep them on their device: `to`, `cuda` and `half`
may change the dtype, but never the device. These methods all call `nn.Module._apply`. The first replica patches
`_apply` for the whole process; modules outside replicas behave as before. Setting an attribute `_apply` on the
replica's modules instead does not work: a class may override the method, and a copy of a module's `__dict__` would
convert the original.

NOTE [hooks of replicas]: Each replica has its own dictionaries of hooks, so hooks registered on a replica end with it.
Hooks of the model run as in `nn.DataParallel`: if a hook is a method, its `self` is the model. Binding it to the
replica does not work: the layer would refer to the replica, and the graph to itself, so replicas would never be freed.
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
_BOUND_TYPES = {MethodType, partial}  # They may refer to a module, such as a `forward` set on an object.
Tensors = dict[int, Tensor]  # the tensors of one replica, by the id of the original


REPLICA_MARK = "sync_batchnorm_mark"  # the attribute of a replica's modules that holds their `_ReplicaMark`


class _ReplicaMark:
    """Marks the modules of replicas. In a `deepcopy` or pickle it becomes None: copies belong to no replica."""

    def __reduce__(self) -> Any:
        return type(None), ()


def _broadcast(devices: Devices, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of all tensors on the first device, then on the second, and so on; devices are distinct."""
    copies = comm.broadcast_coalesced(tensors, devices)  # type: ignore[no-untyped-call]
    for i, tensor in enumerate(tensors):
        if tensor.is_complex():  # torch returns them as pairs of real numbers.
            for device_copies in copies:
                device_copies[i] = torch.view_as_complex(device_copies[i])
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
        """Add up the gradients of all copies of each tensor; None if no copy has a gradient."""
        number, devices = len(ctx.needs_input_grad) - 1, ctx.devices
        by_tensor = [[grad for grad in grads[i::number] if grad is not None] for i in range(number)]
        if not torch.is_grad_enabled():  # torch's coalesced sum makes fewer transfers, but is not differentiable.
            full = [i for i in range(number) if len(by_tensor[i]) == len(devices) and not by_tensor[i][0].is_complex()]
            by_device = list(zip(*[by_tensor[i] for i in full], strict=True))
            sums = comm.reduce_add_coalesced(by_device, devices[0])  # type: ignore[no-untyped-call]
            for i, total in zip(full, sums, strict=True):
                by_tensor[i] = [total]
        # `to` takes time even if it does nothing.
        moved = [[grad if grad.device == devices[0] else grad.to(devices[0]) for grad in one] for one in by_tensor]
        return None, *[reduce(torch.add, one) if one else None for one in moved]


def check_replicable(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error inside a transform or `FakeTensorMode`, or for a submodule returned by torch.compile."""
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
    if compiled:  # Its replica would share its `__dict__`, and both would lose their submodules (torch 2.13).
        raise RuntimeError(
            f"expected modules that can be replicated, but {compiled[0]} is what torch.compile returned; "
            "put the original module, its attribute _orig_mod, back in its place, and compile functions that its "
            "forward calls"
        )


def make_replicas(module: nn.Module, devices: Devices, detach: bool) -> list[nn.Module]:
    """Return a replica of `module` for each device. The module must be on the first device.

    Gradients add up in the parameters of `module`, unless `detach` is true. Replica 0 has the buffers of `module`
    itself; all other replicas have copies.
    """
    _patch_conversions()
    modules = list(names_of_modules(module))
    differentiable: Tensors = {}
    plain: Tensors = {}
    for child in modules:
        differentiable.update({id(p): p for p in child._parameters.values() if p is not None})
        for buffer in child._buffers.values():
            if buffer is not None:
                (differentiable if buffer.requires_grad and not detach else plain)[id(buffer)] = buffer
    with torch.DisableTorchFunctionSubclass():  # Replicas get plain tensors, as in `nn.DataParallel`.
        tensors = _tensors_of_replicas(differentiable, plain, devices, detach)
    is_enabled = gc.isenabled()
    # Thousands of new objects, none of them garbage yet, would trigger full garbage collections. If another thread has
    # disabled the collector, that thread enables it again, perhaps between these two lines.
    if is_enabled:
        gc.disable()
    try:
        bound = [(child, name, v) for child in modules for name, v in vars(child).items() if type(v) in _BOUND_TYPES]
        return [_make_replica(modules, tensor_of, bound) for tensor_of in tensors]
    finally:
        if is_enabled:
            gc.enable()


def _tensors_of_replicas(differentiable: Tensors, plain: Tensors, devices: Devices, detach: bool) -> list[Tensors]:
    """Return the tensors of each replica: one copy for each device, and views of it for replicas on this device."""
    distinct = list(dict.fromkeys(devices))
    originals = differentiable | plain
    copies = [originals]
    if len(distinct) > 1:
        copies = _broadcast_by_node(distinct, differentiable, _broadcast if detach else _Broadcast.apply)
        for device_copies, plain_copies in zip(copies, _broadcast_by_node(distinct, plain, _broadcast), strict=True):
            device_copies.update(plain_copies)
    tensors = [copies[distinct.index(device)].copy() for device in devices]
    for i, device in enumerate(devices):
        if device in devices[i + 1 :]:
            present, following = tensors[i], tensors[devices.index(device, i + 1)]
            # One of two views goes to the next replica on this device, which splits it again. So autograd adds
            # gradients in pairs, and the sums do not depend on the order of replicas in the backward pass.
            for key in differentiable:
                tensor = present[key]
                is_sparse = tensor.layout != torch.strided  # It has no views.
                present[key], following[key] = [tensor.clone() if is_sparse else tensor[...] for _ in range(2)]
            for key in plain:
                following[key] = present[key].detach().clone()
    with_attributes = {key: vars(original) for key, original in originals.items() if vars(original)}
    for tensor_of in tensors:
        for key, attributes in with_attributes.items():
            vars(tensor_of[key]).update(attributes)
    return tensors


def _broadcast_by_node(devices: Devices, originals: Tensors, broadcast: Callable[..., Any]) -> list[Tensors]:
    """Broadcast the originals, in one autograd node if possible; return the copies on each device."""
    copies: list[Tensors] = [{} for _ in devices]
    # A node calls hooks of its inputs even without a gradient for them: a tensor with hooks gets its own node.
    groups: dict[int, Tensors] = {}
    for key, tensor in originals.items():
        groups.setdefault(key if has_hooks(tensor) or tensor.grad_fn is not None else 0, {})[key] = tensor
    for group in groups.values():
        outputs = broadcast(devices, *group.values())
        for i, device_copies in enumerate(copies):
            device_copies.update(zip(group, outputs[i * len(group) : (i + 1) * len(group)], strict=True))
    return copies


def _make_replica(modules: Sequence[nn.Module], tensor_of: Tensors, bound: Sequence[tuple[Any, str, Any]]) -> nn.Module:
    """Return a replica of a module.

    Args:
        modules: the module, then all its submodules.
        tensor_of: the parameters and buffers of the replica, by the id of the original.
        bound: (module, name, value) of attributes that may refer to modules: bound methods and partials.
    """
    copy_of: dict[nn.Module, nn.Module] = {}
    mark = _ReplicaMark()
    for module in modules:
        # RNNs, lazy and scripted modules override this method of torch. The default is slower than `_copy_module`.
        replicate: Any = module._replicate_for_data_parallel
        is_default = getattr(replicate, "__func__", None) is nn.Module._replicate_for_data_parallel
        copy_of[module] = copy = _copy_module(module) if is_default else replicate()
        vars(copy)[REPLICA_MARK] = mark
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
        vars(copy_of[module])[name] = _rebind(value, copy_of)
    return copy_of[modules[0]]


def _rebind(value: Any, copy_of: Any) -> Any:
    """Replace the modules in a bound method or partial by the replica's modules; return other values unchanged."""
    if isinstance(value, nn.Module):
        return copy_of.get(value, value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _rebind(value.__self__, copy_of))
    if not isinstance(value, partial):
        return value
    keywords = {name: _rebind(argument, copy_of) for name, argument in value.keywords.items()}
    result = partial(_rebind(value.func, copy_of), *[_rebind(arg, copy_of) for arg in value.args], **keywords)
    result.__dict__.update({name: _rebind(item, copy_of) for name, item in value.__dict__.items()})
    return result


def _copy_hooks(copy: nn.Module, module: nn.Module) -> None:
    """Copy the dictionaries of hooks to a replica's module, see NOTE [hooks of replicas]."""
    state, original = vars(copy), vars(module)
    for name in HOOKS_AND_FLAGS:
        state[name] = original[name].copy()
    is_full = original["_is_full_backward_hook"]
    state["_is_full_backward_hook"] = is_full  # A copied `GraphModule` lacks this attribute.
    # Non-full backward hooks refer to their module weakly: in the backward pass, torch would report a dead object.
    if original["_backward_hooks"] and is_full is False:
        refuse = partial(_refuse_older_hook, copy)  # The partial keeps the replica alive.
        state["_backward_hooks"] = OrderedDict.fromkeys(original["_backward_hooks"], refuse)


def _refuse_older_hook(module: nn.Module, *args: Any) -> None:
    """Raise an error in place of a non-full backward hook, in the backward pass of a replica."""
    raise RuntimeError(
        f"expected full backward hooks in replicas, but got {type(module).__name__} with those of "
        "register_backward_hook, which PyTorch calls with a replica that has ended; call register_full_backward_hook "
        "instead"
    )


def _copy_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module without parameters, with the buffers and submodules of the original."""
    copy, state = module.__new__(type(module)), module.__dict__.copy()
    object.__setattr__(copy, "__dict__", state)  # twice as fast as `__dict__.update`
    state["_parameters"], state["_is_replica"] = {}, True
    state["_buffers"], state["_modules"] = state["_buffers"].copy(), state["_modules"].copy()
    return copy


def _register_tensors(copy: nn.Module, module: nn.Module, tensor_of: Tensors) -> None:
    """Set parameters and buffers directly: `nn.Module.__setattr__` would take most of the time of a replica."""
    for name, parameter in module._parameters.items():
        copy._parameters[name] = None if parameter is None else tensor_of[id(parameter)]  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            copy._buffers[name] = tensor_of[id(buffer)]


def _set_tensors(copy: Any, module: nn.Module, tensor_of: Tensors) -> None:
    """Set parameters and buffers through the `__setattr__` of the module's class."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            setattr(copy, name, tensor_of[id(tensor)])
    if not isinstance(module, torch.jit.ScriptModule):  # A scripted module has no dictionaries in Python.
        for name in module._parameters:
            copy.__dict__.pop(name, None)
        _register_tensors(copy, module, tensor_of)


def _patch_conversions() -> None:
    """Patch `nn.Module._apply`, once, to keep replicas on their devices; see NOTE [conversions in replicas]."""
    apply: Any = nn.Module._apply
    if hasattr(apply, "_sync_converts"):
        return

    @wraps(apply)
    def convert(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        if vars(self).get(REPLICA_MARK) is None:
            return apply(self, fn, *args, **kwargs)

        def on_its_device(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.device == tensor.device else tensor.to(result.dtype)

        parameters: Any = self._parameters
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = on_its_device(parameter)
        # torch would read `grad` of these parameters, and warn, as they are no leaves of the graph.
        vars(self)["_parameters"] = {}
        try:
            return apply(self, on_its_device, *args, **kwargs)
        finally:
            vars(self)["_parameters"] = parameters

    convert._sync_converts = True  # type: ignore[attr-defined]
    nn.Module._apply = convert  # type: ignore[method-assign]
