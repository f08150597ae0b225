"""Find the source line where a module call in a replica first goes wrong.

The problem: a module gets the right inputs in a replica, and returns a wrong output. Which line of its code is wrong?

The obvious way is to compare each intermediate result with one device, and to name the first different result. This
fails, because a different result may be correct: a maximum over the chunk, only logged or subtracted before a softmax,
differs from the maximum over the batch and does no harm. After the faulty line, all results differ anyway.

Our way is to correct results, and to see whether the output of the call becomes right:

    one device   x -> x.max() -> x - m -> .exp() -> z / z.sum()    recorded
    replica 1    x -> x.max() -> x - m -> .exp() -> z / z.sum()    run again, with the same modes, seeds and state
                      ^                                 ^
                      candidates (same inputs as on one device, different results)

    pass 1   Patch all candidates with the rows from one device, so that later operations get correct inputs.
    pass 2   Patch `max` alone: the output of the call stays wrong, so `max` is innocent.
    pass 3   Patch `sum` alone: the output is right. The difference begins with `sum`.

If there are two faults, the first fault with an effect on the output is named. Integer results are an exception: an
index of other rows has an effect and may be correct. An operation with an input of another shape is named only if
patching this operation alone makes the output right; the message then names the origin of the input, too. If nothing is
certain, no line is named.

All this code runs only after the check has found a difference.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .comparing import WHOLE, agree, leaves_by_path
from .operations import Accepts, CorrectOperations, Operation, RecordOperations
from .passes import Check, FailsInReplicas, TwinRun

__all__: list[str] = []

_MOST = 5  # Candidates to patch, one pass each. Arbitrary.

RANDOM = "it draws random numbers, which differ in replicas, and may be meant to; switch that off to compare the rest"
SEEDED = "it draws the same random numbers in each replica, because of a seed or a generator of its own"
CHANGES = "it returns something else each time: look for state, a generator of its own, or the time"

# The message about a faulty line or "", its operation if one is at fault, and the cause of the fault or "".
Line = tuple[str, Operation | None, str]


def line_of_call(check: Check, index: int, key: tuple[str, int], number: int) -> Line:
    """Return the line where the module call `key` of replica `number` goes wrong in pass `index`."""
    one = RecordOperations(check.dtype, key)
    TwinRun(check, True, index).take(index, "output", [one])

    def take(accepts: Accepts) -> CorrectOperations | None:
        modes = [CorrectOperations(one, [rows], accepts) for rows in check.rows]
        with suppress(FailsInReplicas):  # A patched result may have a wrong shape for later operations.
            TwinRun(check, False, index).take(index, "output", modes)
            return modes[number]
        return None

    if not one.operations:  # A module of torch runs no user code.
        return f"it begins with {one.caller}" if one.caller else "", None, ""
    text, operation = _search(take, number)
    return text, operation, _cause(check, index, key, operation) if operation else ""


def line_of_gradient(check: Check, index: int, name: str) -> str:
    """Return the line in a hook or autograd function where the gradient `name` goes wrong in the backward pass."""

    def gradient(is_one: bool, mode: RecordOperations | CorrectOperations) -> Any:
        side = TwinRun(check, is_one, index)
        side.backward_mode = mode
        return side.take(index)["gradient"][name]

    def take(accepts: Accepts) -> CorrectOperations | None:
        mode = CorrectOperations(one, check.rows, accepts)
        with suppress(FailsInReplicas):
            mode.output = gradient(False, mode)
            mode.is_right = agree(mode.output, expected)
            return mode
        return None

    one = RecordOperations(check.dtype, None)
    expected = gradient(True, one)
    text, operation = _search(take) if one.operations else ("", None)
    return f"{text}: {RANDOM}" if operation and operation.on_one and operation.on_one.draws else text


def _search(take: Callable[[Accepts], CorrectOperations | None], number: int = 0) -> tuple[str, Operation | None]:
    """Return (message, operation) for the first line with a proven effect, or ("", None).

    Args:
        take: runs a pass with the accepted operations patched, and returns the mode of the replica with the wrong
            result, or None if the pass fails.
        number: number of this replica.
    """

    def patch_alone(operation: Operation) -> CorrectOperations | None:
        return take(lambda other: other.place == operation.place)

    as_it_is, together = take(lambda _: False), take(Operation.gets_the_same_floats)
    if as_it_is is None:
        return "", None
    candidates = [*filter(Operation.gets_the_same_floats, together.candidates.values() if together else ())]
    for operation in candidates[:_MOST]:
        alone = patch_alone(operation)
        # Alone, it repairs the output; or all candidates together do, and this candidate contributes.
        contributes = alone and together and together.is_right and not agree(alone.output, as_it_is.output)
        if alone and (alone.is_right or contributes):
            return _line_of(operation)
    for operation in [*as_it_is.candidates.values()][:_MOST]:
        alone = patch_alone(operation)
        if alone and alone.is_right and (origin := _origin_of(operation)):
            return _line_of(origin)
    return _other_way(as_it_is, number)


def _origin_of(operation: Operation) -> Operation | None:
    """Return the operation that gave another operation its different input, if it is certain."""
    roots = operation.roots()
    root = next(iter(roots)) if len(roots) == 1 else None
    if any(root and root.synchronizes for root in roots):
        return None  # The inputs agree in this replica, so the fault lies in another one.
    if root and not root.fits and root.has_size_of_values():  # It selects rows by values, perhaps correctly.
        root = None if any(here and here.fits for here, _ in operation.origins()) else operation
    # A call of a faulty submodule would have been found before.
    return root if root and (root is not operation or operation.called) else None


def _line_of(operation: Operation) -> tuple[str, Operation]:
    """Return the message about the line of a faulty operation, and the operation with this line."""
    numbers = operation.numbers()[:2]
    if (pairs := operation.pairs) and not numbers:
        return f"it begins with {pairs.place}, two dimensions of which are samples", pairs
    got = ["another tensor than on one device"] if operation.gets_another() else []
    got += [f"{_number(here)} in place of {_number(there)}" for here, there in numbers]
    return f"it begins with {operation.place}{', which gets ' if got else ''}{' and '.join(got)}", operation


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _other_way(mode: CorrectOperations, number: int) -> tuple[str, Operation | None]:
    """Return (message, operation) for a line that only the replica, or only one device, ran, or ("", None).

    The search goes back from the output of the observed call to the first operation with another counterpart.
    """
    operation = here = there = mode.of_output
    while operation and len(origins := {*operation.origins()}) == 1:
        ((here, there),) = origins
        operation = here if here and here.on_one is there else None
    if here and there and here.place == there.place:
        times, times_there = mode.times[here.place], mode.one.times[here.place]
        is_last = (here.number, there.number) == (times - 1, times_there - 1)
        text = f"it begins with {here.place}, which runs {times} times in place of {times_there}"
        return (text, replace(here, on_one=None)) if is_last and times != times_there else ("", None)
    sides = [(there, mode.times, "one device"), (here, mode.one.times, f"replica {number}")]
    ways = [(made, f"{who} runs {made.place}") for made, other, who in sides if made and made.place not in other]
    text = f"it goes another way: {', '.join([way for _, way in ways])}"
    return (text, replace(ways[0][0], on_one=None)) if ways else ("", None)


def _cause(check: Check, index: int, key: tuple[str, int], operation: Operation) -> str:
    """Return the cause if it is state or random numbers, or "".

    One device runs the pass once more with the same seed, then with another seed. Results with the same seed differ if
    state changes them. Results with another seed differ if random numbers change them.
    """
    side = TwinRun(check, True, index, is_moved=False)  # All three passes need the same parameters.
    first, again, other = (RecordOperations(check.dtype, key) for _ in range(3))
    for seed, mode in ((index, first), (index, again), (index + 1, other)):
        side.take(seed, "output", [mode])
    with suppress(LookupError):  # The operation may not run again.
        if _varies(operation, first, again):
            return CHANGES
        if _varies(operation, again, other):
            return RANDOM
    return SEEDED if operation.on_one and operation.on_one.draws else ""


def _varies(operation: Operation, before: RecordOperations, after: RecordOperations) -> bool:
    """Return whether the result of an operation changes between two passes with the same inputs of the call."""
    if not agree(before.arguments, after.arguments) or operation.on_one is None:
        return agree(before.arguments, after.arguments) and before.times != after.times
    number = operation.on_one.number
    then, now = (mode.operations[operation.place][number] for mode in (before, after))
    made = [leaves for leaves in leaves_by_path(now.arguments, then.arguments, WHOLE) if id(leaves[0]) in after.makers]
    return all(agree(*leaves) for leaves in made) and not agree(now.result, then.result)
