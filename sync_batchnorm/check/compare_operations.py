"""Observe the operations inside one module call, and compare their results in replicas with those on one device.

An **operation** is a call of a torch function in the code of the module itself, or a call of a submodule. Each
operation in a replica is compared with the same operation on one device: with the n-th run of the same place in the
user's source code. The numbers n do not match if a loop runs more often on one device, or in a backward pass, where the
hooks of all replicas run. In these cases, the operation is compared with any run of the same place on one device that
got the same inputs.

The sizes of a tensor tell which of its **rows** belong to a replica. If the replica's chunk is a third of the batch, a
dimension holds samples if its size in the replica is a third of its size on one device (see `chunk_of`). This fails if
a size depends on values, as for `nonzero`, `x[mask]`, or padded sequences. Such a result is not compared, because its
shape does not fit the replica's chunk.
"""

import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .compare_calls import RecordMode, contains_synchronized
from .compare_tensors import (
    SCALARS,
    WHOLE,
    Rows,
    agree,
    as_dicts,
    chunk_of,
    compared,
    corrected,
    dims_of_samples,
    fits,
    gap,
    leaves_by_path,
    mapped,
    tensors_of,
)
from .twin import CallKey, CheckMode, ModuleCall, go_backward

__all__: list[str] = []

_WIDTH = 60  # A message quotes at most this number of characters of source code. The number is arbitrary.
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CHECK = os.path.dirname(__file__) + os.sep
_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep

Accepts = Callable[["Operation"], bool]  # a function that decides which operations' wrong results to replace


class Place(NamedTuple):
    """The place of an operation in the user's source code."""

    code: CodeType  # code object of the user's function
    # The first line, last line, first column and last column of the call in the source code. The offset of the bytecode
    # instruction would not identify the call: since Python 3.12, the code for one call may appear twice in the
    # bytecode, once for each branch of ``a if b else c``.
    position: tuple[int | None, ...]
    name: str  # name of the called torch function or submodule

    def __str__(self) -> str:
        """Return the quoted source code, with its line number and the names of its file and function."""
        line, end, column, end_column = self.position
        file, line = self.code.co_filename, line or self.code.co_firstlineno
        lines = [text.encode() for text in linecache.getlines(file)[line - 1 : end or line]]
        # Quote only the columns that belong to the call. For an assignment such as `x[0] = y`, quote whole lines,
        # because Python reports only the columns before the equals sign.
        if lines and self.name != "__setitem__":
            lines[-1] = lines[-1][:end_column]
            lines[0] = lines[0][column:]
        source = " ".join(b"".join(lines).decode(errors="ignore").split())
        quoted = f"`{source[:_WIDTH]}{'...' if len(source) > _WIDTH else ''}`" if source else "code"
        return f"{quoted} ({Path(file).name}, line {line}, in {self.code.co_name})"


def _place(frame: FrameType, name: str) -> Place:
    """Return the place in the source code where `frame` currently calls the function `name`."""
    return Place(frame.f_code, next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)), name)


