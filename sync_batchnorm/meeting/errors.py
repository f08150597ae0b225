"""Errors of replicas that cannot exchange, and the preparation of a replica's error for the caller."""

import re
from contextlib import suppress
from traceback import TracebackException, format_tb

__all__ = ["ReplicaSyncError"]


class ReplicaSyncError(RuntimeError):
    """A replica cannot continue, for example because another one failed, ended early, or waits in another layer.

    A `RuntimeError`; after the `timeout` of the wrapper also a `TimeoutError`. See the page "Troubleshooting".
    """


class ReplicaTimeoutError(ReplicaSyncError, TimeoutError):
    """A replica waited for longer than the ``timeout`` of the wrapper, and no replica failed."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Exceptions that refuse notes, such as frozen dataclasses, stay without it."""
    with suppress(Exception):
        error.add_note(note)


def strip_frames(error: BaseException, who: str, fact: str = "") -> BaseException:
    """Remove the frames of an exception from the replica `who`, because they hold activations; return the exception.

    Its traceback becomes the text of a note, after the `fact`, if one is given. If an earlier forward pass raised the
    same object, the new note replaces the earlier one. Causes and contexts lose their frames, too.
    """
    notes = vars(error).get("__notes__", [])
    if not isinstance(notes, list):  # A user has set another value: keep the traceback.
        return error
    try:
        formatter = TracebackException.from_exception(error)
        formatter.__notes__ = None  # The notes stay notes, and must not be in the text as well.
        text = "".join(formatter.format())
    except Exception:  # Python cannot format every error, such as a SyntaxError without a line.
        text = "".join(format_tb(error.__traceback__))
    others = [note for note in notes if not re.match(r"Caught \w+ in replica \d+ ", str(note))]
    caught = "\n".join(filter(None, [f"Caught {type(error).__name__} in {who}.", fact, text.rstrip()]))
    vars(error)["__notes__"] = [*others, caught]
    to_visit: list[BaseException | None] = [error]
    visited: set[int] = set()
    while to_visit:
        link = to_visit.pop()
        if link is not None and id(link) not in visited:
            visited.add(id(link))
            BaseException.with_traceback(link, None)
            to_visit += link.__cause__, link.__context__
            to_visit += link.exceptions if isinstance(link, BaseExceptionGroup) else ()
    return error
