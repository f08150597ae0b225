"""Make the replicas of a module. Replicas on the same device share the memory of parameters.

The obvious way is a copy of all parameters for each replica. On a device with several replicas, these copies would
multiply the memory of the model. So each device gets a single copy of a parameter, as an operation in the autograd
graph, and the replicas on this device get views of the copy:

    parameter --broadcast--> on cuda:0 --two views--> replica 0
                                                  --> replica 1
                             on cuda:1 --two views--> replica 2
                                                  --> replica 3

In the backward pass, autograd adds up the gradients of a parameter in two steps. It first adds up the gradients from
all replicas of one device, and then the results of all devices. Buffers are not in the autograd graph. Replica 0 uses
the buffers of the model itself, and every other replica gets copies of them.

NOTE [conversions in replicas]: A `forward` may call ``self.layer.to("cuda:0")``. In `nn.DataParallel`, such a call is
harmless, because modules of replicas have no registered parameters. Our replicas have registered parameters, which must
stay on the replica's device. So in a replica, `to`, `cuda` and `half` may change the dtype, but never the device.

The methods `to`, `cuda` and `half` all call `nn.Module._apply`. Making the first replica patches `_apply` for the whole
process; modules outside replicas behave as before. Setting an attribute `_apply` on the replica's modules instead does
not work. The attribute would hide an `_apply` that a user's class defines. A copy of a module's `__dict__` would
contain the attribute, too, which would convert the original module in place of the copy.

NOTE [hooks of replicas]: Each module of a replica gets its own dictionaries of hooks. So a hook that `forward`
registers on the replica ends with the replica. Hooks of the model run as in `nn.DataParallel`: if a hook is a method of
a module, its `self` is the module in the model, not in the replica. It does not work to bind such a method to the
replica: the layer would refer to the replica, and the autograd graph to itself, so replicas would never be freed.
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
# A module's attribute may be a bound method or a partial that refers to a module, such as a `forward` that the user
# assigned to the module object.
_BOUND_TYPES = {MethodType, partial}
# The parameters and buffers of one replica. The keys are the ids of the model's own tensors.
Tensors = dict[int, Tensor]

REPLICA_MARK = "sync_batchnorm_mark"  # The name of the attribute that marks a module as a part of a replica.


class _ReplicaMark:
    """An object that marks a module as part of a replica.

    In a `deepcopy` or pickle of a replica's module, this mark is replaced by None, so that the copy counts as a module
    outside replicas.
    """

    def __reduce__(self) -> Any:
        return type(None), ()


def _broadcast(devices: Devices, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy tensors to each device. Return the copies: first all on the first device, then all on the second, ...

    No device may occur twice in `devices`.
    """
    copies = comm.broadcast_coalesced(tensors, devices)  # type: ignore[no-untyped-call]
    for i, tensor in enumerate(tensors):
        if tensor.is_complex():  # torch returns the copies of a complex tensor as real tensors ``(..., 2)``.
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
        """Return, for each original tensor, the sum of the gradients of its copies; None if no copy got a gradient."""
        number, devices = len(ctx.needs_input_grad) - 1, ctx.devices
        by_tensor = [[grad for grad in grads[i::number] if grad is not None] for i in range(number)]
        # torch's `reduce_add_coalesced` makes fewer transfers between devices, but is not differentiable. So it is used
        # only if this backward pass does not record a graph.
        if not torch.is_grad_enabled():
            full = [i for i in range(number) if len(by_tensor[i]) == len(devices) and not by_tensor[i][0].is_complex()]
            by_device = list(zip(*[by_tensor[i] for i in full], strict=True))
            sums = comm.reduce_add_coalesced(by_device, devices[0])  # type: ignore[no-untyped-call]
            for i, total in zip(full, sums, strict=True):
                by_tensor[i] = [total]
        # Call `to` only for gradients on other devices, because the call takes time even if it moves nothing.
        moved = [[grad if grad.device == devices[0] else grad.to(devices[0]) for grad in one] for one in by_tensor]
        return None, *[reduce(torch.add, one) if one else None for one in moved]