@dataclass(eq=False)
class Operation:
    """One call of a torch function or of a submodule, on one device or in a replica."""

    place: Place
    number: int  # number of earlier runs of the same place in the source code, in the same pass
    synchronizes: bool  # whether the result depends on the inputs of other replicas, too
    # The following fields are set only for an operation on one device:
    arguments: Any = None  # copies of the inputs
    result: Any = None  # copy of the result
    draws: bool = False  # whether the operation draws random numbers from a generator of torch
    # The following fields are set only for an operation in a replica:
    called: Any = None  # the call as (torch function, args, kwargs); None for a call of a submodule
    on_one: "Operation | None" = None  # the same operation on one device, or None if one device has not run it
    rows: Rows = WHOLE  # which rows of the batch are in the replica's chunk
    # The wrong inputs, as pairs (in the replica, on one device). A pair for a number or string holds the two values. A
    # pair for a tensor holds the two operations that computed the tensor; None stands for an operation outside the
    # observed code.
    different_inputs: list[tuple[Any, Any]] = field(default_factory=list)
    # If an input is a similarity matrix, with an entry for each pair of samples: the operation that computed this
    # matrix
    pairs: "Operation | None" = None
    has_pairs: bool = False  # whether the result is a similarity matrix, with samples in two dimensions
    differs: bool = False  # whether the result differs from the result on one device
    fits: bool = True  # whether the result has a shape that can be compared with the result on one device

    def origins(self) -> "list[tuple[Operation | None, Operation | None]]":
        """For each input tensor that differs, return the operations that made it: (in the replica, on one device)."""
        return [pair for pair in self.different_inputs if any(isinstance(origin, Operation) for origin in pair)]

    def gets_another(self) -> bool:
        """Return whether an input from outside the observed module call differs from the same input on one device."""
        return (None, None) in self.different_inputs

    def is_candidate(self) -> bool:
        """Return whether the fault may lie in this operation, or in an operation that made one of its inputs."""
        return self.differs and self.fits and bool(self.origins() or not self.synchronizes)

    def gets_the_same(self) -> bool:
        """Return whether all values that come from other operations are the same as on one device."""
        return self.on_one is not None and not self.origins()

    def gets_the_same_floats(self) -> bool:
        """Return whether `gets_the_same` is true for this operation, and it returns only float or complex tensors."""
        results = tensors_of(self.on_one and self.on_one.result)
        return self.gets_the_same() and all(result.is_floating_point() or result.is_complex() for result in results)

    def roots(self) -> "set[Operation | None]":
        """Return the operations in which the wrong inputs of this operation have their origin.

        None stands for an operation that is unknown.
        """
        pairs = self.origins()
        origins = {here if here and here.on_one is there and here.differs else None for here, there in pairs}
        roots = {root for origin in origins for root in (origin.roots() if origin else {None})} or {self}
        # If a single operation computed all wrong inputs, from several wrong inputs of its own, return this single
        # operation.
        return roots if len(roots) == 1 or len(origins) > 1 else origins

    def has_size_of_values(self) -> bool:
        """Return whether the shape of the result depends on values, as for `nonzero`."""
        # Tensors on the meta device have no values, so an operation that needs values raises an error.
        with suppress(Exception):
            args, kwargs = mapped(self.called[1:], lambda tensor: tensor.detach().to("meta"))
            return self.called[0](*args, **kwargs) is NotImplemented
        return True


class _OperationMode(CheckMode):
    """Observe the operations of one module call, or of the user's code in a backward pass.

    Args:
        dtype: the dtype in which the pass computes.
        key: key of the module call; None for the user's code in a backward pass.
    """

    def __init__(self, dtype: torch.dtype, key: CallKey | None) -> None:
        super().__init__(dtype)
        self.key = key
        self.times: Counter[Place] = Counter()  # maps each place in the source code to the number of its runs
        self.makers = dict[int, Operation]()  # maps the id of each tensor to the operation that made the tensor
        # Maps the id of each `ModuleCall` of a submodule that runs now to its `Operation`
        self._running_children = dict[int, Operation]()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        operation = self._started(getattr(func, "__name__", ""))
        if operation is None:
            return super().run(func, args, kwargs)
        operation.called = func, args, kwargs
        self.observe_inputs(operation, as_dicts((args, kwargs)))
        first = args[0] if args and isinstance(args[0], Tensor) and not args[0].is_inference() else None
        version = first is not None and first._version
        output = super().run(func, args, kwargs)
        if first is not None and first._version != version:
            self.observe_result(operation, first, is_in_place=True)
            return output
        if isinstance(output, Iterator):  # as from iter(tensor)
            return iter(self.observe_result(operation, list(output)))
        return self.observe_result(operation, output)

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        if operation := self._started(f"call of {call.key[0]}", call.module):
            self._running_children[id(call)] = operation
            self.observe_inputs(operation, as_dicts(arguments))

    def end(self, call: ModuleCall, output: Any) -> Any:
        operation = self._running_children.pop(id(call), None)
        return self.observe_result(operation, output) if operation else None

    def _started(self, name: str, child: nn.Module | None = None) -> Operation | None:
        """Return an `Operation` for a call that begins now, or None if the call is not made by the observed code."""
        call = self._running[-1]
        if (call.module is None or call.key != self.key) if self.key else call.module is not None:
            return None
        frame, synchronizes = _frame_of_user(call.module)
        if frame is None:
            return None
        place = _place(frame, name)
        self.times[place] += 1
        return Operation(
            place, self.times[place] - 1, synchronizes or (child is not None and contains_synchronized(child))
        )

    def observe_inputs(self, operation: Operation, arguments: Any) -> None:
        """Before an operation runs, record its inputs, or compare the inputs with those on one device."""

    def observe_result(self, operation: Operation, output: Any, is_in_place: bool = False) -> Any:
        """Record the result of an operation, or compare it with the result on one device.

        Return the value that the user's code gets as the result of the operation: the same result, or a corrected one.

        Args:
            operation: the operation.
            output: the result. For an operation in place, it is the changed input tensor.
            is_in_place: whether the operation has changed its first input in place.
        """


