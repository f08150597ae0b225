"""What goes wrong between replicas: the exception classes, and how an exception travels between threads."""

import traceback

__all__ = ["ReplicaSyncError"]


class ReplicaSyncError(RuntimeError):
    """A replica cannot go on because its peers failed, left, disagree, or did not come.

    The message names the layer, the number of the call, the replicas and their devices, and what to do. It is the only
    argument, so that the error can be rebuilt in another thread or process from its text.
    """


class ReplicaTimeoutError(ReplicaSyncError, TimeoutError):
    """Nobody failed, but somebody did not come within the ``timeout`` of the wrapper."""


class _KeyErrorText(str):
    """The text of a rebuilt `KeyError`, which would otherwise print its line breaks escaped."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Caught:
    """An exception on its way from the thread of a replica to the caller's.

    It keeps type and text only: a stored exception would keep the frames of the failed forward alive, and with them
    every tensor in them. What is not an `Exception` (`KeyboardInterrupt`, `SystemExit`) carries meaning beyond its
    text, so that object itself travels, without its frames.
    """

    def __init__(self, error: BaseException, replica_id: int, device: str) -> None:
        self.replica_id = replica_id
        self._type = type(error)
        self._text = (
            f"Caught {type(error).__name__} in replica {replica_id} on device {device}.\n"
            f"Original {''.join(traceback.format_exception(type(error), error, error.__traceback__))}"
        )
        self._itself = None if isinstance(error, Exception) else error.with_traceback(None)

    def rebuild(self) -> BaseException:
        """Return the exception to raise in the caller: the original type, with the traceback of the replica as text.

        A type that cannot be made from one string becomes a `RuntimeError` with the same text, as in
        `torch.nn.parallel.parallel_apply`.
        """
        if self._itself is not None:
            return self._itself
        text = _KeyErrorText(self._text) if issubclass(self._type, KeyError) else self._text
        try:
            rebuilt = self._type(text)
            faithful = isinstance(rebuilt, Exception) and self._text in str(rebuilt)
        except Exception:
            faithful = False
        return rebuilt if faithful else RuntimeError(self._text)
