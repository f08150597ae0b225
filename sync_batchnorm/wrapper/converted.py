"""What `to`, `cuda` and `half` do to a module of a replica: they may change its dtype, and never its device.

The replicas of PyTorch have no parameters that could be moved, so a forward that moves its layers to a fixed device
runs in them. A replica of this package has parameters, and keeps them on its device.

NOTE [conversions in replicas]: All these methods call `nn.Module._apply`, which is wrapped when the first replicas are
made, and is what it was for all modules that belong to no replica. An attribute of the replica's modules in place of
the method does not work: a class may override the method, and a copy of the module's dictionary would take along what
converts the original.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from .bound import KEPT

__all__: list[str] = []

Function = Callable[[Tensor], Tensor]


def keep_replicas_on_their_devices() -> None:
    """Let conversions leave modules of replicas on their devices; see NOTE [conversions in replicas]."""
    apply: Any = nn.Module._apply
    if hasattr(apply, "_sync_converts"):
        return

    @wraps(apply)
    def convert(self: nn.Module, fn: Function, *args: Any, **kwargs: Any) -> Any:
        kept = vars(self).get(KEPT)
        if kept is None or not kept.modules:  # as of a copy of a replica's module
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

    vars(convert)["_sync_converts"] = True
    nn.Module._apply = convert  # type: ignore[method-assign]
