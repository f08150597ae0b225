"""Warnings of what `forward` sets or registers, and what ends with the replica; in the first forward passes."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..refusals import warn_once
from ..torch_private import HOOKS

__all__: list[str] = []

LOOKS = 3  # Arbitrary: what a model counts or averages, it does in each training step.
_KINDS = frozenset({bool, int, float, complex, str})

# How many forward passes were looked at, by wrapper. Not an attribute: a copy or pickle of a wrapper begins at zero.
_looks: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()

State = list[tuple[str, nn.Module, str, Any]]  # the name of an attribute in the model, its module, its name, its value


def state_to_watch(wrapper: nn.Module, replica: nn.Module) -> State | None:
    """Return the numbers, strings, buffers and parameters of a replica that has not run yet.

    None after the first training steps of a wrapper. The value of a parameter is the parameter, and a tensor of its
    data. Attributes that are None are left out, since a cache may be filled in each forward pass; so is the mode, which
    a forward may set for the time that it runs.
    """
    looks = _looks.get(wrapper, 0)
    if looks >= LOOKS or not replica.training:
        return None
    _looks[wrapper] = looks + 1
    state: State = []
    for name, module in replica.named_modules():
        prefix = f"{name}." if name else ""
        for attribute, value in vars(module).items():
            if type(value) in _KINDS and attribute != "training":
                state.append((prefix + attribute, module, attribute, value))
        if not isinstance(module, torch.jit.ScriptModule):  # which makes new objects of its buffers at each look
            for attribute, buffer in module._buffers.items():
                if buffer is not None:
                    state.append((prefix + attribute, module, attribute, buffer))
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter.layout == torch.strided:
                    state.append((prefix + attribute, module, attribute, (parameter, parameter.detach())))
    return state


def _has_other_data(parameter: Tensor, before: Tensor) -> bool:
    """Return whether other numbers were assigned to the `data` of a parameter, not only other memory."""
    return parameter.data_ptr() != before.data_ptr() and not torch.equal(parameter, before)


def warn_of_lost_state(replica: nn.Module, state: State) -> None:
    """Warn of what a replica that has run has bound anew; not of tensors in place of numbers, which are activations."""
    lost = []
    for name, module, attribute, value in state:
        if type(value) in _KINDS:
            present = vars(module).get(attribute, value)
            is_lost = type(present) in _KINDS and present is not value and present != value
        elif type(value) is tuple:
            is_lost = _has_other_data(*value)
        else:
            is_lost = module._buffers.get(attribute, value) is not value
        if is_lost:
            lost.append(name)
    if lost:
        names = " and ".join(filter(None, [", ".join(lost[:-1]), lost[-1]]))
        warn_once(
            f"forward() of {type(replica).__name__} set {names} of replica 0, which ends with the forward pass: the "
            "model keeps its former values. Make it a buffer and change it in place, as in self.step.add_(1) or "
            "self.ema.lerp_(mean, 0.1), which replica 0 does for the model; or set it outside forward(). Ignore this "
            "if each forward pass sets it anew"
        )


def warn_of_lost_hooks(replicas: Sequence[nn.Module]) -> None:
    """Warn of modules on which some replicas have registered hooks in their run, and others have not."""
    modules = zip(*[replica.modules() for replica in replicas], strict=False)
    lost = []
    for (name, _), copies in zip(replicas[0].named_modules(), modules, strict=False):
        if len({_number_of_hooks(copy) for copy in copies}) > 1:
            lost.append(name or "the model itself")
    if lost:
        warn_once(
            f"forward() of {type(replicas[0]).__name__} registered hooks on {', '.join(lost)} in some replicas and not "
            "in others. A hook ends with its replica, so what all replicas share, such as a list of handles, must not "
            "decide whether to register one: keep the handle in an attribute of self, or register outside forward()"
        )


def _number_of_hooks(module: nn.Module) -> int:
    return sum([len(vars(module).get(name, ())) for name in HOOKS])