def check_replicable(wrapper: nn.Module, module: nn.Module) -> None:
    """Raise an error if a module cannot be replicated.

    Replicas are impossible inside a transform of `torch.func` and inside `FakeTensorMode`. They are also impossible if
    torch.compile returned the module or one of its submodules.
    """
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
    # The replica of a compiled module would share its `__dict__` with the original module. Then both modules would lose
    # their submodules (torch 2.13).
    if compiled:
        raise RuntimeError(
            f"expected modules that can be replicated, but {compiled[0]} is what torch.compile returned; "
            "put the original module, its attribute _orig_mod, back in its place, and compile functions that its "
            "forward calls"
        )


def make_replicas(module: nn.Module, devices: Devices, detach: bool) -> list[nn.Module]:
    """Return a list with a replica of `module` for each device. `module` itself must be on the first device.

    The gradients of all replicas add up in the parameters of `module`. If `detach` is true, the parameters of replicas
    are not connected to the parameters of `module`. Replica 0 uses the buffers of `module` itself; all other replicas
    get copies of the buffers.
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
    # Disable the garbage collector while replicas are made: thousands of new objects, none of them garbage yet, would
    # trigger full garbage collections. If another thread disabled the collector before, do nothing, because that thread
    # will enable it again.
    if is_enabled:
        gc.disable()
    try:
        bound = [(child, name, v) for child in modules for name, v in vars(child).items() if type(v) in _BOUND_TYPES]
        return [_make_replica(modules, tensor_of, bound) for tensor_of in tensors]
    finally:
        if is_enabled:
            gc.enable()


def _tensors_of_replicas(differentiable: Tensors, plain: Tensors, devices: Devices, detach: bool) -> list[Tensors]:
    """Return the parameters and buffers of each replica.

    Each device gets one copy of a parameter, and the replicas on this device get views of the copy.
    """
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
            # Split each parameter into two views: one for this replica, and one for the next replica on this device,
            # which splits its view again. Autograd then adds the gradients of two views at a time, so the sums do not
            # depend on the order in which the replicas run.
            for key in differentiable:
                tensor = present[key]
                is_sparse = tensor.layout != torch.strided  # Sparse tensors do not support views.
                present[key], following[key] = [tensor.clone() if is_sparse else tensor[...] for _ in range(2)]
            for key in plain:
                following[key] = present[key].detach().clone()
    with_attributes = {key: vars(original) for key, original in originals.items() if vars(original)}
    for tensor_of in tensors:
        for key, attributes in with_attributes.items():
            vars(tensor_of[key]).update(attributes)
    return tensors


def _broadcast_by_node(devices: Devices, originals: Tensors, broadcast: Callable[..., Any]) -> list[Tensors]:
    """Broadcast tensors of the model to all devices, and return a dict of the copies for each device.

    A single autograd node broadcasts all tensors, except tensors with hooks or with a `grad_fn`.
    """
    copies: list[Tensors] = [{} for _ in devices]
    # A node that broadcasts several tensors calls the hooks of all of them, even of a tensor without a gradient. On one
    # device, no hook is called without a gradient. So each tensor with hooks, or with a `grad_fn`, gets a node of its
    # own.
    groups: dict[int, Tensors] = {}
    for key, tensor in originals.items():
        groups.setdefault(key if has_hooks(tensor) or tensor.grad_fn is not None else 0, {})[key] = tensor
    for group in groups.values():
        outputs = broadcast(devices, *group.values())
        for i, device_copies in enumerate(copies):
            device_copies.update(zip(group, outputs[i * len(group) : (i + 1) * len(group)], strict=True))
    return copies


def _make_replica(modules: Sequence[nn.Module], tensor_of: Tensors, bound: Sequence[tuple[Any, str, Any]]) -> nn.Module:
    """Return a replica of a module, with a copy of each of its submodules.

    Args:
        modules: the module, then all its submodules.
        tensor_of: the parameters and buffers of the replica, by the id of the model's own tensor.
        bound: (module, attribute name, value) for each attribute that is a bound method or a partial: it may refer to a
            module.
    """
    copy_of: dict[nn.Module, nn.Module] = {}
    mark = _ReplicaMark()
    for module in modules:
        # RNNs, lazy and scripted modules override `_replicate_for_data_parallel`. Call this method only for such
        # modules. For all others, `_copy_module` does the same as the default of torch, in less time.
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
    """Return a copy of a bound method or partial that refers to the replica's modules in place of the model's modules.

    Return any other value unchanged.
    """
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
    """Give the copy of a module in a replica its own dictionaries of hooks, see NOTE [hooks of replicas]."""
    state, original = vars(copy), vars(module)
    for name in HOOKS_AND_FLAGS:
        state[name] = original[name].copy()
    is_full = original["_is_full_backward_hook"]
    state["_is_full_backward_hook"] = is_full  # A copied `torch.fx.GraphModule` lacks this attribute.
    # Hooks of the deprecated `register_backward_hook` keep only a weak reference to their module. The replica's module
    # would be freed before the backward pass, and torch would raise an unclear error about a dead object. So replace
    # each of these hooks by a function that raises a clearer error.
    if original["_backward_hooks"] and is_full is False:
        # The partial keeps the replica's module alive until the backward pass.
        refuse = partial(_refuse_older_hook, copy)
        state["_backward_hooks"] = OrderedDict.fromkeys(original["_backward_hooks"], refuse)


def _refuse_older_hook(module: nn.Module, *args: Any) -> None:
    """Raise an error. In replicas, this function replaces each hook of the deprecated `register_backward_hook`."""
    raise RuntimeError(
        f"expected full backward hooks in replicas, but got {type(module).__name__} with those of "
        "register_backward_hook, which PyTorch calls with a replica that has ended; call register_full_backward_hook "
        "instead"
    )


def _copy_module(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module. It refers to the same buffers and submodules, and has no parameters."""
    copy, state = module.__new__(type(module)), module.__dict__.copy()
    object.__setattr__(copy, "__dict__", state)  # This is twice as fast as `copy.__dict__.update(state)`.
    state["_parameters"], state["_is_replica"] = {}, True
    state["_buffers"], state["_modules"] = state["_buffers"].copy(), state["_modules"].copy()
    return copy


