"""The errors of replicas that cannot exchange, and how the error of a replica is handed to the caller."""

import re
from contextlib import suppress
from traceback import TracebackException, format_tb

__all__ = ["ReplicaSyncError"]


class ReplicaSyncError(RuntimeError):
    """A replica cannot continue, for example because another one failed, ended early, or waits in another layer.

    It is a `RuntimeError`, and can be raised wherever replicas wait for each other. Its only argument is the message;
    the page "Troubleshooting" has the remedies. After the `timeout` of the wrapper, it is also a `TimeoutError`.
    """


class ReplicaTimeoutError(ReplicaSyncError, TimeoutError):
    """No replica failed, but one did not call within the ``timeout`` of the wrapper, in seconds."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless it refuses notes, as one does that is a frozen dataclass."""
    with suppress(Exception):
        error.add_note(note)


def without_frames(error: BaseException, who: str, fact: str = "") -> BaseException:
    """Return `error`, which the replica `who` raised, without its frames, since they hold activations.

    A note has the `fact`, if there is one, and the traceback as text. It replaces that of an earlier forward pass,
    which raised the same object.
    """
    notes = vars(error).get("__notes__", [])
    if not isinstance(notes, list):  # A user has set something else: then it keeps its traceback.
        return error
    try:
        shown = TracebackException.from_exception(error)
        shown.__notes__ = None  # They stay notes.
        text = "".join(shown.format())
    except Exception:  # as for a SyntaxError that has no line
        text = "".join(format_tb(error.__traceback__))
    others = [note for note in notes if not re.match(r"Caught \w+ in replica \d+ ", str(note))]
    caught = "\n".join(filter(None, [f"Caught {type(error).__name__} in {who}.", fact, text.rstrip()]))
    vars(error)["__notes__"] = [*others, caught]
    ahead: list[BaseException | None] = [error]
    seen: set[int] = set()
    while ahead:
        one = ahead.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            BaseException.with_traceback(one, None)
            ahead += one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())
    return error
