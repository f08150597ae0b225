"""Compare the module calls in replicas with the same module calls on one device.

A record of the inputs and outputs of all module calls in all replicas would take too much memory. Therefore the first
pass runs on one device, and only this pass is recorded. The replicas run afterwards. When a module call in a replica
ends, its output is compared with the recorded output of the same call on one device. When all replicas have made the
call, its record is deleted. If any replica returned a wrong output, the record is kept.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .compare_tensors import Rows, agree, compared, corrected, gap, gap_text, mapped
from .twin import CheckMode, ModuleCall

__all__: list[str] = []


class RecordMode(CheckMode):
    """Record the inputs and outputs of each module call on one device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        # The recorded module calls, in the order in which they ended
        self.calls: dict[tuple[str, int], ModuleCall] = {}
        # The latest copy of each tensor that still exists, with the tensor's version counter at that time. With this
        # dict, a tensor that is the output of one module and the input of the next module is copied only once.
        self._copies: MutableMapping[Tensor, tuple[int | None, Tensor]] = WeakTensorKeyDictionary()

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        call.arguments = mapped(arguments, self._copy)

    def end(self, call: ModuleCall, output: Any) -> None:
        call.output = mapped(output, self._copy)
        self.calls[call.key] = call

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, to be kept in the record of a call.

        If no operation has changed the tensor in place since it was last copied, return the same copy again.
        """
        version = None if tensor.is_inference() else tensor._version
        if version is None or tensor not in self._copies or self._copies[tensor][0] != version:
            self._copies[tensor] = version, tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self._copies[tensor][1]


class CompareMode(CheckMode):
    """Compare each module call in replica `number` with the record of the same call on one device."""

    def __init__(self, one: RecordMode, number: int, rows: Sequence[Rows], model: nn.Module) -> None:
        super().__init__(one.dtype)
        self._one, self._number, self._rows, self._model = one, number, rows, model
        # The first module call in this replica whose inputs differ from those on one device
        self.gets_other: ModuleCall | None = None

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        on_one = self._one.calls.get(call.key)
        if on_one and agree(arguments, on_one.arguments, self._rows[self._number]):
            # Copy lists and dicts among the arguments, because `forward` may change them later. Detach the tensors,
            # because their autograd graph would take memory.
            call.arguments = mapped(arguments, Tensor.detach)
        else:
            self.gets_other = self.gets_other or call

    def end(self, call: ModuleCall, output: Any) -> None:
        if on_one := self._one.calls.get(call.key):
            agrees = call.arguments is not None
            call.gap = gap_text(output, on_one.output, self._rows[self._number]) if agrees else ("", "")
            call.module, call.arguments = None, call.arguments if any(call.gap) else None
            on_one.in_replicas[self._number] = call if agrees else None
            if len(on_one.in_replicas) == len(self._rows) and not suspects_in(on_one, self._model):
                del self._one.calls[call.key]


class PatchMode(CheckMode):
    """Replace the output of one module call in a replica by the output of the same call on one device."""

    def __init__(self, dtype: torch.dtype, on_one: ModuleCall, rows: Rows) -> None:
        super().__init__(dtype)
        self._on_one, self._rows = on_one, rows

    def end(self, call: ModuleCall, output: Any) -> Any:
        pairs = compared(output, self._on_one.output, self._rows) if call.key == self._on_one.key else ()
        right = {id(actual): corrected(actual, right) for actual, right in pairs if gap(actual, right)}
        return mapped(output, lambda actual: right.get(id(actual), actual)) if right else None


def contains_synchronized(module: nn.Module) -> bool:
    """Return whether a module is or contains a layer that exchanges its statistics between replicas."""
    return any(hasattr(child, "__data_parallel_replicate__") for child in module.modules())


def suspects_in(call: ModuleCall, model: nn.Module) -> dict[int, ModuleCall]:
    """Find the replicas in which a module call gets right inputs, but returns a wrong output.

    The result maps the number of each replica with a wrong output to the module call in this replica.

    A synchronized layer uses the inputs of all replicas. A wrong input in one replica therefore makes the outputs of a
    correct layer wrong in all replicas. So if any input of such a layer is wrong, the layer is not suspected in any
    replica.

    Args:
        call: the module call on one device. Its attribute `in_replicas` holds the same call in each replica.
        model: the copy of the model with replicas.
    """
    if None in call.in_replicas.values() and contains_synchronized(model.get_submodule(call.key[0])):
        return {}
    suspects = {number: other for number, other in call.in_replicas.items() if other and any(other.gap)}
    return dict(sorted(suspects.items()))  # Sort by number, because replicas end their calls in any order.