def _frame_of_user(module: nn.Module | None) -> tuple[FrameType | None, bool]:
    """Return (innermost frame of the user's code, whether this frame has called a layer of this library).

    The frame is None if the running module contains no code of the user, for example because it is a module of torch.

    Args:
        module: the module of the running call, or None in a backward pass.
    """
    frame, is_in_layer = sys._getframe(1), False
    while frame := frame.f_back:  # type: ignore[assignment]
        code = frame.f_code
        if code is go_backward.__code__ or (code.co_name == "_call_impl" and frame.f_locals.get("self") is module):
            return None, False
        if not code.co_filename.startswith((_TORCH, _LIBRARY)):
            return frame, is_in_layer
        is_in_layer |= code.co_filename.startswith(_LIBRARY) and not code.co_filename.startswith(_CHECK)
    return None, False


class RecordOperations(_OperationMode, RecordMode):
    """Record the inputs and results of operations on one device."""

    def __init__(self, dtype: torch.dtype, key: CallKey | None) -> None:
        super().__init__(dtype, key)
        self.operations = dict[Place, list[Operation]]()  # for each place in the source code, its calls in order
        self.arguments = self.output = None  # copies of the inputs and of the output of the observed module call
        # The line of the user's code that calls the observed module; None if a container of torch, such as
        # nn.Sequential, calls the module.
        self.caller: Place | None = None

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        if call.key == self.key:
            caller = self._running[-1].module
            frame = _frame_of_user(caller)[0] if caller is not None else None
            self.caller = _place(frame, "") if frame else None
            self.arguments = as_dicts(arguments, self._copy)
        super().begin(call, arguments)

    def end(self, call: ModuleCall, output: Any) -> None:
        if call.key == self.key:
            self.output = mapped(output, self._copy)
        super().end(call, output)

    def observe_inputs(self, operation: Operation, arguments: Any) -> None:
        operation.arguments = as_dicts(arguments, self._copy)
        self._state = torch.default_generator.get_state()

    def observe_result(self, operation: Operation, output: Any, is_in_place: bool = False) -> Any:
        has_generator = any(isinstance(value, torch.Generator) for value in operation.arguments[1].values())
        operation.draws = has_generator or not torch.equal(self._state, torch.default_generator.get_state())
        operation.result = as_dicts(output, self._copy)
        self.operations.setdefault(operation.place, []).append(operation)
        self.makers |= {id(tensor): operation for tensor in tensors_of(operation.result)}
        return output


