"""The errors of replicas: their classes, and how an exception goes from the thread of a replica to the caller."""

from __future__ import annotations

import copy
import sys
import traceback

__all__ = ["ReplicaSyncError"]


class ReplicaSyncError(RuntimeError):
    """A replica cannot exchange because a peer failed, ended early, waits in another exchange, or did not call.

    The message names the layer, the number of the call, the replicas and their devices, and what to do. The message is
    the only argument, so that the error can be rebuilt in another thread or process from its text.
    """


class ReplicaTimeoutError(ReplicaSyncError, TimeoutError):
    """No replica failed, but one did not call within the ``timeout`` of the wrapper, in seconds."""


class _KeyErrorText(str):
    """The text of a rebuilt `KeyError`, which would otherwise print its line breaks escaped."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class CapturedError:
    """An exception on its way from the thread of a replica to the caller's.

    It keeps only type and text: a stored exception would keep the frames of the failed forward alive, and with them all
    their tensors. An exception that is no `Exception` (`KeyboardInterrupt`, `SystemExit`) has a meaning beyond its
    text, so a copy without frames is kept.
    """

    def __init__(self, error: BaseException, replica_id: int, device: str) -> None:
        self._type = type(error)
        try:
            original = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            if sys.version_info < (3, 11):  # Its tracebacks have no notes.
                original += "".join(f"{note}\n" for note in vars(error).get("__notes__", ()))
        except Exception:  # Peers must be released even if the error of a replica cannot be shown.
            original = f"{type(error).__name__}: its text and traceback could not be made"
        self._text = f"Caught {type(error).__name__} in replica {replica_id} on device {device}.\nOriginal {original}"
        self._twin = None if isinstance(error, Exception) else _without_frames(error)

    def rebuild(self) -> BaseException:
        """Return the exception to raise in the caller: the original type, with the traceback of the replica as text.

        A type that cannot be made from one string becomes a `RuntimeError` with the same text, as in
        `torch.nn.parallel.parallel_apply`.
        """
        if self._twin is not None:
            return self._twin
        text = _KeyErrorText(self._text) if issubclass(self._type, KeyError) else self._text
        try:
            rebuilt = self._type(text)
            faithful = isinstance(rebuilt, Exception) and self._text in str(rebuilt)
        except Exception:
            faithful = False
        return rebuilt if faithful else RuntimeError(self._text)


def _without_frames(error: BaseException) -> BaseException:
    try:
        twin = copy.copy(error)  # It is made from the arguments, without a traceback; `error` keeps its own.
    except Exception:
        return error.with_traceback(None)
    return twin if type(twin) is type(error) else error.with_traceback(None)


def add_note(error: Exception, note: str) -> None:
    """Add a note to what is printed of `error`; on Python 3.10, only a `CapturedError` of it shows the note."""
    # As `BaseException.add_note` does from Python 3.11 on; but this also works if the type forbids setting attributes.
    vars(error).setdefault("__notes__", []).append(note)


def is_caused_by(error: BaseException | None, text: str) -> bool:
    """Return whether `error` is a `ReplicaSyncError` with `text`, or was raised while one was handled."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        if isinstance(link, ReplicaSyncError) and text in str(link):
            return True
        seen.add(id(link))
        todo += [link.__cause__, link.__context__]
    return False
