"""Find the source line where a module call in a replica first goes wrong.

The problem: a module got the right inputs in a replica, and returned a wrong output. Which line of its code did it?

The obvious way is to compare each intermediate result with one device, and to name the first different one. This fails,
because a different result may be correct: a maximum over the chunk, only logged or subtracted before a softmax, differs
and does no harm. After the faulty line, all results differ anyway.

Our way is to correct results, and to see whether the output of the call becomes right:

    one device   x -> x.max() -> x - m -> .exp() -> z / z.sum()    recorded
    replica 1    x -> x.max() -> x - m -> .exp() -> z / z.sum()    run again, with the same modes, seeds and state
                      ^                                 ^
                      candidates: same inputs as on one device, different results

    pass 1   Patch all candidates with the rows from one device, so that later operations get correct inputs.
    pass 2   Patch `max` alone: the output of the call stays wrong, so `max` is innocent.
    pass 3   Patch `sum` alone: the output is right. The difference begins with `sum`.

**Operations** are the torch functions in the code of the call itself, and the calls of its submodules (one operation
each). An operation is identified by its place and by the number of earlier runs of this place. A place is a code
object, an instruction (of the innermost frame outside torch and this library), and the name of the function. The number
of runs is not enough in a loop of another length, or in a backward pass with the hooks of all replicas. There, we take
the recorded operation at the same place with the same inputs.

**Rows** are found by sizes, as for modules (see `chunk_of`): a dimension holds samples if its size is proportional to
the rows of the replica. This is ambiguous if a size depends on values, as for `nonzero`, `x[mask]`, or padded
sequences. Results of other shapes are not compared. An operation with such an input is named only if patching it alone
makes the output right; the message then names the origin of the input, too.

If there are two faults, the first one with an effect is named. Integer results are an exception: an index of other
rows has an effect and may be correct. If nothing is certain, no line is named. All this runs only after a difference.
"""

import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..torch_private import in_transform
from ..trees import children_of, tensors_in
from .comparing import (
    SCALARS,
    WHOLE,
    RecordMode,
    agree,
    chunk_of,
    compared,
    corrected,
    dims_of_samples,
    fits,
    gap,
    leaves_by_path,
    mapped,
)
from .passes import CheckConfig, FailsInReplicas, TwinRun, go_backward
from .twin import CheckMode, ModuleCall, Rows, notify_module_call

__all__: list[str] = []

_MOST = 5  # Candidates to patch, one pass each. Arbitrary.
_WIDTH = 60  # Characters of quoted source code. Arbitrary.
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CHECK = os.path.dirname(__file__) + os.sep
_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep

RANDOM = "it draws random numbers, which differ in replicas, and may be meant to; switch that off to compare the rest"
SEEDED = "it draws the same random numbers in each replica, because of a seed or a generator of its own"
CHANGES = "it returns something else each time: look for state, a generator of its own, or the time"

Key = tuple[str, int]  # name of the module, index of the call
Accepts = Callable[["Operation"], bool]