class CorrectOperations(_OperationMode):
    """Compare operations in a replica with the same operations on one device, and replace some of the wrong results.

    Args:
        one: the operations on one device.
        rows: the rows of the replica's chunk in a forward pass, or the rows of all chunks in a backward pass.
        accepts: whether to replace the wrong result of an operation.
    """

    def __init__(self, one: RecordOperations, rows: Sequence[Rows], accepts: Accepts) -> None:
        super().__init__(one.dtype, one.key)
        self.one, self._rows, self._accepts = one, rows, accepts
        self._alive: list[Tensor] = []  # keeps results alive, because Python may reuse the id of a freed tensor
        # For each place in the source code, the first call that may be faulty
        self.candidates = dict[Place, Operation]()
        self.is_right = False  # whether the output of the observed call is the same as on one device
        self.output: Any = None  # output of the observed call
        # An extra operation, added after the observed module call, with the output of this call as its input. A search
        # for a line that ran only on one device, or only in the replica, goes backwards from this operation.
        self.of_output: Operation | None = None

    def end(self, call: ModuleCall, output: Any) -> Any:
        if call.key != self.key:
            return super().end(call, output)
        pairs = list(compared(output, self.one.output, self._rows[0]))
        self.is_right = bool(pairs) and not any(gap(*pair) for pair in pairs)
        self.output = mapped(output, Tensor.detach)
        self.of_output = Operation(Place(type(self).end.__code__, (None,) * 4, ""), 0, False)
        self._compare_inputs(self.of_output, as_dicts(output), as_dicts(self.one.output), self._rows[0])
        return None

    def observe_inputs(self, operation: Operation, arguments: Any) -> None:
        others = self.one.operations.get(operation.place, [])
        same = others[operation.number : operation.number + 1]
        for other, rows in [(other, rows) for other in [*same, *others, *same] for rows in self._rows]:
            operation.on_one = other
            self._compare_inputs(operation, arguments, other.arguments, rows)
            if operation.gets_the_same() and not operation.gets_another():
                return
        # Gradient hooks run in an arbitrary order. So in a backward pass, a line's n-th call in replicas may not
        # correspond to its n-th call on one device.
        if not same or not self.key:
            operation.on_one = None

    def _compare_inputs(self, operation: Operation, arguments: Any, on_one: Any, rows: Rows) -> None:
        operation.rows, operation.different_inputs = rows, []
        try:
            pairs = list(leaves_by_path(arguments, on_one, rows))
        except LookupError:
            operation.on_one = None
            return
        makers = [(self.makers.get(_id(here)), self.one.makers.get(_id(there))) for here, there in pairs]
        operation.pairs = next((made.pairs or made for made, _ in makers if made and made.has_pairs), None)
        for (here, there), made in zip(pairs, makers, strict=True):
            if not agree(here, there, rows):
                are_numbers = isinstance(here, SCALARS) and isinstance(there, SCALARS)
                operation.different_inputs.append((here, there) if are_numbers else made)

    def observe_result(self, operation: Operation, output: Any, is_in_place: bool = False) -> Any:
        right = self._compare_result(operation, output)
        if operation.is_candidate():
            self.candidates.setdefault(operation.place, operation)
            # After an operation in place, the user's code goes on with the same tensor object. So write the right
            # values into this object.
            if self._accepts(operation) and is_in_place:
                output.data.copy_(right[id(output)])
            elif self._accepts(operation):
                output = mapped(output, lambda tensor: right.get(id(tensor), tensor))
        tensors = tensors_of(output)
        self._alive += tensors
        self.makers |= {id(tensor): operation for tensor in tensors}
        return output

    def _compare_result(self, operation: Operation, output: Any) -> dict[int, Tensor]:
        """Compare a result with one device; return a dict from the ids of wrong tensors to the right tensors."""
        one, rows, right = operation.on_one, operation.rows, dict[int, Tensor]()
        operation.differs, operation.fits = one is None, one is not None
        try:
            for actual, whole in list(leaves_by_path(as_dicts(output), one.result, rows)) if one else ():
                if isinstance(actual, Tensor) and isinstance(whole, Tensor):
                    operation.has_pairs |= len(dims_of_samples(whole, actual, rows)) > 1
                    if gap(actual, expected := chunk_of(whole, actual, rows)):
                        operation.differs, operation.fits = True, operation.fits and fits(actual, expected)
                        right[id(actual)] = corrected(actual, expected) if operation.fits else actual
        except LookupError:
            operation.differs, operation.fits = True, False
        return right


def _id(leaf: Any) -> int:
    return id(leaf.data if isinstance(leaf, PackedSequence) else leaf)
