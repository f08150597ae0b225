"""The errors of replicas that cannot exchange."""

__all__ = ["ReplicaSyncError"]


class ReplicaSyncError(RuntimeError):
    """A replica cannot exchange because a peer failed, ended early, waits in another exchange, or did not call.

    Its only argument is the message, which names the layer, the call, the replicas, their devices, and what to do.
    """


def add_note(error: BaseException, text: str) -> None:
    """Add a line to the traceback of `error`, as its method of Python 3.11, which older ones do not show."""
    vars(error).setdefault("__notes__", []).append(text)


class ReplicaTimeoutError(ReplicaSyncError, TimeoutError):
    """No replica failed, but one did not call within the ``timeout`` of the wrapper, in seconds."""
