"""Find the source line where a module call in a replica first goes wrong.

The problem: a module gets the right inputs in a replica, and returns a wrong output. Which line of its code is wrong?

The obvious way is to compare each intermediate result with one device, and to name the first different result. This
fails, because a different result may be harmless. For example, the maximum of a chunk differs from the maximum of the
batch, but does no harm if it is only logged, or subtracted before a softmax. After the faulty line, all results differ
anyway.

Our way is to correct results, and to see whether the output of the call becomes right:

    one device   x -> x.max() -> x - m -> .exp() -> z / z.sum()    recorded
    replica 1    x -> x.max() -> x - m -> .exp() -> z / z.sum()    run again, with the same modes, seeds and state
                      ^                                 ^
                      candidates (same inputs as on one device, different results)

    pass 1   Patch all candidates with the rows from one device, so that later operations get correct inputs.
    pass 2   Patch `max` alone: the output of the call stays wrong, so `max` is innocent.
    pass 3   Patch `sum` alone: the output is right. The difference begins with `sum`.

If two lines are faulty, the message names the first one that has an effect on the output. Two kinds of operations are
patched last. Operations of the first kind have a wrong input. If the patch of such an operation makes the output right,
the message names the operation that made this input. Operations of the second kind have an integer result, such as the
index of a row, which may be correct although it differs from one device. If nothing is certain, the message names no
line.

The code of this file runs only after the check has found a difference.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .compare_operations import Accepts, CorrectOperations, Operation, RecordOperations
from .compare_passes import Check, FailsInReplicas, TwinRun
from .compare_tensors import SCALARS, WHOLE, agree, leaves_by_path

__all__: list[str] = []

# At most this number of operations is tested, each in a pass of its own. The number is arbitrary.
_MOST = 5

RANDOM = "it draws random numbers, which differ in replicas, and may be meant to; switch that off to compare the rest"
SEEDED = "it draws the same random numbers in each replica, because of a seed or a generator of its own"
CHANGES = "it returns something else each time: look for state, a generator of its own, or the time"

# The result of a search for a faulty line: (message or "", faulty operation or None, cause or "").
Line = tuple[str, Operation | None, str]


def line_of_call(check: Check, index: int, key: tuple[str, int], number: int) -> Line:
    """Return the source line where a module call in a replica goes wrong.

    Args:
        check: the model and options of the check.
        index: number of the pass.
        key: name of the module, and number of its earlier calls in the pass.
        number: number of the replica.
    """
    one = RecordOperations(check.dtype, key)
    TwinRun(check, True, index).take(index, "output", [one])

    def take(accepts: Accepts) -> CorrectOperations | None:
        modes = [CorrectOperations(one, [rows], accepts) for rows in check.rows]
        # A replaced result may have a new shape, and a later operation may raise an error for this shape.
        with suppress(FailsInReplicas):
            TwinRun(check, False, index).take(index, "output", modes)
            return modes[number]
        return None

    if not one.operations:  # There is no line of the user, for example in a module of torch.
        return f"it begins with {one.caller}" if one.caller else "", None, ""
    text, operation = _search(take, number)
    return text, operation, _cause(check, index, key, operation) if operation else ""


def line_of_gradient(check: Check, index: int, name: str) -> str:
    """Return a message about the line where a gradient goes wrong in the backward pass, or "".

    The line belongs to a hook, or to the backward method of a custom autograd function.

    Args:
        check: the model and options of the check.
        index: number of the pass.
        name: name of the parameter or input with the wrong gradient.
    """

    def take(accepts: Accepts) -> CorrectOperations | None:
        mode = CorrectOperations(one, check.rows, accepts)
        with suppress(FailsInReplicas):
            mode.output = TwinRun(check, False, index).take(index, in_backward=mode)["gradient"][name]
            mode.is_right = agree(mode.output, expected)
            return mode
        return None

    one = RecordOperations(check.dtype, None)
    expected = TwinRun(check, True, index).take(index, in_backward=one)["gradient"][name]
    text, operation = _search(take) if one.operations else ("", None)
    return f"{text}: {RANDOM}" if operation and operation.on_one and operation.on_one.draws else text


def _search(take: Callable[[Accepts], CorrectOperations | None], number: int = 0) -> tuple[str, Operation | None]:
    """Return (message, operation) for the first line with an effect on the output, or ("", None).

    Args:
        take: runs a pass with patches for the accepted operations. Returns the function mode of the replica with the
            wrong output, or None after an error.
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
        # To test an operation, replace its result by the right result (a patch). If this makes the output right, the
        # operation is named. If it only changes the output, the operation is named if the patches of all operations
        # together make the output right.
        contributes = alone and together and together.is_right and not agree(alone.output, as_it_is.output)
        if alone and (alone.is_right or contributes):
            return _line_of(operation)
    for operation in [*as_it_is.candidates.values()][:_MOST]:
        if (alone := patch_alone(operation)) and alone.is_right and (origin := _origin_of(operation)):
            return _line_of(origin)
    return _line_not_run(as_it_is, number)