class Place(NamedTuple):
    """The instruction of an operation in the innermost user frame, and the name of the called function."""

    code: CodeType
    instruction: int
    name: str

    def __str__(self) -> str:
        """Return the quoted source, file, line and function."""
        line, end, column, end_column = list(self.code.co_positions())[self.instruction // 2]
        file, line = self.code.co_filename, line or self.code.co_firstlineno
        lines = [text.encode() for text in linecache.getlines(file)[line - 1 : end or line]]
        if lines and self.name != "__setitem__":  # The columns of an assignment end at the equals sign.
            lines[-1] = lines[-1][:end_column]
            lines[0] = lines[0][column:]
        source = " ".join(b"".join(lines).decode(errors="ignore").split())
        quoted = f"`{source[:_WIDTH]}{'...' if len(source) > _WIDTH else ''}`" if source else "code"
        return f"{quoted} ({Path(file).name}, line {line}, in {self.code.co_name})"


@dataclass(eq=False)
class Operation:
    """One run of an operation, on one device or in a replica."""

    place: Place
    number: int  # number of earlier runs of this place
    synchronizes: bool  # whether the result depends on the inputs of other replicas
    # On one device:
    arguments: Any = None  # with copies of tensors
    result: Any = None  # with copies of tensors
    draws: bool = False  # whether it uses a random generator of torch
    # In a replica:
    called: Any = None  # (function, args, kwargs)
    pairs: "Operation | None" = None  # source of an input with two sample dimensions, such as a similarity matrix
    on_one: "Operation | None" = None  # its counterpart on one device
    rows: Rows = WHOLE
    numbers: list[tuple[Any, Any]] = field(default_factory=list)  # different scalar inputs: (replica, one device)
    # Operations that made the different tensor inputs: (replica, one device). None is an unknown operation.
    origins: "list[tuple[Operation | None, Operation | None]]" = field(default_factory=list)
    gets_another: bool = False  # whether a tensor input from outside the call differs
    differs: bool = False  # whether the result differs
    fits: bool = True  # whether the result can be compared
    has_pairs: bool = False  # whether the result has two sample dimensions

    def is_candidate(self) -> bool:
        """Return whether the difference may begin with this operation."""
        return self.differs and self.fits and bool(self.origins or not self.synchronizes)

    def gets_the_same(self) -> bool:
        """Return whether all inputs from other operations of the call agree with one device."""
        return self.on_one is not None and not self.origins

    def gets_the_same_floats(self) -> bool:
        """Return whether these inputs agree and all results are floating-point or complex tensors."""
        results = tensors_in(self.on_one and self.on_one.result)
        return self.gets_the_same() and all(result.is_floating_point() or result.is_complex() for result in results)

    def roots(self) -> "set[Operation | None]":
        """Return the operations where the differences of the inputs begin. None stands for an unknown operation."""
        origins = {here if here and here.on_one is there and here.differs else None for here, there in self.origins}
        roots = {root for origin in origins for root in (origin.roots() if origin else {None})} or {self}
        # A single origin with several different inputs is the root itself.
        return roots if len(roots) == 1 or len(origins) > 1 else origins

    def has_size_of_values(self) -> bool:
        """Return whether the shape of the result depends on values, as for `nonzero`."""
        with suppress(Exception):  # The meta device raises an error, because it has no values.
            args, kwargs = mapped(self.called[1:], lambda tensor: tensor.detach().to("meta"))
            return self.called[0](*args, **kwargs) is NotImplemented
        return True


class _SeesOperations(CheckMode):
    """Observe the operations of one module call, or, without a key, of user code in a backward pass."""

    def __init__(self, dtype: torch.dtype, key: Key | None) -> None:
        super().__init__(dtype)
        self.key = key
        self.times: Counter[Place] = Counter()
        self.makers = dict[int, Operation]()  # by id(result tensor)
        self._running_children = dict[int, Operation]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = None if func is notify_module_call or in_transform() else self._begun(getattr(func, "__name__", ""))
        if operation is None:
            return super().__torch_function__(func, types, args, kwargs)
        operation.called = func, args, kwargs or {}
        self.get(operation, _plain((args, kwargs or {})))
        first = args[0] if args and isinstance(args[0], Tensor) and not args[0].is_inference() else None
        version = first is not None and first._version
        output = super().__torch_function__(func, types, args, kwargs)
        if first is not None and first._version != version:
            self.give(operation, first, is_changed=True)
            return output
        if isinstance(output, Iterator):  # iter(tensor) yields its rows.
            return iter(self.give(operation, list(output)))
        return self.give(operation, output)

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        if operation := self._begun(f"call of {call.key[0]}", call.module):
            self._running_children[id(call)] = operation
            self.get(operation, _plain(arguments))

    def end(self, call: ModuleCall, output: Any) -> Any:
        operation = self._running_children.pop(id(call), None)
        return self.give(operation, output) if operation else None

    def _begun(self, name: str, child: nn.Module | None = None) -> Operation | None:
        """Start a new operation and return it. Return None outside the observed call or user code."""
        call = self._running[-1]
        if (call.module is None or call.key != self.key) if self.key else call.module is not None:
            return None
        frame, synchronizes = _frame_of_user(call.module)
        if frame is None:
            return None
        place = Place(frame.f_code, frame.f_lasti, name)
        self.times[place] += 1
        modules = child.modules() if child is not None else ()
        synchronizes |= any(hasattr(module, "__data_parallel_replicate__") for module in modules)
        return Operation(place, self.times[place] - 1, synchronizes)

    def get(self, operation: Operation, arguments: Any) -> None:
        """Note the inputs of an operation."""

    def give(self, operation: Operation, output: Any, is_changed: bool = False) -> Any:
        """Note the result of an operation, or the tensor changed in place, and return the result to use instead."""


def _frame_of_user(module: nn.Module | None) -> tuple[FrameType | None, bool]:
    """Return (innermost user frame of a module call, whether a layer of this library stands above that frame).

    The frame is None if the call runs no user code, as for a module of torch.
    """
    frame, is_of_layer = sys._getframe(1), False
    while frame := frame.f_back:  # type: ignore[assignment]
        code = frame.f_code
        if code.co_filename == go_backward.__code__.co_filename or (
            code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        ):
            return None, False
        if not code.co_filename.startswith((_TORCH, _LIBRARY)):
            return frame, is_of_layer
        is_of_layer |= code.co_filename.startswith(_LIBRARY) and not code.co_filename.startswith(_CHECK)
    return None, False


def _plain(tree: Any, function: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Convert a tree to nested dicts and apply a function to each tensor. Slices become (start, stop, step)."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):
        return PackedSequence(function(tree.data), *tree[1:])
    children = children_of((tree.start, tree.stop, tree.step) if isinstance(tree, slice) else tree)
    return {key: _plain(child, function) for key, child in children.items()} if children else tree


def _id(leaf: Any) -> int:
    return id(leaf.data if isinstance(leaf, PackedSequence) else leaf)


class RecordOperations(_SeesOperations, RecordMode):
    """Record the inputs and results of operations on one device."""

    def __init__(self, dtype: torch.dtype, key: Key | None) -> None:
        super().__init__(dtype, key)
        self.operations = dict[Place, list[Operation]]()
        self.arguments = self.output = None  # of the observed call
        self.caller: Place | None = None  # the line of the call, unless a torch container such as Sequential makes it

    def begin(self, call: ModuleCall, arguments: Any) -> None:
        if call.key == self.key:
            frame, _ = _frame_of_user(self._running[-1].module)
            if frame and self._running[-1].module is not None:
                self.caller = Place(frame.f_code, frame.f_lasti, "")
            self.arguments = _plain(arguments, self._copy)
        _SeesOperations.begin(self, call, arguments)

    def end(self, call: ModuleCall, output: Any) -> None:
        if call.key == self.key:
            self.output = mapped(output, self._copy)
        _SeesOperations.end(self, call, output)

    def get(self, operation: Operation, arguments: Any) -> None:
        operation.arguments = _plain(arguments, self._copy)
        self._state = torch.default_generator.get_state()

    def give(self, operation: Operation, output: Any, is_changed: bool = False) -> Any:
        has_generator = any(isinstance(value, torch.Generator) for value in operation.arguments[1].values())
        operation.draws = has_generator or not torch.equal(self._state, torch.default_generator.get_state())
        operation.result = _plain(output, self._copy)
        self.operations.setdefault(operation.place, []).append(operation)
        self.makers |= {id(tensor): operation for tensor in tensors_in(operation.result)}
        return output


class CorrectOperations(_SeesOperations):
    """Compare operations in replicas with one device, and patch the results of accepted operations.

    `rows` holds the rows of one replica in a forward pass, and of all replicas in a backward pass.
    """

    def __init__(self, one: RecordOperations, rows: Sequence[Rows], accepts: Accepts) -> None:
        super().__init__(one.dtype, one.key)
        self.one, self._rows, self._accepts = one, rows, accepts
        self._alive: list[Tensor] = []  # A living tensor keeps its id, so `makers` stays valid.
        self.candidates = dict[Place, Operation]()  # the first candidate of each place
        self.is_right = False  # whether the output of the call agrees with one device
        self.output: Any = None
        self.of_output: Operation | None = None  # a pseudo-operation with the output of the call as its input

    def end(self, call: ModuleCall, output: Any) -> Any:
        if call.key != self.key:
            return super().end(call, output)
        pairs = list(compared(output, self.one.output, self._rows[0]))
        self.is_right = bool(pairs) and not any(gap(*pair) for pair in pairs)
        self.output = mapped(output, Tensor.detach)
        self.of_output = Operation(Place(type(self).end.__code__, 0, ""), 0, False)
        self._compare(self.of_output, _plain(output), _plain(self.one.output), self._rows[0])
        return None

    def get(self, operation: Operation, arguments: Any) -> None:
        others = self.one.operations.get(operation.place, [])
        same = others[operation.number : operation.number + 1]
        for other, rows in [(other, rows) for other in [*same, *others, *same] for rows in self._rows]:
            operation.on_one = other
            self._compare(operation, arguments, other.arguments, rows)
            if operation.gets_the_same() and not operation.gets_another:
                return
        if not same or not self.key:  # In a backward pass, the hooks of all replicas run in any order.
            operation.on_one = None

    def _compare(self, operation: Operation, arguments: Any, on_one: Any, rows: Rows) -> None:
        """Compare the inputs of an operation with one device and note the differences."""
        operation.rows, operation.numbers, operation.origins, operation.gets_another = rows, [], [], False
        try:
            pairs = list(leaves_by_path(arguments, on_one, rows))
        except LookupError:
            operation.on_one = None
            return
        makers_here = [self.makers.get(_id(here)) for here, _ in pairs]
        operation.pairs = next((made.pairs or made for made in makers_here if made and made.has_pairs), None)
        for here, there in [pair for pair in pairs if not agree(*pair, rows)]:
            makers = self.makers.get(_id(here)), self.one.makers.get(_id(there))
            if isinstance(here, SCALARS) and isinstance(there, SCALARS):
                operation.numbers.append((here, there))
            elif makers == (None, None):
                operation.gets_another = True
            else:
                operation.origins.append(makers)

    def give(self, operation: Operation, output: Any, is_changed: bool = False) -> Any:
        right = self._right(operation, output)
        if operation.is_candidate():
            self.candidates.setdefault(operation.place, operation)
            if self._accepts(operation) and is_changed:  # User code holds this tensor, so the patch must be in place.
                output.data.copy_(right[id(output)])
            elif self._accepts(operation):
                output = mapped(output, lambda tensor: right.get(id(tensor), tensor))
        tensors = tensors_in(_plain(output))
        self._alive += tensors
        self.makers |= {id(tensor): operation for tensor in tensors}
        return output

    def _right(self, operation: Operation, output: Any) -> dict[int, Tensor]:
        """Compare a result with one device. Return the correct tensor for each different one, by id."""
        one, rows, right = operation.on_one, operation.rows, dict[int, Tensor]()
        operation.differs, operation.fits = one is None, one is not None
        try:
            for actual, whole in list(leaves_by_path(_plain(output), one.result, rows)) if one else ():
                if isinstance(actual, Tensor) and isinstance(whole, Tensor):
                    operation.has_pairs |= len(dims_of_samples(whole, actual, rows)) > 1
                    if gap(actual, expected := chunk_of(whole, actual, rows)):
                        operation.differs, operation.fits = True, operation.fits and fits(actual, expected)
                        right[id(actual)] = corrected(actual, expected) if operation.fits else actual
        except LookupError:
            operation.differs, operation.fits = True, False
        return right


class Line(NamedTuple):
    """A description of the faulty line, its operation, and its cause if known."""

    text: str
    operation: Operation | None = None
    why: str = ""


def line_of_call(passes: CheckConfig, index: int, key: Key, number: int) -> Line | None:
    """Return the line where the module call `key` of replica `number` goes wrong in pass `index`."""
    one = RecordOperations(passes.dtype, key)
    TwinRun(passes, True, index).take(index, "output", [one])

    def take(accepts: Accepts) -> CorrectOperations | None:
        modes = [CorrectOperations(one, [rows], accepts) for rows in passes.rows]
        with suppress(FailsInReplicas):  # A patched result may have a wrong shape for later operations.
            TwinRun(passes, False, index).take(index, "output", modes)
            return modes[number]
        return None

    if not one.operations:  # A module of torch runs no user code.
        return Line(f"it begins with {one.caller}") if one.caller else None
    line = _Search(take, number).line()
    return line and line._replace(why=_why(passes, index, key, line.operation))


def line_of_gradient(passes: CheckConfig, index: int, name: str) -> Line | None:
    """Return the line in a hook or autograd function where the gradient `name` goes wrong in the backward pass."""

    def gradient(is_one: bool, mode: CheckMode) -> Any:
        side = TwinRun(passes, is_one, index)
        side.backward_mode = mode
        return side.take(index)["gradient"][name]

    def take(accepts: Accepts) -> CorrectOperations | None:
        mode = CorrectOperations(one, passes.rows, accepts)
        with suppress(FailsInReplicas):
            mode.output = gradient(False, mode)
            mode.is_right = agree(mode.output, expected)
            return mode
        return None

    one = RecordOperations(passes.dtype, None)
    expected = gradient(True, one)
    line = _Search(take).line() if one.operations else None
    draws = line and line.operation and line.operation.on_one and line.operation.on_one.draws
    return line._replace(why=RANDOM) if line and draws else line


@dataclass
class _Search:
    """Search for the faulty line by passes with some operations patched."""

    take: Callable[[Accepts], CorrectOperations | None]  # runs one pass and patches the accepted operations
    number: int = 0  # of the replica

    def line(self) -> Line | None:
        """Return the first line with a proven effect."""
        as_it_is, together = self.take(lambda _: False), self.take(Operation.gets_the_same_floats)
        if as_it_is is None:
            return None
        for operation, alone in self._candidates(together, Operation.gets_the_same_floats):
            # Alone, it repairs the output; or all candidates together do, and this one contributes.
            if alone.is_right or (together and together.is_right and not agree(alone.output, as_it_is.output)):
                return _line_of(operation)
        for operation, alone in self._candidates(as_it_is, Operation.is_candidate):
            if alone.is_right and (line := self._line_of_origin(operation)):
                return line
        return _other_way(as_it_is.of_output, as_it_is, self.number)

    def _candidates(self, mode: Any, accepts: Accepts) -> Iterator[tuple[Operation, CorrectOperations]]:
        """Yield (candidate, pass with only the place of this candidate patched)."""
        for operation in list(filter(accepts, mode.candidates.values() if mode else ()))[:_MOST]:
            if alone := self._alone(operation):
                yield operation, alone

    def _alone(self, operation: Operation) -> CorrectOperations | None:
        return self.take(lambda other: other.place == operation.place)

    def _line_of_origin(self, operation: Operation) -> Line | None:
        """Return the line of the operation that gave this operation its different input."""
        roots = operation.roots()
        root = next(iter(roots)) if len(roots) == 1 else None
        if any(root and root.synchronizes for root in roots):
            return None  # The inputs agree in this replica, so the fault lies in another one.
        if root and not root.fits and root.has_size_of_values():  # It selects rows by values, perhaps correctly.
            root = None if any(here and here.fits for here, _ in operation.origins) else operation
        # The pseudo-operation of the output is no line. A faulty module would have been found before.
        return _line_of(root) if root and (root is not operation or operation.called) else None


def _line_of(operation: Operation) -> Line:
    if (pairs := operation.pairs) and not operation.numbers:
        return Line(f"it begins with {pairs.place}, two dimensions of which are samples", pairs)
    got = ["another tensor than on one device"] if operation.gets_another else []
    got += [f"{_number(here)} in place of {_number(there)}" for here, there in operation.numbers[:2]]
    return Line(f"it begins with {operation.place}{', which gets ' if got else ''}{' and '.join(got)}", operation)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _other_way(operation: Operation | None, mode: CorrectOperations, number: int) -> Line | None:
    """Return the line that only a replica or only one device ran on the way to the different input, if any."""
    here = there = operation
    while operation and len(origins := {*operation.origins}) == 1:
        ((here, there),) = origins
        operation = here if here and here.on_one is there else None
    if here and there and here.place == there.place:
        times, times_there = mode.times[here.place], mode.one.times[here.place]
        is_last = (here.number, there.number) == (times - 1, times_there - 1)
        text = f"it begins with {here.place}, which runs {times} times in place of {times_there}"
        return Line(text, replace(here, on_one=None)) if is_last and times != times_there else None
    sides = [(there, mode.times, "one device"), (here, mode.one.times, f"replica {number}")]
    ways = [(made, f"{who} runs {made.place}") for made, other, who in sides if made and made.place not in other]
    text = f"it goes another way: {', '.join([way for _, way in ways])}"
    return Line(text, replace(ways[0][0], on_one=None)) if ways else None


def _why(passes: CheckConfig, index: int, key: Key, operation: Operation | None) -> str:
    """Return the cause if it is state or random numbers: run one device again with the same seed, then another one."""
    side = TwinRun(passes, True, index, is_moved=False)  # All three passes need the same parameters.
    first, again, other = (RecordOperations(passes.dtype, key) for _ in range(3))
    for seed, mode in ((index, first), (index, again), (index + 1, other)):
        side.take(seed, "output", [mode])
    with suppress(LookupError):  # The operation may not run again.
        if operation and _varies(operation, first, again):
            return CHANGES
        if operation and _varies(operation, again, other):
            return RANDOM
    return SEEDED if operation and operation.on_one and operation.on_one.draws else ""


def _varies(operation: Operation, before: RecordOperations, after: RecordOperations) -> bool:
    """Return whether the result of an operation changes between two passes with the same inputs of the call."""
    if not agree(before.arguments, after.arguments) or operation.on_one is None:  # It has no counterpart.
        return agree(before.arguments, after.arguments) and before.times != after.times
    number = operation.on_one.number
    then, now = (mode.operations[operation.place][number] for mode in (before, after))
    made = [leaves for leaves in leaves_by_path(now.arguments, then.arguments, WHOLE) if id(leaves[0]) in after.makers]
    return all(agree(*leaves) for leaves in made) and not agree(now.result, then.result)
