"""The errors of replicas that cannot exchange."""

__all__ = ["ReplicaSyncError"]


class ReplicaSyncError(RuntimeError):
    """A replica cannot exchange because a peer failed, ended early, waits in another exchange, or did not call.

    The message names the layer, the number of the call, the replicas and their devices, and what to do. The message is
    the only argument, so that the error can be rebuilt in another thread or process from its text.
    """


def add_note(error: BaseException, text: str) -> None:
    """Add a line to the traceback of `error`, as its method of Python 3.11, which older ones do not show."""
    vars(error).setdefault("__notes__", []).append(text)


class ReplicaTimeoutError(ReplicaSyncError, TimeoutError):
    """No replica failed, but one did not call within the ``timeout`` of the wrapper, in seconds."""
