"""What `to`, `cuda` and `half` do to a module of a replica: they may change its dtype, and never its device.

The replicas of PyTorch have no parameters that could be moved, so a forward that moves its layers to a fixed device
runs in them. A replica of this package has parameters, and keeps them on its device.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn

__all__: list[str] = []

Function = Callable[[Tensor], Tensor]


class Conversion(ref[nn.Module]):
    """Replaces `_apply`, which all these methods call, in a module of a replica; a weak reference to that module."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Conversion, (self.module(),)  # In a copy of the module, this is the copy.

    def module(self) -> nn.Module | None:
        """Return the module, or None if it has ended."""
        return super().__call__()

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Convert the tensors of the module with `function`, and return the module; the other arguments are torch's."""
        module: Any = self.module()

        def on_its_device(tensor: Tensor) -> Tensor:
            result = function(tensor)
            return result if result.device == tensor.device else tensor.to(result.dtype)

        parameters = module._parameters
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = on_its_device(parameter)
        # PyTorch would ask for the `grad` of the parameters, which are no leaves, and warn. So they are attributes
        # meanwhile, as in its own replicas.
        as_attributes = {name: parameter for name, parameter in parameters.items() if name not in vars(module)}
        vars(module).update(as_attributes, _parameters={})
        try:
            type(module)._apply(module, on_its_device, *args, **kwargs)
        finally:
            for name in as_attributes:
                vars(module).pop(name, None)
            vars(module)["_parameters"] = parameters
        return module