def _origin_of(operation: Operation) -> Operation | None:
    """Return the operation where the wrong input of `operation` comes from, or None if this is not certain."""
    roots = operation.roots()
    root = next(iter(roots)) if len(roots) == 1 else None
    if any(root and root.synchronizes for root in roots):
        # The wrong input comes from a synchronized layer, whose own input is right in this replica. So the fault lies
        # in another replica.
        return None
    # If `root` selects rows by their values, like `nonzero`, its result may be right although it has another shape than
    # on one device.
    if root and not root.fits and root.has_size_of_values():
        root = None if any(here and here.fits for here, _ in operation.origins()) else operation
    # If `operation` itself is the call of a submodule, do not return it. All module calls were compared before this
    # search, so this call is known to be correct.
    return root if root and (root is not operation or operation.called) else None


def _line_of(operation: Operation) -> tuple[str, Operation]:
    """Return (message, operation) for a faulty operation.

    If an input of the operation is a similarity matrix, the message names the operation that made the matrix.
    """
    numbers = [pair for pair in operation.different_inputs if isinstance(pair[0], SCALARS)][:2]
    if (pairs := operation.pairs) and not numbers:
        return f"it begins with {pairs.place}, two dimensions of which are samples", pairs
    got = ["another tensor than on one device"] if operation.gets_another() else []
    for pair in numbers:
        got.append(
            " in place of ".join([f"{number:.4g}" if isinstance(number, float) else repr(number) for number in pair])
        )
    return f"it begins with {operation.place}{', which gets ' if got else ''}{' and '.join(got)}", operation


def _line_not_run(mode: CorrectOperations, number: int) -> tuple[str, Operation | None]:
    """Return (message, operation) for a line that either one device or the replica has not run, or ("", None).

    Follow the operations back from the output of the module call, as long as each was run both in the replica and on
    one device.
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
    """Return the cause of a fault if the cause is state or random numbers, otherwise "".

    One device runs the pass twice with the same seed, then once with another seed. If the result of the operation
    differs for the same seed, the cause is state. If it differs for another seed, the cause is random numbers.
    """
    side = TwinRun(check, True, index, is_moved=False)  # All three passes need the same parameters.
    first, again, other = (RecordOperations(check.dtype, key) for _ in range(3))
    for seed, mode in ((index, first), (index, again), (index + 1, other)):
        side.take(seed, "output", [mode])
    with suppress(LookupError):  # In some of the passes, the operation may not have run.
        if _varies(operation, first, again):
            return CHANGES
        if _varies(operation, again, other):
            return RANDOM
    return SEEDED if operation.on_one and operation.on_one.draws else ""


def _varies(operation: Operation, before: RecordOperations, after: RecordOperations) -> bool:
    """Return whether an operation returns different results in two passes.

    Return False if different inputs reached the surrounding module call.
    """
    if not agree(before.arguments, after.arguments) or operation.on_one is None:
        return agree(before.arguments, after.arguments) and before.times != after.times
    number = operation.on_one.number
    then, now = (mode.operations[operation.place][number] for mode in (before, after))
    made = [leaves for leaves in leaves_by_path(now.arguments, then.arguments, WHOLE) if id(leaves[0]) in after.makers]
    return all(agree(*leaves) for leaves in made) and not agree(now.result, then.result)
