"""What a wrapper or a layer refuses, and what a wrapper warns of. The only batch norms here are those of torch."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from .replica import current_replica
from .torch_private import BatchNormBase, compiled_module_type, in_transform, names_of_modules

__all__: list[str] = []

_issued: dict[str, object] = {}  # the texts of `warn_once`


def warn_once(text: str) -> None:
    """Issue a `UserWarning` once in this process, even if several threads do so at once."""
    mine = object()
    if _issued.setdefault(text, mine) is mine:
        warnings.warn(text, stacklevel=3)


def check_module(module: object) -> None:
    """Raise a `TypeError` for what is not a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}; pass the model itself")


def in_transform_error(what: str) -> RuntimeError:
    """Return the error for a call of `what` inside of a transform of `torch.func`, which other threads do not know."""
    return RuntimeError(
        f"expected replicas outside of the transforms of torch.func, but got a call of {what} inside of one, such as "
        "grad or vmap; use torch.autograd.grad, with create_graph=True for gradients of gradients, or call the wrapped "
        "module itself"
    )


def check_replicable(wrapper: DataParallel[Any], module: nn.Module) -> None:
    """Raise an error that names the submodules which cannot be replicated."""
    if in_transform():
        raise in_transform_error(type(wrapper).__name__)
    if type(torch.empty(0)).__name__ == "FakeTensor":
        raise RuntimeError(
            "expected replicas outside of torch.export and FakeTensorMode, which their threads do not know, but got a "
            f"call of {type(wrapper).__name__} inside; use its module, in eval mode"
        )
    compiled_type = compiled_module_type()
    for child, name in names_of_modules(module).items():
        if isinstance(child, compiled_type):
            # A replica of it would share its dictionary, and both would lose their submodules (torch 2.13).
            name = name or "the module itself"
            raise RuntimeError(
                f"expected modules that can be replicated, but got {name!r} from torch.compile; put the module, which "
                "is its attribute _orig_mod, back in its place, and compile functions that its forward calls"
            )


def warn_of_plain_layers(wrapper: nn.Module, module: nn.Module) -> None:
    """Warn if a module that has nothing that could synchronize trains batch norms."""
    plain = [name for name, child in module.named_modules() if isinstance(child, BatchNormBase) and child.training]
    if plain:
        first = plain[0] or "the module itself"
        warn_once(
            f"expected batch norms that synchronize in the replicas of a {type(wrapper).__name__}, but got "
            f"{len(plain)} in training mode, none of which does, from {first!r} on; call convert_model(model), or "
            "filter this warning if every replica is meant to normalize with its own chunk of the batch"
        )


def raise_foreign_layer(foreign: nn.Module) -> None:
    """Raise an error if a layer or wrapper that trains in the replica of this thread does not belong to it."""
    replica = current_replica.get()
    if replica is None or any(module is foreign for module in replica.modules()):
        return
    run = replica._sync_run
    who = run.coordinator.who(run.replica_id)
    names = [name for name, module in run.original.named_modules() if module is foreign]
    which = names[0] if names and names[0] else type(foreign).__name__
    whose = "the wrapped module itself" if names else "no replica"
    raise RuntimeError(
        f"expected a layer or wrapper that belongs to {who}, but got {which} of {whose}, which every replica would "
        "train with its own chunk of the batch; let the forward reach it through attributes of self that are modules "
        "(nn.ModuleList instead of a list), and wrap the forward of the DataParallel instead of that of the module"
    )
