"""The replicas of a module. On distinct devices, torch copies parameters; those on one device share their storage."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from ..torch_private import Broadcast, plain_tensors

__all__: list[str] = []

Tensors = dict[int, Tensor]  # the tensors of one replica, by the id of the original


class _Alias(torch.autograd.Function):
    """Give a replica tensors of its own over the same storage, as `Broadcast` gives it copies."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        aliases = tuple([tensor.data for tensor in tensors])  # each with a version counter of its own
        ctx.mark_non_differentiable(*[alias for alias, i in zip(aliases, ctx.needs_input_grad, strict=True) if not i])
        return aliases

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def replicate(module: nn.Module, devices: Sequence[torch.device], detach: bool) -> list[nn.Module]:
    """Return one replica of `module`, which is on the first of `devices`, for each of them.

    Gradients add up in the tensors of `module`, unless `detach` is true. The first replica on the first device has the
    buffers of the module itself, all others have copies.
    """
    parameters, buffers = list(module.parameters()), list(module.buffers())
    differentiable = [] if detach else [buffer for buffer in buffers if buffer.requires_grad]
    plain = [buffer for buffer in buffers if detach or not buffer.requires_grad]
    distinct = list(dict.fromkeys(devices))
    with plain_tensors():  # Torch makes plain tensors too; of a subclass they would be views.
        at = {distinct[0]: {id(tensor): tensor for tensor in (*parameters, *buffers)}}
        if len(distinct) > 1:
            copied = _copies(parameters + differentiable, distinct, detach)
            at = {
                device: shared | own
                for device, shared, own in zip(distinct, copied, _copies(plain, distinct, True), strict=True)
            }
        tensors: list[Tensors] = []
        for i, device in enumerate(devices):
            here = at[device]
            if len(distinct) < len(devices):
                here = _aliases(here, parameters + differentiable, detach)
                if device in devices[:i]:
                    here |= {id(buffer): at[device][id(buffer)].detach().clone() for buffer in plain}
            tensors.append(here)
    return _build(module, tensors)


def _copies(originals: Sequence[Tensor], devices: Sequence[torch.device], detach: bool) -> list[Tensors]:
    """Return copies of tensors for each of several devices, made by torch."""
    if not originals:
        return [{} for _ in devices]
    if detach:
        copies = comm.broadcast_coalesced(originals, devices)  # type: ignore[no-untyped-call]
    else:
        sent, number = Broadcast.apply(devices, *originals), len(originals)
        copies = [sent[i : i + number] for i in range(0, len(sent), number)]
    return [dict(zip(map(id, originals), map(_as, own, originals), strict=True)) for own in copies]


def _as(copy: Tensor, original: Tensor) -> Tensor:  # Torch copies complex numbers as pairs of real ones.
    return torch.view_as_complex(copy) if original.is_complex() and not copy.is_complex() else copy


def _aliases(tensors: Tensors, originals: Sequence[Tensor], detach: bool) -> Tensors:
    """Return `tensors` for one more replica, with aliases in place of those of `originals`."""
    here = [tensors[id(original)] for original in originals]
    if here and not detach:
        aliases: Sequence[Tensor] = _Alias.apply(*here)  # type: ignore[no-untyped-call]
    else:
        aliases = [tensor.data for tensor in here]
    return tensors | {id(original): alias for original, alias in zip(originals, aliases, strict=True)}


def _build(module: nn.Module, tensors: Sequence[Tensors]) -> list[nn.Module]:
    """Return replicas of a module, one with each of `tensors`."""
    # The dictionaries are filled directly: setting hundreds of attributes through `nn.Module.__setattr__` takes longer
    # than all the rest of a replication.
    copies: list[dict[nn.Module, nn.Module]] = [{} for _ in tensors]
    for child in module.modules():
        parameters, buffers = child._parameters, child._buffers
        plain = type(child).__setattr__ is nn.Module.__setattr__  # whether attributes may be set without calling it
        for of_modules, own in zip(copies, tensors, strict=True):
            replica = of_modules[child] = _copy(child)
            given = {name: own[id(tensor)] for name, tensor in parameters.items() if tensor is not None}
            here = {name: own[id(tensor)] for name, tensor in buffers.items() if tensor is not None}
            for name, parameter in parameters.items():
                if parameter is None:
                    replica._parameters[name] = None
            replica.__dict__["_former_parameters"] = given
            if plain:
                replica.__dict__.update(given)
                replica._buffers.update(here)
            else:
                for name, tensor in (given | here).items():
                    setattr(replica, name, tensor)
    for of_modules in copies:
        for child, replica in of_modules.items():
            for name, grandchild in child._modules.items():
                if grandchild is not None:
                    replica._modules[name] = of_modules[grandchild]
    return [of_modules[module] for of_modules in copies]


def _copy(module: nn.Module) -> Any:
    """Return a copy of a module for a replica, without parameters, and with submodules of the original."""
    # RNNs, lazy and scripted modules override this hook of torch. For all others, this does the same in less time.
    replicate: Any = module._replicate_for_data_parallel
    if getattr(replicate, "__func__", None) is not nn.Module._replicate_for_data_parallel:
        return replicate()
    copy, state = module.__new__(type(module)), module.__dict__
    own = {"_parameters": {}, "_buffers": state["_buffers"].copy(), "_modules": state["_modules"].copy()}
    copy.__dict__.update(state)
    copy.__dict__.update(own, _is_replica=True)
    return copy