def _register_tensors(copy: nn.Module, module: nn.Module, tensor_of: Tensors) -> None:
    """Register the parameters and buffers of a replica's module in its dictionaries, without `setattr`.

    Calls of `nn.Module.__setattr__` would take longer than all other steps of making a replica.
    """
    for name, parameter in module._parameters.items():
        copy._parameters[name] = None if parameter is None else tensor_of[id(parameter)]  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            copy._buffers[name] = tensor_of[id(buffer)]


def _set_tensors(copy: Any, module: nn.Module, tensor_of: Tensors) -> None:
    """Set the parameters and buffers of a replica's module with `setattr`, for a class with its own `__setattr__`."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            setattr(copy, name, tensor_of[id(tensor)])
    # A scripted module keeps its parameters in C++, so there are no dictionaries in Python to fill.
    if not isinstance(module, torch.jit.ScriptModule):
        for name in module._parameters:
            copy.__dict__.pop(name, None)
        _register_tensors(copy, module, tensor_of)


def _patch_conversions() -> None:
    """Patch `nn.Module._apply` in this process, if no earlier call did; see NOTE [conversions in replicas]."""
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
        # All parameters are converted now. Hide them from torch's `_apply`, which would read `.grad` of each parameter.
        # Torch warns about this access, because the parameters of a replica are not leaves of the autograd graph.
        vars(self)["_parameters"] = {}
        try:
            return apply(self, on_its_device, *args, **kwargs)
        finally:
            vars(self)["_parameters"] = parameters

    convert._sync_converts = True  # type: ignore[attr-defined]
    nn.Module._apply = convert  # type: ignore[method-assign]
