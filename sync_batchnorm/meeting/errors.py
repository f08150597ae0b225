"""Errors for replicas that cannot exchange, and functions that prepare the error of a replica for the user."""

import re
from traceback import TracebackException, format_tb

__all__ = ["ReplicaSyncError"]


class ReplicaSyncError(RuntimeError):
    """A replica cannot continue, for example because another replica failed, ended early, or waits in another layer.

    A `RuntimeError`; after the `timeout` of the wrapper also a `TimeoutError`. See the page "Troubleshooting".
    """


class ReplicaTimeoutError(ReplicaSyncError, TimeoutError):
    """A replica waited for longer than the ``timeout`` of the wrapper, and no replica failed."""


def strip_frames(error: BaseException, who: str, fact: str = "") -> BaseException:
    """Replace the traceback of a replica's exception by a note with the same text, and return the exception.

    The frames of the traceback would keep activations alive. The causes and contexts of the exception lose their
    frames, too. The note also names the replica, `who`, and contains the text `fact`.

    If an earlier forward pass raised the same exception object, its note is replaced.
    """
    notes = vars(error).get("__notes__", [])
    # No note can be added if the user set `__notes__` to a value other than a list. Then keep the traceback as it is.
    if not isinstance(notes, list):
        return error
    try:
        formatter = TracebackException.from_exception(error)
        formatter.__notes__ = None  # The exception keeps its notes, so leave them out of the traceback's text.
        text = "".join(formatter.format())
    except Exception:  # Python cannot format every exception: a SyntaxError without a line fails.
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
